"""The best gamma by load: by sequences decoded at a time, and by their context."""

from __future__ import annotations

from collections.abc import Iterator

from alphaprof.render import format as fmt
from alphaprof.render.blocks import Block
from alphaprof.report.build import RunReport
from alphaprof.report.loads import AtLoad, load_table
from alphaprof.report.wording import throughput_of

TITLE = "the best gamma by load"
EMPTY = "it needs step times of several concurrencies or contexts: set costs.concurrency, or give a table of your engine's"


def compute(report: RunReport) -> tuple[AtLoad, ...]:
    """Return the gamma of the chosen draft at every load that there are step times for."""
    return report.judge.loads(everywhere=True)


def draw(report: RunReport) -> Iterator[Block]:
    """Yield the table of gammas, up to which concurrency the draft surely pays, and what throughput is of."""
    loads, traffic = report.section("load"), report.traffic
    if len(loads) < 2:
        return
    yield load_table(loads, f"{report.answer.draft} on the whole traffic")
    limit = "at no concurrency" if traffic.pays_up_to is None else f"up to {traffic.pays_up_to} at a time"
    context = fmt.count(traffic.load[0].context)
    yield f"at the traffic's own context, {context}, the lower bound reaches {traffic.min_speedup:g}x {limit}"
    yield throughput_of(report, loads)
