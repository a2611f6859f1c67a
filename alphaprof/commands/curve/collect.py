"""Reads the heads of a list with their records, and refuses what cannot stand in one curve."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from alphaprof.config.heads import HeadEntry, HeadsBeside, HeadsOptions
from alphaprof.errors import HeadRecordUnreadable, NotComparable, ProfileInvalid
from alphaprof.log.place import LocalPlace
from alphaprof.log.split import TEST, TIME
from alphaprof.log.store import Run
from alphaprof.log.training import (
    TESTS,
    TRAINING,
    HeadTests,
    TrainingRecord,
    head_digest,
    learnt,
    read_tests,
    read_training,
    split_of,
    texts_digest,
)
from alphaprof.stats.estimate import Array

TESTED = "tested"  # folder beside the list, for tests of heads from elsewhere
# Tests heads on a run: from their folder to the file of their tests, on the parts of the record of another head.
Tester = Callable[[Run, Mapping[Path, Path], TrainingRecord | None], None]


@dataclass(frozen=True, eq=False)
class CurveHead:
    """A head with its tests, rows in the same order as those of every other head. `record`: None for one from elsewhere."""

    folder: Path
    record: TrainingRecord | None
    tests: HeadTests
    units: int  # that it was trained on; 0: beside the curve, and not known
    tokens: int | None
    order: int | None

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.folder.name


@dataclass(frozen=True)
class CurveHeads:
    """The heads of a curve by ascending size, and those beside it by their part in the list."""

    run: Run
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


def collected(options: HeadsOptions, file: Path, run: Run, test: Tester | None) -> CurveHeads:
    """The heads of a list. `test`: tests heads without a record; None: they are refused. Raises `HeadRecordUnreadable`,
    `ProfileInvalid` for a head whose size is not known, and `NotComparable` for heads of other targets or texts.
    """
    entries: list[HeadEntry] = list(options.heads)
    others = {name: each for name in HeadsBeside.model_fields if (each := getattr(options.beside, name)) is not None}
    folders = [Path(each.head) for each in (*entries, *others.values())]
    if odd := next((folder for folder, times in Counter(folders).items() if times > 1), None):
        raise ProfileInvalid(f"{file}: {odd} is listed twice", "list every head once")
    if odd := next((folder for folder in folders if not folder.is_dir()), None):
        hint = "paths start at the list; finish a training with alphaprof train --curve --resume, download a published head"
        raise ProfileInvalid(f"{file}: {odd} is no folder", hint)
    records = {folder: read_training(folder) if (folder / TRAINING).exists() else None for folder in folders}
    for folder, record in records.items():
        _require_of_run(folder, record, run)
    for entry in entries:
        if records[Path(entry.head)] is None and entry.units is None:
            raise ProfileInvalid(
                f"{file}: nothing says how much {entry.head} was trained on", "give units: and tokens: beside it"
            )
    first = next((record for record in records.values() if record is not None), None)
    if options.split == TIME and first is not None and split_of(first) != TIME:
        raise ProfileInvalid(
            f"{file} says split: time, and a head in it was trained on a split at random",
            "list heads of one split: what one of them is tested on, another may have learnt",
        )
    by_time = "-time" if first is None and options.split == TIME else ""
    beside_list = file.absolute().parent / TESTED

    def tests_file(folder: Path, digest: str) -> Path:
        """Where tests of a head from elsewhere lie: never in its own folder, and found again where a list has been moved."""
        return beside_list / f"{folder.name}-{digest[:8]}{by_time}.parquet"

    tests = _all_tests(folders, tests_file, run, first, test)
    heads = [_head(entry, records[Path(entry.head)], tests[Path(entry.head)]) for entry in entries]
    beside = {
        name: _head(HeadEntry(head=each.head), records[Path(each.head)], tests[Path(each.head)])
        for name, each in others.items()
    }
    _require_alike([*heads, *beside.values()])
    by_size: dict[tuple[str, str], list[CurveHead]] = {}
    for head in heads:
        by_size.setdefault(_size_key(head), []).append(head)
    return CurveHeads(
        run, tuple(tuple(by_size[key]) for key in sorted(by_size, key=lambda key: units_of(by_size[key]))), beside
    )


def units_of(heads: Sequence[CurveHead]) -> int:
    """The training units of heads of one size: their mean, since near-copies stay together, and orders differ a little."""
    return round(sum(head.units for head in heads) / len(heads))


def _size_key(head: CurveHead) -> tuple[str, str]:
    """What heads of one size share: the fraction of the texts of one run, or the number of units."""
    return (head.record.run.digest, head.record.size.fraction) if head.record else ("", str(head.units))


def _head(entry: HeadEntry, record: TrainingRecord | None, tests: HeadTests) -> CurveHead:
    keys = [getattr(tests, name).astype(str) for name in ("tokens", "rule", "text", "domain", "unit", "part")]
    tests = tests.rows(np.lexsort(keys))
    if record is None:
        return CurveHead(Path(entry.head), None, tests, entry.units or 0, entry.tokens, entry.order)
    size = record.size
    return CurveHead(Path(entry.head), record, tests, size.units, size.tokens, size.order)


def _require_of_run(folder: Path, record: TrainingRecord | None, run: Run) -> None:
    """Raise for a head that is not trained to its end, or for another target or other texts than the run's."""
    if record is None:
        return
    if record.status != "complete":
        raise HeadRecordUnreadable(f"{folder} is not trained to its end", "finish it: alphaprof train with --resume")
    if record.target.fingerprint != run.manifest.target.fingerprint:
        raise NotComparable(
            f"{folder} was trained for another target ({record.target.model}) than that of {run.path}",
            "give the run that it was trained from: --from RUN",
        )


def _all_tests(
    folders: Sequence[Path],
    tests_file: Callable[[Path, str], Path],
    run: Run,
    record: TrainingRecord | None,
    test: Tester | None,
) -> dict[Path, HeadTests]:
    """The tests of every head: its own, or those in its `tests_file`, of folder and digest, which are made where they
    are missing or of other files.
    """
    of_run = (run.manifest.target.fingerprint, texts_digest(run.manifest))
    digests = {folder: head_digest(folder) for folder in folders if not (folder / TESTS).exists()}
    files = {folder: tests_file(folder, digests[folder]) if folder in digests else folder / TESTS for folder in folders}
    tests = {folder: read_tests(file) for folder, file in files.items() if file.exists()}
    missing = {
        folder: files[folder]
        for folder, digest in digests.items()
        if folder not in tests or (tests[folder].head, tests[folder].target, tests[folder].texts) != (digest, *of_run)
    }
    if missing and test is None:
        hint = "give the profile of the run, and they are tested: --profile PROFILE"
        raise HeadRecordUnreadable(f"{next(iter(missing))} holds no {TESTS}: it was not tested on this run", hint)
    if missing and test is not None:
        for folder in {file.parent for file in missing.values()}:
            LocalPlace(folder).make()
        test(run, missing, record)
        tests |= {folder: read_tests(file) for folder, file in missing.items()}
    for folder, each in tests.items():
        if (each.target, each.texts) != of_run:
            what = "another target" if each.target != of_run[0] else "texts"
            hint = "give the run that it was tested on: --from RUN"
            raise NotComparable(f"{files[folder]} is of {what} that {run.path} does not have", hint)
    return tests


def _require_alike(heads: Sequence[CurveHead]) -> None:
    """Raise `NotComparable` for heads that were tested on other documents, or trained on those that they are tested on."""
    first = heads[0]
    for head in heads:
        same = all(
            np.array_equal(getattr(head.tests, name), getattr(first.tests, name))
            for name in ("part", "unit", "domain", "text", "rule", "tokens")
        )
        if not same:
            raise NotComparable(
                f"{first.name} and {head.name} were tested on other documents",
                "train them with one split, or leave test.parquet out of foreign folders: they are tested again then",
            )
        known = (learnt(head.record) or frozenset(head.record.units.train)) if head.record else frozenset()
        seen = known & set(first.tests.unit[first.tests.part == TEST])
        if seen:
            raise NotComparable(
                f"{head.name} was trained on {len(seen)} of the units that it is tested on", "train it on other units"
            )
    tested = first.tests.part == TEST
    if not first.tests.tokens[tested].sum() or not all(head.tests.starts[tested, 0].sum() for head in heads):
        raise NotComparable(f"{first.name} was tested on no token of the test part", "train with more units")


def _not_nested(sizes: Sequence[Sequence[CurveHead]]) -> Iterator[str]:
    """Yields what is not nested, in words."""
    every = [head for same in sizes for head in same]
    for head in every:
        if head.record is None and head.order is None:
            yield f"the list does not say that larger heads have seen what {head.name} has (order:)"
    for small in every:
        place = next(place for place, same in enumerate(sizes) if small in same)
        larger = [head for same in sizes[place + 1 :] for head in same if head.record is not None]
        if small.record is None or not larger:
            continue
        own = set(small.record.units.train)
        mine = [head for head in larger if head.order == small.order]
        whole = [head for head in larger if head in sizes[-1]]
        for head in mine or whole:
            if head.record is not None and not own <= set(head.record.units.train):
                yield f"{small.name} has seen units that {head.name} has not"
        if whole and not any(head.record is not None and own <= set(head.record.units.train) for head in whole):
            yield f"{small.name} has seen units that no head of the largest size has"


def unit_codes(heads: CurveHeads) -> Array:
    """The number of each row's unit, [rows], the same for all heads."""
    return np.unique(heads.largest.tests.unit.astype(str), return_inverse=True)[1]
