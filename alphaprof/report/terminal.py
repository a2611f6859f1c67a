"""The terminal rendering of a report (rich). It computes nothing."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from alphaprof.report import format as fmt
from alphaprof.report.model import Cost, GammaResult, Report, Result, Traffic

COLOURS = {"GO": "bold green", "NO-GO": "bold red", "UNDECIDED": "bold yellow"}


def render_terminal(report: Report, console: Console) -> None:
    """Print the report. Text from the data is printed as it is, without control characters or markup."""
    _header(report, console)
    _traffic(report, report.traffic, console)
    for draft in report.run.drafts:
        results = [result for result in report.results if result.draft == draft]
        _domains(draft, results, report, console)
        _lengths(draft, results, console)
    if report.cost is not None:
        _times(report.cost, console)
    _definitions(report, console)
    _warnings(report, console)


def plain(text: str) -> Text:
    """Untrusted text: control and direction-changing characters become visible, markup means nothing."""
    return Text("".join(char if char.isprintable() else repr(char)[1:-1] for char in text))


def _header(report: Report, console: Console) -> None:
    run = report.run
    state = "complete" if run.complete else "PARTIAL"
    console.print(plain(f"alphaprof {report.alphaprof}   run {run.path} ({state})"))
    console.print(plain(f"target {run.target}   {run.dtype}   drafts {', '.join(run.drafts)}"))
    console.print(f"{fmt.count(run.documents)} documents, {fmt.count(run.positions)} positions\n", highlight=False)


def _traffic(report: Report, traffic: Traffic, console: Console) -> None:
    """The engine-free answer, then the verdict, which needs step times."""
    if traffic.draft is not None and traffic.gamma is not None:
        emits = fmt.interval(traffic.tokens_per_round)
        setting = f"draft {traffic.draft}, rule {traffic.rule}, gamma {traffic.gamma}"
        console.print(plain(f"On any engine, {setting}: a round emits {emits} tokens, and pays where gamma c + v is less."))
        here = fmt.number(traffic.break_even_length)
        console.print(f"With the step times measured here gamma c + v is {here}.\n", highlight=False)
    lines = Text()
    lines.append(traffic.verdict, COLOURS[traffic.verdict])
    lines.append(f"  for the whole traffic, at least {traffic.min_speedup:g}x wanted\n")
    lines.append_text(plain(traffic.reason))
    shares = ", ".join(f"{domain} {weight:.0%}" for domain, weight in traffic.weights.items())
    origin = "observed shares of tokens" if traffic.weights_observed else "shares of tokens from the profile"
    lines.append("\n").append_text(plain(f"weights ({origin}): {shares}"))
    if traffic.speedup is not None:
        everything = f"over all documents: speedup {fmt.interval(traffic.speedup, 'x')} ({report.confidence:.0%} interval)"
        lines.append(f"\n{everything}")
    console.print(Panel(lines, title="verdict", title_align="left", expand=False))


def _domains(draft: str, results: Iterable[Result], report: Report, console: Console) -> None:
    table = Table(title=f"draft {draft}: by domain", title_justify="left", header_style="bold")
    for name in ("domain", "rule", "docs", "alpha", "gamma", "tokens/round", "break-even", "speedup", "verdict"):
        table.add_column(name, justify="left" if name in ("domain", "rule", "verdict") else "right", no_wrap=True)
    for result in results:
        best = _at(result, result.best_gamma)
        table.add_row(
            plain(result.domain),
            result.rule,
            str(result.documents),
            fmt.share_interval(result.alpha),
            str(result.best_gamma or fmt.NOTHING),
            fmt.interval(best.tokens_per_round if best else None),
            fmt.number(best.break_even_length if best else None),
            fmt.interval(best.speedup if best else None, "x"),
            _verdict(result),
        )
    console.print(table)
    undecided: dict[str, list[str]] = {}
    for result in results:
        if result.verdict == "UNDECIDED":
            undecided.setdefault(result.reason, []).append(result.domain)
    for reason, domains in undecided.items():
        console.print(Padding(plain(f"{', '.join(domains)}: {reason}"), (0, 0, 0, 2)))
    console.print()


def _verdict(result: Result) -> Text:
    return Text(result.verdict, COLOURS[result.verdict])


def _at(result: Result, gamma: int | None) -> GammaResult | None:
    return next((item for item in result.gammas if item.gamma == gamma), None)


def _lengths(draft: str, results: Iterable[Result], console: Console) -> None:
    """Tokens per round and speedup for every gamma."""
    shown = [result for result in results if result.gammas]
    if not shown:
        return
    table = Table(title=f"draft {draft}: tokens per round / speedup by gamma", title_justify="left", header_style="bold")
    table.add_column("domain", no_wrap=True)
    for item in shown[0].gammas:
        table.add_column(str(item.gamma), justify="right", no_wrap=True)
    for result in shown:
        cells = []
        for item in result.gammas:
            tokens = fmt.number(item.tokens_per_round.value if item.tokens_per_round else None)
            faster = fmt.number(item.speedup.value if item.speedup else None)
            cells.append(f"{tokens} / {faster}")
        table.add_row(plain(result.domain), *cells)
    if shown[0].gammas[0].break_even_length is not None:
        table.add_section()
        table.add_row("break-even", *(fmt.number(item.break_even_length) for item in shown[0].gammas))
        table.add_row("v = T(g+1)/T(1)", *(fmt.number(item.verify_cost) for item in shown[0].gammas))
    console.print(table)
    console.print()


def _times(cost: Cost, console: Console) -> None:
    threads = f", {cost.threads} threads" if cost.threads else ""
    title = (
        f"step times: {cost.source} with {cost.engine} on {cost.device}{threads}, {cost.dtype}, batch {cost.concurrency}, "
    )
    title += f"context {cost.context}"
    decode = cost.target_ms[1]
    verify = "  ".join(f"T({tokens}) {fmt.number(ms, 1)}" for tokens, ms in cost.target_ms.items())
    console.print(plain(title))
    console.print(f"  target, ms: {verify}", highlight=False)
    for draft, ms in cost.draft_ms.items():
        console.print(f"  {draft}, ms a step: {fmt.number(ms, 1)}  (c = {fmt.number(ms / decode)})", highlight=False)
    console.print()


def _definitions(report: Report, console: Console) -> None:
    lines = (
        f"alpha: acceptance over all positions with a proposal. Brackets: {report.confidence:.0%} intervals over documents.",
        "tokens/round: tokens emitted per verification, the target's own included. gamma: drafted tokens per round.",
        "break-even: tokens/round at which the draft starts to pay, gamma c + v; c = T_draft/T(1), v = T(gamma+1)/T(1).",
        "speedup: decode time without the draft / with it, prefill excluded. Verdicts test one half of the documents at the",
        "draft and gamma that the other half chose, so they can differ from the interval over all documents.",
    )
    for line in lines:
        console.print(line, style="dim", highlight=False)


def _warnings(report: Report, console: Console) -> None:
    for warning in report.warnings:
        console.print()
        console.print(Text("note: ", "yellow").append_text(plain(warning.message)))
        console.print(plain(f"      {warning.remedy}"))
