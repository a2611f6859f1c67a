"""The step times of a head that is not a draft of the run: those of a draft head that is, or of its shape."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alphaprof.costs.cost_model import ROOFLINE, open_costs
from alphaprof.costs.roofline import ModelShape
from alphaprof.costs.speedup import StepTimes
from alphaprof.log.manifest import DraftFacts, ModelFacts
from alphaprof.log.store import Run
from alphaprof.log.training import TrainingRecord
from alphaprof.totals.documents import mean_context

OWN = "head"  # what its rows are called


@dataclass(frozen=True)
class HeadSteps:
    """Step times of target and head; `words`: what they are, or why there are none (`times` None)."""

    times: StepTimes | None
    words: str


def head_steps(run: Run, config: Mapping[str, Any], folder: Path, record: TrainingRecord | None) -> HeadSteps:
    """The step times of a head in a folder at the concurrency of the decision. Raises `CostsUnreadable`."""
    concurrency, drafts = int(config["decision"]["concurrency"]), run.manifest.drafts
    context = mean_context(run.documents())
    book = open_costs(run, config["costs"], context)
    if book is None:
        return HeadSteps(None, "no step times were measured with this run, and costs name no others")
    heads = [name for name, facts in drafts.items() if facts.by_depth and facts.has_steps and not facts.in_one_step]
    decided = config["decision"]["draft"]
    heads.sort(key=lambda name: name != decided)
    timing = book.timing(concurrency)
    if timed := [name for name in heads if name in timing.times]:
        return HeadSteps(timing.times[timed[0]], f"{book.basis}, with the steps of the draft head {timed[0]}")
    if heads:
        return HeadSteps(None, timing.missing.get(heads[0], "no step times were measured"))
    if config["costs"]["source"] == ROOFLINE and (shape := _shape(folder, record)) is not None:
        return HeadSteps(_by_roofline(run, config, shape, context), f"{book.basis}, by the shape of the head")
    return HeadSteps(
        None,
        "no steps of a draft head were timed: profile one of these heads as a draft, or give an accelerator "
        "(--set costs.source=roofline --set costs.accelerator=NAME)",
    )


def _by_roofline(run: Run, config: Mapping[str, Any], shape: ModelShape, context: float | None) -> StepTimes | None:
    """What a roofline says of a run that had such a head as a draft."""
    fields = {field.name: getattr(run.manifest.target, field.name) for field in dataclasses.fields(ModelFacts)}
    facts = DraftFacts(**fields | {"shape": dataclasses.asdict(shape)}, has_distribution=True, has_steps=True, depths=1)
    book = open_costs(run.view(dataclasses.replace(run.manifest, drafts={OWN: facts})), config["costs"], context)
    return book.times(int(config["decision"]["concurrency"])).get(OWN) if book else None


def _shape(folder: Path, record: TrainingRecord | None) -> ModelShape | None:
    """The shape of a head of one decoder layer in speculators' layout, from its config.json; None where it says too little.

    Its matrices: what joins three states of the target, attention over embedding and state, MLP, and the reduced vocabulary.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        layer = config["transformer_layer_config"]
        hidden, heads, wide = (int(layer[name]) for name in ("hidden_size", "num_attention_heads", "intermediate_size"))
        kv_heads, size = int(layer.get("num_key_value_heads") or heads), int(config["draft_vocab_size"])
        head_dim = int(layer.get("head_dim") or hidden // heads)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError):
        return None
    if min(hidden, heads, wide, kv_heads, size, head_dim) < 1:
        return None
    joining, logits = 3 * hidden * hidden, size * hidden
    attention = 2 * hidden * head_dim * (heads + 2 * kv_heads) + heads * head_dim * hidden
    parameters = joining + attention + 3 * hidden * wide + logits
    return ModelShape(
        parameters=parameters,
        layers=1,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=size,
        tied=True,
        first_parameters=joining,
        last_parameters=logits,
        stored_parameters=record.parameters if record else 0.0,
    )
