"""Options of models, drafts, continuations and costs: the parts of a profile file that say what is run and timed."""

from __future__ import annotations

import contextlib
import difflib
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache, reduce
from operator import or_
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    SerializeAsAny,
    TypeAdapter,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from alphaprof.config.hardware import ACCELERATORS, preset_of
from alphaprof.config.paths import addressed
from alphaprof.errors import OptionInvalid, shown
from alphaprof.rules import GAMMA_LIMIT, MAX_NGRAM

UNKNOWN_KEY = "unknown_key"  # what pydantic calls the error of a key that no option has
DRAFT_NAME = re.compile(r"[a-z][a-z0-9_-]{0,199}")  # a draft's name is part of a folder's: draft=NAME
STORED = "stored"  # the context in which options are validated that are those of a run: contradictions were looked for
Dtype = Literal["float32", "bfloat16", "float16"]
Whole = Annotated[int, Field(strict=True)]  # YAML's yes and on are not 1
Item = TypeVar("Item")
Ascending = Annotated[list[Item], Field(min_length=1), AfterValidator(lambda values: sorted(set(values)))]
OneOrSeveral = BeforeValidator(lambda given: given if isinstance(given, list) else [given])
Indices = Ascending[Annotated[Whole, Field(ge=0)]]
SWITCHED = {"on": True, "yes": True, "off": False, "no": False}  # words that profiles have for true and false


def _switched(given: Any) -> Any:
    """Return settings of another program with its switches as true and false."""
    if not isinstance(given, dict):
        return given
    return {key: SWITCHED.get(value.lower(), value) if isinstance(value, str) else value for key, value in given.items()}


Settings = Annotated[dict[str, Any], BeforeValidator(_switched)]


class Options(BaseModel):
    """Base of all option groups: unknown keys are errors, numbers are finite, and values never change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    hints: ClassVar[Mapping[str, str]] = MappingProxyType({})  # what to do instead of keys that users take for its own

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        if odd := [name for name in given if name not in cls.model_fields]:
            near = difflib.get_close_matches(str(odd[0]), cls.model_fields, n=1, cutoff=0.6)
            hint = f"did you mean {near[0]}?" if near else f"remove it; known here: {', '.join(sorted(cls.model_fields))}"
            hint = cls.hints.get(str(odd[0]), hint)
            raise PydanticCustomError(UNKNOWN_KEY, "unknown key {key}", {"key": str(odd[0]), "hint": hint})
        return given

    @model_validator(mode="after")
    def _consistent(self, info: ValidationInfo) -> Self:
        if info.context != STORED and (problem := next(self.problems(), None)):
            raise ValueError(problem)
        return self

    def problems(self) -> Iterator[str]:
        """Yield contradictions between options that are valid by themselves."""
        yield from ()


class ModelOptions(Options):
    """How to load a model: a hub id, a local directory, or a .gguf file."""

    model: str = Field(
        min_length=1, description="hub id, local directory or .gguf file; relative paths start at the profile file"
    )
    adapter: str | None = Field(
        None, min_length=1, description="LoRA adapter of peft, merged into the weights: hub id or local directory"
    )
    revision: str | None = Field(None, description="branch, tag or commit on the hub")
    trust_remote_code: bool = Field(False, description="run Python code that comes with the model")
    device: str = Field("auto", description="auto (CUDA if available, else CPU), cpu, cuda, cuda:1")
    device_map: str | None = Field(None, description="spread one model over several devices, e.g. auto")
    attn_implementation: str | None = Field(
        None,
        min_length=1,
        description="how transformers computes attention: sdpa, eager, flash_attention_2, ...; default: its own choice",
    )

    @property
    def is_gguf(self) -> bool:
        """Whether it is a GGUF file, by its suffix."""
        return self.model.lower().endswith(".gguf")


class TargetOptions(ModelOptions):
    """The model that is served; its tokenizer encodes the text for every draft as well."""

    dtype: Literal["auto", Dtype] = Field(
        "auto",
        description="use the dtype that you serve, because near-ties depend on it; auto: the checkpoint's dtype, or float32 "
        "if the checkpoint's is not faster on the device",
    )


class DraftOptions(Options):
    """Base of the options of drafts. A class adds its `kind`, a Literal, and is listed in DRAFTS. `loader`: the
    module:function that loads such a draft, called like `profiling.models.kinds.load_draft`; `has_steps`, `by_depth`: what
    the facts of such a draft say, before one is loaded.
    """

    kind: str
    loader: ClassVar[str]
    has_steps: ClassVar[bool] = True
    by_depth: ClassVar[bool] = False

    @property
    def own_model(self) -> ModelOptions | None:
        """The model that the draft is; None if it needs no files but the target's."""
        return None


class ModelDraft(ModelOptions, DraftOptions):
    """An independent draft model."""

    loader = "alphaprof.profiling.models.kinds:load_draft_model"
    kind: Literal["model"]
    dtype: Dtype | None = Field(None, description="default: the target's")
    special_tokens: Literal["same", "any"] = Field(
        "same", description="any: special and added tokens may have other names than the target's tokens of the same ids"
    )

    @property
    def own_model(self) -> ModelOptions:
        """Itself."""
        return self


class LayerSkipDraft(DraftOptions):
    """The target without some of its layers: shared weights, its own KV cache."""

    loader = "alphaprof.profiling.models.kinds:load_layer_skip"
    kind: Literal["layer_skip"]
    drop_layers: Indices = Field(description="0-based indices of the target's layers to leave out")


class PromptLookupDraft(DraftOptions):
    """No model: proposes what followed an earlier occurrence of the last tokens, in the prompt or the text so far."""

    loader = "alphaprof.profiling.models.kinds:load_prompt_lookup"
    has_steps = False
    kind: Literal["prompt_lookup"]
    min_ngram: Whole = Field(1, ge=1, le=64, description="shortest n-gram of last tokens to look up")
    max_ngram: Whole = Field(
        MAX_NGRAM, ge=1, le=64, description="longest n-gram of last tokens to look up; shorter ones are tried next"
    )
    match: Literal["leftmost", "rightmost"] | None = Field(
        None,
        description="earlier place to copy from. leftmost: vLLM's V1 runner and CPU build, transformers (min_ngram 1); "
        "rightmost: vLLM's V2 runner, which also fills every round up to γ tokens; default: rightmost, unless `vllm.python` "
        "starts vLLM on a CPU",
    )

    def problems(self) -> Iterator[str]:
        """Yield the problem of a range that is empty."""
        if self.min_ngram > self.max_ngram:
            yield f"min_ngram {self.min_ngram} exceeds max_ngram {self.max_ngram}"


class HybridOptions(Options):
    """Two drafts of the run as one, without a pass of its own: prompt lookup if it found enough, else another draft."""

    first: str = Field(description="name of a prompt_lookup draft")
    then: str = Field(description="name of the draft to use if prompt lookup found too little")
    min_match: Whole = Field(
        1, ge=1, le=64, description="number of last tokens that prompt lookup must match; at most its max_ngram"
    )


class HeadOptions(DraftOptions):
    """Base of draft heads, which propose from states of the target; their proposals depend on the depth in a round."""

    by_depth = True
    depths: Whole | None = Field(
        None,
        ge=1,
        le=GAMMA_LIMIT,
        description="maximum drafted tokens per round; larger gammas leave this draft out; default: no limit",
    )
    check_wiring: bool = Field(True, description="first compare ways to read its files, by acceptance rate on a few texts")


class HeadFileOptions(HeadOptions):
    """Base of heads with files of their own."""

    model: str = Field(min_length=1, description="hub id or local directory; relative paths start at the profile file")
    revision: str | None = Field(None, description="branch, tag or commit on the hub")
    dtype: Dtype | None = Field(None, description="default: the target's")

    @property
    def own_model(self) -> ModelOptions:
        """Its files."""
        return ModelOptions(model=self.model, revision=self.revision)


class Eagle3Draft(HeadFileOptions):
    """An EAGLE-3 head, from files of SafeAILab, SpecForge or speculators."""

    loader = "alphaprof.profiling.heads.eagle_files:load_eagle3"
    kind: Literal["eagle3"]


class PEagleDraft(HeadFileOptions):
    """A P-EAGLE head, which drafts all tokens of a round in one pass from mask tokens; files of speculators or SpecForge."""

    loader = "alphaprof.profiling.heads.p_eagle:load_p_eagle"
    kind: Literal["p_eagle"]


class PardDraft(HeadFileOptions):
    """A PARD draft model: a causal language model that drafts all tokens of a round in one pass from mask tokens."""

    loader = "alphaprof.profiling.heads.pard:load_pard"
    kind: Literal["pard"]


class BlockDraft(HeadFileOptions):
    """Base of drafters that draft a block of rows in one pass."""

    loader = "alphaprof.profiling.heads.dflash_files:load_block"
    hints = MappingProxyType({"block": "write gamma: K, the drafts per round; the rows of a block follow from the files"})
    gamma: Annotated[Whole, Field(ge=1, le=GAMMA_LIMIT)] | None = Field(
        None,
        description="drafted tokens per round, as an engine is asked for them; gammas must contain it; default: the block "
        "size of its files. A drafter whose layers are all causal has rounds of every γ up to it",
    )

    def problems(self) -> Iterator[str]:
        """Yield the problem of two limits."""
        if self.gamma is not None and self.depths is not None:
            yield "gamma and depths exclude each other: gamma where rows read each other, depths where all layers are causal"


class DFlashDraft(BlockDraft):
    """A DFlash or DFlash2 drafter. Unless all of its layers are causal, the rows of a block read each other, and each γ is a
    draft of its own.
    """

    kind: Literal["dflash"]


class DSparkDraft(BlockDraft):
    """A DSpark drafter: as of DFlash, and each token is chosen by the one before it, too."""

    kind: Literal["dspark"]


class Eagle1Draft(HeadFileOptions):
    """An EAGLE-1, EAGLE-2 or HASS head, on the target's last state and with its LM head."""

    loader = "alphaprof.profiling.heads.eagle_files:load_eagle1"
    kind: Literal["eagle1"]


class GemmaDraft(HeadFileOptions):
    """An assistant of Gemma 4, which reads keys and values of the target's own layers."""

    loader = "alphaprof.profiling.heads.gemma:load_assistant"
    kind: Literal["gemma4_assistant"]


class MtpDraft(HeadOptions):
    """The target's own MTP modules, which its checkpoint holds."""

    loader = "alphaprof.profiling.heads.mtp:load_mtp"
    kind: Literal["mtp"]
    reuse: bool | None = Field(
        None,
        description="true: use the first module at every depth; false: use a chain, one module per depth; required if the "
        "checkpoint has several modules, because engines differ",
    )


DRAFTS: list[type[DraftOptions]] = [
    ModelDraft,
    LayerSkipDraft,
    PromptLookupDraft,
    Eagle3Draft,
    PEagleDraft,
    PardDraft,
    DFlashDraft,
    DSparkDraft,
    Eagle1Draft,
    GemmaDraft,
    MtpDraft,
]


def named_model(name: str) -> dict[str, str]:
    """Return the options of a draft model given by name only, as a profile writes them."""
    return {"kind": "model", "model": name}


def lookup_draft(shortest: int, longest: int, match: str) -> dict[str, Any]:
    """Return the options of a prompt lookup draft, as a profile writes them."""
    return {"kind": "prompt_lookup", "min_ngram": shortest, "max_ngram": longest, "match": match}


@cache
def _adapter(kinds: tuple[Any, ...]) -> TypeAdapter[Any]:
    union: Any = reduce(or_, kinds)
    return TypeAdapter(Annotated[union, Field(discriminator="kind")])


def _draft(given: Any) -> Any:
    return _adapter(tuple(DRAFTS)).validate_python(given)


# The options of one of DRAFTS, by `kind`, with the errors of an ordinary union.
AnyDraft = Annotated[SerializeAsAny[DraftOptions], PlainValidator(_draft)]


class WrittenContinuation(Options):
    """Base of continuations that the target writes for the run."""

    writer: Literal["transformers", "vllm"] = Field(
        "transformers", description="who writes the text: transformers here, or the vLLM of the profile's vllm"
    )


class GreedyContinuation(WrittenContinuation):
    """The target's own greedy continuation."""

    kind: Literal["greedy"] = "greedy"
    max_new_tokens: Whole = Field(256, ge=1, le=1_000_000, description="stop after this many tokens if there is no EOS")


class Sampling(Options):
    """How a target samples its tokens. Settings apply in the order of transformers: temperature, top_k, top_p, min_p."""

    temperature: float | None = Field(
        None, gt=0, le=100, description="logits are divided by this; default: 1; for greedy text use kind: greedy"
    )
    top_k: Whole | None = Field(None, ge=0, description="number of most probable tokens to keep; default: 0, all")
    top_p: float | None = Field(None, gt=0, le=1, description="probability mass to keep; default: 1, all")
    min_p: float | None = Field(
        None, ge=0, le=1, description="lowest probability to keep, relative to the top token's; default: 0, no limit"
    )


class SampledContinuation(Sampling, WrittenContinuation):
    """Sampled by the target. The sample depends on the seed and the document, not on the batch."""

    kind: Literal["sampled"]
    max_new_tokens: Whole = Field(256, ge=1, le=1_000_000, description="stop after this many tokens if there is no EOS")
    seed: Whole = Field(0, ge=0, lt=2**63, description="random seed of the texts")
    generation_config: bool = Field(
        False, description="take unset values from the model's own generation config, as servers do by default"
    )


class GivenContinuation(Sampling):
    """Logged responses: text, or token ids that are never retokenized."""

    kind: Literal["given"]
    column: str | None = Field(None, description="column with the response, as text or as a list of token ids")
    answer: Literal["last"] | None = Field(
        None, description="last: the assistant's turn that ends the chat, as the chat template writes it"
    )
    on_policy: bool = Field(
        False, description="declare that this target generated the responses, greedily or with these sampling settings"
    )
    max_new_tokens: Whole | None = Field(None, ge=1, description="cut longer responses (counted); default: no limit")

    def problems(self) -> Iterator[str]:
        """Yield sampling settings of greedy text, and a response that is named twice or not at all."""
        if (self.column is None) == (self.answer is None):
            yield "needs exactly one of column, answer"
        if self.temperature is None and (self.top_k or self.top_p or self.min_p):
            yield "top_k, top_p and min_p need temperature (1 changes nothing); without it the text is greedy"


class TextContinuation(Options):
    """A plain corpus: the rendered prompt is cut after `prompt_tokens`, the rest is measured. Off-policy for every rule."""

    kind: Literal["text"]
    prompt_tokens: Whole = Field(32, ge=1, description="tokens before the first position; shorter texts are left out")
    max_new_tokens: Whole | None = Field(256, ge=1, description="cut longer texts (counted); null: no limit")


ContinuationOptions = Annotated[
    GreedyContinuation | SampledContinuation | GivenContinuation | TextContinuation, Field(discriminator="kind")
]


BatchSizes = Annotated[Ascending[Annotated[Whole, Field(ge=1)]], OneOrSeveral]
Contexts = Annotated[Ascending[Annotated[Whole, Field(ge=8)]], OneOrSeveral]
Milliseconds = Annotated[float, Field(ge=0)]


class MeasuredCosts(Options):
    """Step times measured here: forward passes of transformers in alphaprof's own loop (measured), or steps of the profile's
    vLLM (vllm).
    """

    source: Literal["auto", "measured", "vllm"] = Field(
        "auto",
        description="auto: measured on a CPU; on a GPU a roofline of it (preset: sglang-h200, or vllm-0.11 but on H200), "
        "since transformers launches every kernel by itself there, which engines do not. measured on a GPU: eager steps",
    )
    concurrency: BatchSizes = Field(
        [1], description="sequences per batch, one number or several: a report says up to which size a draft pays"
    )
    context: Contexts = Field(
        [256], description="tokens in the KV cache during a timed step, one number or several to interpolate between"
    )
    repeats: Whole = Field(
        100,
        ge=3,
        description="maximum timed rounds, each with every step once; fewer than 6 give wide intervals",
    )
    budget: float | None = Field(
        None,
        ge=0,
        description="maximum seconds of timing, without the starts of engines. If this is too short, larger batch sizes and "
        "longer contexts have no times. measured: it ends earlier once the cost of a round is known to 2%; default: 60. "
        "vllm: default: what the first rounds say that repeats take, 300 or 6 rounds at most",
    )

    @property
    def seconds(self) -> float:
        """The budget of step times in transformers."""
        return 60.0 if self.budget is None else self.budget


SECRET = "(KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|AUTH|AUTHORIZATION)(?![A-Z])"  # noqa: S105 - in the name of a variable or an argument, in capitals


def secret_names(options: Any) -> Iterator[str]:
    """Yield the names of texts that are secret, however deep they lie in options, or in JSON that an option holds."""
    if isinstance(options, str) and options.lstrip().startswith(("{", "[")):
        with contextlib.suppress(ValueError, RecursionError):
            options = json.loads(options)
    options = dict(enumerate(options)) if isinstance(options, list) else options
    for name, value in options.items() if isinstance(options, dict) else ():
        if isinstance(value, str) and re.search(SECRET, str(name).upper()):
            yield str(name)
        yield from secret_names(value)


class VllmOptions(Options):
    """Your vLLM: the python of its own environment, which starts it here, or the address of a running server. With both,
    the server writes texts and the other one times steps.
    """

    python: str | None = Field(None, description="python of an environment with vLLM, used to start it on this machine")
    url: Annotated[str | None, BeforeValidator(addressed)] = Field(
        None, pattern="^https?://", description="URL of a vLLM server that writes texts; its key is read from VLLM_API_KEY"
    )
    model: str | None = Field(None, description="the target's name on that server; default: its only model")
    args: Settings = Field(
        {},
        description="arguments of vLLM, e.g. {tensor_parallel_size: 2, enforce_eager: true}; others are those of the server "
        "at url, if it runs on this machine",
    )
    env: dict[str, str] = Field(
        {}, description="environment of the server, e.g. {OMP_NUM_THREADS: '8'}; default: of the server at url, or this one"
    )
    concurrency: Whole = Field(64, ge=1, description="number of texts written at a time")

    def problems(self) -> Iterator[str]:
        """Yield the problem of a group that names no engine."""
        if self.python is None and self.url is None:
            yield "needs python, to start vLLM, or url, the address of a running server"
        for name in secret_names(self.env | self.args):
            yield f"must not hold {shown(name)}, which the run would keep: set it in the shell, and vLLM inherits it"


class TableCosts(Options):
    """Step times of your own engine."""

    source: Literal["table"]
    path: str = Field(min_length=1, description="CSV or JSON with step times (docs/costs.md); relative to the profile")
    overhead_ms: Milliseconds = Field(
        0.0, description="added to every target step: sampling and scheduling, where the table leaves them out"
    )
    path_overhead: float = Field(
        0.0,
        ge=0,
        description="share by which plain decoding slows down on the path that drafts need (another runner, no asynchronous "
        "scheduling), where the table's other steps were timed without it: every round with a draft costs as much more",
    )


class RooflineCosts(Options):
    """Step times computed from bytes and FLOPs, for hardware that you do not have here."""

    source: Literal["roofline"]
    accelerator: str = Field(description="a device, like h100-sxm (listed in docs/costs.md)")
    tp: Whole = Field(1, ge=1, description="tensor parallel size of the target")
    draft_tp: Whole | None = Field(None, ge=1, description="tensor parallel size of a draft model; default: tp")
    concurrency: BatchSizes = Field(
        [1, 2, 4, 8, 16, 32, 64, 128], description="sequences per batch: a report says up to which size a draft pays"
    )
    overhead_ms: Milliseconds = Field(0.0, description="added to every target step: launches, sampling, scheduling")
    preset: str = Field(
        "none",
        description="engine whose overheads are added: sglang-h200, vllm-0.11, none, or a file (docs/costs.md)",
    )
    weight_bytes: float | None = Field(None, gt=0, description="bytes per parameter of the target; default: from its dtype")
    draft_weight_bytes: float | None = Field(
        None, gt=0, description="bytes per parameter of draft models; default: from their dtype"
    )
    kv_bytes: float | None = Field(None, gt=0, description="bytes per element of the KV cache; default: from the dtype")

    @field_validator("accelerator")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in ACCELERATORS:
            raise ValueError(f"unknown accelerator {shown(name)}: choose one of {', '.join(sorted(ACCELERATORS))}")
        return name

    @field_validator("preset")
    @classmethod
    def _known_preset(cls, name: str, info: ValidationInfo) -> str:
        """A run holds what the file held, and no file is read for it."""
        try:
            if not name.endswith(".json"):
                preset_of(name)
            elif info.context == STORED:
                raise ValueError(f"the run does not hold {shown(name)}")
        except OptionInvalid as error:
            raise ValueError(f"{error.message}: {error.hint}") from None
        return name


class NoCosts(Options):
    """No step times: the run measures acceptance only. A report may name a source later: `--set costs.source=table`."""

    source: Literal["none"]


CostOptions = Annotated[MeasuredCosts | TableCosts | RooflineCosts | NoCosts, Field(discriminator="source")]
