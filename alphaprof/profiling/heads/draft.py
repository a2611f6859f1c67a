"""A draft head as a draft: its pass over given texts, itself at work, and what the manifest keeps of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from alphaprof.errors import ModelUnloadable
from alphaprof.profiling.heads.network import HeadNetwork
from alphaprof.profiling.models.draft import Arrays
from alphaprof.profiling.models.hashes import fingerprint_by_files
from alphaprof.profiling.models.load import NOISE, Model
from alphaprof.profiling.models.teacher_forced import States, TeacherForced
from alphaprof.run.manifest import DraftFacts
from alphaprof.run.schema import PROPOSED_LIMIT

if TYPE_CHECKING:
    from alphaprof.config.options import HeadOptions


@dataclass(frozen=True)
class Alternative:
    """Another way to read a head's files: `changed` in words, the `setting` that asks for it, as what to do, the network
    that it makes of the same tensors, the `depth` at which it shows, and the `engines` that read the files with this
    difference.
    """

    changed: str
    setting: str
    network: HeadNetwork
    depth: int = 1
    engines: tuple[str, ...] = ()


@dataclass(frozen=True)
class HeadDraft:
    """A head with its name in the run, on a target. `depths`: how many drafts of a round are measured; `reading`,
    `foreign`: see `DraftFacts`; `context`: the longest text that it can go on with, in tokens (None: any); `gamma`: how many
    tokens a round drafts, if what it drafts depends on that.

    `engines` read its files as they are read here; `alternatives`: other readings that are tried (none: nothing is);
    `doubts`: code, message and remedy of warnings about its files; `files`: of its tensors, of modules in the target's
    checkpoint the target's.
    """

    name: str
    network: HeadNetwork
    target: Model
    kind: str
    reference: str
    depths: int
    context: int | None = None
    gamma: int | None = None
    foreign: tuple[str, ...] = ()
    reading: dict[str, str] = field(default_factory=dict)
    engines: tuple[str, ...] = ()
    alternatives: Sequence[Alternative] = ()
    doubts: tuple[dict[str, str], ...] = ()
    files: tuple[Path, ...] = ()

    @classmethod
    def of(
        cls, name: str, options: HeadOptions, gammas: Sequence[int], target: Model, network: HeadNetwork, **facts: Any
    ) -> HeadDraft:
        """Return a draft as its options ask for it, with `facts` for the other fields. It has as many depths as they say, or
        else the largest of `gammas`. Raises `ModelUnloadable` if the head has fewer.
        """
        model, depths = options.own_model, options.depths or max(gammas)
        if network.most is not None and depths > network.most:
            hint = f"set this draft's depths to {network.most} or less; MTP with reuse: true has no limit"
            raise ModelUnloadable(f"draft {name} has {network.most} depths, but {depths} are needed", hint)
        reference = target.reference if model is None else model.model
        return cls(name, network, target, options.kind, reference, depths=depths, **facts)

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
        """SHA-256 over its files, and over how they are read; computed once."""
        return fingerprint_by_files([self.kind, self.reading, str(self.network.dtype)], self.files)

    def facts(self) -> DraftFacts:
        """Return what the manifest keeps of it."""
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
            settings={} if self.gamma is None else {"block": self.gamma + 1},
            foreign=self.foreign,
            depths=self.depths,
            in_one_step=self.network.masks is not None,
            reduced_vocabulary=known is not None,
            own_path=self.network.own_path,
            has_confidence=bool(self.network.confident),
            reading=self.reading,
        )

    def teacher_forced(self, target: TeacherForced) -> HeadPass:
        """Return its logits at every depth, from states of the target. Raises `ModelUnloadable` if these cannot be
        recorded.
        """
        if not target.chunked:
            raise ModelUnloadable(
                f"draft {self.name}: the states of a {type(target.model.network).__name__} cannot be recorded in a batch",
                "serve this head with an engine, and import the engine's logs (docs/import.md)",
            )
        return HeadPass(self)

    def columns(self, ids: np.ndarray[Any, Any], prompt: int) -> Arrays:
        """`proposed`: nothing if no state of the target is known yet, less where its context ends; and which tokens it
        can propose.
        """
        positions = np.arange(prompt, len(ids))
        room = np.where(positions < 2, 0, self.depths if self.context is None else self.context - positions + 2)
        columns: Arrays = {"proposed": np.clip(room, 0, min(self.depths, PROPOSED_LIMIT)).astype(np.int16)}
        if self._known is not None:
            columns["in_draft_vocabulary"] = np.isin(ids[prompt:], self._known)
        return columns

    @cached_property
    def _known(self) -> np.ndarray[Any, Any] | None:
        """The target's ids of its logits, on the host."""
        return None if self.network.ids is None else self.network.ids.cpu().numpy()


class HeadPass:
    """A head in a teacher-forced pass, a `DraftPass`: rows are states [n, depths, hidden], or of one depth [n, hidden]."""

    by_depth = True

    def __init__(self, draft: HeadDraft) -> None:
        self.depths = draft.depths
        self.vocabulary, self.ids, self.reads = draft.vocabulary, draft.network.ids, draft.network.layers
        self.reduced = self.ids is not None or draft.network.picks
        self.network = draft.network
        self.rounds: Callable[..., States] | None = self._rounds if draft.network.own_path else None
        confidence, confident = draft.network.confidence, draft.network.confident
        self.confidence: Callable[[torch.Tensor], torch.Tensor] | None = confidence if confident else None
        self._longest = None if draft.context is None else draft.context + 1  # its last row reads the token after it

    @torch.inference_mode()
    def rows(
        self, ids: torch.Tensor, row: torch.Tensor, column: torch.Tensor, known: Mapping[int, torch.Tensor], first: int
    ) -> torch.Tensor:
        """Return states [n, depths, hidden]: at depth d those of the round that begins d tokens before the chosen one."""
        states, row, place, last = self._begun(ids, row, column, known, first)
        return torch.stack([each[row, (place + 1 - depth).clamp(0, last)] for depth, each in enumerate(states, 1)], 1)

    @torch.inference_mode()
    def _rounds(
        self, ids: torch.Tensor, row: torch.Tensor, column: torch.Tensor, known: Mapping[int, torch.Tensor], first: int
    ) -> States:
        """Yield for each depth states [n, hidden] of the rounds whose first draft is for the token behind a chosen one. What
        is sent for a depth [n], they draft there.
        """
        states, row, place, last = self._begun(ids, row, column, known, first)
        every = next(states)
        for depth in range(1, self.depths + 1):
            drafted = yield every[row, place.clamp(0, last)]
            if depth < self.depths and drafted is not None:
                fed = torch.zeros((len(every), last + 2), dtype=torch.long, device=every.device)
                # In the last column what begins nowhere in this text.
                fed[row, place.where((place >= 0) & (place <= last), last + 1)] = drafted.to(fed)
                every = states.send(fed[:, :-1])

    def _begun(
        self, ids: torch.Tensor, row: torch.Tensor, column: torch.Tensor, known: Mapping[int, torch.Tensor], first: int
    ) -> tuple[States, torch.Tensor, torch.Tensor, int]:
        """Return the states of all rounds, where among them those of the chosen tokens are, and the last place."""
        network = self.network
        row, column = row.to(network.device), column.to(network.device)
        tokens = ids[:, : self._longest].clamp(max=self.vocabulary - 1).to(network.device)
        first = min(max(0, first - 1), tokens.shape[1] - 1)  # of a text beyond its context nothing is proposed
        features = [known[count][:, : self._longest].to(network.device) for count in network.layers]
        states = network.states(tokens, torch.cat(features, -1), self.depths, first)
        return states, row, column - 1 - first, tokens.shape[1] - 1 - first

    @torch.inference_mode()
    def logits(self, rows: torch.Tensor, depth: int = 1) -> torch.Tensor:
        """Return logits [n, logits] of rows at a depth."""
        return self.network.logits(rows if rows.dim() == 2 else rows[:, depth - 1], depth)
