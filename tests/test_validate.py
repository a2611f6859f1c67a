"""`alphaprof validate`: hand values of the comparison, a whole run on tiny models, and refusals in two lines."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alphaprof import cli
from alphaprof.analysis.measured import Decodings, Measured, Spread, decoded_rule, measured_speedup
from alphaprof.analysis.totals import Request
from alphaprof.analysis.totals_files import read_totals
from alphaprof.errors import DataEmpty, OptionInvalid, OutOfMemory, OutsideTolerance, ProfileInvalid
from alphaprof.log.schema import depth_names
from alphaprof.log.store import Run, run_directory
from alphaprof.report.render import render_validation
from alphaprof.report.validate import Validation, build_validation, require_within
from tests.synthetic import Recipe, write_run
from tests.test_cli_errors import assert_two_lines, profile, run

GAMMA = 2


def test_a_speedup_takes_the_median_of_each_document_and_divides_last() -> None:
    plain = np.array([[3.0, 10.0], [4.0, 20.0], [50.0, 12.0]])  # medians 4 and 12
    drafted = np.array([[1.0, 6.0], [2.0, 6.0], [9.0, 2.0]])  # medians 2 and 6
    found = measured_speedup(plain, drafted, np.array([5, 7]), np.array([5, 7]))
    assert found == Spread(2.0, 13 / 7, 62 / 11)


def test_a_spread_holds_its_value_where_every_repeat_was_slow_for_another_document() -> None:
    plain = np.full((3, 3), 4.0)
    drafted = 2.0 + 7.0 * np.eye(3)  # medians 2, sums of repeats 13
    assert measured_speedup(plain, drafted, np.ones(3), np.ones(3)) == Spread(2.0, 12 / 13, 2.0)


def test_texts_of_different_length_are_compared_by_the_token() -> None:
    found = measured_speedup(np.array([[6.0]]), np.array([[3.0]]), np.array([12]), np.array([4]))
    assert found is not None
    assert found.value == pytest.approx((6 / 12) / (3 / 4))


def test_without_tokens_there_is_no_speedup() -> None:
    zero = np.zeros((2, 1))
    assert measured_speedup(zero, zero, np.array([0]), np.array([0])) is None


@pytest.mark.parametrize(
    ("decision", "policy", "rule"),
    [
        ("auto", "greedy", "strict"),
        ("auto", "sampled", "one_hot"),
        ("lossless", "sampled", "lossless"),
        ("lossless", "greedy", "strict"),
        ("strict", "sampled", "one_hot"),
        ("additive_0p1", "greedy", "strict"),
        ("tree_2", "greedy", "strict"),
    ],
)
def test_texts_are_decoded_by_the_rule_of_the_verdict_where_it_keeps_them(decision: str, policy: str, rule: str) -> None:
    assert decoded_rule(decision, policy) == rule


def synthetic(folder: Path) -> Run:
    """A run of one draft, without models."""
    write_run(folder / "run", Recipe(drafts={"small": 0.0}))
    return Run.open(folder / "run")


def timed(run_: Run, factor: float) -> Measured:
    """Decodings whose rounds are those of the replay, and which are `factor` times as fast as predicted."""
    documents = run_.documents()
    numbers = documents["document"].to_numpy()
    totals = read_totals(run_, "small", Request(["strict"], run_.gammas)).to_pydict()
    rows = [index for index, rule in enumerate(totals["rule"]) if rule == "strict"]

    def column(name: str) -> Any:
        return np.array([totals[name][row] for row in rows])

    depths = {
        name: np.stack([column(each) for each in depth_names(name, GAMMA)], axis=1) for name in ("drafted", "accepted")
    }
    rounds, tokens = column(f"rounds_{GAMMA}"), column("tokens")
    times = {(row["model"], row["step"], row["tokens"]): row["median_ms"] / 1e3 for row in run_.latency().to_pylist()}
    exactly = np.column_stack([rounds, depths["drafted"]]) - np.column_stack([depths["drafted"], 0 * rounds])
    verify = sum(times["target", "verify" if m else "decode", m + 1] * exactly[:, m] for m in range(GAMMA + 1))
    draft = times["small", "draft", 1] * depths["drafted"].sum(1)
    spent = (verify + draft) / factor
    same = np.ones(len(numbers), dtype=bool)
    nothing = np.zeros((len(numbers), 0))

    def twice(values: Any) -> Any:
        return np.array([values, values])

    def way(name: str | None, gamma: int, wall: Any, share: tuple[Any, Any], counts: Any) -> Decodings:
        seconds = [twice(values) for values in (wall, 2 * wall, 0 * wall + 0.5, *share)]
        return Decodings(name, gamma, *seconds, tokens, *counts, same)

    plain = way(None, 0, tokens * times["target", "decode", 1], (0 * tokens, 0 * tokens), (tokens, nothing, nothing))
    counts = (rounds, depths["drafted"], depths["accepted"])
    drafted = way("small", GAMMA, spent, (draft / factor, verify / factor), counts)
    return Measured(numbers, ("strict",) * len(numbers), plain, (drafted,), 0, 0)


def compared(folder: Path, factor: float = 1.0, tolerance: float = 0.1) -> Validation:
    found = synthetic(folder)
    return build_validation(found, timed(found, factor), tolerance, kept=True)


def test_times_as_predicted_have_no_error(tmp_path: Path) -> None:
    found = compared(tmp_path)
    assert found.median_error == pytest.approx(0, abs=1e-9)
    assert found.worst_error == pytest.approx(0, abs=1e-9)
    for cell in found.cells:
        assert cell.tokens_per_round.predicted == pytest.approx(cell.tokens_per_round.measured)
        assert cell.same_text == cell.same_rounds == cell.documents
        assert cell.decode_ms.predicted == pytest.approx(cell.decode_ms.measured)
        assert cell.predicted_round_ms is not None
        assert cell.measured_round_ms is not None
        assert cell.measured_round_ms.draft == pytest.approx(cell.predicted_round_ms.draft)
        assert cell.measured_round_ms.verify == pytest.approx(cell.predicted_round_ms.verify)
        assert cell.measured_round_ms.other == pytest.approx(0, abs=1e-9)
        assert cell.prefill_ms == cell.plain_prefill_ms == 500
    assert sum(cell.documents for cell in found.cells) == found.documents == found.plain_same_text


@pytest.mark.parametrize("factor", [0.8, 1.25])
def test_the_error_is_predicted_over_measured(tmp_path: Path, factor: float) -> None:
    found = compared(tmp_path, factor)
    for cell in found.cells:
        assert cell.error == pytest.approx(1 / factor - 1)
        assert cell.cpu_error == pytest.approx(1 / factor - 1)
    assert (found.median_error, found.worst_error) == pytest.approx((abs(1 / factor - 1),) * 2)
    assert not found.within
    with pytest.raises(OutsideTolerance, match=r"off by 2[05]\.0% in the median, more than 10\.0%"):
        require_within(found)
    require_within(dataclasses.replace(found, tolerance=0.26))


def test_what_was_not_predicted_is_not_within_any_tolerance(tmp_path: Path) -> None:
    with pytest.raises(OutsideTolerance, match="no speedup was predicted"):
        require_within(dataclasses.replace(compared(tmp_path), median_error=None, tolerance=9.0))


def test_other_rounds_and_texts_are_counted(tmp_path: Path) -> None:
    whole = synthetic(tmp_path)
    measured = timed(whole, 1.0)
    (way,) = measured.drafted
    accepted, same = way.accepted.copy(), way.same_text.copy()
    accepted[0, -1] += 1
    same[:2] = False
    odd = dataclasses.replace(measured, drafted=(dataclasses.replace(way, accepted=accepted, same_text=same),))
    found = build_validation(whole, odd, 0.1, kept=False)
    assert sum(cell.documents - (cell.same_rounds or 0) for cell in found.cells) == 1
    assert sum(cell.documents - (cell.same_text or 0) for cell in found.cells) == 2
    assert found.run is None


def test_both_renderings_hold_the_comparison(tmp_path: Path) -> None:
    found = compared(tmp_path, 1.25)
    content = json.loads(render_validation(found, "json"), parse_constant=pytest.fail)
    assert (content["format"], content["version"], content["within"]) == ("alphaprof-validate", 1, False)
    assert content["cells"][0]["error"] == pytest.approx(-0.2)
    text = render_validation(found, "terminal")
    assert "error of the speedup: median 20.0% (by CPU time 20.0%), worst 20.0%: outside the tolerance of 10.0%" in text
    assert f"plain texts equal to the profiled ones: {found.documents} of {found.documents}" in text
    assert "-20%" in text
    assert "[smallest, largest of a single repeat]" in text


def test_a_domain_with_two_kinds_of_text_says_which(tmp_path: Path) -> None:
    found = compared(tmp_path)
    sampled = dataclasses.replace(found.cells[0], continuation="sampled", sampling={"temperature": 0.7}, rule="one_hot")
    text = render_validation(dataclasses.replace(found, cells=(*found.cells, sampled)), "terminal")
    assert "(greedy)" in text
    assert "(sampled at" in text
    assert "(greedy)" not in render_validation(found, "terminal")


def test_a_run_that_nobody_keeps_is_removed(tmp_path: Path) -> None:
    with run_directory(tmp_path / "kept") as kept, run_directory(None) as lost:
        kept.mkdir()
        lost.mkdir()
    assert kept.exists()
    assert not lost.parent.exists()


REFUSED: dict[str, tuple[dict[str, Any], list[str], int, str, str]] = {
    "plain corpus": (
        {"continuation": {"kind": "text"}},
        [],
        2,
        "the target writes none of this text",
        "--set continuation.kind=greedy",
    ),
    "no usual gamma": ({"gammas": [4, 8]}, [], 2, "none of the gammas", "--gamma 4"),
    "unknown key": ({"gamas": [1]}, [], 2, "unknown key gamas", "did you mean gammas?"),
    "no such target": ({"target": {"model": "./none"}}, [], 4, "model of target: ", "correct the path"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_validated_is_refused_in_two_lines(tmp_path: Path, name: str) -> None:
    changes, options, code, problem, hint = REFUSED[name]
    result = run(profile(tmp_path / "place", **changes), "validate", "profile.yaml", *options)
    assert_two_lines(result, code, problem, hint)


def test_an_existing_run_is_not_overwritten(tmp_path: Path) -> None:
    folder = profile(tmp_path / "place")
    (folder / "model" / "notes.txt").write_text("mine")
    result = run(folder, "validate", "profile.yaml", "--out", "model")
    assert_two_lines(result, 6, "model exists and is not empty", "--out")


def test_validating_without_torch_says_how_to_get_it(tmp_path: Path) -> None:
    result = run(profile(tmp_path / "place"), "validate", "profile.yaml", without=("torch",))
    assert_two_lines(result, 2, "profiling needs torch", "pip install 'alphaprof[profile]'")


def tiny_profile(folder: Path, tiny: Path, **changes: Any) -> Path:
    """The drafts that pipelines are tested with, and prompt lookup, on two domains."""
    from tests.test_pipeline import profile_file

    drafts = {
        "close": {"kind": "model", "model": str(tiny / "draft")},
        "skip": {"kind": "layer_skip", "drop_layers": [2]},
        "ngram": {"kind": "prompt_lookup"},
    }
    return profile_file(folder, tiny, **({"drafts": drafts} | changes))


def validated(path: Path, out: Path, documents: int = 3, gammas: list[int] | None = None) -> Validation:
    from alphaprof.loader import load_profile
    from alphaprof.profiling.validate import validate
    from tests.test_pipeline import Silent

    run_, measured = validate(load_profile(path, None, documents), out, gammas, 2, Silent())
    return build_validation(run_, measured, 0.1, kept=True)


@pytest.mark.models
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_texts_and_rounds_of_tiny_models_are_those_of_the_run(tmp_path: Path, tiny: Path, kind: str) -> None:
    path = tiny_profile(tmp_path, tiny, continuation={"kind": kind, "max_new_tokens": 24})
    found = validated(path, tmp_path / "run")
    assert found.exact
    assert found.documents == found.plain_same_text == 6
    assert {(cell.draft, cell.domain, cell.gamma) for cell in found.cells} == {
        (draft, domain, gamma) for draft in ("close", "skip", "ngram") for domain in ("long", "short") for gamma in (1, 2)
    }
    for cell in found.cells:
        assert cell.rule == ("strict" if kind == "greedy" else "one_hot")
        assert cell.same_text == cell.same_rounds == cell.documents == 3
        assert cell.tokens_per_round.measured == pytest.approx(cell.tokens_per_round.predicted)
        assert cell.error is not None
        assert cell.wall_speedup is not None
        assert cell.wall_speedup.value > 0
        assert cell.measured_round_ms is not None
    assert max(cell.tokens_per_round.measured or 0 for cell in found.cells) > 1.2
    assert Run.open(tmp_path / "run").manifest.status == "complete"
    json.loads(render_validation(found, "json"), parse_constant=pytest.fail)


@pytest.mark.models
def test_lossless_texts_are_not_held_against_those_of_the_run(tmp_path: Path, tiny: Path) -> None:
    changes = {"continuation": {"kind": "sampled", "max_new_tokens": 16}, "decision": {"rule": "lossless"}}
    found = validated(tiny_profile(tmp_path, tiny, **changes), tmp_path / "run", 2, [1])
    assert {(cell.rule, cell.same_text) for cell in found.cells if cell.draft == "close"} == {("lossless", None)}
    assert "lossless draws other texts" in render_validation(found, "terminal")


@pytest.mark.models
def test_a_gamma_that_the_profile_lacks_is_added(tmp_path: Path, tiny: Path) -> None:
    found = validated(tiny_profile(tmp_path, tiny), tmp_path / "run", 1, [3])
    assert {cell.gamma for cell in found.cells} == {3}
    assert Run.open(tmp_path / "run").gammas == [1, 2, 3, 4]


@pytest.mark.models
def test_texts_of_one_token_are_left_out_and_given_ones_too(tmp_path: Path, tiny: Path) -> None:
    path = tiny_profile(tmp_path, tiny, continuation={"kind": "greedy", "max_new_tokens": 1})
    with pytest.raises(DataEmpty, match="no text has a second token"):
        validated(path, tmp_path / "short")
    given = {"kind": "given", "column": "response", "on_policy": True, "max_new_tokens": 8}
    data = [
        {"domain": "long", "path": "long.jsonl", "prompt": "{text}", "continuation": given},
        {"domain": "short", "path": "short.jsonl", "prompt": "{text}"},
    ]
    found = validated(tiny_profile(tmp_path, tiny, data=data), tmp_path / "run", 2)
    assert (found.documents, found.foreign) == (2, 2)
    assert {cell.domain for cell in found.cells} == {"short"}


@pytest.mark.models
def test_running_out_of_memory_while_decoding_is_said_so(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from alphaprof.profiling.speculation import Speculation

    def full(*arguments: Any, **keywords: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(Speculation, "decode", full)
    with pytest.raises(OutOfMemory, match="do not fit into memory"):
        validated(tiny_profile(tmp_path, tiny), tmp_path / "run", 1, [1])


@pytest.mark.models
def test_the_command_prints_its_answer_and_ends_with_what_the_tolerance_says(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny_profile(tmp_path, tiny)
    for tolerance, code in (("1e9", 0), ("0", 13)):
        line = [
            "validate",
            path,
            "--documents",
            1,
            "--gamma",
            1,
            "--repeats",
            1,
            "--tolerance",
            tolerance,
            "--format",
            "json",
        ]
        monkeypatch.setattr(sys, "argv", ["alphaprof", *map(str, line)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        output = capsys.readouterr()
        content = json.loads(output.out, parse_constant=pytest.fail)
        assert (caught.value.code or 0) == code
        assert content["within"] is (code == 0)
        assert content["run"] is None
        assert ("error: the predicted speedup is off by" in output.err) is (code == 13)


@pytest.mark.models
def test_gammas_and_texts_that_cannot_be_decoded_are_known_before_any_model_loads() -> None:
    from alphaprof.config import ProfileOptions
    from alphaprof.profiling.decoding import chosen_gammas, require_own_text

    assert chosen_gammas([1, 2, 4, 5, 8], None) == [1, 2, 5]
    assert chosen_gammas([1], [7, 3, 7]) == [3, 7]
    with pytest.raises(OptionInvalid, match="none of the gammas"):
        chosen_gammas([4], None)
    source = {"domain": "a", "path": "a.jsonl", "prompt": "{text}", "continuation": {"kind": "text"}}
    tree = {"target": {"model": "t"}, "drafts": {}, "data": [source]}
    with pytest.raises(ProfileInvalid, match="writes none of this text"):
        require_own_text(ProfileOptions.model_validate(tree))
