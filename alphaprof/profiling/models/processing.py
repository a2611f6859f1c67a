"""From logits to the distribution that tokens are drawn from: temperature, then top_k, top_p and min_p, as in transformers.

Whether a token is kept never depends on the order of equal logits: all ties at the cut are kept.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from alphaprof.config.options import Sampling
from alphaprof.errors import ProfileInvalid

NUCLEUS_FIRST = 256  # tokens that usually hold top_p; sorting a whole vocabulary costs twenty times as much
# Settings of a generation config that change the distribution and are not modelled, with the values at which they do not.
NOT_MODELLED: dict[str, tuple[object, ...]] = {
    "repetition_penalty": (1,),
    "encoder_repetition_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "bad_words_ids": ([],),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "sequence_bias": ({}, []),
    "exponential_decay_length_penalty": (),
    "guidance_scale": (1,),
    "typical_p": (1,),
    "top_h": (),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "watermarking_config": (),
}


@dataclass(frozen=True)
class Processing:
    """Settings that turn logits into a distribution: divide by `temperature`, keep the `top_k` largest (0: all), then the
    fewest largest that hold `top_p` of what is left, then those with at least `min_p` of the top probability.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def for_draft(self, draft_processing: str) -> Processing:
        """Return what the draft's logits go through: the same, or temperature alone."""
        return self if draft_processing == "same" else Processing(self.temperature)


PLAIN = Processing()


def resolved(options: Sampling, served: Mapping[str, Any]) -> Processing:
    """Settings of a continuation; what it leaves unset comes from `served` (a model's generation config), or is off. Raises
    `ProfileInvalid` for settings that draw no text.
    """
    values = {name: getattr(options, name) for name in vars(PLAIN)}
    values = {name: served.get(name) if value is None else value for name, value in values.items()}
    settings = Processing(**{name: type(getattr(PLAIN, name))(value) for name, value in values.items() if value is not None})
    if not (settings.temperature > 0 and 0 < settings.top_p <= 1 and 0 <= settings.min_p <= 1):
        shown = f"temperature {settings.temperature:g}, top_p {settings.top_p:g}, min_p {settings.min_p:g}"
        raise ProfileInvalid(
            f"the model's own generation config cannot sample text: {shown}",
            "set them in the profile, or use continuation: {kind: greedy} (temperature 0)",
        )
    return dataclasses.replace(settings, top_k=max(0, settings.top_k))  # -1 is a common way to say off


def not_modelled(served: Mapping[str, Any]) -> list[str]:
    """Return which settings of a generation config would change the distribution and are not modelled."""
    return [f"{name}: {served[name]}" for name, neutral in NOT_MODELLED.items() if served.get(name) not in (None, *neutral)]


def processed(logits: torch.Tensor, settings: Processing) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return logits [n, V] divided by the temperature, in float32, and which of them are kept [n, V]; None: all."""
    scaled = divided(logits, settings.temperature)
    cut = 0 < settings.top_k < scaled.shape[1]
    kept = scaled >= scaled.topk(settings.top_k, dim=1).values[:, -1:] if cut else None
    if settings.top_p < 1.0:
        kept = _nucleus(_weights(scaled, kept), settings.top_p, NUCLEUS_FIRST if scaled.device.type == "cpu" else None)
    if settings.min_p > 0.0:
        likely = _weights(scaled, None) >= settings.min_p
        kept = likely if kept is None else kept & likely
    return scaled, kept


def divided(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return logits divided by the temperature in float32, correctly rounded on every device: where a number divides, a GPU
    multiplies by its inverse, and what stood at a cut would fall off it.
    """
    return logits.float() if temperature == 1.0 else logits.float() / torch.full((), temperature, device=logits.device)


def _weights(scaled: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
    """Return probabilities up to a factor: the largest is 1, what is not kept is 0."""
    weights = (scaled - scaled.amax(1, keepdim=True)).exp()
    return weights if kept is None else weights * kept


def _nucleus(weights: torch.Tensor, top_p: float, first: int | None) -> torch.Tensor:
    """Return which tokens are among the fewest largest that hold `top_p` of the weight, and those equal to the smallest of
    them. Only the `first` largest are sorted, and all where that was not enough; None: all at once, without a GPU's waiting
    for the host. Sums are float64: in float32 they depend on the order of their terms, and flat distributions would be cut
    elsewhere.
    """
    count = weights.shape[1] if first is None else min(first, weights.shape[1])
    largest = weights.topk(count, dim=1).values
    before = largest.cumsum(1, dtype=torch.float64).sub_(largest)
    inside = (before < top_p * weights.sum(1, keepdim=True, dtype=torch.float64)).sum(1)
    last = (inside - 1).clamp(min=0)  # a row with NaN has nothing inside
    kept = (weights >= largest.gather(1, last[:, None])) & (weights > 0)
    if first is not None and count < weights.shape[1] and bool((short := inside == count).any()):
        kept[short] = _nucleus(weights[short], top_p, None)
    return kept


def weights_of(logits: torch.Tensor, settings: Processing) -> torch.Tensor:
    """Processed probabilities [n, V] of logits [n, V], up to a factor a row: the largest is 1, what is not kept is 0."""
    return _weights(*processed(logits, settings))


def draw(weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return one id [n] a row of weights [n, V], drawn by numbers [n] in [0, 1): the first whose running sum exceeds its
    share.
    """
    mass = weights.double().cumsum(1)
    drawn = numbers[:, None].to(mass.device) * mass[:, -1:]
    return torch.searchsorted(mass, drawn, right=True)[:, 0].clamp_(max=weights.shape[1] - 1)


def uniforms(seed: int, prompt: np.ndarray[Any, Any], source_row: int, count: int, stream: int = 0) -> np.ndarray[Any, Any]:
    """Return the random numbers [count] that draw a document's tokens: a function of seed, prompt and row alone.

    So a text depends neither on its batch nor on which other documents a run has, and the first n numbers not on `count`.
    Other streams are for what else is drawn, and independent of each other.
    """
    name = hashlib.sha256(prompt.astype("<i4").tobytes()).digest()
    key = np.array([seed, int.from_bytes(name[:8], "little")], dtype=np.uint64)
    counter = np.array([0, 0, stream, source_row], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter)).random(count)


class Sampler:
    """Chooses the next token of every row of a batch by `uniforms`; a logits processor for greedy generation.

    `numbers` [batch, max_new_tokens]; `prompt` is the padded length of the prompts; only the first `width` ids are drawn
    from, since scoring leaves out the padding rows of embedding matrices as well.
    """

    def __init__(self, settings: Processing, numbers: torch.Tensor, prompt: int, width: int) -> None:
        self.settings, self.numbers = settings, numbers
        self.prompt, self.width = prompt, width

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """`scores` [batch, V] with the drawn token at 0 and all others at minus infinity."""
        weights = weights_of(scores[:, : self.width], self.settings)
        token = draw(weights, self.numbers[:, input_ids.shape[1] - self.prompt])
        return torch.full_like(scores, -torch.inf).scatter_(1, token[:, None], 0.0)
