"""The terminal rendering of a report (rich): verdict, domains, times, causes, certificates, predictability. It computes
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from rich.console import Console
from rich.padding import Padding
from rich.panel import Panel
from rich.text import Text

from alphaprof.costs.cost_model import Cost
from alphaprof.render.tables import NAME_WIDTH, WIDE, fitted, named_table, plain, show
from alphaprof.render.wording import (
    OfText,
    at_best,
    best_at,
    by_kind,
    by_text,
    of_all,
    pays,
    reached,
    speedup_lines,
    text_name,
    times_lines,
)
from alphaprof.report import format as fmt
from alphaprof.report.format import short
from alphaprof.report.model import (
    Attribution,
    Cause,
    CertainRun,
    Certificate,
    Certificates,
    Decile,
    GammaResult,
    LosslessBounds,
    Predictability,
    Report,
    Result,
    Traffic,
)
from alphaprof.stats.estimate import Interval

COLOURS = {"GO": "bold green", "NO-GO": "bold red", "UNDECIDED": "bold yellow"}
RULE_WIDTH = 18  # columns that a rule's alpha takes
Name = Callable[[Result], Text]
EDGES, GAP = 3, 2  # columns beside a table's first one, and between any two
Row = tuple[Text, Mapping[str, str]]  # its name, and its cells by column


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
            naming = partial(_name, items=results)
            requests_section(f"draft {draft}, rule {rule}", results, naming, console)
            concurrency_section(f"draft {draft}, rule {rule}", results, naming, console)
            causes_section([item for item in report.attribution if (item.draft, item.rule) == (draft, rule)], console)
        others = [result for result in mine if result.verdict is None]
        _others(f"draft {draft}: alpha under other rules", others, console)
        shown = {result.gammas for result in mine if result.verdict is not None}  # rules can coincide (prompt lookup)
        for rule in dict.fromkeys(result.rule for result in others if result.gammas and result.gammas not in shown):
            _lengths(f"draft {draft}, rule {rule}", [result for result in others if result.rule == rule], console)
        _phases(f"draft {draft}: alpha by phase", mine, console)
    if report.certificates is not None:
        certificates_section(report.certificates, report.difficulty, console)
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
        known = "rounds are known at the served gamma only; alpha and coverage are not known (n/a)"
        console.print(plain(f"imported from per-request metrics of {run.imported}: {known}"))
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
        table.add_row(_name(result, every), *map(Text, fitted(cells, console)), verdict)
    show(table, f"{title}: by domain", console)
    undecided: dict[str, list[str]] = {}
    for result in results:
        if result.verdict == "UNDECIDED":
            undecided.setdefault(result.reason, []).append(short(result.domain))
    for reason, domains in undecided.items():
        console.print(Padding(plain(f"{', '.join(domains)}: {reason}"), (0, 0, 0, 2)))
    console.print()


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
    side_by_side = max(1, (console.width - NAME_WIDTH) // RULE_WIDTH)
    for start in range(0, len(rules), side_by_side):
        part = rules[start : start + side_by_side]
        table = named_table("domain", *part)
        for name, same in by_text(results).items():
            cells = {result.rule: fmt.share_interval(result.alpha).replace(" [", f"{_mark(result)}\n[") for result in same}
            table.add_row(plain(name), *(cells.get(rule, "") for rule in part))
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
    table = named_table("domain", "rule", "thinking", "answer", "share of thinking", left=("rule",))
    for result in shown:
        cells = [fmt.share_interval(result.phases[name].alpha) for name in ("thinking", "answer")]
        share = fmt.percent(result.phases["thinking"].positions / result.positions)
        table.add_row(_name(result, [result]), result.rule + _mark(result), *fitted(cells, console), share)
    show(table, title, console)
    console.print()


def _name(item: Result | Certificate | LosslessBounds | Predictability, items: Sequence[OfText]) -> Text:
    """The name of an item's text, marked where it is off-policy."""
    return plain(text_name(item, items, not item.on_policy))


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
        lines.append("lossless: rounds are exact expectations given the texts; accept and reject are not drawn at random.")
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


def requests_section(title: str, results: Sequence[Result], name: Name, console: Console) -> None:
    """What requests and single documents see of a speedup, at the gamma of the table above."""
    rows = [(result, item) for result in results for item in result.gammas if item.gamma == result.best_gamma]
    rows = [(result, item) for result, item in rows if item.of_documents is not None]
    if not rows:
        return
    table = named_table(
        "domain", "gamma", "speedup", "whole requests", "documents p10 / p50 / p90", "slower", "iid would have said"
    )
    for result, item in rows:
        table.add_row(name(result), *_request_cells(item))
    show(table, f"{title}: requests and single documents", console)
    console.print()


def _request_cells(item: GammaResult) -> Iterator[str]:
    yield str(item.gamma)
    yield fmt.number(item.speedup.value if item.speedup else None, unit="x")
    yield fmt.number(item.request_speedup.value if item.request_speedup else None, unit="x")
    spread = item.of_documents
    yield " / ".join(fmt.number(value) for value in (spread.p10, spread.p50, spread.p90)) if spread else fmt.NOTHING
    yield fmt.percent(spread.slower) if spread else fmt.NOTHING
    wrong = item.iid_speedup_error
    said = fmt.number(item.iid_speedup, unit="x")
    yield said if wrong is None else f"{said} ({fmt.signed_percent(wrong)})"


def concurrency_section(title: str, results: Sequence[Result], name: Name, console: Console) -> None:
    """The best speedup at every concurrency, and up to which of them the draft pays."""
    shown = [result for result in results if result.concurrencies]
    if not shown:
        return
    known = list(dict.fromkeys(item.concurrency for result in shown for item in result.concurrencies))
    side_by_side = max(1, (console.width - NAME_WIDTH - 12) // 13)
    for start in range(0, len(known), side_by_side):
        part = known[start : start + side_by_side]
        table = named_table()
        for concurrency in part:
            table.add_column(str(concurrency), justify="right", no_wrap=True)
        table.add_column("pays up to", justify="right", no_wrap=True)
        for result in shown:
            cells = {item.concurrency: best_at(item) for item in result.concurrencies}
            table.add_row(name(result), *(cells.get(item, fmt.NOTHING) for item in part), pays(result.pays_up_to, known))
        show(table, f"{title}: best speedup (gamma) of all documents, by sequences decoded at a time", console)
    console.print()


def times_section(cost: Cost, mean_context: float | None, console: Console) -> None:
    """Where step times come from, and what they are."""
    first, *rest = times_lines(cost, mean_context)
    console.print(plain(first))
    for line in rest:
        console.print(plain(f"  {line}"), highlight=False)
    console.print()


def causes_section(items: Sequence[Attribution], console: Console) -> None:
    """Print what one draft loses under a rule: a row a domain, a column a cause, and the remedy that could bring most."""
    if not items:
        return
    names = _in_order(items)
    title = f"draft {items[0].draft}, rule {items[0].rule}: what is lost, by cause"
    losses = {"lost": [fmt.percent(item.lost.value) for item in items]}
    for name in names:
        shares = [next((cause.share.value for cause in item.causes if cause.name == name), None) for item in items]
        losses[name.replace(" ", "\n", 1)] = ["" if share is None else fmt.percent(share) for share in shares]
    gains = {"most to gain": [item.best or fmt.NOTHING for item in items]}
    gains |= {"now": [reached(item.tokens_per_round, item.speedup) for item in items]}
    gains |= {
        "with it": [reached(best.tokens_per_round, best.speedup) if (best := _best(item)) else fmt.NOTHING for item in items]
    }
    gains |= {"nothing\nlost": [reached(None, item.perfect_speedup) for item in items]}
    if console.width >= WIDE:
        _columns(items, losses | gains, f"{title}, and what removing it could bring", console)
    else:
        _columns(items, losses, title, console)
        _columns(items, gains, f"draft {items[0].draft}, rule {items[0].rule}: what removing a cause could bring", console)
    remedies = {item.best: best.remedy for item in items if (best := _best(item))}
    for name in names:
        if name in remedies:
            console.print(Padding(plain(f"{name}: {remedies[name]}"), (0, 0, 0, 2)))
    console.print()


def _columns(items: Sequence[Attribution], columns: Mapping[str, Sequence[str]], title: str, console: Console) -> None:
    """A row a domain under named columns."""
    table = named_table("domain", *columns, left=("most to gain",))
    for item, cells in zip(items, zip(*columns.values(), strict=True), strict=True):
        table.add_row(plain(text_name(item, items, not item.on_policy)), *cells)
    show(table, title, console)


def causes_notes(items: Sequence[Attribution]) -> list[str]:
    """How to read it; nothing where nothing was attributed."""
    if not items:
        return []
    return [
        "lost: share of positions whose token was not an accepted draft. Each has one cause: the first one, from left to "
        "right, that applies.",
        "with it: speedup (t: tokens/round) with nothing lost to that cause, at the same gamma and cost of a round: at most "
        "that; below 1x its remedy alone does not make the draft pay. Trees and prompt lookup held the token for a fact; "
        "the other remedies count as always right.",
    ]


def _in_order(items: Sequence[Attribution]) -> list[str]:
    """Returns the names of the causes that occur, in the order in which they are looked for."""
    names: list[str] = []
    for item in items:
        at = 0
        for cause in item.causes:
            if cause.name in names:
                at = names.index(cause.name) + 1
            else:
                names.insert(at, cause.name)
                at += 1
    return names


def _best(item: Attribution) -> Cause | None:
    return next((cause for cause in item.causes if cause.name == item.best), None)


def certificates_section(certificates: Certificates, deciles: Sequence[Decile], console: Console) -> None:
    """Print what thresholds say about each draft."""
    for draft in dict.fromkeys(item.draft for item in certificates.certificates):
        mine = [item for item in certificates.certificates if item.draft == draft]
        texts: dict[tuple[str, str, str, bool], list[Certificate]] = {}
        for item in mine:
            texts.setdefault((item.domain, item.continuation, str(item.sampling), item.on_policy), []).append(item)
        certified, rejected = (
            [(_name(same[0], mine), {item.rule: cell(item) for item in same}) for same in texts.values()]
            for cell in (_certified, _budget)
        )
        _grid(f"draft {draft}: certified of accepted, by domain", certified, console)
        rules = {item.rule for item in mine}
        _deciles(draft, [item for item in deciles if item.draft == draft and item.rule in rules], console)
        _grid(f"draft {draft}: share rejected, and at most at this mean KL(p||q)", rejected, console)
        certain = sum(round(item.certified.value * item.positions) for item in mine)
        wrong = sum(item.contradicted for item in mine)
        counted = f"{fmt.count(wrong)} of {fmt.count(certain)} certified positions, all rules together"
        console.print(f"  certified and yet rejected: {counted}\n", highlight=False)
        _lossless(draft, [item for item in certificates.lossless if item.draft == draft], console)
    lines = [
        "certified: KL(p||q) is below the threshold at which the rule can reject: acceptance was certain beforehand.",
        "What is accepted beyond that was right, but not certain to be. Position by position: threshold_RULE in the log.",
    ]
    if not certificates.certificates:  # no draft has a distribution
        lines.clear()
    if certificates.inexact:
        part = fmt.percent(certificates.inexact)
        lines.append(f"At {part} of the positions some rule accepts more tokens than were looked at: a lower bound there.")
    if certificates.unknown:
        lines.append(f"No certificate is known for {', '.join(certificates.unknown)}: no threshold, whatever the draft.")
    for line in lines:
        console.print(line, style="dim", highlight=False)
    if lines:
        console.print()


def _deciles(draft: str, items: Sequence[Decile], console: Console) -> None:
    """Print tables by tenths of the target's margin, then of its entropy, one for each kind of text."""
    for axis in dict.fromkeys(item.axis for item in items):
        for kind, same in by_kind([item for item in items if item.axis == axis]).items():
            title = f"draft {draft}: certified of accepted, by tenths of the target's {axis}"
            title += ", nats" if axis == "entropy" else ""
            rows: dict[tuple[float | None, float | None], dict[str, str]] = {}
            for item in same:
                rows.setdefault((item.low, item.high), {})[item.rule] = _certified(item)
            _grid(title + kind, [(Text(_range(axis, *ends)), cells) for ends, cells in rows.items()], console, named=axis)


def _lossless(draft: str, bounds: Sequence[LosslessBounds], console: Console) -> None:
    """Beta and its bounds, by domain."""
    if not bounds:
        return
    table = named_table("domain", "beta", "bound", "mean KL", "bound from\nthe mean")
    for item in bounds:
        cells = list(map(fmt.share_interval, (item.beta, item.sharp)))
        cells += [fmt.number(item.mean_divergence), fmt.share(item.from_mean)]
        table.add_row(_name(item, bounds), *fitted(cells, console))
    show(table, f"draft {draft}: lossless acceptance, and what the smaller KL of each position guarantees", console)
    if any(item.sampling is None for item in bounds):
        note = "  of text that was not sampled: beta at temperature 1 along it; lossless sampling would not write it"
        console.print(note, style="dim", highlight=False)
    console.print()


def _grid(title: str, rows: Sequence[Row], console: Console, named: str = "domain") -> None:
    """Named rows under one column a rule or the like, in as many tables as it takes to show every cell whole."""
    widths: dict[str, int] = {}
    for _, cells in rows:
        for column, cell in cells.items():
            widths[column] = max(widths.get(column, len(column)), *map(len, cell.split("\n")))
    for part in _side_by_side(widths, console.width - NAME_WIDTH - EDGES):
        table = named_table(named, *part)
        for label, cells in rows:
            table.add_row(label, *(cells.get(column, "") for column in part))
        show(table, title, console)
    console.print()


def _side_by_side(widths: Mapping[str, int], room: int) -> Iterator[list[str]]:
    """Columns in parts that fit."""
    part: list[str] = []
    left = room
    for column, width in widths.items():
        if part and width + GAP > left:
            yield part
            part, left = [], room
        part.append(column)
        left -= width + GAP
    if part:
        yield part


def _certified(item: Certificate | Decile) -> str:
    if item.certified is None or item.accepted is None:
        return fmt.NOTHING
    value = f"{fmt.share(item.certified.value)} of {fmt.share(item.accepted.value)}"
    return f"{value}\n[{fmt.share(item.certified.low, 2)}, {fmt.share(item.certified.high, 2)}]"


def _budget(item: Certificate) -> str:
    return f"{fmt.share(1 - item.accepted.value)} <= {fmt.share(item.rejected_at_most)}"


def _range(axis: str, low: float | None, high: float | None) -> str:
    """A tenth by where it begins: the next one begins where it ends."""

    def edge(value: float) -> str:
        return fmt.share(value) if axis == "margin" else fmt.number(value, 3)

    if low is None:
        return "all" if high is None else f"below {edge(high)}"
    return f"from {edge(low)}"


def predictability_section(texts: Sequence[Predictability], console: Console) -> None:
    """Print what the target alone says."""
    table = named_table()
    names = ["docs", "entropy,\nnats", "margin", "mean top\nprobability"]
    looked_up = any(item.free for item in texts)
    names += ["prompt\nlookup: alpha", "coverage", "tokens/round"] if looked_up else []
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for item in texts:
        cells = [str(item.documents), _spread(item.entropy), _spread(item.margin), fmt.share_interval(item.top_prob)]
        if looked_up:
            free = item.free[0] if item.free else None
            cells += [fmt.share_interval(free.alpha), fmt.share(free.coverage)] if free else [fmt.NOTHING] * 2
            cells += [fmt.interval(free.tokens_per_round) if free else fmt.NOTHING]
        table.add_row(_name(item, texts), *fitted(cells, console))
    show(table, "the target alone: how predictable is it? Median, and from the tenth to the ninetieth percentile", console)
    console.print()
    _budgets(texts, console)
    _runs(texts, console)
    for line in (
        "certain of any draft: share of positions, mean run of certain tokens from a position on, least tokens per round.",
        "mean top probability: where the text was sampled, no draft that proposes one token can be accepted more often.",
        "KL budget: a draft whose KL(p||q) stays below the first number is certainly right at half of the positions, below",
        "the second at 90 %, below the third at 99 %. No draft is needed to know it: it is what a draft would have to "
        "reach.",
    ):
        console.print(line, style="dim", highlight=False)
    console.print()


def _budgets(texts: Sequence[Predictability], console: Console) -> None:
    rows: list[Row] = []
    for item in texts:
        values = {budget.rule: (budget.half, budget.ninety, budget.ninety_nine) for budget in item.budgets}
        cells = {rule: "\n".join(fmt.interval(value, digits=3) for value in each) for rule, each in values.items()}
        rows.append((_name(item, texts), cells))
    _grid("KL budget, nats: where half, 90 % and 99 % of the positions are still certain", rows, console)


def _runs(texts: Sequence[Predictability], console: Console) -> None:
    """What is certain under strict, for any draft with a bounded divergence."""
    rows: list[Row] = []
    for item in texts:
        cells = {f"KL <= {run.epsilon:g}": _run(run) for run in item.runs if run.rule == "strict"}
        rows.append((_name(item, texts), cells))
    gamma = texts[0].runs[0].gamma
    _grid(f"rule strict, gamma {gamma}: what is certain of any draft whose KL(p||q) is nowhere larger", rows, console)


def _run(run: CertainRun) -> str:
    lines = [fmt.share_interval(run.certain), f"run {fmt.interval(run.mean_run)}"]
    return "\n".join(lines + ([f">= {fmt.interval(run.tokens_per_round)}"] if run.tokens_per_round else []))


def _spread(values: Sequence[Interval]) -> str:
    """A median with its interval, and how far the values spread."""
    low, middle, high = values
    return f"{fmt.interval(middle)}\n{fmt.number(low.value)} to {fmt.number(high.value)}"
