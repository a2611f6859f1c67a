"""The texts of a run in three parts: no unit and no near-copy of one is in two of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaprof.run.split import (
    PARTS,
    STOP,
    TEST,
    TRAIN,
    RunText,
    Split,
    groups_of,
    split,
    texts_of,
    unit_of,
)
from tests.synthetic import Domain, Recipe, write_run

WORDS = 3000


def text(ids: Sequence[int], number: int = 0, domain: str = "a", cluster: str | None = None, prompt: int = 12) -> RunText:
    """A document by the target whose first tokens are its prompt."""
    every = np.array(ids, dtype=np.int32)
    unit = unit_of(cluster, hashlib.sha256(every[:prompt].astype("<i4").tobytes()).hexdigest())
    return RunText(number, domain, unit, True, every[:prompt], every[prompt:])


def words(rng: np.random.Generator, count: int) -> list[int]:
    return rng.integers(0, WORDS, count).tolist()


def changed(rng: np.random.Generator, ids: Sequence[int], places: int) -> list[int]:
    """A copy with other tokens at some places."""
    copy = list(ids)
    for place in rng.choice(len(copy), places, replace=False):
        copy[place] = WORDS + int(rng.integers(0, WORDS))
    return copy


def independent(count: int, seed: int = 0, length: int = 80, domain: str = "a") -> list[RunText]:
    rng = np.random.default_rng(seed)
    return [text(words(rng, length), number, domain) for number in range(count)]


def part_of(result: Split, unit: str) -> str:
    (part,) = (part for part, units in result.units.items() if unit in units)
    return part


def parts_of(result: Split, texts: Sequence[RunText]) -> set[str]:
    return {part_of(result, each.unit) for each in texts}


def test_every_unit_is_in_one_part_and_shares_are_as_asked() -> None:
    texts = independent(200)
    result = split(texts)
    assert {part: len(units) for part, units in result.units.items()} == {TRAIN: 160, STOP: 20, TEST: 20}
    assert sorted(unit for units in result.units.values() for unit in units) == sorted({each.unit for each in texts})
    assert sum(len(result.of(texts, part)) for part in PARTS) == 200
    assert result.notes == ()


def test_the_split_does_not_depend_on_the_order_of_documents() -> None:
    texts = independent(60)
    assert split(texts) == split(texts[::-1])


def test_what_a_head_knows_already_is_not_held_out_and_nor_are_near_copies_of_it() -> None:
    texts, rng = independent(40), np.random.default_rng(5)
    before = split(texts)
    held = [*before.of(texts, STOP), *before.of(texts, TEST)]
    copy = text(changed(rng, held[0].tokens.tolist(), 1), 99)
    result = split([*texts, copy], [held[0].unit, held[1].unit])
    assert parts_of(result, [*held[:2], copy]) == {TRAIN}
    assert all(result.units[part] for part in PARTS)
    again = split(texts, before.units[TRAIN])  # as of a head that was trained on these texts
    assert again.units == before.units
    known = split(texts, [each.unit for each in texts[1:]])
    assert known.units[TEST] == known.units[STOP] == ()
    assert "1 new independent units, too few" in known.notes[0]


def test_documents_of_one_cluster_or_with_one_prompt_are_in_one_part() -> None:
    rng = np.random.default_rng(3)
    texts = independent(40)
    prompt = words(rng, 12)
    sessions = [text(words(rng, 60), cluster="0:session") for _ in range(6)]
    drawn = [text([*prompt, *words(rng, 60)]) for _ in range(6)]
    assert len({each.unit for each in drawn}) == 1
    elsewhere = text([*prompt, *words(rng, 60)], cluster="0:other")
    result = split([*texts, *sessions, *drawn, elsewhere])
    assert len(parts_of(result, sessions)) == 1
    assert len(parts_of(result, [*drawn, elsewhere])) == 1


@pytest.mark.parametrize("copies", [1, 30])
@pytest.mark.parametrize(("length", "places"), [(40, 1), (400, 6)])
def test_near_copies_are_one_group_however_many_there_are(copies: int, length: int, places: int) -> None:
    """30 copies are more than two fifths of all units, so that what they share looks like a template."""
    for seed in range(4):
        rng = np.random.default_rng(seed)
        original = words(rng, length)
        texts = [
            text(original, prompt=length),
            *(text(changed(rng, original, places), prompt=length) for _ in range(copies)),
        ]
        groups = groups_of([*independent(40, seed + 100), *texts])
        assert len({groups[each.unit] for each in texts}) == 1, seed


def test_a_copy_that_was_cut_or_prolonged_is_a_near_copy() -> None:
    rng = np.random.default_rng(0)
    original = words(rng, 80)
    texts = [
        text(original),
        text(words(rng, 5) + original[10:60], prompt=9),
        text([*words(rng, 3), *original, *words(rng, 40)]),
    ]
    groups = groups_of([*independent(60), *texts])
    assert len({groups[each.unit] for each in texts}) == 1


@pytest.mark.parametrize(("template", "own"), [(30, 32), (3000, 100)])
def test_what_all_share_makes_no_near_copies(template: int, own: int) -> None:
    """A system prompt before and a closing line after what users write, however long these are."""
    rng = np.random.default_rng(1)
    before, after = words(rng, template), words(rng, 10)
    texts = [text([*before, *words(rng, own), *after, *words(rng, own)], prompt=template + own + 10) for _ in range(50)]
    groups = groups_of(texts)
    assert {len(members) for members in groups.values()} == {1}


def test_copies_of_what_users_write_are_found_below_a_template() -> None:
    rng = np.random.default_rng(2)
    before = words(rng, 500)
    texts = [text([*before, *words(rng, 60)], prompt=520) for _ in range(50)]
    copy = text(changed(rng, texts[7].tokens.tolist(), 1), prompt=520)
    groups = groups_of([*texts, copy])
    assert groups[copy.unit] == tuple(sorted({copy.unit, texts[7].unit}))
    assert sum(len(members) > 1 for members in groups.values()) == 2


def test_each_part_has_a_unit_of_each_domain_with_three_and_others_are_named() -> None:
    texts = [*independent(3, 1, domain="three"), *independent(2, 2, domain="two"), *independent(50, 3, domain="many")]
    result = split(texts)
    for part in PARTS:
        assert {"three", "many"} <= {each.domain for each in result.of(texts, part)}
    assert {part_of(result, each.unit) for each in texts if each.domain == "two"} == {TRAIN}
    assert result.notes == ("domain two has 2 independent units, too few for three parts: all are used for training",)


def test_a_group_that_is_most_of_a_domain_is_for_training_and_said_so() -> None:
    rng = np.random.default_rng(4)
    original = words(rng, 100)
    texts = [*independent(20), *(text(changed(rng, original, 1), prompt=100) for _ in range(20))]
    result = split(texts)
    assert parts_of(result, texts[20:]) == {TRAIN}
    assert "20 of 40 units are near-copies of each other" in result.notes[0]


@given(
    sizes=st.lists(st.integers(1, 7), min_size=3, max_size=12),
    seed=st.integers(0, 10_000),
    domains=st.integers(1, 3),
)
def test_no_group_is_torn_and_no_unit_lost(sizes: list[int], seed: int, domains: int) -> None:
    rng = np.random.default_rng(seed)
    texts = []
    for number, size in enumerate(sizes):
        original = words(rng, 60)
        texts += [text(changed(rng, original, 1), domain=str(number % domains), prompt=60) for _ in range(size)]
    result = split(texts)
    assert sorted(unit for units in result.units.values() for unit in units) == sorted({each.unit for each in texts})
    place = 0
    for size in sizes:
        assert len(parts_of(result, texts[place : place + size])) == 1
        place += size
    for domain in range(domains):
        if len(sizes[domain::domains]) >= len(PARTS):
            assert {part_of(result, each.unit) for each in texts if each.domain == str(domain)} == set(PARTS)


def test_the_texts_of_a_run_are_those_that_it_holds(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Recipe(domains={"chat": Domain(documents=12)}))
    rows = run.continuations(0).to_pylist()
    texts = texts_of(run)
    assert len(texts) == run.manifest.documents
    for row, found in zip(rows, texts, strict=False):
        assert (found.document, found.domain) == (row["document"], row["domain"])
        assert found.tokens.tolist() == row["prompt_ids"] + row["continuation_ids"]
        assert found.unit == unit_of(row["cluster"], row["prompt_hash"])
        assert found.on_policy == row["on_policy"]
