"""A draft head as a draft: its pass over given texts, itself at work, and what the manifest keeps of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from alphaprof.errors import ModelUnloadable
from alphaprof.log.manifest import DraftFacts, Trained
from alphaprof.log.schema import PROPOSED_LIMIT
from alphaprof.profiling.decoding.drafters import DRAFTED, Chooser, Proposal
from alphaprof.profiling.heads.network import HeadNetwork
from alphaprof.profiling.heads.steps import head_prefills, head_steps
from alphaprof.profiling.models.load import NOISE, Model, fingerprint_of
from alphaprof.profiling.models.processing import draw, weights_of
from alphaprof.profiling.models.teacher_forced import TeacherForced
from alphaprof.profiling.texts.corpus import Ids
from alphaprof.profiling.timing.steppers import TimedStep, fitted

Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Alternative:
    """Another reading of a head's files: `changed` in words, the `setting` that asks for it, as what to do, the network
    that it makes of the same tensors, the `depth` at which it shows, and the `engines` that read the files so.
    """

    changed: str
    setting: str
    network: HeadNetwork
    depth: int = 1
    engines: tuple[str, ...] = ()


@dataclass(frozen=True)
class HeadDraft:
    """A head with its name in the run, on a target. `depths`: how many drafts of a round are measured; `method`: what vLLM
    calls it, and `algorithm` SGLang (None: it has none); `reading`: how its files were read (see `DraftFacts`); `context`:
    the longest text that it can go on with, in tokens (None: any).

    `engines` read its files as they are read here; `alternatives`: other readings that are tried (none: nothing is);
    `fallbacks`: more of them, for a head that drafts hardly anything right; `doubts`: code, message and remedy of warnings
    about its files; `trained`: what its record of a training says.
    """

    name: str
    network: HeadNetwork
    target: Model
    kind: str
    reference: str
    method: str
    depths: int
    algorithm: str | None = None
    context: int | None = None
    ranks_by_depth: bool = False
    in_one_step: bool = False
    reading: dict[str, str] = field(default_factory=dict)
    engines: tuple[str, ...] = ()
    alternatives: Sequence[Alternative] = ()
    fallbacks: Sequence[Alternative] = ()
    doubts: tuple[dict[str, str], ...] = ()
    trained: Trained | None = None

    @property
    def vocabulary(self) -> int:
        """The target's, whatever part of it the head can propose."""
        return self.network.vocabulary

    @property
    def models(self) -> tuple[Model, ...]:
        """None that runs by itself."""
        return ()

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over its tensors and over how they are read, computed once: every weight is read."""
        return fingerprint_of([self.kind, self.reading], self.network.state_dict())

    def facts(self) -> DraftFacts:
        """What the manifest keeps of it."""
        known, device, dtype = self.network.ids, self.network.device, self.network.dtype
        shape = self.network.shape()
        return DraftFacts(
            reference=self.reference,
            kind=self.kind,
            architecture=type(self.network).__name__,
            fingerprint=self.fingerprint,
            dtype=str(dtype).removeprefix("torch."),
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            parameters=sum(parameter.numel() for parameter in self.network.parameters()),
            context=self.context,
            vocabulary=self.vocabulary if known is None else len(known),
            eos=self.target.eos,
            noise=NOISE[dtype],
            shape=None if shape is None else asdict(shape),
            has_distribution=True,
            has_steps=True,
            starts_matter=True,
            engine_method=self.method,
            settings={} if self.algorithm is None else {"speculative_algorithm": self.algorithm},
            depths=self.depths,
            ranks_by_depth=self.ranks_by_depth,
            in_one_step=self.in_one_step,
            reduced_vocabulary=known is not None,
            reading=self.reading,
            trained=self.trained,
        )

    def teacher_forced(self, target: TeacherForced) -> HeadPass:
        """Its logits at every depth, from states of the target. Raises `ModelUnloadable` where these cannot be recorded."""
        if not target.chunked:
            raise ModelUnloadable(
                f"draft {self.name}: the states of a {type(target.model.network).__name__} cannot be recorded in a batch",
                "measure this head where it is served, and import what the engine logs (docs/import.md)",
            )
        return HeadPass(self)

    def columns(self, ids: np.ndarray[Any, Any], prompt: int) -> Arrays:
        """`proposed`: nothing where no state of the target is known yet, less where its context ends; and which tokens it
        can propose.
        """
        places = np.arange(prompt, len(ids))
        room = np.where(places < 2, 0, self.depths if self.context is None else self.context - places + 2)
        columns: Arrays = {"proposed": np.clip(room, 0, min(self.depths, PROPOSED_LIMIT)).astype(np.int16)}
        if self._known is not None:
            columns["in_draft_vocabulary"] = np.isin(ids[prompt:], self._known)
        return columns

    @cached_property
    def _known(self) -> np.ndarray[Any, Any] | None:
        """The target's ids of its logits, on the host."""
        return None if self.network.ids is None else self.network.ids.cpu().numpy()

    def drafter(self, chooser: Chooser, width: int, device: torch.device, drawn: bool) -> HeadDrafter:
        """It with a KV cache of its own, on the target's states of verified tokens."""
        return HeadDrafter(self, chooser, width, device, drawn)

    def steps(self, text: Ids, batch: int, context: int, longest: int, mode: str) -> list[list[TimedStep]]:
        """Its first step of a round, over the tokens that were verified before, and its later ones."""
        known = len(fitted(text, self, context, longest))
        return head_steps(self.name, self.network, self.target, np.resize(text, known + longest + 1), batch, longest)

    def prefills(self, text: Ids, lengths: Sequence[int]) -> list[TimedStep]:
        """Of its own layers: the target reads the prompt anyway."""
        known = [min(len(fitted(text, each, length, 1)) for each in (self, self.target)) for length in lengths]
        return head_prefills(self.name, self.network, self.target, np.resize(text, max(known) + 1), known)


def depths_of(called: str, wanted: int | None, gammas: Sequence[int], most: int | None) -> int:
    """The depths that are measured: those that are wanted, else the largest of `gammas`. Raises `ModelUnloadable` if the
    head has fewer: `most`, None for any number. `called`: what messages call the head.
    """
    depths = max(gammas) if wanted is None else wanted
    if most is not None and max(depths, *gammas) > most:
        hint = f"gammas and depths of {most} or less; an MTP module with reuse: true has any number"
        raise ModelUnloadable(f"{called} has {most} depths, and {max(depths, *gammas)} are asked for", hint)
    return depths


class HeadPass:
    """A head in a teacher-forced pass, a `DraftPass`: rows are states [n, depths, hidden]."""

    by_depth = True

    def __init__(self, draft: HeadDraft) -> None:
        self.depths, self.ranks_by_depth = draft.depths, draft.ranks_by_depth
        self.vocabulary, self.ids, self.reads = draft.vocabulary, draft.network.ids, draft.network.layers
        self.network = draft.network
        self._longest = None if draft.context is None else draft.context + 1  # its last base reads the token after it

    @torch.inference_mode()
    def rows(
        self, ids: torch.Tensor, row: torch.Tensor, column: torch.Tensor, known: Mapping[int, torch.Tensor], first: int
    ) -> torch.Tensor:
        """States [n, depths, hidden]: at depth d those of the base d before the chosen token."""
        network = self.network
        row, column = row.to(network.device), column.to(network.device)
        fed = ids[:, : self._longest].clamp(max=self.vocabulary - 1).to(network.device)
        first = min(max(0, first - 1), fed.shape[1] - 1)  # of a text beyond its context nothing is proposed
        features = torch.cat([known[count][:, : self._longest].to(network.device) for count in network.layers], -1)
        states = network.states(fed, features, self.depths, first)
        last = fed.shape[1] - 1 - first
        return torch.stack([each[row, (column - depth - first).clamp(0, last)] for depth, each in enumerate(states, 1)], 1)

    @torch.inference_mode()
    def logits(self, rows: torch.Tensor, depth: int = 1) -> torch.Tensor:
        """Logits [n, logits] of rows [n, depths, hidden] at a depth."""
        return self.network.logits(rows[:, depth - 1], depth)


class HeadDrafter:
    """A head at work: greedy, or drawn from q where `drawn`. Its first step of a round reads all tokens that were verified
    since, with the target's own states; what it drafts from its own states is dropped after the round.
    """

    def __init__(self, draft: HeadDraft, chooser: Chooser, width: int, device: torch.device, drawn: bool) -> None:
        self.reads = draft.network.layers
        self._network, self._cache = draft.network, draft.network.cache()
        self._chooser, self._drawn, self._device = chooser, drawn, device
        self._depths, self._context, self._width = draft.depths, draft.context, width
        known = draft.network.ids
        self._ids = None if known is None else known[known < width]
        self._pending: list[torch.Tensor] = []
        self._prompt = self._read = 0

    def start(self, ids: list[int]) -> None:
        """Nothing before the target has read the prompt."""
        self._prompt = len(ids)

    def observe(self, states: dict[int, torch.Tensor]) -> None:
        """Keep the features [tokens, features] until they are needed."""
        self._pending.append(torch.cat([states[count].to(self._network.device) for count in self.reads], -1))

    def propose(self, ids: list[int], most: int) -> Proposal:
        """As many tokens as there is room for; without waiting for the device in between."""
        room = most if self._context is None else self._context - len(ids) + 2
        count = max(0, min(most, self._depths, room))
        if count == 0:
            return Proposal(torch.empty(0, dtype=torch.long, device=self._device))
        features = torch.cat(self._pending)[None]
        self._pending.clear()
        fed = torch.tensor([ids[self._read + 1 : self._read + 1 + features.shape[1]]], device=self._network.device)
        self._read += features.shape[1]
        state = self._cache.extend(fed, features)
        tokens: list[torch.Tensor] = []
        laws: list[torch.Tensor] = []
        for depth in range(1, count + 1):
            if depth > 1:
                state = self._cache.deepen(tokens[-1], state, depth)
            rows = self._network.logits(state, depth)[:, : self._width if self._ids is None else len(self._ids)]
            place = len(ids) - self._prompt + depth - 1
            tokens.append(self._chosen(rows, place, laws))
        return Proposal(torch.cat(tokens).to(self._device), torch.cat(laws).to(self._device) if laws else None)

    def _chosen(self, rows: torch.Tensor, place: int, laws: list[torch.Tensor]) -> torch.Tensor:
        """The token [1] that logits [1, logits] draft at a place; where it is drawn, its law [1, width] joins `laws`."""
        if not self._drawn:
            index = rows.argmax(1)  # the first index of the maximum
            return index if self._ids is None else self._ids[index]
        weights = weights_of(rows, self._chooser.draft_processing)
        index = draw(weights, self._chooser.numbers(DRAFTED, place, 1))
        law = weights / weights.sum(1, keepdim=True)
        if self._ids is None:
            laws.append(law)
            return index
        laws.append(law.new_zeros((1, self._width)).index_copy_(1, self._ids, law))
        return self._ids[index]

    def settle(self, accepted: int) -> None:
        """Nothing to take back: what was drafted is dropped when the next round begins."""
