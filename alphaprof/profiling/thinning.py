"""Generation of a batch that texts leave when they have ended: on a CPU a step costs with every text that is in it."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from alphaprof.profiling.models import Model
from alphaprof.profiling.processing import Sampler

SHARE = 8  # one in so many texts must have ended: leaving costs a copy of the keys and values of those that stay


class _SomeEnded(StoppingCriteria):  # type: ignore[misc]
    """Stops a batch when enough of its texts have ended behind their prompts of `width` ids."""

    def __init__(self, eos: torch.Tensor, width: int) -> None:
        self.eos = eos
        self.width = width

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> Any:
        """The same for every text [batch]."""
        ended = torch.isin(input_ids[:, self.width :], self.eos).any(1).sum()
        return (ended * SHARE >= len(input_ids)).expand(len(input_ids))


def generate_ids(target: Model, ids: torch.Tensor, mask: torch.Tensor, limit: int, sampler: Sampler | None) -> torch.Tensor:
    """New ids [batch, limit] behind left-padded prompts `ids` with their `mask`, both [batch, width].

    What follows an EOS means nothing. Greedy where there is no sampler. The texts are those of `generate()`.
    """
    width = ids.shape[1]
    new = torch.zeros((len(ids), limit), dtype=torch.long)
    rows = torch.arange(len(ids))
    eos = torch.tensor(target.eos, dtype=torch.long)
    cache = _divisible(target)
    how: dict[str, Any] = {"do_sample": False, "num_beams": 1}  # a sampler leaves one token to choose
    if cache is not None:
        how |= {"past_key_values": cache, "stopping_criteria": StoppingCriteriaList([_SomeEnded(eos, width)])}
    while True:
        output = target.network.generate(
            input_ids=ids,
            attention_mask=mask,
            logits_processor=LogitsProcessorList([sampler] if sampler else []),
            max_new_tokens=width + limit - ids.shape[1],
            **how,
        )
        found = output[:, width:].cpu()
        new[rows, : found.shape[1]] = found
        going = (~torch.isin(found, eos).any(1)).nonzero()[:, 0]
        if cache is None or found.shape[1] == limit or len(going) == 0:
            return new
        cache.batch_select_indices(going)
        rows, ids = rows[going], output[going]
        mask = torch.cat([mask[going], mask.new_ones(len(going), output.shape[1] - mask.shape[1])], dim=1)
        sampler = sampler and sampler.among(going)


def _divisible(target: Model) -> Any:
    """An empty cache that texts can leave; None where the model has none such, and on a GPU, where more texts in a step
    cost next to nothing and a look at what has ended would make it wait.
    """
    if target.device.type != "cpu":
        return None
    cache = DynamicCache(config=target.network.config)
    return cache if cache.layers and all(hasattr(layer, "batch_select_indices") for layer in cache.layers) else None
