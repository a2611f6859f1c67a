"""From hidden states to logits, a few rows at a time; layers that a draft shares with its target run once."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from alphaprof.profiling.models.load import Model, is_out_of_memory, kept_logits, without_hooks


def shared_layers(target: Any, draft: Any) -> int:
    """Return how many layers, from the first on, have the same parameters in two decoders; 0 if that cannot be known."""
    if draft is target or not all(isinstance(getattr(base, "layers", None), nn.ModuleList) for base in (target, draft)):
        return 0
    if target.get_input_embeddings().weight is not draft.get_input_embeddings().weight:
        return 0
    places = [[list(map(id, layer.parameters())) for layer in base.layers] for base in (target, draft)]
    pairs = enumerate(zip(*places, strict=False))
    return next((depth for depth, (ours, theirs) in pairs if ours != theirs), min(map(len, places)))


States = Generator[torch.Tensor, torch.Tensor | None, None]  # depth by depth; what is drafted there is sent back
FINAL = -1  # in place of a number of layers: after all of them and the final norm, what the LM head reads


def keys_of(layer: int) -> tuple[int, int]:
    """Return what stands, in place of numbers of layers, for the keys before rotation and the values of one, from 0."""
    return FINAL - 1 - 2 * layer, FINAL - 2 - 2 * layer


@contextlib.contextmanager
def recorded(base: Any, layers: Sequence[int]) -> Iterator[dict[int, torch.Tensor]]:
    """Yield the hidden states [batch, length, hidden] of a decoder after each of these numbers of layers (0: the input
    embeddings; FINAL), or keys or values [batch, length, kv heads * head_dim] (`keys_of`), once it has run in this context;
    of several runs those of the last.
    """
    states: dict[int, torch.Tensor] = {}

    def keep(count: int, _module: Any, _given: Any, output: Any) -> None:
        states[count] = (output[0] if isinstance(output, tuple) else output).flatten(2)

    def keep_given(_module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        states[0] = given[0] if given else named["hidden_states"]

    def keep_last(_module: Any, _given: Any, output: Any) -> None:
        states[FINAL] = output.last_hidden_state

    handles = []
    for count in set(layers):
        if count == FINAL:
            handles.append(base.register_forward_hook(keep_last))
        elif count < FINAL:
            layer, is_value = divmod(FINAL - 1 - count, 2)
            attention = base.layers[layer].self_attn
            handles.append((attention.v_norm if is_value else attention.k_norm).register_forward_hook(partial(keep, count)))
        elif count == 0:
            handles.append(base.layers[0].register_forward_pre_hook(keep_given, with_kwargs=True))
        else:
            handles.append(base.layers[count - 1].register_forward_hook(partial(keep, count)))
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()


class _Known(nn.Module):
    """A layer that returns states that are known already, or what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.states: torch.Tensor | None = None

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden_states if self.states is None else self.states


class Rest:
    """A decoder without its first `count` layers; the decoder itself is untouched."""

    def __init__(self, base: Any, count: int) -> None:
        self.count = count
        self._known = _Known()
        # As many layers as before: settings by a layer's place, such as the kind of its attention, still fit.
        gone = [self._known, *(_Known() for _ in range(count - 1))]
        self._base = copy.copy(base)
        self._base.__dict__ = dict(base.__dict__)
        self._base._modules = dict(base._modules) | {"layers": nn.ModuleList([*gone, *base.layers[count:]])}

    def __call__(self, ids: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Last hidden states of ids [batch, length] whose states after the first layers are known."""
        self._known.states = states
        try:
            last: torch.Tensor = self._base(input_ids=ids, use_cache=False).last_hidden_state
        finally:
            self._known.states = None
        return last


class _States:
    """What a decoder returns, with a last hidden state and nothing else: no attentions, router logits or cache."""

    def __init__(self, last_hidden_state: torch.Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]


class _PassThrough(nn.Module):
    """A decoder that returns its input embeddings as its last hidden state, and has the attributes of another."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self._other = (other,)  # a tuple keeps torch from registering it as a submodule

    def __getattr__(self, name: str) -> Any:
        return getattr(self._other[0], name)

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> _States:
        return _States(inputs_embeds)


class TeacherForced:
    """Teacher-forced logits of one model: `rows` runs it over a batch, `logits` finishes a few rows at a time. A
    `DraftPass`. `target`: the pass of a model whose first layers this one may have too; they are then run once for both.
    """

    by_depth = False
    depths = 1
    rounds: Callable[..., States] | None = None
    confidence: Callable[[torch.Tensor], torch.Tensor] | None = None
    ids: torch.Tensor | None = None
    reduced = False

    def __init__(self, model: Model, target: TeacherForced | None = None) -> None:
        self.model, self.vocabulary = model, model.vocabulary
        self._clone = _without_decoder(model)
        self.chunked = self._clone is not None and _reproduces(model, self._hidden, self._from_hidden)
        self.rest: Rest | None = None
        if target is not None and target.chunked and self.chunked:
            self.rest = _rest(target.model, model)
        self.reads: tuple[int, ...] = () if self.rest is None else (self.rest.count,)

    @torch.inference_mode()
    def rows(
        self,
        ids: torch.Tensor,
        row: torch.Tensor,
        column: torch.Tensor,
        known: Mapping[int, torch.Tensor] | None = None,
        first: int = 0,
    ) -> torch.Tensor:
        """Return what `logits` needs for chosen tokens (`row`, ascending, and `column` [n]) of right-padded ids [batch,
        length].

        No mask is needed: attention is causal, so real tokens never see the padding after them. Ids beyond the model's
        context are not fed; a chosen token there yields the row of the last one that is. Ids beyond its vocabulary are
        fed as its last id; what follows them means nothing. `known`: hidden states of the target by layer, those of `reads`
        among them; None: everything is computed. `first` is not read.
        """
        device = self.model.device
        fed = ids[:, : self.model.context].clamp(max=self.model.vocabulary - 1).to(device)
        row, column = row.to(device), column.clamp(max=fed.shape[1] - 1).to(device)  # see `Scorer.score`
        if self.chunked:
            states = self._hidden(fed) if known is None or self.rest is None else self.rest(fed, known[self.rest.count])
            return states[row.to(states.device), column.to(states.device)]
        chosen = []
        for index, places in enumerate(torch.split(column, torch.bincount(row, minlength=len(fed)).tolist())):
            # The model's own forward is right for every architecture; where it makes logits of all tokens they are large:
            # one document at a time.
            some = {"logits_to_keep": places.cpu()} if kept_logits(self.model) else {}
            logits = self.model.network(input_ids=fed[index : index + 1], use_cache=False, **some).logits[0]
            chosen.append(logits if some else logits[places.to(logits.device)])
        return torch.cat(chosen)

    @torch.inference_mode()
    def logits(self, rows: torch.Tensor, depth: int = 1) -> torch.Tensor:
        """Return logits [n, vocabulary] of n rows, in the model's dtype; the same at every depth."""
        return self._from_hidden(rows) if self.chunked else rows

    def _hidden(self, ids: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = self.model.decoder(input_ids=ids, use_cache=False).last_hidden_state
        return states

    def _from_hidden(self, rows: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self._clone(inputs_embeds=rows[None], use_cache=False).logits
        return output[0]


def _without_decoder(model: Model) -> Any:
    """Return a shallow copy of a model's network that makes logits of the last hidden states that it is given as input
    embeddings: in place of its decoder, or of what holds it beside parts for images; None if it has no such part.
    """
    network: Any = model.network
    children = network.named_children()
    held = next((name for name, child in children if any(part is model.decoder for part in child.modules())), None)
    if held is None:
        return None
    clone = without_hooks(network)
    clone._modules[held] = _PassThrough(network._modules[held])
    return clone


@torch.inference_mode()
def _rest(target: Model, draft: Model) -> Rest | None:
    """Return the draft without the layers that it shares with its target; None if there are none, or where going on from
    them does not give what the whole draft gives, to the last bit.
    """
    bases = [model.decoder for model in (target, draft)]
    if (target.context, target.vocabulary) != (draft.context, draft.vocabulary) or not (count := shared_layers(*bases)):
        return None
    ids = short_texts(draft)
    rest = Rest(bases[1], count)
    expected = bases[1](input_ids=ids, use_cache=False).last_hidden_state
    try:
        with recorded(bases[0], [count]) as states:
            bases[0](input_ids=ids, use_cache=False)
        return rest if torch.equal(rest(ids, states[count]), expected) else None
    except (TypeError, AttributeError, RuntimeError, ValueError, KeyError) as error:
        if is_out_of_memory(error):
            raise
        return None


def short_texts(model: Model) -> torch.Tensor:
    """Return two texts of ordinary ids [2, 6], to check on how a model behaves."""
    return (torch.arange(2 * 6, device=model.device).reshape(2, 6) * 7919 + 13) % model.vocabulary


@torch.inference_mode()
def _reproduces(
    model: Model, hidden: Callable[[torch.Tensor], torch.Tensor], logits: Callable[[torch.Tensor], torch.Tensor]
) -> bool:
    """Return whether hidden states and stand-in give the logits of the full forward, on two short texts of ordinary ids."""
    ids = short_texts(model)
    expected: torch.Tensor = model.network(input_ids=ids, use_cache=False).logits.flatten(0, 1)
    try:
        made = logits(hidden(ids).flatten(0, 1))
    except (TypeError, AttributeError, RuntimeError, ValueError):
        return False
    if made.shape != expected.shape:
        return False
    error, scale = (made.float() - expected.float()).abs().max(), expected.float().abs().max().clamp(min=1.0)
    return bool(error <= 4 * torch.finfo(model.dtype).eps * scale)
