"""Acceptance, rounds and time by span: counted again, token by token; they add up to their texts; planted ones come back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from alphaprof.report.build import RunReport
from alphaprof.report.sections.spans import DraftSpans
from alphaprof.totals.count import TotalsRequest
from alphaprof.totals.files import read_totals
from tests.loops import each
from tests.report.test_report_costs import timed
from tests.reporting import as_first_screen, as_terminal, asked, engine, log_of, reported, runs_of
from tests.synthetic import Domain, Recipe

RECIPE = Recipe(
    domains={
        "code": Domain(documents=8, alpha=0.8, coverage=0.7),
        "chat": Domain(documents=9, temperature=1.0, continuation="sampled", clusters=["a", "a", *"bcdefgh"]),
        "wiki": Domain(documents=4, on_policy=False, continuation="text"),
    },
    lookups=("lookup",),
    heads={"head": {}},
    rules=("strict", "one_hot", "lossless", "block"),
    thinking=0.8,
    shard_documents=3,
)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> RunReport:
    return reported(tmp_path_factory.mktemp("spans"), RECIPE)


def spans_of(report: RunReport) -> dict[str, DraftSpans]:
    return {item.draft: item for item in report.section("spans")}


@each("rule", ["auto", "lossless", "block", "one_hot"])
def test_spans_add_up_to_the_totals_of_their_texts(report: RunReport, rule: str) -> None:
    """Tokens and rounds to those of the totals, whatever the draft, where rounds are facts and where they are expectations;
    shares of tokens and time to 1.
    """
    run = report.asked.run
    report = asked(run, rule=rule)
    found = spans_of(report)
    assert set(found) == {"small", "lookup", "head"}
    for draft, item in found.items():
        assert item.expected == (rule in ("lossless", "block") and draft != "lookup")
        rules = ["strict", "one_hot"] if rule == "auto" else [rule]
        totals = read_totals(run, draft, TotalsRequest(rules, run.gammas)).to_pandas()
        documents = run.documents().to_pandas().set_index("document").loc[totals["document"]]
        sampled, own = documents["temperature"].notna().to_numpy(), documents["on_policy"].to_numpy()
        if rule == "auto":
            totals = totals[own & (sampled == (totals["rule"] == "one_hot").to_numpy())]
        else:
            totals = totals[totals["tokens"].notna().to_numpy()]
        spans = item.spans.values()
        assert set(item.spans) == {"thinking", "answer"}
        assert sum(span.tokens for span in spans) == pytest.approx(totals["tokens"].sum(), rel=1e-12)
        assert sum(span.rounds for span in spans) == pytest.approx(totals[f"rounds_{item.gamma}"].sum(), rel=1e-12)
        assert (item.whole.tokens, item.whole.rounds) == pytest.approx(
            (totals["tokens"].sum(), totals[f"rounds_{item.gamma}"].sum()), rel=1e-12
        )
        assert item.whole.alpha is not None
        assert item.whole.alpha.value == pytest.approx(totals["accepted"].sum() / totals["proposals"].sum(), rel=1e-6)
        for name in ("share", "time"):
            assert sum(getattr(span, name).value for span in spans) == pytest.approx(1, abs=1e-12)
        # Time adds up too: of a token of each span, by its share of the tokens.
        assert all(span.speedup is not None and span.time is not None and span.share is not None for span in spans)
        spent = sum(span.share.value / span.speedup.value for span in spans)  # type: ignore[union-attr]
        assert spent == pytest.approx(1 / item.whole.speedup.value, rel=1e-12)  # type: ignore[union-attr]


def test_greedy_rounds_by_span_are_those_of_a_plain_loop(report: RunReport) -> None:
    """Of greedy and sampled text, a round's tokens one by one."""
    log, documents = log_of(report.asked.run), report.asked.run.documents().to_pandas().set_index("document")
    item = spans_of(report)["small"]
    rounds, tokens, accepted, positions = (dict.fromkeys(item.spans, 0.0) for _ in range(4))
    for number, rows in log[log["draft"] == "small"].groupby("document"):
        if not documents.loc[number, "on_policy"]:
            continue
        names, proposed = rows["span"].tolist(), rows["proposed"].tolist()
        runs = runs_of(((rows["draft_top"] == rows["token"]) & (rows["proposed"] > 0)).tolist())
        accept = "accept_strict" if pd.isna(documents.loc[number, "temperature"]) else "accept_one_hot"
        for name, value, most in zip(names, rows[accept], proposed, strict=True):
            positions[name] += most > 0
            accepted[name] += value if most > 0 else 0
        place = 1
        while place < len(names):
            emitted = min(min(item.gamma, proposed[place], runs[place]) + 1, len(names) - place)
            for name in names[place : place + emitted]:
                rounds[name], tokens[name] = rounds[name] + 1 / emitted, tokens[name] + 1
            place += emitted
        assert engine(runs, proposed, item.gamma)["tokens"] == len(names) - 1
    for name, span in item.spans.items():
        assert span.tokens == tokens[name]
        assert span.rounds == pytest.approx(rounds[name], rel=1e-12)
        assert span.tokens_per_round is not None
        assert span.tokens_per_round.value == pytest.approx(tokens[name] / rounds[name], rel=1e-12)
        assert span.alpha is not None
        assert span.alpha.value == pytest.approx(accepted[name] / positions[name], rel=1e-6)


def test_spans_share_the_steps_of_a_batch(tmp_path: Path) -> None:
    """At 16 sequences, some of which draft nothing: a step is as long as what all draft, in whatever span they are."""
    bare = Domain(documents=20, coverage=0.5)
    run = timed(tmp_path / "run", recipe=Recipe({"code": bare}, lookups=("ngram",), thinking=0.8))
    for item in asked(run, concurrency=16).section("spans"):
        times = [span.share.value / span.speedup.value for span in item.spans.values()]
        assert sum(times) == pytest.approx(1 / item.whole.speedup.value, rel=1e-12)
        assert [span.time.value for span in item.spans.values()] == pytest.approx(np.array(times) / sum(times), rel=1e-12)


def test_a_run_without_spans_says_so_and_shows_what_it_did(tmp_path: Path) -> None:
    plain = reported(tmp_path / "plain", Recipe())
    spans = reported(tmp_path / "spans", Recipe(thinking=0.5))
    assert plain.section("spans") == ()
    _, blocks, empty = plain.drawn("spans")
    assert (empty, blocks) == (True, ["nothing to show: the profile tells no spans apart (spans: auto)"])
    assert len(as_first_screen(spans).splitlines()) == len(as_first_screen(plain).splitlines()) <= 40


def test_weights_of_domains_do_not_count_by_span_and_that_is_said(report: RunReport) -> None:
    """Its total may then be another one than the verdict's."""
    weighed = asked(report.asked.run, weights={"code": 0.9, "chat": 0.1, "wiki": 0})
    said = "decision.weights do not count here"
    assert said in as_terminal(weighed, 150, "spans")
    assert said not in as_terminal(report, 150, "spans")
    assert spans_of(weighed)["small"].whole.alpha == spans_of(report)["small"].whole.alpha
