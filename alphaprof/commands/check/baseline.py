"""The gate against a baseline: a draft compared with an older one on the same prompts, domain by domain.

Profiled runs are compared by alpha. Of imported ones alpha is not known: they are compared by tokens per round over all
rounds at the gamma that was served. A draft that proposed something in a domain and no longer does fails
there, whatever the margin: nothing is left to take a bound from, and a gate that skipped it would pass the worst case.

The same draft with identical rows has not changed: it passes, and nothing is estimated. Of another draft with identical rows
nobody knows what it does on other documents: it is judged by bounds like any other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from alphaprof.commands.check.answer import DIFFERENCE, TOKENS_DIFFERENCE, Check, Item, Measure, Unjudged, reason_of
from alphaprof.commands.compare import Paired, paired_pools, require_comparable, summed
from alphaprof.costs.speedup import free_draft, spent_and_base
from alphaprof.errors import NotComparable, OptionInvalid
from alphaprof.log.manifest import PARTIAL
from alphaprof.log.run_draft import RunDraft
from alphaprof.log.store import Run
from alphaprof.report.format import many, percent, text_kind
from alphaprof.report.inputs import ReportInputs
from alphaprof.rules import parse_rule
from alphaprof.stats.estimate import NO_SPREAD, Interval, distinct
from alphaprof.stats.gates import Gate, GateResult, judge, together
from alphaprof.stats.paired import differing, inverse_difference, share_difference
from alphaprof.totals.pool import DocumentTotals, proposes_nothing

LOST = "the draft proposes nothing there any more, as it did in the baseline"
ROWS = ("token", "draft_top", "proposed", "accepted_run")  # what identical rows have in common: exact numbers

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class PairedText:
    """The paired documents of one domain and kind of text. `gamma`: that was served; None: alpha is known. `identical`:
    both sides have the same rows; `doubt`: why they may be two drafts all the same.
    """

    domain: str
    old: DocumentTotals
    new: DocumentTotals
    gamma: int | None
    identical: bool = False
    doubt: str | None = None

    def why_undecidable(self, rule: str) -> str | None:
        """Why this text cannot be judged; None where it can."""
        if self.old.policy not in parse_rule(rule).rule.policies:
            return f"{rule} does not apply to its text ({text_kind(self.old.continuation, self.old.sampling)})"
        if self.gamma is not None and not all(pool["tokens"].sum() for pool in (self.old, self.new)):
            return "no text of one run is longer than one token, which the prefill emits"
        if proposes_nothing(self.old, self.gamma):
            return f"the baseline's draft proposes nothing there{', nor does this one' if self.silent else ''}"
        return None

    @property
    def silent(self) -> bool:
        """Whether the new side proposes nothing at all."""
        return proposes_nothing(self.new, self.gamma)

    @property
    def unchanged(self) -> bool:
        """Whether one draft did the same twice."""
        return self.identical and self.doubt is None and not self.silent

    @property
    def documents(self) -> int:
        """Pairs of documents."""
        return len(self.old.cluster)

    def equal_totals(self) -> bool:
        """Whether each document has the same counts on both sides; acceptance that is a probability, to six digits."""
        names = ["proposals"]
        if self.gamma is not None:
            names = ["tokens", f"rounds_{self.gamma}", f"drafted_depths_{self.gamma}", f"accepted_depths_{self.gamma}"]
        elif not np.allclose(self.old["accepted"], self.new["accepted"], rtol=NO_SPREAD, atol=0):
            return False
        return all(np.array_equal(self.old[name], self.new[name], equal_nan=True) for name in names)

    @property
    def measure(self) -> Measure:
        """What the two are compared by."""
        return DIFFERENCE if self.gamma is None else TOKENS_DIFFERENCE

    @cached_property
    def sides(self) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        """Totals and counts of each side, [units]: accepted and proposed positions; at a gamma, rounds and tokens."""
        if self.gamma is None:
            return summed(self.old), summed(self.new)
        times = free_draft(self.gamma)
        return spent_and_base(self.old.counts(self.gamma), times), spent_and_base(self.new.counts(self.gamma), times)

    @property
    def compared(self) -> int:
        """The units that have counts on both sides."""
        return min(int(np.count_nonzero(counts)) for _, counts in self.sides)

    def difference(self, confidence: float) -> Interval:
        """The new side's alpha less the old one's; at a gamma, tokens per round. With an interval over units."""
        if self.gamma is None:
            return share_difference(*self.sides, confidence)
        return inverse_difference(*self.sides, confidence, self.gamma)

    def bounds(self, tail: float) -> tuple[float, float]:
        """One-sided bounds of the difference, each wrong with probability `tail`."""
        difference = self.difference(1 - 2 * tail)
        return difference.low, difference.high

    def lost(self, threshold: float) -> Item:
        """The item of a draft that no longer proposes anything: its alpha is not known, its rounds have one token each."""
        units = distinct(self.old.cluster)
        value = self.difference(0.5).value if self.gamma is not None else None
        return Item(self.measure, self.domain, threshold, value, None, None, units, "fail", LOST)

    def kept(self, threshold: float) -> Item:
        """The item of a draft that has not changed. Nothing is estimated: a margin, which is never below 0, is kept."""
        units, note = distinct(self.old.cluster), _same(self.documents)
        return Item(self.measure, self.domain, threshold, 0.0, None, None, units, "pass", note)

    def item(self, threshold: float, confidence: float, judged: GateResult) -> Item:
        """The item of a draft that proposes something."""
        value, note = self.difference(confidence), None
        if self.identical:
            most = percent(differing(self.compared, 1 - confidence))
            alike = f"identical on all {many(self.documents, 'document')}"
            note = f"{alike}, but {self.doubt}: at most {most} of documents can differ"
        return Item(
            self.measure, self.domain, threshold, value.value, judged.low, judged.high, self.compared, judged.outcome, note
        )


def one_rule(inquiry: ReportInputs) -> str:
    """The rule of the decision. Raises `OptionInvalid` where greedy and sampled text have one each, or there is neither."""
    rules = inquiry.decisive
    if not rules:
        raise OptionInvalid("no text of the run is the target's own, so no rule has rounds on it", "name one: --rule strict")
    if len(rules) > 1:
        raise OptionInvalid("the run holds greedy and sampled text, each with a rule of its own", "name one: --rule strict")
    return rules[0]


def check_baseline(new: RunDraft, old: RunDraft, rule: str | None, margin: float, allow_target_change: bool) -> Check:
    """Compares a draft with an older one on the same prompts: no domain's alpha may be lower by more than `margin`; of
    imported runs, no domain's tokens per round. Raises `NotComparable` with the reason.
    """
    require_comparable(old, new, allow_target_change)
    gamma = new.run.gammas[0] if new.run.imported else None
    inquiry = ReportInputs.of(new.run, "engine", new.run.manifest.config)
    chosen, confidence = rule or one_rule(inquiry), inquiry.question.confidence
    pairs = paired_pools(old, new, [chosen])
    texts = [PairedText(key[0], before, pairs.pools[1][key], gamma) for key, before in pairs.pools[0].items()]
    unjudged = [Unjudged(text.domain, reason) for text in texts if (reason := text.why_undecidable(chosen)) is not None]
    texts = [text for text in texts if text.why_undecidable(chosen) is None]
    if not texts:
        raise _nothing_to_judge(old, unjudged)
    texts = _compared(old, new, texts)
    items = _items(texts, -margin, confidence)
    unjudged += _unpaired(old.run, new.run, pairs)
    outcome = together([item.outcome for item in items])
    same = _same(sum(text.documents for text in texts)) if all(text.unchanged for text in texts) else None
    return Check(
        outcome=outcome,
        reason=reason_of(items, outcome, unjudged, same),
        run=new.label,
        baseline=old.label,
        draft=new.draft,
        rule=chosen,
        gamma=gamma,
        confidence=confidence,
        items=items,
        unjudged=tuple(unjudged),
        paired=pairs.documents,
        unpaired=(pairs.unpaired[1], pairs.unpaired[0]),
    )


def _items(texts: Sequence[PairedText], threshold: float, confidence: float) -> tuple[Item, ...]:
    """An item for each text, in their order. Those that need no bounds have no part in the correction of the others."""
    estimated = [text for text in texts if not text.silent and not text.unchanged]
    judged = iter(judge([Gate(threshold, text.bounds) for text in estimated], confidence))

    def item(text: PairedText) -> Item:
        if text.silent:
            return text.lost(threshold)
        return text.kept(threshold) if text.unchanged else text.item(threshold, confidence, next(judged))

    return tuple(map(item, texts))


def _same(documents: int) -> str:
    return f"the same draft, identical on all {many(documents, 'document')}"


def _compared(old: RunDraft, new: RunDraft, texts: Sequence[PairedText]) -> list[PairedText]:
    """The texts with what is known of their rows. Logs are read only where totals are equal, and a shard at a time."""
    equal = [text.equal_totals() for text in texts]
    doubt = _doubt(old, new)
    if not any(equal) or new.run.imported or not (old.run.has_log and new.run.has_log):
        return [replace(text, identical=same, doubt=doubt) for text, same in zip(texts, equal, strict=True)]
    digests = [_row_digests(side) for side in (old, new)]

    def same_rows(text: PairedText) -> bool:
        numbers = (pool["document"].tolist() for pool in (text.old, text.new))
        return all(digests[0][before] == digests[1][after] for before, after in zip(*numbers, strict=True))

    return [replace(text, identical=same and same_rows(text), doubt=doubt) for text, same in zip(texts, equal, strict=True)]


def _doubt(old: RunDraft, new: RunDraft) -> str | None:
    """Why two sides may be two drafts; None: it is the same one, of the same target, and its rows are there to show it.

    Tokenizer and `draft_processing` are the same wherever sides can be compared, and so are the continuation's settings of
    documents that are paired; the parameters of a rule are in its id.
    """
    if new.run.imported:
        return "an engine's metrics do not show which draft it served"
    before, after = (side.run.manifest for side in (old, new))
    pairs = {"draft": (before.drafts[old.draft], after.drafts[new.draft]), "target": (before.target, after.target)}
    for name, (one, other) in pairs.items():
        if odd := [fact for fact in ("fingerprint", "dtype") if getattr(one, fact) != getattr(other, fact)]:
            return f"another {name} ({', '.join(odd)})"
        if one.fingerprint.startswith(PARTIAL):
            return f"not all weights of the {name} could be read (device_map)"
    missing = next((side for side in (old, new) if not side.run.has_log), None)
    return None if missing is None else f"{missing.run.path} has no position log to show it"


def _row_digests(side: RunDraft) -> dict[int, bytes]:
    """What the log holds of each document's text and of what the draft proposed on it, as a digest, by document."""
    digests: dict[int, bytes] = {}
    for shard in side.run.shards:
        table = side.run.positions(side.draft, shard.index, ["document", *ROWS])
        numbers = table["document"].to_numpy()
        rows = np.stack([table[name].cast(pa.int32()).fill_null(-1).to_numpy() for name in ROWS], axis=1)
        starts = np.flatnonzero(np.diff(numbers, prepend=-1))
        for start, stop in zip(starts, [*starts[1:], len(numbers)], strict=True):
            digests[int(numbers[start])] = hashlib.sha256(rows[start:stop].tobytes()).digest()
    return digests


def _unpaired(old: Run, new: Run, pairs: Paired) -> Iterable[Unjudged]:
    """Yields the domains of either run of which no document has a partner in the other."""
    paired = {key[0] for key in pairs.pools[0]}
    here, there = (dict.fromkeys(run.documents()["domain"].cast(pa.string()).to_pylist()) for run in (old, new))
    for domain in here | there:
        if domain in paired:
            continue
        if domain not in there:
            yield Unjudged(domain, "this run does not have the domain, and the baseline does")
        elif domain not in here:
            yield Unjudged(domain, "the baseline does not have the domain")
        else:
            yield Unjudged(domain, "none of its documents has a partner with the same prompt and kind of text")


def _nothing_to_judge(old: RunDraft, unjudged: Sequence[Unjudged]) -> NotComparable:
    """Says why nothing at all can be compared with the baseline."""
    reasons = "; ".join(dict.fromkeys(item.reason for item in unjudged))
    if any("proposes nothing" in item.reason for item in unjudged):
        hint = "name a baseline whose draft proposes something, or check against --min-acceptance-length"
    elif old.run.imported:
        hint = "import requests with longer answers"
    else:
        hint = "name a rule that applies to this text: --rule strict, or one_hot"
    return NotComparable(f"nothing can be compared with {old.label}: {reasons}", hint)
