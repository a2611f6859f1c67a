"""The texts of a run in three parts for training a head: train, stop (chooses the step) and test (looked at once).

What is split are independent units: the clusters of the profile, or prompts. Units with nearly the same text are one group,
and a group is never torn, so that no part holds a near-copy of what another part holds. Groups are split at random, or by
time: then everything to train on was asked before the moment at which the parts to stop and to test begin.
"""

from __future__ import annotations

import datetime
import hashlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from alphaprof.errors import DataEmpty, OptionInvalid
from alphaprof.run.reader import Run

PARTS = TRAIN, STOP, TEST = "train", "stop", "test"
SHARES = {STOP: 0.1, TEST: 0.1}  # of the units of each domain, or of all groups; the rest is to train on
SplitBy = Literal["random", "time"]
RANDOM: SplitBy = "random"
TIME: SplitBy = "time"
DIGITS = 16  # hexadecimal ones, of the digest of a unit
SHINGLE = 8  # tokens in a row; one that many units have belongs to a system prompt or a template
COMMON, FEWEST = 0.05, 5  # many: more than this share of all units, and as many at least
OWN = 24  # tokens in a row that belong to no template: what a text has of its own
GRAM = 4  # tokens in a row that two texts are compared by
ALIKE = 0.5  # of what the shorter text has of its own: from here on two texts are near-copies
Ids = np.ndarray[Any, np.dtype[np.int32]]
Hashes = np.ndarray[Any, np.dtype[np.uint64]]
Time = datetime.datetime


@dataclass(frozen=True)
class RunText:
    """A document of a run with its text. `unit`: digest of what it depends on; `group`: its kind of continuation, greedy,
    sampled, given or text; `on_policy`: the target wrote it; `drawn`: temperature, top_k, top_p and min_p of its sampling
    (None: greedy); `time`: when it was asked (None: the run does not say).
    """

    document: int
    domain: str
    unit: str
    group: str
    on_policy: bool
    drawn: tuple[float, int, float, float] | None
    prompt: Ids
    ids: Ids
    time: Time | None = None

    @property
    def tokens(self) -> Ids:
        """Prompt and continuation."""
        return np.concatenate([self.prompt, self.ids])


def texts_of(run: Run) -> list[RunText]:
    """Return the documents of a run, in its order. Raises `NoPositionLog` for an imported run, `RunUnreadable` if a copy of
    it left the texts out, `DataEmpty` if it has none.
    """
    names = ["document", "domain", "cluster", "time", "continuation", "on_policy", "temperature", "top_k", "top_p", "min_p"]
    names += ["prompt_hash", "prompt_ids", "continuation_ids"]
    run.require_positions()
    texts = [_text(row) for shard in run.shards for row in run.continuations(shard.index, names).to_pylist()]
    if not texts:
        hint = "finish it with alphaprof profile --resume, or give a run that has documents"
        raise DataEmpty(f"{run.path} holds no complete document", hint)
    return texts


def _text(row: Mapping[str, Any]) -> RunText:
    prompt, ids = (np.array(row[name], dtype=np.int32) for name in ("prompt_ids", "continuation_ids"))
    drawn = None
    if row["temperature"] is not None:
        drawn = (row["temperature"], row["top_k"], row["top_p"], row["min_p"])
    unit = unit_of(row["cluster"], row["prompt_hash"])
    return RunText(
        row["document"], row["domain"], unit, row["continuation"], row["on_policy"], drawn, prompt, ids, row["time"]
    )


def learnable(texts: Sequence[RunText], depths: int = 3) -> list[RunText]:
    """Return those that the target wrote itself and that are longer than the depths of a round that are trained."""
    return [text for text in texts if text.on_policy and len(text.ids) > depths and len(text.tokens) > depths + 2]


def unit_of(cluster: str | None, prompt_hash: str) -> str:
    """Return the digest of the unit that a document belongs to: of its cluster, or of its prompt's token ids."""
    return (prompt_hash if cluster is None else hashlib.sha256(f"cluster {cluster}".encode()).hexdigest())[:DIGITS]


def of_units(documents: pa.Table, units: Collection[str]) -> pa.Table:
    """Return the rows of a documents table that belong to some independent units."""
    named = map(unit_of, documents["cluster"].to_pylist(), documents["prompt_hash"].to_pylist())
    wanted = set(units)
    return documents.filter(pa.array([unit in wanted for unit in named], pa.bool_()))


@dataclass(frozen=True)
class Split:
    """Which unit is in which part. `units`: digests of the units of each part, ascending; `groups`: the digest of the group
    of each unit; `notes`: what a user should know of it, in words; `begins`: the moment at which stop and test part begin,
    of a split by time.
    """

    units: dict[str, tuple[str, ...]]
    groups: dict[str, str]
    notes: tuple[str, ...] = ()
    begins: dict[str, Time] = field(default_factory=dict)

    def part_of(self, unit: str) -> str:
        """Return the part that a unit is in."""
        return next(part for part, units in self.units.items() if unit in units)

    def of(self, texts: Sequence[RunText], part: str) -> list[RunText]:
        """Return those of some texts that are in a part."""
        units = set(self.units[part])
        return [text for text in texts if text.unit in units]


def split(texts: Sequence[RunText], seed: int = 0, shares: Mapping[str, float] = SHARES, by: SplitBy = RANDOM) -> Split:
    """Return the units of some texts in three parts, the same for the same units and `seed`. Of a domain with three groups
    or more each part has one; a domain with fewer is all for training, which the notes say.

    `by` time: groups in the order of their latest text, the last ones to test, those before them to stop, with one boundary
    for all domains; nothing is drawn. Raises `OptionInvalid` if a text has no time.
    """
    groups = groups_of(texts)
    of = {unit: _digest(members) for unit, members in groups.items()}
    result = _by_time(texts, of, shares) if by == TIME else _at_random(texts, groups, of, seed, shares)
    notes = list(result.notes)
    if (largest := max(Counter(of.values()).values(), default=0)) > max(2, len(of) / 4):
        notes.append(f"{largest} of {len(of)} units are near-copies of each other, so they all go to one part")
    return replace(result, notes=tuple(notes))


def _at_random(
    texts: Sequence[RunText],
    groups: Mapping[str, tuple[str, ...]],
    of: dict[str, str],
    seed: int,
    shares: Mapping[str, float],
) -> Split:
    """Return groups of each domain in the order of their digests with a seed."""
    domains: dict[str, dict[str, list[str]]] = {}
    first = {text.unit: text.domain for text in reversed(texts)}
    for unit in sorted(groups):
        domains.setdefault(first[groups[unit][0]], {}).setdefault(of[unit], []).append(unit)
    units: dict[str, list[str]] = {part: [] for part in PARTS}
    notes = []
    for domain, found in sorted(domains.items()):
        for part, members in _parted(found, seed, shares):
            units[part] += members
        if len(found) < len(PARTS):
            notes.append(
                f"domain {domain} has {len(found)} independent units, too few for three parts: all are used for training"
            )
    return Split({part: tuple(sorted(members)) for part, members in units.items()}, of, tuple(notes))


def _by_time(texts: Sequence[RunText], of: dict[str, str], shares: Mapping[str, float]) -> Split:
    """Return groups in the order of their latest text. Groups of one moment stay together: of a column of dates the order
    within a day is not known. Shares are of groups, so that a large one that reaches into a part is not all of it.
    """
    latest: dict[str, Time] = {}
    for text in texts:
        if text.time is None:
            missing = sum(each.time is None for each in texts)
            raise OptionInvalid(
                f"a split by time needs the time of each text, and {missing} of {len(texts)} have none in this run",
                "set data.time of each source to its time column and profile again, or leave out --split time",
            )
        group = of[text.unit]
        latest[group] = max(text.time, latest.get(group, text.time))
    sizes, begins = Counter(latest.values()), dict[str, Time]()
    left = sorted(sizes)
    if len(left) >= len(PARTS):
        for others, part in ((2, TEST), (1, STOP)):  # parts before it, which need a moment each
            wanted, count = max(1, round(shares[part] * len(latest))), 0
            # As many as come nearest to what is wanted, and one moment at least.
            while len(left) > others and (not count or 2 * count + sizes[left[-1]] < 2 * wanted):
                begins[part] = left.pop()
                count += sizes[begins[part]]
    units: dict[str, list[str]] = {part: [] for part in PARTS}
    for unit, group in sorted(of.items()):
        units[next((part for part in (TEST, STOP) if part in begins and latest[group] >= begins[part]), TRAIN)].append(unit)
    result = Split({part: tuple(members) for part, members in units.items()}, of, begins=begins)
    return replace(result, notes=tuple(_notes_on_time(texts, result)))


def _notes_on_time(texts: Sequence[RunText], result: Split) -> Iterator[str]:
    """Yield where a split by time lies, and what in its parts is not what their names promise."""
    if not result.begins:
        yield "the texts have fewer than three different times, too few for three parts: all are used for training"
        return
    count = {part: len(units) for part, units in result.units.items()}
    stop, test = (_in_words(result.begins[part]) for part in (STOP, TEST))
    yield f"train: {count[TRAIN]} units before {stop}; stop: {count[STOP]} from then on; test: {count[TEST]} from {test} on"
    held = {part: result.of(texts, part) for part in PARTS}
    for part, begins in result.begins.items():
        if early := sum(text.time is not None and text.time < begins for text in held[part]):
            yield f"{early} of {len(held[part])} {part} documents are older, kept here with their group"
    for domain in sorted({text.domain for text in texts}):
        if empty := [part for part in PARTS if all(text.domain != domain for text in held[part])]:
            yield f"domain {domain} has no text for {' or '.join(empty)}"


def _in_words(time: Time) -> str:
    """Return a time for people to read."""
    return f"{time.astimezone(datetime.UTC):%Y-%m-%d %H:%M:%S} UTC"


def _parted(found: Mapping[str, list[str]], seed: int, shares: Mapping[str, float]) -> Iterator[tuple[str, list[str]]]:
    """Yield part and units of each group of a domain. Large groups are to train on: a part that is one of them would say
    little of other texts.
    """
    total = sum(map(len, found.values()))
    left = sorted(found, key=lambda group: _key(f"part {seed}", group))
    if len(found) >= len(PARTS):
        for part, share in shares.items():
            wanted = max(1, round(share * total))
            fitting = [group for group in left if len(found[group]) <= wanted]
            taken, count = list[str](), 0
            for group in fitting or [min(left, key=lambda group: len(found[group]))]:
                if count < wanted and len(left) - len(taken) > 1 + (part != TEST):
                    taken.append(group)
                    count += len(found[group])
            left = [group for group in left if group not in taken]
            yield part, [unit for group in taken for unit in found[group]]
    yield TRAIN, [unit for group in left for unit in found[group]]


def groups_of(texts: Sequence[RunText]) -> dict[str, tuple[str, ...]]:
    """For each unit those that are in one group with it, itself among them, ascending.

    What a text has of its own are `OWN` tokens in a row or more that no `SHINGLE` of a template covers. Two texts are
    near-copies if half of what the one with less of its own has, `GRAM` by `GRAM`, stands in the other one too. Texts
    without any are made of pieces that many have, as many copies of one text are: all of them is compared.
    """
    names = sorted({text.unit for text in texts})
    number = {unit: place for place, unit in enumerate(names)}
    leader = list(range(len(names)))

    def find(place: int) -> int:
        while leader[place] != place:
            leader[place] = place = leader[leader[place]]
        return place

    def join(one: str, other: str) -> None:
        leader[max(find(number[one]), find(number[other]))] = min(find(number[one]), find(number[other]))

    prompts: dict[bytes, str] = {}
    for text in texts:
        join(text.unit, prompts.setdefault(text.prompt.tobytes(), text.unit))
    for one, other in _near_copies(texts):
        join(texts[one].unit, texts[other].unit)
    members: dict[int, list[str]] = {}
    for unit, place in number.items():
        members.setdefault(find(place), []).append(unit)
    return {unit: tuple(members[find(place)]) for unit, place in number.items()}


def _near_copies(texts: Sequence[RunText]) -> Iterator[tuple[int, int]]:
    """Yield pairs of texts that are near-copies of each other, the one that comes later first."""
    shingles = [_hashes(text.tokens, SHINGLE) for text in texts]
    common = _common(shingles, [text.unit for text in texts])
    every = [np.unique(_hashes(text.tokens, GRAM)) for text in texts]
    own = [_own(text.tokens, np.isin(each, common)) for text, each in zip(texts, shingles, strict=True)]
    has_own = np.array([len(each) > 0 for each in own])
    compared = [mine if len(mine) else each for mine, each in zip(own, every, strict=True)]
    sizes = np.array([len(each) for each in compared])
    order = np.lexsort((sizes, ~has_own)).tolist()  # least of its own first; those without any last
    holders: dict[int, list[int]] = {}
    for place in reversed(order):
        lists = [holders[key] for key in compared[place].tolist() if key in holders]
        others, shared = np.unique(np.fromiter((each for found in lists for each in found), np.int64), return_counts=True)
        yield from ((place, int(other)) for other in others[shared >= ALIKE * sizes[place]])
        for key in every[place].tolist():
            holders.setdefault(key, []).append(place)


def _hashes(ids: Ids, size: int) -> Hashes:
    """Return a hash of every `size` tokens in a row; of a shorter text one of all its tokens."""
    padded = np.pad(np.asarray(ids, dtype=np.uint64) + np.uint64(1), (0, max(0, size - len(ids))))
    factors = np.random.default_rng(0).integers(1, 2**63, size, dtype=np.uint64) | np.uint64(1)
    mixed = (np.lib.stride_tricks.sliding_window_view(padded, size) * factors).sum(1, dtype=np.uint64)
    mixed ^= mixed >> np.uint64(29)
    hashed: Hashes = mixed * np.uint64(0x9E3779B97F4A7C15)
    return hashed


def _common(shingles: Sequence[Hashes], units: Sequence[str]) -> Hashes:
    """Return the shingles that more than `COMMON` of the units have."""
    by_unit: dict[str, list[Hashes]] = {}
    for unit, each in zip(units, shingles, strict=True):
        by_unit.setdefault(unit, []).append(each)
    every = np.concatenate([np.unique(np.concatenate(parts)) for parts in by_unit.values()])
    found, counts = np.unique(every, return_counts=True)
    common: Hashes = found[counts >= max(FEWEST, int(COMMON * len(by_unit)) + 1)]
    return common


def _own(ids: Ids, is_common: np.ndarray[Any, np.dtype[np.bool_]]) -> Hashes:
    """Return the hashes of what a text has of its own; `is_common` [shingles]. A text that shares nothing is its own."""
    if not is_common.any():
        return np.unique(_hashes(ids, GRAM))
    covered = np.zeros(len(is_common) + SHINGLE - 1, dtype=np.int8)
    for shift in range(SHINGLE):
        covered[shift : shift + len(is_common)] |= is_common
    edges = np.flatnonzero(np.diff(covered, prepend=1, append=1)).reshape(-1, 2)
    kept = [_hashes(ids[start:end], GRAM) for start, end in edges if end - start >= OWN]
    return np.unique(np.concatenate(kept)) if kept else np.zeros(0, dtype=np.uint64)


def _digest(units: Sequence[str]) -> str:
    return hashlib.sha256(" ".join(units).encode()).hexdigest()[:DIGITS]


def _key(salt: str, group: str) -> str:
    return hashlib.sha256(f"{salt}: {group}".encode()).hexdigest()
