"""Acceptance lengths that others publish as references: TensorRT-LLM's tests, InferenceX's curves, and the speculation
profiles that ModelOpt attaches to draft checkpoints. None of them has an interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alphaprof.config.load import read_tree
from alphaprof.errors import ProfileInvalid, shown

KNOWN = "give TensorRT-LLM's acceptance_length.yaml, a curve of InferenceX, or ModelOpt's speculation_profile.json"


@dataclass(frozen=True)
class Golden:
    """One length: 1 + accepted drafts per round, of `domain` (None: of all texts) at `gamma` (None: it is not said)."""

    domain: str | None
    gamma: int | None
    length: float


def golden_lengths(reference: str) -> tuple[Golden, ...]:
    """Return the lengths of FILE, or FILE#ENTRY if it has several models or tests. Raises `ProfileInvalid`."""
    path, _, entry = reference.partition("#")
    tree = read_tree(Path(path), "file of golden lengths", KNOWN)
    if "mean_accept_length" in tree:
        return _checked(_of_profile(tree), path)
    entries = {str(name): value for name, value in tree.items() if name != "_metadata" and isinstance(value, dict)}
    name = entry or (next(iter(entries)) if len(entries) == 1 else "")
    if name not in entries:
        some = ", ".join(map(shown, list(entries)[:3]))
        problem = f"{path} has {len(entries)} entries" + (f", but none is {shown(entry)}" if entry else "")
        raise ProfileInvalid(problem, f"name one, {path}#ENTRY; it has {some}" if entries else KNOWN)
    found = entries[name]
    if "ref_al" in found:
        return _checked(iter([Golden(None, None, found["ref_al"])]), path)
    curves = ((mode, curve) for mode, curve in found.items() if isinstance(curve, dict))
    return _checked((Golden(str(mode), gamma, length) for mode, curve in curves for gamma, length in curve.items()), path)


def _of_profile(tree: Mapping[str, Any]) -> Iterator[Golden]:
    """Yield the lengths of a speculation profile. Its second producer writes no `accept_length_by_k`."""
    gamma = tree.get("num_speculative_tokens")
    by_gamma = tree.get("accept_length_by_k") or {gamma: tree["mean_accept_length"]}
    if tree.get("measured") is False or not isinstance(by_gamma, dict):
        raise ProfileInvalid("this speculation profile was not measured", "give one whose measured is true")
    yield from (Golden(None, int(key) if str(key).isdecimal() else key, length) for key, length in by_gamma.items())
    categories = tree.get("per_category")
    for name, values in categories.items() if isinstance(categories, dict) else ():
        if isinstance(values, dict) and "mean_accept_length" in values:
            yield Golden(str(name), gamma, values["mean_accept_length"])


def _checked(lengths: Iterator[Golden], path: str) -> tuple[Golden, ...]:
    """Return lengths that can be acceptance lengths, at least one. Raises `ProfileInvalid`."""
    found = tuple(lengths)
    for each in found:
        most = math.inf if each.gamma is None else each.gamma + 1 if type(each.gamma) is int else 0
        if type(each.length) not in (int, float) or not 1 <= each.length <= most or each.length == math.inf:
            of = f"at {shown(each.gamma)} speculative tokens" if each.gamma is not None else "of its entry"
            raise ProfileInvalid(f"{path}: {shown(each.length)} {of} is not an acceptance length", KNOWN)
    if not found:
        raise ProfileInvalid(f"{path} has no acceptance length", KNOWN)
    return found
