"""The published JSON Schemas: what commands write is what they say, in every kind of run; and anything else is not."""

from __future__ import annotations

import copy
import json
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from typer.testing import CliRunner

from alphaprof.cli.app import app
from alphaprof.commands.check import checked
from alphaprof.commands.compare import compare
from alphaprof.commands.latency import Latency
from alphaprof.commands.predict import EngineRate, build_prediction
from alphaprof.commands.trees import build_trees
from alphaprof.errors import OptionInvalid
from alphaprof.render.json import Published, json_schema, published, render_json
from alphaprof.report.build import build_report
from alphaprof.run.reader import Run, side_of
from alphaprof.stats.formulas import RoundCost
from tests.commands import test_validate
from tests.reporting import HOSTILE
from tests.synthetic import Domain, Recipe, interrupted, write_run

MADE = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "make_schemas.py"))
STORY = Domain(documents=12, temperature=0.7, continuation="sampled", alpha=0.5)
RULES = ("strict", "lossless", "one_hot", "additive_0p1", "tree_2")
RECIPES = {
    "greedy": Recipe(),
    "sampled": Recipe({"story": STORY}, rules=RULES, lookups=("ngram",)),
    "lossy": Recipe(rules=("additive_0p1", "typical_0p09_0p3"), decision={"rule": "additive_0p1"}),
    "certificates": Recipe(rules=("strict", "tree_2"), certificates=True, drafts={"small": 0.0, "poor": -0.3}),
    "both kinds, certified": Recipe({"story": STORY, "code": Domain()}, rules=("strict", "one_hot"), certificates=True),
    "prompt lookup alone": Recipe(drafts={}, lookups=("ngram",), certificates=True),
    "no step times": Recipe(latency=False),
    "one document": Recipe({"code": Domain(documents=1)}),
    "perfect draft": Recipe({"code": Domain(alpha=1.0, spread=0.0)}),
    "hopeless draft": Recipe({"code": Domain(alpha=0.0, spread=0.0, coverage=0.0)}),
    "off-policy": Recipe({"corpus": Domain(continuation="text", on_policy=False)}),
    "thinking": Recipe({"code": Domain()}, thinking=0.5),
    "draft head": Recipe({"story": STORY, "code": Domain()}, rules=RULES, heads={"head": {}}, certificates=True),
    "hostile names": Recipe({name: Domain(documents=3) for name in HOSTILE.values() if name}),
}


def recorded(folder: Path) -> Callable[[str], Run]:
    """Synthetic runs by the name of their recipe, each written once."""
    runs: dict[str, Run] = {}

    def of(name: str) -> Run:
        if name not in runs:
            runs[name] = write_run(folder / str(len(runs)), RECIPES[name])
        return runs[name]

    return of


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    return recorded(tmp_path_factory.mktemp("formats"))


def judged(name: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json.loads(json_schema(name)))


def assert_valid(answer: Published) -> Any:
    content = json.loads(render_json(answer), parse_constant=pytest.fail)
    judged(answer.format.removeprefix("alphaprof-")).validate(content)
    return content


@pytest.mark.parametrize("name", published())
def test_a_schema_is_a_schema_and_knows_its_own_version(name: str) -> None:
    schema = json.loads(json_schema(name))
    jsonschema.Draft202012Validator.check_schema(schema)
    answer = next(answer for answer in MADE["ANSWERS"] if f"alphaprof-{name}" == answer.format)
    assert schema["properties"]["format"]["const"] == answer.format
    assert schema["properties"]["schema_version"]["const"] == answer.version


def test_every_answer_has_a_schema() -> None:
    """Formats are what the classes of alphaprof say they write."""
    folder = Path(__file__).parents[2] / "alphaprof"
    formats = re.findall(
        r'^    format: ClassVar\[str\] = "(.*)"$', "\n".join(map(Path.read_text, folder.rglob("*.py"))), re.M
    )
    assert sorted(formats) == [f"alphaprof-{name}" for name in published()]


def test_every_field_says_what_it_means() -> None:
    """In a comment behind it, in the docstring of its class, or by a name that means one thing everywhere."""
    assert MADE["undescribed"]() == []


@pytest.mark.parametrize("name", RECIPES)
def test_the_report_of_every_kind_of_run_is_valid(runs: Callable[[str], Run], name: str) -> None:
    assert_valid(build_report(runs(name)))


def test_reports_of_other_questions_are_valid(runs: Callable[[str], Run], tmp_path: Path) -> None:
    assert_valid(build_report(runs("greedy"), rules=["tree_3"]))
    assert_valid(build_report(interrupted(runs("greedy"), tmp_path / "killed", 1)))


def wrong(report: Any) -> dict[str, Any]:
    """Reports with one mistake each."""
    found = {}

    def changed(name: str, change: Callable[[Any], object]) -> None:
        found[name] = copy.deepcopy(report)
        change(found[name])

    def gamma(content: Any) -> Any:
        return content["results"][0]["gammas"][0]

    changed("another format", lambda content: content.update(format="alphaprof-check"))
    changed("a field more", lambda content: content["traffic"].update(mood="good"))
    changed("a field less", lambda content: content["results"][0].pop("coverage"))
    changed("another verdict", lambda content: content["traffic"].update(verdict="MAYBE"))
    changed("not a number", lambda content: gamma(content)["speedup"].update(high="nan"))
    changed("a null that cannot be", lambda content: content["results"][0].update(documents=None))
    return found


def test_a_wrong_report_is_not_valid(runs: Callable[[str], Run]) -> None:
    report = json.loads(render_json(build_report(runs("greedy"))))
    accepted = [name for name, content in wrong(report).items() if judged("report").is_valid(content)]
    assert accepted == []


def test_checks_and_comparisons_are_valid(runs: Callable[[str], Run]) -> None:
    run, sampled = runs("certificates"), runs("sampled")
    assert_valid(checked(run.path, None, None, None, {}, None, 0.03, False))
    least = {"alpha": ["0.5"], "acceptance_length": ["code=1.2"], "speedup": []}
    against = [(run.path, "small", least, None), (run.path, "poor", {}, f"{run.path}:small")]
    for path, draft, minimums, baseline in against:
        assert_valid(checked(path, draft, None, None if baseline else 2, minimums, baseline, 0.03, False))
    for path, first, second in ((run.path, "small", "poor"), (sampled.path, "small", "ngram")):
        assert_valid(compare(side_of(f"{path}:{first}"), side_of(f"{path}:{second}")))


@pytest.mark.parametrize("name", ["certificates", "sampled", "one document", "off-policy"])
def test_trees_are_valid(runs: Callable[[str], Run], name: str) -> None:
    report = build_trees(side_of(f"{runs(name).path}:small"), [2, 4])
    assert_valid(report)


@pytest.mark.parametrize("acceptance", [0.0, 0.75, 1.0, EngineRate(0.5, 4)])
def test_predictions_are_valid(acceptance: float | EngineRate) -> None:
    assert_valid(build_prediction(acceptance, RoundCost(0.3)))


def test_what_runs_models_writes_valid_json(runs: Callable[[str], Run], tmp_path: Path) -> None:
    """From decodings that were made up: no model runs."""
    assert_valid(Latency.of(runs("greedy")))
    assert_valid(Latency.of(runs("no step times")))
    assert_valid(test_validate.compared(tmp_path / "exact"))
    assert_valid(test_validate.compared(tmp_path, rule="additive_0p1"))


def test_the_command_prints_a_schema_or_says_which_there_are() -> None:
    result = CliRunner().invoke(app, ["schema", "--of", "report"])
    assert (result.exit_code, result.stdout) == (0, json_schema("report"))
    with pytest.raises(OptionInvalid) as caught:
        json_schema("reports")
    assert ", ".join(published()) in caught.value.hint
