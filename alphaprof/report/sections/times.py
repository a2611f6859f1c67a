"""Step times, and where they come from."""

from __future__ import annotations

from collections.abc import Iterator

from alphaprof.costs.cost_model import MEASURED, TIMED, Cost
from alphaprof.render import format as fmt
from alphaprof.render.blocks import Block, Table
from alphaprof.report.build import RunReport

TITLE = "step times, and where they come from"
EMPTY = "the run has no step times (see --show notes)"


def draw(report: RunReport) -> Iterator[Block]:
    """Yield where step times come from, and what they are."""
    cost, average = report.times, report.run.mean_context
    if cost is None:
        return
    yield f"step times: {', '.join(_origin(cost))}"
    if cost.contexts:
        documents = "" if average is None else f"; documents: {average:.0f} on average"
        yield f"timed at {', '.join(map(str, cost.contexts))} tokens of context{documents}"
    if cost.concurrency > 1:
        yield "verification: one step for the tokens of all sequences in the batch, which draft independently"
    yield ""
    steps = {
        f"target, {fmt.many(tokens, 'token')}": (("target", "decode" if tokens == 1 else "verify", tokens), ms)
        for tokens, ms in cost.target_ms.items()
    }
    for draft, first in cost.draft_first_ms.items():
        for tokens, ms in first.items():
            steps[f"{draft}, first step, {fmt.many(tokens, 'token')} verified"] = (draft, "draft_first", tokens), ms
    for what, step, tokens, by_draft in (
        ("a step", "draft", 1, cost.draft_ms),
        ("first step after a full round", "draft", 2, cost.draft_after_full_ms),
        ("a search, once a round", "lookup", 1, cost.lookup_ms),
        ("bookkeeping, once a round", "bookkeeping", 1, cost.bookkeeping_ms),
    ):
        steps |= {f"{draft}, {what}": ((draft, step, tokens), ms) for draft, ms in by_draft.items() if ms > 0}
    spreads = {(each.model, each.step, each.tokens): each for each in cost.spread}
    rows = []
    for name, (key, ms) in steps.items():
        row = {"ms": fmt.number(ms, 3), "of T(1)": fmt.number(ms / cost.target_ms[1], 3) if 1 in cost.target_ms else ""}
        if spread := spreads.get(key):
            row |= {"mean": fmt.number(spread.mean_ms, 3), "10%": fmt.number(spread.p10_ms, 3)}
            row |= {"90%": fmt.number(spread.p90_ms, 3)}
        rows.append((name, row))
    columns = ("ms", "of T(1)", *(("mean", "10%", "90%") if spreads else ()))
    taken = f", medians of {fmt.many(cost.rounds, 'round')}" if cost.rounds else ""
    yield Table(f"step times at {cost.context:.0f} tokens of context{taken}", columns, rows, named="step")
    yield from path_lines(cost)
    for item in cost.memory:
        weights = f"{item.weight_bytes / 1e9:.2f} GB of weights" if item.weight_bytes else "no weights of its own"
        cache = f"{item.kv_bytes_per_token / 1e3:.1f} kB of cache a token"
        line = f"{item.draft}: {weights}, {cache} ({fmt.percent(item.kv_share)} of target and draft together)"
        if item.slots and item.slots_with_draft is not None:
            line += f"; {fmt.slots(item.slots, item.slots_with_draft)}"
        yield line
    if cost.others:
        models = ", ".join(map(fmt.short, cost.others))
        yield f"the table has rows of {models}, which this run does not have: they are not used"


def path_lines(cost: Cost) -> Iterator[str]:
    """Yield what the path alone costs that drafts need, which every speedup includes."""
    for draft, more in cost.path_overhead.items():
        yield f"the path that {draft} needs costs {fmt.percent(more)} alone: plain decoding there, over that of today"


def _origin(cost: Cost) -> Iterator[str]:
    if cost.source in TIMED:
        threads = f", {fmt.many(cost.threads, 'thread')}" if cost.threads else ""
        eager = ", eager" if cost.source == MEASURED else ""
        yield f"measured with {cost.engine} on {cost.device}{threads}{eager}"
    elif cost.source == "table":
        yield f"from the table {cost.device}"
    else:
        yield f"computed by a roofline for {cost.device}, not measured: {cost.accuracy}"
    yield f"{cost.dtype}, batch {cost.concurrency}"
    if cost.overhead_ms:
        yield f"{fmt.number(cost.overhead_ms)} ms of overhead in every target step"
