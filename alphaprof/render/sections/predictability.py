"""What the target alone says: how predictable it is, and what a draft would have to reach."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from alphaprof.render.blocks import Block, table_by_columns, table_of, text_names
from alphaprof.report import format as fmt
from alphaprof.report.build import Report
from alphaprof.report.sections.predictability import Budget, CertainRun, Predictability
from alphaprof.stats.estimate import Interval


def predictability(report: Report) -> Iterator[Block]:
    """Yields entropy, margin and the free draft by text, then KL budgets and what is certain of any draft."""
    texts = report.predictability
    if not texts:
        return
    columns: dict[str, Callable[[Predictability], str]] = {
        "docs": lambda item: str(item.documents),
        "entropy,\nnats": lambda item: _spread(item.entropy),
        "margin": lambda item: _spread(item.margin),
        "mean top\nprobability": lambda item: fmt.share_with_interval(item.top_prob),
    }
    if any(item.free for item in texts):
        columns |= {
            "free draft:\nalpha": lambda item: fmt.share_with_interval(item.free[0].alpha if item.free else None),
            "coverage": lambda item: fmt.share(item.free[0].coverage if item.free else None),
            "tokens/round": lambda item: fmt.interval(item.free[0].tokens_per_round if item.free else None),
        }
    title = "the target alone: how predictable is it? Median, and from the tenth to the ninetieth percentile"
    yield from table_of(title, texts, columns)
    names = text_names(texts, texts)
    budgets = [{budget.rule: _budget(budget) for budget in item.budgets} for item in texts]
    title = "KL budget, nats: where half, 90 % and 99 % of the positions are still certain"
    yield table_by_columns(title, list(zip(names, budgets, strict=True)))
    runs = [{f"KL <= {run.epsilon:g}": _run(run) for run in item.runs if run.rule == "strict"} for item in texts]
    title = f"rule strict, gamma {texts[0].runs[0].gamma}: what is certain of any draft whose KL(p||q) is nowhere larger"
    yield table_by_columns(title, list(zip(names, runs, strict=True)))
    yield "certain of any draft: share of positions, mean run of certain tokens from a position on, least tokens per round."
    yield "mean top probability: where the text was sampled, no draft that proposes one token can be accepted more often."
    yield (
        "KL budget: a draft whose KL(p||q) stays below the first number is certainly right at half of the positions, below "
        "the second at 90 %, below the third at 99 %. No draft is needed to know it: it is what a draft would have to reach."
    )


def _budget(item: Budget) -> str:
    return "\n".join(fmt.interval(value, digits=3) for value in (item.half, item.ninety, item.ninety_nine))


def _run(run: CertainRun) -> str:
    """What is certain under a rule, for any draft with a bounded divergence."""
    lines = [fmt.share_with_interval(run.certain), f"run {fmt.interval(run.mean_run)}"]
    return "\n".join(lines + ([f">= {fmt.interval(run.tokens_per_round)}"] if run.tokens_per_round else []))


def _spread(values: Sequence[Interval]) -> str:
    """A median with its interval, and how far the values spread."""
    low, middle, high = values
    return f"{fmt.interval(middle)}\n{fmt.number(low.value)} to {fmt.number(high.value)}"
