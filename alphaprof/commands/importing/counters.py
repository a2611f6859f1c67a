"""Counters on an engine's /metrics page: what rose between two readings, and the acceptance in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

from alphaprof.errors import ColumnMissing, DataEmpty, DataUnreadable, cut, shown
from alphaprof.render.blocks import Block, Small, Table
from alphaprof.report import format as fmt
from alphaprof.version import __version__

PREFIX = "vllm:spec_decode_num_"
DRAFTS, DRAFTED, ACCEPTED, POSITION = "drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos"
Key = tuple[str, tuple[tuple[str, str], ...]]  # name and labels of a counter, or of the time at which it was created
SAVE = "curl -s SERVER/metrics"
SHARES = ("marginal", "conditional")  # columns of the table by depth
NO_REQUESTS = "no interval: no requests"


def _page(path: Path) -> dict[Key, float]:
    """The counters of speculative decoding on a page. Raises `DataUnreadable`, and `ColumnMissing` where there are none."""
    from prometheus_client.parser import text_string_to_metric_families

    try:
        families = list(text_string_to_metric_families(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, IndexError) as error:  # the parser has no errors of its own
        reason = f"cannot read {cut(str(path))}" if isinstance(error, OSError) else f"{path} is not a metrics page"
        problem = f"{reason}: {getattr(error, 'strerror', None) or shown(str(error))}"
        raise DataUnreadable(problem, f"save the page in Prometheus' text format, as UTF-8: {SAVE}") from None
    samples = [sample for family in families for sample in family.samples if sample.name.startswith(PREFIX)]
    if not samples:
        hint = f"save vLLM's page, of a server that was started with --speculative-config: {SAVE}"
        raise ColumnMissing(f"{path}: there is no {PREFIX}{DRAFTS}_total", hint)
    names = ((sample.name.removeprefix(PREFIX).removesuffix("_total"), sample) for sample in samples)
    return {(name, tuple(sorted(sample.labels.items()))): sample.value for name, sample in names}


def _rises(before: Path, after: Path) -> Counter[Key]:
    """How far counters rose between two pages. Raises `DataUnreadable` unless these are of one server that went on."""
    first, second = _page(before), _page(after)
    rises: Counter[Key] = Counter()
    for key in [*first, *second]:
        old, new = first.get(key), second.get(key)
        created = key[0].endswith("_created")
        if old is None or new is None or not new >= old or (created and new != old):
            name = f"{PREFIX}{key[0]} of {', '.join(f'{label} {shown(value)}' for label, value in key[1][:3])}"
            problem = f"{name} is {old} in {before} and {new} in {after}: not two pages of one server that went on"
            hint = "was the server restarted in between, or are the files in the wrong order? save both pages again"
            raise DataUnreadable(problem, hint)
        if not created:
            rises[key] = int(new - old)
    return rises


@dataclass(frozen=True)
class Counters:
    """Acceptance between two readings of an engine's counters, over all its requests. There is no interval and no verdict:
    how much requests differ is not in a sum over them. `marginal[d-1]`: share of rounds whose first d drafts were all
    accepted; `conditional[d-1]`: share accepted of the drafts at depth d whose predecessors were, None where some rounds
    drafted fewer tokens than others, so that it is not known how many had a draft there, and where no round accepted the
    draft before.
    """

    format: ClassVar[str] = "alphaprof-counters"
    version: ClassVar[str] = "1.0"

    alphaprof: str
    target: str | None  # the model_name of the counters
    engines: int  # whose counters were added up
    gamma: int  # positions that are counted: num_speculative_tokens
    drafts: int  # rounds that drafted something
    drafted: int  # tokens
    accepted: int  # tokens
    accepted_per_drafted: float  # the acceptance rate of engines: depends on gamma, is not alpha
    acceptance_length: float  # 1 + accepted / drafts
    marginal: tuple[float, ...]
    conditional: tuple[float | None, ...]
    reason: str  # why there is neither an interval nor a verdict

    def blocks(self) -> Iterator[Block]:
        """Yield the acceptance length, what it is not, the other numbers, and acceptance by depth."""
        length = f"acceptance length {fmt.number(self.acceptance_length, 3)} tokens per round with a draft"
        yield f"{length}, at gamma {self.gamma}"
        yield self.reason
        yield ""
        of = f", {fmt.many(self.engines, 'engine')}" if self.engines > 1 else ""
        yield f"target {self.target or 'unknown'}{of}, gamma {self.gamma}"
        rate = f"{fmt.count(self.accepted)} of {fmt.count(self.drafted)} drafted tokens accepted"
        yield f"{fmt.many(self.drafts, 'round')} with a draft, {rate}"
        share = f"accepted/drafted {fmt.share(self.accepted_per_drafted)}"
        yield f"{share}: what engines call acceptance rate; it depends on gamma, and is not alpha"
        yield ""
        shares = zip(map(fmt.share, self.marginal), map(fmt.share, self.conditional), strict=True)
        rows = [(str(depth), dict(zip(SHARES, each, strict=True))) for depth, each in enumerate(shares, 1)]
        yield Table("by depth", SHARES, rows, "depth")
        full = self.drafted == self.gamma * self.drafts
        cause = "no round accepted the draft before" if full else "some rounds drafted fewer tokens"
        short = f" conditional: n/a where {cause}." if None in self.conditional else ""
        yield Small(f"marginal: first d drafts all accepted. conditional: draft d accepted, those before it were.{short}")
        yield Small("For intervals, domains and a verdict import logged requests: alphaprof import vllm (docs/import.md).")


def build_counters(before: Path, after: Path) -> Counters:
    """The answer from two saved pages of one server. Raises `DataUnreadable`, `ColumnMissing` and `DataEmpty`."""
    rises = _rises(before, after)
    models = sorted({dict(labels).get("model_name", "") for _, labels in rises})
    sums: Counter[tuple[str, str | None]] = Counter()  # over engines, by name and position
    for (name, labels), rise in rises.items():
        sums[name, dict(labels).get("position")] += rise
    drafts, drafted, accepted = (sums[name, None] for name in (DRAFTS, DRAFTED, ACCEPTED))
    gamma = sum(name == POSITION for name, _ in sums)
    by_position = [sums[POSITION, str(position)] for position in range(gamma)]
    ordered = all(later <= earlier for earlier, later in pairwise((drafts, *by_position)))
    if len(models) > 1 or not ordered or sum(by_position) != accepted or not accepted <= drafted <= gamma * drafts:
        problem = f"{after}: since the first page {drafts} rounds drafted {drafted} tokens and accepted {accepted}, by "
        problem += f"position {by_position[:8]}, of {fmt.many(len(models), 'model')}, which contradict each other"
        raise DataUnreadable(problem, "save both pages, of a server of one model, while no request is running")
    if not drafts:
        hint = "save a page, send requests, and save another when they are done"
        raise DataEmpty(f"no draft between {before} and {after}", hint)
    full = drafted == gamma * drafts  # every round drafted gamma tokens
    conditional = [
        later / earlier if earlier and (full or depth == 0) else None
        for depth, (earlier, later) in enumerate(pairwise((drafts, *by_position)))
    ]
    return Counters(
        alphaprof=__version__,
        target=models[0] or None,
        engines=sum(name == DRAFTS for name, _ in rises),
        gamma=gamma,
        drafts=drafts,
        drafted=drafted,
        accepted=accepted,
        accepted_per_drafted=accepted / drafted,
        acceptance_length=1 + accepted / drafts,
        marginal=tuple(count / drafts for count in by_position),
        conditional=tuple(conditional),
        reason=NO_REQUESTS,
    )
