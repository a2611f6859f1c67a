"""The ids that a head can propose: those that its training texts hold most often."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from alphaprof.errors import OptionInvalid
from alphaprof.log.split import RunText

MOST = 32_000  # ids, where a share is asked for or nothing: what published heads have
Vocabulary = np.ndarray[Any, np.dtype[np.int64]]


def chosen_vocabulary(texts: Sequence[RunText], wanted: float | None, always: Collection[int], size: int) -> Vocabulary:
    """Ids of a target with `size` logits, ascending: the most frequent ones of the continuations of training texts, those of
    `always` (EOS and other special tokens) among them. `wanted`: how many ids (1 and above), or which share of the tokens
    they cover (below 1); None: all that occur. Of ids that occur equally often those come first that prompts have more of.

    Raises `OptionInvalid` where `always` alone are more than are wanted.
    """
    counts = np.bincount(np.concatenate([text.ids for text in texts]), minlength=size)[:size]
    prompts = np.bincount(np.concatenate([text.prompt for text in texts]), minlength=size)[:size]
    kept = np.array(sorted({token for token in always if token < size}), dtype=np.int64)
    order = np.lexsort((np.arange(size), -prompts, -counts))
    order = order[(counts[order] > 0) & ~np.isin(order, kept)]
    most = MOST
    if wanted is not None and wanted < 1:
        covered = (counts[kept].sum() + np.cumsum(counts[order])) / counts.sum()
        most = min(most, len(kept) + int(np.searchsorted(covered, wanted - 1e-12)) + 1)
    elif wanted is not None:
        most = int(wanted)
        fillers = np.lexsort((np.arange(size), -prompts))  # ids that occur in prompts, then the first ones
        order = np.concatenate([order, fillers[~np.isin(fillers, order) & ~np.isin(fillers, kept)]])
    if len(kept) >= most:
        problem = f"a draft vocabulary of {most} ids has no room beside the {len(kept)} special tokens"
        raise OptionInvalid(problem, "raise --draft-vocab")
    return np.sort(np.concatenate([kept, order[: most - len(kept)]]).astype(np.int64))


def outside(ids: Vocabulary | None, text: RunText) -> int:
    """How many tokens of those that rounds emit, all of a continuation but its first, are not among some ids (None: all)."""
    return 0 if ids is None else int((~np.isin(text.ids[1:], ids)).sum())


def vocabulary_digest(ids: Vocabulary) -> str:
    """SHA-256 over ids."""
    return hashlib.sha256(np.asarray(ids, dtype="<i8").tobytes()).hexdigest()
