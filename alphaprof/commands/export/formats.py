"""The formats of `alphaprof export`, by name. Nothing heavy is imported here: the command line lists them."""

from __future__ import annotations

from alphaprof.report.serving import PASTED

RATES, LENGTHS, TEXTS = "rates", "inferencex", "texts"
ABOUT = {name: f"start options of {engine.name}" for name, engine in PASTED.items()} | {
    RATES: "acceptance by depth and gamma, as JSON for simulators and synthetic acceptance",
    LENGTHS: "acceptance length by domain and gamma, as YAML of InferenceX's golden curves",
    TEXTS: "a folder of token ids for head trainers (speculators, SpecForge), split as in alphaprof train",
}
