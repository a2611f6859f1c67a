"""`alphaprof rollout`: what a rule's own text costs and gains, recomputed from its rounds and from whole forward passes."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from rich.console import Console

from alphaprof.cli import app
from alphaprof.commands.rollout.build import (
    SAME,
    Rolled,
    Rollout,
    Rollouts,
    RolloutWay,
    build_rollout,
    departure,
    depth_counts,
)
from alphaprof.log.manifest import ModelFacts
from alphaprof.log.schema import DOCUMENT_COLUMNS, arrow_schema
from alphaprof.render.answer import answer_text
from alphaprof.report import format as fmt
from alphaprof.stats.estimate import Interval, mean_interval, ratio
from alphaprof.stats.paired import mean_difference
from tests.cli.test_cli_errors import assert_two_lines, profile, run
from tests.commands.test_validate import tiny_profile

Array = np.ndarray[Any, Any]
GAMMA = 2


def ints(*values: int) -> Array:
    return np.array(values, dtype=np.int64)


def test_the_first_other_token_is_where_a_text_departs() -> None:
    own = ints(5, 6, 7, 8)
    assert departure(ints(5, 6, 9, 8), own) == 2
    assert departure(ints(4, 6, 7, 8), own) == 0
    assert departure(ints(5, 6), own) == departure(own, ints(5, 6)) == 2
    assert departure(own, own) == SAME


def test_a_draft_is_tested_where_its_round_reached_it_and_the_text_goes_on() -> None:
    # 9 tokens: the prefill's; 3 drafted, 1 kept, own; 3 kept, own; 2 drafted, none kept, own; the last place kept.
    drafted, tested, accepted = depth_counts(9, ints(3, 3, 2, 3), ints(1, 3, 0, 1), 3)
    assert drafted.tolist() == [4, 4, 3]
    assert tested.tolist() == [4, 2, 1]  # in the last round one place was left
    assert accepted.tolist() == [3, 1, 1]
    assert [counts.tolist() for counts in depth_counts(1, ints(), ints(), 2)] == [[0, 0]] * 3


def test_means_without_an_upper_end_are_never_certain_for_want_of_spread() -> None:
    spread = ratio(np.array([1.0, 3.0]), np.array([10.0, 10.0]))
    found = mean_interval(spread, 0.9)
    assert found.value == pytest.approx(0.2)
    assert found.high == pytest.approx(0.2 + 6.3138 * 0.1, rel=1e-4)  # t with one degree of freedom, standard error 0.1
    assert found.low == 0
    for alike in (np.zeros(3), np.ones(3)):
        assert dataclasses.astuple(mean_interval(ratio(alike, np.ones(3)), 0.9))[1:3] == (0, np.inf)
    assert mean_interval(ratio(np.ones(1), np.ones(1)), 0.9).high == np.inf


def test_what_two_texts_share_cancels_in_the_difference_of_their_means() -> None:
    counts = np.full(4, 10.0)
    one = np.array([1.0, 4.0, 2.0, 5.0])
    two = one + np.array([1.0, 1.0, 2.0, 2.0])
    found = mean_difference((one, counts), (two, counts), 0.9)
    assert found.value == pytest.approx(0.15)
    error = np.std([0.1, 0.1, 0.2, 0.2], ddof=1) / 2
    assert found.high - found.value == pytest.approx(2.3534 * error, rel=1e-4)
    assert found.low == pytest.approx(0.15 - 2.3534 * error, rel=1e-4)
    alike = mean_difference((one, counts), (one, counts), 0.9)
    assert (alike.value, alike.low, alike.high) == (0, -0.3, np.inf)


def table(sampled: bool = False) -> pa.Table:
    """Four documents of a domain with an awkward name, two of them in one cluster."""
    sampling = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0} if sampled else {}
    rows = [
        {
            "document": number,
            "domain": "[b]a",
            "cluster": "0:x" if number > 1 else None,
            "source": 0,
            "source_row": number,
            "prompt_hash": f"h{number}",
            "prompt_tokens": 3,
            "continuation_tokens": 9,
            "finish": "length",
            "continuation": "sampled" if sampled else "greedy",
            "on_policy": True,
            "max_new_tokens": 9,
        }
        | sampling
        for number in range(4)
    ]
    return pa.Table.from_pylist(rows, schema=arrow_schema(DOCUMENT_COLUMNS))


def rolled(rule: str = "additive_0p1", **changes: Any) -> Rolled:
    values: dict[str, Any] = {
        "draft": "small",
        "rule": rule,
        "gamma": GAMMA,
        "rows": np.arange(4),
        "tokens": ints(9, 9, 5, 9),
        "rounds": ints(4, 4, 3, 5),
        "drafted": np.array([[4, 4], [4, 4], [3, 2], [5, 5]]),
        "tested": np.array([[4, 3], [4, 3], [3, 1], [5, 2]]),
        "accepted": np.array([[3, 1], [3, 1], [1, 0], [2, 1]]),
        "regret": np.array([0.9, 0.45, 0.5, 0.0]),
        "ended": np.array([False, False, True, False]),
        "departs": ints(4, 7, 2, SAME),
    }
    return Rolled(**values | changes)


def plain(regret: Array) -> Rolled:
    nothing = np.zeros((4, 0), dtype=np.int64)
    counts = {"drafted": nothing, "tested": nothing, "accepted": nothing}
    fields = {"draft": "", "gamma": 0, "tokens": ints(9, 9, 9, 9), "rounds": ints(8, 8, 8, 8), "departs": ints(*[SAME] * 4)}
    return rolled("", regret=regret, ended=np.zeros(4, dtype=bool), **counts, **fields)


def built(*ways: Rolled, sampled: bool = False, regret: float = 0.0) -> Rollout:
    facts = ModelFacts("t", "model", "a", "f", "float32", "cpu", 1, None, 10, (1,), 0.0)
    own = plain(np.full(4, 9 * regret))
    return build_rollout(Rollouts(facts, table(sampled), own, ways, 1), 0.95)


def only(found: Rollout) -> RolloutWay:
    ((way,),) = [text.ways for text in found.texts]
    return way


def test_sums_over_documents_are_divided_last_and_clusters_are_one_unit() -> None:
    found = built(rolled())
    (text,) = found.texts
    way = only(found)
    assert (text.documents, text.clusters, found.foreign) == (4, 3, 1)
    assert way.alpha is not None
    assert way.tokens_per_round is not None
    assert way.departed is not None
    assert way.excess is not None
    assert way.alpha.value == pytest.approx(12 / 25)
    assert way.tokens_per_round.value == pytest.approx((32 - 4) / 16)
    assert way.acceptance_length == pytest.approx(1 + 12 / 16)
    assert way.conditional == pytest.approx((9 / 16, 3 / 9))
    assert way.regret.value == way.excess.value == pytest.approx(1.85 / 32)
    assert way.departed.value == 0.75
    assert way.departed_at == 4
    assert (way.mean_tokens, way.ended, text.own.mean_tokens, text.own.ended) == (8, 1, 9, 0)
    assert text.own.regret == Interval(0, 0, 0)
    for interval in (way.alpha, way.tokens_per_round, way.regret, way.excess, way.departed):
        assert interval.low < interval.value < interval.high


def test_on_sampled_text_another_draw_is_no_departure_and_regret_stands_beside_its_own() -> None:
    way = only(built(rolled(), sampled=True, regret=0.03))
    assert way.departed is way.departed_at is None
    assert way.excess is not None
    assert way.excess.value == pytest.approx(1.85 / 32 - 0.03)
    kept = only(built(rolled("one_hot"), sampled=True, regret=0.03))
    assert kept.excess is None
    text = answer_text(built(rolled(), sampled=True), "terminal")
    assert "another draw is no departure" in text
    assert "another draw" not in answer_text(built(rolled()), "terminal")


def test_the_first_lines_hold_what_rules_gain_and_give_up() -> None:
    found = built(rolled())
    way, buffer = only(found), io.StringIO()
    found.terminal(Console(file=buffer, width=100))
    text = " ".join(" ".join([line for line in buffer.getvalue().splitlines() if line.strip()][:5]).split())
    gain = f"{fmt.interval(way.tokens_per_round)} tokens per round at gamma {way.gamma}"
    assert f"{way.draft} by {way.rule}: {gain}; {fmt.difference(way.excess, 3)} nats regret per token" in text
    assert "no verdict follows" in text
    assert "next: " in text


def test_both_renderings_hold_the_numbers_and_no_verdict() -> None:
    found = built(rolled(), rolled(regret=np.zeros(4), tested=np.zeros((4, 2)), accepted=np.zeros((4, 2))))
    content = json.loads(answer_text(found, "json"), parse_constant=pytest.fail)
    assert (content["format"], content["schema_version"]) == ("alphaprof-rollout", "1.0")
    first, second = content["texts"][0]["ways"]
    assert first["alpha"]["value"] == pytest.approx(0.48)
    assert (second["alpha"], second["conditional"]) == (None, [None, None])
    assert second["regret"] == {"value": 0, "low": 0, "high": "inf"}
    text = answer_text(found, "terminal")
    for part in (
        "no verdict follows",
        "0.480 [",
        "0.058 | 0.000",
        "75% at 4",
        "8 | 9",
        "[b]a",
        "left out: 1 with text",
        "3 of 4",
    ):
        assert part in text
    assert "near-ties" not in text
    assert "near-ties" in answer_text(dataclasses.replace(found, dtype="bfloat16", exact=False), "terminal")


REFUSED: dict[str, tuple[dict[str, Any], list[str], str, str]] = {
    "no lossy rule": ({"rules": ["strict", "lossless"]}, [], "the profile has no lossy rule", "--rule additive:0.1"),
    "unknown rule": ({}, ["--rule", "additiv:0.1"], "--rule: unknown rule 'additiv'", "alphaprof rules lists them"),
    "several draws": ({}, ["--rule", "multi_draft:2"], "multi_draft_2 drafts trees", "choose a rule for chains"),
    "tree": ({}, ["--rule", "tree:2"], "the rule tree_2 drafts trees", "choose a rule for chains"),
    "no such text": ({}, ["--rule", "lossless"], "lossless belongs to sampled text, and this is greedy", "strict goes"),
    "no such draft": ({}, ["--draft", "big"], "the profile has no draft big", "it has: skip"),
    "no usual gamma": ({"gammas": [4]}, [], "none of the gammas", "--gamma 4"),
    "others' text": (
        {"continuation": {"kind": "text"}},
        [],
        "none of this text is the target's own",
        "continuation.kind=greedy",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_rolled_out_is_refused_in_two_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    changes, options, problem, hint = REFUSED[name]
    monkeypatch.chdir(profile(tmp_path / "place", **changes))
    assert command(monkeypatch, capsys, "profile.yaml", *options, code=2) == ""
    assert problem in COMMAND[-1]
    assert hint in COMMAND[-1]


def test_a_place_that_cannot_be_written_is_known_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(profile(tmp_path / "place"))
    for out in ("none/found.json", "model"):
        assert command(monkeypatch, capsys, "profile.yaml", "--out", out, code=5) == ""
        assert f"error: cannot write {out}: " in COMMAND[-1]
        assert "hint: choose another --out, in a directory that you may write" in COMMAND[-1]


def test_rolling_out_without_torch_says_how_to_get_it(tmp_path: Path) -> None:
    result = run(profile(tmp_path / "place"), "rollout", "profile.yaml", without=("torch",))
    assert_two_lines(result, 2, "profiling needs torch", "pip install 'datasets>=")


COMMAND: list[str] = []  # what the last command said on stderr


def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    """What the command prints, in this process."""
    monkeypatch.setattr(sys, "argv", ["alphaprof", "rollout", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        app.main()
    output = capsys.readouterr()
    COMMAND.append(output.err)
    assert (caught.value.code or 0) == code, output.err
    return output.out


RULES = ("additive_0p3", "strict", "additive_0", "additive_1")
SAMPLING = {"kind": "sampled", "temperature": 1.2, "top_p": 0.95, "seed": 3, "max_new_tokens": 24}


def rolled_out(
    folder: Path, tiny: Path, rules: tuple[str, ...], drafts: list[str] | None = None, **changes: Any
) -> tuple[Path, Rollout]:
    """A profile over tiny models, and its rollouts at one gamma."""
    from alphaprof.commands.rollout.measure import roll, rollout_request
    from alphaprof.config.load import load_profile
    from tests.profiling.test_pipeline import Silent

    path = tiny_profile(folder, tiny, **changes)
    options = load_profile(path, None, 3)
    return path, build_rollout(roll(options, rollout_request(options, drafts, list(rules), [GAMMA]), Silent()), 0.95)


def loaded_from(path: Path) -> Any:
    """The models and documents of a profile."""
    from alphaprof.config.load import load_profile
    from alphaprof.profiling.run.pipeline import load
    from tests.profiling.test_pipeline import Silent

    return load(load_profile(path, None, 3), Silent())


def witnessed(loaded: Any, draft: str, rule: str, domain: str) -> dict[str, Any]:
    """The numbers of one way on one domain, from rounds one by one and whole forward passes."""
    import torch

    from alphaprof.profiling.decoding.speculative import DecodingSetup, decode
    from alphaprof.rules import parse_rule

    (drafting,) = [DecodingSetup(item, parse_rule(rule), GAMMA) for item in loaded.drafts if item.name == draft]
    found: dict[str, Any] = {"tested": 0, "accepted": 0, "rounds": 0, "emitted": 0, "regret": 0.0, "own": 0.0, "tokens": []}
    own_tokens, found["departs"] = 0, []
    for document in [item for item in loaded.documents if item.domain == domain]:
        texts = [decode(loaded, document, way) for way in (None, drafting)]
        for name, text in zip(("own", "regret"), texts, strict=True):
            ids = torch.from_numpy(np.concatenate([document.prompt, text.ids]).astype(np.int64))[None]
            with torch.inference_mode():
                logits = loaded.target.network(input_ids=ids).logits[0, len(document.prompt) - 1 : -1]
            logs = torch.log_softmax(logits.double(), 1).numpy()
            found[name] += float((logs.max(1) - logs[np.arange(len(text.ids)), text.ids]).sum())
        plain_text, text = texts
        left = len(text.ids) - 1
        for drafted, accepted in zip(text.drafted.tolist(), text.accepted.tolist(), strict=True):
            for place in range(drafted):
                found["tested"] += place < left and place <= accepted
                found["accepted"] += place < accepted
            emitted = min(accepted + 1, left)
            found["rounds"] += 1
            found["emitted"] += emitted
            left -= emitted
        assert left == 0
        found["tokens"].append(len(text.ids))
        own_tokens += len(plain_text.ids)
        pairs = enumerate(zip(text.ids.tolist(), plain_text.ids.tolist(), strict=False))
        found["departs"] += [place for place, (ours, own) in pairs if ours != own][:1]
    found["regret"] /= sum(found["tokens"])
    found["own"] /= own_tokens
    return found


def assert_witnessed(way: dict[str, Any], own: dict[str, Any], expected: dict[str, Any]) -> None:
    assert way["tested"] == expected["tested"] > 0
    assert way["alpha"]["value"] == pytest.approx(expected["accepted"] / expected["tested"])
    assert way["rounds"] == expected["rounds"]
    assert way["tokens_per_round"]["value"] == pytest.approx(expected["emitted"] / expected["rounds"])
    assert way["mean_tokens"] == pytest.approx(np.mean(expected["tokens"]))
    assert way["regret"]["value"] == pytest.approx(expected["regret"], abs=1e-5)
    assert own["regret"]["value"] == pytest.approx(expected["own"], abs=1e-5)


@pytest.mark.models
@pytest.mark.usefixtures("one_thread")
def test_the_command_says_what_rounds_and_forward_passes_say(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny_profile(tmp_path, tiny)
    rules = [word for rule in ("additive:0.3", "strict", "additive:0", "additive:1") for word in ("--rule", rule)]
    drafts = ["--draft", "ngram", "--draft", "close"]
    line = [path, "--documents", 3, "--gamma", GAMMA, *rules, *drafts, "--format", "json", "--out", tmp_path / "found.json"]
    assert command(monkeypatch, capsys, *line) == ""
    content = json.loads((tmp_path / "found.json").read_text(), parse_constant=pytest.fail)
    assert (content["documents"], content["foreign"], content["exact"]) == (6, 0, True)
    loaded = loaded_from(path)
    for text in content["texts"]:
        assert text["documents"] == 3
        ways = {(way["draft"], way["rule"]): way for way in text["ways"]}
        assert set(ways) == {(draft, rule) for draft in ("close", "ngram") for rule in RULES}
        assert text["own"]["regret"] == {"value": 0, "low": 0, "high": 0}
        lossy = ways["close", "additive_0p3"]
        expected = witnessed(loaded, "close", "additive_0p3", text["domain"])
        assert_witnessed(lossy, text["own"], expected)
        assert lossy["departed"]["value"] == pytest.approx(len(expected["departs"]) / 3)
        assert lossy["departed_at"] == pytest.approx(np.median(expected["departs"]))
        assert lossy["excess"]["value"] == pytest.approx(lossy["regret"]["value"])
        assert lossy["regret"]["value"] > 0
        for draft in ("close", "ngram"):
            assert_strictest_is_strict(ways[draft, "additive_0"], ways[draft, "strict"])
        assert_widest_keeps_all(ways["close", "additive_1"])


def assert_strictest_is_strict(found: dict[str, Any], strict: dict[str, Any]) -> None:
    """Additive with epsilon 0 keeps the top token alone."""
    of_lossy = ("rule", "lossy", "regret", "excess")
    assert [found[name] for name in found if name not in of_lossy] == [
        strict[name] for name in strict if name not in of_lossy
    ]
    assert (strict["departed"]["value"], strict["departed_at"], strict["excess"]) == (0, None, None)
    assert (found["lossy"], strict["lossy"]) == (True, False)
    assert found["regret"]["value"] == strict["regret"]["value"] == 0


def assert_widest_keeps_all(found: dict[str, Any]) -> None:
    """With epsilon 1 no draft is rejected: every round is full, up to the end of the text."""
    assert found["alpha"]["value"] == 1
    assert found["conditional"] == [1] * GAMMA
    assert found["acceptance_length"] <= GAMMA + 1
    short = 3 * GAMMA  # at most as many tokens are missing in the last rounds of three texts
    assert (GAMMA + 1) * found["rounds"] - short <= 3 * (found["mean_tokens"] - 1) <= (GAMMA + 1) * found["rounds"]


@pytest.mark.models
@pytest.mark.usefixtures("one_thread")
def test_kinds_of_text_are_kept_apart_and_each_has_the_rules_that_belong_to_it(tmp_path: Path, tiny: Path) -> None:
    given = {"kind": "given", "column": "response", "on_policy": True, "max_new_tokens": 8}
    data = [
        {"domain": "long", "path": "long.jsonl", "prompt": "{text}", "continuation": SAMPLING},
        {"domain": "short", "path": "short.jsonl", "prompt": "{text}"},
        {"domain": "logged", "path": "short.jsonl", "prompt": "{text}", "continuation": given},
    ]
    path, found = rolled_out(tmp_path, tiny, ("top_m:3", "strict", "one_hot"), ["close"], data=data)
    assert (found.documents, found.foreign) == (6, 3)
    loaded = loaded_from(path)
    sampled, greedy = found.texts
    assert (sampled.domain, sampled.continuation, greedy.continuation) == ("long", "sampled", "greedy")
    assert [way.rule for way in sampled.ways] == ["top_m_3", "one_hot"]
    assert [way.rule for way in greedy.ways] == ["top_m_3", "strict"]
    for way in sampled.ways:
        assert way.departed is way.departed_at is None
        expected = witnessed(loaded, "close", way.rule, "long")
        assert_witnessed(dataclasses.asdict(way), dataclasses.asdict(sampled.own), expected)
    top, same = sampled.ways
    assert sampled.own.regret.value > 0
    assert same.regret.value == pytest.approx(sampled.own.regret.value, abs=1e-5)  # one_hot keeps the text
    assert (same.mean_tokens, same.ended, same.excess) == (sampled.own.mean_tokens, sampled.own.ended, None)
    assert top.excess is not None
    assert top.excess.value == pytest.approx(top.regret.value - sampled.own.regret.value)


@pytest.mark.models
def test_what_is_not_asked_for_comes_from_the_profile() -> None:
    from alphaprof.commands.rollout.measure import rollout_request
    from alphaprof.config.profile import ProfileOptions

    tree = {
        "target": {"model": "t"},
        "drafts": {"a": {"kind": "prompt_lookup"}, "b": {"kind": "prompt_lookup"}},
        "data": [{"domain": "a", "path": "a.jsonl", "prompt": "{text}"}],
        "rules": ["strict", "top_m:2", "typical:0.1,0.2"],
    }
    drafts, rules, gammas = rollout_request(ProfileOptions.model_validate(tree), None, None, None)
    assert (drafts, [rule.id for rule in rules]) == (["a", "b"], ["top_m_2", "typical_0p1_0p2"])
    assert gammas == [1, 2, 3, 5]
    fixed = ProfileOptions.model_validate(tree | {"decision": {"gamma": 4}})
    (drafts, _, gammas), (_, _, named) = (rollout_request(fixed, ["b"], ["strict"], gammas) for gammas in (None, [7, 6]))
    assert (drafts, gammas, named) == (["b"], [4], [6, 7])
