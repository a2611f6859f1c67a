"""The terminal rendering of a report (rich): verdict, domains, times, causes, certificates, predictability. It computes
nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.panel import Panel
from rich.text import Text

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
    Budget,
    CertainRun,
    Certificate,
    Certificates,
    Decile,
    GammaResult,
    LosslessBounds,
    Predictability,
    Report,
    Result,
)
from alphaprof.report.sections.attribution import CAUSES
from alphaprof.stats.estimate import Interval

COLOURS = {"GO": "bold green", "NO-GO": "bold red", "UNDECIDED": "bold yellow"}
RULE_WIDTH, GAMMA_WIDTH, CONCURRENCY_WIDTH, LIMIT_WIDTH = 18, 16, 13, 12  # of a table's columns
EDGES, GAP = 3, 2  # columns beside a table's first one, and between any two
Row = tuple[Text, Mapping[str, str]]  # its name, and its cells by heading
Named = Attribution | Certificate | LosslessBounds | Predictability | Result
Columns = dict[str, list[str]]  # the cells of all rows by heading


def render_terminal(report: Report, console: Console) -> None:
    """Print the report. Text from the data is printed as it is, without control characters or markup."""
    _header(report, console)
    _traffic(report, console)
    for draft in report.run.drafts:
        mine = [result for result in report.results if result.draft == draft]
        for rule in dict.fromkeys(result.rule for result in mine if result.verdict is not None):
            results = [result for result in mine if result.rule == rule and result.verdict is not None]
            title = f"draft {draft}, rule {rule}"
            _domains(title, results, mine, console)
            _lengths(title, results, console)
            _requests(title, results, console)
            _concurrencies(title, results, console)
            _causes(title, [item for item in report.attribution if (item.draft, item.rule) == (draft, rule)], console)
        others = [result for result in mine if result.verdict is None]
        _others(f"draft {draft}: alpha under other rules", others, console)
        shown = {result.gammas for result in mine if result.verdict is not None}  # rules can coincide (prompt lookup)
        for rule in dict.fromkeys(result.rule for result in others if result.gammas and result.gammas not in shown):
            _lengths(f"draft {draft}, rule {rule}", [result for result in others if result.rule == rule], console)
        _phases(f"draft {draft}: alpha by phase", mine, console)
    if report.certificates is not None:
        _certificates(report.certificates, report.difficulty, console)
    if report.predictability:
        _predictability(report.predictability, console)
    if report.cost is not None:
        first, *rest = times_lines(report.cost, report.run.mean_context)
        console.print(plain(first))
        for line in rest:
            console.print(plain(f"  {line}"), highlight=False)
        console.print()
    _notes(_definitions(report), console)
    for warning in report.warnings:
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
        console.print(plain(f"On any engine, {setting}: a round emits {emits} tokens,"))
        console.print("and pays where it costs less than that many plain decode steps.", highlight=False)
        if traffic.break_even_length is not None:
            here = fmt.number(traffic.break_even_length)
            slow = " (below 1: plain decoding was slow when it was timed)" if traffic.break_even_length < 1 else ""
            console.print(f"With the step times below it costs {here}{slow}.", highlight=False)
        console.print()
    wanted = f"  for the whole traffic, at least {traffic.min_speedup:g}x wanted\n"
    lines = Text.assemble((traffic.verdict, COLOURS[traffic.verdict]), wanted, plain(traffic.reason))
    for line in speedup_lines(traffic, report.confidence):
        lines.append(f"\n{line}")
    shares = ", ".join(f"{short(domain)} {fmt.percent(weight)}" for domain, weight in traffic.weights.items())
    origin = "observed shares of tokens" if traffic.weights_observed else "shares of tokens from the profile"
    lines.append("\n").append_text(plain(f"weights ({origin}): {shares}"))
    if traffic.concurrencies:
        each = ", ".join(f"{item.concurrency}: {best_at(item)}" for item in traffic.concurrencies)
        last = pays(traffic.pays_up_to, [item.concurrency for item in traffic.concurrencies])
        limit = {"none": "it pays at none of these", "all": "it pays at all of these"}.get(last, f"it pays up to {last}")
        lines.append(f"\nby sequences decoded at a time (best gamma of all documents): {each}; {limit}")
    console.print(Panel(lines, title="verdict", title_align="left", expand=False))


def _domains(title: str, results: Sequence[Result], every: Sequence[Result], console: Console) -> None:
    """Print the results of a rule; `every` result of the draft tells which domains have several kinds of text."""
    covered, wide = all(result.coverage == 1 for result in results), console.width >= WIDE
    bests, halves = [at_best(result) for result in results], [of_all(result) for result in results]
    speedups = [fmt.interval(result.speedup, "x") for result in results]
    columns = {"docs": [fmt.documents(result.documents, result.clusters) for result in results]}
    if not covered:
        columns["coverage"] = [fmt.share(result.coverage) for result in results]
    columns["alpha"] = [fmt.share_interval(result.alpha) for result in results]
    columns["gamma"] = [str(result.best_gamma or fmt.NOTHING) for result in results]
    columns["tokens/round"] = [fmt.interval(best.tokens_per_round if best else None) for best in bests]
    if covered and wide:
        columns["iid formula"] = [_iid(best) for best in bests]
    columns["break-even"] = [fmt.number(best.break_even_length if best else None) for best in bests]
    if wide and any(halves):
        columns |= {"speedup": speedups, "of all": halves}
    else:
        columns["speedup"] = [f"{own} [all {half}]" if half else own for own, half in zip(speedups, halves, strict=True)]
    columns["verdict"] = [str(result.verdict) for result in results]
    _table(f"{title}: by domain", _names(results, every), columns, console, left=("verdict",))
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
    """Print alpha of the rules that the verdict does not concern: a row a domain, a column a rule."""
    if not results:
        return
    rows = [
        (plain(name), {item.rule: fmt.share_interval(item.alpha).replace(" [", f"{_mark(item)}\n[") for item in same})
        for name, same in by_text(results).items()
    ]
    rules = list(dict.fromkeys(result.rule for result in results))
    _tables(title, rows, _parts(rules, RULE_WIDTH, console.width), console)
    notes = {
        "*": "  * off-policy: the rule's own decoding would not emit this text",
        "~": "  ~ lossy: one step at a time along the target's own text; what it emits itself is not measured",
    }
    marks = {_mark(result) for result in results}
    _notes([note for mark, note in notes.items() if mark in marks], console)
    console.print()


def _mark(result: Result) -> str:
    """The mark of an alpha, as wide where there is none."""
    return fmt.mark(result.on_policy, result.lossy) or " "


def _phases(title: str, results: Sequence[Result], console: Console) -> None:
    """Print alpha while thinking and while answering, where the profile tells them apart."""
    shown = [result for result in results if result.phases]
    if not shown:
        return
    columns = {"rule": [result.rule + _mark(result) for result in shown]}
    columns |= {name: [fmt.share_interval(item.phases[name].alpha) for item in shown] for name in ("thinking", "answer")}
    columns["share of thinking"] = [fmt.percent(item.phases["thinking"].positions / item.positions) for item in shown]
    names = [name for result in shown for name in _names([result], [result])]
    _table(title, names, columns, console, left=("rule",))
    console.print()


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
    parts = _parts([str(item.gamma) for item in first], GAMMA_WIDTH, console.width)
    what = "tokens per round / speedup" if timed else "tokens per round"
    _tables(f"{title}: {what} by gamma", rows, parts, console, below=costs if timed else ())
    console.print()


def _length(item: GammaResult) -> str:
    tokens = fmt.number(item.tokens_per_round.value if item.tokens_per_round else None)
    return tokens if item.speedup is None else f"{tokens} / {fmt.number(item.speedup.value)}"


def _requests(title: str, results: Sequence[Result], console: Console) -> None:
    """Print what requests and single documents see of a speedup, at the gamma of the table above."""
    shown, items, spreads = [], [], []
    for result in results:
        if (item := at_best(result)) is not None and item.of_documents is not None:
            shown.append(result)
            items.append(item)
            spreads.append(item.of_documents)
    if not shown:
        return
    columns = {
        "gamma": [str(item.gamma) for item in items],
        "speedup": [_point(item.speedup) for item in items],
        "whole requests": [_point(item.request_speedup) for item in items],
        "documents p10 / p50 / p90": [" / ".join(map(fmt.number, (each.p10, each.p50, each.p90))) for each in spreads],
        "slower": [fmt.percent(each.slower) for each in spreads],
        "iid would have said": [
            fmt.number(item.iid_speedup, unit="x")
            + ("" if item.iid_speedup_error is None else f" ({fmt.signed_percent(item.iid_speedup_error)})")
            for item in items
        ],
    }
    _table(f"{title}: requests and single documents", _names(shown, results), columns, console)
    console.print()


def _point(speedup: Interval | None) -> str:
    return fmt.number(speedup.value if speedup else None, unit="x")


def _concurrencies(title: str, results: Sequence[Result], console: Console) -> None:
    """Print the best speedup at every concurrency, and up to which of them the draft pays."""
    shown = [result for result in results if result.concurrencies]
    known = list(dict.fromkeys(item.concurrency for result in shown for item in result.concurrencies))
    if not known:
        return
    rows = []
    for name, result in zip(_names(shown, results), shown, strict=True):
        cells = dict.fromkeys(map(str, known), fmt.NOTHING) | {"pays up to": pays(result.pays_up_to, known)}
        rows.append((name, cells | {str(item.concurrency): best_at(item) for item in result.concurrencies}))
    parts = _parts(list(map(str, known)), CONCURRENCY_WIDTH, console.width - LIMIT_WIDTH)
    title = f"{title}: best speedup (gamma) of all documents, by sequences decoded at a time"
    _tables(title, rows, ([*part, "pays up to"] for part in parts), console)
    console.print()


def _causes(title: str, items: Sequence[Attribution], console: Console) -> None:
    """Print what one draft loses under a rule: a row a domain, a column a cause, and the remedy that could bring most."""
    if not items:
        return
    by_name = [{cause.name: cause for cause in item.causes} for item in items]
    names = [name for name in CAUSES if any(name in causes for causes in by_name)]
    bests = [causes.get(item.best or "") for item, causes in zip(items, by_name, strict=True)]
    losses = {"lost": [fmt.percent(item.lost.value) for item in items]}
    for name in names:
        shares = [fmt.percent(causes[name].share.value) if name in causes else "" for causes in by_name]
        losses[name.replace(" ", "\n", 1)] = shares
    gains = {
        "most to gain": [item.best or fmt.NOTHING for item in items],
        "now": [reached(item.tokens_per_round, item.speedup) for item in items],
        "with it": [reached(best.tokens_per_round, best.speedup) if best else fmt.NOTHING for best in bests],
        "nothing\nlost": [reached(None, item.perfect_speedup) for item in items],
    }
    rows, left = _names(items, items), ("most to gain",)
    if console.width >= WIDE:
        both = losses | gains
        _table(f"{title}: what is lost, by cause, and what removing it could bring", rows, both, console, left)
    else:
        _table(f"{title}: what is lost, by cause", rows, losses, console)
        _table(f"{title}: what removing a cause could bring", rows, gains, console, left)
    remedies = {best.name: best.remedy for best in bests if best}
    for name in names:
        if name in remedies:
            console.print(Padding(plain(f"{name}: {remedies[name]}"), (0, 0, 0, 2)))
    console.print()


def _certificates(certificates: Certificates, deciles: Sequence[Decile], console: Console) -> None:
    """Print what thresholds say about each draft."""
    for draft in dict.fromkeys(item.draft for item in certificates.certificates):
        mine = [item for item in certificates.certificates if item.draft == draft]
        texts: dict[tuple[str, str, str, bool], list[Certificate]] = {}
        for item in mine:
            texts.setdefault((item.domain, item.continuation, str(item.sampling), item.on_policy), []).append(item)
        names = _names([same[0] for same in texts.values()], mine)
        certified, rejected = (
            [(name, {item.rule: cell(item) for item in same}) for name, same in zip(names, texts.values(), strict=True)]
            for cell in (_certified, _rejected)
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
    _notes(lines, console)
    if lines:
        console.print()


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
        for kind, same in by_kind([item for item in items if item.axis == axis]).items():
            rows: dict[tuple[float | None, float | None], tuple[Text, dict[str, str]]] = {}
            for item in same:
                rows.setdefault((item.low, item.high), (Text(_range(item)), {}))[1][item.rule] = _certified(item)
            unit = ", nats" if axis == "entropy" else ""
            title = f"draft {draft}: certified of accepted, by tenths of the target's {axis}{unit}{kind}"
            _grid(title, list(rows.values()), console, named=axis)


def _range(item: Decile) -> str:
    """A tenth by where it begins: the next one begins where it ends."""

    def edge(value: float) -> str:
        return fmt.share(value) if item.axis == "margin" else fmt.number(value, 3)

    if item.low is None:
        return "all" if item.high is None else f"below {edge(item.high)}"
    return f"from {edge(item.low)}"


def _lossless(draft: str, bounds: Sequence[LosslessBounds], console: Console) -> None:
    """Print beta and its bounds, by domain."""
    if not bounds:
        return
    columns = {
        "beta": [fmt.share_interval(item.beta) for item in bounds],
        "bound": [fmt.share_interval(item.sharp) for item in bounds],
        "mean KL": [fmt.number(item.mean_divergence) for item in bounds],
        "bound from\nthe mean": [fmt.share(item.from_mean) for item in bounds],
    }
    title = f"draft {draft}: lossless acceptance, and what the smaller KL of each position guarantees"
    _table(title, _names(bounds, bounds), columns, console)
    if any(item.sampling is None for item in bounds):
        note = "  of text that was not sampled: beta at temperature 1 along it; lossless sampling would not write it"
        _notes([note], console)
    console.print()


def _predictability(texts: Sequence[Predictability], console: Console) -> None:
    """Print what the target alone says."""
    names = _names(texts, texts)
    columns = {
        "docs": [str(item.documents) for item in texts],
        "entropy,\nnats": [_spread(item.entropy) for item in texts],
        "margin": [_spread(item.margin) for item in texts],
        "mean top\nprobability": [fmt.share_interval(item.top_prob) for item in texts],
    }
    if any(item.free for item in texts):
        free = [item.free[0] if item.free else None for item in texts]
        columns["prompt\nlookup: alpha"] = [fmt.share_interval(item.alpha if item else None) for item in free]
        columns["coverage"] = [fmt.share(item.coverage if item else None) for item in free]
        columns["tokens/round"] = [fmt.interval(item.tokens_per_round if item else None) for item in free]
    title = "the target alone: how predictable is it? Median, and from the tenth to the ninetieth percentile"
    _table(title, names, columns, console)
    console.print()
    budgets = [{budget.rule: _budget(budget) for budget in item.budgets} for item in texts]
    title = "KL budget, nats: where half, 90 % and 99 % of the positions are still certain"
    _grid(title, list(zip(names, budgets, strict=True)), console)
    runs = [{f"KL <= {run.epsilon:g}": _run(run) for run in item.runs if run.rule == "strict"} for item in texts]
    title = f"rule strict, gamma {texts[0].runs[0].gamma}: what is certain of any draft whose KL(p||q) is nowhere larger"
    _grid(title, list(zip(names, runs, strict=True)), console)
    notes = [
        "certain of any draft: share of positions, mean run of certain tokens from a position on, least tokens per round.",
        "mean top probability: where the text was sampled, no draft that proposes one token can be accepted more often.",
        "KL budget: a draft whose KL(p||q) stays below the first number is certainly right at half of the positions, below",
        "the second at 90 %, below the third at 99 %. No draft is needed to know it: it is what a draft would have to "
        "reach.",
    ]
    _notes(notes, console)
    console.print()


def _budget(item: Budget) -> str:
    return "\n".join(fmt.interval(value, digits=3) for value in (item.half, item.ninety, item.ninety_nine))


def _run(run: CertainRun) -> str:
    """What is certain under a rule, for any draft with a bounded divergence."""
    lines = [fmt.share_interval(run.certain), f"run {fmt.interval(run.mean_run)}"]
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
    if report.attribution:
        lines += [
            "lost: share of positions whose token was not an accepted draft. Each has one cause: the first one, from left "
            "to right, that applies.",
            "with it: speedup (t: tokens/round) with nothing lost to that cause, at the same gamma and cost of a round: at "
            "most that; below 1x its remedy alone does not make the draft pay. Trees and prompt lookup held the token for a "
            "fact; the other remedies count as always right.",
        ]
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
    return lines


def _names(items: Iterable[Named], among: Sequence[OfText]) -> list[Text]:
    """Names the text of each item, marked where it is off-policy."""
    return [plain(text_name(item, among, not item.on_policy)) for item in items]


def _notes(lines: Iterable[str], console: Console) -> None:
    for line in lines:
        console.print(line, style="dim", highlight=False)


def _table(title: str, names: Iterable[Text], columns: Columns, console: Console, left: Collection[str] = ()) -> None:
    """Print a table of named rows; columns in `left` hold words."""
    table = named_table("domain", *columns, left=left)
    for name, *cells in zip(names, *columns.values(), strict=True):
        styled = (Text(cell, COLOURS.get(cell, "")) for cell in fitted(cells, console))
        table.add_row(name, *styled)
    show(table, title, console)


def _tables(
    title: str,
    rows: Sequence[Row],
    parts: Iterable[Sequence[str]],
    console: Console,
    *,
    named: str = "domain",
    below: Sequence[Row] = (),
) -> None:
    """Print named rows as a table for each part of their columns, then those that stand `below` a line."""
    for part in parts:
        table = named_table(named, *part)
        for section in (rows, below):
            for name, cells in section:
                table.add_row(name, *(cells.get(column, "") for column in part))
            table.add_section()
        show(table, title, console)


def _grid(title: str, rows: Sequence[Row], console: Console, named: str = "domain") -> None:
    """Print named rows under one column a rule or the like, in as many tables as it takes to show every cell whole."""
    widths: dict[str, int] = {}
    for _, cells in rows:
        for column, cell in cells.items():
            widths[column] = max(widths.get(column, len(column)), *map(len, cell.split("\n")))
    _tables(title, rows, _side_by_side(widths, console.width - NAME_WIDTH - EDGES), console, named=named)
    console.print()


def _side_by_side(widths: Mapping[str, int], room: int) -> Iterator[list[str]]:
    """Yields columns in parts that fit."""
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


def _parts(columns: Sequence[str], width: int, room: int) -> Iterator[Sequence[str]]:
    """Yields columns of equal width in parts that fit beside the names."""
    most = max(1, (room - NAME_WIDTH) // width)
    return (columns[start : start + most] for start in range(0, len(columns), most))
