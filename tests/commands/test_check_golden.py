"""Published acceptance lengths as yardsticks: a file of each format that the run holds, one that it misses, and bad ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from alphaprof.commands.check import Check, checked
from alphaprof.commands.export.rates import export_lengths, export_profile, export_rates
from alphaprof.config.golden import golden_lengths
from alphaprof.errors import AlphaprofError, OptionInvalid
from alphaprof.run.reader import Run, RunDraft
from tests.synthetic import Domain, Recipe, write_run

RECIPE = Recipe(
    domains={"code": Domain(documents=12, alpha=0.75), "chat": Domain(documents=12, alpha=0.4)},
    gammas=(1, 2, 3),
    lookups=("lookup",),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return write_run(tmp_path_factory.mktemp("golden") / "run", RECIPE)


def against(run: Run, tree: Any, path: Path, entry: str = "", gamma: int | None = None, draft: str = "small") -> Check:
    """The run held against a golden file of some content."""
    path.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree))
    return checked(run.path, draft, None, gamma, {}, None, 0.03, (), f"{path}{entry}")


def of_tensorrt(length: float) -> dict[str, Any]:
    """Its references, without a number of drafts."""
    return {"TestA::test": {"ref_al": length, "min_al": 0.95 * length}, "TestB::test[x]": {"ref_al": 1.0, "min_al": 1.0}}


def test_a_reference_of_tensorrt_llm_needs_its_entry_and_a_gamma(run: Run, tmp_path: Path) -> None:
    (rates,) = json.loads(export_rates(RunDraft(run, "small"), gamma=2).text)["gammas"]
    held = against(run, of_tensorrt(rates["acceptance_length"]), tmp_path / "al.yaml", "#TestA::test", 2)
    (item,) = held.items
    assert (held.outcome, item.value, item.gamma) == ("pass", rates["acceptance_length"], 2)
    assert (item.low, item.high) == tuple(rates["acceptance_length_all"][end] for end in ("low", "high"))
    missed = against(run, of_tensorrt(2.9), tmp_path / "al.yaml", "#TestA::test", 2)
    assert (missed.outcome, missed.reason) == ("fail", "0 of 1 golden lengths lie within the run's bounds")
    assert missed.items[0].note == "at gamma 2 the run is surely below the golden length 2.90"
    text = "\n".join(map(str, missed.blocks()))
    assert "golden" in text
    assert "at least" not in text
    with pytest.raises(OptionInvalid, match="does not say how many tokens were drafted"):
        against(run, of_tensorrt(1.5), tmp_path / "al.yaml", "#TestA::test")
    with pytest.raises(AlphaprofError, match="has 2 entries"):
        against(run, of_tensorrt(1.5), tmp_path / "al.yaml", gamma=2)


def test_curves_of_inferencex_are_compared_by_domain_and_gamma_at_one_confidence(run: Run, tmp_path: Path) -> None:
    """What export writes is held; one length moved far is missed, above; a mode that is no domain is named."""
    exported = export_lengths(RunDraft(run, "small")).text
    held = against(run, exported, tmp_path / "curves.yaml")
    assert (held.outcome, len(held.items)) == ("pass", 6)
    single = against(run, exported, tmp_path / "curves.yaml", gamma=1)
    wide, narrow = (next(i for i in found.items if (i.domain, i.gamma) == ("code", 1)) for found in (held, single))
    assert wide.low <= narrow.low < narrow.high < wide.high  # type: ignore[operator]
    curves = yaml.safe_load(exported)
    (model,) = (key for key in curves if key != "_metadata")
    curves[model]["code"][3] = 1.05
    curves[model]["thinking_on"] = {1: 1.5}
    missed = against(run, curves, tmp_path / "curves.yaml")
    assert (missed.outcome, missed.reason) == ("fail", "5 of 6 golden lengths lie within the run's bounds")
    assert "surely above the golden length 1.05" in str(next(i.note for i in missed.items if i.outcome == "fail"))
    assert [(left.domain, left.reason) for left in missed.unjudged] == [("thinking_on", "the run has no such domain")]
    assert 'message="' in missed.junit()
    assert "golden 1.05" in missed.junit()


def test_a_speculation_profile_is_held_by_both_of_its_producers_layouts(run: Run, tmp_path: Path) -> None:
    profile = json.loads(export_profile(RunDraft(run, "small")).text)
    held = against(run, json.dumps(profile, indent=2), tmp_path / "profile.json")
    assert (held.outcome, {(i.domain, i.gamma) for i in held.items}) == (
        "pass",
        {*(("whole traffic", gamma) for gamma in (1, 2, 3)), ("code", 3), ("chat", 3)},
    )
    brief = {key: profile[key] for key in ("schema_version", "num_speculative_tokens", "mean_accept_length")}
    (item,) = against(run, brief, tmp_path / "profile.json").items
    assert (item.threshold, item.gamma, item.outcome) == (profile["mean_accept_length"], 3, "pass")
    assert against(run, brief | {"mean_accept_length": 3.9}, tmp_path / "profile.json").outcome == "fail"


def test_lengths_of_lookup_count_rounds_with_a_draft(run: Run, tmp_path: Path) -> None:
    """As engines' metrics do: its rounds without a proposal have no part."""
    held = against(run, export_lengths(RunDraft(run, "lookup")).text, tmp_path / "curves.yaml", draft="lookup")
    assert held.outcome == "pass"
    for item in held.items:
        (rates,) = json.loads(export_rates(RunDraft(run, "lookup"), gamma=item.gamma, domain=item.domain).text)["gammas"]
        assert item.value == pytest.approx(rates["acceptance_length"], abs=1e-5)
        assert item.value > rates["acceptance_length_all"]["value"]


@pytest.mark.parametrize(
    "content",
    [
        "[1, 2]",
        "{}",
        "model: {mode: {1: 3.5}}",
        "model: {mode: {x: 1.5}}",
        "model: {mode: {true: 1.5}}",
        "model: {mode: {1: .nan}}",
        "model: {mode: {1: '1.5'}}",
        "model: {mode: []}",
        "test: {ref_al: 0.5}",
        "test: {ref_al: .inf}",
        "test: {ref_al: [1]}",
        "{mean_accept_length: 1.5, num_speculative_tokens: 0.5}",
        "{mean_accept_length: null, num_speculative_tokens: 3, measured: false}",
        "{mean_accept_length: 1.5, accept_length_by_k: [1]}",
        "{mean_accept_length: 1.5, accept_length_by_k: {'3': 9}}",
        "a: 1\na: 2",
    ],
)
def test_what_is_no_golden_file_is_refused_in_two_lines(content: str, tmp_path: Path) -> None:
    (path := tmp_path / "golden.yaml").write_text(content)
    with pytest.raises(AlphaprofError) as refused:
        golden_lengths(str(path))
    assert "\n" not in str(refused.value)
    assert refused.value.hint


def test_a_check_asks_one_question(run: Run, tmp_path: Path) -> None:
    with pytest.raises(OptionInvalid, match="cannot be combined"):
        checked(run.path, "small", None, None, {"alpha": ["0.5"]}, None, 0.03, (), "file.yaml")
    with pytest.raises(OptionInvalid, match="no rounds of gamma 7"):
        against(run, "model: {code: {7: 1.5}}", tmp_path / "curves.yaml")
