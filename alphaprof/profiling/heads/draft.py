"""A draft head as a draft: its pass over given texts, itself at work, and what the manifest keeps of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from alphaprof.log.manifest import Trial
from alphaprof.profiling.models.load import Model

if TYPE_CHECKING:
    from alphaprof.profiling.heads.network import HeadNetwork


@dataclass(frozen=True)
class HeadDraft:
    """A head with its name in the run, on a target. `depths`: how many drafts of a round are measured; `method`: what
    engines call it; `reading`: how its files were read (see `DraftFacts`); `context`: the longest text that it can go on
    with, in tokens (None: any).
    """

    name: str
    network: HeadNetwork
    target: Model
    kind: str
    reference: str
    method: str
    depths: int
    context: int | None = None
    ranks_by_depth: bool = False
    reading: dict[str, str] = field(default_factory=dict)
    trials: tuple[Trial, ...] = ()
    models: tuple[Model, ...] = ()
