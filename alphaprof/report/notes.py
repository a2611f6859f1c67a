"""Notes by code: their rank, the first shown first, and what they concern. Message and remedy stand where one is raised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

# The texts of a run, any step times, or those that were measured on the run's own machine.
Concerns = Literal["texts", "times", "own times"]


class Kind(NamedTuple):
    """What a note concerns (None: neither texts nor times), and the check of a dry run that shows it (None: named so)."""

    concerns: Concerns | None = None
    check: str | None = None


OTHER = Kind()
KINDS: Mapping[str, Kind] = {
    # What can make the answer wrong,
    "contradicted": Kind("texts"),
    "not_greedy": Kind("texts"),
    "off_policy_sample": Kind("texts"),
    "outside_support": Kind("texts"),
    "long_tail": Kind("times"),
    "wiring": Kind("texts"),
    "damaged": Kind("texts"),
    "busy": Kind("own times"),
    "slow_baseline": Kind("times"),
    # then what makes it another one,
    "no_step_times": OTHER,
    "partial": Kind("texts"),
    "other_context": Kind("times"),
    "not_measured": Kind("times"),
    "near_ties": Kind("texts"),
    "cut_by_length": OTHER,
    "skipped": OTHER,
    "truncated": OTHER,
    # then the rest.
    "not_timed": Kind("own times"),
    "not_timed_there": Kind("own times"),
    "other_dtype": Kind(check="dtype"),
    "mixed_devices": OTHER,
    "unknown_worker": OTHER,
    "raw_prompts": Kind(check="chat template"),
    "halved_batches": OTHER,
    "stopped": OTHER,
    "no_log": OTHER,
    "part_of_log": OTHER,
    "never_full": OTHER,
    "imported": OTHER,
    "plain_steps": OTHER,
    "no_steps": OTHER,
    "prompts_unknown": OTHER,
    "rounds_only": OTHER,
    "beyond_prefill": OTHER,
    "token_by_token": OTHER,
    "chain": OTHER,
    "json_array": Kind(check="data"),
    "full_logits": Kind(check="memory"),
    "not_modelled": Kind(check="sampling"),
}
RANKS = {code: rank for rank, code in enumerate(KINDS)}


def kind(code: str) -> Kind:
    """The kind of a note; of one that an older run holds and nothing writes any more, `OTHER`."""
    return KINDS.get(code, OTHER)
