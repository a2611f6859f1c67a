"""What configs say of quantised weights and caches: bytes by the names of modules."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from alphaprof.costs.layers import MIXTURES

MXFP4 = 0.5 + 1 / 32
# Bytes of a weight, with those of its scales, by what the name of a method or of an algorithm contains: the first counts.
BYTES = {"NVFP4": 0.5 + 1 / 16, "MXFP4": MXFP4, "W4A": 0.52, "FP4": 0.5 + 1 / 16, "FP8": 1.0, "INT8": 1.0, "W8A8": 1.0}
PREFIX = re.compile(r"^(?:(?:model|language_model|backbone|text_model)\.)+")
SPELLINGS = (  # of families, and what they are called here
    (re.compile(r"\bmixer\.([qkvo]_proj)"), r"self_attn.\1"),
    (re.compile(r"\bblock_sparse_moe\b"), "mlp"),
    (re.compile(r"\bffn\b"), "mlp"),
    (re.compile(r"(?<=\.)attn\b"), "self_attn"),
    (re.compile(r"^head$"), "lm_head"),
    (re.compile(r"\bshared_expert\b"), "shared_experts"),
    (re.compile(r"\b(?:gate|down|gate_up)_proj\b"), "up_proj"),
)


@dataclass(frozen=True)
class Quantization:
    """How a model is quantised: `groups` of bytes a parameter with the modules that they hold for (none: all), modules that
    are `left` in 16 bits, and bytes of an element of the KV cache (None: not declared).
    """

    name: str
    groups: tuple[tuple[float, tuple[str, ...]], ...]
    left: tuple[str, ...] = ()
    kv_bytes: float | None = None
    experts: float | None = None  # bytes of a parameter of experts, where they have a dtype of their own

    def bytes_of(self, module: str) -> float:
        """Return the bytes of a parameter of a module: `layers.3.self_attn.q_proj`, `lm_head`, `embed_tokens`."""
        if module == "embed_tokens" or module.endswith("conv1d") or _matches(self._left, module):
            return 2.0  # engines quantise neither embeddings nor convolutions
        if self.experts is not None and module.endswith(MIXTURES) and "shared" not in module:
            return self.experts
        return next((size for size, targets in self._groups if targets is None or _matches(targets, module)), 2.0)

    @cached_property
    def _left(self) -> re.Pattern[str]:
        return _any_of(self.left)

    @cached_property
    def _groups(self) -> list[tuple[float, re.Pattern[str] | None]]:
        return [(size, None if not targets or "Linear" in targets else _any_of(targets)) for size, targets in self.groups]


def quantization_of(config: Mapping[str, Any]) -> Quantization | None:
    """Return how a model is quantised, by `quantization_config` of its config.json; None: it is not. Raises `KeyError` for a
    method whose bytes are not known.
    """
    found = config.get("quantization_config")
    if not found:
        return None
    method, algorithm = (str(found.get(key) or "").lower() for key in ("quant_method", "quant_algo"))
    left = tuple(_modules(found, "ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers"))
    layers = {
        name: _bytes_named(str(each.get("quant_algo"))) for name, each in (found.get("quantized_layers") or {}).items()
    }
    whole = _bytes_named(algorithm) or _bytes_named(method)
    bits = (
        found.get("bits")
        or found.get("w_bit")
        or (4 if found.get("load_in_4bit") else 8 if found.get("load_in_8bit") else 0)
    )
    groups: list[tuple[float, tuple[str, ...]]]
    if layers and all(layers.values()):
        sizes = sorted({size for size in layers.values() if size})
        groups = [(size, tuple(name for name, each in layers.items() if each == size)) for size in sizes]
        if whole:  # of all others, which are left by the algorithm of the layers alone
            groups, left = [*groups, (whole, ())], ()
    elif whole:
        groups = [(whole, ())]
    elif given := found.get("config_groups"):
        groups = [(_size(each["weights"]), tuple(each.get("targets") or ())) for each in given.values() if each["weights"]]
    elif bits:
        groups = [(_size({"num_bits": bits, "group_size": found.get("group_size")}), ())]
        left = left if found.get("lm_head") else (*left, "lm_head")
    else:
        words = f"by {method or 'a method without a name'}, whose bytes are not known: give --weight-bytes"
        raise KeyError(f"its weights are quantized {words}")
    if method == "fp8":
        left = (*left, "lm_head")
    experts = MXFP4 if config.get("expert_dtype") == "fp4" and not layers else None
    name = " ".join(dict.fromkeys(each for each in (method, algorithm) if each)) or "quantized"
    return Quantization(name, tuple(groups), left, _cache_bytes(found), experts)


def _modules(found: Mapping[str, Any], *names: str) -> Iterable[str]:
    return next((value for name in names if (value := found.get(name))), ())


def _size(weights: Mapping[str, Any]) -> float:
    """Return the bytes of a weight with its share of a group's scale: of 8 bits for floats, of 16 for integers."""
    bits, group = weights["num_bits"], weights.get("group_size") or 128  # below 0: a scale for a whole row
    scale = 0.0 if bits >= 8 or group < 0 else (1 if weights.get("type") == "float" else 2) / group
    return float(bits / 8 + scale)


def _cache_bytes(found: Mapping[str, Any]) -> float | None:
    declared = found.get("kv_cache_quant_algo") or found.get("kv_cache_scheme")
    if isinstance(declared, Mapping):
        return _size(declared) if declared.get("num_bits") else None
    return _bytes_named(str(declared)) if declared else None


def _bytes_named(name: str) -> float | None:
    """Return the bytes of a weight that a method or an algorithm names; None: it names none."""
    return next((size for part, size in BYTES.items() if part in name.upper()), None)


def _any_of(patterns: Iterable[str]) -> re.Pattern[str]:
    """Return what finds any of some patterns in a name: regular expressions after `re:`, else names with wildcards."""
    sources = []
    for pattern in patterns:
        if pattern.startswith("re:"):
            sources.append(f"(?:{pattern[3:]})")
            continue
        plain = PREFIX.sub("", pattern)
        for spelling, ours in SPELLINGS:
            plain = spelling.sub(ours, plain)
        sources.append(r"(?:^|\.)" + re.escape(plain).replace(r"\*", ".*") + r"(?:\.|$)")
    return re.compile("|".join(dict.fromkeys(sources)) or r"(?!)")


def _matches(pattern: re.Pattern[str], module: str) -> bool:
    return pattern.search(module) is not None
