"""Tiny random models with a byte-level tokenizer: small enough to build in memory for every test session."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from alphaprof.profiling.models.kinds import DraftModel
from alphaprof.profiling.models.processing import Processing
from alphaprof.profiling.texts.corpus import Document

SPECIAL = ("<eos>", "<pad>", "<user>", "<model>")
TEMPLATE = "{% for turn in messages %}<{{ turn['role'] }}>{{ turn['content'] }}{% endfor %}<model>"


def tokenizer(shift: int = 0) -> PreTrainedTokenizerFast:
    """One token a byte, then special tokens (EOS has id 256); `shift` rotates the byte tokens: another vocabulary."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    alphabet = alphabet[shift:] + alphabet[:shift]
    vocabulary = {token: index for index, token in enumerate([*alphabet, *SPECIAL])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>")
    fast.add_special_tokens({"additional_special_tokens": ["<user>", "<model>"]})
    fast.chat_template = TEMPLATE
    return fast


def llama(seed: int = 0, vocabulary: int = 260, layers: int = 4, context: int = 512, **changes: Any) -> LlamaForCausalLM:
    """A random float32 Llama with logits spread enough that its greedy text does not end at once."""
    settings = {
        "vocab_size": vocabulary,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": context,
        "eos_token_id": 256,
        "pad_token_id": 257,
        "bos_token_id": None,
        "initializer_range": 0.4,
    }
    torch.manual_seed(seed)
    network = LlamaForCausalLM(LlamaConfig(**settings | changes)).eval()
    network.generation_config = GenerationConfig(eos_token_id=256, pad_token_id=257)
    return network


def noisy(network: LlamaForCausalLM, scale: float, seed: int = 1) -> LlamaForCausalLM:
    """A copy with noise on every parameter: a draft that agrees with the network often but not always."""
    twin = copy.deepcopy(network)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter += scale * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return twin


def ending(network: LlamaForCausalLM, more: float) -> LlamaForCausalLM:
    """The network, now readier to end a text."""
    with torch.no_grad():
        network.lm_head.weight[network.config.eos_token_id] *= more
    return network


@functools.cache
def looping(seed: int) -> DraftModel:
    """A target over few tokens, whose greedy text repeats itself and at times ends by itself (EOS has id 38)."""
    network = ending(llama(seed=seed, vocabulary=40, layers=2, eos_token_id=38, pad_token_id=39), 1.4)
    network.generation_config = GenerationConfig(eos_token_id=38, pad_token_id=39)
    return DraftModel("target", network, "model", "l")


def document(number: int, length: int, limit: int, settings: Processing | None = None, largest: int = 250) -> Document:
    """A random prompt that the target continues: greedily, or as the settings say."""
    ids = np.random.default_rng(100 + number).integers(0, largest, length).astype(np.int32)
    kind = "greedy" if settings is None else "sampled"
    return Document(number, "a", None, 0, number, ids, None, False, limit, kind, True, settings, 3)


def edited(path: Path, **changes: Any) -> None:
    """Change what a file holds in JSON."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def save_models(folder: Path) -> None:
    """Write the models that the `tiny` fixture describes."""
    target = llama()
    draft = noisy(target, 0.05)
    wide = llama(vocabulary=320)
    wide.load_state_dict(_padded(draft.state_dict(), wide.state_dict()))
    short = noisy(target, 0.05)
    short.config.max_position_embeddings = 24
    for name, network, words in (
        ("target", target, tokenizer()),
        ("draft", draft, tokenizer()),
        ("other", llama(seed=3), tokenizer(shift=5)),
        ("wide", wide, tokenizer()),
        ("short", short, tokenizer()),
    ):
        network.save_pretrained(folder / name)
        words.save_pretrained(folder / name)


def _padded(narrow: dict[str, torch.Tensor], wide: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    for name, tensor in narrow.items():
        wide[name][: tensor.shape[0]] = tensor
    return wide
