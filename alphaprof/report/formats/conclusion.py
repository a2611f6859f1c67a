"""The conclusion of a report in one or two plain sentences, made of the values that stand below it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from alphaprof.render import format as fmt
from alphaprof.report.answer import Answer
from alphaprof.report.build import Report
from alphaprof.report.verdict import beside

NAME = 16  # characters of a domain's name in a sentence
NAMED = 4  # domains that a sentence names
UNTIMED = ("no_step_times", "not_timed", "out_of_time")  # notes whose remedy gives step times


def conclusion(report: Report) -> str:
    """Return what to do, and how sure that is; what to do next if it is open."""
    answer, asked = report.answer, report.traffic.min_speedup
    if answer.draft is None or answer.speedup is None or not math.isfinite(answer.speedup.high):
        return _unknown(report)
    setting = f"{fmt.short(answer.draft, NAME)} with {fmt.many(answer.gamma or 0, 'speculative token')}"
    low, high = (beside(end, asked, 2) for end in (answer.speedup.low, answer.speedup.high))
    faster = f"about {fmt.number(answer.speedup.value)} times as fast"
    level = fmt.level(report.confidence)
    if answer.verdict == "GO":
        return f"Turn on {setting}: {faster} ({level} lower bound {low}).{_by_domain(report)}"
    if answer.verdict == "NO-GO":
        over = f"the best, {setting}, is {faster} ({level} upper bound {high}); {asked:g} was asked for"
        return f"Leave speculative decoding off: {over}.{_by_domain(report)}"
    if answer.documents_needed is not None:
        following = f"profile {fmt.count(answer.documents_needed)} documents for an 80% chance of a verdict"
    else:
        following = answer.remedy or answer.reason
    return f"Not decided: {setting} is {faster}, from {low} to {high}; {asked:g} was asked for. Next: {following}."


def _unknown(report: Report) -> str:
    """Return why no speedup is known, what is known without, and the next step."""
    answer, emits, remedy = report.answer, "", report.answer.remedy
    best = report.drafts[0].answer if report.drafts else None  # the draft whose rounds emit most
    if best is not None and best.draft is not None and best.tokens_per_round is not None:
        most = fmt.number(best.tokens_per_round.value)
        emits = f"; {fmt.short(best.draft, NAME)} breaks even where a round costs {most} plain decode steps"
        remedy = remedy or next((note.remedy for note in report.notes if note.code in UNTIMED), "")
    following = f" Next: {remedy}." if remedy else ""
    return f"Not known whether it pays: {why(answer)}{emits}.{following}"


def why(answer: Answer) -> str:
    """Return the reason of a verdict without the remedy that it may begin with."""
    return answer.reason.removeprefix(f"{answer.remedy}; ")


def _by_domain(report: Report) -> str:
    """Return for which domains speculation pays, each with its own best draft and γ; empty if all domains agree."""
    kinds: dict[str, list[str]] = {}
    for item in report.domains:
        kinds.setdefault(str(item.answer.verdict), []).append(fmt.short(str(item.answer.domain), NAME))
    words = {"GO": "it pays for", "NO-GO": "it does not pay for", "UNDECIDED": "it is not settled for"}
    clauses = [f"{words[kind]} {_listed(names)}" for kind in words if (names := kinds.get(kind))]
    return f" {fmt.sentence('; '.join(clauses))}." if len(clauses) > 1 else ""


def _listed(names: Sequence[str]) -> str:
    """Return names as a sentence has them."""
    shown = [*names] if len(names) <= NAMED else [*names[: NAMED - 1], f"{len(names) - NAMED + 1} more"]
    return " and ".join(filter(None, (", ".join(shown[:-1]), shown[-1])))
