"""The texts of a run in three parts: no unit and no near-copy of one is in two of them."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alphaprof.errors import OptionInvalid
from alphaprof.run.split import (
    PARTS,
    STOP,
    TEST,
    TIME,
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


def text(
    ids: Sequence[int],
    number: int = 0,
    domain: str = "a",
    cluster: str | None = None,
    prompt: int = 12,
    day: float | None = None,
) -> RunText:
    """A greedy document whose first tokens are its prompt; `day`: after the first of 2026, on which it was asked."""
    every = np.array(ids, dtype=np.int32)
    unit = unit_of(cluster, hashlib.sha256(every[:prompt].astype("<i4").tobytes()).hexdigest())
    return RunText(
        number, domain, unit, "greedy", True, None, every[:prompt], every[prompt:], None if day is None else on(day)
    )


def on(day: float) -> datetime.datetime:
    return datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC) + datetime.timedelta(days=day)


def asked_on(days: Sequence[float], domain: str = "a", seed: int = 0) -> list[RunText]:
    """Independent documents, one a day that is named."""
    rng = np.random.default_rng(seed)
    return [text(words(rng, 60), number, domain, day=day) for number, day in enumerate(days)]


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


def parts_of(result: Split, texts: Sequence[RunText]) -> set[str]:
    return {result.part_of(each.unit) for each in texts}


def test_every_unit_is_in_one_part_and_shares_are_as_asked() -> None:
    texts = independent(200)
    result = split(texts)
    assert {part: len(units) for part, units in result.units.items()} == {TRAIN: 160, STOP: 20, TEST: 20}
    assert sorted(unit for units in result.units.values() for unit in units) == sorted({each.unit for each in texts})
    assert sum(len(result.of(texts, part)) for part in PARTS) == 200
    assert result.notes == ()


def test_the_split_depends_on_the_seed_and_not_on_the_order_of_documents() -> None:
    texts = independent(60)
    assert split(texts) == split(texts[::-1])
    assert split(texts).units != split(texts, seed=1).units


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
    assert {result.part_of(each.unit) for each in texts if each.domain == "two"} == {TRAIN}
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
@settings(max_examples=40)
def test_no_group_is_torn_and_no_unit_lost(sizes: list[int], seed: int, domains: int) -> None:
    rng = np.random.default_rng(seed)
    texts = []
    for number, size in enumerate(sizes):
        original = words(rng, 60)
        texts += [text(changed(rng, original, 1), domain=str(number % domains), prompt=60) for _ in range(size)]
    result = split(texts, seed)
    assert sorted(unit for units in result.units.values() for unit in units) == sorted({each.unit for each in texts})
    place = 0
    for size in sizes:
        assert len(parts_of(result, texts[place : place + size])) == 1
        place += size
    for domain in range(domains):
        if len(sizes[domain::domains]) >= len(PARTS):
            assert {result.part_of(each.unit) for each in texts if each.domain == str(domain)} == set(PARTS)


def ordered(result: Split, texts: Sequence[RunText]) -> bool:
    """Whether nothing to train on is as late as stop or test part, and nothing to stop as late as the test part."""
    times = {part: [each.time for each in result.of(texts, part) if each.time] for part in PARTS}
    begins = result.begins
    train, stop = max(times[TRAIN]), max(times[STOP])
    return train < begins[STOP] <= max(times[STOP]) and stop < begins[TEST] <= max(times[TEST])


def test_by_time_the_last_groups_are_to_test_and_those_before_them_to_stop() -> None:
    days = np.random.default_rng(0).permutation(200).tolist()
    texts = asked_on(days)
    result = split(texts, by=TIME)
    found = {part: sorted((each.time - on(0)).days for each in result.of(texts, part) if each.time) for part in PARTS}
    assert found == {TRAIN: list(range(160)), STOP: list(range(160, 180)), TEST: list(range(180, 200))}
    assert result.begins == {STOP: on(160), TEST: on(180)}
    assert split(texts[::-1], by=TIME) == result
    assert split(texts, seed=1, by=TIME) == result


@given(
    days=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 4), st.integers(0, 2)), min_size=3, max_size=14),
    spread=st.integers(0, 8),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=40)
def test_nothing_to_train_on_is_as_late_as_what_is_held_out(
    days: list[tuple[int, int, int]], spread: int, seed: int
) -> None:
    """Groups of near-copies that lie on several days, ties, several domains."""
    rng = np.random.default_rng(seed)
    texts = []
    for day, copies, domain in days:
        original = words(rng, 60)
        texts += [
            text(changed(rng, original, 1), domain=str(domain), prompt=60, day=day - int(rng.integers(0, spread + 1)))
            for _ in range(copies)
        ]
    result = split(texts, by=TIME)
    assert sorted(unit for units in result.units.values() for unit in units) == sorted({each.unit for each in texts})
    groups = groups_of(texts)
    latest = {groups[each.unit] for each in texts}
    assert all(len({result.part_of(unit) for unit in group}) == 1 for group in latest)
    moments = {max(each.time for each in texts if each.unit in group and each.time) for group in latest}
    if len(moments) < len(PARTS):
        assert result.units[TRAIN] == tuple(sorted(groups))
        assert "fewer than three different times" in result.notes[0]
        return
    assert all(result.units[part] for part in PARTS)
    assert ordered(result, texts)
    for part in (STOP, TEST):  # one that is planted among those to train on is seen
        moved = {**result.units, TRAIN: (*result.units[TRAIN], *result.units[part])}
        assert not ordered(dataclasses.replace(result, units=moved), texts)


@pytest.mark.parametrize(
    ("days", "expected"),
    [
        ([1] * 10 + [2] * 10 + [3] * 10, (10, 10, 10)),  # dates alone: a day is not divided, since nothing orders it
        ([1] * 8 + [2] + [3], (8, 1, 1)),
        ([1] * 40 + [2] + [3], (40, 1, 1)),  # less than a tenth, so that the part before it has a moment too
        ([1, 2] + [3] * 40, (1, 1, 40)),
        ([1] * 40 + [2] * 3 + [3] * 3 + [4] * 3, (40, 3, 6)),  # of 49 six are nearer to 5 than three
        ([1] * 5 + [2] * 5 + [3] * 60 + [4] * 3, (10, 60, 3)),  # of 73 three are nearer to 7 than 63
        ([1] * 40 + [2] * 18 + [3] * 4 + [4] * 2, (40, 18, 6)),  # and what is left is never nothing
    ],
    ids=str,
)
def test_texts_of_one_moment_are_in_one_part(days: list[float], expected: tuple[int, int, int]) -> None:
    texts = asked_on(days)
    result = split(texts, by=TIME)
    assert tuple(len(result.units[part]) for part in PARTS) == expected
    assert ordered(result, texts)
    for day in set(days):
        assert len(parts_of(result, [each for each in texts if each.time == on(day)])) == 1


def test_a_prompt_that_comes_again_is_held_out_with_its_later_text() -> None:
    rng = np.random.default_rng(7)
    prompt = words(rng, 12)
    twice = [text([*prompt, *words(rng, 60)], day=day) for day in (1.5, 39.5)]
    session = [text(words(rng, 60), cluster="0:session", day=day) for day in (2.5, 35.5)]
    texts = [*asked_on(range(40)), *twice, *session]
    result = split(texts, by=TIME)
    assert (parts_of(result, twice), parts_of(result, session)) == ({TEST}, {STOP})
    assert ordered(result, texts)
    assert sum(re.match(r"1 of 5 (stop|test) documents are older", note) is not None for note in result.notes) == 2


def test_a_large_group_that_reaches_into_a_part_does_not_fill_it_and_is_named() -> None:
    """20 copies of one text, the last of them on the last day: the part has a tenth of the groups beside it."""
    rng = np.random.default_rng(4)
    original = words(rng, 100)
    copies = [text(changed(rng, original, 1), prompt=100, day=2 * number + 1.5) for number in range(20)]
    texts = [*asked_on(range(39)), *copies]
    result = split(texts, by=TIME)
    assert parts_of(result, copies) == {TEST}
    assert {part: len(units) for part, units in result.units.items()} == {TRAIN: 32, STOP: 4, TEST: 23}
    assert result.notes[-1].startswith("20 of 59 units are near-copies of each other")


def test_one_boundary_holds_for_all_domains_and_a_domain_without_a_part_is_named() -> None:
    """What is asked of one domain tells of what is asked of another one in those days."""
    texts = [*asked_on(range(40), "old"), *asked_on(range(20, 100), "new", 1)]
    result = split(texts, by=TIME)
    assert ordered(result, texts)
    assert {each.domain for each in result.of(texts, TEST)} == {"new"}
    assert result.notes[1:] == ("domain old has no text for stop or test",)


def test_a_text_without_a_time_is_refused_with_what_to_name() -> None:
    texts = [*asked_on(range(10)), *independent(3, 1)]
    with pytest.raises(OptionInvalid, match="3 of 13 have none") as caught:
        split(texts, by=TIME)
    assert "data.time" in caught.value.hint


def test_the_texts_of_a_run_are_those_that_it_holds(tmp_path: Path) -> None:
    days = [on(2), on(1), on(0)] * 4
    run = write_run(tmp_path / "run", Recipe(domains={"chat": Domain(documents=12, times=days)}))
    assert [each.time for each in texts_of(run)] == days
    rows = run.continuations(0).to_pylist()
    texts = texts_of(run)
    assert len(texts) == run.manifest.documents
    for row, found in zip(rows, texts, strict=False):
        assert (found.document, found.domain, found.group) == (row["document"], row["domain"], row["continuation"])
        assert found.tokens.tolist() == row["prompt_ids"] + row["continuation_ids"]
        assert found.unit == unit_of(row["cluster"], row["prompt_hash"])
        assert found.on_policy == row["on_policy"]
        assert found.time == row["time"]
        assert (found.drawn is None) == (row["temperature"] is None)
