"""Attention of draft heads, a function in transformers' registry: decoder layers call it as they are.

It attends in two ways. Step by step, over a text that grows, it is causal: the drafts of a round come after the verified
tokens (`StepKeys`). Over a whole text it computes a depth of all rounds at once (`Rounds`): a round attends to the verified
tokens up to the one that it begins after, and to what it drafted itself. This is the mask of training-time test (EAGLE-3,
arXiv:2503.01840): causal, with a diagonal for every depth.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from alphaprof.profiling.models.private import attend_by

ROUNDS = "alphaprof_rounds"  # its name in the registry
FULL, SLIDING = "full_attention", "sliding_attention"  # layer types of transformers
# Attention scores of a chunk of rows, in float32: small for a CPU's cache, large for a GPU's launches.
SCORE_BYTES, GPU_SCORE_BYTES = 64 << 20, 1 << 30
ROOM = 64  # tokens that the tensors of a text that grows have room for at least
Pair = tuple[torch.Tensor, torch.Tensor]  # keys and values


@dataclass(frozen=True)
class Reach:
    """Which keys a row attends to. `causal`: none behind it; `window`: those less than this many places away (None: all);
    `fixed`: of the tokens the last `window`, for every row of a round, as if the window stayed at its beginning.
    """

    causal: bool = True
    window: int | None = None
    fixed: bool = False

    def of_row(self, row: int, rows: int) -> tuple[range, int | None]:
        """Return which of the `rows` of a round its row number `row` (from 0) sees, and how many of the tokens before them:
        None for all, none if below 1.
        """
        last = row + 1 if self.causal else rows
        if self.window is None or self.fixed:
            return range(last), self.window
        return range(max(0, row - self.window + 1), min(last, row + self.window)), self.window - row - 1


class Rounds:
    """Keys and values [batch, kv heads, n, head_dim] of rounds over whole texts, in every layer. There is a round for each
    of the last `count` tokens of the texts: it begins after this token. A layer's first call brings those of the tokens,
    unless `verified` has them, a pair for each layer; each later one those of one row of every round, or of several rows
    that attend to each other [batch, kv heads, rows * count, head_dim].
    """

    def __init__(self, count: int, verified: Iterable[Pair] = ()) -> None:
        self.count = count
        self.verified: dict[int, Pair] = dict(enumerate(verified))
        self._drafted: defaultdict[int, list[Pair]] = defaultdict(list)

    def update(self, key: torch.Tensor, value: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor, list[Pair]]:
        """Add those of a call; returns the keys and values of the tokens, and of every row of the rounds so far."""
        if layer in self.verified:
            rows = (torch.split(each, self.count, 2) for each in (key, value))
            self._drafted[layer] += zip(*rows, strict=True)
        else:
            self.verified[layer] = key, value
        return *self.verified[layer], self._drafted[layer]


class StepKeys:
    """The KV cache of a text that grows: keys and values in every layer, in tensors that double when they are full.
    The next step's are those of the tokens from `start` on; whatever came after these before is dropped.
    """

    def __init__(self) -> None:
        self.start = 0
        self.layers: dict[int, list[torch.Tensor]] = {}

    def update(self, key: torch.Tensor, value: torch.Tensor, layer: int, *_: Any, **__: Any) -> Pair:
        """Write those of n tokens [batch, kv heads, n, size]; returns all up to them."""
        full, end = self.layers.get(layer), self.start + key.shape[2]
        if full is None or end > full[0].shape[2]:
            grown = [each.new_empty((*each.shape[:2], max(ROOM, 2 * end), each.shape[3])) for each in (key, value)]
            for new, old in zip(grown, full or (), strict=False):
                new[:, :, : self.start] = old[:, :, : self.start]
            full = self.layers[layer] = grown
        for tensor, each in zip(full, (key, value), strict=True):
            tensor[:, :, self.start : end] = each
        return full[0][:, :, :end], full[1][:, :, :end]


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    scaling: float,
    rounds: Rounds | None = None,
    reach: Reach | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Return attention [batch, n, heads, head_dim] as transformers asks for it: of queries [batch, heads, n, head_dim] over
    keys and values [batch, kv heads, tokens, head_dim], of which each serves heads / kv heads queries that follow each
    other. The queries are those of the last n tokens, or of `rounds` that are given. `reach`: which keys they see; None:
    those of a causal layer with the module's window. `s_aux` [heads]: attention sinks.

    Raises `NotImplementedError` for attention of other kinds.
    """
    if odd := [name for name in ("softcap", "position_bias") if others.get(name) is not None]:
        raise NotImplementedError(f"attention with {' and '.join(odd)}")
    drafted: list[Pair] = []
    if rounds is not None:
        key, value, drafted = rounds.update(key, value, module.layer_idx)
    rows, tokens = query.shape[2], key.shape[2]
    if reach is None:
        reach = Reach(window=getattr(module, "sliding_window", None) if sliding_window is None else sliding_window)
    beyond = reach.window is not None and tokens > reach.window
    if drafted:
        parts = torch.split(query, drafted[0][0].shape[2], 2)
        attended = torch.cat(
            [
                by_round(part, key, value, [drafted[each] for each in own], scaling, left, s_aux)
                for number, part in enumerate(parts, len(drafted) - len(parts))
                for own, left in (reach.of_row(number, len(drafted)),)
            ],
            2,
        )
    elif reach.causal and (s_aux is not None or beyond):
        attended = by_round(query, key, value, (), scaling, reach.window, s_aux)
    else:
        mask = _mask(reach, rows, tokens, query.device) if beyond or (reach.causal and 1 < rows < tokens) else None
        attended = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=reach.causal and rows > 1 and mask is None,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    return attended.transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register(ROUNDS, attend)


def _mask(reach: Reach, rows: int, tokens: int, device: torch.device) -> torch.Tensor:
    """Return which keys [rows, tokens] the rows of the last tokens see; True: seen."""
    places = torch.arange(tokens, device=device)
    ahead = places[tokens - rows :, None] - places  # of a row's own place
    seen = ahead >= 0 if reach.causal else torch.ones_like(ahead, dtype=torch.bool)
    return seen if reach.window is None else seen & (ahead.abs() < reach.window)


def use_rounds(layers: Iterable[Any], config: Any) -> None:
    """Have decoder layers attend by `attend`, each over the window that their config gives its layer type. Not all classes
    of layers look at these types.
    """
    attend_by(config, ROUNDS)
    for layer, kind in zip(layers, getattr(config, "layer_types", None) or (), strict=False):
        if kind == SLIDING:
            layer.self_attn.sliding_window = config.sliding_window


def by_round(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    drafted: Sequence[Pair],
    scaling: float,
    reach: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return attention [batch, heads, n, head_dim] of one row of each of n rounds, which begin after the last n tokens: each
    over `key` and `value` [batch, kv heads, tokens, head_dim] of the tokens up to the one that it begins after, and over the
    keys and values [batch, kv heads, n, head_dim] of the rows of its round that it sees, `drafted`. With none of these it is
    causal. `reach`: how many of the tokens it sees, the last of them the one that it begins after. `sinks` [heads].

    A few rounds at a time, so that their scores stay below `SCORE_BYTES`.
    """
    batch, heads, rows, size = query.shape
    groups, first = key.shape[1], key.shape[2] - rows
    query = query.reshape(batch, groups, heads // groups, rows, size)
    mixed = query.new_empty(*query.shape[:-1], value.shape[-1])
    sinks = sinks if sinks is None else sinks.view(groups, heads // groups, 1).float()
    room = SCORE_BYTES if query.device.type == "cpu" else GPU_SCORE_BYTES
    span = max(1, room // (batch * heads * key.shape[2] * 4))
    for start in range(0, rows, span):
        end = min(start + span, rows)
        chunk = slice(start, end)
        begin = 0 if reach is None else max(0, first + start + min(0, 1 - reach))
        seen = slice(begin, first + end)
        own = [(keys[:, :, None, chunk], values[:, :, None, chunk]) for keys, values in drafted]
        mixed[..., chunk, :] = _mixed(query[..., chunk, :], key[:, :, seen], value[:, :, seen], own, scaling, reach, sinks)
    return mixed.view(batch, heads, rows, -1)


def _mixed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    own: list[Pair],
    scaling: float,
    reach: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return the softmax over the tokens, of which the last ones are those of the rows, and over the rows' own keys, in
    float32. `reach`: how many tokens up to its own a row sees.
    """
    shape, rows, tokens = query.shape[:4], query.shape[3], key.shape[2]
    scores = (query.flatten(2, 3) @ key.transpose(2, 3)).float().mul_(scaling).view(*shape, -1)
    later = torch.ones(rows, rows, dtype=torch.bool, device=query.device).triu(1)
    scores[..., tokens - rows :].masked_fill_(later, float("-inf"))
    if reach is not None:
        places = torch.arange(tokens, device=query.device)
        scores.masked_fill_(places[tokens - rows :, None] - places >= reach, float("-inf"))
    rest = [(query * keys).sum(-1).float() * scaling for keys, _ in own]
    rest += [] if sinks is None else [sinks.expand(shape)]
    others = torch.stack(rest, -1) if rest else scores[..., :0]
    top = torch.cat([scores.detach().amax(-1, keepdim=True), others.detach()], -1).amax(-1, keepdim=True)  # any would do
    scores, others = scores.sub_(top).exp_(), (others - top).exp()
    total = scores.sum(-1, keepdim=True) + others.sum(-1, keepdim=True)
    mixed = (scores.to(value.dtype).flatten(2, 3) @ value).float().view(*shape, -1)
    for row, (_, values) in enumerate(own):
        mixed = mixed + others[..., row, None] * values
    answer: torch.Tensor = (mixed / total).to(query.dtype)
    return answer
