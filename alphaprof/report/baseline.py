"""The gate against a baseline: a draft held against an older one on the same prompts, domain by domain.

Profiled runs are held by alpha. Imported ones do not tell it, and are held by tokens per round over all rounds at the gamma
that was served. A draft that proposed something in a domain and no longer does fails there, whatever the margin: nothing is
left to take a bound from, and a gate that skipped it would pass the worst that can happen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from alphaprof.analysis.estimate import Estimate, distinct
from alphaprof.analysis.gates import Gate, Judged, judge, together
from alphaprof.analysis.paired import inverse_difference, share_difference
from alphaprof.analysis.rule_names import parse_rule
from alphaprof.analysis.speedup import free_draft, spent_and_base
from alphaprof.errors import NotComparable
from alphaprof.log.store import Run
from alphaprof.report.check import (
    DIFFERENCE,
    TOKENS_DIFFERENCE,
    Check,
    Item,
    Measure,
    Unjudged,
    one_rule,
    reason_of,
)
from alphaprof.report.comparable import require_comparable
from alphaprof.report.compare import Paired, Side, paired_pools, summed
from alphaprof.report.format import text_kind
from alphaprof.report.inquiry import Inquiry
from alphaprof.report.pool import Pool, proposes_nothing

LOST = "the draft proposes nothing there any more, as it did in the baseline"


@dataclass(frozen=True)
class Both:
    """The paired documents of one domain and kind of text. `gamma`: that was served; None: alpha is known."""

    domain: str
    old: Pool
    new: Pool
    gamma: int | None

    def hindrance(self, rule: str) -> str | None:
        """Why this text cannot be judged; None where it can."""
        if self.old.policy not in parse_rule(rule).rule.policies:
            return f"{rule} does not belong to its text ({text_kind(self.old.continuation, self.old.sampling)})"
        if self.gamma is not None and not all(pool["tokens"].sum() for pool in (self.old, self.new)):
            return "no text of one side is longer than the one token of its prefill"
        if proposes_nothing(self.old, self.gamma):
            return f"the baseline's draft proposes nothing there{', nor does this one' if self.silent else ''}"
        return None

    @property
    def silent(self) -> bool:
        """Whether the new side proposes nothing at all."""
        return proposes_nothing(self.new, self.gamma)

    @property
    def measure(self) -> Measure:
        """What the two are compared by."""
        return DIFFERENCE if self.gamma is None else TOKENS_DIFFERENCE

    def difference(self, confidence: float) -> Estimate:
        """The new side's alpha less the old one's; at a gamma, tokens per round. With an interval over units."""
        if self.gamma is None:
            return share_difference(summed(self.old), summed(self.new), confidence)
        sides = [spent_and_base(pool.counts(self.gamma), free_draft(self.gamma)) for pool in (self.old, self.new)]
        return inverse_difference(sides[0], sides[1], confidence, self.gamma)

    def bounds(self, tail: float) -> tuple[float, float]:
        """One-sided bounds of the difference, each wrong with probability `tail`."""
        found = self.difference(1 - 2 * tail)
        return found.low, found.high

    def lost(self, threshold: float) -> Item:
        """The item of a draft that no longer proposes anything: its alpha is not known, its rounds have one token each."""
        units = distinct(self.old.cluster)
        value = self.difference(0.5).value if self.gamma is not None else None
        return Item(self.measure, self.domain, threshold, value, None, None, units, "fail", LOST)

    def item(self, threshold: float, confidence: float, judged: Judged) -> Item:
        """The item of a draft that proposes something."""
        value = self.difference(confidence)
        return Item(
            self.measure, self.domain, threshold, value.value, judged.low, judged.high, value.documents, judged.outcome
        )


def check_baseline(new: Side, old: Side, rule: str | None, margin: float, allow_target_change: bool) -> Check:
    """A draft held against an older one on the same prompts: no domain's alpha may be lower by more than `margin`; of
    imported runs, no domain's tokens per round. Raises `NotComparable` with the reason.
    """
    require_comparable(old, new, allow_target_change)
    gamma = new.run.gammas[0] if new.run.imported else None
    inquiry = Inquiry.of(new.run, "engine", new.run.manifest.config)
    chosen, confidence = rule or one_rule(inquiry), inquiry.question.confidence
    found = paired_pools(old, new, [chosen])
    texts = [Both(key[0], before, found.pools[1][key], gamma) for key, before in found.pools[0].items()]
    unjudged = [Unjudged(text.domain, reason) for text in texts if (reason := text.hindrance(chosen)) is not None]
    texts = [text for text in texts if text.hindrance(chosen) is None]
    if not texts:
        raise _nothing_to_judge(old, unjudged)
    items = _items(texts, -margin, confidence)
    unjudged += _unpaired(old.run, new.run, found)
    outcome = together([item.outcome for item in items])
    return Check(
        outcome=outcome,
        reason=reason_of(items, outcome, unjudged),
        run=new.label,
        baseline=old.label,
        draft=new.draft,
        rule=chosen,
        gamma=gamma,
        confidence=confidence,
        items=items,
        unjudged=tuple(unjudged),
        paired=found.documents,
        unpaired=(found.unpaired[1], found.unpaired[0]),
    )


def _items(texts: Sequence[Both], threshold: float, confidence: float) -> tuple[Item, ...]:
    """An item for each text, in their order. Those that fail without bounds have no part in the correction of the others."""
    heard = [text for text in texts if not text.silent]
    judged = iter(judge([Gate(threshold, text.bounds) for text in heard], confidence))
    return tuple(text.lost(threshold) if text.silent else text.item(threshold, confidence, next(judged)) for text in texts)


def _unpaired(old: Run, new: Run, found: Paired) -> Iterable[Unjudged]:
    """Domains of either run of which no document has a partner in the other."""
    paired = {key[0] for key in found.pools[0]}
    here, there = (dict.fromkeys(run.documents()["domain"].cast(pa.string()).to_pylist()) for run in (old, new))
    for domain in here | there:
        if domain in paired:
            continue
        if domain not in there:
            yield Unjudged(domain, "this run does not have the domain, and the baseline does")
        elif domain not in here:
            yield Unjudged(domain, "the baseline does not have the domain")
        else:
            yield Unjudged(domain, "no document of it has a partner with the same prompt and kind of text")


def _nothing_to_judge(old: Side, unjudged: Sequence[Unjudged]) -> NotComparable:
    """Why nothing at all can be held against the baseline."""
    reasons = "; ".join(dict.fromkeys(item.reason for item in unjudged))
    silent = any("proposes nothing" in item.reason for item in unjudged)
    return NotComparable(
        f"nothing can be held against {old.label}: {reasons}",
        "name a baseline whose draft proposes something, or check against --min-acceptance-length"
        if silent
        else "name the rule of this text: --rule strict, or one_hot",
    )
