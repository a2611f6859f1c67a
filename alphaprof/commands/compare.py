"""`alphaprof compare`: two drafts on the same prompts, paired document by document, and the result as text (rich)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa
from rich.console import Console
from rich.table import Table
from rich.text import Text

from alphaprof.costs.speedup import free_draft, speedup
from alphaprof.errors import NotComparable, OptionInvalid
from alphaprof.log.manifest import CHAIN, PROMPTS_KNOWN_BY
from alphaprof.log.run import Run, RunDraft
from alphaprof.render.tables import named_table, plain, show
from alphaprof.render.wording import text_name
from alphaprof.report import format as fmt
from alphaprof.report.pairing import (
    Pools,
    common_gammas,
    deciding_gamma,
    matches,
    paired_pools,
    pools_of_pairs,
    require_comparable,
    side_difference,
    side_pools,
    side_totals,
)
from alphaprof.report.result import counted
from alphaprof.report.speeds import tokens_interval
from alphaprof.rules import parse_rule
from alphaprof.stats.estimate import Array, Interval, distinct, present
from alphaprof.stats.paired import weighted_inverse_difference
from alphaprof.totals.count import policies
from alphaprof.totals.documents import SETTINGS, Documents
from alphaprof.totals.pool import DocumentTotals, merged

MORE, LESS, SAME = "more", "less", "no difference told apart"
MOST = 3  # domains that a line of the answer names
TEXTS = {
    True: "the same text",
    False: "texts of their own for the same prompts",
    None: "texts that imported runs do not hold: alpha is not known, rounds are",
}


@dataclass(frozen=True)
class TokensDifference:
    """Tokens per round of both at one gamma, and second less first."""

    gamma: int
    first: float  # tokens per round of the first
    second: float  # tokens per round of the second
    difference: Interval  # second less first
    first_by_position: tuple[float, ...]  # share of rounds with a proposal that accepted at least 1, 2, ... drafts; or empty
    second_by_position: tuple[float, ...]  # the same of the second


@dataclass(frozen=True)
class Difference:
    """One domain, kind of text and rule. `difference` is alpha of the second less that of the first; `tokens_per_round` is
    empty where the rule has no rounds on this text.
    """

    domain: str
    continuation: str
    sampling: dict[str, float] | None  # settings that p and q were processed with; None: the plain softmax
    rule: str
    on_policy: bool
    lossy: bool
    documents: int  # paired
    clusters: int  # independent units among them
    first: float | None  # alpha of the first; None: no proposals
    second: float | None  # alpha of the second
    first_coverage: float | None  # share of positions with a proposal; None: imported runs
    second_coverage: float | None  # the same of the second
    difference: Interval | None  # alpha of the second less that of the first
    tokens_per_round: tuple[TokensDifference, ...]  # one a gamma; empty where the rule has no rounds on this text


@dataclass(frozen=True)
class OverallDifference:
    """Tokens per round of one rule on one kind of text, over all its domains together. `tokens_per_round` names no shares by
    position.
    """

    rule: str
    sampling: dict[str, float] | None  # settings that p and q were processed with; None: the plain softmax
    domains: tuple[str, ...]  # that have rounds and a share of the traffic
    weights: dict[str, float] | None  # shares of output tokens, from the first run's decision; None: as documents have them
    documents: int  # paired
    clusters: int  # independent units among them
    tokens_per_round: tuple[TokensDifference, ...]  # one a gamma


@dataclass(frozen=True)
class Comparison:
    """The paired comparison of two drafts. Documents without a partner are left out and counted. Of a run and an import from
    an engine the run is the first, whatever their order, and tokens per round alone are known of both; where their prompts
    cannot be paired, each stands for its domain with documents of its own.
    """

    format: ClassVar[str] = "alphaprof-compare"
    version: ClassVar[str] = "1.0"

    first: str  # run and draft
    second: str  # run and draft
    paired: bool  # document by document; False: independent samples of a domain
    confirms: bool  # the first, a run, predicts; the second is what an engine was seen to do
    confidence: float
    same_text: bool | None  # both measured the same tokens; None: imported runs do not hold them
    documents: int
    interrupted: tuple[str, ...]  # sides whose run is not complete
    unpaired: tuple[int, int]  # documents without a partner: of the first, of the second
    notes: tuple[str, ...]  # where alpha is that of first drafts, or the two do not draft or verify alike
    agreement: str  # whether the engine does what was predicted, in words; empty where nothing was
    gamma: int | None  # that the answer speaks of: the decision's, or the largest of both; None: they have none in common
    overall: tuple[OverallDifference, ...]  # of paired documents; empty where no rule has rounds
    differences: tuple[Difference, ...]  # one for each domain, kind of text and rule

    def terminal(self, console: Console) -> None:
        """Prints which draft gets more accepted, then a table of acceptance, and one of tokens per round."""
        for text in _answer(self):
            console.print(text, highlight=False)
        console.print()
        one, two = _side_names(self)
        console.print(plain(f"{one:<9} {self.first}"))
        console.print(plain(f"{two:<9} {self.second}"))
        paired = f"{fmt.many(self.documents, 'document')} paired by prompt, on {TEXTS[self.same_text]}"
        lone = [fmt.count(number) for number in self.unpaired]
        if self.paired:
            console.print(f"{paired}; without a partner: {lone[0]} of {one}, {lone[1]} of {two}\n", highlight=False)
        else:
            console.print(f"two samples of each domain, not paired: {lone[0]} {one}, {lone[1]} {two}\n", highlight=False)
        if self.same_text is not None:
            show(_acceptance(self), "alpha", console)
        for side in self.interrupted:
            note = plain(f"{side} is of an interrupted run: its first documents only")
            console.print(Text("note: ", "yellow").append_text(note))
        if rounds := [item for item in self.differences if item.tokens_per_round]:
            show(_rounds(self, rounds), "tokens per round", console)
            if self.confirms:
                title = "share of rounds with a proposal whose first 1, 2, ... drafts are accepted"
                show(_positions(self, rounds), title, console)
        for unlike in self.notes:
            console.print(Text("note: ", "yellow").append_text(plain(unlike)))
        for line in _footnotes(self):
            console.print(line, style="dim", highlight=False)


def _side_names(comparison: Comparison) -> tuple[str, str]:
    return ("predicted", "engine") if comparison.confirms else ("first", "second")


def _answer(comparison: Comparison) -> Iterator[Text]:
    """Yields which draft gets more accepted, by how much, where, and what to do next."""
    rules = {each.rule for each in comparison.overall[:1]}
    texts = [
        (text_name(each, comparison.differences), tokens)
        for each in comparison.differences
        for tokens in each.tokens_per_round
        if tokens.gamma == comparison.gamma and (not rules or each.rule in rules)
    ]
    if comparison.overall:
        yield from _over_domains(comparison, comparison.overall[0])
    elif texts:
        texts.sort(key=lambda pair: -abs(pair[1].difference.value))
        yield from (_headline(comparison, tokens, f" in {name}") for name, tokens in texts[:MOST])
    else:
        yield Text("no rule has rounds on this text: the table compares alpha")
    if comparison.agreement:
        yield plain(comparison.agreement)
    elif len(texts) > 1:
        words = _grouped((_word(tokens.difference), name) for name, tokens in texts)
        yield plain("by domain: " + "; ".join(f"{word} in {_some(names)}" for word, names in words.items()))
    yield Text("next: alphaprof report weighs in what a draft costs; tokens per round say nothing about time")


def _over_domains(comparison: Comparison, overall: OverallDifference) -> Iterator[Text]:
    """Yields the difference over all domains, and what it is of."""
    main = next(each for each in overall.tokens_per_round if each.gamma == comparison.gamma)
    yield _headline(comparison, main, "")
    one, two = _side_names(comparison)
    domains = f"over {fmt.many(len(overall.domains), 'domain')} by {'given' if overall.weights else 'observed'} shares"
    documents = f"{fmt.documents(overall.documents, overall.clusters)} paired documents"
    values = f"{one} {fmt.number(main.first)}, {two} {fmt.number(main.second)}"
    yield Text(f"{values} {domains}; {documents}; {fmt.level(comparison.confidence)} interval; {overall.rule}")


def _headline(comparison: Comparison, tokens: TokensDifference, where: str) -> Text:
    """The difference at one gamma as a sentence."""
    values = f"{fmt.difference(tokens.difference, 2)} tokens per round at gamma {tokens.gamma}"
    return Text.assemble((fmt.visible(_outcome(comparison, tokens.difference)), "bold"), plain(f"{where}: {values}"))


def _outcome(comparison: Comparison, difference: Interval) -> str:
    word, (one, two) = _word(difference), _side_names(comparison)
    if word == SAME:
        return word
    if comparison.confirms:
        return f"the {two} accepts {word} than {one}"
    drafts = [fmt.short(label.rpartition(":")[2]) for label in (comparison.first, comparison.second)]
    first, second = (f" ({draft})" if drafts[0] != drafts[1] else "" for draft in drafts)
    return f"{two}{second} accepts {word} than {one}{first}"


def _word(difference: Interval) -> str:
    return MORE if difference.low > 0 else LESS if difference.high < 0 else SAME


def _grouped(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for word, name in pairs:
        groups.setdefault(word, []).append(name)
    return groups


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:MOST]) + (f" and {len(names) - MOST} more" if len(names) > MOST else "")


def _footnotes(comparison: Comparison) -> Iterator[str]:
    """Yields what the columns of the tables mean."""
    one, two = _side_names(comparison)
    paired = "paired, what both share cancels out" if comparison.paired else "of two samples that are not paired"
    yield f"difference: {two} minus {one}, with a {fmt.level(comparison.confidence)} interval over documents, {paired}."
    if comparison.same_text is not None:
        yield "alpha is over positions with a proposal: where coverage differs, compare tokens per round."
        yield (
            "* off-policy: the rule's own decoding would not emit this text   ~ lossy: one step along the target's own text"
        )


def _acceptance(comparison: Comparison) -> Table:
    table = named_table("domain", "rule", "docs", "coverage", "first", "second", "difference", left=("rule",))
    for item in comparison.differences:
        table.add_row(
            plain(text_name(item, comparison.differences)),
            item.rule + fmt.mark(item.on_policy, item.lossy),
            fmt.documents(item.documents, item.clusters),
            f"{fmt.share(item.first_coverage, 2)} / {fmt.share(item.second_coverage, 2)}",
            fmt.share(item.first),
            fmt.share(item.second),
            fmt.difference(item.difference, 3),
        )
    return table


def _rounds(comparison: Comparison, differences: list[Difference]) -> Table:
    table = named_table("domain", "rule", "gamma", *_side_names(comparison), "difference", left=("rule",))
    for item in differences:
        for tokens in item.tokens_per_round:
            numbers = (fmt.number(tokens.first), fmt.number(tokens.second), fmt.difference(tokens.difference, 2))
            table.add_row(plain(text_name(item, differences)), item.rule, str(tokens.gamma), *numbers)
    return table


def _positions(comparison: Comparison, differences: list[Difference]) -> Table:
    names = _side_names(comparison)
    table = named_table("domain", *names, left=names, wrapped=names)
    for item in differences:
        for tokens in item.tokens_per_round:
            sides = (tokens.first_by_position, tokens.second_by_position)
            shares = [" ".join(fmt.share(share) for share in side) or fmt.NOTHING for side in sides]
            table.add_row(plain(text_name(item, differences)), *map(Text, shares))
    return table


def compare(first: RunDraft, second: RunDraft, rules: Sequence[str] | None = None, gamma: int | None = None) -> Comparison:
    """Pair the documents of two runs by prompt and take differences. Raises `NotComparable` with the reason, and
    `OptionInvalid` for a gamma that was not replayed in both. Of a run and an import from an engine: what the run predicts,
    and what the engine was seen to do, under the rule and at the gamma that were served; `OptionInvalid` for others.

    `rules`: ids; default: those of the first run. `gamma`: the one length to compare; default: all that both runs have.
    The confidence is that of the first run's decision.
    """
    confidence = first.run.manifest.profile.decision.confidence
    if first.run.imported != second.run.imported:
        run, served = (second, first) if first.run.imported else (first, second)
        _require_served(run, served, rules, gamma)
        return _confirmed(run, served, confidence)
    require_comparable(first, second)
    gammas = common_gammas(first.run, second.run, gamma)
    (one, two), rows, unpaired = paired_pools(first, second, list(rules or first.run.rules))
    one, two = ({key: pool for key, pool in one.items() if key in two}, two)
    return Comparison(
        first=first.label,
        second=second.label,
        paired=True,
        confirms=False,
        confidence=confidence,
        same_text=_same_text(first.run, second.run, rows),
        documents=len(rows[0]),
        interrupted=tuple(side.label for side in (first, second) if side.run.manifest.status != "complete"),
        unpaired=unpaired,
        notes=tuple(_of_heads(first, second)),
        agreement="",
        gamma=deciding_gamma(first.run, gammas),
        overall=tuple(_overall(first.run, one, two, gammas, confidence)),
        differences=tuple(_difference(key, pool, two[key], gammas, confidence) for key, pool in one.items()),
    )


def _of_heads(*sides: RunDraft) -> Iterator[str]:
    """Yield a note that the alpha of a head covers only the first draft of a round."""
    heads = [side.label for side in sides if side.run.manifest.drafts[side.draft].by_depth]
    if heads:
        yield f"alpha of {' and '.join(heads)} is accept@1, of a round's first draft: compare tokens per round"


def _require_served(run: RunDraft, served: RunDraft, rules: Sequence[str] | None, gamma: int | None) -> None:
    """Raise `OptionInvalid` for another rule or gamma than an engine served, `NotComparable` where the run does not have
    that gamma, or its draft is another one.
    """
    (known,), (rule,) = served.run.gammas, served.run.rules  # all that an import has
    for option, asked, found in (("--rules", list(rules or [rule]), [rule]), ("--gamma", gamma or known, known)):
        if asked != found:
            problem = f"{served.run.path} was served with {rule} and {known} speculative tokens: nothing is known of others"
            raise OptionInvalid(problem, f"leave out {option}")
    if known not in run.run.gammas:
        problem = f"{served.run.path} was served with {known} speculative tokens, and {run.run.path} has other gammas"
        raise NotComparable(problem, f"profile with gammas that include {known}; --reuse-continuations keeps the text")
    if served.draft != run.draft and served.draft in run.run.manifest.drafts:
        problem = f"{served.run.path} is of draft {served.draft}, and {run.label} is another one"
        raise NotComparable(problem, f"compare {run.run.path}:{served.draft}, or import with the name of the served --draft")


def _confirmed(run: RunDraft, served: RunDraft, confidence: float) -> Comparison:
    """Compare what a run predicts with what an engine was seen to do, by domain: paired by prompt where most prompts of one
    are known to be the other's. Raises `NotComparable` where they have no domain, text and rule in common.
    """
    (gamma,), (rule,) = served.run.gammas, served.run.rules
    sides, tables = (run, served), [_by_policy(side.run.documents()) for side in (run, served)]
    rows = matches(tables, SETTINGS)
    imported = served.run.manifest.imported
    by_ids = imported is not None and imported.prompts_known_by == PROMPTS_KNOWN_BY[0]
    paired = by_ids and 2 * len(rows[0]) > min(map(len, tables))  # of fewer, two samples say more
    if paired:
        one, two = pools_of_pairs(sides, tables, rows, [rule])
    else:
        one, two = (side_pools(side, Documents.of(table), [rule]) for side, table in zip(sides, tables, strict=True))
    one, two = ({key: pool for key, pool in pools.items() if pool.defined} for pools in (one, two))
    common = [key for key in one if key in two]
    if not common:
        here, there = (" / ".join(f"{key[0]} ({key[1] or 'given'})" for key in side) or "none" for side in (one, two))
        raise NotComparable(
            f"{run.run.path} and {served.run.path} have no text in common with rounds of {rule}: {here}; {there}",
            "import with the --domain names of the profile, and with its sampling settings",
        )
    one, two = ({key: pools[key] for key in common} for pools in (one, two))
    differences = tuple(_difference(key, pool, two[key], [gamma], confidence, paired) for key, pool in one.items())
    documents = [sum(len(pools[key].cluster) for key in common) for pools in (one, two)]
    lone = [len(table) - len(rows[0]) for table in tables] if paired else documents
    return Comparison(
        first=run.label,
        second=served.label,
        paired=paired,
        confirms=True,
        confidence=confidence,
        same_text=None,
        documents=documents[0] if paired else 0,
        interrupted=tuple(side.label for side in sides if side.run.manifest.status != "complete"),
        unpaired=(lone[0], lone[1]),
        notes=tuple(_unlike(run, served)),
        agreement=_agreement(differences, confidence),
        gamma=gamma,
        overall=tuple(_overall(run.run, one, two, [gamma], confidence)) if paired else (),
        differences=differences,
    )


def _by_policy(documents: pa.Table) -> pa.Table:
    """Return the documents table with on-policy text as one kind, generated or given: imports hold it as given."""
    place = documents.schema.get_field_index("continuation")
    return documents.set_column(place, "continuation", pa.array(policies(documents).tolist(), pa.string()))


def _agreement(differences: Sequence[Difference], confidence: float) -> str:
    """Says of each domain whether what an engine was seen to do lies within the interval of what was predicted."""
    words = {MORE: "emits more than predicted", LESS: "emits less than predicted", SAME: "agrees with the prediction"}
    groups = _grouped(
        (words[_word(tokens.difference)], fmt.short(text_name(item, differences)))
        for item in differences
        for tokens in item.tokens_per_round
    )
    found = "; ".join(f"{word}: {', '.join(names)}" for word, names in groups.items())
    return f"by the {fmt.level(confidence)} interval of tokens per round the engine {found}" if found else ""


def _unlike(run: RunDraft, served: RunDraft) -> Iterator[str]:
    """Yields in what an engine drafts or verifies otherwise than the rounds of a run."""
    drafting, settings = served.run.manifest.drafting, served.run.manifest.drafts[served.draft].settings
    if served.draft != run.draft:
        yield f"the metrics of {served.run.path} do not show which draft was served: {run.label} predicts for itself alone"
    if run.run.manifest.drafts[run.draft].engine_method is None:
        yield f"no engine is known to draft as {run.label} does: name the draft that was served"
    if drafting != CHAIN:
        yield f"{served.run.path} drafted by {drafting}, and rounds of {run.run.path} are chains: a tree accepts more"
    if "verification" in settings:
        least = f"at least what {run.run.path} predicts token by token"
        yield f"{served.run.path} was verified by {settings['verification']}, which accepts {least}"


def _of_two_samples(
    first: DocumentTotals, second: DocumentTotals, gammas: Sequence[int], confidence: float
) -> tuple[TokensDifference, ...]:
    """Tokens per round of independent samples of a domain; empty where one has no rounds. The interval of a difference is
    made of theirs (Zou and Donner 2008, doi:10.1002/sim.3095).
    """
    differences = []
    for gamma in gammas:
        free = [speedup([pool.counts(gamma)], [1.0], free_draft(gamma)) for pool in (first, second)]
        one, two = (tokens_interval(each, gamma, confidence) for each in free)
        if one is not None and two is not None:
            off = two.value - one.value
            low = math.hypot(two.value - two.low, one.high - one.value)
            high = math.hypot(two.high - two.value, one.value - one.low)
            positions = (_by_position(pool, gamma) for pool in (first, second))
            differences.append(
                TokensDifference(gamma, one.value, two.value, Interval(off, off - low, off + high), *positions)
            )
    return tuple(differences)


def _same_text(first: Run, second: Run, rows: tuple[Array, Array]) -> bool | None:
    """Whether paired documents hold the same tokens; None where that is not known."""
    if first.path == second.path:
        return True
    if first.imported:
        return None

    def texts(run: Run, chosen: Array) -> pa.Array:
        parts = [run.continuations(shard.index, ["continuation_ids"]) for shard in run.shards]
        return pa.concat_tables(parts)["continuation_ids"].take(chosen).combine_chunks()

    return bool(texts(first, rows[0]).equals(texts(second, rows[1])))


def _difference(
    key: tuple[str, ...],
    first: DocumentTotals,
    second: DocumentTotals,
    gammas: Sequence[int],
    confidence: float,
    paired: bool = True,
) -> Difference:
    """The difference on one domain and kind of text. Where an engine served a side, tokens per round alone are known."""
    rule, sides, tokens = parse_rule(key[-1]), (first, second), _tokens if paired else _of_two_samples
    observed = first.observed and second.observed
    sums = [side_totals(pool, None) for pool in sides] if observed else []
    alphas = [float(accepted.sum() / counts.sum()) if counts.sum() > 0 else None for accepted, counts in sums]
    coverages = [float(pool["proposals"].sum() / pool["positions"].sum()) for pool in sides] if observed else []
    one, two = alphas or (None, None)
    return Difference(
        domain=key[0],
        continuation=first.continuation,
        sampling=first.sampling,
        rule=rule.id,
        on_policy=first.policy in rule.rule.policies,
        lossy=rule.rule.lossy,
        documents=len(first.cluster) if paired else 0,
        clusters=distinct(first.cluster) if paired else 0,
        first=one,
        second=two,
        first_coverage=coverages[0] if observed else None,
        second_coverage=coverages[1] if observed else None,
        difference=side_difference(first, second, None, confidence) if one is not None and two is not None else None,
        tokens_per_round=tokens(first, second, gammas, confidence),
    )


def _has_rounds(*pools: DocumentTotals) -> bool:
    return all(pool.defined and pool["tokens"].sum() > 0 for pool in pools)


def _tokens(
    first: DocumentTotals, second: DocumentTotals, gammas: Sequence[int], confidence: float
) -> tuple[TokensDifference, ...]:
    """Tokens per round of paired documents at each gamma; empty where a side has no rounds."""
    differences = []
    for gamma in gammas if _has_rounds(first, second) else ():
        sides = [side_totals(pool, gamma) for pool in (first, second)]
        one, two = (float(base.sum() / spent.sum()) for spent, base in sides)
        positions = (_by_position(pool, gamma) for pool in (first, second))
        difference = side_difference(first, second, gamma, confidence)
        differences.append(TokensDifference(gamma, one, two, difference, *positions))
    return tuple(differences)


def _overall(run: Run, first: Pools, second: Pools, gammas: Sequence[int], confidence: float) -> Iterator[OverallDifference]:
    """Yields the differences over all domains together, one for each rule that has rounds and each kind of text: domains by
    the shares of the run's decision where it names them all, otherwise as the documents have them.
    """
    kinds: dict[tuple[str, ...], dict[str, list[tuple[DocumentTotals, DocumentTotals]]]] = {}
    for (domain, _, *kind), pool in first.items():
        other = second[domain, pool.continuation, *kind]
        if _has_rounds(pool, other):
            kinds.setdefault(tuple(kind), {}).setdefault(domain, []).append((pool, other))
    given = run.manifest.profile.decision.weights
    for (_, _, rule), domains in kinds.items():
        pairs = {name: tuple(map(merged, zip(*parts, strict=True))) for name, parts in domains.items()}
        total = sum(given[name] for name in pairs) if given and set(pairs) <= set(given) else 0.0
        weights = {name: given[name] / total for name in pairs if given[name] > 0} if given and total > 0 else None
        whole = tuple(map(merged, zip(*pairs.values(), strict=True)))
        parts = [pairs[name] for name in weights] if weights else [whole]
        yield OverallDifference(
            rule=rule,
            sampling=whole[0].sampling,
            domains=tuple(weights or pairs),
            weights=weights,
            documents=sum(len(one.cluster) for one, _ in parts),
            clusters=distinct(np.concatenate([one.cluster for one, _ in parts])),
            tokens_per_round=tuple(
                _weighted(parts, list(weights.values()) if weights else [1.0], gamma, confidence) for gamma in gammas
            ),
        )


def _weighted(
    parts: Sequence[tuple[DocumentTotals, ...]], weights: Sequence[float], gamma: int, confidence: float
) -> TokensDifference:
    """Tokens per round of the pairs of pools of several domains."""
    first, second = ([side_totals(pool, gamma) for pool in side] for side in zip(*parts, strict=True))
    units = [present(one.cluster) for one, _ in parts]
    one, two, difference = weighted_inverse_difference(first, second, units, weights, confidence, gamma)
    return TokensDifference(gamma, one, two, difference, (), ())


def _by_position(pool: DocumentTotals, gamma: int) -> tuple[float, ...]:
    free = speedup([pool.counts(gamma)], [1.0], free_draft(gamma))
    _, drafted, _, accepted = counted(pool, gamma, free)
    return tuple((accepted / drafted[0]).tolist()) if drafted[0] > 0 else ()
