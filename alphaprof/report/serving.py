"""Which engines serve a draft as it was measured, by the table of `config.engines`."""

from __future__ import annotations

from alphaprof.config.engines import FORMATS, Engine
from alphaprof.run.manifest import DraftFacts

PASTED = ("vllm-config", "sglang-args", "llamacpp-args")  # formats of `alphaprof export` that start an engine


def paste_formats(facts: DraftFacts, rule: str, p_min: float = 0.0) -> tuple[str, ...]:
    """Return the formats of `alphaprof export` with which engines, in the newest versions that were read, serve a draft as
    it was measured under `rule`: an id, auto, or ids joined by " and ", as a verdict names them. A gamma must be known as
    well.
    """
    return tuple(name for name in PASTED if not why_not_served(FORMATS[name][0], facts, rule, p_min))


def why_not_served(engine: Engine, facts: DraftFacts, rule: str, p_min: float = 0.0) -> str:
    """Return why an engine cannot serve a draft as it was measured under `rule` (see `paste_formats`); empty if it can."""
    from alphaprof.rules import parse_rule  # numpy, which the command line needs for no help page

    if (method := facts.method_in(engine)) is None:
        if engine.name in facts.foreign:
            return f"{engine.name} does not take this draft of kind {facts.kind} as it is"
        return f"{engine.name} has no method for a draft of kind {facts.kind}"
    if p_min and facts.has_distribution and not (engine.stops and not method.confident):
        own = f"stops {facts.kind} drafts at a confidence of their own, not" if method.confident else "does not stop drafts"
        return f"{engine.name} {own} at a p_min"
    for bound in [parse_rule(name) for name in rule.split(" and ") if name != "auto"]:
        if not bound.rule.chained:
            return f"{engine.name} does not apply rule {bound.id}"
        if bound.name == "one_hot" and bound.name not in method.rules:
            return f"{engine} always samples drafts of candidates (DFlash2), but {bound.id} takes their top tokens"
        applied, few = bound.name in method.rules, method.whole and facts.reduced_vocabulary
        if not bound.rule.drawn or not facts.has_distribution or (applied and not few):
            continue
        where = f"{engine}{f' (runner {method.runner})' if method.runner else ''}"
        if "lossless" in method.rules and not few:
            return f"{where} does not verify {facts.kind} drafts in blocks"
        lacking = " that lack some of the target's tokens" if few else ""
        return f"{where} uses the top tokens of {facts.kind} drafts{lacking}, but {bound.id} samples them"
    return ""
