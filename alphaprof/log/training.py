"""The records of a trained head: training.json, how it was made; and test.parquet, how it did on documents held out.

They are what `alphaprof train` writes into the folder of a head, and all that `alphaprof curve` reads of one. No model is
needed to read them. Everything in them is compared with what is declared here, since a head may come from elsewhere.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from alphaprof.errors import HeadRecordUnreadable, cut
from alphaprof.log.files import shards_of
from alphaprof.log.manifest import Manifest, typed
from alphaprof.log.schema import CATEGORY, Column, violations
from alphaprof.log.split import RANDOM, STOP, TEST, TIME, SplitBy
from alphaprof.log.tables import table_content

TRAINING, TESTS = "training.json", "test.parquet"  # files in the folder of a head
CURVE = "curve.yaml"  # in the folder of heads of growing size
TRAINING_FORMAT, TESTS_FORMAT = "alphaprof-training-1", "alphaprof-tests-1"
DEEPEST = 64  # drafts of a round, at most
AGAIN = "train the head again, or test it: alphaprof curve with --profile tests heads that have no record"
LEARNT = "learnt"  # setting of a training that began with a head: the units that this one had learnt; null: not known
BEGINS = "begins"  # setting of a training on a split by time: the moment at which its stop and test part begin
SLACK = 1e-6  # what sums of float32 and of expectations may be off by, as a share


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
    """How much a head was trained on. `fraction` of the training units, "1/8" or "1"; `order`: seed of the order in which
    units were taken, so that sizes of one order are nested; `tokens` of continuations, `prompt_tokens` before them.
    """

    fraction: str
    order: int
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


@dataclass(frozen=True)
class TrainingBytes:
    """What was needed. `features_on_disk`: 0 where memory held them, or they were made anew; `peak_memory` of the process or
    device.
    """

    features_on_disk: int
    peak_memory: int


@dataclass(frozen=True)
class TestedText:
    """What a head was tested on, stop part included."""

    __test__ = False  # no test of pytest

    documents: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class TrainingRecord:
    """The content of training.json. `settings`: all that fixes the result, by name; `identity`: SHA-256 over settings, texts
    and the head that training began with. `floor`: share of test tokens that no head of this curve can propose, known
    where all have one vocabulary; `uncertainty`: 1 - the mean probability of the target's top token on test text that it
    sampled; None: not known, or there is no such text. `best_step`: the one whose weights were kept, of `steps`.
    """

    alphaprof: str
    status: Literal["running", "complete"]
    run: TrainingRun
    target: TrainingTarget
    settings: dict[str, Any]
    identity: str
    size: TrainingSize
    units: PartUnits
    vocabulary: DraftVocabulary
    floor: float | None
    uncertainty: float | None
    progress: tuple[TrainingProgress, ...]
    best_step: int
    steps: int
    seconds: TrainingSeconds
    bytes: TrainingBytes
    parameters: int
    device: str
    test: TestedText

    def to_json(self) -> str:
        """The text of training.json."""
        return json.dumps({"schema": TRAINING_FORMAT} | dataclasses.asdict(self), indent=1, allow_nan=False) + "\n"


def _list(name: str, doc: str) -> Column:
    return Column(name, pa.list_(pa.field("item", pa.float64(), nullable=False)), doc, low=0)


_EMITTED = "Tokens that rounds emit: all of the continuation but its first, which the prefill emits."
_RIGHT = "Positions that depth d proposes right after the text itself, d = 1 .. G; where acceptance is drawn, its sum."
TEST_COLUMNS = (
    Column("unit", pa.string(), "Digest of the independent unit."),
    Column("part", CATEGORY, f"Part of the unit: {STOP} or {TEST}."),
    Column("domain", CATEGORY, "Domain of the document."),
    Column("text", CATEGORY, "Kind of text: greedy, sampled, given."),
    Column("rule", CATEGORY, "Id of the acceptance rule that rounds follow."),
    Column("tokens", pa.int64(), _EMITTED, "tokens", 0),
    _list("agree", _RIGHT),
    _list("starts", "Positions that have a depth d, d = 1 .. G."),
    _list("rounds", "Rounds at gamma = 1 .. G, nothing capped at the end."),
    _list("accepted", "Rounds at gamma G whose first d drafts were accepted, d = 1 .. G."),
    Column("outside", pa.int64(), "Tokens outside the draft vocabulary, of those that rounds emit.", "tokens", 0),
)


@dataclass(frozen=True)
class HeadTests:
    """The content of test.parquet: a row a document and kind of text. `target`: fingerprint of the target; `texts`:
    `texts_digest` of the run; `head`: what identifies the head's files, "" where the record lies beside them.

    `unit`, `part`, `domain`, `text`, `rule` [rows] are strings; `tokens`, `outside` [rows]; `agree`, `starts`, `rounds`,
    `accepted` [rows, G]: see TEST_COLUMNS.
    """

    target: str
    texts: str
    head: str
    unit: np.ndarray[Any, Any]
    part: np.ndarray[Any, Any]
    domain: np.ndarray[Any, Any]
    text: np.ndarray[Any, Any]
    rule: np.ndarray[Any, Any]
    tokens: np.ndarray[Any, Any]
    agree: np.ndarray[Any, Any]
    starts: np.ndarray[Any, Any]
    rounds: np.ndarray[Any, Any]
    accepted: np.ndarray[Any, Any]
    outside: np.ndarray[Any, Any]

    @property
    def depths(self) -> int:
        """G, the largest gamma."""
        return int(self.rounds.shape[1])

    def rows(self, chosen: np.ndarray[Any, Any]) -> HeadTests:
        """Some of the rows, by a mask or by their numbers."""
        columns = {column.name: getattr(self, column.name)[chosen] for column in TEST_COLUMNS}
        return dataclasses.replace(self, **columns)


def texts_digest(manifest: Manifest) -> str:
    """What identifies the token ids of a run's texts and the target that wrote them: SHA-256, the first 64 bits. A run that
    reuses the texts of another one, with more drafts, has the same.
    """
    files = [(shards_of(name), file.whole) for name, file in manifest.files.items() if name.startswith("continuations/")]
    ids = [whole for _, whole in sorted(files, key=lambda file: file[0] or (0, 0))]  # a name holds what attempt wrote it
    return hashlib.sha256(json.dumps([manifest.target.fingerprint, ids]).encode()).hexdigest()[:16]


def learnt(record: TrainingRecord) -> frozenset[str] | None:
    """The units that a head has learnt from, those of the head that it began with among them. None: nothing says what that
    one had learnt.
    """
    before = record.settings.get(LEARNT, ()) if record.settings.get("init") is None or LEARNT in record.settings else None
    if before is None or not isinstance(before, (list, tuple)) or not all(isinstance(unit, str) for unit in before):
        return None
    return frozenset(before) | frozenset(record.units.train)


def split_of(record: TrainingRecord) -> SplitBy:
    """How the texts of a head were split: at random, unless its record says by time."""
    return TIME if record.settings.get("split") == TIME else RANDOM


def split_words(record: TrainingRecord) -> str:
    """How the texts of a head were split, and of a split by time from when its parts begin."""
    begins = record.settings.get(BEGINS)
    if split_of(record) != TIME or not isinstance(begins, dict):
        return "at random: later traffic may be harder than the test part"
    stop, test = (cut(str(begins.get(part, "not known")), 40) for part in (STOP, TEST))
    return f"by time: the test part from {test} on, the stop part from {stop}, and all to train on was asked before both"


def head_digest(folder: Path) -> str:
    """What identifies the files of a head: SHA-256 over its config.json and weights, the first 64 bits. Raises
    `HeadRecordUnreadable` where there are none.
    """
    names = sorted([folder / "config.json", *folder.glob("*.safetensors")])
    whole = hashlib.sha256()
    try:
        for name in names:
            with name.open("rb") as file:
                whole.update(f"{name.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    except OSError as error:
        hint = "give the folder of a head: config.json and *.safetensors"
        raise HeadRecordUnreadable(f"{folder} is no head: {name.name} cannot be read: {error.strerror}", hint) from None
    return whole.hexdigest()[:16]


def tests_content(tests: HeadTests) -> pa.Buffer:
    """The file of `tests`. Raises `ValueError` for what the columns cannot hold: a bug, not the user's fault."""
    columns = [pa.array(_listed(getattr(tests, column.name)), column.type) for column in TEST_COLUMNS]
    schema = pa.schema([column.field() for column in TEST_COLUMNS], metadata=_metadata(tests))
    if problem := next(_problems(tests), None):
        raise ValueError(f"{TESTS} contradicts itself: {problem}")
    return table_content(pa.table(columns, schema=schema), TEST_COLUMNS, TESTS)


def read_tests(path: Path) -> HeadTests:
    """The tests of a head in a file. Raises `HeadRecordUnreadable`."""
    try:
        table = pq.read_table(path, partitioning=None)
    except FileNotFoundError:
        raise HeadRecordUnreadable(f"{path} does not exist", AGAIN) from None
    except (OSError, pa.ArrowException, ValueError) as error:
        reason = getattr(error, "strerror", None) or next(iter(str(error).splitlines()), "")
        raise HeadRecordUnreadable(f"{path} cannot be read: {cut(reason, 150)}", AGAIN) from None
    known = {key.decode(): value.decode(errors="replace") for key, value in (table.schema.metadata or {}).items()}
    if known.get("format") != TESTS_FORMAT:
        hint = "use the alphaprof that wrote it, or test the head again"
        raise HeadRecordUnreadable(f"{path} is not a record of tests ({TESTS_FORMAT})", hint)
    try:
        tests = _tests_of(table, known)
    except ValueError as error:
        raise HeadRecordUnreadable(f"{path} is damaged: {cut(str(error), 150)}", AGAIN) from None
    return tests


def read_training(folder: Path) -> TrainingRecord:
    """What training.json in the folder of a head says. Raises `HeadRecordUnreadable`."""
    path = folder / TRAINING
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise HeadRecordUnreadable(
            f"{folder} holds no {TRAINING}", "give units and tokens of this head in the list"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or f"it is not JSON ({cut(str(error), 100)})"
        raise HeadRecordUnreadable(f"{path} cannot be read: {reason}", AGAIN) from None
    if not isinstance(data, dict) or data.pop("schema", None) != TRAINING_FORMAT:
        hint = "use the alphaprof that wrote it, or train the head again"
        raise HeadRecordUnreadable(f"{path} is not a record of a training ({TRAINING_FORMAT})", hint)
    try:
        record: TrainingRecord = typed(data, TrainingRecord, "the record")
        if problem := next(_contradictions(record), None):
            raise ValueError(problem)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise HeadRecordUnreadable(f"{path} is damaged: {cut(str(error), 150)}", AGAIN) from None
    return record


def _listed(values: np.ndarray[Any, Any]) -> Any:
    """Values as Arrow takes them: a matrix as a list of rows, strings as Python's."""
    return list(values.astype(np.float64)) if values.ndim == 2 else values.tolist()


def _metadata(tests: HeadTests) -> dict[str, str]:
    return {"format": TESTS_FORMAT, "target": tests.target, "texts": tests.texts, "head": tests.head}


def _tests_of(table: pa.Table, known: dict[str, str]) -> HeadTests:
    """The tests in a table. Raises `ValueError` for what it cannot hold."""
    types = {column.name: column.type for column in TEST_COLUMNS}
    if problem := next(iter(violations(table, TEST_COLUMNS)), None):
        raise ValueError(problem)
    columns: dict[str, np.ndarray[Any, Any]] = {}
    for name, kind in types.items():
        values = table[name].to_pylist()
        if pa.types.is_list(kind) and len({len(row) for row in values}) > 1:
            raise ValueError(f"{name} has lists of different lengths")
        columns[name] = np.array(values, dtype=None if pa.types.is_list(kind) or pa.types.is_integer(kind) else object)
    if not len(table):
        raise ValueError("it holds no document")
    tests = HeadTests(known.get("target", ""), known.get("texts", ""), known.get("head", ""), **columns)
    if problem := next(_problems(tests), None):
        raise ValueError(problem)
    return tests


def _problems(tests: HeadTests) -> Iterator[str]:
    """What tests say that cannot be, beside their types."""
    shapes = {getattr(tests, name).shape for name in ("agree", "starts", "rounds", "accepted")}
    if len(shapes) != 1 or not 1 <= tests.depths <= DEEPEST:
        yield f"its lists have not 1 to {DEEPEST} depths each, the same number"
        return
    if not all(np.isfinite(getattr(tests, name)).all() for name in ("agree", "starts", "rounds", "accepted")):
        yield "a count is not finite"
        return
    if odd := set(tests.part) - {STOP, TEST}:
        yield f"a part is {cut(str(sorted(odd)[0]), 40)}, not {STOP} or {TEST}"
    if (tests.agree > tests.starts * (1 + SLACK)).any():
        yield "more positions are right than there are"
    most, gammas = tests.tokens[:, None] * (1 + SLACK), np.arange(1, tests.depths + 1)
    if (tests.rounds > most).any() or (tests.rounds * (gammas + 1) < tests.tokens[:, None] * (1 - SLACK)).any():
        yield "rounds emit less than one token each, or more than gamma + 1"
    falling = np.column_stack([tests.rounds[:, -1], tests.accepted])
    if (np.diff(falling) > SLACK * most).any():
        yield "more rounds accepted a draft than reached it"
    if (tests.outside > tests.tokens).any():
        yield "more tokens are outside the vocabulary than there are"


def _contradictions(record: TrainingRecord) -> Iterator[str]:
    """What a record says that cannot be, beside its types."""
    size, target, tested = record.size, record.target, record.test
    counts: Sequence[float] = (
        *(size.units, size.documents, size.tokens, size.prompt_tokens, target.hidden_size, target.layers, target.vocabulary),
        *(tested.documents, tested.tokens, record.best_step, record.steps, record.parameters, record.vocabulary.size),
        *(*dataclasses.astuple(record.seconds), *dataclasses.astuple(record.bytes)),
    )
    if min(counts) < 0:
        yield "a count or a time is negative"
    shares = [record.vocabulary.ceiling_test, record.floor, record.uncertainty]
    if any(share is not None and not 0 <= share <= 1 for share in shares):
        yield "a share is not between 0 and 1"
    try:
        fraction_of(size.fraction)
    except ValueError:
        yield f"the fraction {cut(size.fraction, 40)!r} is not like 1/8 or 1"
    if len(set(record.units.train)) != size.units:
        yield f"it names {len(set(record.units.train))} training units, and says that there were {size.units}"
    parts = [set(part) for part in dataclasses.astuple(record.units)]
    if any(one & two for one, two in ((parts[0], parts[1]), (parts[0], parts[2]), (parts[1], parts[2]))):
        yield "a unit is in two of its parts"


def fraction_of(text: str) -> float:
    """The number of a fraction like "1/8" or "1", above 0 and at most 1. Raises `ValueError`."""
    above, _, below = text.partition("/")
    if not (above.isdecimal() and (below or "1").isdecimal() and len(text) <= 20) or int(below or 1) == 0:
        raise ValueError(text)
    value = int(above) / int(below or 1)
    if not 0 < value <= 1 or not math.isfinite(value):
        raise ValueError(text)
    return value
