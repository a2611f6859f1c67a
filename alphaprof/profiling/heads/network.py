"""What every draft head computes, given texts at every depth at once, or a text that grows.

Tokens are x_0, x_1, ...; the target's state at token i predicts x_(i+1). A round that proposes x_s first begins after the
target has read x_0 .. x_(s-2), so its base is b = s - 2; its k-th draft, of depth k, is x_(b+k+1). Every depth reads the
token x_(b+k), and what fixes a round is that these are the text's own tokens as long as its drafts are accepted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import nn

from alphaprof.costs.roofline import ModelShape
from alphaprof.profiling.models.teacher_forced import FINAL


class HeadCache(Protocol):
    """A head at work on `batch` texts that grow alike."""

    def extend(self, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """Take in verified bases that follow those so far: for base i the token x_(i+1) [batch, n] and the features at token
        i [batch, n, features]. What drafts of the round before left is dropped first. Returns the state [batch, hidden] of
        the last base at depth 1.
        """

    def deepen(self, token: torch.Tensor, state: torch.Tensor, depth: int) -> torch.Tensor:
        """Returns the state [batch, hidden] at `depth`, 2 or more, of the last base, from the token drafted before it
        [batch] and the state at the depth before it. Called for each depth in turn.
        """


class HeadNetwork(nn.Module, ABC):
    """A draft head, whose parameters are its own tensors: none of the target's. `layers`: the target's states that are its
    features, in this order, as `teacher_forced.recorded` names them; `most`: how many depths it has (None: any number);
    `ids` [logits]: the target's ids of its logits, ascending (None: 0, 1, ...); `vocabulary`: how many ids the target has;
    `config`: of its decoder layers, as transformers has it (None: it has none).
    """

    layers: tuple[int, ...] = (FINAL,)
    most: int | None = None
    config: Any = None
    ids: torch.Tensor | None
    vocabulary: int

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its tensors."""
        return next(self.parameters()).dtype

    @abstractmethod
    def states(self, ids: torch.Tensor, features: torch.Tensor, depths: int, first: int) -> Iterator[torch.Tensor]:
        """Yields for depth 1, 2, ... `depths` the states [batch, length - first, hidden] of the bases from `first` on, in
        texts of right-padded `ids` [batch, length] with `features` [batch, length, features]. Where base + depth lies beyond
        the text they mean nothing, and are finite.
        """

    @abstractmethod
    def logits(self, states: torch.Tensor, depth: int) -> torch.Tensor:
        """Logits [n, logits] of states [n, hidden] at a depth."""

    @abstractmethod
    def shape(self) -> ModelShape | None:
        """What decides the bytes and FLOPs of its steps, see `head_shape`; None: they are not known."""

    @abstractmethod
    def cache(self) -> HeadCache:
        """An empty cache."""
