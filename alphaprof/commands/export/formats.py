"""The formats of `alphaprof export`, by name. Nothing heavy is imported here: the command line lists them."""

from __future__ import annotations

from dataclasses import dataclass

from alphaprof.config.engines import FORMATS

RATES, LENGTHS, TEXTS, ADAPTIVE = "rates", "inferencex", "texts", "sglang-adaptive"
PROFILE, STEP_COSTS = "speculation-profile", "sglang-step-costs"
ABOUT = {name: f"start options of {engines[0].name}" for name, engines in FORMATS.items()} | {
    ADAPTIVE: "SGLang's file of gamma by concurrency",
    STEP_COSTS: "SGLang's file of step costs, from which it budgets the drafts of DSpark",
    RATES: "acceptance by depth and gamma, as JSON for simulators and synthetic acceptance",
    LENGTHS: "acceptance length by domain and gamma, as YAML of InferenceX's golden curves",
    PROFILE: "ModelOpt's speculation_profile.json, which travels with a draft's checkpoint",
    TEXTS: "a folder of token ids for head trainers (speculators, SpecForge), split as in alphaprof train",
}


@dataclass(frozen=True)
class Artefact:
    """A file's text, and what it assumes; `warnings`: where it may not be what a reader takes it for."""

    text: str
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
