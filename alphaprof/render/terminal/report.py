"""The terminal rendering of a report (rich). It computes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rich.console import Console
from rich.padding import Padding
from rich.panel import Panel
from rich.text import Text

from alphaprof.render.tables import NAME_WIDTH, WIDE, named_table, plain, show
from alphaprof.render.terminal.causes import causes_notes, causes_section
from alphaprof.render.terminal.costs import concurrency_section, requests_section, times_section
from alphaprof.render.terminal.theory import certificates_section, predictability_section
from alphaprof.render.wording import at_best, best_at, named, of_all, pays, speedup_lines, text_of
from alphaprof.report import format as fmt
from alphaprof.report.format import short
from alphaprof.report.model import GammaResult, Report, Result, Traffic

COLOURS = {"GO": "bold green", "NO-GO": "bold red", "UNDECIDED": "bold yellow"}
RULE_WIDTH = 18  # columns that a rule's alpha takes


def render_terminal(report: Report, console: Console) -> None:
    """Print the report. Text from the data is printed as it is, without control characters or markup."""
    _header(report, console)
    _traffic(report, report.traffic, console)
    for draft in report.run.drafts:
        mine = [result for result in report.results if result.draft == draft]
        for rule in dict.fromkeys(result.rule for result in mine if result.verdict is not None):
            results = [result for result in mine if result.rule == rule and result.verdict is not None]
            _domains(f"draft {draft}, rule {rule}", results, mine, console)
            _lengths(f"draft {draft}, rule {rule}", results, console)
            naming = partial(_name, results=results)
            requests_section(f"draft {draft}, rule {rule}", results, naming, console)
            concurrency_section(f"draft {draft}, rule {rule}", results, naming, console)
            causes_section([item for item in report.attribution if (item.draft, item.rule) == (draft, rule)], console)
        others = [result for result in mine if result.verdict is None]
        _others(f"draft {draft}: alpha under other rules", others, console)
        told = {result.gammas for result in mine if result.verdict is not None}  # rules can coincide (prompt lookup)
        for rule in dict.fromkeys(result.rule for result in others if result.gammas and result.gammas not in told):
            _lengths(f"draft {draft}, rule {rule}", [result for result in others if result.rule == rule], console)
        _phases(f"draft {draft}: alpha by phase", mine, console)
    if report.certificates is not None:
        certificates_section(report.certificates, console)
    if report.predictability:
        predictability_section(report.predictability, console)
    if report.cost is not None:
        times_section(report.cost, report.run.mean_context, console)
    _definitions(report, console)
    _warnings(report, console)


def _header(report: Report, console: Console) -> None:
    run = report.run
    state = "complete" if run.complete else "PARTIAL"
    console.print(plain(f"alphaprof {report.alphaprof}   run {run.path} ({state})"))
    console.print(plain(f"target {run.target}   {run.dtype}   drafts {', '.join(run.drafts)}"))
    console.print(plain(f"text {'; '.join(run.texts) or 'none'}"))
    console.print(f"{fmt.many(run.documents, 'document')}, {fmt.many(run.positions, 'position')}", highlight=False)
    if run.imported is not None:
        told = "rounds at the gamma that was served; alpha and coverage are not known (n/a)"
        console.print(plain(f"imported from per-request metrics of {run.imported}: {told}"))
    console.print()


def _traffic(report: Report, traffic: Traffic, console: Console) -> None:
    """The engine-free answer, then the verdict, which needs step times."""
    if traffic.tokens_per_round is not None:
        emits = fmt.interval(traffic.tokens_per_round)
        setting = f"draft {traffic.draft}, rule {traffic.rule}, gamma {traffic.gamma}"
        console.print(plain(f"On any engine, {setting}: a round emits {emits} tokens,"))
        console.print("and pays where it costs less than that many plain decode steps.", highlight=False)
        if traffic.break_even_length is not None:
            here = fmt.number(traffic.break_even_length)
            slow = " (below 1: plain decoding was slow when it was timed)" if traffic.break_even_length < 1 else ""
            console.print(f"With the step times below it costs {here}{slow}.", highlight=False)
        console.print()
    lines = Text()
    lines.append(traffic.verdict, COLOURS[traffic.verdict])
    lines.append(f"  for the whole traffic, at least {traffic.min_speedup:g}x wanted\n")
    lines.append_text(plain(traffic.reason))
    for line in speedup_lines(traffic, report.confidence):
        lines.append(f"\n{line}")
    shares = ", ".join(f"{short(domain)} {fmt.percent(weight)}" for domain, weight in traffic.weights.items())
    origin = "observed shares of tokens" if traffic.weights_observed else "shares of tokens from the profile"
    lines.append("\n").append_text(plain(f"weights ({origin}): {shares}"))
    if traffic.concurrencies:
        each = ", ".join(f"{item.concurrency}: {best_at(item)}" for item in traffic.concurrencies)
        known = [item.concurrency for item in traffic.concurrencies]
        last = pays(traffic.pays_up_to, known)
        limit = {"none": "it pays at none of these", "all": "it pays at all of these"}.get(last, f"it pays up to {last}")
        lines.append(f"\nby sequences decoded at a time (best gamma of all documents): {each}; {limit}")
    console.print(Panel(lines, title="verdict", title_align="left", expand=False))


def _domains(title: str, results: Sequence[Result], every: Sequence[Result], console: Console) -> None:
    """The rows of a rule; `every` result of the draft tells which domains have several kinds of text."""
    covered = all(result.coverage == 1 for result in results)
    formula = covered and console.width >= WIDE
    table = named_table()
    names = ("docs", *(() if covered else ("coverage",)), "alpha", "gamma", "tokens/round")
    halves = [of_all(result) for result in results]
    beside = any(halves) and console.width >= WIDE
    for name in (*names, *(("iid formula",) if formula else ()), "break-even", "speedup", *(("of all",) if beside else ())):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for result, half in zip(results, halves, strict=True):
        best = at_best(result)
        cells = [fmt.documents(result.documents, result.clusters)] + ([] if covered else [fmt.share(result.coverage)])
        cells += [fmt.share_interval(result.alpha), str(result.best_gamma or fmt.NOTHING)]
        cells += [fmt.interval(best.tokens_per_round if best else None)]
        cells += [_iid(best)] if formula else []
        cells += [fmt.number(best.break_even_length if best else None), fmt.interval(result.speedup, "x")]
        cells[-1:] = [cells[-1], half] if beside else [f"{cells[-1]} [all {half}]" if half else cells[-1]]
        verdict = Text(str(result.verdict), COLOURS[str(result.verdict)])
        table.add_row(_name(result, every), *map(Text, _fitted(cells, console)), verdict)
    show(table, f"{title}: by domain", console)
    undecided: dict[str, list[str]] = {}
    for result in results:
        if result.verdict == "UNDECIDED":
            undecided.setdefault(result.reason, []).append(short(result.domain))
    for reason, domains in undecided.items():
        console.print(Padding(plain(f"{', '.join(domains)}: {reason}"), (0, 0, 0, 2)))
    console.print()


def _fitted(cells: Sequence[str], console: Console) -> Sequence[str]:
    """Cells with their intervals beside the values, or below them where the terminal is narrow."""
    return cells if console.width >= WIDE else [cell.replace(" [", "\n[") for cell in cells]


def _iid(item: GammaResult | None) -> str:
    """What the textbook formula would have said, and by how much it is too high."""
    if item is None or item.iid_error is None:
        return fmt.NOTHING
    return f"{fmt.number(item.iid_tokens_per_round)} ({fmt.signed_percent(item.iid_error)})"


def _others(title: str, results: Sequence[Result], console: Console) -> None:
    """Alpha of the rules that the verdict does not concern: a row a domain, a column a rule."""
    rules = list(dict.fromkeys(result.rule for result in results))
    if not rules:
        return
    texts: dict[tuple[str, str, str, bool], list[Result]] = {}
    for result in results:
        texts.setdefault(text_of(result), []).append(result)
    side_by_side = max(1, (console.width - NAME_WIDTH) // RULE_WIDTH)
    for start in range(0, len(rules), side_by_side):
        part = rules[start : start + side_by_side]
        table = named_table()
        for rule in part:
            table.add_column(rule, justify="right", no_wrap=True)
        first = [found[0] for found in texts.values()]
        for found in texts.values():
            cells = {result.rule: fmt.share_interval(result.alpha).replace(" [", f"{_mark(result)}\n[") for result in found}
            table.add_row(_name(found[0], first, marked=False), *(cells.get(rule, "") for rule in part))
        show(table, title, console)
    marks = {_mark(result) for result in results}
    if "*" in marks:
        console.print("  * off-policy: the rule's own decoding would not emit this text", style="dim", highlight=False)
    if "~" in marks:
        console.print(
            "  ~ lossy: one step at a time along the target's own text; what it emits itself is not measured",
            style="dim",
            highlight=False,
        )
    console.print()


def _mark(result: Result) -> str:
    """The mark of an alpha, as wide where there is none."""
    return fmt.mark(result.on_policy, result.lossy) or " "


def _phases(title: str, results: Sequence[Result], console: Console) -> None:
    """Alpha while thinking and while answering, where the profile tells them apart."""
    shown = [result for result in results if result.phases]
    if not shown:
        return
    table = named_table()
    for name in ("rule", "thinking", "answer", "share of thinking"):
        table.add_column(name, justify="left" if name == "rule" else "right", no_wrap=True)
    for result in shown:
        cells = [fmt.share_interval(result.phases[name].alpha) for name in ("thinking", "answer")]
        share = fmt.percent(result.phases["thinking"].positions / result.positions)
        table.add_row(_name(result, [result]), result.rule + _mark(result), *_fitted(cells, console), share)
    show(table, title, console)
    console.print()


def _name(result: Result, results: Sequence[Result], marked: bool = True) -> Text:
    """The domain, with its kind of text where that is not clear."""
    return plain(named(result, results, marked))


def _lengths(title: str, results: Sequence[Result], console: Console) -> None:
    """Tokens per round and speedup for every gamma, in as many tables as it takes to show every digit."""
    shown = [result for result in results if result.gammas]
    if not shown:
        return
    what = "tokens per round / speedup" if shown[0].gammas[0].break_even_length is not None else "tokens per round"
    every, side_by_side = len(shown[0].gammas), max(1, (console.width - NAME_WIDTH) // 16)
    for start in range(0, every, side_by_side):
        part = slice(start, start + side_by_side)
        table = named_table()
        for item in shown[0].gammas[part]:
            table.add_column(str(item.gamma), justify="right", no_wrap=True)
        for result in shown:
            table.add_row(_name(result, results), *(_length(item) for item in result.gammas[part]))
        if shown[0].gammas[0].break_even_length is not None:
            table.add_section()
            table.add_row("full round costs", *(fmt.number(item.full_round_cost) for item in shown[0].gammas[part]))
            table.add_row("v = T(g+1)/T(1)", *(fmt.number(item.verify_cost) for item in shown[0].gammas[part]))
        show(table, f"{title}: {what} by gamma", console)
    console.print()


def _length(item: GammaResult) -> str:
    tokens = fmt.number(item.tokens_per_round.value if item.tokens_per_round else None)
    return tokens if item.speedup is None else f"{tokens} / {fmt.number(item.speedup.value)}"


def _definitions(report: Report, console: Console) -> None:
    level = fmt.level(report.confidence)
    lines = [
        f"alpha: acceptance over all positions with a proposal. Brackets: {level} intervals over documents.",
        "tokens/round: tokens emitted per verification, the target's own included. gamma: drafted tokens per round.",
        "iid formula: tokens/round if acceptance were independent from position to position; by how much that is too high.",
        "break-even: tokens/round at which the draft starts to pay, the mean cost of a round in decode steps. A full round "
        "costs gamma c + v, a search and clearing the caches; c = T_draft/T(1), v = T(gamma+1)/T(1).",
        "speedup: decode time without the draft / with it, prefill excluded; whole requests: prefill of target and draft "
        "included. Slower: share of documents that a draft slows down.",
        "verdict: where draft or gamma is auto, one half of the documents chooses and the other half is tested. The speedup "
        "of a domain is that of the tested half; of all: over all documents, too high on average if some chose gamma.",
    ]
    lines += causes_notes(report.attribution)
    if any(result.concurrencies for result in report.results):
        lines.append(
            "by concurrency: the gamma of each is the best one of all documents, which can be another than the chosen one "
            "of the other tables, and too high on average."
        )
    if any(result.estimator == "expected" for result in report.results):
        lines.append("lossless: rounds are exact expectations given the texts; accept and reject are not drawn by lot.")
    if any(result.rule.startswith("tree") for result in report.results):
        lines.append(
            "tree: gamma is the depth of a full tree, w + w^2 + ... + w^gamma nodes; its verification was not timed."
        )
    for line in lines:
        console.print(line, style="dim", highlight=False)


def _warnings(report: Report, console: Console) -> None:
    for warning in report.warnings:
        console.print()
        console.print(Text("note: ", "yellow").append_text(plain(warning.message)))
        console.print(plain(f"      {warning.remedy}"))
