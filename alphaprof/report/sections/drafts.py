"""Every draft by domain, at its best gamma."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from alphaprof.render import format as fmt
from alphaprof.render.blocks import Block, Figure, Table, Verdict, table_of
from alphaprof.report.answer import Result
from alphaprof.report.build import RunReport
from alphaprof.report.wording import alpha_name, formula, judged, of_best
from alphaprof.stats.grouping import grouped
from alphaprof.totals.count import by_chance

TITLE = "every draft by domain, at its best gamma"
EMPTY = "no document is complete yet"


def compute(report: RunReport) -> tuple[Result, ...]:
    """Return the results of every draft under the rules of the verdict, by domain and kind of text."""
    return report.results


def draw(report: RunReport) -> Iterator[Block]:
    """Yield a table of each draft and rule, and what the rounds of heads leave out."""
    yield Figure("acceptance")
    for title, results in judged(report):
        every = [result for result in report.results if result.draft == results[0].draft]
        yield _by_domain(title, results, every, alpha_name(report.run, results[0].draft))
    yield from _rounds_of_heads(report)


def _rounds_of_heads(report: RunReport) -> Iterator[str]:
    """Yield what engines may do with draft heads that these rounds leave out."""
    facts = report.run.draft_models
    heads = [draft for draft in report.run.drafts if facts[draft].by_depth and report.run.imported is None]
    if heads:
        yield f"rounds of {', '.join(heads)} draft a chain: an engine that drafts trees with it accepts more"
        drawn = [item.rule for item in report.judge.pools if item.draft in heads and by_chance(item.rule, facts[item.draft])]
        if drawn and not any(rule.rule.blocks for rule in drawn):
            yield "they verify token by token: by block (rule block) a round emits at least as many tokens on average"


def _by_domain(title: str, results: Sequence[Result], every: Sequence[Result], alpha: str) -> Table:
    """Return the results of a rule; `every` result of the draft tells which domains have several kinds of text. `alpha`:
    what it is called.
    """
    covered = all(result.coverage == 1 for result in results)
    columns: dict[str, Callable[[Result], str]] = {
        "docs": lambda item: fmt.documents(item.documents, item.units),
        "coverage": lambda item: fmt.share(item.coverage),
        alpha: lambda item: fmt.share_with_interval(item.alpha),
        "gamma": lambda item: str(item.gamma or fmt.NOTHING),
        "tokens/round": of_best(lambda best: fmt.interval(best.tokens_per_round)),
        "speedup": lambda item: fmt.interval(item.speedup, "x"),
        "verdict": lambda item: Verdict(str(item.verdict)),
        "break-even": of_best(lambda best: fmt.number(best.break_even_length)),
        "iid formula": of_best(
            lambda best: (
                fmt.NOTHING  # a formula without rounds
                if best.iid_error is None
                else formula(fmt.number(best.iid_tokens_per_round), best.iid_error)
            )
        ),
    }
    unneeded = {"coverage"} if covered else {"iid formula"}
    if alpha != "alpha":  # the formula takes acceptance for the same at every depth
        unneeded |= {"iid formula"}
    undecided = [(each, fmt.short(each.domain), each.documents_needed) for each in results if each.verdict == "UNDECIDED"]
    needed = [f"{domain} {fmt.count(count)}" for _, domain, count in undecided if count is not None]
    why = grouped((each.remedy or each.reason, domain) for each, domain, count in undecided if count is None)
    reasons = [f"  {', '.join(domains)}: {reason}" for reason, domains in why.items()]
    if needed:
        reasons.insert(0, f"  documents of a new run for an 80% chance of a verdict: {', '.join(needed)}")
    shown = {name: cell for name, cell in columns.items() if name not in unneeded}
    (table,) = table_of(f"{title}: by domain", results, shown, among=every, left=("verdict",), below=reasons)
    return table
