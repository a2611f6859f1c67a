"""Which engines serve a draft as it was measured: their words for it, and the exports that a user pastes into them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from alphaprof.run.manifest import DraftFacts


@dataclass(frozen=True)
class ServingEngine:
    """An engine as its source says (`docs/exports.md` names the versions). `name`: as `Trial.engines` calls it; `method`:
    its word for a draft, None if it has none; `draws`: whether it can draw a draft from q, instead of taking the top
    token; `schedules`: whether it can draft fewer tokens in a larger batch; `blocks`: whether it can verify a round's drafts
    together; `stops`: whether a draft model can stop at a p_min.
    """

    name: str
    method: Callable[[DraftFacts], object]
    draws: Callable[[DraftFacts], bool]
    schedules: Callable[[DraftFacts], bool]
    blocks: bool = False
    stops: bool = False


VLLM = ServingEngine(
    "vLLM",
    method=lambda facts: facts.engine_method,
    draws=lambda facts: not facts.in_one_step,
    schedules=lambda facts: not facts.in_one_step,
    blocks=True,
)
SGLANG = ServingEngine(
    "SGLang",
    method=lambda facts: facts.settings.get("speculative_algorithm"),
    draws=lambda facts: facts.by_depth and not facts.reduced_vocabulary,
    schedules=lambda facts: False,
)
LLAMACPP = ServingEngine(
    "llama.cpp",
    method=lambda facts: "draft-simple" if facts.engine_method == "draft_model" and not facts.by_depth else None,
    draws=lambda facts: False,
    schedules=lambda facts: False,
    stops=True,
)
PASTED = {"vllm-config": VLLM, "sglang-args": SGLANG, "llamacpp-args": LLAMACPP}  # by the format of `alphaprof export`


def paste_formats(facts: DraftFacts, rule: str, p_min: float = 0.0) -> tuple[str, ...]:
    """Return the formats of `alphaprof export` with which engines serve a draft as it was measured under `rule`: an id,
    auto, or ids joined by " and ", as a verdict names them. A gamma must be known as well.
    """
    return tuple(name for name, engine in PASTED.items() if not why_not_served(engine, facts, rule, p_min))


def why_not_served(engine: ServingEngine, facts: DraftFacts, rule: str, p_min: float = 0.0) -> str:
    """Return why an engine cannot serve a draft as it was measured under `rule` (see `paste_formats`); empty if it can."""
    from alphaprof.rules import parse_rule  # numpy, which the command line needs for no help page

    if engine.method(facts) is None:
        return f"{engine.name} has no method for a draft of kind {facts.kind}"
    if p_min and facts.has_distribution and not engine.stops:
        return f"{engine.name} does not stop drafts at a p_min"
    for bound in [parse_rule(name) for name in rule.split(" and ") if name != "auto"]:
        if not bound.rule.chained:
            return f"{engine.name} does not apply rule {bound.id}"
        if bound.rule.blocks and not engine.blocks:
            return f"{engine.name} does not verify drafts in blocks"
        if bound.rule.drawn and facts.has_distribution and not engine.draws(facts):
            lacking = " that lack some of the target's tokens" if facts.reduced_vocabulary else ""
            return f"{engine.name} uses the top tokens of {facts.kind} drafts{lacking}, but {bound.id} samples them"
    return ""
