"""Degenerate runs: a report says what it cannot know, and neither its verdict nor any of its sections dies of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from alphaprof.config.load import changed_question
from alphaprof.report.build import RunReport, build_report
from alphaprof.report.formats.text import ReportAnswer
from alphaprof.report.sections import NAMES
from alphaprof.run.schema import LATENCY_COLUMNS, arrow_schema
from tests.reporting import as_first_screen, as_json, as_markdown, as_terminal, codes, every
from tests.synthetic import Domain, Recipe, altered, latency, write_run

HYBRID = "hybrids.both={first: ngram, then: small, min_match: 1}"
# Texts of one length and so short that hardly a token is far from both ends, beside a domain without any round.
SHORT = Domain(documents=30, shortest=16, longest=16)
LEAN = {"short": SHORT, "single": Domain(documents=1, shortest=1, longest=1)}
SAMPLED = {name: dataclasses.replace(domain, continuation="sampled", temperature=1.0) for name, domain in LEAN.items()}


@dataclass(frozen=True)
class Degenerate:
    """A run that lacks something. `settings`: as of `--set`; `rounds`: timing rounds, None if only their error is known;
    `noise`: of their times; `batches`: sequences decoded at a time; `verdict`: None if it may be any.
    """

    recipe: Recipe
    settings: Sequence[str] = ()
    rounds: int | None = None
    noise: float = 0.02
    batches: Sequence[int] = (1,)
    verdict: str | None = None

    def report(self, path: Path) -> RunReport:
        run = write_run(path, self.recipe)
        if self.rounds is not None:
            rng, rows = np.random.default_rng(0), []
            for row in latency(self.recipe).to_pylist():
                for batch in self.batches:
                    times = row["median_ms"] * np.exp(self.noise * rng.standard_normal(self.rounds))
                    rows.append(row | {"batch": batch, "rounds_ms": times.tolist(), "repeats": self.rounds})
            config = run.manifest.config
            config |= {"costs": config["costs"] | {"concurrency": list(self.batches)}}
            altered(run, pa.Table.from_pylist(rows, schema=arrow_schema(LATENCY_COLUMNS)), config=config)
        return build_report(run, config=changed_question(run.manifest.config, list(self.settings)))


def texts(*domains: Domain, **more: Any) -> Recipe:
    return Recipe(domains={f"domain {number}": domain for number, domain in enumerate(domains)}, **more)


RUNS = {
    "equal and short texts": Degenerate(texts(SHORT, decision={"draft": "small", "gamma": 4})),
    "one document": Degenerate(texts(Domain(documents=1)), verdict="UNDECIDED"),
    "two documents": Degenerate(texts(Domain(documents=2)), verdict="UNDECIDED"),
    "one document of one token": Degenerate(texts(Domain(documents=1, shortest=1, longest=1)), verdict="UNDECIDED"),
    "documents of one token": Degenerate(texts(Domain(documents=30, shortest=1, longest=1)), verdict="UNDECIDED"),
    "documents of one or two tokens": Degenerate(texts(Domain(documents=30, shortest=1, longest=2))),
    "one independent document": Degenerate(texts(Domain(documents=30, clusters=["one"] * 30)), verdict="UNDECIDED"),
    "all accepted": Degenerate(texts(Domain(documents=30, alpha=1.0, spread=0.0, shortest=40, longest=60))),
    "none accepted": Degenerate(texts(Domain(documents=30, alpha=0.0, spread=0.0, shortest=40, longest=60))),
    "all accepted in short texts": Degenerate(texts(dataclasses.replace(SHORT, alpha=1.0, spread=0.0))),
    "all accepted at gamma 1": Degenerate(texts(Domain(documents=30, alpha=1.0, spread=0.0), gammas=(1,))),
    "a draft that never proposes": Degenerate(texts(Domain(documents=30, coverage=0.0))),
    "a draft that never proposes in one domain": Degenerate(texts(Domain(documents=30), Domain(coverage=0.0))),
    "one domain": Degenerate(texts(Domain(documents=30))),
    "a domain of one document": Degenerate(texts(Domain(documents=30), Domain(documents=1))),
    "a domain of one token": Degenerate(Recipe(domains=LEAN)),
    "one long document": Degenerate(texts(SHORT, Domain(documents=1, shortest=2000, longest=2000))),
    "text of no policy": Degenerate(texts(Domain(on_policy=False, continuation="given")), verdict="UNDECIDED"),
    "no step times": Degenerate(Recipe(domains=LEAN, latency=False), verdict="UNDECIDED"),
    "one timing round": Degenerate(Recipe(domains=LEAN), rounds=1, verdict="UNDECIDED"),
    "two timing rounds": Degenerate(Recipe(domains=LEAN), rounds=2, verdict="UNDECIDED"),
    "equal timing rounds": Degenerate(Recipe(domains=LEAN), rounds=9, noise=0.0),
    "equal step times": Degenerate(
        Recipe(domains=LEAN, lookups=("ngram",), draft_ms=10.0, extra_ms=0.0, lookup_ms=10.0, timing_error=0.0)
    ),
    "a search that takes no time": Degenerate(Recipe(domains=LEAN, drafts={}, lookups=("ngram",), lookup_ms=0.0)),
    "certificates": Degenerate(Recipe(domains=LEAN, rules=("strict", "tree_2"), certificates=True, thinking=0.5)),
    "one_hot": Degenerate(Recipe(domains=SAMPLED, rules=("one_hot",), decision={"rule": "one_hot"})),
    "lossless": Degenerate(Recipe(domains=SAMPLED, rules=("lossless",), decision={"rule": "lossless"}, certificates=True)),
    "block": Degenerate(Recipe(domains=SAMPLED, rules=("block",), decision={"rule": "block"})),
    "a head": Degenerate(Recipe(domains=LEAN, heads={"head": {}}, certificates=True)),
    "a head on sampled text": Degenerate(
        Recipe(domains=SAMPLED, drafts={}, heads={"head": {}}, rules=("lossless",), decision={"rule": "lossless"})
    ),
    "p_min auto": Degenerate(Recipe(domains=LEAN), ["decision.p_min=auto"]),
    "a hybrid": Degenerate(Recipe(domains=LEAN, lookups=("ngram",)), [HYBRID]),
    "weights": Degenerate(Recipe(domains=LEAN), ["decision.weights={short: 0.5, single: 0.5}"]),
    "weight of a domain without rounds": Degenerate(Recipe(domains=LEAN), ["decision.weights={short: 0, single: 1}"]),
    "two sequences": Degenerate(Recipe(domains=LEAN), ["decision.concurrency=2"], rounds=9, batches=(1, 2)),
    "a hybrid of two sequences": Degenerate(
        Recipe(domains=LEAN, lookups=("ngram",)), [HYBRID, "decision.concurrency=2"], rounds=9, batches=(1, 2)
    ),
}
ON_A_PAGE = ("documents of one token", "a draft that never proposes", "all accepted", "a head", "text of no policy")


def intervals(document: Any) -> Iterator[tuple[float, float, float]]:
    """Low end, value and high end of every interval of a JSON document."""
    if isinstance(document, Mapping) and set(document) == {"low", "value", "high"}:
        yield float(document["low"]), float(document["value"]), float(document["high"])
    elif isinstance(document, Mapping | list):
        for each in document.values() if isinstance(document, Mapping) else document:
            yield from intervals(each)


@pytest.mark.parametrize("name", RUNS)
def test_a_degenerate_run_has_a_whole_report(name: str, tmp_path: Path) -> None:
    """A verdict with its reason, every section in every format, and nothing that is not a number. Warnings are errors."""
    report = RUNS[name].report(tmp_path / "run")
    assert report.answer.verdict == (RUNS[name].verdict or report.answer.verdict)
    answers = [report.answer, *(item.answer for item in (*report.domains, *report.drafts)), *every(report)]
    answers = [answer for answer in answers if answer.verdict is not None]
    assert all(answer.verdict in ("GO", "NO-GO", "UNDECIDED") and answer.reason for answer in answers)
    assert not any(axis.decays for axis in report.section("context"))  # none is planted
    found = list(intervals(as_json(report)))
    assert [each for each in found if not each[0] <= each[1] <= each[2] or math.isinf(each[1])] == []
    drawn = (as_first_screen(report), as_terminal(report, 100, *NAMES), as_markdown(report))
    for text in drawn:
        assert "nan" not in text.lower().replace(",", " ").replace("[", " ").replace("]", " ").split()
    assert ("no step times" in drawn[0]) == (report.times is None)
    if name in ON_A_PAGE:
        assert "<html" in ReportAnswer(report).html()


def test_a_draft_that_never_proposes_pays_at_no_context(tmp_path: Path) -> None:
    """It costs nothing and gains nothing: a speedup of exactly 1."""
    report = RUNS["a draft that never proposes"].report(tmp_path / "run")
    (axis,) = report.section("context")
    assert {best.gamma for item in axis.ranges for best in item.best} == {0}
    assert axis.pays_below is not None
    assert axis.pays_below.value == 0
    assert "no gamma pays at any length" in as_terminal(report, 100, "context")


@pytest.mark.parametrize("name", ["documents of one token", "weights"])
def test_without_rounds_nothing_is_said_of_p_min(name: str, tmp_path: Path) -> None:
    """Tokens per round are not known, and not 0."""
    report = RUNS[name].report(tmp_path / "run")
    assert report.answer.tokens_per_round is None
    assert "0.00" not in as_terminal(report, 100, "gammas")
    config = changed_question(report.asked.run.manifest.config, ["decision.p_min=auto"])
    assert build_report(report.asked.run, config=config).conditions.p_min == 0


@pytest.mark.parametrize("seed", range(3))
def test_one_long_document_of_a_slow_domain_is_not_hidden_by_the_half_that_it_falls_into(seed: int, tmp_path: Path) -> None:
    """30 documents of 16 tokens beside one of 2,000, which is most of the traffic and slower: no GO for what is unknown."""
    domains = {
        "short": Domain(documents=30, alpha=0.9, shortest=16, longest=16),
        "long": Domain(documents=1, alpha=0.2, shortest=2000, longest=2000),
    }
    report = build_report(write_run(tmp_path / "run", Recipe(domains=domains, gammas=(1, 3), seed=seed)))
    assert report.answer.verdict == "UNDECIDED"
    assert "long_tail" in codes(report)
