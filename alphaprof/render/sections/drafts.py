"""Every draft by domain under the rules of the verdict, by gamma and depth, under other rules, and what it loses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from alphaprof.render import wording
from alphaprof.render.blocks import Block, Row, Table, table_by_columns, table_of, text_names
from alphaprof.report import format as fmt
from alphaprof.report.build import Report
from alphaprof.report.model import GammaResult, Result
from alphaprof.report.sections.attribution import CAUSES, Attribution, Cause
from alphaprof.report.sections.vocabulary import VocabularyCoverage

FEW_MARK = "'"
MARKS = {
    "*": "* off-policy: the rule's own decoding would not emit this text",
    "~": "~ lossy: one step at a time along the target's own text; what it emits itself is not measured",
    FEW_MARK: f"{FEW_MARK} of fewer than {wording.FEW} drafts",
}


def judged(report: Report) -> Iterator[tuple[str, list[Result]]]:
    """Yields the results of each draft and rule that the verdict concerns, with the title that they share."""
    for draft in report.run.drafts:
        mine = [result for result in report.results if result.draft == draft and result.verdict is not None]
        for rule in dict.fromkeys(result.rule for result in mine):
            yield f"draft {draft}, rule {rule}", [result for result in mine if result.rule == rule]


def drafts(report: Report) -> Iterator[Block]:
    """Yields the results of every draft by domain, and of drafts with a reduced vocabulary how much of a text they have."""
    for title, results in judged(report):
        every = [result for result in report.results if result.draft == results[0].draft]
        yield _by_domain(title, results, every, wording.alpha_name(report.run, results[0].draft))
    coverage: dict[str, Callable[[VocabularyCoverage], str]] = {
        "docs": lambda item: str(item.documents),
        "can propose": lambda item: fmt.share_with_interval(item.proposable),
    }
    note = "  share of the tokens that the draft has in its vocabulary: no rule that keeps the text accepts more"
    for draft in report.run.drafts:
        items = [item for item in report.vocabulary if item.draft == draft]
        yield from table_of(f"draft {draft}: coverage of its vocabulary", items, coverage, below=[note])


def of_best(cell: Callable[[GammaResult], str]) -> Callable[[Result], str]:
    """Returns how a result is written by its best gamma, from how that is."""
    return lambda result: cell(best) if (best := wording.at_best(result)) else fmt.NOTHING


def formula(value: str, error: float | None) -> str:
    """What the textbook formula would have said, and by how much it is too high."""
    return value if error is None else f"{value} ({fmt.signed_percent(error)})"


def _by_domain(title: str, results: Sequence[Result], every: Sequence[Result], alpha: str) -> Table:
    """The results of a rule; `every` result of the draft tells which domains have several kinds of text. `alpha`: what it is
    called.
    """
    covered = all(result.coverage == 1 for result in results)
    columns: dict[str, Callable[[Result], str]] = {
        "docs": lambda item: fmt.documents(item.documents, item.clusters),
        "coverage": lambda item: fmt.share(item.coverage),
        alpha: lambda item: fmt.share_with_interval(item.alpha),
        "gamma": lambda item: str(item.best_gamma or fmt.NOTHING),
        "tokens/round": of_best(lambda best: fmt.interval(best.tokens_per_round)),
        "speedup": lambda item: fmt.interval(item.speedup, "x"),
        "verdict": lambda item: str(item.verdict),
        "break-even": of_best(lambda best: fmt.number(best.break_even_length)),
        "iid formula": of_best(
            lambda best: (
                fmt.NOTHING  # a formula for rounds that there are none of
                if best.iid_error is None
                else formula(fmt.number(best.iid_tokens_per_round), best.iid_error)
            )
        ),
    }
    unneeded = {"coverage"} if covered else {"iid formula"}
    if alpha != "alpha":  # the formula takes acceptance for the same at every depth
        unneeded |= {"iid formula"}
    undecided: dict[str, list[str]] = {}
    for result in results:
        if result.verdict == "UNDECIDED":
            undecided.setdefault(result.reason, []).append(fmt.short(result.domain))
    reasons = [f"  {', '.join(domains)}: {reason}" for reason, domains in undecided.items()]
    shown = {name: cell for name, cell in columns.items() if name not in unneeded}
    (table,) = table_of(f"{title}: by domain", results, shown, among=every, left=("verdict",), below=reasons)
    return table


def gammas(report: Report) -> Iterator[Block]:
    """Yields tokens per round and speedup at every gamma, and acceptance by depth where depths differ, under every rule that
    has rounds of its own.
    """
    for draft in report.run.drafts:
        mine = [result for result in report.results if result.draft == draft]
        by_depth = report.run.draft_models[draft].by_depth or report.run.imported is not None
        decisive = [result for result in mine if result.verdict is not None]
        known = {result.gammas for result in decisive}  # rules can coincide (prompt lookup)
        others = [result for result in mine if result.verdict is None]
        new = {result.rule for result in others if result.gammas and result.gammas not in known}
        for same in (decisive, [result for result in others if result.rule in new]):
            for rule in dict.fromkeys(result.rule for result in same):
                results = [result for result in same if result.rule == rule]
                yield from _lengths(f"draft {draft}, rule {rule}", results)
                if by_depth:
                    yield from _depths(f"draft {draft}, rule {rule}", results)


def _lengths(title: str, results: Sequence[Result]) -> Iterator[Table]:
    """Yields tokens per round and speedup for every gamma."""
    shown = [result for result in results if result.gammas]
    if not shown:
        return
    first = shown[0].gammas
    timed = first[0].break_even_length is not None
    rows = [
        (name, {str(item.gamma): _length(item) for item in result.gammas})
        for name, result in zip(text_names(shown, results), shown, strict=True)
    ]
    costs = [
        ("full round costs", {str(item.gamma): fmt.number(item.full_round_cost) for item in first}),
        ("v = T(g+1)/T(1)", {str(item.gamma): fmt.number(item.verify_cost) for item in first}),
    ]
    what = "tokens per round / speedup" if timed else "tokens per round"
    yield table_by_columns(f"{title}: {what} by gamma", rows, footer=costs if timed else (), draft=shown[0].draft)


def _length(item: GammaResult) -> str:
    tokens = fmt.number(item.tokens_per_round.value if item.tokens_per_round else None)
    return tokens if item.speedup is None else f"{tokens} / {fmt.number(item.speedup.value)}"


def _depths(title: str, results: Sequence[Result]) -> Iterator[Table]:
    """Yields acceptance by depth at the largest gamma: of drafts that were reached, and of all rounds with a proposal."""
    shown = [result for result in results if result.gammas and None not in result.gammas[-1].reached]
    if not shown:
        return
    rows: list[Row] = []
    for name, result in zip(text_names(shown, results), shown, strict=True):
        last, cells = max(result.gammas, key=lambda item: item.gamma), {}
        for depth, (one, first, reached) in enumerate(zip(last.conditional, last.marginal, last.reached, strict=True), 1):
            mark = FEW_MARK if one is not None and (reached or 0) < wording.FEW else ""
            cells[str(depth)] = f"{fmt.share(one)}{mark} / {fmt.share(first)}"
        rows.append((name, cells))
    gamma = max(item.gamma for item in shown[0].gammas)
    what = f"at gamma {gamma}, accepted by depth: of drafts that were reached / first d drafts of a round"
    few = any(FEW_MARK in cell for _, cells in rows for cell in cells.values())
    below = [f"  {MARKS[FEW_MARK]}"] if few else []
    yield table_by_columns(f"{title}, {what}", rows, below=below, draft=shown[0].draft)


def rules(report: Report) -> Iterator[Block]:
    """Yields alpha of the rules that the verdict does not concern, a column a rule, then alpha by phase."""
    for draft in report.run.drafts:
        mine = [result for result in report.results if result.draft == draft and result.verdict is None]
        if not mine:
            continue
        rows = [
            (name, {item.rule: fmt.share_with_interval(item.alpha).replace(" [", f"{_mark(item)}\n[") for item in same})
            for name, same in wording.by_text(mine).items()
        ]
        marks = {_mark(result) for result in mine}
        title = f"draft {draft}: {wording.alpha_name(report.run, draft)} under other rules"
        below = [f"  {words}" for sign, words in MARKS.items() if sign in marks]
        yield table_by_columns(title, rows, below=below, draft=draft)
    for draft in report.run.drafts:
        yield from _phases(report, draft)


def _mark(result: Result) -> str:
    """The mark of an alpha, as wide where there is none."""
    return fmt.mark(result.on_policy, result.lossy) or " "


def _phases(report: Report, draft: str) -> Iterator[Table]:
    """Yields alpha while thinking and while answering, where the profile tells them apart."""
    columns: Mapping[str, Callable[[Result], str]] = {
        "rule": lambda item: item.rule + _mark(item),
        "thinking": lambda item: fmt.share_with_interval(item.phases["thinking"].alpha),
        "answer": lambda item: fmt.share_with_interval(item.phases["answer"].alpha),
        "share of thinking": lambda item: fmt.percent(item.phases["thinking"].positions / item.positions),
    }
    shown = [result for result in report.results if result.draft == draft and result.phases]
    title = f"draft {draft}: {wording.alpha_name(report.run, draft)} by phase"
    yield from table_of(title, shown, columns, among=(), left=("rule",))


def causes(report: Report) -> Iterator[Block]:
    """Yields what each draft loses: a row a domain, a column a cause, and the remedy that could bring most."""
    for title, results in judged(report):
        key = (results[0].draft, results[0].rule)
        items = [item for item in report.causes if (item.draft, item.rule) == key]
        names = [name for name in CAUSES if any(cause.name == name for item in items for cause in item.causes)]
        columns: dict[str, Callable[[Attribution], str]] = {"lost": lambda item: fmt.percent(item.lost.value)}
        columns |= {
            "most to gain": lambda item: item.best or fmt.NOTHING,
            "now": lambda item: wording.reached(item.tokens_per_round, item.speedup),
            "with it": lambda item: (
                wording.reached(best.tokens_per_round, best.speedup) if (best := _best(item)) else fmt.NOTHING
            ),
            "nothing\nlost": lambda item: wording.reached(None, item.perfect_speedup),
        }
        columns |= {name.replace(" ", "\n", 1): partial(_share_of, name=name) for name in names}
        remedies = {best.name: best.remedy for item in items if (best := _best(item))}
        below = [f"  {name}: {remedies[name]}" for name in names if name in remedies]
        what = "what is lost, by cause, and what removing it could bring"
        yield from table_of(f"{title}: {what}", items, columns, left=("most to gain",), below=below)


def _best(item: Attribution) -> Cause | None:
    return next((cause for cause in item.causes if cause.name == item.best), None)


def _share_of(item: Attribution, name: str) -> str:
    return next((fmt.percent(cause.share.value) for cause in item.causes if cause.name == name), "")
