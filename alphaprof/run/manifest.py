"""What a run says of itself, JSON at the edge and dataclasses inside: the manifest, what was run and on what; and records of
what each step has written, shard by shard.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import datetime
import functools
import hashlib
import json
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Interval
from typing_extensions import TypedDict  # typing's cannot be validated before Python 3.12

from alphaprof.config.paths import KEPT
from alphaprof.errors import ProfileInvalid, RunDamaged, RunUnreadable, cut, shown, without_secrets

if TYPE_CHECKING:
    import pyarrow as pa

    from alphaprof.config.engines import Engine, Method
    from alphaprof.config.profile import ProfileOptions
    from alphaprof.run.storage import Storage

MANIFEST = "manifest.json"
FORMAT = "alphaprof-run"
LATENCY, ENGINES, DOCUMENTS = "latency.parquet", "engines.parquet", "documents.parquet"
UNFINISHED = "unfinished.parquet"  # texts of a shard that was interrupted
NUMERIC = ("torch", "transformers")  # packages whose versions rows depend on
VERSION = 10
LONG = ("records", "shards", "files")  # what there is of every shard
FILES = "files-"  # how the fingerprint of a model begins that is made of the SHA-256 of its files
PARTIAL = "partial-"  # how the fingerprint of a model begins whose files are not known
Drafting = Literal["chain", "tree", "adaptive"]  # what an engine drafted in a round: see `Imported`
CHAIN: Drafting = "chain"
UNKNOWN_DTYPE = "dtype unknown"  # of a target that an engine served
PROMPTS_KNOWN_BY = ("token ids", "text", "request id")  # what prompts are known by, the best first
NO_PROMPT = (None, PROMPTS_KNOWN_BY[-1])  # what requests are known by if the log does not hold all prompts
LOG_PROMPTS = "log prompt_token_ids with every request (return_token_ids: true; a stream sends them in its first chunk)"


PART = re.compile(r"\d{1,9}/[1-9]\d{0,8}")
Count = Annotated[int, Interval(ge=0, le=2**53)]
Depth = Annotated[int, Interval(ge=0, le=1000)]  # what is counted depth by depth


class Stored:
    """What a run's JSON files hold: a stranger may have written them, so types and bounds are checked."""

    __pydantic_config__: ClassVar = {"extra": "forbid", "allow_inf_nan": False}


class Environment(TypedDict, total=False):
    """What a step of a run was measured with; of an imported run nothing is known. `device_memory`: bytes of one device;
    `statistics`: what was computed of the same logits always (see `dispatch.checksum`); `engine`: variables in which the
    profile's vLLM ran; `timing_waiting`: the share of step times in which the steps waited for a CPU, if
    that is known; 0 where they are CPU seconds.
    """

    device: str
    device_memory: int | None
    python: str
    platform: str
    cores: int | None
    torch_threads: int
    packages: dict[str, str]
    statistics: str
    engine: dict[str, str]
    timing_waiting: float | None


def differences(before: Environment, here: Environment) -> list[str]:
    """Return in what this process computes otherwise than one before, in words: its rows could differ."""
    found = [] if here["device"] == before["device"] else [f"device {here['device']}, not {before['device']}"]
    if here["device"] == "cpu" and here["torch_threads"] != before["torch_threads"]:
        found.append(f"{here['torch_threads']} threads, not {before['torch_threads']}")
    for name in NUMERIC if here["device"] == "cpu" else (*NUMERIC, "triton"):  # whose kernels compute rows on GPUs
        mine, theirs = (each["packages"].get(name) for each in (here, before))
        found += [f"{name} {mine}, not {theirs}"] if mine != theirs else []
    if before.get("statistics") != here.get("statistics"):
        found.append("other statistics of the same logits")
    return found


@dataclass(frozen=True)
class File(Stored):
    """A data file as it was written: its `size` in bytes, and SHA-256, the first 128 bits in base64: there are thousands."""

    size: Count
    sha256: str

    @classmethod
    def of(cls, content: bytes | pa.Buffer) -> File:
        """Return what identifies a file with this content."""
        return cls(len(memoryview(content)), base64.urlsafe_b64encode(hashlib.sha256(content).digest()[:16]).decode()[:22])


@dataclass(frozen=True)
class Shard(Stored):
    """One complete shard: `digest` is of the token ids of its documents as they were read (SHA-256, 128 bits)."""

    index: Count
    documents: Count
    positions: Count
    digest: str
    halved_batches: Count = 0


@dataclass(frozen=True)
class Quantisation(Stored):
    """How the weights of a model are quantised, and what computed with them."""

    method: str  # as its config names it
    bits: int | None  # of a weight, if its config says so
    kernels: dict[
        str, int
    ]  # layers by class; none: no kernel ran, transformers turned the weights into the dtype at loading


@dataclass(frozen=True)
class ModelFacts(Stored):
    """What identifies a model and what analysis needs to know about it. Of a model that another engine ran (an imported run)
    `parameters`, `vocabulary`, `noise` and `special` are None, and words say "unknown".
    """

    reference: str  # as the profile names it: hub id, directory or file
    kind: str  # a label: of a draft its `kind` in the profile; served: another engine ran it
    architecture: str  # its class
    fingerprint: str  # SHA-256 over its configuration and its files; equal ones: the same model, but for `PARTIAL`
    dtype: str  # of its weights
    device: str  # that it ran on
    parameters: Count | None  # number of parameters
    context: Count | None  # in tokens; None: unlimited
    vocabulary: Count | None  # number of logits
    eos: tuple[int, ...]  # ids that end a text
    noise: float | None  # the difference of two logits below which this dtype cannot be trusted to order them
    shape: dict[str, float | bool] | None = None  # fields of `ModelShape`; None: no model, or bytes and FLOPs are not known
    special: tuple[int, ...] | None = None  # ids of the target's tokenizer that are no text (ends of turn); None for drafts
    quantised: Quantisation | None = None  # None: its weights are not, or it is not known

    @property
    def computes_in(self) -> str:
        """The method of quantised weights if kernels for them ran, else the dtype; `served_dtype` is compared with it."""
        if self.quantised is None or not self.quantised.kernels:
            return self.dtype
        return "fp8" if "fp8" in self.quantised.method else self.quantised.method  # fbgemm_fp8 and others

    @property
    def precision(self) -> str:
        """The dtype and, of a quantised model, the method, the bits and the kernels that ran, in words."""
        if self.quantised is None:
            return self.dtype
        bits = f" {self.quantised.bits}-bit" if self.quantised.bits is not None else ""
        kernels = ", ".join(f"{number} {name}" for name, number in self.quantised.kernels.items())
        return f"{self.dtype}, weights {self.quantised.method}{bits} ({kernels or 'dequantized, no kernel ran'})"

    @property
    def is_exact(self) -> bool:
        """Whether it computes in float32 throughout, so that equal text gives equal tokens. Kernels for quantised weights
        may round what they multiply as well.
        """
        return self.dtype == "float32" and not (self.quantised and self.quantised.kernels)

    @property
    def measured_noise(self) -> float:
        """`noise` of a model that positions were measured with. Raises `ValueError` for one that another engine ran."""
        if self.noise is None:
            raise ValueError(f"no position was measured with {self.reference}")
        return self.noise


def differing(old: ModelFacts, new: ModelFacts) -> list[str]:
    """In which facts two models differ; where they lie does not matter, nor what other facts say already."""
    elsewhere = ("reference", "shape", "special", "trials")  # tokenizers are compared by themselves
    return [name for name in vars(old) if name not in elsewhere and getattr(old, name) != getattr(new, name)]


@dataclass(frozen=True)
class Trial(Stored):
    """What a reading of a head's files would get accepted on some texts."""

    changed: str  # what differs from the reading that was measured; empty: that one
    depth: int  # of the drafts that were counted
    acceptance: float  # share of them that are the target's tokens
    ahead: float  # by how much that is more than the reading that was measured gets, on the same texts
    error: float  # standard error of `ahead`, paired
    positions: int  # that both were counted on
    engines: tuple[str, ...] = ()  # whose reading it is, or has what differs


@dataclass(frozen=True)
class Hybrid(Stored):
    """A draft made of two others of the run, which has no log of its own: a round drafts from prompt lookup (`first`) if at
    least `min_match` tokens before it were found in the text, else from `then`.
    """

    first: str  # name of a prompt lookup draft
    then: str  # name of the other one
    min_match: int = 1  # tokens that the first must have found


@dataclass(frozen=True, kw_only=True)
class DraftFacts(ModelFacts):
    """What identifies a draft, and what it can do: reports, costs and exports ask these flags, never its kind.

    `has_distribution`: q is known at every position, so that the log holds its columns; `has_steps`: it runs a model, whose
    steps take time and whose prompts are read (else a round costs one search, however much it proposes);
    `shares_target_weights`: that model's weights are the target's; `starts_matter`: what it proposes at a position depends
    on where the round starts, so that the log holds `accepted_run`. `settings`: what engines must be given for it to draft
    as here; `foreign`: engines that have a method for its kind, and do not take this one.

    Of a head, whose proposal depends on how many drafts came before it in its round: `depths`: how many it was measured for
    (None: a draft that is the same at every depth), so that the log holds columns by depth; `in_one_step`: all of its
    depths are drafted together, from one state of the target; `reduced_vocabulary`: some of the target's tokens it can never
    propose; `own_path`: it read its own drafts where text was not sampled, so that the log holds whole rounds;
    `has_confidence`: it says of each draft how probably it is accepted, and the log holds that; `reading`: how its files
    were read, as name and value in words; `trials`: what other readings would get accepted.
    `hybrid`: the drafts that it is made of; None: it is one by itself.
    """

    has_distribution: bool
    has_steps: bool
    shares_target_weights: bool = False
    starts_matter: bool = False
    settings: dict[str, int | float | str] = field(default_factory=dict)
    foreign: tuple[str, ...] = ()
    depths: Annotated[Depth, Ge(1)] | None = None
    in_one_step: bool = False
    reduced_vocabulary: bool = False
    own_path: bool = False
    has_confidence: bool = False
    hybrid: Hybrid | None = None
    reading: dict[str, str] = field(default_factory=dict)
    trials: tuple[Trial, ...] = ()

    @property
    def by_depth(self) -> bool:
        """Whether it is a head: what it proposes, and how good that is, depends on how deep in a round it is proposed."""
        return self.depths is not None

    def lengths(self, gammas: Iterable[int]) -> list[int]:
        """Return those of some γ that it has rounds of: of a head up to its depths, of a `block` its own alone."""
        block = self.settings.get("block")
        known = (gamma for gamma in gammas if self.depths is None or gamma <= self.depths)
        return [gamma for gamma in known if block in (None, gamma + 1)]

    @property
    def own_model(self) -> str | None:
        """The reference of a model with weights of its own; None: it has none."""
        return self.reference if self.has_steps and not self.shares_target_weights else None

    def method_in(self, engine: Engine) -> Method | None:
        """Return how an engine drafts as it does; None: it does not."""
        method = None if engine.name in self.foreign else engine.methods.get(self.kind)
        picks = method is not None and method.picked and "candidates" in self.reading
        return replace(method, rules=method.picked) if method is not None and picks else method


@dataclass(frozen=True, kw_only=True)
class Imported(Stored):
    """Where an imported run comes from. `prompts_known_by`: what tells prompts apart: token ids, text or request id; None:
    nothing does. Of its requests: those `without_steps` (no round with a draft), `plain_steps` (rounds without a draft that
    follow from the tokens), and drafts accepted `beyond_the_end` of texts. `drafting`: a chain of gamma tokens each
    round; a tree of gamma levels, or a number of steps that adapts itself, up to gamma: then no counts by depth are known.
    """

    engine: str
    files: tuple[str, ...]
    rule: str
    gamma: Annotated[Depth, Ge(1)]
    sampling: dict[str, float] | None
    prompts_known_by: str | None
    without_steps: Count
    plain_steps: Count
    beyond_the_end: Count
    drafting: Drafting = CHAIN


LEFT_OUT = {  # the beginning of a reason, and what to do about it
    "with a row that": "see their lines and reasons in the output of the run, or of profile --dry-run",
    "with nothing in": "fill this column, or drop these rows",
    "with an empty": "check the columns that prompts and responses are made of",
    "with a prompt shorter": "lower min_prompt_tokens to keep them",
    "with no text beyond": "lower prompt_tokens to keep them",
    "longer than": "lower max_new_tokens, or set too_long: truncate, to keep them",
    "sources read no further": "set shuffle_seed to mix the rows, or give each domain a source",
    "cut prompts lost": "leave long documents out (too_long: skip), or cut prompts as your server does and give prompt_ids",
    "texts cut": "expect a different acceptance than on whole texts",
    "prompts without": 'name it in the source if your server puts it into the prompt, like system: "{system_prompt}"',
    "prompts cut": "expect a different acceptance than on whole texts",
    "whose text the benchmark": "fetch them with prepare_data.py of NVIDIA's specdec_bench, and give its file as path",
    "that data.where": "check the columns and values of where",
}


def left_out_remedy(reason: str) -> str:
    """Return what to do about a reason of `Manifest.skipped` or `Manifest.truncated`."""
    return next((remedy for start, remedy in LEFT_OUT.items() if reason.startswith(start)), "see docs/import.md")


@dataclass(frozen=True)
class Manifest(Stored):
    """The content of manifest.json, which is written when prompts are staged and checked, and when the run is complete:
    `status` is running in between. `files`: every data file of the run, by its path below the run's directory; these and
    `shards` follow from the records of a run that is running. `part`: which blocks of documents it has, I/N (0/1: all);
    `staged`: shards whose prompts are written, of an import none;
    `environment`: of the step that scored; `texts_environment`: of the one that wrote the texts, if that was on another
    machine; `warnings`: code, message and remedy of each; `reused`: the run whose continuations were measured again, None if
    they are this run's own; `certified`: see `LogRules`; `imported`: of a run that was imported from an engine's
    metrics (see `importing`); else None; `table`: the rows of the file of step times that `costs.path` named, which is not
    read again: of a run that was read, the path begins with KEPT.
    """

    status: Literal["running", "complete"]
    alphaprof: str
    created: str
    config: dict[str, Any]
    target: ModelFacts
    drafts: dict[str, DraftFacts]
    tokenizer: str
    environment: Environment
    texts_environment: Environment | None = None
    part: str = "0/1"
    staged: Annotated[int, Interval(ge=0, le=10**6)] = 0
    shards: tuple[Shard, ...] = ()
    files: dict[str, File] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    truncated: dict[str, int] = field(default_factory=dict)
    warnings: tuple[dict[str, str], ...] = ()
    reused: str | None = None
    certified: tuple[str, ...] = ()
    imported: Imported | None = None
    table: tuple[dict[str, Any], ...] | None = None

    @property
    def models(self) -> dict[str, ModelFacts]:
        """The target and the drafts by their names in messages."""
        return {"target": self.target, **self.drafts}

    @functools.cached_property
    def profile(self) -> ProfileOptions:
        """The options that `config` holds. Raises `RunUnreadable` for those of another version."""
        from alphaprof.config.load import validate  # what validates profiles takes a while to load
        from alphaprof.config.options import STORED

        try:
            return validate(self.config, "the profile of the run", STORED)
        except ProfileInvalid as error:
            raise RunUnreadable(
                error.message, f"read it with the alphaprof that wrote it, {self.alphaprof}, or profile again"
            ) from None

    @property
    def documents(self) -> int:
        """Documents in complete shards."""
        return sum(shard.documents for shard in self.shards)

    @property
    def positions(self) -> int:
        """Positions in complete shards."""
        return sum(shard.positions for shard in self.shards)

    @property
    def timed_in(self) -> str:
        """In which environment an engine timed the steps, for who starts the server; empty if none did."""
        if "engine" not in self.environment or self.config["costs"]["source"] != "vllm":
            return ""
        named = " ".join(f"{name}={shlex.quote(text)}" for name, text in self.environment["engine"].items())
        return f"vLLM timed its steps with {named or 'none of OMP_*, NUMBA_* and VLLM_* set'}: start the server so too"

    @property
    def drafting(self) -> Drafting:
        """What the rounds drafted: chains, unless another engine did otherwise."""
        return self.imported.drafting if self.imported is not None else CHAIN

    def to_json(self) -> str:
        """Return the text of manifest.json."""
        kept = self
        if self.status == "running":  # records say the rest
            files = {name: file for name, file in self.files.items() if name in (LATENCY, UNFINISHED)}
            kept = dataclasses.replace(self, shards=(), files=files)
        data = dataclasses.asdict(dataclasses.replace(kept, files={}))
        data |= {name: without_secrets(data[name]) for name in ("config", "environment", "warnings")}
        return signed({"format": FORMAT, "version": VERSION} | data | {"files": listed(kept.files)})


def listed(files: dict[str, File]) -> dict[str, list[int | str]]:
    """Return files as JSON has them, without the names of their fields: there are thousands."""
    return {name: [file.size, file.sha256] for name, file in files.items()}


def named(files: dict[str, list[int | str]]) -> dict[str, dict[str, int | str]]:
    """Return files that are `listed` with the names of their fields. Raises what `undamaged` takes for damage."""
    return {name: dict(zip(("size", "sha256"), each, strict=True)) for name, each in files.items()}


def signed(data: dict[str, Any]) -> str:
    """JSON with its digest; what there may be thousands of stands in a line each."""
    data = data | {"digest": digest_of(data)}
    texts = []
    for name, value in data.items():
        text = json.dumps(value, indent=2, allow_nan=False).replace("\n", "\n  ")
        if name in LONG and value:
            keys = [f"{json.dumps(key)}:" for key in value] if isinstance(value, dict) else [""] * len(value)
            items = value.values() if isinstance(value, dict) else value
            lines = [
                key + json.dumps(item, separators=(",", ":"), allow_nan=False) for key, item in zip(keys, items, strict=True)
            ]
            begin, end = "{}" if isinstance(value, dict) else "[]"
            text = "\n".join([begin, ",\n".join(lines), f"  {end}"])
        texts.append(f"  {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(texts) + "\n}"


def digest_of(data: dict[str, Any]) -> str:
    """SHA-256 over the content of a manifest or of records, the first 128 bits. Its own "digest" is left out; order and
    white space do not matter.
    """
    content = {name: value for name, value in data.items() if name != "digest"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:32]


def read_manifest(storage: Storage) -> Manifest:
    """Return the manifest of the run in storage. Raises `RunUnreadable`."""
    data = read_signed(storage, MANIFEST, FORMAT)
    if data is None:
        hint = "give the directory that `alphaprof profile --out` wrote"
        folder, _, draft = str(storage.shown).rpartition(":")
        if folder and Path(folder, MANIFEST).exists():
            asked = "choose a draft with report --set decision.draft=NAME or check --draft NAME"
            hint = f"{folder} is a run: leave :{cut(draft)} out; {asked}"
        if storage.names("records") or storage.names("prompts"):
            hint = "wait if the run is still starting; if it was interrupted, run alphaprof profile --resume"
        raise RunUnreadable(f"{storage.shown} holds no run (no {MANIFEST})", hint)
    with undamaged(storage, MANIFEST):
        manifest: Manifest = typed(data | {"files": named(data["files"])}, Manifest)
        if problem := next(_problems(manifest), ""):
            raise ValueError(problem)
        costs = manifest.config.get("costs")
        if isinstance(costs, dict) and costs.get("source") == "table" and not str(costs.get("path")).startswith(KEPT):
            costs["path"] = f"{KEPT}{costs.get('path')}"
    if {*manifest.profile.drafts} != {*manifest.drafts}:
        raise RunDamaged(
            f"{storage.shown}/{MANIFEST} is damaged: its drafts are not those of its profile", _mended(MANIFEST)
        )
    return manifest


def _problems(manifest: Manifest) -> Iterator[str]:
    """Yield what fields cannot be beside each other."""
    index, _, count = manifest.part.partition("/")
    if not PART.fullmatch(manifest.part) or int(index) >= int(count):
        yield f"part is {shown(manifest.part)}"
    if [shard.index for shard in manifest.shards] != list(range(len(manifest.shards))):
        yield "shards are not in order"
    if manifest.status == "complete" and manifest.imported is None and len(manifest.shards) < manifest.staged:
        yield f"{manifest.staged} shards are staged, and {len(manifest.shards)} complete"
    lacking = {"device", "torch_threads", "packages"} - manifest.environment.keys()
    if manifest.target.noise is not None and lacking:
        yield f"environment has no {min(lacking)}"
    if any(warning.keys() != {"code", "message", "remedy"} for warning in manifest.warnings):
        yield "a warning is not code, message and remedy"


def now() -> str:
    """Return the time as files of a run say it, in seconds and UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def part_name(index: int) -> str:
    """Return the name of the file of a shard in any folder."""
    return f"part-{index:05d}.parquet"


def read_signed(storage: Storage, name: str, kind: str) -> dict[str, Any] | None:
    """Return the fields of a JSON file that is signed; None if it is missing. Raises `RunUnreadable`."""
    where = f"{storage.shown}/{name}"
    try:
        data = json.loads(storage.read(name))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise RunUnreadable(f"{where} cannot be read: {error.strerror or error}", "give read access to it") from None
    except (ValueError, RecursionError) as error:
        raise RunDamaged(f"{where} cannot be read: it is not JSON ({str(error)[:100]})", _mended(name)) from None
    if not isinstance(data, dict) or (data.get("format"), data.get("version")) != (kind, VERSION):
        if kind != FORMAT:  # records, of a run whose manifest is of this version
            raise RunDamaged(f"{where} is damaged: it holds no records", _mended(name))
        older = isinstance(data, dict) and data.get("format") == kind
        hint = f"measure it again: alphaprof profile PROFILE --out {shlex.quote(storage.shown)}-again"
        what = f"version {data.get('version')} of an alphaprof run, not version {VERSION}" if older else "no file of a run"
        raise RunUnreadable(f"{where} is {what}", hint)
    with undamaged(storage, name):
        if data.pop("digest", None) != digest_of(data):
            raise ValueError("its content does not match its digest: it was edited or corrupted")
    return {key: value for key, value in data.items() if key not in ("format", "version")}


@contextlib.contextmanager
def undamaged(storage: Storage, name: str) -> Iterator[None]:
    """Raise `RunDamaged` for what its content cannot be."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RunDamaged(f"{storage.shown}/{name} is damaged: {str(error)[:150]}", _mended(name)) from None


def _mended(name: str) -> str:
    """Return what to do about a damaged file; of records there are many."""
    if name == MANIFEST:
        return "restore the original, or profile again into a new directory"
    return "measure its shards again with alphaprof profile --resume"


def typed(value: Any, hint: Any) -> Any:
    """Return a value of JSON as what a type declares, in dataclasses. Raises `ValueError`, which names the first problem."""
    from pydantic import ValidationError

    try:
        return _adapter(hint).validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"{place} is {shown(first['input'])}: {first['msg']}") from None


@functools.cache
def _adapter(hint: Any) -> Any:
    from pydantic import TypeAdapter  # what takes a while to load

    return TypeAdapter(hint)
