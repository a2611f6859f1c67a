"""The first screen of a report: verdict, route, conditions, one table, load, notes, what to paste, and what else there is.

Terminal, Markdown and HTML draw the same texts.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass

from alphaprof.render.sections.contents import ALL, chosen
from alphaprof.render.wording import reached
from alphaprof.report import format as fmt
from alphaprof.report.build import Report
from alphaprof.report.model import Choice, DomainAnswer, Note, Route, ServerPool
from alphaprof.stats.estimate import Interval

NOTES = 3  # that are shown
LOADS = 8  # concurrencies that are shown
IMPORTANCE = (  # of notes, by code: what can make the answer wrong, then what makes it another one, then the rest
    *("contradicted", "not_greedy", "off_policy_sample", "outside_support", "wiring", "damaged", "busy", "slow_baseline"),
    *("no_step_times", "partial", "other_context", "not_measured", "near_ties", "cut_by_length", "skipped", "truncated"),
    *("halved_batches", "stopped", "token_by_token", "chain"),
)
DRAFT_ALONE = "one draft"
COLUMNS = ("domain", "share", "docs", "draft", "γ", "alpha", "tokens/round", "speedup", "verdict", "next best")
WORDS = ("domain", "draft", "verdict", "next best")  # columns of words, which begin at the left
SAME = "≈"  # marks a next best that is not told apart


@dataclass(frozen=True)
class FirstScreen:
    """The texts of a first screen; names from the data are cut and made visible in them, not escaped."""

    run: str
    verdict: str
    about: tuple[str, ...]  # behind the verdict, and below it
    route: tuple[str, ...]  # empty: there is none to speak of
    times: str
    headings: tuple[str, ...]  # of COLUMNS
    rows: tuple[tuple[str, ...], ...]  # cells of COLUMNS, a domain each
    total: tuple[str, ...]  # the one draft for all; empty: there is none
    below: tuple[str, ...]
    load: tuple[tuple[str, ...], ...]  # rows of cells, a heading first; empty: one concurrency is all there is
    pays: str
    notes: tuple[str, ...]
    serve: tuple[str, ...]  # what writes the engine's configuration, and what to say of it; empty: nothing is to be deployed
    more: str  # what else there is: the sections that have something to show, the notes of other kinds, the formats


def first_screen(report: Report) -> FirstScreen:
    """The first screen of a report."""
    by_code: dict[str, list[Note]] = {}
    for note in sorted(report.notes, key=_rank):
        by_code.setdefault(note.code, []).append(note)
    load, pays = _load(report)
    return FirstScreen(
        run=_run(report),
        verdict=report.verdict,
        about=tuple(_about(report)),
        route=tuple(_route(report)),
        times=_times(report),
        headings=tuple(_headings(report)),
        rows=tuple(_row(fmt.short(item.domain), item.share, item.documents, item.best, item) for item in report.domains),
        total=_total(report),
        below=tuple(_below(report)),
        load=load,
        pays=pays,
        notes=tuple(f"{same[0].message}{_others(len(same) - 1)}" for same in by_code.values())[:NOTES],
        serve=tuple(_serve(report)),
        more=_more(report, max(len(by_code) - NOTES, 0)),
    )


def _rank(note: Note) -> int:
    return IMPORTANCE.index(note.code) if note.code in IMPORTANCE else len(IMPORTANCE)


def _others(count: int) -> str:
    return f" (and {count} more like it)" if count else ""


def _run(report: Report) -> str:
    run = report.run
    counts = f"{fmt.many(run.documents, 'document')}, {fmt.many(run.positions, 'token')}"
    source = f"imported from {run.imported}, " if run.imported else ""
    state = "" if run.complete else " (PARTIAL)"
    model = run.target.rstrip("/").rsplit("/", 1)[-1]
    texts = " and ".join(dict.fromkeys(text.split(" (")[0] for text in run.texts)) or "no"
    return f"{fmt.short(model)} {run.dtype}, {texts} text, {source}{counts}{state}; drafts {', '.join(run.drafts)}"


def _about(report: Report) -> Iterator[str]:
    """The draft, its speedup and what was asked for; where nothing is decided, why."""
    traffic = report.traffic
    asked = f"asked {traffic.min_speedup:g}x"
    if report.draft is None or report.speedup is None:
        longest = _mine(report) or next(iter(report.drafts), None)
        if longest is not None and longest.tokens_per_round is not None:
            emits = f"{fmt.interval(longest.tokens_per_round)} tokens per round on any engine"
            yield f"{longest.draft}, {_tokens(longest.gamma)}: {emits}; speedup not known, {asked}"
        else:
            yield f"speedup not known, {asked}"
        yield fmt.sentence(report.traffic.reason)
        return
    best = "" if report.verdict == "GO" or len(report.drafts) < 2 else " (the best)"
    measured = " (Hugging Face times)" if report.times and report.times.source == "measured" else ""
    where = " everywhere" if len(report.domains) > 1 else ""
    yield f"{report.draft}{best}{where}, {_tokens(report.gamma)}: {fmt.interval(report.speedup, 'x')}, {asked}{measured}"
    if report.verdict != "UNDECIDED":
        return
    if more := _more_documents(_mine(report)):
        yield f"About {fmt.many(more, 'more document')} would settle it, if this speedup holds"
    else:
        yield fmt.sentence(traffic.reason)


def _tokens(gamma: int | None) -> str:
    return fmt.many(gamma or 0, "speculative token")


def _mine(report: Report) -> Choice | None:
    """The draft that the verdict concerns, by itself on the whole traffic."""
    return next((choice for choice in report.drafts if choice.draft == report.draft), None)


def _second(report: Report) -> Choice | None:
    """The fastest of the other drafts on the whole traffic."""
    return next((choice for choice in report.drafts if choice.draft != report.draft), None)


def _more_documents(choice: Choice | None) -> int | None:
    """How many more independent documents would settle a choice; None where that is not known."""
    if choice is None or choice.documents_needed is None:
        return None
    return max(choice.documents_needed - choice.documents, 0) or None


def _route(report: Report) -> Iterator[str]:
    """The pools that the verdicts call for, and what they gain."""
    route, over = report.routing, "no speculation"
    if route is None:
        if (
            len(report.domains) > 1
            and report.speedup is not None
            and report.run.profile.get("route", {}).get("by") != "none"
        ):
            yield "one pool: no domain would gain by another draft or γ, or by none."
        return
    if route.over.draft is not None:
        over = f"{route.over.draft} (γ {route.over.gamma}) alone"
    faster, tested = fmt.interval(route.speedup, "x"), f"on {fmt.many(route.documents, 'document')} that did not choose them"
    if route.worth_it:
        yield f"{_parts(route)}: {faster}, {len(route.pools)} server pools."
        yield f"Routing gains {_signed(route.gain)} over {over}, {tested}."
        return
    number = "a second pool" if len(route.pools) == 2 else f"{len(route.pools)} pools"
    yield f"one pool: not worth {number}, with a gain of {_signed(route.gain)} over {over}."
    yield f"Tried: {_parts(route)}: {faster}, {tested}."


def _signed(gain: Interval) -> str:
    return f"{100 * gain.value:.1f} % [{100 * gain.low:.1f}, {100 * gain.high:.1f}]"


def _parts(route: Route) -> str:
    """Which domains go where: the pool with the largest share is the rest."""
    rest, *others = route.pools
    said = []
    for pool in others:
        names = [fmt.short(name) for name in pool.domains]
        where = " and ".join(names) if len(names) < 3 else f"{names[0]} and {len(names) - 1} more"
        said.append(f"{where} {_goes(pool)}")
    return ", ".join([*said, f"rest {_goes(rest)}"])


def _goes(pool: ServerPool) -> str:
    return "without speculation" if pool.draft is None else f"to {pool.draft} (γ {pool.gamma})"


def _times(report: Report) -> str:
    """What the step times are of, and the conditions that the verdict holds for."""
    cost, conditions = report.times, report.conditions
    if cost is None:
        return "no step times: tokens per round hold on any engine, a speedup needs your engine's times"
    load = "one sequence" if conditions.concurrency == 1 else f"{conditions.concurrency} sequences"
    where = f"{load} at a time, context {cost.context:.0f}"
    if cost.source == "measured":
        return f"{where}, {cost.device}; measured here with Hugging Face: not your engine"
    if cost.source == "table":
        return f"{where}; from your table {cost.device}"
    return f"{where}; computed by a roofline of {cost.device}: not measured"


def _row(name: str, share: float, documents: int, choice: Choice, item: DomainAnswer | None) -> tuple[str, ...]:
    return (
        name,
        fmt.percent(share),
        fmt.count(documents),
        choice.draft or fmt.NOTHING,
        fmt.NOTHING if choice.gamma is None else str(choice.gamma),
        fmt.share(choice.acceptance.value if choice.acceptance else None, 2),
        fmt.number(choice.tokens_per_round.value if choice.tokens_per_round else None),
        fmt.interval(choice.speedup),
        choice.verdict,
        _next_best(item.next_best, item.ahead) if item else "",
    )


def _next_best(choice: Choice | None, ahead: Interval | None) -> str:
    if choice is None or choice.draft is None:
        return "\N{EN DASH}"
    same = f" {SAME}" if ahead is not None and ahead.low <= 1 <= ahead.high else ""
    if choice.speedup is None:
        return f"{choice.draft} {reached(choice.tokens_per_round.value if choice.tokens_per_round else None, None)}"
    return f"{choice.draft} {fmt.number(choice.speedup.value)}{same}"


def _headings(report: Report) -> Iterator[str]:
    heads = report.run.imported is not None or any(facts.by_depth for facts in report.run.draft_models.values())
    named = {"alpha": "accept@1" if heads else "alpha", "speedup": f"speedup [{fmt.level(report.confidence)}]"}
    return (named.get(name, name) for name in COLUMNS)


def _total(report: Report) -> tuple[str, ...]:
    mine = _mine(report)
    if mine is None or len(report.domains) < 2:
        return ()
    return (*_row(DRAFT_ALONE, 1.0, report.run.documents, mine, None)[:-1], _next_best(_second(report), None))


def _below(report: Report) -> Iterator[str]:
    """What would settle domains, what the table's marks mean, and which drafts pay nowhere."""
    lacking = {item.domain: _more_documents(item.best) for item in report.domains if item.best.verdict == "UNDECIDED"}
    if needed := [f"{fmt.short(domain)} {fmt.count(more)}" for domain, more in lacking.items() if more]:
        yield f"more documents that would settle a domain, if its speedup holds: {', '.join(needed)}"
    if any(_next_best(item.next_best, item.ahead).endswith(SAME) for item in report.domains):
        yield f"{SAME}: not told apart from the best, on the same documents; others than these chose it"
    slow = []
    for choice in report.drafts:
        judged = [result for result in report.results if result.draft == choice.draft and result.verdict is not None]
        if (
            choice.speedup is None
            or choice.speedup.value >= 1
            or not judged
            or any(result.verdict != "NO-GO" for result in judged)
        ):
            continue
        where = f"{len(judged)} of {fmt.many(len(judged), 'domain')}"
        step = report.times.draft_ms.get(str(choice.draft)) if report.times else None
        cost = (
            f" (a draft step costs {fmt.number(step / report.times.target_ms[1])} of a target step)"
            if step and report.times
            else ""
        )
        slow.append(f"{choice.draft} {fmt.number(choice.speedup.value, unit='x')}, NO-GO in {where}{cost}")
    if slow:
        yield f"pays nowhere: {'; '.join(slow)}"


def _load(report: Report) -> tuple[tuple[tuple[str, ...], ...], str]:
    """Best γ and its speedup by concurrency, and up to which concurrency that reaches what was asked for."""
    traffic = report.traffic
    known = [item for item in traffic.load if item.best_gamma is not None]
    if len(known) < 2:
        return (), ""
    shown = (
        known if len(known) <= LOADS else [known[round(place * (len(known) - 1) / (LOADS - 1))] for place in range(LOADS)]
    )
    best = [(item.best_gamma, item.speedups[item.gammas.index(item.best_gamma)]) for item in shown if item.best_gamma]
    rows = (
        ("sequences at a time", *(str(item.concurrency) for item in shown)),
        (f"{traffic.draft}, best γ", *(fmt.number(speedup.value if speedup else None, unit="x") for _, speedup in best)),
        ("that γ", *(str(gamma) for gamma, _ in best)),
    )
    reached = None
    for item in known:
        speedup = item.speedups[item.gammas.index(item.best_gamma)] if item.best_gamma else None
        if speedup is None or speedup.value < traffic.min_speedup:
            break
        reached = item.concurrency
    asked = f"{traffic.min_speedup:.2f}x"
    if reached is None:
        return rows, f"reaches {asked} at none of these"
    return rows, f"reaches {asked} at all of these" if reached == known[
        -1
    ].concurrency else f"reaches {asked} up to {reached}"


def _serve(report: Report) -> Iterator[str]:
    """The command that writes what the engine is started with, and the other drafts that are to be deployed."""
    drafts = list(dict.fromkeys(pool.draft for pool in report.route if pool.draft is not None))
    if drafts:
        yield f"alphaprof export {report.run.path}:{drafts[0]} --to vllm"
    if len(drafts) > 1:
        yield f"the same for {' and '.join(drafts[1:])}"


def _more(report: Report, notes: int) -> str:
    names = [section.name for section in chosen([ALL], report)]
    shown = [f"notes ({notes} more)" if name == "notes" and notes else name for name in names]
    return f"--show {', '.join(shown)} or {ALL}; --format html, json, md or csv"


CSV = (
    *(
        "domain",
        "share",
        "documents",
        "draft",
        "gamma",
        "acceptance",
        "tokens_per_round",
        "speedup",
        "low",
        "high",
        "verdict",
    ),
    *("documents_needed", "next_draft", "next_gamma", "next_speedup"),
)


def first_screen_csv(report: Report) -> str:
    """The one table in full: a row a domain, and one without a domain for the one draft of the whole traffic. Numbers have
    all their digits; what is not known is empty.
    """
    file = io.StringIO()
    table = csv.writer(file, lineterminator="\n")
    table.writerow(CSV)
    rows = [(item.domain, item.share, item.documents, item.best, item.next_best) for item in report.domains]
    if (total := _mine(report)) is not None:
        rows.append(("", 1.0, report.run.documents, total, _second(report)))
    for domain, share, documents, best, other in rows:
        intervals = (best.acceptance, best.tokens_per_round, best.speedup)
        values = [interval and interval.value for interval in intervals]
        ends = (best.speedup.low, best.speedup.high) if best.speedup else (None, None)
        behind = (other.draft, other.gamma, other.speedup and other.speedup.value) if other else (None, None, None)
        first = (domain, share, documents, best.draft, best.gamma)
        table.writerow((*first, *values, *ends, best.verdict, best.documents_needed, *behind))
    return file.getvalue()
