"""Does it pay on the whole traffic, and why."""

from __future__ import annotations

from collections.abc import Iterator

from alphaprof.render import format as fmt
from alphaprof.render.blocks import Block, Verdict
from alphaprof.report.build import RunReport
from alphaprof.report.wording import how_drafted, on_for

TITLE = "does it pay on the whole traffic, and why"


def draw(report: RunReport) -> Iterator[Block]:
    """Yield what was measured, the engine-free answer, then the verdict, which needs step times."""
    run, traffic, answer = report.run, report.traffic, report.answer
    yield f"target {run.target}   {run.dtype}   drafts {', '.join(run.drafts)}"
    for name, facts in run.draft_models.items():
        if "match" in facts.settings:  # which no name says: engines look up in different ways
            yield f"{name}: {facts.reference}"
    yield f"text {'; '.join(run.texts) or 'none'}"
    yield from how_drafted(report, report.results)
    yield f"{fmt.many(run.documents, 'document')}, {fmt.many(run.positions, 'position')}"
    if halved := sum(shard.halved_batches for shard in report.asked.run.manifest.shards):
        batches = "1 batch was" if halved == 1 else f"{halved} batches were"
        yield f"out of memory: {batches} halved; values may differ by up to 1e-3 from a run with enough memory"
    if run.imported is not None:
        known = "rounds are known at the served gamma only; alpha and coverage are not known (n/a)"
        yield f"imported from per-request metrics of {run.imported}: {known}"
    yield ""
    if answer.tokens_per_round is not None:
        yield from _engine_free(report)
        yield ""
    yield Verdict(str(answer.verdict), f"  for the whole traffic, at least {traffic.min_speedup:g}x wanted")
    yield answer.reason
    shares = ", ".join(f"{fmt.short(domain)} {fmt.percent(weight)}" for domain, weight in traffic.weights.items())
    origin = "observed shares of tokens" if traffic.weights_observed else "shares of tokens from the profile"
    yield f"weights ({origin}): {shares}"
    yield from on_for(report)


def _engine_free(report: RunReport) -> Iterator[str]:
    """Yield what a round emits, and what it may cost."""
    traffic, answer = report.traffic, report.answer
    setting = f"draft {answer.draft}, rule {answer.rule}, gamma {answer.gamma}"
    emits = fmt.interval(answer.tokens_per_round)
    served = traffic.served_dtype  # of a target in another dtype than the served one, not there
    there = f" that serves the target in {report.run.dtype}, not in {served}" if served is not None else ""
    yield f"On any engine{there}, {setting}: a round emits {emits} tokens,"
    yield "and is faster if it costs less than that many plain decode steps."
    if traffic.break_even_length is not None:
        here = fmt.number(traffic.break_even_length)
        slow = " (below 1: plain decoding was slow when timed)" if traffic.break_even_length < 1 else ""
        yield f"By the step times (section times) it costs {here}{slow}."
