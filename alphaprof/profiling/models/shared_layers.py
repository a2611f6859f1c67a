"""Layers that a draft has in common with its target, from the first on: teacher-forced, what they compute is the same.

A draft that skips layers goes on from the hidden states that the target has before the first layer that is left out.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn


def shared_layers(target: Any, draft: Any) -> int:
    """How many layers, from the first on, have the same parameters in two decoders; 0 where that cannot be told."""
    if draft is target or not all(isinstance(getattr(base, "layers", None), nn.ModuleList) for base in (target, draft)):
        return 0
    embeddings = [base.get_input_embeddings().weight for base in (target, draft)]
    count = 0
    if embeddings[0] is embeddings[1]:
        for ours, theirs in zip(target.layers, draft.layers, strict=False):
            if not _same(list(ours.parameters()), list(theirs.parameters())):
                break
            count += 1
    return count


def _same(ours: Sequence[nn.Parameter], theirs: Sequence[nn.Parameter]) -> bool:
    return len(ours) == len(theirs) and all(one is other for one, other in zip(ours, theirs, strict=True))


@contextlib.contextmanager
def recorded(base: Any, depths: Sequence[int]) -> Iterator[dict[int, torch.Tensor]]:
    """The hidden states [batch, length, hidden] behind so many layers of a decoder, once it has run in this context."""
    states: dict[int, torch.Tensor] = {}

    def keep(depth: int) -> Any:
        def hook(_module: Any, _given: Any, output: Any) -> None:
            states[depth] = output[0] if isinstance(output, tuple) else output

        return hook

    handles = [base.layers[depth - 1].register_forward_hook(keep(depth)) for depth in set(depths)]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()


class _Known(nn.Module):
    """A layer that returns states that are known already, or what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.states: torch.Tensor | None = None

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """The known states [batch, length, hidden]."""
        return hidden_states if self.states is None else self.states


class Rest:
    """A decoder without its first `count` layers; the decoder itself is untouched."""

    def __init__(self, base: Any, count: int) -> None:
        self.count = count
        self._known = _Known()
        # As many layers as before: what is told of each by its place, such as the kind of its attention, still fits.
        gone = [self._known, *(_Known() for _ in range(count - 1))]
        self._base = copy.copy(base)
        self._base.__dict__ = dict(base.__dict__)
        self._base._modules = dict(base._modules) | {"layers": nn.ModuleList([*gone, *base.layers[count:]])}

    def __call__(self, ids: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Last hidden states of ids [batch, length] whose states behind the first layers are known."""
        self._known.states = states
        try:
            found: torch.Tensor = self._base(input_ids=ids, use_cache=False).last_hidden_state
        finally:
            self._known.states = None
        return found
