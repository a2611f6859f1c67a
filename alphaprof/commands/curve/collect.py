"""Reads the heads of a list: their records, and their totals in the runs that tested them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa

from alphaprof.config.heads import HeadBeside, HeadEntry, HeadsBeside, HeadsOptions
from alphaprof.errors import NotComparable, ProfileInvalid
from alphaprof.log.run import Run, RunDraft, side_of
from alphaprof.log.split import STOP, TEST, unit_of
from alphaprof.log.training import TrainingRecord, learnt, read_training
from alphaprof.stats.estimate import Array
from alphaprof.totals.pool import DocumentTotals, decoded_totals

SAME = ("domain", "prompt_hash", "continuation", "continuation_tokens")  # of documents that heads are compared on
ONE_SPLIT = "train and test the heads of one target with one split of one run"
ORDER = ("prompt_hash", "domain", "continuation", "document")


@dataclass(frozen=True, eq=False)
class CurveHead:
    """A head with its totals on the documents of its run, in the order of these. `record`: None if nothing says how it was
    trained.
    """

    draft: str
    record: TrainingRecord | None
    totals: DocumentTotals
    depths: int  # of its rounds, at most
    units: int  # that it was trained on; 0: beside the curve, and not known
    tokens: int | None
    order: int | None


@dataclass(frozen=True)
class CurveHeads:
    """The heads of a curve by ascending size, and those beside it by their part in the list.

    `documents`: those of the run that a head may be tested on; `part`, `rule` [documents]: the part of each one's unit, and
    the rule that its text is decoded by.
    """

    run: Run
    documents: pa.Table
    part: Array
    rule: Array
    sizes: tuple[tuple[CurveHead, ...], ...]
    beside: Mapping[str, CurveHead]

    @property
    def every(self) -> list[CurveHead]:
        """All heads of the curve, the smallest first."""
        return [head for same in self.sizes for head in same]

    @property
    def largest(self) -> CurveHead:
        """The first head of the largest size."""
        return self.sizes[-1][0]

    @property
    def why_not_nested(self) -> str:
        """Why sizes do not lie in each other, so that more than their size tells them apart; empty where they do."""
        return next(_not_nested(self.sizes), "")


def collected(options: HeadsOptions, file: Path, run: Run) -> CurveHeads:
    """The heads of a list, under the decision of its run.

    Raises `RunUnreadable`, `OptionInvalid` for a draft that a run lacks, `HeadRecordUnreadable`, `ProfileInvalid` for a head
    whose size is not known, and `NotComparable` for heads of other targets or texts.
    """
    entries: list[HeadEntry] = list(options.heads)
    others = {name: each for name in HeadsBeside.model_fields if (each := getattr(options.beside, name)) is not None}
    every: list[HeadBeside] = [*entries, *others.values()]
    named = [f"{each.run or options.run}:{each.draft}" for each in every]
    if twice := [name for name, times in Counter(named).items() if times > 1]:
        raise ProfileInvalid(f"{file}: {twice[0]} is listed twice", "list every head once")
    records = [None if each.head is None else read_training(Path(each.head)) for each in every]
    for entry, record in zip(entries, records, strict=False):
        if record is None and entry.units is None:
            hint = "name the folder of its training.json (head:), or give units: and tokens:"
            raise ProfileInvalid(f"{file}: nothing says how much {entry.draft} was trained on", hint)
    known = next((record for record in records if record is not None), None)
    documents, part = _held_out(run, known)
    heads, rules = [], np.empty(0)
    for each, name, record in zip(every, named, records, strict=True):
        side = side_of(name)
        own, _ = _held_out(side.run, known)
        totals, rules = decoded_totals(side.run, side.draft, own, run.manifest.profile.decision.rule)
        heads.append(head := _head(each, side, record, totals))
        same = side.run.manifest.target.fingerprint == run.manifest.target.fingerprint
        if not same or not documents.select(SAME).equals(own.select(SAME)):
            raise NotComparable(f"{name} was tested on other documents than {run.path}", ONE_SPLIT)
        if problem := next(_unlike(head, run, documents, part == TEST), ""):
            raise NotComparable(f"{side.draft} was {problem}", ONE_SPLIT)
    by_size: dict[tuple[str, str], list[CurveHead]] = {}
    for head in heads[: len(entries)]:
        by_size.setdefault(_size_key(head), []).append(head)
    sizes = tuple(tuple(by_size[key]) for key in sorted(by_size, key=lambda key: units_of(by_size[key])))
    return CurveHeads(run, documents, part, rules, sizes, dict(zip(others, heads[len(entries) :], strict=True)))


def _held_out(run: Run, record: TrainingRecord | None) -> tuple[pa.Table, Array]:
    """The documents of the stop and test part of a training, by their prompts, and the part of each; without a record every
    text of the target's own is a test. Raises `NotComparable` where the run holds no test text.
    """
    table = run.documents()
    table = table.filter(table["on_policy"])
    keys = list(zip(*(table[name].to_pylist() for name in ORDER), strict=True))
    table = table.take(pa.array(sorted(range(len(keys)), key=keys.__getitem__), pa.int64()))
    units = [unit_of(*row) for row in zip(*(table[name].to_pylist() for name in ("cluster", "prompt_hash")), strict=True)]
    parts = dict.fromkeys(units, TEST)
    if record is not None:
        parts = dict.fromkeys(record.units.stop, STOP) | dict.fromkeys(record.units.test, TEST)
    found = np.array([parts.get(unit, "") for unit in units], dtype=object)
    if not (found == TEST).any():
        problem = f"{run.path} holds none of the test texts of the heads that have a record"
        raise NotComparable(problem, "name the run that tested them: alphaprof train writes it")
    return table.filter(pa.array(found != "")), found[found != ""]


def units_of(heads: Sequence[CurveHead]) -> int:
    """The training units of heads of one size: their mean, since near-copies stay together, and orders differ a little."""
    return round(sum(head.units for head in heads) / len(heads))


def _size_key(head: CurveHead) -> tuple[str, str]:
    """What heads of one size share: the fraction of the texts of one run, or the number of units."""
    return (head.record.run.digest, head.record.size.fraction) if head.record else ("", str(head.units))


def _head(entry: HeadBeside, side: RunDraft, record: TrainingRecord | None, totals: DocumentTotals) -> CurveHead:
    depths = side.run.manifest.drafts[side.draft].depths or max(side.run.gammas)
    if record is None:
        units, tokens, order = (getattr(entry, name, None) for name in ("units", "tokens", "order"))
        return CurveHead(side.draft, None, totals, depths, units or 0, tokens, order)
    size = record.size
    return CurveHead(side.draft, record, totals, depths, size.units, size.tokens, size.order)


def _unlike(head: CurveHead, run: Run, documents: pa.Table, test: Array) -> Iterator[str]:
    """Yields why a head says nothing on the documents that `test` marks."""
    tested = documents.filter(pa.array(test))
    units = set(map(unit_of, tested["cluster"].to_pylist(), tested["prompt_hash"].to_pylist()))
    if (record := head.record) is not None:
        if record.status != "complete":
            yield "not trained to its end (alphaprof train --resume)"
        if record.target.fingerprint != run.manifest.target.fingerprint:
            yield f"trained for another target ({record.target.model}) than that of {run.path}"
        if seen := (learnt(record) or frozenset(record.units.train)) & units:
            yield f"trained on {len(seen)} of the units that it is tested on"
    if not head.totals["proposals"][test].sum():
        yield "tested on no token of the test part"


def _not_nested(sizes: Sequence[Sequence[CurveHead]]) -> Iterator[str]:
    """Yields what is not nested, in words."""
    for head in chain(*sizes):
        if head.record is None and head.order is None:
            yield f"the list does not say that larger heads have seen what {head.draft} has (order:)"
    for place, same in enumerate(sizes[:-1]):
        larger = list(chain(*sizes[place + 1 :]))
        for small in same:
            mine = [head for head in larger if head.order == small.order] or sizes[-1]
            for head in mine if small.record else ():
                if head.record and small.record and not set(small.record.units.train) <= set(head.record.units.train):
                    yield f"{small.draft} has seen units that {head.draft} has not"
