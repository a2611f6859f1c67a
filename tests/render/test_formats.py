"""JSON Schemas: what commands write is what they say, in every kind of run; and anything else is not."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from typer.testing import CliRunner

from alphaprof.cli.app import app
from alphaprof.commands.predict import EngineRate, build_prediction
from alphaprof.commands.schema import PUBLISHED, json_schema
from alphaprof.errors import OptionInvalid
from alphaprof.render.answer import answer_text
from alphaprof.render.json import Published, render_json
from alphaprof.report.build import Failed, RunReport, build_report
from alphaprof.report.sections import NAMES
from alphaprof.run.reader import Run
from alphaprof.stats.formulas import RoundCost
from tests.reporting import HOSTILE
from tests.synthetic import Domain, Recipe, write_run

STORY = Domain(documents=12, temperature=0.7, continuation="sampled", alpha=0.5)
RULES = ("strict", "lossless", "one_hot", "additive_0p1", "tree_2")
RECIPES = {
    "greedy": Recipe(),
    "sampled": Recipe({"story": STORY}, rules=RULES, lookups=("ngram",)),
    "lossy": Recipe(rules=("additive_0p1", "typical_0p09_0p3"), decision={"rule": "additive_0p1"}),
    "certificates": Recipe(rules=("strict", "tree_2"), certificates=True, drafts={"small": 0.0, "poor": -0.3}),
    "both kinds, certified": Recipe({"story": STORY, "code": Domain()}, rules=("strict", "one_hot"), certificates=True),
    "prompt lookup alone": Recipe(drafts={}, lookups=("ngram",), certificates=True),
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
    return jsonschema.Draft202012Validator(json_schema(name))


def assert_valid(answer: Published) -> Any:
    content = json.loads(render_json(answer), parse_constant=pytest.fail)
    judged(answer.format.removeprefix("alphaprof-")).validate(content)
    return content


def assert_report_valid(report: RunReport) -> Any:
    """With the values of all sections."""
    for name in NAMES:
        report.section(name)
    assert not any(isinstance(value, Failed) for value in report.sections.values())
    return assert_valid(report)


def parts(schema: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The objects that a schema describes, by name; the answer itself under an empty one."""
    return {"": schema} | schema.get("$defs", {})


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_schema_describes_every_field_that_is_written(name: str) -> None:
    schema = json_schema(name)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["properties"]["format"]["const"] == f"alphaprof-{name}"
    for part, content in parts(schema).items():
        assert content["required"] == list(content["properties"]), part
        assert content["type"] == "object"
        assert content["description"], part


def test_a_field_is_described_by_the_comment_behind_it() -> None:
    assert json_schema("report")["$defs"]["Interval"]["description"].startswith("A point estimate")
    assert json_schema("check")["properties"]["items"]["description"] == "one for each threshold and domain"
    said = json_schema("report")["$defs"]["Result"]["properties"]["sampling"]["description"]
    assert "null" in said
    assert "None" not in said


@pytest.mark.parametrize("name", RECIPES)
def test_the_report_of_every_kind_of_run_is_valid(runs: Callable[[str], Run], name: str) -> None:
    assert_report_valid(build_report(runs(name)))


def wrong(report: Any) -> dict[str, Any]:
    """Reports with one mistake each."""
    found = {}

    def changed(name: str, change: Callable[[Any], object]) -> None:
        found[name] = copy.deepcopy(report)
        change(found[name])

    def gamma(content: Any) -> Any:
        return content["sections"]["drafts"][0]["gammas"][0]

    changed("another format", lambda content: content.update(format="alphaprof-check"))
    changed("a field less", lambda content: content["sections"]["drafts"][0].pop("coverage"))
    changed("another verdict", lambda content: content["answer"].update(verdict="MAYBE"))
    changed("not a number", lambda content: gamma(content)["speedup"].update(high="nan"))
    changed("a null that cannot be", lambda content: content["answer"].update(documents=None))
    return found


def test_a_wrong_report_is_not_valid(runs: Callable[[str], Run]) -> None:
    report = assert_report_valid(build_report(runs("greedy")))
    accepted = [name for name, content in wrong(report).items() if judged("report").is_valid(content)]
    assert accepted == []


def test_infinite_bounds_and_unknown_fields_are_valid(runs: Callable[[str], Run]) -> None:
    """A head that lacks tokens has an infinite divergence; a later version may write more fields."""
    content = assert_report_valid(build_report(runs("draft head")))
    assert "inf" in [item["mean_divergence"] for item in content["sections"]["target"]["certificates"]["certificates"]]
    content["traffic"]["mood"] = "good"
    judged("report").validate(content)


@pytest.mark.parametrize("acceptance", [0.0, 0.75, 1.0, EngineRate(0.5, 4)])
def test_predictions_are_valid(acceptance: float | EngineRate) -> None:
    assert_valid(build_prediction(acceptance, RoundCost(0.3)))


def test_a_test_cannot_write_what_the_schema_does_not_allow() -> None:
    """The fixture that validates every JSON answer of the tests."""
    wrong = dataclasses.replace(build_prediction(0.5, RoundCost(0.3)), best_gamma="two")
    with pytest.raises(jsonschema.ValidationError):
        answer_text(wrong, "json")


def test_the_command_prints_a_schema_or_says_which_there_are() -> None:
    result = CliRunner().invoke(app, ["schema", "report"])
    assert (result.exit_code, json.loads(result.stdout)) == (0, json_schema("report"))
    with pytest.raises(OptionInvalid) as caught:
        json_schema("reports")
    assert ", ".join(PUBLISHED) in caught.value.hint
