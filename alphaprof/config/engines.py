"""What inference engines do with drafts, as read in their released packages. Exports, the reasons for which a draft is not
served, and the tables of docs/exports.md and docs/rules.md come from here; `scripts/engine_conformance.sh` holds each line
against the engine's own parser.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from alphaprof.errors import OptionInvalid, shown

TOP = ("strict", "one_hot")  # rules on a draft's top tokens, which every engine applies
DRAWN = (*TOP, "lossless")
EVERY = (*DRAWN, "block")
V1, V2 = "V1", "V2"  # vLLM's model runners: a draft that V2 does not run is V1's, which ignores block silently


@dataclass(frozen=True)
class Method:
    """How an engine runs one kind of draft.

    `name`: its word for it; `rules`: that it applies; `whole`: those that draw drafts need one with all of the target's
    tokens; `schedule`: it can draft fewer tokens in a larger batch; `multiples`: more drafts than the target has modules
    must be a multiple of them; `runner`: which part of the engine runs it, if it has two; `options`: what else it must be
    told; `sized`: an option that it needs gamma in, too; `confident`: what stops its drafts is a confidence of their own;
    `picked`: the rules for drafts that are drawn from candidates whatever is asked (none: as `rules`).
    """

    name: str
    rules: tuple[str, ...] = TOP
    whole: bool = False
    schedule: bool = False
    multiples: bool = False
    runner: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    sized: str = ""
    confident: bool = False
    picked: tuple[str, ...] = ()


@dataclass(frozen=True)
class Engine:
    """An engine in the `versions` that were read, the newest first, which do the same. `name`: as `Trial.engines` calls it;
    `methods`: by kind of draft; `rules`: the options that ask for one; `stops`: drafts can stop at a p_min; `draws`: from
    what a draft is drawn, if not from all of its distribution; `limits`: of its schedules.
    """

    name: str
    versions: tuple[str, ...]
    methods: Mapping[str, Method]
    rules: Mapping[str, Mapping[str, str]]
    stops: bool = False
    draws: str = ""
    limits: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.versions[0]}"


_HEAD = Method("", EVERY, schedule=True, runner=V2)
_PARALLEL = Method("", DRAWN, runner=V1, options={"parallel_drafting": True})  # its rows are sized for K at the start
_AS_STARTED: dict[str, Mapping[str, str]] = {rule: {} for rule in TOP}
_STANDARD = {"draft_sample_method": "greedy", "rejection_sample_method": "standard"}
VLLM = Engine(
    "vLLM",
    ("0.33", "0.32"),
    {
        "model": replace(_HEAD, name="draft_model"),
        "prompt_lookup": replace(_HEAD, name="ngram"),
        "eagle1": replace(_HEAD, name="eagle"),
        "eagle3": replace(_HEAD, name="eagle3"),
        "mtp": replace(_HEAD, name="mtp", multiples=True),
        "gemma4_assistant": replace(_HEAD, name="mtp"),
        "dflash": replace(_HEAD, name="dflash"),
        "dspark": replace(_HEAD, name="dspark"),
        "p_eagle": replace(_PARALLEL, name="eagle3"),
        "pard": replace(_PARALLEL, name="draft_model"),
    },
    {
        **dict.fromkeys(TOP, _STANDARD),
        "lossless": _STANDARD | {"draft_sample_method": "probabilistic"},
        "block": {"draft_sample_method": "probabilistic", "rejection_sample_method": "block"},
    },
    limits="vLLM drops a schedule with --data-parallel-size above 1, and a draft that is a model reads on at gamma 0, which "
    "took 7 to 22 % of a step (vllm#49548)",
)
# Its V2 runner has heads alone, and does not follow a schedule.
VLLM_OLDER = replace(
    VLLM,
    versions=("0.29",),
    methods={kind: replace(method, schedule=False) for kind, method in VLLM.methods.items()}
    | {
        "model": Method("draft_model", DRAWN, schedule=True, runner=V1),
        "prompt_lookup": Method("ngram", EVERY, schedule=True, runner=V1),
    },
)
SGLANG = Engine(
    "SGLang",
    ("0.5.23",),
    {
        "model": Method("STANDALONE"),
        "eagle1": Method("EAGLE", EVERY, whole=True, schedule=True),
        "eagle3": Method("EAGLE3", EVERY, whole=True, schedule=True),
        "mtp": Method("NEXTN", EVERY, whole=True, schedule=True),
        "gemma4_assistant": Method("NEXTN"),  # which becomes FROZEN_KV_MTP by the files, and has no rejection sampling
        # Takes both options of rejection sampling, and drafts greedily all the same: but for DFlash2, which always samples.
        "dflash": Method("DFLASH", picked=("strict", "lossless", "block")),
        "dspark": Method("DSPARK", EVERY, sized="--speculative-dspark-block-size"),
    },
    {
        **_AS_STARTED,
        "lossless": {"--speculative-use-rejection-sampling": ""},
        "block": {"--speculative-use-rejection-sampling": "", "--speculative-use-block-verification": ""},
    },
    limits="SGLang drops a schedule with data-parallel attention and with --enable-multi-layer-eagle; it goes by the batch "
    "sizes of its CUDA graphs",
)
SGLANG_OLDER = replace(
    SGLANG,
    versions=("0.5.15",),
    methods={
        kind: replace(method, rules=tuple(rule for rule in method.rules if rule != "block"), picked=())
        for kind, method in SGLANG.methods.items()
        if kind not in ("dspark", "gemma4_assistant")
    },
)
LLAMACPP = Engine(
    "llama.cpp",
    ("b11549",),
    {
        "model": Method("draft-simple", DRAWN),
        "eagle3": Method("draft-eagle3"),
        "mtp": Method("draft-mtp", DRAWN),
        "dflash": Method("draft-dflash"),
        "dspark": Method("draft-dspark", confident=True),
    },
    {**_AS_STARTED, "lossless": {"--spec-draft-sampling": "probabilistic"}},
    stops=True,
    draws="the draft's top ten tokens",
)
LLAMACPP_OLDER = replace(
    LLAMACPP,
    versions=("b11063",),
    methods={kind: replace(method, rules=TOP) for kind, method in LLAMACPP.methods.items()},
)
# By the format of `alphaprof export`, each engine's newest version first.
FORMATS: dict[str, tuple[Engine, ...]] = {
    "vllm-config": (VLLM, VLLM_OLDER),
    "sglang-args": (SGLANG, SGLANG_OLDER),
    "llamacpp-args": (LLAMACPP, LLAMACPP_OLDER),
    "sglang-adaptive": (SGLANG, SGLANG_OLDER),
}
ENGINES = (VLLM, SGLANG, LLAMACPP)


def engine_of(to: str, version: str | None) -> Engine:
    """Return the engine of a format in a version, 0.32 or 0.32.1; None: the newest that was read. Raises `OptionInvalid` for
    one that was not.
    """
    known = FORMATS.get(to, ())
    if version is None and known:
        return known[0]
    for engine in known:
        if any(f"{version}.".startswith(f"{each}.") for each in engine.versions):
            return replace(engine, versions=(str(version),))
    if not known:
        raise OptionInvalid(f"--to {to} is for no engine, but --engine-version was given", "leave it out")
    read = ", ".join(each for engine in known for each in engine.versions)
    raise OptionInvalid(
        f"--engine-version {shown(version)}: this version of {known[0].name} was not read",
        f"name one that was, and does as yours: {read}",
    )


def vllm_speculation(
    method: Method, settings: Mapping[str, Any], gamma: int, model: str | None, revision: str | None
) -> dict[str, Any]:
    """Return what vLLM's speculative_config says of a draft whose facts have `settings`: its method, files and gamma."""
    named = {"method": method.name, "model": model, "revision": revision}
    config = {key: value for key, value in named.items() if value is not None} | dict(method.options)
    if "max_ngram" in settings:
        config |= {"prompt_lookup_max": settings["max_ngram"], "prompt_lookup_min": settings.get("min_ngram", 1)}
    return config | {"num_speculative_tokens": gamma}


def used_by(rule: str) -> str:
    """Return which engines apply a rule, each in its newest version with the options that ask for it; empty if none does."""
    found = []
    for engine in ENGINES:
        asked = engine.rules.get(rule)
        if asked is not None and rule != "strict":  # on greedy text all do
            changed = [" ".join(filter(None, item)) for item in asked.items() if item not in engine.rules["one_hot"].items()]
            found.append(engine.name + (f" with {' and '.join(changed)}" if changed else ""))
    return ", ".join(found)
