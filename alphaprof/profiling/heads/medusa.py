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
from alphaprof.profiling.heads.depths import depths_of
from alphaprof.profiling.heads.draft import HeadDraft
from alphaprof.profiling.heads.files import COMPLETE, HeadFiles, files_of
from alphaprof.profiling.heads.network import HeadNetwork
from alphaprof.profiling.models.dtype import DTYPES
from alphaprof.profiling.models.load import Model
from alphaprof.rules import GAMMA_LIMIT

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from alphaprof.config.profile import ProfileOptions

MAP = "token_map"  # of a reduced vocabulary
HEADS, BLOCKS = ("medusa_num_heads", "num_heads"), ("medusa_num_layers",)
PREFIX = re.compile(r"^medusa_heads?\.")
# Names of heads by number and layer: FasterDecoding's, whose layer after the blocks is the LM head, and vLLM's.
THEIRS = re.compile(r"^(?P<head>\d+)\.(?P<layer>\d+)\.(?P<part>linear\.weight|linear\.bias|weight)$")
VLLM = re.compile(
    r"^(?:blocks\.(?P<head>\d+)\.layers\.(?P<layer>\d+)\.(?P<part>weight|bias)|lm_heads\.(?P<lm>\d+)\.weight)$"
)


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
        """The state [..., hidden] at a depth of features [..., hidden]: x + SiLU(W x + b) for each block."""
        state = features
        block: Any = self.blocks[depth - 1]
        for linear in block:
            state = state + functional.silu(linear(state))
        return state

    def states(self, ids: torch.Tensor, features: torch.Tensor, depths: int, first: int) -> Iterator[torch.Tensor]:
        """Each head on the features; see `HeadNetwork`."""
        for depth in range(1, depths + 1):
            yield self.at(depth, features[:, first:].to(self.dtype))

    def logits(self, states: torch.Tensor, depth: int) -> torch.Tensor:
        """Logits [n, logits] by the LM head of a depth."""
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

    def cache(self) -> MedusaCache:
        """An empty cache."""
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
    """A loader of `load_draft`."""
    files = files_of(name, draft.own_model)
    names, layout = _names(files)
    network = _network(files, names, target, DTYPES[draft.dtype or target.dtype_name])
    promised = _promised(files, HEADS)
    reading = {
        "layout": layout,
        "heads": str(network.most) + (f"; its config.json says {promised}" if promised not in (None, network.most) else ""),
        "LM heads": "one for all heads" if len(network.lm_heads) < len(network.blocks) else "one for each head",
    }
    if network.scale != 1.0:
        reading["logits"] = f"multiplied by {network.scale:g}"
    return HeadDraft(
        name=name,
        network=network,
        target=target,
        kind=draft.kind,
        reference=draft.model,
        method="medusa",
        depths=depths_of(files.name, draft.depths, options.gammas, network.most),
        ranks_by_depth=draft.ranks_by_depth,
        in_one_step=True,
        reading=reading,
    )


def _network(files: HeadFiles, names: dict[str, str], target: Model, dtype: torch.dtype) -> MedusaHeads:
    """The heads on the target's device; `names`: see `_names`. Raises `ModelUnloadable` for tensors that are missing,
    unused, of other shapes, quantised or not finite.
    """
    _require_counts(files, names)
    files.require_values(files.config, flags=["original_lm_head"], numbers=["logit_scale"])
    hidden, kept = int(target.network.config.get_text_config().hidden_size), _token_map(files, target)
    ids, order = (None, None) if kept is None else kept.sort()
    with torch.device("meta"):
        network = MedusaHeads(
            _most(names, 1),
            _most(names, 2),
            hidden,
            target.vocabulary,
            ids,
            bias="blocks.0.0.bias" in names,
            shared=bool(files.config.get("original_lm_head")),
            scale=float(files.config.get("logit_scale") or 1.0),
        )
    shapes = {key: tuple(weight.shape) for key, weight in network.state_dict().items() if key != "ids"}
    heads = [key for key in shapes if key.startswith("lm_heads.")]
    rows = order
    if ids is not None and not _is_cut(files, names, len(ids)):
        rows = ids  # the map takes rows out of whole LM heads
        shapes |= dict.fromkeys(heads, (target.vocabulary, hidden))
    files.require({names.get(key, key): shape for key, shape in shapes.items()}, _maps(files))
    weights = {key: files.loaded(names[key], dtype) for key in shapes}
    if ids is not None:
        weights |= {key: weights[key][rows] for key in heads} | {"ids": ids}
    network.load_state_dict(weights, assign=True)
    return network.to(target.device).eval().requires_grad_(False)


def _require_counts(files: HeadFiles, names: dict[str, str]) -> None:
    """Raises `ModelUnloadable` where the config speaks of more heads, or another number of blocks, than the files hold. Some
    published configs speak of fewer heads.
    """
    for keys, held, most in ((HEADS, _most(names, 1), GAMMA_LIMIT), (BLOCKS, _most(names, 2), 0)):
        promised = _promised(files, keys)
        if promised is not None and not promised <= held <= promised + most:
            raise files.refused(f"its config.json says {keys[0]} {promised}, and its files hold {held}", COMPLETE)


def _is_cut(files: HeadFiles, names: dict[str, str], rows: int) -> bool:
    """Whether the LM heads have the rows of the reduced vocabulary alone."""
    name = names.get("lm_heads.0.weight")
    return name is not None and files.tensors[name].shape[0] == rows


def _names(files: HeadFiles) -> tuple[dict[str, str], str]:
    """The stored name of each tensor of `MedusaHeads`, by its name there, and the layout."""
    bare = {PREFIX.sub("", stored): stored for stored in files.tensors}
    theirs = {stored: match for stored in bare if (match := THEIRS.match(stored)) is not None}
    if theirs:
        named = {_own_name(match): bare[stored] for stored, match in theirs.items()}
        if len(named) < len(theirs):
            raise files.refused("its files hold a head with two LM heads", COMPLETE)
        return named, "FasterDecoding's"
    names: dict[str, str] = {}
    for stored in bare:
        if (match := VLLM.match(stored)) is not None:
            block = f"blocks.{match['head']}.{match['layer']}.{match['part']}"
            names[block if match["lm"] is None else f"lm_heads.{match['lm']}.weight"] = bare[stored]
    if not names:
        raise files.refused("its files hold no Medusa heads", "give heads in the layout of FasterDecoding or of vLLM")
    if "lm_head.weight" in bare:
        names["lm_heads.0.weight"] = bare["lm_head.weight"]
    return names, "vLLM's"


def _own_name(match: re.Match[str]) -> str:
    """The name in `MedusaHeads` of a tensor in FasterDecoding's layout."""
    if match["part"] == "weight":
        return f"lm_heads.{match['head']}.weight"
    return f"blocks.{match['head']}.{match['layer']}.{match['part'].removeprefix('linear.')}"


def _most(names: dict[str, str], part: int) -> int:
    """How many heads (`part` 1), or blocks of a head (2), names of blocks count."""
    return 1 + max((int(name.split(".")[part]) for name in names if name.startswith("blocks.")), default=-1)


def _promised(files: HeadFiles, keys: tuple[str, ...]) -> int | None:
    """The number that the config has under the first of these keys."""
    values = (files.config.get(key) for key in keys)
    return next((value for value in values if type(value) is int), None)


def _maps(files: HeadFiles) -> list[str]:
    """The stored name of the map of a reduced vocabulary, in a list; empty where there is none."""
    return [stored for stored in files.tensors if PREFIX.sub("", stored) == MAP]


def _token_map(files: HeadFiles, target: Model) -> torch.Tensor | None:
    """The target's ids of a reduced vocabulary; None where it is whole."""
    if not (maps := _maps(files)):
        return None
    stored = maps[0]
    kept = files.tensor(stored).long()
    if kept.dim() != 1 or len(set(kept.tolist())) != len(kept) or not bool(((kept >= 0) & (kept < target.vocabulary)).all()):
        raise files.refused(f"{stored} does not hold different ids of the target, 0 to {target.vocabulary - 1}", COMPLETE)
    return kept
