"""Items by what they have in common, and by what they hold together."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")


def grouped(pairs: Iterable[tuple[Key, Item]]) -> dict[Key, list[Item]]:
    """Return the items of each key, in the order in which keys and items occur."""
    groups: dict[Key, list[Item]] = {}
    for key, item in pairs:
        groups.setdefault(key, []).append(item)
    return groups


def filled(sizes: Iterable[tuple[Item, int]], least: int) -> Iterator[list[Item]]:
    """Yield items in their order, as many together as hold `least` by their sizes; the last ones may hold less."""
    group, size = list[Item](), 0
    for item, own in sizes:
        group.append(item)
        size += own
        if size >= least:
            yield group
            group, size = [], 0
    if group:
        yield group
