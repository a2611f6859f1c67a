"""The profile file: every option declared once, with its type, default, limits and meaning.

The command line, the manifest and the reference derive from these classes. Precedence: default < file < `--set`.
"""

from __future__ import annotations

import os
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from alphaprof.config.hardware import preset_text
from alphaprof.config.options import (
    DRAFT_NAME,
    AnyDraft,
    Ascending,
    ContinuationOptions,
    CostOptions,
    GreedyContinuation,
    HeadOptions,
    HybridOptions,
    MeasuredCosts,
    ModelOptions,
    Options,
    PromptLookupDraft,
    RooflineCosts,
    Sampling,
    Settings,
    TableCosts,
    TargetOptions,
    TextContinuation,
    VllmOptions,
    Whole,
    WrittenContinuation,
)
from alphaprof.config.paths import KEPT, resolve
from alphaprof.errors import cut, shown
from alphaprof.rules import DEFAULT_RULES, GAMMA_LIMIT, parse_rule

AUTO = "auto"
CPU_TOKENS = 8192  # of a batch on a CPU, where larger ones are no faster


RuleId = Annotated[str, BeforeValidator(lambda given: parse_rule(given).id)]


class Markers(Options):
    """The markers around a part of a text, which belong to it, as a token does whose first character is in it."""

    begin: str = Field("<think>", min_length=1, description="marker that begins the part; of thinking, also in the prompt")
    end: str = Field("</think>", min_length=1, description="marker that ends it; without one it goes on to the end")


# Yardsticks that a source may name, and how their published rows become prompts: the first turn, as `vllm bench serve` does.
BENCHMARKS: dict[str, dict[str, Any]] = {
    "spec-bench": {"prompt": "{turns.0}", "chat": True, "domain": {"column": "category"}},
    "speed-bench": {
        "path": "nvidia/SPEED-Bench",
        "name": "qualitative",
        "split": "test",
        "prompt": "{turns.0}",
        "chat": True,
        "domain": {"column": "category"},
    },
}


class DomainColumn(Options):
    """The column that contains the domain of a document."""

    column: str


def _labels(given: Any) -> list[str]:
    """Return values of a column as texts, as the data's are compared."""
    values = given if isinstance(given, list) else [given]
    return [str(value).lower() if isinstance(value, bool) else str(value) for value in values]


class SourceOptions(Options):
    """One dataset: where it is, how a row becomes a prompt, and which domain it belongs to."""

    benchmark: Literal["spec-bench", "speed-bench"] | None = Field(
        None,
        description="a published benchmark: sets prompt, chat and domain (its categories), and for speed-bench where it is "
        "on the hub; what you give yourself comes first, like path: FILE or name: throughput_8k",
    )
    domain: str | DomainColumn = Field(description="name of the domain, or {column: NAME}")
    path: str = Field(
        min_length=1,
        description="hub id, or a .jsonl, .ndjson, .json, .csv, .tsv, .parquet, .arrow or .txt file, also .gz or .zst: "
        "s3://BUCKET/FILE, or relative to the profile; a directory of such files",
    )
    name: str | None = Field(None, description="configuration of a hub dataset")
    split: str = Field("train", description="split of a hub dataset")
    revision: str | None = Field(None, description="branch, tag or commit on the hub")
    prompt: str | None = Field(None, description='template over the columns, e.g. "{prompt}"')
    messages: str | None = Field(
        None,
        description="column with chat messages (role and content, or from and value), like body.messages, or with a whole "
        "request, like body; what a server reads beside the messages is read too (docs/data.md)",
    )
    tools: str | None = Field(
        None, description="column with the tools that a chat may call, with messages; default: those beside the messages"
    )
    prompt_ids: str | None = Field(None, description="column with the prompt's token ids")
    chat: bool = Field(False, description="wrap the rendered prompt as one user turn of the chat template")
    system: str | None = Field(
        None,
        description='template of a system message, e.g. "{system_prompt}"; with messages, instead of that of the row',
    )
    chat_options: Settings = Field(
        {},
        description="variables of the chat template, e.g. {enable_thinking: false}; with date_string, templates that write "
        "today's date write this one",
    )
    chat_template_kwargs: str | None = Field(
        None, description="column with a row's own variables of the chat template, as in requests to vLLM"
    )
    continuation: ContinuationOptions | None = Field(None, description="default: the profile's continuation")
    where: dict[str, Annotated[list[str], BeforeValidator(_labels)]] = Field(
        {}, description="rows to use, by the values of columns, e.g. {category: [coding, math]}; default: all"
    )
    cluster: str | None = Field(
        None, description="column that groups dependent documents of this source, e.g. a conversation id"
    )
    limit: Whole | None = Field(None, ge=1, description="maximum documents, per domain if a column names the domain")
    shuffle_seed: Whole | None = Field(None, ge=0, description="shuffle rows with this seed before the limit applies")
    shuffle_buffer: Whole = Field(10_000, ge=1, description="rows held while shuffling a stream")
    bad_rows: float = Field(
        0.1, ge=0, le=1, description="largest share of rows that may be unusable; they are left out and shown"
    )
    min_prompt_tokens: Whole = Field(1, ge=1, description="documents with a shorter prompt (template included) are left out")
    too_long: Literal["skip", "truncate"] = Field(
        "skip", description="documents longer than the target's context: leave out, or drop the beginning of the prompt"
    )

    @model_validator(mode="before")
    @classmethod
    def _published(cls, given: Any) -> Any:
        """Fill in how a benchmark is read."""
        if not isinstance(given, dict) or (published := BENCHMARKS.get(str(given.get("benchmark")))) is None:
            return given
        if "path" not in given | published:
            raise ValueError("spec-bench needs path: the question.jsonl of github.com/hemingkx/Spec-Bench (data/spec_bench)")
        return published | given

    @field_validator("prompt", "system")
    @classmethod
    def _template(cls, template: str | None) -> str | None:
        template_parts(template or "")
        return template

    def problems(self) -> Iterator[str]:
        """Yield reasons why a row cannot become a prompt."""
        given = [name for name in ("prompt", "messages", "prompt_ids") if getattr(self, name) is not None]
        if len(given) != 1:
            yield f"needs exactly one of prompt, messages, prompt_ids (has {', '.join(given) or 'none'})"
        if self.chat and self.prompt is None:
            yield "chat: true needs prompt; messages always pass through the chat template"
        if self.system is not None and not self.chat and self.messages is None:
            yield "system needs messages, or prompt with chat: true"
        if self.tools is not None and self.messages is None:
            yield "tools needs messages"

    @property
    def columns(self) -> list[str]:
        """Return the columns that its rows are read for, but those of continuations."""
        given = (self.messages, self.prompt_ids, self.tools, self.chat_template_kwargs, self.cluster)
        domain = None if isinstance(self.domain, str) else self.domain.column
        written = [name for text in (self.prompt, self.system) for _, name in template_parts(text or "")]
        return [name for name in [*written, *given, domain, *self.where] if name is not None]


class DecisionOptions(Options):
    """What the verdict is about."""

    rule: Annotated[str, BeforeValidator(lambda given: given if given == AUTO else parse_rule(given).id)] = Field(
        AUTO,
        description="acceptance rule of the verdict; auto: strict on greedy text, one_hot on sampled text",
    )
    draft: str = Field("auto", description="name of a draft; auto is cross-fitted on both halves of the documents")
    gamma: Whole | Literal["auto"] = Field(
        "auto", description="drafted tokens per round; auto is cross-fitted on both halves of the documents"
    )
    p_min: Annotated[float, Field(ge=0, lt=1)] | Literal["auto"] = Field(
        0.0,
        description="a draft model or head stops drafting in a round when its top probability is below this (llama.cpp, "
        "Hugging Face); auto is cross-fitted on both halves of the documents; 0: it never stops",
    )
    min_speedup: float = Field(1.10, gt=0, le=100, description="threshold: GO if the speedup's lower bound reaches it")
    confidence: float = Field(0.95, gt=0.5, lt=1, description="confidence of intervals (two-sided) and verdicts (one-sided)")
    concurrency: Whole = Field(1, ge=1, description="batch size of the verdict: number of sequences decoded at a time")
    served_dtype: str | None = Field(
        None,
        description="dtype that you serve the target in, like fp8; if the run measures another one, its verdict is "
        "UNDECIDED (report on a run imported from the engine); default: the measured dtype",
    )
    weights: dict[str, float] | None = Field(None, description="share of output tokens per domain; default: as measured")

    @field_validator("served_dtype")
    @classmethod
    def _spelled_out(cls, name: str | None) -> str | None:
        return name and {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}.get(name, name)

    @field_validator("weights")
    @classmethod
    def _shares(cls, weights: dict[str, float] | None) -> dict[str, float] | None:
        if weights is not None and not (min(weights.values(), default=0) >= 0 and abs(sum(weights.values()) - 1) <= 1e-6):
            raise ValueError(f"must be shares that add up to 1 (they add up to {sum(weights.values()):g})")
        return weights


def _of_gpus(number: float) -> float:
    if number > 1 and not number.is_integer():
        raise ValueError("must be a whole number, or a share of one GPU")
    return number


class ExecutionOptions(Options):
    """How the work of a run is done; the results do not depend on it."""

    threads: Annotated[Whole, Field(ge=1)] | Literal["auto"] = Field(
        "auto",
        description="CPU threads per process, which affect rounding; auto: torch's default, or 1 with workers or --part",
    )
    mixed_devices: bool = Field(
        False,
        description="allow processes on other devices or versions to continue a run: their rows may differ in the last "
        "digits, and the report says so",
    )
    workers: Annotated[Whole, Field(ge=1)] | Literal["auto"] = Field(
        1,
        description="number of workers: 1 runs in this process; more run as Ray actors, on the cluster at RAY_ADDRESS or on "
        "this machine; auto starts one actor per GPU of the cluster, or per CPU",
    )
    gpus_per_worker: Annotated[float, AfterValidator(_of_gpus)] = Field(
        1.0, gt=0, description="GPUs per Ray actor, if models run on GPUs; 0.25: four actors share one; 8: with device_map"
    )


class ProfileOptions(Options):
    """One profile file."""

    target: TargetOptions = Field(description="the model that is served: a group of options, or its name alone")
    drafts: dict[str, AnyDraft] = Field(
        description="the drafts by name; {}: the target alone, with certificates and the one draft that costs nothing "
        "(prompt lookup, as ngram)"
    )
    hybrids: dict[str, HybridOptions] = Field(
        {}, description="combinations of two drafts, by name; may also be given in drafts, with kind: hybrid"
    )
    data: list[SourceOptions] = Field(min_length=1)
    continuation: ContinuationOptions = GreedyContinuation()
    draft_processing: Literal["temperature", "same"] = Field(
        "temperature",
        description="how q is processed on sampled text: with temperature only, as drafters of vLLM and SGLang do, or like "
        "p, as those of Hugging Face do",
    )
    rules: Annotated[list[RuleId], AfterValidator(lambda rules: list(dict.fromkeys(rules)))] = Field(
        list(DEFAULT_RULES), min_length=1, description="acceptance rules, like strict, {additive: 0.1}, or additive:0.1"
    )
    certificates: bool = Field(
        False, description="log threshold_<rule>: how far a draft must be from the target before the rule can reject it"
    )
    gammas: Ascending[Annotated[Whole, Field(ge=1, le=GAMMA_LIMIT)]] = Field(
        [1, 2, 3, 4, 5, 6, 7, 8], description="numbers of drafted tokens per round to replay"
    )
    costs: CostOptions = MeasuredCosts()
    vllm: VllmOptions | None = Field(None, description="a vLLM that writes texts or times steps (docs/vllm.md)")
    decision: DecisionOptions = DecisionOptions()
    execution: ExecutionOptions = ExecutionOptions()
    thinking: Markers | None = Field(None, description="report thinking and answer separately; default: together")
    spans: Annotated[dict[str, Markers], BeforeValidator(lambda given: {} if given == AUTO else given)] | None = Field(
        None,
        description="auto: report thinking, tool calls (as the target's chat template marks them), code (fenced), json (an "
        "answer that is all JSON, or fenced) and answer separately, each without others inside; {NAME: {begin, end}}: these "
        "as well, by markers of your own",
    )
    batch_tokens: Annotated[Whole, Field(ge=1)] | Literal["auto"] = Field(
        "auto",
        description="maximum padded tokens per batch (a single document may exceed it); auto: by the GPU's memory and the "
        "models in it, at most 65,536; 8192 on a CPU",
    )
    shard_documents: Whole = Field(64, ge=1, description="documents per shard: the most that an interruption can lose")

    @model_validator(mode="before")
    @classmethod
    def _target_alone(cls, given: Any) -> Any:
        """Add the draft that costs nothing, and certificates, if there are no drafts."""
        if isinstance(given, dict) and given.get("drafts") == {}:
            return {"certificates": True} | given | {"drafts": {"ngram": {"kind": "prompt_lookup"}}}
        return given

    @model_validator(mode="before")
    @classmethod
    def _hybrids_apart(cls, given: Any) -> Any:
        """Move drafts of kind hybrid to `hybrids`: they are not loaded or measured."""
        drafts = given.get("drafts") if isinstance(given, dict) else None
        if not isinstance(drafts, dict):
            return given
        made = {name: draft for name, draft in drafts.items() if isinstance(draft, dict) and draft.get("kind") == "hybrid"}
        hybrids = {name: {key: value for key, value in draft.items() if key != "kind"} for name, draft in made.items()}
        own = {name: draft for name, draft in drafts.items() if name not in made}
        return given | {"drafts": own, "hybrids": given.get("hybrids", {}) | hybrids} if made else given

    @field_validator("target", mode="before")
    @classmethod
    def _model_alone(cls, given: Any) -> Any:
        return {"model": given} if isinstance(given, str) else given

    @field_validator("drafts")
    @classmethod
    def _draft_names(cls, drafts: dict[str, Any]) -> dict[str, Any]:
        rule = "use lower case, start with a letter, at most 200 characters, not auto or target"
        for name in drafts:
            if not DRAFT_NAME.fullmatch(name) or name in ("auto", "target"):
                raise ValueError(f"invalid draft name {shown(name)}: {rule}")
        return drafts

    @field_validator("continuation", mode="before")
    @classmethod
    def _greedy_by_default(cls, continuation: Any) -> Any:
        if not isinstance(continuation, dict) or "kind" in continuation:
            return continuation
        if odd := set(continuation) & set(Sampling.model_fields):
            raise ValueError(f"{', '.join(sorted(odd))} need kind: sampled")
        return {"kind": "greedy"} | continuation

    @field_validator("costs", mode="before")
    @classmethod
    def _auto_by_default(cls, costs: Any) -> Any:
        return {"source": "auto"} | costs if isinstance(costs, dict) else costs

    def problems(self) -> Iterator[str]:
        """Yield contradictions between the decision, the costs and the data."""
        decision = self.decision
        for name, hybrid in self.hybrids.items():
            first = self.drafts.get(hybrid.first)
            if name in self.drafts or not isinstance(first, PromptLookupDraft) or hybrid.then not in self.drafts:
                yield f"hybrids.{name} needs a unique name, a prompt_lookup draft as `first`, another draft as `then`"
            elif hybrid.min_match > first.max_ngram:
                yield f"hybrids.{name}.min_match {hybrid.min_match} exceeds max_ngram {first.max_ngram} of {hybrid.first}"
        if decision.draft not in ("auto", *self.drafts, *self.hybrids):
            names = cut(", ".join(self.drafts), 100)
            yield f"decision.draft {shown(decision.draft)} is not among the drafts ({names})"
        if decision.gamma != "auto" and decision.gamma not in self.gammas:
            yield f"decision.gamma {decision.gamma} is not among gammas {cut(str(self.gammas), 100)}"
        for name, draft in self.drafts.items():
            if isinstance(draft, HeadOptions) and draft.depths is not None and draft.depths < min(self.gammas):
                yield f"drafts.{name}.depths {draft.depths} is less than the smallest of gammas, {min(self.gammas)}"
            if (own := getattr(draft, "gamma", None)) is not None and own not in self.gammas:
                yield f"drafts.{name}.gamma {own} is not among gammas {cut(str(self.gammas), 100)}"
        if isinstance(self.costs, MeasuredCosts | RooflineCosts):
            sizes = self.costs.concurrency
            if not sizes[0] <= decision.concurrency <= sizes[-1]:
                outside = f"{decision.concurrency} is outside costs.concurrency {cut(str(sizes), 100)}"
                yield f"decision.concurrency {outside}, so it has no step times"
        if self.vllm is None and self.written_by_engine():
            yield "continuation.writer vllm needs vllm.python or vllm.url (docs/vllm.md)"
        if self.costs.source == "vllm" and (self.vllm is None or self.vllm.python is None):
            yield "costs.source vllm needs vllm.python, to start vLLM and time its steps (docs/vllm.md)"
        for index, source in enumerate(self.data):
            if isinstance(self.continuation_of(index), TextContinuation) and (source.chat or source.messages is not None):
                yield f"data.{index}: continuation kind text is for a plain corpus: use prompt without chat"
            if getattr(self.continuation_of(index), "answer", None) and source.messages is None:
                yield f"data.{index}: answer: last is the last message of a chat: it needs messages"
        fixed = [source.domain for source in self.data if isinstance(source.domain, str)]
        if decision.weights is not None and len(fixed) == len(self.data) and set(fixed) != set(decision.weights):
            odd = sorted(set(fixed) ^ set(decision.weights))
            yield f"decision.weights must name exactly the domains of the data (check {cut(', '.join(odd), 100)})"

    def continuation_of(self, source: int) -> ContinuationOptions:
        """Return the continuation of a source: its own, or the profile's."""
        return self.data[source].continuation or self.continuation

    def written_by_engine(self) -> set[int]:
        """Return the sources whose texts the engine writes."""
        kinds = enumerate(map(self.continuation_of, range(len(self.data))))
        return {index for index, kind in kinds if isinstance(kind, WrittenContinuation) and kind.writer != "transformers"}

    @property
    def padded_tokens(self) -> int:
        """`batch_tokens` of a profile whose models are loaded, before that of a CPU."""
        return CPU_TOKENS if self.batch_tokens == "auto" else self.batch_tokens

    @property
    def uses_engine(self) -> bool:
        """Whether the run needs the engine."""
        return self.costs.source == "vllm" or bool(self.written_by_engine())

    def with_costs(self, accelerator: str | None, tp: int = 1) -> ProfileOptions:
        """Return the same with what `costs.source: auto` means: a roofline of `tp` accelerators, or measured times where
        there is none.
        """
        costs = self.costs
        if costs.source != "auto":
            return self
        if accelerator is None:
            return self.model_copy(update={"costs": costs.model_copy(update={"source": "measured"})})
        given = {"concurrency": costs.concurrency} if "concurrency" in costs.model_fields_set else {}
        preset = "sglang-h200" if accelerator == "h200" else "vllm-0.11"
        computed = RooflineCosts(source="roofline", accelerator=accelerator, tp=tp, preset=preset, **given)
        return self.model_copy(update={"costs": computed})

    def with_dtype(self, dtype: str) -> ProfileOptions:
        """Return the same with `dtype` for the target where it is left to auto."""
        if self.target.dtype != AUTO:
            return self
        return self.model_copy(update={"target": self.target.model_copy(update={"dtype": dtype})})

    def models(self) -> dict[str, ModelOptions]:
        """Return the models by their names in messages: the target, and drafts that are models of their own."""
        drafts = {f"draft {name}": draft.own_model for name, draft in self.drafts.items()}
        return {"target": self.target} | {name: model for name, model in drafts.items() if model is not None}

    def deciding(self, draft: str | None = None, rule: str | None = None, gamma: int | None = None) -> ProfileOptions:
        """Return the same with a decision about a draft, rule or gamma that is given."""
        asked = {"draft": draft, "rule": rule, "gamma": gamma}
        given = {name: value for name, value in asked.items() if value is not None}
        return self.model_copy(update={"decision": self.decision.model_copy(update=given)})

    def resolved(self, folder: Path) -> ProfileOptions:
        """Return the options with absolute local paths; relative ones start at `folder`, that of the profile file. Raises
        `OptionInvalid` if the file of `costs.preset` cannot be used.
        """

        def located(options: Any, model: ModelOptions) -> Any:
            named = {"model": model.model} | ({"adapter": model.adapter} if model.adapter is not None else {})
            return options.model_copy(update={key: resolve(reference, folder) for key, reference in named.items()})

        drafts = {name: located(draft, own) if (own := draft.own_model) else draft for name, draft in self.drafts.items()}
        data = [source.model_copy(update={"path": resolve(source.path, folder)}) for source in self.data]
        target = located(self.target, self.target)
        costs = self.costs
        if isinstance(costs, TableCosts) and not costs.path.startswith(KEPT):
            costs = costs.model_copy(update={"path": str((folder / os.path.expanduser(costs.path)).resolve())})
        elif isinstance(costs, RooflineCosts) and costs.preset.endswith(".json"):
            costs = costs.model_copy(update={"preset": preset_text((folder / os.path.expanduser(costs.preset)).resolve())})
        vllm = self.vllm
        if vllm is not None and vllm.python is not None and os.sep in vllm.python:
            python = os.path.abspath(folder / os.path.expanduser(vllm.python))  # its links stay: they name the environment
            vllm = vllm.model_copy(update={"python": python})
        return self.model_copy(update={"target": target, "drafts": drafts, "data": data, "costs": costs, "vllm": vllm})


def template_parts(template: str) -> list[tuple[str, str | None]]:
    """Return a prompt template as pairs of literal text and the column that follows it (None at the end).

    Raises `ValueError` for a template that is malformed, or has a field that is not a column name.
    """
    advice = "write {column} for a column, and {{ or }} for a brace"
    try:
        parsed = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"{shown(template)}: {error}; {advice}") from None
    for _, name, specification, conversion in parsed:
        if name is not None and (not name or specification or conversion):
            raise ValueError(f"{shown(template)} has a field that is not a plain column name; {advice}")
    return [(literal, name) for literal, name, _, _ in parsed]
