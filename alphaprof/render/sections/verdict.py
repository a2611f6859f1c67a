"""The verdict on the whole traffic: what was measured, the engine-free answer, the reason, and the weights."""

from __future__ import annotations

from collections.abc import Iterator

from alphaprof.render import wording
from alphaprof.render.blocks import Block
from alphaprof.report import format as fmt
from alphaprof.report.build import Report


def verdict(report: Report) -> Iterator[Block]:
    """Yields what was measured, the engine-free answer, then the verdict, which needs step times."""
    run, traffic = report.run, report.traffic
    yield f"target {run.target}   {run.dtype}   drafts {', '.join(run.drafts)}"
    yield f"text {'; '.join(run.texts) or 'none'}"
    yield f"{fmt.many(run.documents, 'document')}, {fmt.many(run.positions, 'position')}"
    if run.imported is not None:
        known = "rounds are known at the served gamma only; alpha and coverage are not known (n/a)"
        yield f"imported from per-request metrics of {run.imported}: {known}"
    yield ""
    if traffic.tokens_per_round is not None:
        yield from _engine_free(report)
        yield ""
    yield f"{traffic.verdict}  for the whole traffic, at least {traffic.min_speedup:g}x wanted"
    yield traffic.reason
    if traffic.speedup is not None:
        chose_nothing = f"on the {fmt.many(traffic.documents, 'document')} that did not choose draft and gamma"
        on = chose_nothing if traffic.chosen else "over all documents"
        yield f"speedup {fmt.interval(traffic.speedup, 'x')} ({fmt.level(report.confidence)} interval) {on}"
    shares = ", ".join(f"{fmt.short(domain)} {fmt.percent(weight)}" for domain, weight in traffic.weights.items())
    origin = "observed shares of tokens" if traffic.weights_observed else "shares of tokens from the profile"
    yield f"weights ({origin}): {shares}"


def _engine_free(report: Report) -> Iterator[str]:
    """Yields what a round emits, and what it may cost."""
    traffic = report.traffic
    setting = f"draft {traffic.draft}, rule {traffic.rule}, gamma {traffic.gamma}"
    emits = fmt.interval(traffic.tokens_per_round)
    yield f"{fmt.sentence(wording.any_engine(report))}, {setting}: a round emits {emits} tokens,"
    yield "and is faster where it costs less than that many plain decode steps."
    if traffic.break_even_length is not None:
        here = fmt.number(traffic.break_even_length)
        slow = " (below 1: plain decoding was slow when it was timed)" if traffic.break_even_length < 1 else ""
        yield f"With the step times of section times it costs {here}{slow}."
