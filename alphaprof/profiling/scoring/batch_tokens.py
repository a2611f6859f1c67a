"""How many tokens a batch may have: `batch_tokens: auto`, by the memory of the device and the models in it."""

from __future__ import annotations

import math

import torch

from alphaprof.config.profile import CPU_TOKENS, ProfileOptions
from alphaprof.profiling.models.private import attention_of
from alphaprof.profiling.scoring.scorer import Scorer

FEWEST, MOST = 256, 65_536  # powers of two; beyond the last no speed was measured
RESERVE = 0.1  # of the memory: logits of some rows, kernels, what the driver takes
SHARE = 0.5  # of what is left, because blocks of other sizes stay reserved and an estimate is one
STATISTICS_BYTES = 65  # per id of a row that is sampled from, most of it to sort all ids for top_p
SHORTEST = 256  # tokens of a text: a batch of shorter ones has more rows that are sampled from at a time


def batch_tokens_of(options: ProfileOptions, scorer: Scorer) -> int:
    """Return the tokens, padding included, that a batch of loaded models may have by the memory of the target's devices, of
    which an actor that shares a GPU has its share. On a CPU, and where attention keeps a score of every pair of tokens, so
    that a long text takes more than many short ones, these are CPU_TOKENS.
    """
    network, sharing = scorer.target.model.network, options.execution.workers != 1
    devices = {weight.device for weight in network.parameters() if weight.device.type == "cuda"}
    if not devices or attention_of(network.config.get_text_config()) == "eager":
        return CPU_TOKENS
    total, held = (sum(bytes_) for bytes_ in zip(*map(memory, devices), strict=True))
    share = min(1.0, options.execution.gpus_per_worker) if sharing else 1.0
    return fitting(share * total, held, bytes_per_token(scorer))


def memory(device: torch.device) -> tuple[int, int]:
    """Return the bytes of memory that a GPU has, and those that what is loaded takes."""
    return torch.cuda.get_device_properties(device).total_memory, torch.cuda.memory_allocated(device)


def fitting(total: float, held: float, each: float) -> int:
    """Return how many tokens of `each` bytes fit beside `held` bytes into SHARE of `total`: a power of two, so that GPUs of
    one kind with a little more or less memory agree, from FEWEST to MOST. CPU_TOKENS may take all of the room.
    """
    room = ((1 - RESERVE) * total - held) / each
    tokens = 2 ** int(math.log2(max(FEWEST, SHARE * room)))
    return CPU_TOKENS if tokens < CPU_TOKENS <= room else min(tokens, MOST)


def bytes_per_token(scorer: Scorer) -> float:
    """Return the bytes that a token of a batch takes at most, while it is written and while it is scored:

    - the keys and values of all layers: the whole batch is in the cache at the end of writing;
    - one layer's activations: eight states (residual, norm, queries, keys, values and results), three rows of its MLP;
    - of draft heads the target's states that they read, once recorded and once side by side, and a state for each depth;
    - its part of a row of statistics over the vocabulary, of which each text has one at a time while it is written;
    - logits of a whole text where a model makes these, and again those of the positions.
    """
    target = scorer.target.model
    config = target.network.config.get_text_config()

    def largest(name: str, default: int) -> int:
        value = getattr(config, name, None)  # some configs have one for each layer
        return int((max(value) if isinstance(value, (list, tuple)) else value) or default)

    hidden, heads = largest("hidden_size", 1), largest("num_attention_heads", 1)
    width = largest("head_dim", hidden // heads)
    keys, values = largest("qk_head_dim", width), largest("v_head_dim", width)  # latent attention is cached unpacked
    cached = largest("num_hidden_layers", 1) * largest("num_key_value_heads", heads) * (keys + values)
    inner = largest("intermediate_size", 4 * hidden)
    inner = max(inner, largest("num_experts_per_tok", 0) * largest("moe_intermediate_size", inner))
    states = sum(2 * len(draft.reads) + draft.depths for draft in scorer.drafts if draft.by_depth)
    whole = sum(not getattr(each, "chunked", True) for each in (scorer.target, *scorer.drafts))
    numbers = cached + 8 * hidden + 3 * inner + states * hidden + 2 * whole * target.vocabulary
    return float(target.dtype.itemsize * numbers + STATISTICS_BYTES * target.vocabulary / SHORTEST)
