"""What stands behind the numbers: step times, how a head's files were read, single documents, and notes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from alphaprof.costs.cost_model import Cost
from alphaprof.render import wording
from alphaprof.render.blocks import Block, Table
from alphaprof.report import format as fmt
from alphaprof.report.build import Report
from alphaprof.report.sections.difficulty import DocumentResult


def times(report: Report) -> Iterator[Block]:
    """Yields where step times come from, and what they are."""
    cost, average = report.times, report.run.mean_context
    if cost is None:
        return
    yield f"step times: {', '.join(_origin(cost))}"
    if cost.contexts:
        documents = "" if average is None else f"; documents: {average:.0f} on average"
        yield f"timed at {', '.join(map(str, cost.contexts))} tokens of context{documents}"
    yield ""
    steps = {f"target, {fmt.many(tokens, 'token')}": ms for tokens, ms in cost.target_ms.items()}
    for draft, first in cost.draft_first_ms.items():
        steps |= {f"{draft}, first step, {fmt.many(tokens, 'token')} verified": ms for tokens, ms in first.items()}
    for what, by_draft in (
        ("a step", cost.draft_ms),
        ("first step after a full round", cost.draft_after_full_ms),
        ("a search, once a round", cost.lookup_ms),
        ("clearing the caches, once a round", cost.bookkeeping_ms),
    ):
        steps |= {f"{draft}, {what}": ms for draft, ms in by_draft.items() if ms > 0}
    rows = [
        (name, {"ms": fmt.number(ms, 3), "of T(1)": fmt.number(ms / cost.target_ms[1], 3) if 1 in cost.target_ms else ""})
        for name, ms in steps.items()
    ]
    yield Table(f"step times at {cost.context:.0f} tokens of context", ("ms", "of T(1)"), rows, named="step")
    for item in cost.memory:
        weights = f"{item.weight_bytes / 1e9:.2f} GB of weights" if item.weight_bytes else "no weights of its own"
        cache = f"{item.kv_bytes_per_token / 1e3:.1f} kB of cache a token"
        line = f"{item.draft}: {weights}, {cache} ({fmt.percent(item.kv_share)} of what target and draft take)"
        if item.lost_share is not None:
            line += f"; it costs {fmt.percent(item.lost_share)} of the context that fits beside the target"
        yield line


def _origin(cost: Cost) -> Iterator[str]:
    if cost.source == "measured":
        threads = f", {cost.threads} threads" if cost.threads else ""
        mode = f", {cost.mode}" if cost.mode else ""
        yield f"measured with {cost.engine} on {cost.device}{threads}{mode}"
    elif cost.source == "table":
        yield f"from the table {cost.device}"
    else:
        yield f"computed by a roofline for {cost.device}, not measured: {cost.accuracy}"
    yield f"{cost.dtype}, batch {cost.concurrency}"
    if cost.overhead_ms:
        yield f"{fmt.number(cost.overhead_ms)} ms of overhead in every target step"


def wiring(report: Report) -> Iterator[Block]:
    """Yields how each head's files were read."""
    for draft, facts in report.run.draft_models.items():
        if lines := list(wording.wiring_lines(facts)):
            yield f"draft {draft}: how its files were read"
            yield from (f"  {line}" for line in lines)
            yield ""


def documents(report: Report) -> Iterator[Block]:
    """Yields the documents that each draft serves worst and best, the slowest first."""
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
    for draft, rule in dict.fromkeys((item.draft, item.rule) for item in report.documents):
        mine = [item for item in report.documents if (item.draft, item.rule) == (draft, rule)]
        rows = [(fmt.short(item.domain), {name: cell(item) for name, cell in columns.items()}) for item in mine]
        title = f"draft {draft}, rule {rule}: worst and best documents, the slowest first"
        yield Table(title, tuple(columns), rows, below=[f"  sources: {_files(report, mine)}"], draft=draft)


def _files(report: Report, documents: Sequence[DocumentResult]) -> str:
    """Names the files of the sources that documents came from."""
    paths = [str(source["path"]).rstrip("/") for source in report.run.profile.get("data", [])]
    known = {item.source for item in documents}
    return ", ".join(
        f"{number} {fmt.short(path.rsplit('/', 1)[-1])}" for number, path in enumerate(paths) if number in known
    )


def notes(report: Report) -> Iterator[Block]:
    """Yields what is to know, and what to do about it."""
    for note in report.notes:
        yield f"note: {note.message}"
        yield f"      {note.remedy}"
