"""The manifest of a run: what was run, on what, and which shards are complete. JSON at the edge, dataclasses inside."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from alphaprof.errors import RunUnreadable

FORMAT = "alphaprof-run"
VERSION = 1
PARTIAL = "partial-"  # how the fingerprint of a model begins of which not all weights could be read
SERVED = "served"  # the kind of models that another engine ran
Drafting = Literal["chain", "tree", "adaptive"]  # what an engine drafted in a round: see `Imported`
CHAIN: Drafting = "chain"
ADAPTIVE: Drafting = "adaptive"


@dataclass(frozen=True)
class Shard:
    """One complete shard: `digest` is the SHA-256 over the token ids of its documents as they were read.

    Of the scoring batches as planned (before any was halved) `scored_tokens` of texts, which every model reads once, and
    `scored_padding` beside them; of generation `prompt_tokens` and `prompt_padding` likewise. 0 in shards of older versions,
    which did not count.
    """

    index: int
    documents: int
    positions: int
    digest: str
    halved_batches: int = 0
    scored_tokens: int = 0
    scored_padding: int = 0
    prompt_tokens: int = 0
    prompt_padding: int = 0


@dataclass(frozen=True)
class ModelFacts:
    """What identifies a model and what analysis needs to know about it.

    `context` is in tokens (None: unlimited); `eos` lists the ids that end a text; `noise` is the difference of two
    logits below which this dtype cannot be trusted to order them; `special`: ids of the target's tokenizer that are no text
    (ends of turn, template markers), None where that is not known (drafts, older runs); `shape`: the fields of
    `analysis.shapes.ModelShape`, None where the architecture is not one whose bytes and FLOPs are known, or where there is
    no model. Of a model that another engine ran (an imported run) `parameters`, `vocabulary` and `noise` are None, and words
    say "unknown".
    """

    reference: str  # as the profile names it: hub id, directory or file
    kind: str  # model, layer_skip or prompt_lookup; served: another engine ran it
    architecture: str  # its class
    fingerprint: str  # SHA-256 over its configuration and its weights; equal ones: the same draft
    dtype: str  # of its weights
    device: str  # that it ran on
    parameters: int | None  # number of parameters
    context: int | None
    vocabulary: int | None  # number of logits
    eos: tuple[int, ...]
    noise: float | None
    shape: dict[str, float | bool] | None = None
    special: tuple[int, ...] | None = None

    @property
    def measured_noise(self) -> float:
        """`noise` of a model that positions were measured with. Raises `ValueError` for one that another engine ran."""
        if self.noise is None:
            raise ValueError(f"no position was measured with {self.reference}")
        return self.noise


@dataclass(frozen=True, kw_only=True)
class Imported:
    """Where an imported run comes from. `prompts_known_by`: what tells prompts apart: token ids, text or request id; None:
    nothing does. Of its requests: those `without_steps` (no round with a draft), `plain_steps` (rounds without a draft that
    follow from the tokens), and drafts accepted `beyond_the_end` of texts. `drafting`: a chain of gamma tokens each
    round; a tree of gamma levels, or a number of steps that adapts itself, up to gamma: then no counts by depth are known.
    """

    engine: str
    files: tuple[str, ...]
    rule: str
    gamma: int
    sampling: dict[str, float] | None
    prompts_known_by: str | None
    without_steps: int
    plain_steps: int
    beyond_the_end: int
    drafting: Drafting = CHAIN


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json. `status` is running until every shard is written; `reused`: the run whose continuations
    were measured again, None where they are this run's own; `emitted`, `certified`: see `LogRules`; `sequential`:
    what `profiling.random_order` says of documents that came in random order, until the verdict was sure; else None;
    `imported`: of a run that was imported from an engine's metrics (see `importing`); else None.
    """

    status: Literal["running", "complete"]
    alphaprof: str
    created: str
    config: dict[str, Any]
    target: ModelFacts
    drafts: dict[str, ModelFacts]
    tokenizer: str
    environment: dict[str, Any]
    shards: tuple[Shard, ...] = ()
    skipped: dict[str, int] = field(default_factory=dict)
    truncated: dict[str, int] = field(default_factory=dict)
    warnings: tuple[dict[str, str], ...] = ()
    reused: str | None = None
    emitted: tuple[str, ...] = ()
    certified: tuple[str, ...] = ()
    sequential: dict[str, Any] | None = None
    imported: Imported | None = None

    @property
    def documents(self) -> int:
        """Documents in complete shards."""
        return sum(shard.documents for shard in self.shards)

    @property
    def positions(self) -> int:
        """Positions in complete shards."""
        return sum(shard.positions for shard in self.shards)

    @property
    def drafting(self) -> Drafting:
        """What the rounds drafted: chains, but where another engine did otherwise."""
        return self.imported.drafting if self.imported is not None else CHAIN

    def to_json(self) -> str:
        """The text of manifest.json."""
        return json.dumps({"format": FORMAT, "version": VERSION} | dataclasses.asdict(self), indent=2, allow_nan=False)


def read_manifest(run: Path) -> Manifest:
    """The manifest of the run in a directory. Raises `RunUnreadable`."""
    path = run / "manifest.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunUnreadable(
            f"{run} holds no run (no manifest.json)", "give the directory that `alphaprof profile --out` wrote"
        ) from None
    except (OSError, ValueError) as error:
        raise RunUnreadable(f"{path} cannot be read: {error}", "profile again into a new directory") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("version") != VERSION:
        raise RunUnreadable(
            f"{path} is not version {VERSION} of an alphaprof run", "use the alphaprof that wrote it, or profile again"
        )
    return _parse(data, path)


def _parse(data: dict[str, Any], path: Path) -> Manifest:
    hints = get_type_hints(Manifest)
    try:
        values = {name: value for name, value in data.items() if name in hints}
        values["target"] = _facts(values["target"])
        values["drafts"] = {name: _facts(facts) for name, facts in values["drafts"].items()}
        values["shards"] = tuple(Shard(**shard) for shard in values["shards"])
        values |= {name: tuple(values.get(name, ())) for name in ("warnings", "emitted", "certified")}
        if values.get("imported") is not None:
            found = values["imported"]
            values["imported"] = Imported(**{**found, "files": tuple(found["files"])})
        if odd := [name for name, value in values.items() if not _fits(value, hints[name])]:
            raise TypeError(f"{', '.join(odd)} of another type than expected")
        return Manifest(**values)
    except (KeyError, TypeError, AttributeError) as error:
        raise RunUnreadable(f"{path} is damaged: {error}", "profile again into a new directory") from None


def _fits(value: object, hint: Any) -> bool:
    """Whether a field's value is of the kind that its annotation names, without a look at what it contains."""
    origin = get_origin(hint)
    if origin is Literal:
        return value in get_args(hint)
    if origin is UnionType:
        return any(_fits(value, choice) for choice in get_args(hint))
    return isinstance(value, origin or hint)


def _facts(data: dict[str, Any]) -> ModelFacts:
    special = data.get("special")
    return ModelFacts(**{**data, "eos": tuple(data["eos"]), "special": special if special is None else tuple(special)})
