"""Hybrids of prompt lookup and another draft: every round against a decoder that chooses between live drafts."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from alphaprof.config.load import changed_question, load_profile
from alphaprof.errors import OptionInvalid, ProfileInvalid
from alphaprof.report.build import build_report
from alphaprof.run.manifest import Hybrid
from alphaprof.run.reader import Run
from alphaprof.totals.count import TotalsRequest
from alphaprof.totals.files import read_totals
from alphaprof.totals.hybrid import with_hybrids
from tests.runs import profile_file, run_profile

pytestmark = [pytest.mark.models, pytest.mark.usefixtures("one_thread")]
GAMMAS = (1, 2, 4)
DRAFTS = {
    "close": {"kind": "model", "model": "TINY/draft"},
    "ngram": {"kind": "prompt_lookup", "max_ngram": 3, "match": "leftmost"},
    "both": {"kind": "hybrid", "first": "ngram", "then": "close", "min_match": 2},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Run:
    folder = tmp_path_factory.mktemp("hybrid")
    drafts = json.loads(json.dumps(DRAFTS).replace("TINY", str(tiny)))
    data = [{"domain": "long", "path": "long.jsonl", "prompt": "{text} {text} {text}", "limit": 8}]
    written = {"kind": "greedy", "max_new_tokens": 100}  # long enough to repeat itself
    changes: dict[str, Any] = {"drafts": drafts, "data": data, "rules": ["strict"], "continuation": written}
    return run_profile(profile_file(folder, tiny, **changes), folder / "run")


def found(tokens: list[int], min_match: int, max_ngram: int) -> list[int]:
    """What prompt lookup proposes after these tokens: what followed their longest end where it first stood before."""
    for size in range(min(max_ngram, len(tokens) - 1), min_match - 1, -1):
        end = tokens[len(tokens) - size :]
        for place in range(len(tokens) - size):
            if tokens[place : place + size] == end:
                return tokens[place + size :]
    return []


@pytest.fixture(scope="module")
def likeliest(tiny: Path) -> Callable[[tuple[int, ...]], int]:
    """The draft's next token; rounds of several γ begin with the same tokens."""
    network = AutoModelForCausalLM.from_pretrained(tiny / "draft", dtype=torch.float32).eval()

    @functools.cache
    def found(ids: tuple[int, ...]) -> int:
        with torch.no_grad():
            return int(network(torch.tensor([ids])).logits[0, -1].argmax())

    return found


def decoded(
    likeliest: Callable[[tuple[int, ...]], int], prompt: list[int], text: list[int], gamma: int, min_match: int
) -> tuple[int, int, int]:
    """Rounds, draft steps, and rounds that run any, of a decoder that looks up first and else asks the model."""
    rounds = steps = started = 0
    at = 1
    while at < len(text):
        context = prompt + text[:at]
        proposal = found(context, min_match, 3)[:gamma]
        rounds += 1
        if not proposal:
            started += 1
            for _ in range(gamma):
                proposal.append(likeliest((*context, *proposal)))
                steps += 1
        right = 0
        while right < len(proposal) and at + right < len(text) and proposal[right] == text[at + right]:
            right += 1
        at += right + 1
    return rounds, steps, started


@pytest.mark.parametrize("min_match", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3))])
def test_every_round_is_that_of_a_decoder_with_both_drafts(run: Run, likeliest: Any, min_match: int) -> None:
    mixed = with_hybrids(run, {"both": Hybrid("ngram", "close", min_match)})
    totals = read_totals(mixed, "both", TotalsRequest(["strict"], GAMMAS)).to_pandas().set_index("document")
    by_lookup = 0
    for shard in run.shards:
        for row in run.continuations(shard.index).to_pylist():
            mine = totals.loc[row["document"]]
            for gamma in GAMMAS:
                expected = decoded(likeliest, row["prompt_ids"], row["continuation_ids"], gamma, min_match)
                assert (mine[f"rounds_{gamma}"], mine[f"steps_{gamma}"], mine[f"started_{gamma}"]) == expected
                by_lookup += expected[0] - expected[2]
    assert by_lookup > 5


def test_a_report_judges_it_beside_its_parts(run: Run) -> None:
    report = build_report(run)
    assert report.run.drafts == ("close", "ngram", "both")
    assert {item.answer.draft for item in report.drafts} == {"close", "ngram", "both"}


def test_an_old_log_answers_for_a_hybrid(run: Run) -> None:
    config = changed_question(run.manifest.config, ["hybrids.other={first: ngram, then: close, min_match: 3}"])
    assert build_report(run, config=config).run.drafts == ("close", "ngram", "both", "other")
    with pytest.raises(ProfileInvalid, match="a prompt_lookup draft as `first`"):
        changed_question(run.manifest.config, ["hybrids.odd={first: close, then: ngram}"])
    with pytest.raises(OptionInvalid, match="needs a prompt_lookup draft"):
        with_hybrids(run, {"odd": Hybrid("ngram", "nothing", 1)})


def test_a_hybrid_with_more_than_prompt_lookup_looks_up_is_refused(tiny: Path, tmp_path: Path) -> None:
    drafts = json.loads(json.dumps(DRAFTS).replace("TINY", str(tiny)))
    drafts["both"]["min_match"] = 4
    with pytest.raises(ProfileInvalid, match="exceeds max_ngram 3"):
        load_profile(profile_file(tmp_path, tiny, drafts=drafts))


def test_draft_steps_are_paid_by_rounds_that_run_them(run: Run, tmp_path: Path) -> None:
    """Time of the rounds counted by hand, from the step times of the run, taken as exact: a busy machine changes nothing."""
    steps = run.latency().to_pandas().rename(columns={"median_ms": "ms"})
    steps[["model", "step", "tokens", "batch", "context", "ms"]].to_csv(tmp_path / "steps.csv", index=False)
    exact = ["costs.source=table", f"costs.path={tmp_path / 'steps.csv'}"]
    report = build_report(run, config=changed_question(run.manifest.config, exact))
    cost = report.times
    assert cost is not None
    mixed = with_hybrids(run, {"both": Hybrid("ngram", "close", 2)})
    totals = read_totals(mixed, "both", TotalsRequest(["strict"], GAMMAS)).to_pandas()
    one = cost.target_ms[1]
    drafted = [totals[f"drafted_2_{depth}"].sum() for depth in (1, 2)]
    exactly = np.array([totals["rounds_2"].sum() - drafted[0], drafted[0] - drafted[1], drafted[1]])
    verify = exactly @ np.array([cost.target_ms[n] for n in (1, 2, 3)])
    search = totals["rounds_2"].sum() * cost.lookup_ms["ngram"]
    kept = cost.bookkeeping_ms["close"] * drafted[0]
    steps = totals["steps_2"].sum() * cost.draft_ms["close"]
    more = max(cost.draft_after_full_ms["close"] - cost.draft_ms["close"], 0.0)  # of each token that a first step reads
    steps += totals["read_by_model_2"].sum() * more
    assert totals["read_by_model_2"].sum() > 0
    result = next(item for item in report.results if item.draft == "both" and item.rule == "strict")
    (own,) = (item.speedup for item in result.gammas if item.gamma == 2)
    assert own is not None
    assert own.value == pytest.approx(totals["tokens"].sum() * one / (verify + search + kept + steps), rel=1e-6)
