"""What a scoring pass measures on request: thresholds of acceptance, and rules that need whole distributions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from alphaprof.log.schema import LogRules
from alphaprof.rules import BoundRule, rules_of
from alphaprof.theory.certificates import ACCEPTED, Divergence, Target, certify

TOP = 64  # target probabilities that thresholds look at: enough for every rule but where the target has hardly an opinion
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Extras:
    """`certified`: rules whose thresholds are wanted, by the divergences that they are wanted for; `logged`: rules that need
    whole distributions; `drawn`: ids of the others whose drafts are drawn from q.
    """

    certified: tuple[BoundRule, ...] = ()
    logged: tuple[BoundRule, ...] = ()
    divergences: tuple[Divergence, ...] = ("kl",)
    drawn: tuple[str, ...] = ()

    @classmethod
    def of(cls, rules: Iterable[str], certificates: bool) -> Extras:
        """What a profile with these ids of rules asks for."""
        rules = tuple(rules)
        bound = rules_of(rules)
        certified = tuple(rule for rule in bound if certificates and rule.name in ACCEPTED)
        logged = tuple(rule for rule in bound if rule.rule.logged)
        return cls(certified, logged, drawn=LogRules(rules).drawn)

    def log_rules(self, rules: Iterable[str]) -> LogRules:
        """What a log with these extras holds of which rules."""
        emitted = tuple(rule.id for rule in self.logged if not rule.rule.lossy)
        return LogRules(tuple(rules), emitted, tuple(rule.id for rule in self.certified))

    def measured(self, p: Any, q: Any, token: Any) -> dict[str, Any]:
        """Columns [n] of the rules that need whole distributions: p and q, tensors [n, V], and the emitted tokens [n]."""
        columns = {}
        for rule in self.logged:
            measure = cast(Callable[..., tuple[Any, Any]], rule.rule.measure)  # `logged` says that it is there
            columns[f"accept_{rule.id}"], emitted = measure(p, q, token, **rule.arguments)
            if not rule.rule.lossy:
                columns[f"emitted_{rule.id}"] = emitted
        return columns

    def thresholds(self, top: Array, entropy: Array, vocabulary: int) -> dict[str, Array]:
        """Columns [positions] from the target's TOP probabilities [positions, TOP], largest first, and its entropy.
        Thresholds of another divergence than kl have its name at the end.
        """
        target = Target(top, vocabulary, entropy)
        columns = {"target_top_10_prob": np.minimum(1.0, target.top[:, :10].sum(1)).astype(np.float32)}
        exact = np.ones(len(top), dtype=bool)
        for divergence, rule in itertools.product(self.divergences, self.certified):
            threshold = certify(rule, target, divergence)
            suffix = "" if divergence == "kl" else f"_{divergence}"
            columns[f"threshold_{rule.id}{suffix}"] = threshold.value.astype(np.float32)
            exact &= threshold.exact
        return columns | {"thresholds_exact": exact}


NO_EXTRAS = Extras()
