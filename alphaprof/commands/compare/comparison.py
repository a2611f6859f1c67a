"""`alphaprof compare`: two drafts on the same prompts, or one under two targets, paired document by document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa

from alphaprof.commands.compare.target_change import TargetChange, target_change
from alphaprof.render import format as fmt
from alphaprof.render.blocks import Block, OfOneText, Small, Verdict, table_of_rows, text_name
from alphaprof.report.pairing import (
    TextPair,
    changed_facts,
    common_gammas,
    deciding_gamma,
    difference_over,
    over_domains,
    paired_texts,
    require_comparable,
)
from alphaprof.rules import parse_rule
from alphaprof.run.reader import Run, RunDraft
from alphaprof.stats.estimate import Array, Interval, distinct
from alphaprof.stats.grouping import grouped

MARGIN = 0.03  # share of tokens per round that a draft may lose under another target
MORE, LESS, SAME = "more", "less", "no clear difference"
MOST = 3  # domains that a line of the answer names
TEXTS = {
    True: "the same text",
    False: "different texts for the same prompts",
    None: "texts that imported runs do not store: rounds are known, alpha is not",
}


@dataclass(frozen=True)
class TokensDifference:
    """Tokens per round of both at one gamma, and second less first."""

    gamma: int
    first: float  # tokens per round of the first
    second: float  # tokens per round of the second
    difference: Interval  # second less first


@dataclass(frozen=True)
class Difference(OfOneText):
    """One domain, kind of text and rule. `difference` is alpha of the second less that of the first; `tokens_per_round` is
    empty if the rule has no rounds on this text.
    """

    rule: str
    lossy: bool
    documents: int  # paired
    clusters: int  # independent units among them
    first: float | None  # alpha of the first; None: no proposals
    second: float | None  # alpha of the second
    first_coverage: float | None  # share of positions with a proposal; None: imported runs
    second_coverage: float | None  # the same of the second
    difference: Interval | None  # alpha of the second less that of the first
    tokens_per_round: tuple[TokensDifference, ...]  # one a gamma; empty if the rule has no rounds on this text


@dataclass(frozen=True)
class OverallDifference:
    """Tokens per round of one rule on one kind of text, over all its domains together."""

    rule: str
    sampling: dict[str, float] | None  # settings that p was processed with, q by draft_processing; None: the plain softmax
    domains: tuple[str, ...]  # that have rounds and a share of the traffic
    weights: dict[str, float] | None  # shares of output tokens, from the first run's decision; None: as documents have them
    documents: int  # paired
    clusters: int  # independent units among them
    tokens_per_round: tuple[TokensDifference, ...]  # one a gamma


@dataclass(frozen=True)
class Comparison:
    """The paired comparison of two drafts. Unpaired documents are left out and counted."""

    format: ClassVar[str] = "alphaprof-compare"
    version: ClassVar[str] = "2.0"

    first: str  # run and draft
    second: str  # run and draft
    confidence: float
    same_text: bool | None  # both measured the same tokens; None: imported runs do not hold them
    documents: int
    interrupted: tuple[str, ...]  # sides whose run is not complete
    unpaired: tuple[int, int]  # documents without a partner: of the first, of the second
    notes: tuple[str, ...]  # if alpha is that of first drafts, or the two do not verify alike
    gamma: int | None  # that the answer speaks of: the decision's, or the largest of both; None: they have none in common
    overall: tuple[OverallDifference, ...]  # of paired documents; empty if no rule has rounds
    differences: tuple[Difference, ...]  # one for each domain, kind of text and rule
    target_change: TargetChange | None = None  # what becomes of the draft under another target; None: it is the same one

    def blocks(self) -> Iterator[Block]:
        """Yield which draft gets more accepted, then a table of acceptance, and one of tokens per round."""
        (one, two), lone = self.sides, [fmt.count(number) for number in self.unpaired]
        yield from _which_accepts_more(self) if self.target_change is None else self.target_change.blocks()
        yield from ("", f"{one:<9} {self.first}", f"{two:<9} {self.second}")
        paired = f"{fmt.many(self.documents, 'document')} paired by prompt, on {TEXTS[self.same_text]}"
        yield f"{paired}; unpaired: {lone[0]} of {one}, {lone[1]} of {two}"
        yield ""
        if self.same_text is not None and self.target_change is None:
            acceptance = (
                (
                    text_name(item, self.differences),
                    item.rule + fmt.mark(item.on_policy, item.lossy),
                    fmt.documents(item.documents, item.clusters),
                    f"{fmt.share(item.first_coverage, 2)} / {fmt.share(item.second_coverage, 2)}",
                    *(fmt.share(item.first), fmt.share(item.second), fmt.difference(item.difference, 3)),
                )
                for item in self.differences
            )
            headings = ("domain", "rule", "docs", "coverage", "first", "second", "difference")
            yield table_of_rows("alpha", headings, acceptance, left=("rule",))
        yield from (
            Verdict("note", f": {side} is from an interrupted run: its first documents only") for side in self.interrupted
        )
        among = [item for item in self.differences if item.tokens_per_round]
        named = [(text_name(item, among), item.rule, tokens) for item in among for tokens in item.tokens_per_round]
        if named and self.target_change is None:
            rows = (
                (
                    *(name, rule, str(tokens.gamma), fmt.number(tokens.first), fmt.number(tokens.second)),
                    fmt.difference(tokens.difference, 2),
                )
                for name, rule, tokens in named
            )
            columns = ("domain", "rule", "gamma", one, two, "difference")
            yield table_of_rows("tokens per round", columns, rows, left=("rule",))
        yield from (Verdict("note", f": {unlike}") for unlike in self.notes)
        yield Small(f"difference: {two} minus {one}, with a {fmt.level(self.confidence)} interval over documents, paired.")
        if self.same_text is not None and self.target_change is None:
            yield Small("alpha is over positions with a proposal: if coverage differs, compare tokens per round.")
            yield Small("* off-policy: the rule's decoding would not emit this text   ~ lossy: measured step by step")

    @property
    def sides(self) -> tuple[str, str]:
        """What the two are called."""
        return ("before", "after") if self.target_change is not None else ("first", "second")


def _which_accepts_more(comparison: Comparison) -> Iterator[str]:
    """Yield which draft gets more accepted, by how much, where, and what to do next."""
    rules = {each.rule for each in comparison.overall[:1]}
    texts = [
        (text_name(each, comparison.differences), tokens)
        for each in comparison.differences
        for tokens in each.tokens_per_round
        if tokens.gamma == comparison.gamma and (not rules or each.rule in rules)
    ]
    if comparison.overall:
        overall, (one, two) = comparison.overall[0], comparison.sides
        main = next(each for each in overall.tokens_per_round if each.gamma == comparison.gamma)
        yield _difference_line(comparison, main, "")
        domains = f"over {fmt.many(len(overall.domains), 'domain')} by {'given' if overall.weights else 'observed'} shares"
        documents = f"{fmt.documents(overall.documents, overall.clusters)} paired documents"
        values = f"{one} {fmt.number(main.first)}, {two} {fmt.number(main.second)}"
        yield f"{values} {domains}; {documents}; {fmt.level(comparison.confidence)} interval; {overall.rule}"
    elif texts:
        texts.sort(key=lambda pair: -abs(pair[1].difference.value))
        yield from (_difference_line(comparison, tokens, f" in {name}") for name, tokens in texts[:MOST])
    else:
        why = "the two have no gamma in common" if comparison.gamma is None else "no rule has rounds on this text"
        yield f"{why}: the table compares alpha"
    if len(texts) > 1:
        words = grouped((_word(tokens.difference), name) for name, tokens in texts)
        yield "by domain: " + "; ".join(
            f"{word} in {', '.join(names[:MOST])}" + (f" and {len(names) - MOST} more" if len(names) > MOST else "")
            for word, names in words.items()
        )
    yield "next: run alphaprof report; it includes draft costs, tokens per round do not"


def _difference_line(comparison: Comparison, tokens: TokensDifference, where: str) -> str:
    """Return the difference at one gamma as a sentence."""
    word, (one, two) = _word(tokens.difference), comparison.sides
    if word != SAME:
        drafts = [fmt.short(label.rpartition(":")[2]) for label in (comparison.first, comparison.second)]
        first, second = (f" ({draft})" if drafts[0] != drafts[1] else "" for draft in drafts)
        word = f"{two}{second} accepts {word} than {one}{first}"
    return f"{word}{where}: {fmt.difference(tokens.difference, 2)} tokens per round at gamma {tokens.gamma}"


def _word(difference: Interval) -> str:
    return MORE if difference.low > 0 else LESS if difference.high < 0 else SAME


def compare(
    first: RunDraft,
    second: RunDraft,
    rules: Sequence[str] | None = None,
    gamma: int | None = None,
    margin: float = MARGIN,
) -> Comparison:
    """Pair the documents of two runs by prompt and take differences. Raises `NotComparable` with the reason, and
    `OptionInvalid` for a gamma that was not replayed in both. Of runs with two targets: whether the draft may stay if it may
    lose `margin`, a share of its tokens per round.

    `rules`: ids; default: those of the first run. `gamma`: the one length to compare; default: all that both runs have.
    The confidence is that of the first run's decision.
    """
    confidence = float(first.run.manifest.profile.decision.confidence)
    require_comparable(first, second)
    gammas = common_gammas(first, second, gamma)
    texts, rows, lone = paired_texts(first, second, list(rules or first.run.rules))
    odd = changed_facts(first.run, second.run)
    deciding = deciding_gamma(first, gammas, second.run.manifest.profile if odd else None)  # as `alphaprof check --baseline`
    changed = target_change(first, second, texts, rows, deciding, margin) if odd and deciding is not None else None
    heads = [side.label for side in (first, second) if side.run.manifest.drafts[side.draft].by_depth]
    notes = [f"alpha of {' and '.join(heads)} is accept@1 (first drafts only): compare tokens per round"] if heads else []
    one, two = (side.run.manifest.profile.target.attn_implementation or "the default" for side in (first, second))
    notes += [f"the targets differ ({', '.join(odd)})"] if changed is None and odd else []
    notes += [f"attn_implementation of the target is {one} in the first, {two} in the second"] if one != two else []
    return Comparison(
        first=first.label,
        second=second.label,
        confidence=confidence,
        same_text=_same_text(first.run, second.run, rows),
        documents=len(rows[0]),
        interrupted=tuple(side.label for side in (first, second) if side.run.manifest.status != "complete"),
        unpaired=lone,
        notes=tuple(notes),
        gamma=deciding,
        overall=tuple(_overall(first.run, texts, gammas, confidence)) if gammas else (),
        differences=tuple(_text_difference(text, gammas, confidence) for text in texts),
        target_change=changed,
    )


def _same_text(first: Run, second: Run, rows: tuple[Array, Array]) -> bool | None:
    """Return whether paired documents hold the same tokens; None if that is not known."""
    if first.path == second.path:
        return True
    if first.imported:
        return None

    def texts(run: Run, chosen: Array) -> pa.Array:
        parts = [run.continuations(shard.index, ["continuation_ids"]) for shard in run.shards]
        return pa.concat_tables(parts)["continuation_ids"].take(chosen).combine_chunks()

    return bool(texts(first, rows[0]).equals(texts(second, rows[1])))


def _text_difference(text: TextPair, gammas: Sequence[int], confidence: float) -> Difference:
    """Return the difference on one domain and kind of text. If an engine served a side, tokens per round alone are known."""
    rule, observed = parse_rule(text.rule), text.first.observed and text.second.observed
    sums = text.totals(None) if observed else ()
    alphas = [float(accepted.sum() / counts.sum()) if counts.sum() > 0 else None for accepted, counts in sums]
    coverages = [float(pool["proposals"].sum() / pool["positions"].sum()) for pool in text.sides] if observed else []
    (one, two), (first_coverage, second_coverage) = alphas or (None, None), coverages or (None, None)
    by_gamma = []
    for gamma in gammas if text.has_rounds else ():
        before, after = (float(base.sum() / spent.sum()) for spent, base in text.totals(gamma))
        by_gamma.append(TokensDifference(gamma, before, after, text.difference(gamma, confidence)))
    return Difference(
        domain=text.domain,
        continuation=text.first.continuation,
        sampling=text.first.sampling,
        rule=rule.id,
        on_policy=text.first.policy in rule.rule.policies,
        lossy=rule.rule.lossy,
        documents=len(text.first.cluster),
        clusters=distinct(text.first.cluster),
        first=one,
        second=two,
        first_coverage=first_coverage,
        second_coverage=second_coverage,
        difference=text.difference(None, confidence) if one is not None and two is not None else None,
        tokens_per_round=tuple(by_gamma),
    )


def _overall(run: Run, texts: Sequence[TextPair], gammas: Sequence[int], confidence: float) -> Iterator[OverallDifference]:
    """Yield the differences over all domains together, one for each rule that has rounds and each kind of text: domains by
    the shares of the run's decision if it names them all, otherwise as the documents have them.
    """
    with_rounds = [text for text in texts if text.has_rounds]
    kinds = grouped(((text.first.policy, str(text.first.sampling), text.rule), text) for text in with_rounds)
    for (_, _, rule), mine in kinds.items():
        domains = grouped((text.domain, text) for text in mine)
        same = [text for texts in domains.values() for text in texts]
        chosen, weights = over_domains(same, run.manifest.profile.decision.weights)
        yield OverallDifference(
            rule=rule,
            sampling=same[0].first.sampling,
            domains=tuple(weights or domains),
            weights=weights,
            documents=sum(len(text.first.cluster) for text in chosen),
            clusters=distinct(np.concatenate([text.first.cluster for text in chosen])),
            tokens_per_round=tuple(
                TokensDifference(gamma, *difference_over(chosen, weights, gamma, confidence)) for gamma in gammas
            ),
        )
