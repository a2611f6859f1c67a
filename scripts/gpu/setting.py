"""What every part of the GPU check works with: the device and the time that is left, the lines it says, models and texts."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, LlamaConfig

from alphaprof.profiling.heads.draft import HeadDraft
from alphaprof.profiling.heads.eagle import EMBEDDING, Eagle3, Wiring
from alphaprof.profiling.models.kinds import DraftModel
from alphaprof.profiling.models.load import Model
from alphaprof.profiling.models.processing import Processing
from alphaprof.profiling.texts.continuations import Continuation
from alphaprof.profiling.texts.corpus import Document


@dataclass(frozen=True)
class Line:
    """What a part saw, in a sentence and in figures; `ok`: whether it is as it should be, None where nothing is bound."""

    text: str
    figures: dict[str, Any] = field(default_factory=dict)
    ok: bool | None = None


@dataclass(frozen=True)
class Setting:
    """Where parts run: `tiny` shapes or real ones, until `stop` (of the monotonic clock); `folder` for files of their own;
    `model`: a folder with a small real model, where one was given.
    """

    device: torch.device
    tiny: bool
    stop: float
    folder: Path
    model: Path | None = None

    @property
    def on_gpu(self) -> bool:
        """Whether there is a GPU to be checked."""
        return self.device.type == "cuda"

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes that models are served in, the usual one first."""
        return torch.bfloat16, torch.float16

    def left(self) -> float:
        """Seconds until the end of the time."""
        return self.stop - time.monotonic()

    def clean(self) -> None:
        """Give the memory of a part that has ended back to the device."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def shape(self, name: str) -> dict[str, Any]:
        """The config of a shape of `SHAPES`; on tiny settings the same architecture with small numbers."""
        return SHAPES[name] | (TINY if self.tiny else {})

    def network(self, name: str, dtype: torch.dtype, seed: int = 0, spread: float = 4.0, **changes: Any) -> Any:
        """A model of a named shape with random weights, made on the device, for inference.

        `spread`: logits are that many times as far apart as an untrained model's, whose distributions are almost flat; at 4
        the largest probability is often above 0.1. Weights are wider than an untrained model's as well, or greedy texts
        would repeat a token. `changes` to the config: of `vocab_size`, say. No EOS: texts have their full length.
        """
        shape = self.shape(name)
        config = AutoConfig.for_model(**({"initializer_range": 1.5 * shape["hidden_size"] ** -0.5} | shape | changes))
        torch.manual_seed(seed)
        with torch.device(self.device), torch.no_grad():
            network = AutoModelForCausalLM.from_config(config, dtype=dtype)
            head = network.get_output_embeddings()
            head.weight.mul_(spread)  # of a tied embedding as well, whose scale the first norm takes out again
        network.generation_config = GenerationConfig(pad_token_id=0)
        return network.eval().requires_grad_(False)

    def loaded(self, name: str, dtype: torch.dtype, role: str = "target", **how: Any) -> Model:
        """The same as a `Model` of the product, by the name that it has in a run."""
        return DraftModel(role, self.network(name, dtype, **how), "model", name)


def random_head(
    target: Model, layers: tuple[int, ...], logits: int | None = None, depths: int = 8, seed: int = 3, **changes: Any
) -> HeadDraft:
    """An EAGLE-3 head of one layer with random weights on a target, whose embedding it reads: from states after `layers`
    layers, with as many `logits` (None: all ids); `changes` to the config of its layer.
    """
    network = target.network
    config = LlamaConfig(**network.config.to_dict() | {"num_hidden_layers": 1} | changes)
    ids = None if logits is None else torch.linspace(0, target.vocabulary - 1, logits).long()
    embedding = {EMBEDDING: network.get_input_embeddings()}
    torch.manual_seed(seed)
    with torch.device(target.device), torch.no_grad():
        head = Eagle3(config, Wiring(layers), width=network.config.hidden_size, ids=ids, target=embedding)
        for parameter in head.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=1.5 * parameter.shape[1] ** -0.5)
    head = head.to(target.device, target.dtype).eval().requires_grad_(False)
    return HeadDraft("head", head, target, "eagle3", "random", depths)


@torch.no_grad()
def perturb(network: Any, scale: float, seed: int = 1) -> None:
    """Adds noise to every weight matrix in place, `scale` times its standard deviation."""
    for number, weight in enumerate(network.parameters()):
        if weight.dim() > 1:
            generator = torch.Generator(weight.device).manual_seed(seed * 10_007 + number)
            noise = torch.randn(weight.shape, generator=generator, device=weight.device, dtype=weight.dtype)
            weight += scale * noise * weight.std()


def documents(
    count: int, prompts: tuple[int, int], new: int, processing: Processing | None = None, *, ids: int = 250, first: int = 0
) -> list[Document]:
    """Prompts of random ids below `ids`, the longest first, of lengths between two; each to be continued by `new` tokens,
    greedily or sampled. None holds the id 0, which is that of padding: in assisted generation the draft would overlook it.
    """
    kind, seed = ("greedy", None) if processing is None else ("sampled", 0)
    lengths = np.linspace(*reversed(prompts), count).astype(int).tolist()
    return [
        Document(number, "random", None, 0, number, prompt, None, False, new, kind, True, processing, seed)
        for number, length in enumerate(lengths, start=first)
        for prompt in [np.random.default_rng(number).integers(1, ids, length).astype(np.int32)]
    ]


def random_texts(asked: Sequence[Document], ids: int = 250) -> list[Continuation]:
    """The documents with random continuations: what scoring computes does not depend on them."""
    generator = np.random.default_rng(9)
    return [
        Continuation(each, generator.integers(1, ids, each.max_new_tokens or 0).astype(np.int32), "length") for each in asked
    ]


LLAMA = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "max_position_embeddings": 131_072,
    "bos_token_id": None,
    "eos_token_id": None,
}
QWEN3 = LLAMA | {"model_type": "qwen3", "vocab_size": 151_936, "rope_theta": 1e6, "max_position_embeddings": 40_960}
# The shapes of published models, read off their config.json.
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": LLAMA
    | {
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "llama-3.2-1b": LLAMA
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "qwen3-0.6b": QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
}
TINY = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
}
