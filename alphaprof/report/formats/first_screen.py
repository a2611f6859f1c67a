"""The first screen of a report: verdict, conditions, one table, load, notes, what to paste, and what else there is.

Terminal, Markdown and HTML draw the same texts.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from alphaprof.costs.cost_model import Cost
from alphaprof.render import format as fmt
from alphaprof.render.blocks import Named, Row, Table, Verdict, table_by_columns
from alphaprof.report.answer import Answer
from alphaprof.report.build import Report
from alphaprof.report.formats.conclusion import NAME, conclusion, why
from alphaprof.report.loads import OFF, AtLoad
from alphaprof.report.notes import once_a_code
from alphaprof.report.sections import ALL, NAMES
from alphaprof.report.sections.times import path_lines
from alphaprof.report.serving import paste_formats
from alphaprof.report.verdict import MIDDLE, beside
from alphaprof.report.wording import on_for, throughput_of
from alphaprof.run.manifest import UNKNOWN_DTYPE
from alphaprof.run.notes import RANKS
from alphaprof.stats.estimate import Interval

NOTES = 3  # that are shown
LOADS = 8  # concurrencies that are shown
TOTAL = "all traffic"
LEFT = ("draft", "verdict", "next best")  # columns of words
LESS = ("docs", "next best", "share", "alpha", "accept@1", "tokens/round")  # that a narrow screen goes without, in turn
MARK = " @1"  # marks acceptance of a head among other drafts
MODEL = 28  # characters of the target's name
ALONE = "*"  # marks a verdict that does not hold for all domains together
OWN = ("table", "vllm")  # sources of step times that are the user's engine
SIXTEEN_BITS = ("bfloat16", "float16")
# What a round costs in decode steps by γ: medians over three workloads of Llama-3.1-8B with an EAGLE-3 head, one sequence,
# vLLM 0.23 with full CUDA graphs on an H100 (docs/research/log.md).
ON_H100 = {1: 1.07, 2: 1.12, 3: 1.22, 5: 1.35, 7: 1.48}
COLUMNS = "share: of all output; {}: {}; tokens/round: per target step, 1 without draft"
ACCEPTED = {"alpha": "chance a draft is kept", "accept@1": "first drafts kept"}
CHOSEN = "each row: its own best draft and γ; speedup: chosen by half of the documents, tested by the other"
SAME = "≈"  # marks a next best that is not clearly different


@dataclass(frozen=True)
class FirstScreen:
    """The texts of a first screen; names from the data are cut and made visible in them, not escaped."""

    conclusion: str
    run: str
    verdict: Verdict
    about: tuple[str, ...]  # behind the verdict, and below it
    times: str
    table: Table  # a row a domain, and below a line the one draft for all of them
    load: Table | None  # by concurrency; None: one is all there is
    pays: str
    notes: tuple[str, ...]
    serve: tuple[str, str] | None  # the command that writes what an engine is started with, and a remark; None: no GO
    more: str  # what else there is: the sections that have something to show, the notes of other kinds, the formats


def first_screen(report: Report) -> FirstScreen:
    """Return the first screen of a report."""
    notes = list(once_a_code(sorted(report.notes, key=lambda note: RANKS.get(note.code, len(RANKS)))))  # important first
    others = max(len(notes) - NOTES, 0)
    sections = [f"notes ({others} more)" if name == "notes" and others else name for name in NAMES]
    load, pays = _load_table(report)
    return FirstScreen(
        conclusion=conclusion(report),
        run=_what_was_run(report),
        verdict=Verdict(str(report.answer.verdict)),
        about=tuple(_about(report)),
        times=_times(report),
        table=_domain_table(report),
        load=load,
        pays=pays,
        notes=tuple(message for message, _ in notes[:NOTES]),
        serve=_serve(report),
        more=f"--show {', '.join(sections)} or {ALL}; --out report.html, .md, .json or .svg",
    )


def _what_was_run(report: Report) -> str:
    run = report.run
    counts = f"{fmt.many(run.documents, 'doc')}, {fmt.many(run.positions, 'token')}"
    source = f"imported from {run.imported}, " if run.imported else ""
    state = "" if run.complete else " (PARTIAL)"
    model = run.target.rstrip("/").rsplit("/", 1)[-1].removesuffix(".gguf").removesuffix(".GGUF")
    texts = " and ".join(dict.fromkeys(text.split(" (")[0] for text in run.texts)) or "no"
    dtype = "" if run.dtype == UNKNOWN_DTYPE else f" {run.dtype}"
    about = f"{fmt.short(model, MODEL)}{dtype}, {texts} text, {report.answer.rule}"
    return f"{', '.join(run.drafts)} for {about}, {source}{counts}{state}"


def _about(report: Report) -> Iterator[str]:
    """Yield the draft, its speedup and the threshold; the domains on which alone it is faster; and, if nothing is
    decided, why.
    """
    answer, traffic = report.answer, report.traffic
    needed = f"threshold {traffic.min_speedup:g}x"
    if answer.draft is None or answer.speedup is None:
        yield f"speedup not known, {needed}"
        yield from filter(None, (_tokens_first(report),))
        return
    where = " overall" if len(report.domains) > 1 else ""
    faster = speedup_text(answer.speedup, traffic.min_speedup, "x")
    stop = f" (p_min {report.conditions.p_min:g})" if report.conditions.p_min else ""
    drafted = fmt.many(answer.gamma or 0, "speculative token")
    yield f"{answer.draft}{where}, {drafted}{stop}: {faster}{_whose(report.times)}, {needed}"
    yield from filter(None, ("; ".join(filter(None, (_pays_below(report), _alike(report)))), traffic.disagreement))
    if report.conditions.concurrency > 1:
        asked = [item for item in traffic.load if item.concurrency == report.conditions.concurrency and item.gamma]
        yield from (throughput_of(report, asked, item.throughput) for item in asked)
    yield from on_for(report)
    if stop and not report.run.draft_models[answer.draft].own_path:
        yield f"with p_min every speedup is the {MIDDLE}; its interval encloses both ends"
    if answer.verdict == "UNDECIDED" and why(answer) not in conclusion(report) and answer.documents_needed is None:
        yield why(answer)


def _tokens_first(report: Report) -> str:
    """Return what rounds of each draft emit, most first; empty if there are none."""
    found = [item.answer for item in report.drafts if item.answer.draft and item.answer.tokens_per_round]
    each = [f"{answer.draft} {fmt.interval(answer.tokens_per_round)} (γ {answer.gamma})" for answer in found]
    return f"tokens per round: {', '.join(each)}" if each else ""


def _whose(cost: Cost | None) -> str:
    """Return whose step times a speedup rests on, in words."""
    if cost is None:
        return ""
    if cost.source == "measured":
        return f" measured here on {'CPU' if cost.device == 'cpu' else cost.device}"
    owner = {"vllm": f"{cost.engine} timed here", "table": f"your table {fmt.short(cost.device, NAME)}"}
    return f" by {owner.get(cost.source, f'a roofline of {cost.device}')}"


def _pays_below(report: Report) -> str:
    """Return the cost of a round that breaks even, beside what one costs elsewhere if that was measured; empty where step
    times are those of the user's engine. Of a round that costs more than all of its tokens, that no draft pays.
    """
    answer, facts = report.answer, report.run.target_model
    if answer.speedup and answer.tokens_per_round and answer.gamma and answer.speedup.value > 0:
        cost = answer.tokens_per_round.value / answer.speedup.value
        if cost > answer.gamma + 1:
            emitted = fmt.many(answer.gamma + 1, "token")
            return f"Even a perfect draft loses: a round costs {fmt.number(cost)} decode steps and emits at most {emitted}"
    if answer.tokens_per_round is None or answer.draft is None or (report.times and report.times.source in OWN):
        return ""
    head, elsewhere = report.run.draft_models[answer.draft], ""
    usual = 7e9 <= (facts.parameters or 0) <= 9e9 and not (facts.shape or {}).get("experts") and facts.dtype in SIXTEEN_BITS
    known = usual and head.by_depth and not head.in_one_step and report.conditions.concurrency == 1
    if known and answer.gamma in range(min(ON_H100), max(ON_H100) + 1):
        cost = np.interp(answer.gamma or 0, list(ON_H100), list(ON_H100.values()))
        elsewhere = f" (vLLM on H100: about {fmt.number(float(cost), 1)})"
    return f"Breaks even if a round costs {fmt.number(answer.tokens_per_round.value)} decode steps{elsewhere}"


def _mine(report: Report) -> Answer | None:
    """Return the draft that the verdict concerns, by itself on the whole traffic."""
    return next((item.answer for item in report.drafts if item.answer.draft == report.answer.draft), None)


def _times(report: Report) -> str:
    """Return what the step times are of, and the conditions that the verdict holds for."""
    cost, conditions = report.times, report.conditions
    if cost is None:
        return "no step times: tokens per round hold on any engine; a speedup needs your engine's times"
    load = "one sequence" if conditions.concurrency == 1 else f"{conditions.concurrency} sequences"
    where = f"{load} at a time, context {cost.context:.0f}"
    if cost.source == "measured":
        return f"Hugging Face on this machine, not your engine: {where}, {cost.device}{_rounds(report, cost)}"
    path = "".join(f"; {line}" for line in path_lines(cost))
    if cost.source == "vllm":
        return f"{where}, {cost.device}; {cost.engine} on this machine{_rounds(report, cost)}{path}"
    if cost.source == "table":
        return f"{where}; from your table {cost.device}{path}"
    return f"{where}; computed by a roofline of {cost.device} (x/÷ {cost.factor:.2f}): not measured"


def _rounds(report: Report, cost: Cost) -> str:
    """Return how many rounds step times are of, how they spread, and for how much of the time steps waited for a core."""
    decode = next((each for each in cost.spread if each.step == "decode"), None)
    if decode is None:
        return ""
    around = f"{fmt.number(decode.p10_ms, 1)} to {fmt.number(decode.p90_ms, 1)} ms"
    around += f" in 80% of {fmt.many(cost.rounds or 0, 'round')}"
    waiting = report.run.environment.get("timing_waiting")
    return f"; a decode step {around}" + (f", {fmt.percent(waiting)} waiting" if waiting else "")


def speedup_text(interval: Interval | None, asked: float, unit: str = "") -> fmt.Number:
    """Return a speedup with its interval, whose ends are not rounded to the other side of what was asked for."""
    if interval is None:
        return fmt.NOTHING
    low, high = (beside(end, asked, 2) if math.isfinite(end) else fmt.number(end) for end in (interval.low, interval.high))
    return fmt.Number(fmt.number(interval.value, unit=unit), f"[{low}, {high}]", interval)


def _domain_table(report: Report) -> Table:
    """Return the one table: a row a domain, and below a line the draft of the verdict on the whole traffic."""
    every: list[Row] = []
    for item in report.domains:
        cells = {"share": fmt.percent(item.share), "docs": fmt.count(item.answer.documents)}
        cells |= _draft_cells(report, item.answer, ALONE if item.alone else "")
        cells["next best"] = _next_best(item.next_best, f" {SAME}" if item.level else "")
        every.append((fmt.short(str(item.answer.domain)), cells))
    domains, mine = len(every), _mine(report)
    if mine is not None and domains > 1:
        second = next((item.answer for item in report.drafts if item.answer.draft != report.answer.draft), None)
        cells = {"share": "100%", "docs": fmt.count(mine.documents)} | _draft_cells(report, mine)
        every.append((TOTAL, cells | {"next best": _next_best(second)}))
    return table_by_columns("Domains", every[:domains], left=LEFT, footer=every[domains:], below=tuple(_below(report)))


def _head_among_others(report: Report, answer: Answer) -> bool:
    """Return whether an answer's draft is a head beside drafts that are none: its acceptance is that of its first draft."""
    heads = [name for name, facts in report.run.draft_models.items() if facts.by_depth]
    return answer.draft in heads and len(heads) < len(report.run.drafts) and report.run.imported is None


def _acceptance_name(report: Report) -> str:
    """Return what acceptance is called: of heads and engines it is that of first drafts."""
    first = report.run.imported is not None or all(facts.by_depth for facts in report.run.draft_models.values())
    return "accept@1" if first else "alpha"


def _draft_cells(report: Report, answer: Answer, mark: str = "") -> dict[str, str]:
    """Return the cells of a draft and what it does; `mark`: behind its verdict."""
    return {
        "draft": answer.draft or fmt.NOTHING,
        "γ": fmt.NOTHING if answer.gamma is None else str(answer.gamma),
        _acceptance_name(report): fmt.share(answer.acceptance.value if answer.acceptance else None, 2)
        + (MARK if _head_among_others(report, answer) else ""),
        "tokens/round": fmt.number(answer.tokens_per_round.value if answer.tokens_per_round else None),
        f"speedup [{fmt.level(report.confidence)} each]": speedup_text(answer.speedup, report.traffic.min_speedup),
        "verdict": Verdict(str(answer.verdict), mark),
    }


def _next_best(answer: Answer | None, mark: str = "") -> str:
    if answer is None or answer.draft is None:
        return "\N{EN DASH}"
    if answer.speedup is None:
        tokens = answer.tokens_per_round
        return Named(answer.draft, f" {fmt.number(tokens.value if tokens else None)} tokens")
    return Named(answer.draft, f" {fmt.number(answer.speedup.value, unit='x')}{mark}")


def _below(report: Report) -> Iterator[str]:
    """Yield what the columns are, marks, what would settle domains, and drafts that never pay."""
    shown = [item.answer for item in report.domains] + [mine for mine in [_mine(report)] if mine is not None]
    yield COLUMNS.format(name := _acceptance_name(report), ACCEPTED[name])
    if report.traffic.chosen and any(answer.speedup for answer in shown):
        yield CHOSEN
    if report.traffic.chosen and report.domains and not any(answer.speedup for answer in shown):
        yield "by tokens per round at the largest γ that all drafts have: no draft and no γ is recommended without speedups"
    if any(_head_among_others(report, answer) for answer in shown):
        yield f"{MARK.strip()}: accept@1, acceptance of a head's first draft"
    marks = []
    if any(item.level for item in report.domains):
        marks.append(f"{SAME}: no clear difference from the best")
    if any(item.alone for item in report.domains):
        marks.append(f"{ALONE}: not certain for all {len(report.domains)} domains together (Holm)")
    if report.traffic.slow:
        marks.append(f"drafts below {report.traffic.min_speedup:g}x in every domain: {', '.join(report.traffic.slow)}")
    if marks:
        yield "; ".join(marks)
    undecided = [item.answer for item in report.domains if item.answer.verdict == "UNDECIDED" and item.answer.held_out]
    if needed := [
        (fmt.short(str(each.domain), NAME), fmt.count(each.documents_needed))
        for each in undecided
        if each.documents_needed is not None
    ]:
        (domain, count), *others = needed
        rest = "".join(f", {number} of {name}" for name, number in others)
        yield f"to settle: a new run with about {count} documents of {domain}{rest} (80% chance)"
    remedies: dict[str, list[str]] = {}
    for each in undecided:
        if each.documents_needed is None and each.remedy:
            remedies.setdefault(each.remedy, []).append(fmt.short(str(each.domain), NAME))
    yield from (f"to settle {', '.join(names)}: {remedy}" for remedy, names in remedies.items())
    judged = {item.answer.draft for item in report.drafts}  # without a name if it has no rounds
    untimed = [draft for draft in report.run.drafts if draft not in judged]
    if untimed and judged and None not in judged:
        yield f"no step times: {', '.join(untimed)}"


def _load_table(report: Report) -> tuple[Table | None, str]:
    """Best γ and its speedups by concurrency, and up to which concurrency that reaches what was asked for."""
    traffic, known = report.traffic, report.traffic.load
    if len(known) < 2:
        return None, ""
    shown = (
        known if len(known) <= LOADS else [known[round(place * (len(known) - 1) / (LOADS - 1))] for place in range(LOADS)]
    )

    def cells(of: Callable[[AtLoad], Interval | None]) -> dict[str, str]:
        return {str(item.concurrency): fmt.number(each.value, unit="x") if (each := of(item)) else OFF for item in shown}

    rows: list[Row] = [
        (f"{report.answer.draft}, best γ", cells(lambda item: item.speedup)),
        ("that γ", {str(item.concurrency): str(item.gamma) for item in shown}),
    ]
    if any(item.throughput for item in shown):
        rows.append(("throughput, prefills included", cells(lambda item: item.throughput)))
    table, last = table_by_columns("Load", rows, named="sequences at a time"), traffic.pays_up_to
    if last is None:
        return table, f"not surely above {traffic.min_speedup:g}x"
    where = "at every load timed" if last == known[-1].concurrency else f"up to {last} at a time"
    where = "for one at a time only" if last == 1 else where
    return table, f"surely above {traffic.min_speedup:g}x {where}"


def _alike(report: Report) -> str:
    """Return the γ that are about as fast as the chosen one, in words; empty if it stands alone."""
    alike = report.traffic.alike
    return f"γ {alike[0]} to {alike[-1]} are equally good" if len(alike) > 1 else ""


def _serve(report: Report) -> tuple[str, str] | None:
    """Return the command that writes an engine's configuration, if the draft of a GO is served as it was measured."""
    answer = report.answer
    if answer.verdict != "GO" or answer.draft is None:
        return None
    formats = paste_formats(report.run.draft_models[answer.draft], answer.rule, report.conditions.p_min)
    if not formats:
        return "", f"no known engine serves {answer.draft} as measured"
    changes = [part for change in report.conditions.changes for part in ("--set", change)]
    run = shlex.join([f"{report.run.path}:{answer.draft}", *changes])
    also = f"(also {', '.join(formats[1:])})" if len(formats) > 1 else ""
    return f"alphaprof export {run} --gamma {answer.gamma} --to {formats[0]}", also
