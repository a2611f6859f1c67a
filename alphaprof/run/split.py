"""The texts of a run in three parts for training a head: train, stop (chooses the step) and test (looked at once).

What is split are independent units: the clusters of the profile, or prompts. Units with nearly the same text are one group,
and a group is never torn, so that no part holds a near-copy of what another part holds.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from alphaprof.errors import DataEmpty
from alphaprof.run.reader import Run
from alphaprof.stats.grouping import grouped

PARTS = TRAIN, STOP, TEST = "train", "stop", "test"
SHARES = {STOP: 0.1, TEST: 0.1}  # of the units of each domain; the rest is to train on
DIGITS = 16  # hexadecimal ones, of the digest of a unit
SHINGLE = 8  # tokens in a row; one that many units have belongs to a system prompt or a template
COMMON, FEWEST = 0.05, 5  # many: more than this share of all units, and as many at least
OWN = 24  # tokens in a row that belong to no template: what a text has of its own
GRAM = 4  # tokens in a row that two texts are compared by
ALIKE = 0.5  # of what the shorter text has of its own: from here on two texts are near-copies
Ids = np.ndarray[Any, np.dtype[np.int32]]
Hashes = np.ndarray[Any, np.dtype[np.uint64]]


@dataclass(frozen=True)
class RunText:
    """A document of a run with its text. `unit`: digest of what it depends on; `on_policy`: the target wrote it."""

    document: int
    domain: str
    unit: str
    on_policy: bool
    prompt: Ids
    ids: Ids

    @property
    def tokens(self) -> Ids:
        """Prompt and continuation."""
        return np.concatenate([self.prompt, self.ids])


def texts_of(run: Run) -> list[RunText]:
    """Return the documents of a run, in its order. Raises `NoPositionLog` for an imported run, `RunUnreadable` if a copy of
    it left the texts out, `DataEmpty` if it has none.
    """
    names = ["document", "domain", "cluster", "on_policy", "prompt_hash", "prompt_ids", "continuation_ids"]
    run.require_positions()
    texts = []
    for shard in run.shards:
        for row in run.continuations(shard.index, names).to_pylist():
            prompt, ids = (np.array(row[name], dtype=np.int32) for name in ("prompt_ids", "continuation_ids"))
            unit = unit_of(row["cluster"], row["prompt_hash"])
            texts.append(RunText(row["document"], row["domain"], unit, row["on_policy"], prompt, ids))
    if not texts:
        raise DataEmpty(
            f"{run.path} holds no complete document",
            "finish it with alphaprof profile --resume, or give a run that has documents",
        )
    return texts


def learnable(texts: Sequence[RunText], depths: int = 3) -> list[RunText]:
    """Return those that the target wrote itself and that are longer than the depths of a round that are trained."""
    return [text for text in texts if text.on_policy and len(text.ids) > depths and len(text.tokens) > depths + 2]


def unit_of(cluster: str | None, prompt_hash: str) -> str:
    """Return the digest of the unit that a document belongs to: of its cluster, or of its prompt's token ids."""
    return (prompt_hash if cluster is None else hashlib.sha256(f"cluster {cluster}".encode()).hexdigest())[:DIGITS]


@dataclass(frozen=True)
class Split:
    """Which units are in which part: their digests, ascending. `notes`: what a user should know of it, in words."""

    units: dict[str, tuple[str, ...]]
    notes: tuple[str, ...] = ()

    def of(self, texts: Sequence[RunText], part: str) -> list[RunText]:
        """Return those of some texts that are in a part."""
        units = set(self.units[part])
        return [text for text in texts if text.unit in units]


def split(texts: Sequence[RunText], learned: Collection[str] = ()) -> Split:
    """Return the units of some texts in three parts, the same for the same units. Of a domain with three groups or more each
    part has one; a domain with fewer is all for training, which the notes say. `learned`: units that a head knows already;
    these and their near-copies are for training.
    """
    groups, known = groups_of(texts), set(learned)
    first = {text.unit: text.domain for text in reversed(texts)}
    domains = grouped((first[members[0]], members) for members in dict.fromkeys(groups.values()))
    units: dict[str, list[str]] = {part: [] for part in PARTS}
    notes = []
    for domain, found in sorted(domains.items()):
        left = sorted((group for group in found if known.isdisjoint(group)), key=_key)
        has_more = len(left) < len(found)  # to train on
        if len(left) + has_more < len(PARTS):
            what = f"{len(left)} {'new ' if has_more else ''}independent units"
            notes.append(f"domain {domain} has {what}, too few for three parts: all are used for training")
        else:
            for part, share in SHARES.items():
                wanted, count, taken = max(1, round(share * sum(map(len, found)))), 0, list[tuple[str, ...]]()
                # Large groups are to train on: a part that is one of them would say little of other texts.
                for group in [group for group in left if len(group) <= wanted] or [min(left, key=len)]:
                    if count < wanted and len(left) - len(taken) > (not has_more) + (part != TEST):
                        taken.append(group)
                        count += len(group)
                left = [group for group in left if group not in taken]
                units[part] += itertools.chain(*taken)
        units[TRAIN] += itertools.chain(*left, *(group for group in found if not known.isdisjoint(group)))
    if (largest := max(map(len, groups.values()), default=0)) > max(2, len(groups) / 4):
        notes.append(f"{largest} of {len(groups)} units are near-copies of each other, so they all go to one part")
    return Split({part: tuple(sorted(members)) for part, members in units.items()}, tuple(notes))


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
    members = grouped((find(place), unit) for unit, place in number.items())
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
    by_unit = grouped(zip(units, shingles, strict=True))
    every = np.concatenate([np.unique(np.concatenate(parts)) for parts in by_unit.values()])
    found, counts = np.unique(every, return_counts=True)
    return found[counts >= max(FEWEST, int(COMMON * len(by_unit)) + 1)]


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


def _key(group: Sequence[str]) -> str:
    """Return what groups are ordered by: as good as at random, and the same for the same units."""
    digest = hashlib.sha256(" ".join(group).encode()).hexdigest()[:DIGITS]
    return hashlib.sha256(f"part 0: {digest}".encode()).hexdigest()
