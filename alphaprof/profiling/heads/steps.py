"""A head's steps over a filled cache, again and again: what `timing.latency` times of it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial

import torch

from alphaprof.profiling.heads.network import HeadCache, HeadNetwork
from alphaprof.profiling.models.load import Model, kept_logits
from alphaprof.profiling.models.teacher_forced import recorded
from alphaprof.profiling.texts.corpus import Ids
from alphaprof.profiling.timing.steppers import Stepper, TimedStep, seconds

CHUNK = 512  # bases that are read at a time while a cache is filled


class HeadStepper:
    """A batch of equal texts in a head's cache, all but their last `longest` bases. `ids` [bases + 1], `features` [bases,
    features]. Each step runs in a copy of the cache, which is made before the clock starts.

    Steps are launched one by one, whatever the target's are. Of a chain of modules a later step is that of a round after one
    of which nothing was accepted.
    """

    def __init__(self, network: HeadNetwork, ids: torch.Tensor, features: torch.Tensor, batch: int, longest: int) -> None:
        self.network, self.batch, self.context = network, batch, len(features) - longest
        self._tokens = ids[1:].expand(batch, -1)
        self._next = features[self.context :].repeat(batch, 1, 1)
        self._filled = network.cache()
        for start in range(0, self.context, CHUNK):
            chunk = slice(start, min(start + CHUNK, self.context))
            self._filled.extend(self._tokens[:, chunk], features[chunk].expand(batch, -1, -1))

    def first(self, tokens: int) -> float:
        """Seconds of the first step of a round over some verified tokens of each text, its choice of a token included."""
        cache = self._copy()
        return seconds(self.network.device, lambda: self._extended(cache, tokens))

    def later(self) -> float:
        """Seconds of the second step of a round, whose first ran over one token."""
        cache = self._copy()
        state, token = self._extended(cache, 1)
        return seconds(self.network.device, lambda: self._chosen(cache.deepen(token, state, 2), 2))

    def _copy(self) -> HeadCache:
        return copy.deepcopy(self._filled, {id(self.network): self.network})

    def _extended(self, cache: HeadCache, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The states and ids that the first step drafts."""
        state = cache.extend(self._tokens[:, self.context : self.context + tokens], self._next[:, :tokens])
        return state, self._chosen(state, 1)

    def _chosen(self, state: torch.Tensor, depth: int) -> torch.Tensor:
        """The target's ids [batch] that states [batch, hidden] draft."""
        index = self.network.logits(state, depth).argmax(1)
        ids = index if self.network.ids is None else self.network.ids[index]
        if ids.device.type == "cpu":
            ids.tolist()
        return ids


def head_steps(
    draft: str, network: HeadNetwork, target: Model, text: Ids, batch: int, longest: int
) -> list[list[TimedStep]]:
    """The steps of a head on a target, in blocks as `Draft.steps` has them: the first of a round over 1 .. `longest` tokens,
    and a later one, for which a head of a single depth has its first over one token again. `text`: as many tokens as the
    context, and `longest` + 1 more.
    """
    ids, features = read(target, network, text)
    steps = HeadStepper(network, ids, features, batch, longest)
    place = (batch, steps.context, Stepper.mode)
    firsts = [
        [TimedStep(draft, "draft_first", tokens, *place, partial(steps.first, tokens))] for tokens in range(1, longest + 1)
    ]
    later = partial(steps.first, 1) if network.most == 1 else steps.later  # costs need a row, which no round of it uses
    return [*firsts, [TimedStep(draft, "draft", 1, *place, later)]]


def head_prefills(draft: str, network: HeadNetwork, target: Model, text: Ids, lengths: Sequence[int]) -> list[TimedStep]:
    """What reading prompts of some lengths takes a head, one text alone, its first token included. `text`: one token more
    than the longest prompt has.
    """
    ids, features = read(target, network, text)
    steppers = {length: HeadStepper(network, ids[: length + 1], features[:length], 1, length) for length in lengths}
    return [
        TimedStep(draft, "prefill", length, 1, 0, Stepper.mode, partial(each.first, length))
        for length, each in steppers.items()
    ]


@torch.inference_mode()
def read(target: Model, network: HeadNetwork, text: Ids) -> tuple[torch.Tensor, torch.Tensor]:
    """A text as ids [bases + 1], and the target's states that a head reads at its bases [bases, features], which are all of
    its tokens but the last; both on the head's device.
    """
    ids = torch.from_numpy(text.astype("int64")).clamp(max=target.vocabulary - 1)
    with recorded(target.network.base_model, network.layers) as states:
        target.network(input_ids=ids[None, :-1].to(target.device), use_cache=False, **kept_logits(target))
    features = torch.cat([states[count][0].to(network.device) for count in network.layers], -1)
    return ids.to(network.device), features
