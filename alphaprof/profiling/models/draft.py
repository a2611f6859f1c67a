"""What a run asks of a draft, whatever its kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import torch

from alphaprof.profiling.models.load import Model
from alphaprof.profiling.models.teacher_forced import States, TeacherForced
from alphaprof.run.manifest import DraftFacts

Arrays = dict[str, np.ndarray[Any, Any]]


class DraftPass(Protocol):
    """A draft in a teacher-forced pass over texts. `vocabulary`: how wide its distribution is in the target's ids; `depths`:
    how many depths it has logits for, where what is proposed depends on the depth (`by_depth`), else 1; `ids` [logits]: the
    target's id that each of its logits belongs to, ascending (None: the logits are those of ids 0, 1, ...);
    `reduced`: some of the target's ids have no logit; `reads`: the hidden states of the target that it needs, as
    `teacher_forced.recorded` names them.

    `rounds`: called as `rows`, follows what rounds draft by themselves, depth by depth. It yields what `logits` needs [n,
    ...] of the rounds whose first draft is for the token that follows a chosen one, and is sent what they draft there [n].
    None: beyond its first wrong draft a round is not known. `confidence`: of what `logits` needs [n, ...] of a depth, how
    probably the draft says that these drafts are accepted [n]; None: it does not say.
    """

    vocabulary: int
    by_depth: bool
    depths: int
    ids: torch.Tensor | None
    reduced: bool
    reads: tuple[int, ...]
    rounds: Callable[..., States] | None
    confidence: Callable[[torch.Tensor], torch.Tensor] | None

    def rows(
        self, ids: torch.Tensor, row: torch.Tensor, column: torch.Tensor, known: Mapping[int, torch.Tensor], first: int
    ) -> torch.Tensor:
        """Return what `logits` needs [n, ...] for the tokens that follow chosen ones (`row`, ascending, and `column` [n]) of
        right-padded ids [batch, length]; `known`: the hidden states [batch, length, hidden] of `reads`; `first`: the
        smallest column, which the host knows.
        """

    def logits(self, rows: torch.Tensor, depth: int = 1) -> torch.Tensor:
        """Return logits [n, logits] of n rows at a depth, counted from 1: of the token that follows, as that draft of a
        round. What stands where the text has no such round means nothing.
        """


class Draft(Protocol):
    """A loaded draft: everything that a run asks of it. What reports ask of it later stands in its facts."""

    @property
    def name(self) -> str:
        """The name that it has in the run."""

    @property
    def vocabulary(self) -> int:
        """How many ids it may propose, padding included."""

    @property
    def models(self) -> tuple[Model, ...]:
        """The models that it runs by themselves, each with a KV cache, which read prompts and have steps; () for none."""

    def facts(self) -> DraftFacts:
        """Return what the manifest keeps of it."""

    def teacher_forced(self, target: TeacherForced) -> DraftPass | None:
        """Return what gives its logits in a teacher-forced pass beside that of the target; None: it has no distribution."""

    def columns(self, ids: np.ndarray[Any, Any], prompt: int) -> Arrays:
        """Return columns [positions] of what it proposes at every position of a text that begins with `prompt` tokens of
        prompt, that logits do not give: `proposed`; without a distribution `draft_top`, and `accepted_run` if the round's
        start matters.
        """
