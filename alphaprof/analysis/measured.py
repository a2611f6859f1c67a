"""What a clock says of real decoding: times of the same documents with and without a draft, and the speedup in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from alphaprof.analysis.rule_names import parse_rule
from alphaprof.analysis.rules import default_rule

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Decodings:
    """The same documents decoded in one way: with a draft at one gamma, or plainly (`draft` None, `gamma` 0).

    Seconds [repeats, documents]: `wall_s` and `cpu_s` of everything behind the first token, `prefill_s` (wall) of what
    comes before, `draft_s` and `verify_s` (wall) the parts of `wall_s` that drafting and verification took. Counts of
    the first repeat: `tokens` emitted by rounds, `rounds` [documents]; `drafted`, `accepted` [documents, gamma] rounds
    whose first d = 1..gamma tokens were drafted, and accepted. `same_text` [documents]: the text is the profiled one.
    """

    draft: str | None
    gamma: int
    wall_s: Array
    cpu_s: Array
    prefill_s: Array
    draft_s: Array
    verify_s: Array
    tokens: Array
    rounds: Array
    drafted: Array
    accepted: Array
    same_text: Array


@dataclass(frozen=True)
class Measured:
    """Real decoding of some documents of a run. `documents` [documents]: their numbers, ascending; `rules` [documents]: id
    of the rule that each was verified by; `short`: documents of fewer than two tokens, which have no decode time, and
    `foreign`: documents whose text the target did not write here; both are left out.
    """

    documents: Array
    rules: tuple[str, ...]
    plain: Decodings
    drafted: tuple[Decodings, ...]
    short: int
    foreign: int


@dataclass(frozen=True)
class Spread:
    """A ratio of times; `low` and `high`: the smallest and the largest that a single repeat gives, widened to hold it."""

    value: float
    low: float
    high: float


def decoded_rule(decision: str, policy: str) -> str:
    """The rule that text of a policy is decoded by: that of the decision, where it keeps such text as it is and its rounds
    are chains; else what engines do by default.
    """
    if decision != "auto":
        rule = parse_rule(decision).rule
        if not rule.lossy and rule.timed and policy in rule.policies:
            return decision
    return default_rule(policy)


def by_depth(counts: Array, gamma: int) -> Array:
    """How many of some rounds [rounds] reached a depth of d = 1..gamma, [gamma]."""
    return np.asarray((np.arange(1, gamma + 1) <= counts[:, None]).sum(0))


def measured_speedup(plain: Array, drafted: Array, plain_tokens: Array, drafted_tokens: Array) -> Spread | None:
    """Plain decode time per token / that with a draft, from times [repeats, documents] and tokens [documents].

    The median over repeats of each document, summed over documents. Where the texts are equal, as in float32, this is the
    ratio of the times. None where nothing was decoded.
    """
    if not (plain_tokens.sum() > 0 and drafted_tokens.sum() > 0 and drafted.sum(1).all()):
        return None
    per_token = drafted_tokens.sum() / plain_tokens.sum()
    value = np.median(plain, axis=0).sum() / np.median(drafted, axis=0).sum() * per_token
    each = plain.sum(1) / drafted.sum(1) * per_token
    return Spread(float(value), float(min(value, each.min())), float(max(value, each.max())))
