"""The documents that a draft serves worst and best."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from alphaprof.costs.rounds import StepTimes, time_spent
from alphaprof.render import format as fmt
from alphaprof.render.blocks import Block, Table
from alphaprof.report.build import RunReport
from alphaprof.report.inputs import DraftPool
from alphaprof.totals.documents import Documents

EXTREMES = 5  # documents at either end
SHORTEST = 16  # tokens: the rounds of shorter texts are too few to rank them
TITLE = "the documents that a draft serves worst and best"
EMPTY = f"it needs a chosen gamma (see --show drafts), and documents of at least {SHORTEST} tokens"


@dataclass(frozen=True)
class DocumentResult:
    """One of the documents that a draft serves worst or best, at the gamma that is best for its domain."""

    domain: str
    draft: str
    rule: str
    gamma: int
    document: int  # its number in the run's documents/
    source: int  # place in the profile's data, from 0
    source_row: int  # row there, from 0
    prompt_hash: str  # SHA-256 of the prompt's token ids
    tokens: int  # of its continuation
    alpha: float | None  # acceptance over its positions with a proposal; None: it has none
    tokens_per_round: float  # over all of its rounds
    speedup: float | None  # None: no step times


def compute(report: RunReport) -> tuple[DocumentResult, ...]:
    """Return the EXTREMES documents of every draft and rule at either end, the slowest first; all of them if they are few.

    By speedup, or by tokens per round if the draft has no step times, at the gamma that is best for their domain. Texts of
    fewer than SHORTEST tokens are left out.
    """
    by_rule: dict[tuple[str, str], list[DocumentResult]] = {}
    for item, result in zip(report.pools, report.results, strict=True):
        if result.verdict is None or not result.gamma or not item.pool.defined:
            continue
        either_end = _ends(item, result.gamma, report.inputs.timing.times.get(item.draft), report.inputs.documents)
        by_rule.setdefault((item.draft, item.rule.id), []).extend(either_end)
    chosen: list[DocumentResult] = []
    for ends in by_rule.values():
        ends.sort(key=lambda item: item.tokens_per_round if item.speedup is None else item.speedup)
        chosen += ends if len(ends) <= 2 * EXTREMES else [*ends[:EXTREMES], *ends[-EXTREMES:]]
    return tuple(chosen)


def _ends(item: DraftPool, gamma: int, times: StepTimes | None, documents: Documents) -> Iterator[DocumentResult]:
    """Yield the documents of one pool that can be among those at either end."""
    pool, counts = item.pool, item.pool.counts(gamma)
    eligible = np.flatnonzero((pool["positions"] >= SHORTEST) & (counts.rounds > 0))
    tokens = counts.tokens / np.maximum(counts.rounds, 1e-300)
    spent = time_spent(counts, times.mixed([counts])) if times is not None else None
    speeds = counts.tokens / np.maximum(spent, 1e-300) if spent is not None else None
    order = eligible[np.argsort((tokens if speeds is None else speeds)[eligible], kind="stable")]
    if len(order) > 2 * EXTREMES:
        order = np.concatenate([order[:EXTREMES], order[-EXTREMES:]])
    rows = np.searchsorted(documents.numbers, pool["document"])
    for place in order:
        proposals = float(pool["proposals"][place])
        about = {name: documents.table[name][int(rows[place])].as_py() for name in ("source", "source_row", "prompt_hash")}
        yield DocumentResult(
            domain=item.domain,
            draft=item.draft,
            rule=item.rule.id,
            gamma=gamma,
            document=int(pool["document"][place]),
            **about,
            tokens=int(pool["positions"][place]),
            alpha=float(pool["accepted"][place]) / proposals if proposals > 0 else None,
            tokens_per_round=float(tokens[place]),
            speedup=float(speeds[place]) if speeds is not None else None,
        )


def draw(report: RunReport) -> Iterator[Block]:
    """Yield the documents that each draft serves worst and best, the slowest first."""
    columns: Mapping[str, Callable[[DocumentResult], str]] = {
        "document": lambda item: str(item.document),
        "source": lambda item: str(item.source),
        "row": lambda item: str(item.source_row),
        "tokens": lambda item: fmt.count(item.tokens),
        "gamma": lambda item: str(item.gamma),
        "alpha": lambda item: fmt.share(item.alpha),
        "tokens/round": lambda item: fmt.number(item.tokens_per_round),
        "speedup": lambda item: fmt.number(item.speedup, unit="x"),
    }
    documents: Sequence[DocumentResult] = report.section("documents")
    for draft, rule in dict.fromkeys((item.draft, item.rule) for item in documents):
        mine = [item for item in documents if (item.draft, item.rule) == (draft, rule)]
        rows = [(fmt.short(item.domain), {name: cell(item) for name, cell in columns.items()}) for item in mine]
        title = f"draft {draft}, rule {rule}: worst and best documents, the slowest first"
        yield Table(title, tuple(columns), rows, below=[f"  sources: {_source_files(report, mine)}"], draft=draft)


def _source_files(report: RunReport, documents: Sequence[DocumentResult]) -> str:
    """Name the files of the sources that documents came from."""
    paths = [str(source["path"]).rstrip("/") for source in report.run.profile.get("data", [])]
    known = {item.source for item in documents}
    return ", ".join(
        f"{number} {fmt.short(path.rsplit('/', 1)[-1])}" for number, path in enumerate(paths) if number in known
    )
