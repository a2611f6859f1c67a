"""The profile file: every option declared once, with its type, default, limits and meaning.

The command line, the manifest and the reference derive from these classes. Precedence: default < file < `--set`.
"""

from __future__ import annotations

import os
import re
import string
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from alphaprof.analysis.rules import RULES, rule_id

Dtype = Literal["float32", "bfloat16", "float16"]
DRAFT_NAME = re.compile(r"[a-z][a-z0-9_-]*")
GAMMA_LIMIT = 64
Whole = Annotated[int, Field(strict=True)]  # YAML's yes and on are not 1


class Options(BaseModel):
    """Base of all option groups: unknown keys are errors and values never change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelOptions(Options):
    """How to load a model: a hub id, a local directory, or a .gguf file."""

    model: str = Field(
        min_length=1, description="hub id, local directory or .gguf file; relative paths start at the profile file"
    )
    revision: str | None = Field(None, description="branch, tag or commit on the hub")
    trust_remote_code: bool = Field(False, description="run Python code that comes with the model")
    device: str = Field("auto", description="auto (CUDA where there is one, else CPU), cpu, cuda, cuda:1")
    device_map: str | None = Field(None, description="spread one model over several devices, e.g. auto")


class TargetOptions(ModelOptions):
    """The model that is served; its tokenizer encodes the text for every draft as well."""

    dtype: Dtype = Field("bfloat16", description="profile in the dtype that is served: near-ties depend on it")


class ModelDraft(ModelOptions):
    """An independent draft model."""

    kind: Literal["model"]
    dtype: Dtype | None = Field(None, description="default: the target's")


class LayerSkipDraft(Options):
    """The target without some of its layers: shared weights, its own KV cache."""

    kind: Literal["layer_skip"]
    drop_layers: list[Whole] = Field(min_length=1, description="0-based indices of the target's layers that are left out")

    @field_validator("drop_layers")
    @classmethod
    def _distinct(cls, layers: list[int]) -> list[int]:
        if len(set(layers)) != len(layers) or min(layers) < 0:
            raise ValueError("must be distinct indices, 0 or above")
        return sorted(layers)


DraftOptions = Annotated[ModelDraft | LayerSkipDraft, Field(discriminator="kind")]


class GreedyContinuation(Options):
    """The target's own greedy continuation."""

    kind: Literal["greedy"] = "greedy"
    max_new_tokens: Whole = Field(256, ge=1, le=1_000_000, description="tokens at which a document ends without EOS")


class GivenContinuation(Options):
    """Logged responses: text, or token ids that are never re-tokenised."""

    kind: Literal["given"]
    column: str = Field(description="column with the response, as text or as a list of token ids")
    on_policy: bool = Field(False, description="states that this target produced the responses, greedily")
    max_new_tokens: Whole | None = Field(None, ge=1, description="cut longer responses (counted); default: no limit")


ContinuationOptions = Annotated[GreedyContinuation | GivenContinuation, Field(discriminator="kind")]


class DomainColumn(Options):
    """The domain of a document stands in a column of its row."""

    column: str


class SourceOptions(Options):
    """One dataset: where it lies, how a row becomes a prompt, and which domain it belongs to."""

    domain: str | DomainColumn = Field(description="name of the domain, or {column: NAME}")
    path: str = Field(
        min_length=1, description="hub id, or local .jsonl, .json, .csv, .parquet or .txt; relative to the profile"
    )
    name: str | None = Field(None, description="configuration of a hub dataset")
    split: str = Field("train", description="split of a hub dataset")
    revision: str | None = Field(None, description="branch, tag or commit on the hub")
    prompt: str | None = Field(None, description='template over the columns, e.g. "{prompt}"')
    messages: str | None = Field(None, description="column with chat messages (role, content)")
    prompt_ids: str | None = Field(None, description="column with the prompt's token ids")
    chat: bool = Field(False, description="wrap the rendered prompt as one user turn of the chat template")
    system: str | None = Field(None, description="system message, with chat: true")
    chat_options: dict[str, Any] = Field({}, description="variables of the chat template, e.g. {enable_thinking: false}")
    continuation: ContinuationOptions | None = Field(None, description="default: the profile's continuation")
    cluster: str | None = Field(
        None, description="column that groups dependent documents of this source, e.g. a conversation id"
    )
    limit: Whole | None = Field(None, ge=1, description="most documents taken from this source")
    shuffle_seed: Whole | None = Field(None, ge=0, description="shuffle rows with this seed before the limit applies")
    shuffle_buffer: Whole = Field(10_000, ge=1, description="rows held while shuffling a stream")
    too_long: Literal["skip", "truncate"] = Field(
        "skip", description="documents beyond the target's context: leave out, or drop the beginning of the prompt"
    )

    @field_validator("prompt")
    @classmethod
    def _template(cls, prompt: str | None) -> str | None:
        if prompt is not None:
            template_parts(prompt)
        return prompt

    @model_validator(mode="after")
    def _one_prompt(self) -> SourceOptions:
        given = [name for name in ("prompt", "messages", "prompt_ids") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"needs exactly one of prompt, messages, prompt_ids (has {', '.join(given) or 'none'})")
        if self.chat and self.prompt is None:
            raise ValueError("chat: true goes with prompt; messages always pass through the chat template")
        if self.system is not None and not self.chat:
            raise ValueError("system goes with chat: true; put it into messages otherwise")
        return self


class CostOptions(Options):
    """Where step times come from."""

    source: Literal["measured"] = "measured"
    context: Whole = Field(256, ge=8, description="tokens in the KV cache while a step is timed")
    repeats: Whole = Field(20, ge=3, description="timed repeats of every step; the median counts")


class DecisionOptions(Options):
    """What the verdict is about."""

    rule: str = Field("strict", description="the one acceptance rule that the verdict concerns")
    draft: str = Field("auto", description="name of a draft; auto chooses on half of the documents")
    gamma: Whole | Literal["auto"] = Field("auto", description="drafted tokens per round; auto chooses likewise")
    min_speedup: float = Field(1.10, gt=0, le=100, description="GO needs a lower bound at or above it")
    confidence: float = Field(0.95, gt=0.5, lt=1, description="of intervals (two-sided) and verdicts (one-sided)")
    weights: dict[str, float] | None = Field(None, description="share of output tokens per domain; default: observed")

    @field_validator("weights")
    @classmethod
    def _shares(cls, weights: dict[str, float] | None) -> dict[str, float] | None:
        if weights is not None and not (min(weights.values(), default=0) >= 0 and abs(sum(weights.values()) - 1) <= 1e-6):
            raise ValueError(f"must be shares that add up to 1 (they add up to {sum(weights.values()):g})")
        return weights


class ProfileOptions(Options):
    """One profile file."""

    target: TargetOptions
    drafts: dict[str, DraftOptions] = Field(min_length=1)
    data: list[SourceOptions] = Field(min_length=1)
    continuation: ContinuationOptions = GreedyContinuation()
    rules: list[str] = Field(["strict"], min_length=1, description="acceptance rules; this version models strict")
    gammas: list[Whole] = Field(
        [1, 2, 3, 4, 5, 6, 7, 8], min_length=1, description="drafted tokens per round that are replayed"
    )
    costs: CostOptions = CostOptions()
    decision: DecisionOptions = DecisionOptions()
    batch_tokens: Whole = Field(8192, ge=1, description="padded tokens in one batch, at most (a document alone may exceed)")
    shard_documents: Whole = Field(64, ge=1, description="documents a shard: what an interruption can cost")

    @field_validator("drafts")
    @classmethod
    def _draft_names(cls, drafts: dict[str, Any]) -> dict[str, Any]:
        for name in drafts:
            if not DRAFT_NAME.fullmatch(name) or name in ("auto", "target"):
                raise ValueError(f"draft name {name!r} must be lower case, start with a letter, and not be auto or target")
        return drafts

    @field_validator("continuation", mode="before")
    @classmethod
    def _greedy_by_default(cls, continuation: Any) -> Any:
        return {"kind": "greedy"} | continuation if isinstance(continuation, dict) else continuation

    @field_validator("rules")
    @classmethod
    def _known_rules(cls, rules: list[str]) -> list[str]:
        for rule in rules:
            if rule_id(rule) is None:
                raise ValueError(f"unknown rule {rule!r}; known: {', '.join(RULES)}")
        return list(dict.fromkeys(rules))

    @field_validator("gammas")
    @classmethod
    def _gammas(cls, gammas: list[int]) -> list[int]:
        if min(gammas) < 1 or max(gammas) > GAMMA_LIMIT:
            raise ValueError(f"must lie between 1 and {GAMMA_LIMIT}")
        return sorted(set(gammas))

    @model_validator(mode="after")
    def _consistent(self) -> ProfileOptions:
        decision = self.decision
        if decision.draft != "auto" and decision.draft not in self.drafts:
            raise ValueError(f"decision.draft {decision.draft!r} is none of the drafts ({', '.join(self.drafts)})")
        if decision.rule not in self.rules:
            raise ValueError(f"decision.rule {decision.rule!r} is not among rules ({', '.join(self.rules)})")
        if decision.gamma != "auto" and decision.gamma not in self.gammas:
            raise ValueError(f"decision.gamma {decision.gamma} is not among gammas {self.gammas}")
        fixed = [source.domain for source in self.data if isinstance(source.domain, str)]
        if decision.weights is not None and len(fixed) == len(self.data) and set(fixed) != set(decision.weights):
            odd = sorted(set(fixed) ^ set(decision.weights))
            raise ValueError(f"decision.weights must name every domain and no other (check {', '.join(odd)})")
        return self

    def continuation_of(self, source: int) -> GreedyContinuation | GivenContinuation:
        """The continuation that holds for one source: its own, or the profile's."""
        return self.data[source].continuation or self.continuation

    def resolved(self, folder: Path) -> ProfileOptions:
        """The same options with local paths made absolute; relative ones start at `folder`, that of the profile file."""
        drafts = {
            name: draft.model_copy(update={"model": resolve(draft.model, folder)})
            if isinstance(draft, ModelDraft)
            else draft
            for name, draft in self.drafts.items()
        }
        data = [source.model_copy(update={"path": resolve(source.path, folder)}) for source in self.data]
        target = self.target.model_copy(update={"model": resolve(self.target.model, folder)})
        return self.model_copy(update={"target": target, "drafts": drafts, "data": data})


LOCAL_SUFFIXES = {".gguf", ".jsonl", ".json", ".csv", ".parquet", ".txt"}


def resolve(reference: str, folder: Path) -> str:
    """A model or dataset reference, with a local path made absolute (from `folder`) and a hub id left as it is."""
    path = Path(os.path.expanduser(reference))
    local = folder / path
    explicit = reference.startswith((".", "/", "~")) or path.suffix in LOCAL_SUFFIXES
    if not explicit and not os.path.exists(local):
        return reference
    # The last name stays as it is: the hub's cache links model.gguf to a file whose name is a hash, without a suffix.
    return str(local.parent.resolve() / local.name)


def template_parts(template: str) -> list[tuple[str, str | None]]:
    """A prompt template as pairs of literal text and the column that follows it (None at the end).

    Raises `ValueError` for a template that is malformed or asks for more than a column.
    """
    advice = "write {column} for a column and {{ or }} for a brace"
    try:
        parsed = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"{template!r}: {error}; {advice}") from None
    for _, name, specification, conversion in parsed:
        if name is not None and (not name or specification or conversion):
            raise ValueError(f"{template!r} has a field that is more or less than a column's name; {advice}")
    return [(literal, name) for literal, name, _, _ in parsed]
