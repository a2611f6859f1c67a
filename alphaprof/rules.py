"""Acceptance rules, which say when a drafted token is kept: one small function per rule over columns of the log.

p and q: the target's and the draft's distribution at a position; x_t: the token of the text there; x0: the target's top
token; d: the drafted token. beta_t: probability that d is kept; a_t: probability that x_t was drafted and kept.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from alphaprof.errors import VALUE, cut, shown

Columns = Mapping[str, np.ndarray[Any, Any]]
Values = np.ndarray[Any, Any]
GREEDY, SAMPLED = "greedy", "sampled"  # how the target chose a text's tokens
GAMMA_LIMIT = 64  # the most drafted tokens a round that a profile may ask for
MAX_NGRAM = 3  # tokens of the longest run that prompt lookup looks up, unless a profile says another number
BOTH = (GREEDY, SAMPLED)
SMALLEST_THRESHOLD = 1e-9  # SGLang divides by no smaller one
NOT_MODELLED = {  # and why not
    "fly": "a rejection where the target is unsure is waived if the next min(6, K - 1) drafts are accepted after it "
    "(vLLM): they follow another text than the one that was measured",
    "lenience": "with probability min(1, p(d)/(l q(d))) (Leviathan et al.): its alpha, sum min(p/l, q), is not in the log",
}
DEFAULT_RULES = ("strict", "lossless", "one_hot")  # others only if a profile or a report names them


@dataclass(frozen=True)
class Parameter:
    """A parameter of a rule, from `low` to `high`. `relaxes`: +1 if larger values accept more, -1 if smaller ones do."""

    name: str
    low: float
    high: float
    relaxes: int
    whole: bool = False


@dataclass(frozen=True)
class Rule:
    """A rule of acceptance. Both functions map columns of n positions (and the parameters) to n values in [0, 1].

    `emitted` is None for a lossy rule: its output departs from the text that was measured, so that its rounds cannot be
    replayed. `policies`: how the target must have chosen a text for the text to be what the rule's own decoding would emit
    (for a lossy rule: what it departs from; one of sampled text alone keeps drafts by chance). `timed`: a round costs gamma
    draft steps and one verification of gamma + 1. `drawn`: drafts are drawn from q, so that a draft equal to the target is
    always accepted, and what happened to the token that was emitted is a probability where q is not a point mass. `blocks`:
    the drafts of a round are verified together. `at_most_top`: it keeps at most the target's top probability; `by_token`: it
    depends on the rank of x_t in q. `used_by`: who decodes like this, beside the engines of config/engines.py.
    """

    about: str
    accept: Callable[..., Values]
    emitted: Callable[..., Values] | None
    policies: tuple[str, ...]
    parameters: tuple[Parameter, ...] = ()
    timed: bool = True
    drawn: bool = False
    blocks: bool = False
    at_most_top: bool = False
    by_token: bool = False
    used_by: str = ""

    @property
    def lossy(self) -> bool:
        """Whether the output differs from what the target alone would write."""
        return self.emitted is None

    @property
    def chained(self) -> bool:
        """Whether its rounds verify a chain of drafted tokens and keep the target's text."""
        return not self.lossy and self.timed


def agrees(columns: Columns) -> Values:
    """1[draft_top = x_t]: the emitted token is the one that the draft proposed."""
    return np.asarray(columns["draft_top"] == columns["token"], dtype=np.float32)


def strict(columns: Columns) -> Values:
    """1[d = x_t] on the target's greedy text (column `greedy`), 1[d = x0] elsewhere."""
    reference = np.where(columns["greedy"], columns["token"], columns["target_top"])
    return np.asarray(columns["draft_top"] == reference, dtype=np.float32)


def lossless(columns: Columns) -> Values:
    """Return sum min(p, q): the draft's token is drawn from q and kept with probability min(1, p/q)."""
    return np.asarray(np.where(np.isnan(columns["overlap"]), columns["target_prob_of_draft_top"], columns["overlap"]))


def lossless_emitted(columns: Columns) -> Values:
    """min(1, q(x_t) / p(x_t))."""
    return np.minimum(1.0, ratio(columns))


def ratio(columns: Columns) -> Values:
    """q(x_t) / p(x_t); 0 if the scoring pass gives x_t no probability (its truncation differs by rounding)."""
    p, q = (np.asarray(columns[name], dtype=np.float64) for name in ("target_token_prob", "draft_token_prob"))
    return np.where(np.isnan(q), agrees(columns), np.divide(q, p, out=np.zeros_like(q), where=p > 0))


def one_hot(columns: Columns) -> Values:
    """p(d), d the draft's top token: what engines do by default on sampled text."""
    return np.asarray(columns["target_prob_of_draft_top"])


def additive(columns: Columns, epsilon: float) -> Values:
    """1[p(d) >= p(x0) - epsilon]."""
    return _kept(columns, columns["target_top_prob"].astype(np.float64) - epsilon)


def multiplicative(columns: Columns, factor: float) -> Values:
    """1[p(d) >= factor p(x0)]."""
    return _kept(columns, factor * columns["target_top_prob"].astype(np.float64))


def top_m(columns: Columns, m: int) -> Values:
    """1[d is among the m most probable tokens of p]."""
    return _ranked(columns["target_rank_of_draft_top"], m)


def typical(columns: Columns, epsilon: float, delta: float) -> Values:
    """1[p(d) >= min(epsilon, delta exp(-H(p)))] (Medusa)."""
    return _kept(columns, np.minimum(epsilon, delta * np.exp(-columns["target_entropy"].astype(np.float64))))


def trtllm(columns: Columns, k: int, delta: float) -> Values:
    """1[d is among the k most probable tokens of p, and p(d) >= p(x0) - delta] (TensorRT-LLM's relaxed acceptance)."""
    return top_m(columns, k) * additive(columns, delta)


def sglang(columns: Columns, single: float, acc: float) -> Values:
    """1 if p(d) >= single, else min(1, p(d) / acc); 0 if p(d) = 0. d: the draft's top token."""
    p = columns["target_prob_of_draft_top"].astype(np.float64)
    return np.where((p > 0) & (p >= single), 1.0, np.minimum(1.0, p / max(acc, SMALLEST_THRESHOLD)))


def ensemble(columns: Columns, weight: float) -> Values:
    """1 - w (1 - sum min(p, q)) = sum min(w p + (1 - w) q, q): d is drawn from q, and verified against w p + (1 - w) q."""
    return 1.0 - weight * np.maximum(1.0 - lossless(columns).astype(np.float64), 0.0)  # a sum of min(p, q) may round above 1


def tree(columns: Columns, width: int) -> Values:
    """1[x_t is among the draft's `width` most probable tokens]: a full tree of that width holds it. The text stays."""
    ranks = columns["draft_rank_of_token"]
    return np.where(ranks >= 1, _ranked(ranks, width), agrees(columns))


def _kept(columns: Columns, threshold: Values) -> Values:
    """1[p(d) >= threshold], the top token itself always included: rounding must not reject what cannot be beaten."""
    reached = columns["target_prob_of_draft_top"] >= np.minimum(threshold, columns["target_top_prob"])
    return np.asarray(reached, dtype=np.float32)


def _ranked(ranks: Values, most: int) -> Values:
    """1[rank <= most]; null is -1 or NaN in columns that come from a log."""
    return np.asarray((ranks >= 1) & (ranks <= most), dtype=np.float32)


RULES = {
    "strict": Rule("d is the target's top token x0", strict, agrees, (GREEDY,), used_by="every engine on greedy text"),
    "lossless": Rule(
        "with probability min(1, p(d)/q(d)), d drawn from q; alpha = sum min(p, q)",
        lossless,
        lossless_emitted,
        (SAMPLED,),
        drawn=True,
        used_by="TensorRT-LLM with use_rejection_sampling, Hugging Face with do_sample",
    ),
    "block": Rule(
        "all drafts of a round verified together, d drawn from q; its per-draft alpha equals that of lossless",
        lossless,
        lossless_emitted,
        (SAMPLED,),
        drawn=True,
        blocks=True,
    ),
    "one_hot": Rule(
        "with probability p(d), d the draft's top token",
        one_hot,
        agrees,
        (SAMPLED,),
        at_most_top=True,
        used_by="TensorRT-LLM by default, EAGLE",
    ),
    "additive": Rule("p(d) >= p(x0) - epsilon", additive, None, BOTH, (Parameter("epsilon", 0, 1, +1),)),
    "multiplicative": Rule("p(d) >= factor p(x0)", multiplicative, None, BOTH, (Parameter("factor", 0, 1, -1),)),
    "top_m": Rule("d is among the m most probable tokens of p", top_m, None, BOTH, (Parameter("m", 1, 1e6, +1, True),)),
    "typical": Rule(
        "p(d) >= min(epsilon, delta exp(-H(p)))",
        typical,
        None,
        BOTH,
        (Parameter("epsilon", 0, 1, -1), Parameter("delta", 0, 1, -1)),
        used_by="Medusa (posterior_threshold is epsilon, posterior_alpha is delta), older vLLM",
    ),
    "trtllm": Rule(
        "d is among the k most probable tokens of p, and p(d) >= p(x0) - delta",
        trtllm,
        None,
        BOTH,
        (Parameter("k", 1, 1e6, +1, whole=True), Parameter("delta", 0, 1, +1)),
        used_by="TensorRT-LLM while thinking (relaxed_topk, relaxed_delta)",
    ),
    "sglang": Rule(
        "p(d) >= single; else with probability min(1, p(d)/acc), d the draft's top token",
        sglang,
        None,
        (SAMPLED,),
        (Parameter("single", 0, 1, -1), Parameter("acc", 0, 1, -1)),
        used_by="SGLang with speculative_accept_threshold_single or _acc below 1 (1,1 is one_hot)",
    ),
    "ensemble": Rule(
        "with probability min(1, 1 - weight + weight p(d)/q(d)), d drawn from q; alpha = 1 - weight TV(p, q)",
        ensemble,
        None,
        (SAMPLED,),
        (Parameter("weight", 0, 1, -1),),
        drawn=True,
        used_by="Hugging Face with assistant_ensemble_weight and do_sample (1 is lossless)",
    ),
    "tree": Rule(
        "x_t is among the draft's `width` most probable tokens (a full tree of that width)",
        tree,
        tree,
        BOTH,
        (Parameter("width", 1, 1e6, +1, whole=True),),
        timed=False,
        by_token=True,
        used_by="Medusa and EAGLE trees of a fixed shape, as an upper bound: theirs have fewer nodes",
    ),
}


@dataclass(frozen=True)
class BoundRule:
    """A rule with values for its parameters, in their order."""

    name: str
    values: tuple[float, ...] = ()

    @property
    def rule(self) -> Rule:
        """The rule itself."""
        return RULES[self.name]

    @property
    def id(self) -> str:
        """The name in options, columns and JSON, safe in SQL and pandas: additive_0p1."""
        return "_".join([self.name, *(_text(value) for value in self.values)])

    @property
    def arguments(self) -> dict[str, float]:
        """Values by parameter."""
        return {item.name: value for item, value in zip(self.rule.parameters, self.values, strict=True)}

    def accept(self, columns: Columns) -> Values:
        """beta_t [positions]: the probability that the draft's proposal is kept, before the emitted token is known."""
        return self.rule.accept(columns, **self.arguments)

    def emitted(self, columns: Columns) -> Values | None:
        """a_t [positions]: the probability that the emitted token was an accepted draft; None for a lossy rule."""
        return None if self.rule.emitted is None else self.rule.emitted(columns, **self.arguments)


def default_rule(policy: str) -> str:
    """Return the default rule of engines on greedy or sampled text."""
    return "one_hot" if policy == SAMPLED else "strict"


def decoded_rule(decision: str, policy: str) -> str:
    """Return the rule that decodes text of a policy: the decision's if it can, else the default of engines."""
    if decision != "auto":
        rule = parse_rule(decision).rule
        if rule.chained and policy in rule.policies:
            return decision
    return default_rule(policy)


def _text(value: float) -> str:
    """Return a value without exponent or point: 0.1 -> 0p1, 10 -> 10."""
    return np.format_float_positional(value, trim="-").replace(".", "p")


def parse_rule(specification: object) -> BoundRule:
    """Return a rule from `strict`, `additive_0p1`, `additive:0.1`, `typical:0.09,0.3`, `{additive: 0.1}` or
    `{typical: {epsilon: 0.09, delta: 0.3}}`. Raises `ValueError` with the known rules.
    """
    if isinstance(specification, BoundRule):
        return specification
    if isinstance(specification, Mapping) and len(specification) == 1:
        ((name, given),) = specification.items()
        return _bound(str(name), given)
    if not isinstance(specification, str):
        raise ValueError(f"{shown(specification)} is not a rule: write a name, or {{name: value}}; {_known_rules()}")
    name, colon, given = specification.partition(":")
    if colon:
        return _bound(name.strip(), [_number(part) for part in given.split(",")])
    for known in sorted(RULES, key=len, reverse=True):
        if name == known or name.startswith(f"{known}_"):
            return _bound(known, [_number(part.replace("p", ".")) for part in name[len(known) :].split("_")[1:]])
    return _bound(name, [])


def rules_of(ids: Iterable[str]) -> list[BoundRule]:
    """Return rules from their ids."""
    return [parse_rule(name) for name in ids]


def _bound(name: str, given: object) -> BoundRule:
    if name in NOT_MODELLED:
        raise ValueError(f"rule {name!r} is not supported; {_known_rules()}")
    if name not in RULES:
        near = difflib.get_close_matches(name.lower().replace("-", "_"), RULES, n=1)
        raise ValueError(f"unknown rule {shown(name)}{f' (did you mean {near[0]}?)' if near else ''}; {_known_rules()}")
    parameters = RULES[name].parameters
    names = [parameter.name for parameter in parameters]
    if isinstance(given, Mapping):
        if set(given) != set(names):
            strange = cut(", ".join(map(str, given)), VALUE)
            raise ValueError(f"{name} has the parameters {', '.join(names) or 'none'} (not {strange})")
        values = [given[parameter] for parameter in names]
    else:
        values = list(given) if isinstance(given, (list, tuple)) else [given]
    if len(values) != len(names):
        count = f"{len(names)} parameter{'' if len(names) == 1 else 's'}"
        raise ValueError(f"{name} has {count}, not {len(values)}: write {spelling(name)}")
    return BoundRule(name, tuple(_checked(name, item, value) for item, value in zip(parameters, values, strict=True)))


def _checked(rule: str, parameter: Parameter, value: object) -> float:
    number = _number(value) if isinstance(value, str) else value  # YAML reads 1e-3 as a text
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        number = math.nan
    if not parameter.low <= number <= parameter.high or (parameter.whole and number != int(number)):
        kind = f"{'a whole' if parameter.whole else 'a'} number from {parameter.low:g} to {parameter.high:g}"
        raise ValueError(f"{rule}: {parameter.name} must be {kind}, not {shown(value)}")
    return int(number) if parameter.whole else float(number) + 0.0  # no negative zero: not additive_-0 as a column name


def _number(text: str) -> float:
    try:
        return float(text if "_" not in text else "no number")  # Python reads 0_1 as 1
    except ValueError:
        raise ValueError(f"{shown(text)} is not a number; {_known_rules()}") from None


def spelling(name: str) -> str:
    """Return how a rule is written on the command line: typical:epsilon,delta."""
    return ":".join([name, ",".join(item.name for item in RULES[name].parameters)]).rstrip(":")


def _known_rules() -> str:
    return "known: " + ", ".join(map(spelling, RULES))
