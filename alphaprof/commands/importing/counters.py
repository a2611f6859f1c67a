"""Counters on an engine's /metrics page: what rose between two readings, and its text (rich)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from rich.console import Console

from alphaprof.commands.importing.vllm import MOST_DRAFTED
from alphaprof.errors import ColumnMissing, DataEmpty, DataUnreadable, cut, shown
from alphaprof.render.tables import empty_table, plain
from alphaprof.report import format as fmt
from alphaprof.version import __version__

if TYPE_CHECKING:
    from prometheus_client.samples import Sample

PREFIX = "vllm:spec_decode_num_"
DRAFTS, DRAFTED, ACCEPTED = "drafts", "draft_tokens", "accepted_tokens"
POSITION = "accepted_tokens_per_pos"
COUNTERS = (DRAFTS, DRAFTED, ACCEPTED, POSITION)
MOST_COUNT = 2**53  # counters are floats: whole numbers up to here
Labels = tuple[tuple[str, str], ...]
Key = tuple[str, Labels]  # name and labels of a counter
SAVE = "curl -s SERVER/metrics"
NO_REQUESTS = "no interval: no requests"


@dataclass
class Page:
    """The counters of one page by name and labels, and when they were created, where the page says it."""

    path: Path
    counts: dict[Key, float] = field(default_factory=dict)  # whole numbers
    created: dict[Key, float] = field(default_factory=dict)


def _samples(path: Path) -> list[Sample]:
    """The samples of a page. Raises `DataUnreadable` for a file that is no page."""
    from prometheus_client.parser import text_string_to_metric_families

    try:
        families = list(text_string_to_metric_families(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise DataUnreadable(f"cannot read {cut(str(path))}: {error.strerror}", f"save the page: {SAVE}") from None
    except (ValueError, IndexError) as error:  # the parser has no errors of its own
        problem = f"{path} is not a metrics page: {shown(str(error))}"
        raise DataUnreadable(problem, f"save the page in Prometheus' text format, as UTF-8: {SAVE}") from None
    return [sample for family in families for sample in family.samples]


def _page(path: Path) -> Page:
    """The counters of speculative decoding on a page. Raises `DataUnreadable`, and `ColumnMissing` where there are none."""
    page = Page(path)
    for sample in _samples(path):
        counter = sample.name.removeprefix(PREFIX)
        key = counter.removesuffix("_created").removesuffix("_total"), tuple(sorted(sample.labels.items()))
        if counter == sample.name or key[0] not in COUNTERS:
            continue
        place = page.created if counter.endswith("_created") else page.counts
        if key in place:
            raise DataUnreadable(f"{path}: {_named(key)} stands twice", "give one page of one server")
        if place is page.counts and not (0 <= sample.value <= MOST_COUNT and sample.value == int(sample.value)):
            raise DataUnreadable(f"{path}: {_named(key)} is {sample.value}, no count", "save the page as it is")
        place[key] = sample.value
    if not page.counts:
        raise ColumnMissing(
            f"{path}: there is no {PREFIX}{DRAFTS}_total",
            "save vLLM's page, of a server that was started with --speculative-config: " + SAVE,
        )
    return page


def _rises(before: Page, after: Page) -> dict[Key, int]:
    """How far counters rose between two pages. Raises `DataUnreadable` unless these are of one server that went on."""
    for key in [*before.counts, *after.counts]:
        if (key in before.counts) != (key in after.counts):
            have, lacks = (before, after) if key in before.counts else (after, before)
            problem = f"{have.path} has {_named(key)}, and {lacks.path} does not"
            raise DataUnreadable(problem, "give two pages of one server, which serves one model")
    for key, count in after.counts.items():
        again = key in before.created and key in after.created and before.created[key] != after.created[key]
        if again or count < before.counts[key]:
            how = "began anew" if again else f"fell from {before.counts[key]:.0f} to {count:.0f}"
            raise DataUnreadable(
                f"{_named(key)} {how} between {before.path} and {after.path}",
                "was the server restarted in between, or are the files in the wrong order? save both pages again",
            )
    return {key: int(count - before.counts[key]) for key, count in after.counts.items()}


def _by_engine(rises: Mapping[Key, int], path: Path) -> list[tuple[int, ...]]:
    """Rounds, drafted and accepted tokens, and the latter by position, of each engine: complete, without a contradiction."""
    grouped: dict[Labels, dict[str, int]] = {}
    for (name, labels), rise in rises.items():
        position = dict(labels).get("position") if name == POSITION else None
        rest = labels if position is None else tuple(pair for pair in labels if pair[0] != "position")
        grouped.setdefault(rest, {})[name if position is None else f"{name} {position}"] = rise
    gamma = min(sum(name.startswith(f"{POSITION} ") for name in counts) for counts in grouped.values())
    whole = (DRAFTS, DRAFTED, ACCEPTED, *(f"{POSITION} {position}" for position in range(gamma)))
    engines = []
    for labels, counts in grouped.items():
        if odd := sorted(counts.keys() ^ whole) or (not 1 <= gamma <= MOST_DRAFTED and [POSITION]):
            raise ColumnMissing(
                f"{path}: the counters of {_labelled(labels)} are not complete ({PREFIX}{odd[0][:60]})",
                f"each engine has {', '.join(COUNTERS)}, the last for every position from 0: save the page as it is",
            )
        drafts, drafted, accepted, *by_position = engine = tuple(counts[name] for name in whole)
        ordered = all(later <= earlier for earlier, later in pairwise((drafts, *by_position)))
        if not (ordered and sum(by_position) == accepted <= drafted <= gamma * drafts):
            raise DataUnreadable(
                f"{path}: since the first page {drafts} rounds drafted {drafted} tokens and accepted {accepted}, by "
                f"position {', '.join(map(str, by_position[:8]))}, which contradict each other",
                "save both pages while no request is running",
            )
        engines.append(engine)
    return engines


def _named(key: Key) -> str:
    return f"{PREFIX}{key[0]} of {_labelled(key[1])}"


def _labelled(labels: Labels) -> str:
    """Labels for messages: the first few, cut."""
    return ", ".join(f"{name[:20]} {shown(value)}" for name, value in labels[:3]) or "no labels"


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

    def terminal(self, console: Console) -> None:
        """Prints the acceptance length, what it is not, the other numbers, and acceptance by depth."""
        length = f"acceptance length {fmt.number(self.acceptance_length, 3)} tokens per round with a draft"
        console.print(plain(f"{length}, at gamma {self.gamma}"), style="bold")
        console.print(f"{self.reason}\n", highlight=False)
        of = f", {fmt.many(self.engines, 'engine')}" if self.engines > 1 else ""
        console.print(plain(f"target {self.target or 'unknown'}{of}, gamma {self.gamma}"))
        rate = f"{fmt.count(self.accepted)} of {fmt.count(self.drafted)} drafted tokens accepted"
        for line in (
            f"{fmt.many(self.drafts, 'round')} with a draft, {rate}",
            f"accepted/drafted {fmt.share(self.accepted_per_drafted)}: what engines call acceptance rate; it depends on "
            "gamma, and is not alpha\n",
        ):
            console.print(line, highlight=False)
        table = empty_table("depth", "marginal", "conditional")
        for depth, shares in enumerate(zip(self.marginal, self.conditional, strict=True), 1):
            table.add_row(str(depth), *map(fmt.share, shares))
        console.print(table)
        full = self.drafted == self.gamma * self.drafts
        cause = "no round accepted the draft before" if full else "some rounds drafted fewer tokens"
        short = f"conditional: n/a where {cause}. " if None in self.conditional else ""
        for line in (
            "acceptance length: 1 + accepted / rounds.",
            "Counters are sums over all requests: they do not show how much requests differ, so there is no verdict either.",
            f"marginal: first d drafts all accepted. conditional: draft d accepted, those before it were. {short}".rstrip(),
            "For intervals, domains and a verdict import logged requests: alphaprof import vllm (docs/import.md).",
        ):
            console.print(line, style="dim", highlight=False)


def build_counters(before: Path, after: Path) -> Counters:
    """The answer from two saved pages of one server. Raises `DataUnreadable`, `ColumnMissing` and `DataEmpty`."""
    rises = _rises(_page(before), _page(after))
    models = sorted({dict(labels).get("model_name", "") for _, labels in rises})
    if len(models) > 1:
        problem = f"{after} has counters of {len(models)} models, {shown(models[0])} and {shown(models[1])}"
        raise DataUnreadable(problem, "keep the lines of one model_name in both files")
    engines = _by_engine(rises, after)
    drafts, drafted, accepted, *by_position = map(sum, zip(*engines, strict=True))
    if not drafts:
        hint = "save a page, send requests, and save another when they are done"
        raise DataEmpty(f"no draft between {before} and {after}", hint)
    gamma = len(by_position)
    reached = drafted == gamma * drafts  # every round drafted gamma tokens
    conditional = [
        later / earlier if earlier and (reached or depth == 0) else None
        for depth, (earlier, later) in enumerate(pairwise((drafts, *by_position)))
    ]
    return Counters(
        alphaprof=__version__,
        target=models[0] or None,
        engines=len(engines),
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
