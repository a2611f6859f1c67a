"""The terminal rendering of a report (rich): verdict, domains, times, causes, certificates, predictability. It computes
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

from rich.console import Console
from rich.padding import Padding
from rich.panel import Panel
from rich.text import Text

from alphaprof.log.manifest import DraftFacts
from alphaprof.render import wording
from alphaprof.render.tables import NAME_WIDTH, WIDE, fitted, named_table, plain, show
from alphaprof.report import format as fmt
from alphaprof.report.build import Report
from alphaprof.report.model import GammaResult, Result
from alphaprof.report.sections.attribution import CAUSES, Attribution, Cause
from alphaprof.report.sections.certificates import Certificate, Certificates, LosslessBounds
from alphaprof.report.sections.difficulty import Decile
from alphaprof.report.sections.predictability import Budget, CertainRun, Predictability
from alphaprof.report.sections.vocabulary import VocabularyCoverage
from alphaprof.stats.estimate import Interval

COLOURS = {"GO": "bold green", "NO-GO": "bold red", "UNDECIDED": "bold yellow"}
RULE_WIDTH, GAMMA_WIDTH, CONCURRENCY_WIDTH, LIMIT_WIDTH = 18, 16, 13, 12  # of a table's columns
FEW_MARK = "'"
EDGES, GAP = 3, 2  # columns beside a table's first one, and between any two
Row = tuple[Text, Mapping[str, str]]  # its name, and its cells by heading
Named = Attribution | Certificate | LosslessBounds | Predictability | Result | VocabularyCoverage
Item = TypeVar("Item", Attribution, LosslessBounds, Predictability, Result, VocabularyCoverage)


def render_terminal(report: Report, console: Console) -> None:
    """Print the report. Text from the data is printed as it is, without control characters or markup."""
    _header(report, console)
    _traffic(report, console)
    for draft in report.run.drafts:
        mine = [result for result in report.results if result.draft == draft]
        alpha = wording.alpha_name(report.run, draft)
        head = report.run.draft_models[draft].by_depth
        by_depth = head or report.run.imported is not None
        for rule in dict.fromkeys(result.rule for result in mine if result.verdict is not None):
            results = [result for result in mine if result.rule == rule and result.verdict is not None]
            title = f"draft {draft}, rule {rule}"
            _domains(title, results, mine, alpha, console)
            _lengths(title, results, console)
            if by_depth:
                _depths(title, results, console)
            _requests(title, results, not head, console)
            _concurrencies(title, results, console)
            _causes(title, [item for item in report.causes if (item.draft, item.rule) == (draft, rule)], console)
        others = [result for result in mine if result.verdict is None]
        _others(f"draft {draft}: {alpha} under other rules", others, console)
        shown = {result.gammas for result in mine if result.verdict is not None}  # rules can coincide (prompt lookup)
        for rule in dict.fromkeys(result.rule for result in others if result.gammas and result.gammas not in shown):
            same = [result for result in others if result.rule == rule]
            _lengths(f"draft {draft}, rule {rule}", same, console)
            if by_depth:
                _depths(f"draft {draft}, rule {rule}", same, console)
        _phases(f"draft {draft}: {alpha} by phase", mine, console)
        _vocabulary(draft, [item for item in report.vocabulary if item.draft == draft], console)
        _wiring(draft, report.run.draft_models[draft], console)
    if report.certificates is not None:
        _certificates(report, report.certificates, console)
    if report.predictability:
        _predictability(report.predictability, console)
    if report.times is not None:
        first, *rest = wording.times_lines(report.times, report.run.mean_context)
        console.print(plain(first))
        for line in rest:
            console.print(plain(f"  {line}"), highlight=False)
        console.print()
    _notes(_definitions(report), console)
    for warning in report.notes:
        console.print()
        console.print(Text("note: ", "yellow").append_text(plain(warning.message)))
        console.print(plain(f"      {warning.remedy}"))


def _header(report: Report, console: Console) -> None:
    run = report.run
    state = "complete" if run.complete else "PARTIAL"
    console.print(plain(f"alphaprof {report.alphaprof}   run {run.path} ({state})"))
    console.print(plain(f"target {run.target}   {run.dtype}   drafts {', '.join(run.drafts)}"))
    console.print(plain(f"text {'; '.join(run.texts) or 'none'}"))
    console.print(f"{fmt.many(run.documents, 'document')}, {fmt.many(run.positions, 'position')}", highlight=False)
    if run.imported is not None:
        known = "rounds are known at the served gamma only; alpha and coverage are not known (n/a)"
        console.print(plain(f"imported from per-request metrics of {run.imported}: {known}"))
    console.print()


def _traffic(report: Report, console: Console) -> None:
    """Print the engine-free answer, then the verdict, which needs step times."""
    traffic = report.traffic
    if traffic.tokens_per_round is not None:
        emits = fmt.interval(traffic.tokens_per_round)
        setting = f"draft {traffic.draft}, rule {traffic.rule}, gamma {traffic.gamma}"
        console.print(plain(f"{fmt.sentence(wording.any_engine(report))}, {setting}: a round emits {emits} tokens,"))
        console.print("and pays where it costs less than that many plain decode steps.", highlight=False)
        if traffic.break_even_length is not None:
            here = fmt.number(traffic.break_even_length)
            slow = " (below 1: plain decoding was slow when it was timed)" if traffic.break_even_length < 1 else ""
            console.print(f"With the step times below it costs {here}{slow}.", highlight=False)
        console.print()
    wanted = f"  for the whole traffic, at least {traffic.min_speedup:g}x wanted\n"
    lines = Text.assemble((traffic.verdict, COLOURS[traffic.verdict]), wanted, plain(traffic.reason))
    for line in wording.speedup_lines(traffic, report.confidence):
        lines.append(f"\n{line}")
    shares = ", ".join(f"{fmt.short(domain)} {fmt.percent(weight)}" for domain, weight in traffic.weights.items())
    origin = "observed shares of tokens" if traffic.weights_observed else "shares of tokens from the profile"
    lines.append("\n").append_text(plain(f"weights ({origin}): {shares}"))
    if traffic.load:
        each = ", ".join(f"{item.concurrency}: {wording.best_at(item)}" for item in traffic.load)
        last = wording.pays(traffic.pays_up_to, [item.concurrency for item in traffic.load])
        limit = {"none": "it pays at none of these", "all": "it pays at all of these"}.get(last, f"it pays up to {last}")
        lines.append(f"\nby sequences decoded at a time (best gamma of all documents): {each}; {limit}")
    console.print(Panel(lines, title="verdict", title_align="left", expand=False))


def _of_best(cell: Callable[[GammaResult], str]) -> Callable[[Result], str]:
    """Returns how a result is written by its best gamma, from how that is."""
    return lambda result: cell(best) if (best := wording.at_best(result)) else fmt.NOTHING


def _domains(title: str, results: Sequence[Result], every: Sequence[Result], alpha: str, console: Console) -> None:
    """Print the results of a rule; `every` result of the draft tells which domains have several kinds of text. `alpha`: what
    it is called.
    """
    covered, wide = all(result.coverage == 1 for result in results), console.width >= WIDE
    halves = any(map(wording.of_all, results))
    columns: dict[str, Callable[[Result], str]] = {
        "docs": lambda item: fmt.documents(item.documents, item.clusters),
        "coverage": lambda item: fmt.share(item.coverage),
        alpha: lambda item: fmt.share_with_interval(item.alpha),
        "gamma": lambda item: str(item.best_gamma or fmt.NOTHING),
        "tokens/round": _of_best(lambda best: fmt.interval(best.tokens_per_round)),
        "iid formula": _of_best(
            lambda best: (
                fmt.NOTHING  # a formula for rounds that there are none of
                if best.iid_error is None
                else _formula(fmt.number(best.iid_tokens_per_round), best.iid_error)
            )
        ),
        "break-even": _of_best(lambda best: fmt.number(best.break_even_length)),
        "speedup": lambda item: (
            fmt.interval(item.speedup, "x") + (f" [all {half}]" if (half := wording.of_all(item)) else "")
        ),
        "of all": wording.of_all,
        "verdict": lambda item: str(item.verdict),
    }
    if covered:
        del columns["coverage"]
    if not (covered and wide) or alpha != "alpha":  # the formula takes acceptance for the same at every depth
        del columns["iid formula"]
    if wide and halves:
        columns["speedup"] = lambda item: fmt.interval(item.speedup, "x")
    else:
        del columns["of all"]
    undecided: dict[str, list[str]] = {}
    for result in results:
        if result.verdict == "UNDECIDED":
            undecided.setdefault(result.reason, []).append(fmt.short(result.domain))
    reasons = [_indented(f"{', '.join(domains)}: {reason}") for reason, domains in undecided.items()]
    _table(f"{title}: by domain", results, columns, console, among=every, left=("verdict",), below=reasons)


def _formula(value: str, error: float | None) -> str:
    """What the textbook formula would have said, and by how much it is too high."""
    return value if error is None else f"{value} ({fmt.signed_percent(error)})"


def _others(title: str, results: Sequence[Result], console: Console) -> None:
    """Print alpha of the rules that the verdict does not concern: a row a domain, a column a rule."""
    if not results:
        return
    rows = [
        (plain(name), {item.rule: fmt.share_with_interval(item.alpha).replace(" [", f"{_mark(item)}\n[") for item in same})
        for name, same in wording.by_text(results).items()
    ]
    parts = _side_by_side(dict.fromkeys((result.rule for result in results), RULE_WIDTH), console.width - NAME_WIDTH)
    notes = {
        "*": "  * off-policy: the rule's own decoding would not emit this text",
        "~": "  ~ lossy: one step at a time along the target's own text; what it emits itself is not measured",
    }
    marks = {_mark(result) for result in results}
    _tables(title, rows, console, parts, notes=[note for mark, note in notes.items() if mark in marks])


def _mark(result: Result) -> str:
    """The mark of an alpha, as wide where there is none."""
    return fmt.mark(result.on_policy, result.lossy) or " "


def _phases(title: str, results: Sequence[Result], console: Console) -> None:
    """Print alpha while thinking and while answering, where the profile tells them apart."""
    columns: dict[str, Callable[[Result], str]] = {
        "rule": lambda item: item.rule + _mark(item),
        "thinking": lambda item: fmt.share_with_interval(item.phases["thinking"].alpha),
        "answer": lambda item: fmt.share_with_interval(item.phases["answer"].alpha),
        "share of thinking": lambda item: fmt.percent(item.phases["thinking"].positions / item.positions),
    }
    _table(title, [result for result in results if result.phases], columns, console, among=(), left=("rule",))


def _lengths(title: str, results: Sequence[Result], console: Console) -> None:
    """Print tokens per round and speedup for every gamma, in as many tables as it takes to show every digit."""
    shown = [result for result in results if result.gammas]
    if not shown:
        return
    first = shown[0].gammas
    timed = first[0].break_even_length is not None
    rows = [
        (name, {str(item.gamma): _length(item) for item in result.gammas})
        for name, result in zip(_names(shown, results), shown, strict=True)
    ]
    costs = [
        (Text("full round costs"), {str(item.gamma): fmt.number(item.full_round_cost) for item in first}),
        (Text("v = T(g+1)/T(1)"), {str(item.gamma): fmt.number(item.verify_cost) for item in first}),
    ]
    parts = _side_by_side(dict.fromkeys((str(item.gamma) for item in first), GAMMA_WIDTH), console.width - NAME_WIDTH)
    what = "tokens per round / speedup" if timed else "tokens per round"
    _tables(f"{title}: {what} by gamma", rows, console, parts, footer=costs if timed else ())


def _depths(title: str, results: Sequence[Result], console: Console) -> None:
    """Print acceptance by depth at the largest gamma: of the drafts that were reached, and of all rounds with a proposal."""
    shown = [result for result in results if result.gammas and None not in result.gammas[-1].reached]
    if not shown:
        return
    rows, few = [], False
    for name, result in zip(_names(shown, results), shown, strict=True):
        last, cells = max(result.gammas, key=lambda item: item.gamma), {}
        for depth, (one, first, reached) in enumerate(zip(last.conditional, last.marginal, last.reached, strict=True), 1):
            mark = FEW_MARK if one is not None and (reached or 0) < wording.FEW else ""
            cells[str(depth)] = f"{fmt.share(one)}{mark} / {fmt.share(first)}"
            few |= bool(mark)
        rows.append((name, cells))
    depths = dict.fromkeys(map(str, range(1, max(item.gamma for item in shown[0].gammas) + 1)), GAMMA_WIDTH)
    parts = _side_by_side(depths, console.width - NAME_WIDTH)
    what = f"at gamma {len(depths)}, accepted by depth: of drafts that were reached / first d drafts of a round"
    note = f"  {FEW_MARK} of fewer than {wording.FEW} drafts"
    _tables(f"{title}, {what}", rows, console, parts, notes=[note] if few else [])


def _vocabulary(draft: str, items: Sequence[VocabularyCoverage], console: Console) -> None:
    """Print how much of each text a draft with a reduced vocabulary can propose."""
    columns: dict[str, Callable[[VocabularyCoverage], str]] = {
        "docs": lambda item: str(item.documents),
        "can propose": lambda item: fmt.share_with_interval(item.proposable),
    }
    note = [_indented("share of the tokens that the draft has in its vocabulary: no rule that keeps the text accepts more")]
    _table(f"draft {draft}: coverage of its vocabulary", items, columns, console, below=note)


def _wiring(draft: str, facts: DraftFacts, console: Console) -> None:
    """Print how a head's files were read."""
    lines = list(wording.wiring_lines(facts))
    if lines:
        console.print(plain(f"draft {draft}: how its files were read"))
        for line in lines:
            console.print(_indented(line))
        console.print()


def _length(item: GammaResult) -> str:
    tokens = fmt.number(item.tokens_per_round.value if item.tokens_per_round else None)
    return tokens if item.speedup is None else f"{tokens} / {fmt.number(item.speedup.value)}"


def _requests(title: str, results: Sequence[Result], formula: bool, console: Console) -> None:
    """Print what requests and single documents see of a speedup, at the gamma of the table above. `formula`: whether the
    textbook formula has a say.
    """
    columns = {
        "gamma": lambda best: str(best.gamma),
        "speedup": lambda best: fmt.number(best.speedup and best.speedup.value, unit="x"),
        "whole requests": lambda best: fmt.number(best.request_speedup and best.request_speedup.value, unit="x"),
        "documents p10 / p50 / p90": lambda best: " / ".join(
            fmt.number(value) for value in (best.of_documents.p10, best.of_documents.p50, best.of_documents.p90)
        ),
        "slower": lambda best: fmt.percent(best.of_documents.slower),
        "iid would have said": lambda best: _formula(fmt.number(best.iid_speedup, unit="x"), best.iid_speedup_error),
    }
    if not formula:
        del columns["iid would have said"]
    shown = [result for result in results if (best := wording.at_best(result)) and best.of_documents]
    cells = {name: _of_best(cell) for name, cell in columns.items()}
    _table(f"{title}: requests and single documents", shown, cells, console, among=results)


def _concurrencies(title: str, results: Sequence[Result], console: Console) -> None:
    """Print the best speedup at every concurrency, and up to which of them the draft pays."""
    shown = [result for result in results if result.load]
    known = list(dict.fromkeys(item.concurrency for result in shown for item in result.load))
    if not known:
        return
    rows = []
    for name, result in zip(_names(shown, results), shown, strict=True):
        cells = dict.fromkeys(map(str, known), fmt.NOTHING) | {"pays up to": wording.pays(result.pays_up_to, known)}
        rows.append((name, cells | {str(item.concurrency): wording.best_at(item) for item in result.load}))
    parts = _side_by_side(dict.fromkeys(map(str, known), CONCURRENCY_WIDTH), console.width - NAME_WIDTH - LIMIT_WIDTH)
    title = f"{title}: best speedup (gamma) of all documents, by sequences decoded at a time"
    _tables(title, rows, console, ([*part, "pays up to"] for part in parts))


def _causes(title: str, items: Sequence[Attribution], console: Console) -> None:
    """Print what one draft loses under a rule: a row a domain, a column a cause, and the remedy that could bring most."""
    if not items:
        return
    names = [name for name in CAUSES if any(cause.name == name for item in items for cause in item.causes)]
    losses: dict[str, Callable[[Attribution], str]] = {"lost": lambda item: fmt.percent(item.lost.value)}
    losses |= {name.replace(" ", "\n", 1): partial(_share_of, name=name) for name in names}
    gains: dict[str, Callable[[Attribution], str]] = {
        "most to gain": lambda item: item.best or fmt.NOTHING,
        "now": lambda item: wording.reached(item.tokens_per_round, item.speedup),
        "with it": lambda item: (
            wording.reached(best.tokens_per_round, best.speedup) if (best := _best(item)) else fmt.NOTHING
        ),
        "nothing\nlost": lambda item: wording.reached(None, item.perfect_speedup),
    }
    remedies = {best.name: best.remedy for item in items if (best := _best(item))}
    below, left = [_indented(f"{name}: {remedies[name]}") for name in names if name in remedies], ("most to gain",)
    if console.width >= WIDE:
        wide = f"{title}: what is lost, by cause, and what removing it could bring"
        _table(wide, items, losses | gains, console, left=left, below=below)
    else:
        _table(f"{title}: what is lost, by cause", items, losses, console, last=False)
        _table(f"{title}: what removing a cause could bring", items, gains, console, left=left, below=below)


def _best(item: Attribution) -> Cause | None:
    return next((cause for cause in item.causes if cause.name == item.best), None)


def _share_of(item: Attribution, name: str) -> str:
    return next((fmt.percent(cause.share.value) for cause in item.causes if cause.name == name), "")


def _certificates(report: Report, certificates: Certificates, console: Console) -> None:
    """Print what thresholds say about each draft."""
    infinite, nothing = wording.without_mean_divergence(report), wording.uncertified(report)
    for draft in dict.fromkeys(item.draft for item in certificates.certificates):
        if draft in infinite:
            console.print(plain(f"draft {infinite[draft]}"))
            console.print()
        if draft not in nothing:
            mine = [item for item in certificates.certificates if item.draft == draft]
            deciles = [item for item in report.difficulty if item.draft == draft]
            _certified_positions(draft, mine, deciles, draft not in infinite, console)
        _lossless(draft, [item for item in certificates.lossless if item.draft == draft], draft in infinite, console)
    lines = [
        "certified: KL(p||q) is below the threshold at which the rule can reject: acceptance was certain beforehand.",
        "What is accepted beyond that was right, but not certain to be. Position by position: threshold_RULE in the log.",
    ]
    lines = lines if certificates.certificates else []  # else no draft has a distribution
    if certificates.inexact:
        part = fmt.percent(certificates.inexact)
        lines.append(f"At {part} of the positions some rule accepts more tokens than were looked at: a lower bound there.")
    if certificates.unknown:
        lines.append(f"No certificate is known for {', '.join(certificates.unknown)}: no threshold, whatever the draft.")
    if lines:
        _notes([*lines, ""], console)


def _certified_positions(
    draft: str, mine: Sequence[Certificate], deciles: Sequence[Decile], averaged: bool, console: Console
) -> None:
    """Print what is certain of a draft. `averaged`: whether its divergence has a mean."""
    texts: dict[tuple[str, str, str, bool], list[Certificate]] = {}
    for item in mine:
        texts.setdefault((item.domain, item.continuation, str(item.sampling), item.on_policy), []).append(item)
    names = _names([same[0] for same in texts.values()], mine)
    certified, rejected = (
        [(name, {item.rule: cell(item) for item in same}) for name, same in zip(names, texts.values(), strict=True)]
        for cell in (_certified, _rejected)
    )
    _tables(f"draft {draft}: certified of accepted, by domain", certified, console)
    rules = {item.rule for item in mine}
    _deciles(draft, [item for item in deciles if item.rule in rules], console)
    if averaged:
        _tables(f"draft {draft}: share rejected, and at most at this mean KL(p||q)", rejected, console)
    certain = sum(round(item.certified.value * item.positions) for item in mine)
    wrong = sum(item.contradicted for item in mine)
    counted = f"{fmt.count(wrong)} of {fmt.count(certain)} certified positions, all rules together"
    console.print(f"  certified and yet rejected: {counted}\n", highlight=False)


def _certified(item: Certificate | Decile) -> str:
    if item.certified is None or item.accepted is None:
        return fmt.NOTHING
    value = f"{fmt.share(item.certified.value)} of {fmt.share(item.accepted.value)}"
    return f"{value}\n[{fmt.share(item.certified.low, 2)}, {fmt.share(item.certified.high, 2)}]"


def _rejected(item: Certificate) -> str:
    return f"{fmt.share(1 - item.accepted.value)} <= {fmt.share(item.rejected_at_most)}"


def _deciles(draft: str, items: Sequence[Decile], console: Console) -> None:
    """Print tables by tenths of the target's margin, then of its entropy, one for each kind of text."""
    for axis in dict.fromkeys(item.axis for item in items):
        for kind, same in wording.by_kind([item for item in items if item.axis == axis]).items():
            rows: dict[tuple[float | None, float | None], tuple[Text, dict[str, str]]] = {}
            for item in same:
                rows.setdefault((item.low, item.high), (Text(_range(item)), {}))[1][item.rule] = _certified(item)
            unit = ", nats" if axis == "entropy" else ""
            title = f"draft {draft}: certified of accepted, by tenths of the target's {axis}{unit}{kind}"
            _tables(title, list(rows.values()), console, named=axis)


def _range(item: Decile) -> str:
    """A tenth by where it begins: the next one begins where it ends."""
    edge = item.high if item.low is None else item.low
    if edge is None:
        return "all"
    value = fmt.share(edge) if item.axis == "margin" else fmt.number(edge, 3)
    return f"{'below' if item.low is None else 'from'} {value}"


def _lossless(draft: str, bounds: Sequence[LosslessBounds], cut: bool, console: Console) -> None:
    """Print beta and its bounds, by domain; of a draft whose vocabulary is `cut` no infinite means."""
    columns: dict[str, Callable[[LosslessBounds], str]] = {
        "beta": lambda item: fmt.share_with_interval(item.beta),
        "bound": lambda item: fmt.share_with_interval(item.sharp),
        "mean of the\nsmaller KL": lambda item: fmt.number(item.mean_divergence),
        "bound from\nthe mean": lambda item: fmt.share(item.from_mean),
    }
    if cut and all(math.isinf(item.mean_divergence) for item in bounds):
        columns = dict(list(columns.items())[:2])
    title = f"draft {draft}: lossless acceptance, and what the smaller KL of each position guarantees"
    note = "  of text that was not sampled: beta at temperature 1 along it; lossless sampling would not write it"
    below = [Text(note, "dim")] if any(item.sampling is None for item in bounds) else []
    _table(title, bounds, columns, console, below=below)


def _predictability(texts: Sequence[Predictability], console: Console) -> None:
    """Print what the target alone says."""
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
    _table(title, texts, columns, console)
    names = _names(texts, texts)
    budgets = [{budget.rule: _budget(budget) for budget in item.budgets} for item in texts]
    title = "KL budget, nats: where half, 90 % and 99 % of the positions are still certain"
    _tables(title, list(zip(names, budgets, strict=True)), console)
    runs = [{f"KL <= {run.epsilon:g}": _run(run) for run in item.runs if run.rule == "strict"} for item in texts]
    title = f"rule strict, gamma {texts[0].runs[0].gamma}: what is certain of any draft whose KL(p||q) is nowhere larger"
    _tables(title, list(zip(names, runs, strict=True)), console)
    notes = [
        "certain of any draft: share of positions, mean run of certain tokens from a position on, least tokens per round.",
        "mean top probability: where the text was sampled, no draft that proposes one token can be accepted more often.",
        "KL budget: a draft whose KL(p||q) stays below the first number is certainly right at half of the positions, below",
        "the second at 90 %, below the third at 99 %. No draft is needed to know it: it is what a draft would have to "
        "reach.",
    ]
    _notes([*notes, ""], console)


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


def _definitions(report: Report) -> list[str]:
    """What the words of the report mean."""
    lines = [
        f"alpha: acceptance over all positions with a proposal. Brackets: {fmt.level(report.confidence)} intervals over "
        "documents.",
        "tokens/round: tokens emitted per verification, the target's own included. gamma: drafted tokens per round.",
        "iid formula: tokens/round if acceptance were independent from position to position; by how much that is too high.",
        "break-even: tokens/round at which the draft starts to pay, the mean cost of a round in decode steps. A full round "
        "costs gamma c + v, a search and clearing the caches; c = T_draft/T(1), v = T(gamma+1)/T(1).",
        "speedup: decode time without the draft / with it, prefill excluded; whole requests: prefill of target and draft "
        "included. Slower: share of documents that a draft slows down.",
        "verdict: where draft or gamma is auto, one half of the documents chooses and the other half is tested. The speedup "
        "of a domain is that of the tested half; of all: over all documents, too high on average if some chose gamma.",
    ]
    if any(facts.by_depth for facts in report.run.draft_models.values()):
        lines[1:1] = [
            f"accept@1: {wording.ACCEPT_AT_1}",
            "A full round of a head costs first(1) + (gamma - 1) c + v: its first step reads one token after a round of "
            "which nothing was accepted.",
        ]
    lines += _of_causes({report.run.draft_models[item.draft].by_depth for item in report.causes})
    if any(result.load for result in report.results):
        lines.append(
            "by concurrency: the gamma of each is the best one of all documents, which can be another than the chosen one "
            "of the other tables, and too high on average."
        )
    if any(result.estimator == "expected" for result in report.results):
        lines.append("lossless: rounds are exact expectations given the texts; accept and reject are not drawn at random.")
    if any(result.rule.startswith("tree") for result in report.results):
        lines.append(
            "tree: gamma is the depth of a full tree, w + w^2 + ... + w^gamma nodes; its verification was not timed."
        )
    return lines


def _of_causes(heads: Collection[bool]) -> Iterator[str]:
    """Yields what the words about causes mean. `heads`: whether drafts with causes have depths."""
    if not heads:
        return
    yield (
        "lost: share of positions whose token was not an accepted draft. Each has one cause: the first one, from left "
        "to right, that applies."
    )
    limits = (
        ": at most that; below 1x its remedy alone does not make the draft pay. Trees and prompt lookup held the token for "
        "a fact; the other remedies count as always right."
    )
    same = "with it: speedup (t: tokens/round) with nothing lost to that cause, at the same gamma and cost of a round"
    yield same + (limits if False in heads else ".")
    if True in heads:
        yield f"causes of a draft head: {wording.CAUSES_OF_HEADS}"


def _names(items: Iterable[Named], among: Sequence[wording.OfText]) -> list[Text]:
    """Names the text of each item, marked where it is off-policy."""
    return [plain(wording.text_name(item, among, not item.on_policy)) for item in items]


def _notes(lines: Iterable[str], console: Console) -> None:
    for line in lines:
        console.print(line, style="dim", highlight=False)


def _indented(text: str) -> Padding:
    return Padding(plain(text), (0, 0, 0, 2))


def _table(
    title: str,
    items: Sequence[Item],
    columns: Mapping[str, Callable[[Item], str]],
    console: Console,
    *,
    among: Sequence[wording.OfText] | None = None,
    left: Collection[str] = (),
    below: Iterable[Padding | Text] = (),
    last: bool = True,
) -> None:
    """Print a table of items, nothing where there are none: by its heading, each column writes an item as a cell. Columns in
    `left` hold words. Items are named by their text `among` others (default: the items), and notes stand `below`. After the
    `last` table there is an empty line.
    """
    if not items:
        return
    table = named_table("domain", *columns, left=left)
    for name, item in zip(_names(items, items if among is None else among), items, strict=True):
        cells = fitted([cell(item) for cell in columns.values()], console)
        table.add_row(name, *(Text(cell, COLOURS.get(cell, "")) for cell in cells))
    show(table, title, console)
    for note in below:
        console.print(note)
    if last:
        console.print()


def _tables(
    title: str,
    rows: Sequence[Row],
    console: Console,
    parts: Iterable[Sequence[str]] | None = None,
    *,
    named: str = "domain",
    footer: Sequence[Row] = (),
    notes: Iterable[str] = (),
) -> None:
    """Print named rows as a table for each part of their columns, with a `footer` below a line, then notes. Default: as many
    parts as it takes to show every cell whole.
    """
    if parts is None:
        widths: dict[str, int] = {}
        for column, cell in (item for _, cells in rows for item in cells.items()):
            widths[column] = max(widths.get(column, 0), *(len(line) + GAP for line in (column, *cell.split("\n"))))
        parts = _side_by_side(widths, console.width - NAME_WIDTH - EDGES)
    for part in parts:
        table = named_table(named, *part)
        for section in (rows, footer):
            for name, cells in section:
                table.add_row(name, *(cells.get(column, "") for column in part))
            table.add_section()
        show(table, title, console)
    _notes(notes, console)
    console.print()


def _side_by_side(widths: Mapping[str, int], room: int) -> Iterator[list[str]]:
    """Yields columns in parts that fit, one column at least; `widths` include the gap to the next."""
    part: list[str] = []
    left = room
    for column, width in widths.items():
        if part and width > left:
            yield part
            part, left = [], room
        part.append(column)
        left -= width
    if part:
        yield part
