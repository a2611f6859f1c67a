"""MTP modules at work: a chain of modules, one a depth, or one module that is reused at every depth.

A module reads, for base i at depth k, the embedding of x_(i+k) and a state: at depth 1 the target's after its final norm,
then that of the depth before. Both kinds run the layers of transformers' MtpModel; they differ in what attention sees.

Chain (DeepSeek-V3's training; transformers' `use_mtp`, vLLM's multi-module MTP): module k sees its own entries of all
earlier bases. Engines make entries anew that came from rejected drafts, so that over a text they are those of the text's
tokens, and every depth is one causal pass.

Reused (vLLM and SGLang for a single module): true features overwrite, after verification, what the round's drafts left in
the cache. So base i at depth k sees the entries that depth 1 made of bases up to i, and its own of depths 2 .. k.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad

from alphaprof.costs.roofline import ModelShape
from alphaprof.profiling.heads.network import HeadNetwork, head_shape

ROWS = 128  # bases in one call at depth 2 and above: their scores are as many times the bases before them, at every depth


class _Modules(HeadNetwork):
    """What both kinds share: the first `count` modules of a transformers MtpModel, which has embeddings and LM head of the
    target.
    """

    ids = None

    def __init__(self, mtp: Any, vocabulary: int, count: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.config = mtp.config.get_text_config()
        self.own = nn.ModuleList(mtp.layers[:count])
        self.count = count
        if mtp.use_shared_post_norm:
            self.own.append(mtp.shared_post_norm)
        self._whole = (mtp,)  # in a tuple: its embeddings and head are the target's, no tensors of a head

    @property
    def mtp(self) -> Any:
        """The MtpModel."""
        return self._whole[0]

    def logits(self, states: torch.Tensor, depth: int) -> torch.Tensor:
        """Logits [n, vocabulary] by the target's LM head; the states come out of the module's own final norm."""
        logits: torch.Tensor = self.mtp._project_to_logits(states)
        return logits

    def shape(self) -> ModelShape | None:
        """See `HeadNetwork`. Of a chain of several modules, each with a cache of its own, it is not known."""
        if (self.most or 1) > 1:
            return None
        config = copy.copy(self.config)
        config.num_hidden_layers = 1
        return head_shape(self.own, config, self.mtp.shared_head.weight)

    def entries(self) -> Any:
        """An empty cache for keys and values. It knows no layer types: masks keep sliding windows."""
        from transformers.cache_utils import MtpCache

        return MtpCache()

    def run(
        self,
        module: int,
        tokens: torch.Tensor,
        states: torch.Tensor,
        position: int,
        entries: Any = None,
        blind: bool = False,
    ) -> torch.Tensor:
        """States [batch, n, hidden] of a module from tokens [batch, n] and states [batch, n, hidden] at `position` and after
        it. `entries`: the cache that they go to; `blind`: the first token's embedding is taken as zeros.
        """
        embeddings = self.mtp.embed_tokens(tokens).to(states.device)
        if blind:
            embeddings = torch.cat([torch.zeros_like(embeddings[:, :1]), embeddings[:, 1:]], dim=1)
        positions = torch.arange(position, position + tokens.shape[1], device=states.device).expand(tokens.shape)
        after: torch.Tensor = self.mtp.forward_layer(module, states, positions, entries, inputs_embeds=embeddings)
        return after


class ChainedModules(_Modules):
    """Modules of their own for each depth, as many as `mtp` has."""

    def __init__(self, mtp: Any, vocabulary: int) -> None:
        super().__init__(mtp, vocabulary, len(mtp.layers))
        self.most = self.count

    @torch.inference_mode()
    def states(self, ids: torch.Tensor, features: torch.Tensor, depths: int, first: int) -> Iterator[torch.Tensor]:
        """A causal pass for each depth; see `HeadNetwork`."""
        states = features
        for depth in range(1, depths + 1):
            states = self.run(depth - 1, _following(ids, depth), states, depth)
            yield states[:, first:]

    def cache(self) -> ChainedEntries:
        """An empty cache."""
        return ChainedEntries(self)


class ChainedEntries:
    """The modules of a chain at work. A module makes entries anew from the first base on whose token was a draft. `_made`:
    how many bases have entries of verified tokens, by module; `_given`: the states that it reads at the bases after these.
    """

    def __init__(self, chain: ChainedModules) -> None:
        self._chain, self._entries = chain, chain.entries()
        self._tokens = torch.empty(0)  # x_1, x_2, ... and drafts after them
        self._bases = 0
        self._made = [0] * chain.count
        self._given: dict[int, torch.Tensor] = {}

    @torch.inference_mode()
    def extend(self, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """Module 1 reads the bases; see `HeadCache`."""
        self._tokens = tokens if not self._bases else torch.cat([self._tokens[:, : self._bases], tokens], dim=1)
        self._given[0] = features
        self._bases += tokens.shape[1]
        return self._make(0)

    @torch.inference_mode()
    def deepen(self, token: torch.Tensor, state: torch.Tensor, depth: int) -> torch.Tensor:
        """The module of the depth reads all bases whose tokens it has not seen verified; see `HeadCache`."""
        self._tokens = torch.cat([self._tokens[:, : self._bases + depth - 2], token[:, None]], dim=1)
        return self._make(depth - 1)

    def _make(self, module: int) -> torch.Tensor:
        """Returns the state of the last base, after a module has made entries for all that it lacks."""
        begin, given = self._made[module], self._given[module]
        _keep(self._entries, module, begin)
        tokens = self._tokens[:, begin + module : self._bases + module]
        states = self._chain.run(module, tokens, given, begin + module + 1, self._entries)
        verified = max(begin, self._bases - module)
        self._made[module], self._given[module] = verified, given[:, verified - begin :]
        if module + 1 < self._chain.count:
            before = self._given.get(module + 1, states[:, :0])
            self._given[module + 1] = torch.cat([before[:, : begin - self._made[module + 1]], states], dim=1)
        return states[:, -1]


class ReusedModule(_Modules):
    """The first module at every depth. `blind`: the embedding at base 0 is taken as zeros, as engines have it for some
    architectures; `window`: how many entries sliding attention sees (None: all); `normed`: the state that the next depth
    reads is the one after the module's final norm (else the one before it; a module without such a norm has one state).
    """

    def __init__(
        self, mtp: Any, vocabulary: int, blind: bool = False, window: int | None = None, normed: bool = True
    ) -> None:
        twin = _with_first_alone(mtp)
        super().__init__(twin, vocabulary, 1)
        self.blind, self._window = blind, window
        self._mask: torch.Tensor | None = None
        twin.create_masks_for_mtp_layer = self._masks
        module = twin.layers[0]
        self._norm = module.post_norm if module.use_post_norm and not normed else None
        module.use_post_norm = module.use_post_norm and normed

    def logits(self, states: torch.Tensor, depth: int) -> torch.Tensor:
        """Logits [n, vocabulary] by the target's LM head, after the module's final norm."""
        return super().logits(states if self._norm is None else self._norm(states), depth)

    def _masks(self, *given: Any, **named: Any) -> dict[str, Any]:
        """The masks that transformers makes, or the one that is set."""
        if self._mask is not None:
            return {"attention_mask": self._mask}
        made: dict[str, Any] = type(self.mtp).create_masks_for_mtp_layer(self.mtp, *given, **named)
        return made

    @torch.inference_mode()
    def states(self, ids: torch.Tensor, features: torch.Tensor, depths: int, first: int) -> Iterator[torch.Tensor]:
        """Depth 1 in one causal pass, the others a few bases at a time after its keys; see `HeadNetwork`."""
        entries, length = self.entries(), ids.shape[1]
        states = self.run(0, _following(ids, 1), features, 0, entries, self.blind)[:, first:]
        yield states
        true = (entries.layers[0].keys, entries.layers[0].values)
        begins = range(first, length, ROWS)
        own = [tuple(entry[..., :0, :] for entry in true)] * len(begins)
        for depth in range(2, depths + 1):
            tokens, parts = _following(ids, depth), []
            for number, begin in enumerate(begins):
                end = min(begin + ROWS, length)
                layer = entries.layers[0]
                pairs = zip(true, own[number], strict=True)
                layer.keys, layer.values = (torch.cat([entry[..., :end, :], mine], dim=-2) for entry, mine in pairs)
                parts.append(
                    self._deeper(tokens[:, begin:end], states[:, begin - first : end - first], begin, depth, entries)
                )
                own[number] = (layer.keys[..., end:, :], layer.values[..., end:, :])
            states = torch.cat(parts, dim=1)
            yield states

    def _deeper(self, tokens: torch.Tensor, states: torch.Tensor, begin: int, depth: int, entries: Any) -> torch.Tensor:
        """States at a depth of the bases from `begin` on; `entries`: the true ones up to the last of them, then theirs."""
        seen = seen_at(begin, begin + tokens.shape[1], depth, self._window).to(states.device)
        blocked = torch.full(seen.shape, torch.finfo(states.dtype).min, dtype=states.dtype, device=states.device)
        self._mask = blocked.masked_fill(seen, 0.0)[None, None]
        try:
            return self.run(0, tokens, states, begin + depth - 1, entries)
        finally:
            self._mask = None

    def cache(self) -> ReusedEntries:
        """An empty cache."""
        return ReusedEntries(self)


class ReusedEntries:
    """The reused module at work: entries of the verified bases, then those of the round's drafts."""

    def __init__(self, module: ReusedModule) -> None:
        self._module, self._entries = module, module.entries()
        self._bases = 0

    @torch.inference_mode()
    def extend(self, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """See `HeadCache`."""
        _keep(self._entries, 0, self._bases)
        blind = self._module.blind and not self._bases
        states = self._module.run(0, tokens, features, self._bases, self._entries, blind)
        self._bases += tokens.shape[1]
        return states[:, -1]

    @torch.inference_mode()
    def deepen(self, token: torch.Tensor, state: torch.Tensor, depth: int) -> torch.Tensor:
        """See `HeadCache`."""
        _keep(self._entries, 0, self._bases + depth - 2)
        return self._module.run(0, token[:, None], state[:, None], self._bases + depth - 2, self._entries)[:, -1]


def _with_first_alone(mtp: Any) -> Any:
    """A shallow copy of a MtpModel with a copy of its first module, which shares all weights."""
    twin, module = copy.copy(mtp), copy.copy(mtp.layers[0])
    twin._modules, module._modules = dict(mtp._modules), dict(module._modules)
    twin.layers = nn.ModuleList([module])
    return twin


def seen_at(begin: int, end: int, depth: int, window: int | None) -> torch.Tensor:
    """Returns which keys the bases `begin` .. `end` - 1 see at a depth of 2 or more: [end - begin, keys] of bool. Keys:
    those of bases 0 .. `end` - 1 at depth 1, then those of bases `begin` .. `end` - 1 at depths 2 .. `depth`. `window`: see
    `ReusedModule`; a key of depth k at base i has the place i + k - 1.
    """
    base = torch.arange(begin, end)[:, None]
    true = torch.arange(end)[None]
    places, seen = [true.expand(end - begin, end)], [true <= base]
    for own in range(2, depth + 1):
        places.append((base.T + own - 1).expand(end - begin, end - begin))
        seen.append(base == base.T)
    visible = torch.cat(seen, dim=1)
    return visible if window is None else visible & (base + depth - 1 - torch.cat(places, dim=1) < window)


def _following(ids: torch.Tensor, depth: int) -> torch.Tensor:
    """For base i the token x_(i+depth); 0 beyond the text."""
    rest = ids[:, depth:]
    return pad(rest, (0, ids.shape[1] - rest.shape[1]))


def _keep(entries: Any, module: int, count: int) -> None:
    """Drops all entries of a module but the first `count`."""
    if module < len(entries.layers) and entries.layers[module].is_initialized:
        layer = entries.layers[module]
        layer.keys, layer.values = layer.keys[..., :count, :], layer.values[..., :count, :]
