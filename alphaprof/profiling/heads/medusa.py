"""Medusa heads: residual blocks and an LM head for each depth, all on the target's state after its final norm.

Head k at base i predicts x_(i+k+1) from the state at token i alone, so that nothing that is drafted enters the next draft.
Source: arXiv:2401.10774, section 2.1.1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from alphaprof.config.options import MedusaDraft
from alphaprof.costs.roofline import ModelShape
from alphaprof.profiling.heads.draft import HeadDraft
from alphaprof.profiling.heads.files import COMPLETE, HeadFiles, files_of
from alphaprof.profiling.heads.network import HeadNetwork
from alphaprof.profiling.models.dtype import DTYPES
from alphaprof.profiling.models.load import Model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from alphaprof.config.profile import ProfileOptions

MAP = "token_map"  # of a reduced vocabulary
PREFIX = re.compile(r"^medusa_heads?\.")
# What tensors are called here, of FasterDecoding's names (its layer after the blocks is the LM head) and of vLLM's.
RENAMED = {
    r"^(\d+)\.(\d+)\.linear\.": r"blocks.\1.\2.",
    r"^(\d+)\.\d+\.weight$": r"lm_heads.\1.weight",
    r"^blocks\.(\d+)\.layers\.": r"blocks.\1.",
    r"^lm_head\.weight$": "lm_heads.0.weight",
}


class MedusaHeads(HeadNetwork):
    """Heads with `blocks` residual blocks each. `ids`: see `HeadNetwork`; `shared`: all have one LM head; `scale`: what its
    logits are multiplied by.
    """

    def __init__(
        self,
        heads: int,
        blocks: int,
        hidden: int,
        vocabulary: int,
        ids: torch.Tensor | None = None,
        bias: bool = True,
        shared: bool = False,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.most = heads
        self.vocabulary, self.scale = vocabulary, scale
        self.register_buffer("ids", ids)
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Linear(hidden, hidden, bias=bias) for _ in range(blocks)) for _ in range(heads)
        )
        rows = vocabulary if ids is None else len(ids)
        self.lm_heads = nn.ModuleList(nn.Linear(hidden, rows, bias=False) for _ in range(1 if shared else heads))

    def at(self, depth: int, features: torch.Tensor) -> torch.Tensor:
        """Return the state [..., hidden] at a depth of features [..., hidden]: x + SiLU(W x + b) for each block."""
        state = features
        block: Any = self.blocks[depth - 1]
        for linear in block:
            state = state + functional.silu(linear(state))
        return state

    def states(self, ids: torch.Tensor, features: torch.Tensor, depths: int, first: int) -> Iterator[torch.Tensor]:
        """Yield each head on the features; see `HeadNetwork`."""
        for depth in range(1, depths + 1):
            yield self.at(depth, features[:, first:].to(self.dtype))

    def logits(self, states: torch.Tensor, depth: int) -> torch.Tensor:
        """Return logits [n, logits] by the LM head of a depth."""
        logits: torch.Tensor = self.lm_heads[min(depth, len(self.lm_heads)) - 1](states)
        return logits if self.scale == 1.0 else logits * self.scale

    def shape(self) -> ModelShape:
        """See `HeadNetwork`. Each step runs the blocks and the LM head of its depth, for the last token alone, and keeps
        nothing.
        """
        blocks: Any = self.blocks[0]
        rows, hidden = self.lm_heads[0].weight.shape  # type: ignore[misc]
        size, used = float(self.dtype.itemsize), rows * hidden + len(blocks) * hidden**2
        return ModelShape(
            parameters=used,
            layers=0,
            hidden=hidden,
            heads=1,
            kv_heads=1,
            head_dim=1,
            vocabulary=rows,
            weight_bytes=size,
            kv_bytes=size,
            tied=True,
            last_parameters=used,
            stored_parameters=sum(weight.numel() for weight in self.parameters()),
        )

    def cache(self, first: torch.Tensor | None = None) -> MedusaCache:
        """Return an empty cache."""
        return MedusaCache(self)


class MedusaCache:
    """Medusa heads at work: all that they keep are the features at the last base."""

    def __init__(self, heads: MedusaHeads) -> None:
        self._heads = heads
        self._features = torch.empty(0)

    def extend(self, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """See `HeadCache`."""
        self._features = features[:, -1].to(self._heads.dtype)
        return self._heads.at(1, self._features)

    def deepen(self, token: torch.Tensor, state: torch.Tensor, depth: int) -> torch.Tensor:
        """See `HeadCache`."""
        return self._heads.at(depth, self._features)


def load_medusa(
    name: str, draft: MedusaDraft, options: ProfileOptions, target: Model, tokenizer: PreTrainedTokenizerBase
) -> HeadDraft:
    """Return a loader of `load_draft`."""
    files = files_of(name, draft.own_model)
    names = _names(files)
    network = _network(files, names, target, DTYPES[draft.dtype or target.dtype_name])
    is_theirs = any(PREFIX.sub("", stored)[0].isdigit() for stored in names.values())
    reading = {
        "layout": "FasterDecoding's" if is_theirs else "vLLM's",
        "heads": str(network.most),
        "LM heads": "one for all heads" if len(network.lm_heads) < len(network.blocks) else "one for each head",
    }
    if network.scale != 1.0:
        reading["logits"] = f"multiplied by {network.scale:g}"
    return HeadDraft.of(name, draft, options.gammas, target, network, method="medusa", in_one_step=True, reading=reading)


def _names(files: HeadFiles) -> dict[str, str]:
    """Return the stored name of each tensor, by its name in `MedusaHeads`."""
    names: dict[str, str] = {}
    for stored in files.tensors:
        name = PREFIX.sub("", stored)
        for pattern, ours in RENAMED.items():
            name = re.sub(pattern, ours, name)
        names[name] = stored
    return names


def _network(files: HeadFiles, names: dict[str, str], target: Model, dtype: torch.dtype) -> MedusaHeads:
    """Return the heads on the target's device; `names`: see `_names`. Raises `ModelUnloadable` for tensors that are missing,
    unused, of other shapes, quantised or not finite, and for fewer heads or other blocks than the config says. Some
    published configs speak of fewer heads.
    """
    heads, blocks = (
        1 + max((int(name.split(".")[part]) for name in names if name.startswith("blocks.")), default=-1) for part in (1, 2)
    )
    files.require_flags(files.config, ["original_lm_head"])
    promised = files.config.get("medusa_num_heads") or files.config.get("num_heads") or heads
    if promised > heads or (files.config.get("medusa_num_layers") or blocks) != blocks:
        raise files.refused(f"its files hold {heads} heads of {blocks} blocks, but its config.json says otherwise", COMPLETE)
    hidden = int(target.network.config.get_text_config().hidden_size)
    ids, rows = (None, None) if MAP not in names else _token_map(files, names[MAP], target).sort()
    with torch.device("meta"):
        network = MedusaHeads(
            heads,
            blocks,
            hidden,
            target.vocabulary,
            ids,
            bias="blocks.0.0.bias" in names,
            shared=bool(files.config.get("original_lm_head")),
            scale=float(files.config.get("logit_scale") or 1.0),
        )
    shapes = {key: tuple(weight.shape) for key, weight in network.state_dict().items() if key != "ids"}
    lm_heads = [key for key in shapes if key.startswith("lm_heads.")]
    first = names.get("lm_heads.0.weight")
    if ids is not None and first is not None and files.tensors[first].shape[0] != len(ids):
        rows = ids  # the map takes rows out of whole LM heads
        shapes |= dict.fromkeys(lm_heads, (target.vocabulary, hidden))
    files.require({names.get(key, key): shape for key, shape in shapes.items()}, [names.get(MAP, MAP)])
    weights = {key: files.loaded(names[key], dtype) for key in shapes}
    if ids is not None:
        weights |= {key: weights[key][rows] for key in lm_heads} | {"ids": ids}
    network.load_state_dict(weights, assign=True)
    return network.to(target.device).eval().requires_grad_(False)


def _token_map(files: HeadFiles, stored: str, target: Model) -> torch.Tensor:
    """Return the target's ids of a reduced vocabulary."""
    kept = files.tensor(stored).long().flatten()
    if len(set(kept.tolist())) != len(kept) or not bool(((kept >= 0) & (kept < target.vocabulary)).all()):
        raise files.refused(f"{stored} does not hold distinct target ids from 0 to {target.vocabulary - 1}", COMPLETE)
    return kept
