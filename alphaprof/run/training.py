"""The record of a trained head, training.json: how it was made, and which texts it has seen.

`alphaprof train` writes it into the folder of a head. Trainings that begin with this head read it, and profiles that have it
as a draft. No model is needed to read it. It is compared with what is declared here, since a head may come from elsewhere.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from alphaprof.errors import HeadRecordUnreadable, cut
from alphaprof.run.manifest import Manifest, part_name
from alphaprof.run.split import STOP, TEST, TIME

TRAINING = "training.json"  # in the folder of a head
TESTED = "tested"  # there too: the run that tested it on documents held out
AGAIN = "use the alphaprof that wrote it, or train the head again"
LEARNT = "learnt"  # setting of a training that began with a head: the units that this one had learnt; null: not known
BEGINS = "begins"  # setting of a training on a split by time: the moment at which its stop and test part begin


@dataclass(frozen=True)
class TrainingRun:
    """The run whose texts a head was trained on: its directory as it was given, and `texts_digest` of it."""

    path: str
    digest: str


@dataclass(frozen=True)
class TrainingTarget:
    """The target that a head was trained for; `fingerprint` as in the manifest of the run."""

    model: str
    fingerprint: str
    hidden_size: int
    layers: int
    vocabulary: int


@dataclass(frozen=True)
class TrainingSize:
    """How much a head was trained on: independent units, `tokens` of continuations, `prompt_tokens` before them."""

    units: int
    documents: int
    tokens: int
    prompt_tokens: int


@dataclass(frozen=True)
class PartUnits:
    """Digests of the independent units (16 hexadecimal digits) of each part; `train`: of those that this head has seen."""

    train: tuple[str, ...]
    stop: tuple[str, ...]
    test: tuple[str, ...]


@dataclass(frozen=True)
class DraftVocabulary:
    """The ids that a head can propose: how many, SHA-256 over them, and `ceiling_test`: share of test tokens among them."""

    size: int
    digest: str
    ceiling_test: float


@dataclass(frozen=True)
class TrainingProgress:
    """The state after a step. `loss` and `agreement` on the stop part, by depth; `seconds` since the training began."""

    step: int
    seconds: float
    loss: tuple[float, ...]
    agreement: tuple[float, ...]
    tokens_seen: int


@dataclass(frozen=True)
class TrainingSeconds:
    """Where the time went: the target's features, steps of the head, tests on stop and test part; `cpu`: of all threads."""

    features: float
    training: float
    testing: float
    cpu: float


@dataclass(frozen=True, kw_only=True)
class TrainingRecord:
    """The content of training.json. `settings`: all that fixes the result, by name; `identity`: SHA-256 over settings, texts
    and the head that training began with. `best_step`: the one whose weights were kept, of `steps`.
    """

    # Records of version 3 have more fields: size.fraction, size.order and floor.
    __pydantic_config__ = ConfigDict(extra="ignore", allow_inf_nan=False)

    schema: Literal["alphaprof-training-4", "alphaprof-training-3"] = "alphaprof-training-4"
    alphaprof: str
    status: Literal["running", "complete"]
    run: TrainingRun
    target: TrainingTarget
    settings: dict[str, Any]
    identity: str
    size: TrainingSize
    units: PartUnits
    vocabulary: DraftVocabulary
    progress: tuple[TrainingProgress, ...]
    best_step: int
    steps: int
    seconds: TrainingSeconds
    parameters: int
    device: str

    def to_json(self) -> str:
        """Return the text of training.json."""
        return json.dumps(dataclasses.asdict(self), indent=1, allow_nan=False) + "\n"


def texts_digest(manifest: Manifest) -> str:
    """Return what identifies the token ids of a run's texts and the target that wrote them: SHA-256, the first 64 bits. A
    run that reuses the texts of another one, with more drafts, has the same.
    """
    ids = [manifest.files[f"continuations/{part_name(shard.index)}"].sha256 for shard in manifest.shards]
    return hashlib.sha256(json.dumps([manifest.target.fingerprint, ids]).encode()).hexdigest()[:16]


def learnt(record: TrainingRecord) -> frozenset[str] | None:
    """Return the units that a head has learnt from, those of the head that it began with among them. None: nothing says what
    that one had learnt.
    """
    before = record.settings.get(LEARNT, ()) if record.settings.get("init") is None or LEARNT in record.settings else None
    if before is None or not isinstance(before, (list, tuple)) or not all(isinstance(unit, str) for unit in before):
        return None
    return frozenset(before) | frozenset(record.units.train)


def split_words(record: TrainingRecord) -> str:
    """Return how the texts of a head were split, and of a split by time from when its parts begin."""
    begins = record.settings.get(BEGINS)
    if record.settings.get("split") != TIME or not isinstance(begins, dict):
        return "at random: later traffic may be harder than the test part"
    stop, test = (cut(str(begins.get(part, "not known")), 40) for part in (STOP, TEST))
    return f"by time: test part from {test}, stop part from {stop}, training part before both"


def read_training(folder: Path) -> TrainingRecord:
    """Return what training.json in the folder of a head says. Raises `HeadRecordUnreadable`."""
    path = folder / TRAINING
    try:
        return TypeAdapter(TrainingRecord).validate_json(path.read_bytes())
    except OSError as error:
        reason = str(error.strerror)
    except ValidationError as error:
        first = error.errors()[0]
        reason = f"{cut('.'.join(map(str, first['loc'])))}: {first['msg']}"
    raise HeadRecordUnreadable(f"{path} cannot be read: {reason}", AGAIN)
