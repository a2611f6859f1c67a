"""One draft under two targets: does it survive a fine-tune, an adapter, quantization, the next checkpoint?

Two runs on the same prompts, each on its own target's texts, say what tokens per round and speedup become. Both scored the
same text only up to the first token that differs; there, agreement of the targets and acceptance of the draft are compared.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa

from alphaprof.costs.rounds import StepTimes, cost_bounds
from alphaprof.costs.speedup import Mix, spent_and_base
from alphaprof.render import format as fmt
from alphaprof.render.blocks import Block, Small, Verdict, table_of_rows
from alphaprof.report.asked import Asked
from alphaprof.report.judge import Judge
from alphaprof.report.pairing import TextPair, changed_facts, difference_over, over_domains, surely_one
from alphaprof.report.result import contradiction
from alphaprof.report.stopping import settled
from alphaprof.report.verdict import Question
from alphaprof.rules import parse_rule
from alphaprof.run.reader import Run, RunDraft
from alphaprof.stats.estimate import MISSED, Array, Interval, by_cluster, distinct, pooled_share, present
from alphaprof.stats.paired import differing, share_difference, weighted_inverse_difference
from alphaprof.totals.count import policies
from alphaprof.totals.documents import Documents, Units
from alphaprof.totals.log_sample import LogPart, limit_of, shards

VerdictName = Literal["KEEP", "RETRAIN", "TURN OFF", "UNDECIDED"]
ALL = "all traffic"
ENDLESS = 100  # times as many documents as there are: a change that near the margin is not told from it
NEXT: dict[VerdictName, str] = {
    "KEEP": "deploy the new target with this draft; its run is the --baseline of later checks",
    "RETRAIN": "train the draft on texts of the new target (alphaprof train), or choose another one",
    "TURN OFF": "serve without this draft until one is trained for the new target",
    "UNDECIDED": "profile more documents under both targets, or choose --margin by what a loss costs you",
}
Log = dict[int, dict[str, Array]]  # columns of a draft's log, by number of the document


@dataclass(frozen=True)
class Change:
    """What a domain, or all of them, had under the old target and has under the new one, at one gamma."""

    domain: str
    documents: int  # paired
    clusters: int  # independent units among them
    tokens_per_round: tuple[float, float]  # before, after
    change: Interval  # of tokens per round, as a share of what they were
    speedup: tuple[float, float] | None  # before, after, by the step times of each run; None: one has none
    speedup_change: Interval | None  # as a share of what it was; over documents, not over step times


@dataclass(frozen=True)
class CommonText:
    """What both runs have scored after the same tokens: each text up to the first token that differs."""

    documents: int  # that were read
    equal: int  # of them: with the same text under both targets
    share: float  # of the old target's positions that are common
    agreement: Interval | None  # share of the common positions at which both targets have the same most probable token
    alpha: tuple[float, float] | None  # of the draft there, under the old target and the new one
    difference: Interval | None  # of these alphas, second less first


@dataclass(frozen=True)
class TargetChange:
    """What becomes of a draft under another target. One-sided bounds decide, as in `alphaprof check --baseline`."""

    before: str  # the old target
    after: str  # the new target
    differs: tuple[str, ...]  # in which facts: fingerprint, dtype, tokenizer
    same_draft: bool  # both runs had the same draft, by its files
    verdict: VerdictName
    reason: str
    margin: float  # share of tokens per round that may be lost
    gamma: int
    bounds: tuple[float, float]  # of the change of all traffic, as a share, each at the confidence
    must_reach: float  # tokens per round of a draft that loses the margin
    pays_from: float | None  # tokens per round from which a draft of these costs reaches the threshold; None: no step times
    documents_needed: int | None  # to tell, if all are like these; None: told, or not to be told
    changes: tuple[Change, ...]  # all traffic, then each domain
    common: CommonText | None  # None: no position log, or other tokenizers

    def blocks(self) -> Iterator[Block]:
        """Yield the verdict with its reason and what to do next, the change by domain, and what is known of its cause."""
        yield Verdict(self.verdict, f"  {self.reason}")
        if self.verdict == "KEEP":
            units = self.changes[0].clusters
            one_in = f"{1 / differing(units, MISSED):.0f}"
            yield f"{fmt.many(units, 'document')} cannot show that fewer than 1 document in {one_in} loses all of its drafts"
        if self.verdict in ("RETRAIN", "TURN OFF"):
            pays = f", and pays from {self.pays_from:.2f}" if self.pays_from is not None else ""
            yield f"a retrained draft must reach {self.must_reach:.2f} tokens per round at gamma {self.gamma}{pays}"
        if self.documents_needed is not None:
            yield f"about {fmt.many(self.documents_needed, 'document')} like these would tell"
        yield from (f"next: {NEXT[self.verdict]}", "", f"target {self.before} -> {self.after}")
        if not self.same_draft:
            yield Verdict("note", ": the drafts differ too: the change is that of target and draft together")
        rows = (
            (
                *(fmt.short(each.domain), fmt.documents(each.documents, each.clusters)),
                *(" / ".join(map("{:.2f}".format, each.tokens_per_round)), _percent(each.change)),
                " / ".join(map("{:.2f}x".format, each.speedup)) if each.speedup else fmt.NOTHING,
                _percent(each.speedup_change),
            )
            for each in self.changes
        )
        headings = ("domain", "docs", "tokens/round", "change", "speedup", "change of speedup")
        yield from ("", table_of_rows(f"before / after, gamma {self.gamma}", headings, rows))
        if (common := self.common) is not None:
            agree = fmt.share_with_interval(common.agreement)
            yield f"{common.equal} of {fmt.many(common.documents, 'text')} are the same under both targets"
            yield f"up to the first token that differs ({fmt.percent(common.share)} of positions), targets agree at {agree}"
            if common.alpha is not None:
                alphas = " / ".join(map(fmt.share, common.alpha))
                yield f"alpha of the draft there: {alphas}, {fmt.difference(common.difference, 3)}"
        yield Small(
            "agree: the same most probable token. Speedups by each run's step times; intervals over documents, paired."
        )


def _percent(change: Interval | None) -> fmt.Number:
    """Return a share as a signed percentage with its interval."""
    if change is None:
        return fmt.NOTHING
    value, low, high = (100 * each for each in (change.value, change.low, change.high))
    return fmt.Number(f"{value:+.1f}%", f"[{low:+.1f}, {high:+.1f}]", change)


def target_change(
    first: RunDraft,
    second: RunDraft,
    texts: Sequence[TextPair],
    rows: tuple[Array, Array],
    gamma: int,
    margin: float,
) -> TargetChange | None:
    """Return what becomes of a draft; None: no text has rounds under the decision's rule. `texts`, `rows`: as `paired_texts`
    returns them, of runs whose targets differ.
    """
    sides = [Asked.of(side.run, side.run.manifest.profile.deciding(side.draft)) for side in (first, second)]
    question, confidence = sides[1].question, float(sides[1].question.confidence)
    mine = [text for text in texts if text.has_rounds and text.rule == question.rule_for(text.first.policy)]
    if not mine:
        return None
    groups, domains = {ALL: over_domains(mine, question.weights)}, dict.fromkeys(text.domain for text in mine)
    for domain in domains if len(domains) > 1 else ():
        groups[domain] = over_domains([text for text in mine if text.domain == domain], None)
    timed = all(parse_rule(text.rule).rule.timed for text in mine)
    times = [each.timing.times.get(side.draft) if timed else None for each, side in zip(sides, (first, second), strict=True)]
    changes = [change_over(name, *group, gamma, times, confidence) for name, group in groups.items()]
    whole, bounds = changes[0], deciding_bounds(*groups[ALL], gamma, confidence)
    doubts = (contradiction(pool) for text in mine for pool in text.sides)
    doubt = question.stand_in or next(filter(None, doubts), "")
    verdict, reason = _verdict(sides[1], whole, bounds, margin, doubt)
    away, needed = whole.change.value + margin, None
    half = whole.change.value - bounds[0] if away > 0 else bounds[1] - whole.change.value
    if verdict == "UNDECIDED" and not doubt and half < abs(away) * math.sqrt(ENDLESS):
        needed = math.ceil(whole.clusters * (half / away) ** 2)
    differs, (old, new) = changed_facts(first.run, second.run), [side.run.manifest.target for side in (first, second)]
    logs = "tokenizer" not in differs and all(side.run.scored and side.run.has_log for side in (first, second))
    pairs = _paired_logs(first, second, rows, question) if logs else []
    before, after = whole.tokens_per_round
    return TargetChange(
        before=f"{old.reference} ({old.precision})",
        after=f"{new.reference} ({new.precision})",
        differs=differs,
        same_draft=surely_one(*(side.run.manifest.drafts[side.draft] for side in (first, second))),
        verdict=verdict,
        reason=reason,
        margin=margin,
        gamma=gamma,
        bounds=bounds,
        must_reach=before * (1 - margin),
        pays_from=after / whole.speedup[1] * question.min_speedup if whole.speedup else None,
        documents_needed=needed,
        changes=tuple(changes),
        common=_common_text(pairs, confidence) if pairs else None,
    )


def _verdict(asked: Asked, whole: Change, bounds: tuple[float, float], margin: float, doubt: str) -> tuple[VerdictName, str]:
    """Return the verdict and its reason. `asked`: of the new run, whose report turns off a draft whatever it kept."""
    if doubt:
        return "UNDECIDED", doubt
    answer, _ = Judge.of(settled(asked)).traffic()
    if answer.verdict == "NO-GO":
        return "TURN OFF", f"with the new target, {answer.reason}"
    low, high = (f"{100 * bound:+.1f}%" for bound in bounds)
    verdict: VerdictName = "KEEP" if bounds[0] >= -margin else "RETRAIN" if bounds[1] < -margin else "UNDECIDED"
    surely = {"KEEP": f"above {low}", "RETRAIN": f"below {high}"}.get(verdict, f"between {low} and {high}")
    reported = f"{fmt.interval(answer.speedup, 'x')}, {answer.verdict}" if answer.speedup else answer.reason
    words = f"tokens per round {100 * whole.change.value:+.1f}%, surely {surely} (a loss of {100 * margin:g}% is allowed)"
    return verdict, f"{words}; the new run's report: {reported}"


def change_over(
    name: str,
    parts: Sequence[TextPair],
    weights: Mapping[str, float] | None,
    gamma: int,
    times: Sequence[StepTimes | None],
    confidence: float,
) -> Change:
    """Return the change over some texts, as `over_domains` gives them."""
    before, after, tokens = difference_over(parts, weights, gamma, confidence, relative=True)
    cluster = np.concatenate([text.first.cluster for text in parts])
    found = Change(name, len(cluster), distinct(cluster), (before, after), _over(tokens, before), None, None)
    known = [each for each in times if each is not None and each.covers(gamma)]
    if len(known) < len(times):
        return found
    shares, sums, ends = tuple(weights.values()) if weights else (1.0,), [], (1.0, 1.0)
    for place, each in enumerate(known):
        decoded = Mix((), shares).decoded([text.sides[place].counts(gamma) for text in parts], each)
        sums.append([spent_and_base(*domain) for domain in decoded])
        ends = cost_bounds(decoded[0][1], gamma)
    units, (least, most) = [present(text.first.cluster) for text in parts], ends
    old, new, change = weighted_inverse_difference(
        sums[0], sums[1], units, shares, confidence, gamma, (1 / most, 1 / least), True
    )
    return dataclasses.replace(found, speedup=(old, new), speedup_change=_over(change, old))


def deciding_bounds(
    parts: Sequence[TextPair], weights: Mapping[str, float] | None, gamma: int, confidence: float
) -> tuple[float, float]:
    """Return bounds of the change of tokens per round, as a share, each at the confidence."""
    before, _, difference = difference_over(parts, weights, gamma, 2 * confidence - 1)
    return difference.low / before, difference.high / before


def _over(difference: Interval, before: float) -> Interval:
    """Return a difference as a share of what was before."""
    return Interval(difference.value / before, difference.low / before, difference.high / before)


@dataclass(frozen=True)
class _Paired:
    """A document that both runs scored, with their logs of it, and the column that says what was accepted."""

    unit: int
    rule: str
    old: dict[str, Array]
    new: dict[str, Array]


def _paired_logs(first: RunDraft, second: RunDraft, rows: tuple[Array, Array], question: Question) -> list[_Paired]:
    """Return the paired documents of the targets' own texts, in the part of the first log that a report reads too."""
    tables = [side.run.documents().take(pa.array(chosen)) for side, chosen in zip((first, second), rows, strict=True)]
    rules = [f"accept_{question.rule_for(policy)}" if policy else "" for policy in policies(tables[0])]
    known = set.intersection(*({each.name for each in side.run.log_of(side.draft).columns} for side in (first, second)))
    names = ["token", "target_top", *sorted(known.intersection(rules))]
    one, two = (table["document"].to_pylist() for table in tables)
    part = LogPart.of(first.run, Documents.of(first.run.documents()), limit_of(first.run)).run
    old = _log(part, first.draft, names, set(one))
    read = [place for place, number in enumerate(one) if number in old and rules[place] in known]
    new = _log(second.run, second.draft, names, {two[place] for place in read})
    units = Units.of(pa.concat_tables(tables)).codes
    return [_Paired(units[place], rules[place], old[one[place]], new[two[place]]) for place in read]


def _log(run: Run, draft: str, names: Sequence[str], numbers: Set[int]) -> Log:
    """Return columns of a draft's log by document, of some documents; shards that hold none of them are not read."""
    return {
        number: {name: column[start:stop] for name, column in columns.items()}
        for columns, shape in shards(run, draft, names, numbers)
        for number, start, stop in zip(shape.document.tolist(), shape.start, shape.stop, strict=True)
        if number in numbers
    }


def _common_text(pairs: Sequence[_Paired], confidence: float) -> CommonText:
    counts = []
    for pair in pairs:
        old, new = pair.old["token"], pair.new["token"]
        size = min(len(old), len(new))
        other = np.flatnonzero(old[:size] != new[:size])
        size = int(other[0]) + 1 if len(other) else size  # both have scored what follows the same tokens
        agreed = (pair.old["target_top"][:size] == pair.new["target_top"][:size]).sum()
        equal = len(old) == len(new) and not len(other)
        kept = (*_kept(pair.old[pair.rule][:size]), *_kept(pair.new[pair.rule][:size]))
        counts.append((equal, len(old), size, agreed, *kept))
    equals, tokens, sizes, agree, *both = np.array(counts, dtype=np.float64).T
    units = np.array([pair.unit for pair in pairs])
    alpha, difference = _alphas(units, both, confidence)
    agreement = pooled_share(units, agree, sizes, confidence)
    return CommonText(len(pairs), int(equals.sum()), float(sizes.sum() / tokens.sum()), agreement, alpha, difference)


def _kept(accept: Array) -> tuple[float, float]:
    """Return the sum of the chances of acceptance, and the number of positions with a proposal."""
    return float(np.nansum(accept)), float((~np.isnan(accept)).sum())


def _alphas(units: Array, kept: Sequence[Array], confidence: float) -> tuple[tuple[float, float] | None, Interval | None]:
    """Return alpha of two sides and second less first, from what each accepted and had proposed by document."""
    one, two = by_cluster(units, *kept[:2]), by_cluster(units, *kept[2:])
    if not (one[1].sum() and two[1].sum()):
        return None, None
    alpha = float(one[0].sum() / one[1].sum()), float(two[0].sum() / two[1].sum())
    return alpha, share_difference((one[0], one[1]), (two[0], two[1]), confidence)
