"""How decoding chooses tokens: greedily, or drawn by numbers that depend on seed, document and place alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from alphaprof.profiling.models.processing import PLAIN, Processing, draw, uniforms, weights_of
from alphaprof.rules import GREEDY, SAMPLED

OWN, DRAFTED, KEPT = range(3)  # streams of random numbers: the target's own tokens, the draft's, whether a draft is kept


@dataclass(frozen=True)
class Choice:
    """How the target chooses the tokens of a text: greedily where `processing` is None, else drawn with this seed.

    `draft_processing`: what the draft's logits go through when it draws (see `Processing.for_draft`). `width`: only the
    first so many ids carry probability (see `vocabulary.scored_width`); None: all that the target has.
    """

    processing: Processing | None = None
    seed: int = 0
    draft_processing: str = "same"
    width: int | None = None

    @property
    def policy(self) -> str:
        """The word of `rules` for it."""
        return GREEDY if self.processing is None else SAMPLED


GREEDILY = Choice()


class Chooser:
    """Chooses the tokens of one text of at most `places` tokens.

    Every place of a text has a random number of its own in each stream, so a draft that is drawn again behind a rejection
    is drawn by the same number: nothing was decided by it the first time, because what follows a rejected draft is not
    looked at. The target's own stream is that of `continuations.generate`: plain decoding repeats its texts.
    """

    def __init__(
        self, choice: Choice, prompt: np.ndarray[Any, Any], source_row: int, places: int, device: torch.device
    ) -> None:
        self.processing = choice.processing or PLAIN
        self.draft_processing = self.processing.for_draft(choice.draft_processing)
        self._numbers: torch.Tensor | None = None
        if choice.processing is not None:
            streams = [uniforms(choice.seed, prompt, source_row, places, stream) for stream in (OWN, DRAFTED, KEPT)]
            self._numbers = torch.from_numpy(np.stack(streams)).to(device)

    def numbers(self, stream: int, at: int, count: int) -> torch.Tensor:
        """Random numbers [count] in [0, 1) of the places from `at` on."""
        if self._numbers is None:
            raise ValueError("greedy text has no random numbers")
        return self._numbers[stream, at : at + count]

    def own(self, rows: torch.Tensor, at: int) -> torch.Tensor:
        """The target's own tokens [n] at the places from `at` on, from its logits [n, V] there."""
        if self._numbers is None:
            return rows.argmax(1)  # the first index of the maximum
        return draw(weights_of(rows, self.processing), self.numbers(OWN, at, len(rows)))
