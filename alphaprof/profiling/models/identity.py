"""What a loaded model is: which of its weights take part in text, its shape, its settings and its vocabulary."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from alphaprof.costs.layers import EXPERTS, USED, first_of
from alphaprof.costs.shapes import ModelShape
from alphaprof.errors import ModelUnloadable, VocabularyMismatch

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

Value = TypeVar("Value")
# Weights that take no part in a model's text: of parts for images and sound, for predicting several tokens, for training
# and for decoding; and masks and frequencies that older versions saved and newer ones compute.
NOT_THE_TEXT = re.compile(
    r"^([^.]+\.)?[^.]*(mtp|vision|visual|image|audio|speech|talker|projector|v_head|medusa)"
    r"|(^|\.)(attn|attention)\.(bias|masked_bias|causal_mask)$|\.masked_bias$|inv_freq$|(^|\.)position_ids$"
)
# What tells a model that does not attend to the whole text in every layer, by parameters and by settings.
STATE = re.compile(r"A_log|ssm|mamba|conv1d|time_mix|recurrent|kv_a_proj|linear_attn", re.IGNORECASE)
NOT_PLAIN = (
    "sliding_window",
    "window_size",
    "attention_chunk_size",
    "kv_lora_rank",
    "multi_query",
    "num_ln_in_parallel_attn",
)


def decoder_of(network: Any) -> Any:
    """Return what embeds tokens and runs decoder layers and the final norm, whatever holds it beside parts for images."""
    decoder = network.get_decoder()
    return getattr(decoder, "model", decoder)  # Llama 4 answers with what holds it and the LM head


def of_text(network: Any, weights: Iterable[tuple[str, Value]]) -> dict[str, Value]:
    """Return those of some weights, by name, that take part in a network's text: all of its decoder, and others unless
    their names say that they are for images or sound.
    """
    decoder = decoder_of(network)
    inside = next((f"{name}." for name, module in network.named_modules() if name and module is decoder), "")
    return {name: value for name, value in weights if name.startswith(inside) or not NOT_THE_TEXT.search(name)}


def shape_of(network: PreTrainedModel, weight_bytes: float | None = None) -> dict[str, float | bool] | None:
    """Return what decides the bytes and FLOPs of a model's steps; None if that is not known of its architecture.
    `weight_bytes`: of a parameter (default: of the dtype).
    """
    size = float(network.dtype.itemsize)
    weights = weight_bytes or size
    tied = {"tie_word_embeddings": getattr(network.config, "tie_word_embeddings", False)}
    settings = network.config.get_text_config().to_dict() | tied
    try:
        shape: ModelShape | None = ModelShape.from_config(settings, weight_bytes=weights, kv_bytes=size)
    except (LookupError, TypeError):
        with torch.device("meta"):
            plain = type(network)(network.config)
        shape = counted_shape(plain, weights, size)
    return None if shape is None else dataclasses.asdict(shape)


def counted_shape(plain: PreTrainedModel, weight_bytes: float, kv_bytes: float) -> ModelShape | None:
    """Return the shape of a network of any family whose layers all attend to the whole text, by its parameters, experts by
    their names; None where names or settings say that it has a state, a window, a latent cache or an unknown number of
    experts.
    """
    config = plain.config.get_text_config()
    counts = {name: weight.numel() for name, weight in of_text(plain, plain.named_parameters()).items()}
    settings = {name: getattr(config, name, None) for name in (*EXPERTS, *USED, *NOT_PLAIN, "num_key_value_heads")}
    mixed = sum(count for name, count in counts.items() if ".experts." in name)
    experts, used = (first_of(settings, *names) if mixed else 0 for names in (EXPERTS, USED))
    heads = getattr(config, "num_attention_heads", None)
    if not heads or first_of(settings, *NOT_PLAIN) or any(map(STATE.search, counts)) or (mixed and not (experts and used)):
        return None
    head, embedding = plain.get_output_embeddings(), plain.get_input_embeddings()
    return ModelShape(
        parameters=sum(counts.values()),
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=heads,
        kv_heads=settings["num_key_value_heads"] or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocabulary=embedding.weight.shape[0],
        weight_bytes=weight_bytes,
        kv_bytes=kv_bytes,
        experts=experts,
        experts_per_token=used,
        expert_parameters=mixed / experts if mixed else 0.0,
        tied=head is None or head.weight is embedding.weight,
    )


def settings_of(network: PreTrainedModel) -> dict[str, Any]:
    """Return what of a model's configuration tells it from others."""
    volatile = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "quantization_config")
    return {key: value for key, value in network.config.to_diff_dict().items() if key not in volatile}


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 over the vocabulary and the chat template."""
    content = [sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]), tokenizer.chat_template]
    return hashlib.sha256(json.dumps(content, default=str).encode()).hexdigest()


def eos_of(owner: PreTrainedTokenizerBase | GenerationConfig) -> tuple[int, ...]:
    """Return the ids with which a tokenizer or a generation config ends a text. Raises `ModelUnloadable` for others."""
    given: Any = owner.eos_token_id
    eos = given if isinstance(given, list) else [] if given is None else [given]
    if any(type(each) is not int or each >= 2**31 for each in eos):
        raise ModelUnloadable(
            f"eos_token_id is {given!r}, not token ids",
            "write a token id, or a list of them, into generation_config.json, config.json and tokenizer_config.json",
        )
    return tuple(eos)


def check_vocabulary(
    target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, name: str, special_tokens: str = "same"
) -> None:
    """Raise `VocabularyMismatch` unless every id that both tokenizers have stands for the same token string; of special and
    added tokens only where `special_tokens` is same, not any.

    Tokens that only one of them has, and padding rows of an embedding, are no mismatch. Equal vocabularies do not
    imply equal encodings, which is why the target's tokenizer encodes the text for both.
    """
    ours, theirs = ({index: token for token, index in tokenizer.get_vocab().items()} for tokenizer in (target, draft))
    shared = sorted(ours.keys() & theirs.keys())
    odd = [index for index in shared if ours[index] != theirs[index]]
    added = target.added_tokens_decoder.keys() & draft.added_tokens_decoder.keys()
    only_names = bool(odd) and added.issuperset(odd)
    if (odd or not shared) and not (only_names and special_tokens == "any"):
        examples = "; ".join(f"id {index}: {ours[index]!r} / {theirs[index]!r}" for index in odd[:3])
        hint = "choose a draft with the target's tokenizer: speculative decoding compares token ids"
        if only_names:
            hint += "; only special or added tokens differ here: if your engine serves this pair, set special_tokens: any"
        raise VocabularyMismatch(
            f"draft {name} has another vocabulary: {len(odd)} of {len(shared)} ids differ (target / draft {examples})", hint
        )


def token_count(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return one more than the largest id that stands for a token."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def special_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return ids that stand for no text: BOS, EOS, ends of turn, markers of chat templates."""
    added = (index for index, token in tokenizer.added_tokens_decoder.items() if token.special)
    return tuple(sorted({*map(int, tokenizer.all_special_ids), *map(int, added)}))
