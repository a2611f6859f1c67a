"""`alphaprof compare`: two drafts on the same prompts, paired document by document; whether they may be compared at all.

Not here: the gate against a baseline, which uses the pairs (`check`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from rich.console import Console
from rich.table import Table
from rich.text import Text

from alphaprof.commands.importing.tables import ONE_BY_ONE
from alphaprof.costs.speedup import free_draft, speedup, spent_and_base
from alphaprof.errors import NotComparable, OptionInvalid
from alphaprof.log.manifest import CHAIN, LOG_PROMPTS, NO_PROMPT, PROMPTS_KNOWN_BY
from alphaprof.log.run_draft import RunDraft
from alphaprof.log.store import Run
from alphaprof.render.tables import named_table, plain, show
from alphaprof.render.wording import text_name
from alphaprof.report import format as fmt
from alphaprof.report.result import counted
from alphaprof.report.speeds import tokens_interval
from alphaprof.rules import parse_rule
from alphaprof.stats.estimate import Array, Interval, by_cluster, distinct
from alphaprof.stats.paired import inverse_difference, share_difference
from alphaprof.totals.count import TotalsRequest, policies
from alphaprof.totals.documents import SETTINGS, Documents, Units
from alphaprof.totals.files import read_totals
from alphaprof.totals.pool import DocumentTotals, pools

Pools = dict[tuple[str, ...], DocumentTotals]  # by domain, kind of text, policy, settings and rule
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
    differences: tuple[Difference, ...]  # one for each domain, kind of text and rule

    def terminal(self, console: Console) -> None:
        """Prints a table of acceptance, and one of tokens per round where rules have rounds."""
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
                show(
                    _positions(self, rounds),
                    "share of rounds with a proposal whose first 1, 2, ... drafts are accepted",
                    console,
                )
        for unlike in self.notes:
            console.print(Text("note: ", "yellow").append_text(plain(unlike)))
        if self.agreement:
            console.print(plain(self.agreement))
        for line in _footnotes(self):
            console.print(line, style="dim", highlight=False)


def _side_names(comparison: Comparison) -> tuple[str, str]:
    return ("predicted", "engine") if comparison.confirms else ("first", "second")


def _footnotes(comparison: Comparison) -> Iterator[str]:
    """Yields what the columns of the tables mean."""
    one, two = _side_names(comparison)
    level, has_alpha = fmt.level(comparison.confidence), comparison.same_text is not None
    yield f"difference: {two} minus {one}, with a {level} interval over documents; what both share"
    if comparison.paired:
        yield "cancels out."
    else:
        yield "is counted twice: intervals are of two samples that know nothing of each other."
    if has_alpha:
        yield "alpha is over positions with a proposal: where coverage differs, compare tokens per round."
    yield "Tokens per round say nothing about what a draft costs: alphaprof report turns them into speedups."
    if has_alpha:
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
    confidence = float(first.run.manifest.config["decision"]["confidence"])
    if first.run.imported != second.run.imported:
        run, served = (second, first) if first.run.imported else (first, second)
        _require_served(run, served, rules, gamma)
        return _confirmed(run, served, confidence)
    require_comparable(first, second)
    both = sorted(set(first.run.gammas) & set(second.run.gammas))
    if gamma not in (None, *both):
        names = ", ".join(map(str, both)) or "none"
        raise OptionInvalid(f"gamma {gamma} was not replayed in both runs", f"choose from {names}")
    gammas = both if gamma is None else [gamma]
    (one, two), rows, unpaired = paired_pools(first, second, list(rules or first.run.rules))
    differences = tuple(_difference(key, pool, two[key], gammas, confidence) for key, pool in one.items() if key in two)
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
        differences=differences,
    )


def _of_heads(*sides: RunDraft) -> Iterator[str]:
    """Yields that alpha of a head is no alpha of a whole round."""
    heads = [side.label for side in sides if side.run.manifest.drafts[side.draft].by_depth]
    if heads:
        yield f"alpha of {' and '.join(heads)} is accept@1, of a round's first draft: compare tokens per round"


def _require_served(run: RunDraft, served: RunDraft, rules: Sequence[str] | None, gamma: int | None) -> None:
    """Raise `OptionInvalid` for another rule or gamma than an engine served, `NotComparable` where the run does not have
    that gamma, or its draft is another one.
    """
    (known,), (rule,) = served.run.gammas, served.run.rules  # all that an import has
    if rules and list(rules) != [rule]:
        problem = f"{served.run.path} was served with {rule}, and nothing is known of {' or '.join(rules)} there"
        raise OptionInvalid(problem, f"leave out --rules, or name {rule} alone")
    if gamma not in (None, known):
        problem = (
            f"{served.run.path} was served with {known} speculative tokens, and nothing is known of gamma {gamma} there"
        )
        raise OptionInvalid(problem, f"leave out --gamma, or name {known}")
    if known not in run.run.gammas:
        gammas = ", ".join(map(str, run.run.gammas))
        raise NotComparable(
            f"{served.run.path} was served with {known} speculative tokens, and {run.run.path} has {gammas}",
            f"profile with gammas that include {known}; --reuse-continuations keeps the text",
        )
    if served.draft != run.draft and served.draft in run.run.manifest.drafts:
        problem = f"{served.run.path} is of draft {served.draft}, and {run.label} is another one"
        raise NotComparable(problem, f"compare {run.run.path}:{served.draft}, or import with the name of the served --draft")


def _confirmed(run: RunDraft, served: RunDraft, confidence: float) -> Comparison:
    """Compare what a run predicts with what an engine was seen to do, by domain: paired by prompt where most prompts of one
    are known to be the other's. Raises `NotComparable` where they have no domain, text and rule in common.
    """
    (gamma,), (rule,) = served.run.gammas, served.run.rules
    sides, tables = (run, served), [_by_policy(side.run.documents()) for side in (run, served)]
    rows = _matches(tables, SETTINGS)
    imported = served.run.manifest.imported
    by_ids = imported is not None and imported.prompts_known_by == PROMPTS_KNOWN_BY[0]
    paired = by_ids and 2 * len(rows[0]) > min(map(len, tables))  # of fewer, two samples say more
    if paired:
        one, two = _pools_of_pairs(sides, tables, rows, [rule])
    else:
        one, two = (_pools(side, Documents.of(table), [rule]) for side, table in zip(sides, tables, strict=True))
    one, two = ({key: pool for key, pool in pools.items() if pool.defined} for pools in (one, two))
    common = [key for key in one if key in two]
    if not common:
        here, there = (" / ".join(f"{key[0]} ({key[1] or 'given'})" for key in side) or "none" for side in (one, two))
        raise NotComparable(
            f"{run.run.path} and {served.run.path} have no text in common with rounds of {rule}: {here}; {there}",
            "import with the --domain names of the profile, and with its sampling settings",
        )
    tokens = _tokens if paired else _of_two_samples
    differences = [_seen(key, one[key], two[key], tokens(one[key], two[key], gamma, confidence), paired) for key in common]
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
        differences=tuple(differences),
    )


def _by_policy(documents: pa.Table) -> pa.Table:
    """The documents table with text that the target chose as one kind, whoever wrote it down: imports hold it as given."""
    place = documents.schema.get_field_index("continuation")
    return documents.set_column(place, "continuation", pa.array(policies(documents).tolist(), pa.string()))


def _agreement(differences: Sequence[Difference], confidence: float) -> str:
    """Says of each domain whether what an engine was seen to do lies within the interval of what was predicted."""
    words: dict[str, list[str]] = {}
    for item in differences:
        for tokens in item.tokens_per_round:
            low, high = tokens.difference.low, tokens.difference.high
            word = (
                "emits more than predicted"
                if low > 0
                else "emits less than predicted"
                if high < 0
                else "agrees with the prediction"
            )
            words.setdefault(word, []).append(fmt.short(text_name(item, differences)))
    found = "; ".join(f"{word}: {', '.join(names)}" for word, names in words.items())
    return f"by the {fmt.level(confidence)} interval of tokens per round the engine {found}" if found else ""


def _unlike(run: RunDraft, served: RunDraft) -> Iterator[str]:
    """Yields in what an engine drafts or verifies otherwise than the rounds of a run."""
    drafting, verification = served.run.manifest.drafting, _verification(served)
    if served.draft != run.draft:
        yield f"the metrics of {served.run.path} do not show which draft was served: {run.label} predicts for itself alone"
    if run.run.manifest.drafts[run.draft].engine_method is None:
        yield f"no engine is known to draft as {run.label} does: name the draft that was served"
    if drafting != CHAIN:
        yield f"{served.run.path} drafted by {drafting}, and rounds of {run.run.path} are chains: a tree accepts more"
    if verification != ONE_BY_ONE:
        least = f"at least what {run.run.path} predicts token by token"
        yield f"{served.run.path} was verified by {verification}, which accepts {least}"


def _verification(side: RunDraft) -> str:
    return str(side.run.manifest.drafts[side.draft].settings.get("verification", ONE_BY_ONE))


def _of_two_samples(first: DocumentTotals, second: DocumentTotals, gamma: int, confidence: float) -> TokensDifference | None:
    """Tokens per round of independent samples of a domain; None where one has no rounds. The interval of the difference is
    made of theirs (Zou and Donner 2008, doi:10.1002/sim.3095).
    """
    free = [speedup([pool.counts(gamma)], [1.0], free_draft(gamma)) for pool in (first, second)]
    one, two = (tokens_interval(each, gamma, confidence) for each in free)
    if one is None or two is None:
        return None
    off = two.value - one.value
    low, high = math.hypot(two.value - two.low, one.high - one.value), math.hypot(two.high - two.value, one.value - one.low)
    positions = (_by_position(pool, gamma) for pool in (first, second))
    return TokensDifference(gamma, one.value, two.value, Interval(off, off - low, off + high), *positions)


def _seen(
    key: tuple[str, ...], first: DocumentTotals, second: DocumentTotals, tokens: TokensDifference | None, paired: bool
) -> Difference:
    """What a run predicts of a domain and what an engine was seen to do there: tokens per round alone are known of both."""
    rule = parse_rule(key[-1])
    return Difference(
        domain=key[0],
        continuation=first.continuation,
        sampling=first.sampling,
        rule=rule.id,
        on_policy=first.policy in rule.rule.policies,
        lossy=rule.rule.lossy,
        documents=len(first.cluster) if paired else 0,
        clusters=distinct(first.cluster) if paired else 0,
        first=None,
        second=None,
        first_coverage=None,
        second_coverage=None,
        difference=None,
        tokens_per_round=() if tokens is None else (tokens,),
    )


def paired_pools(
    first: RunDraft, second: RunDraft, rules: Sequence[str]
) -> tuple[tuple[Pools, Pools], tuple[Array, Array], tuple[int, int]]:
    """Pair the documents of two sides by prompt. Raises `NotComparable` where they have none in common.

    Returns the pools of each side, in the order of their pairs, the rows of the pairs in each documents table, and how many
    documents of each have no partner.
    """
    tables = [side.run.documents() for side in (first, second)]
    rows = _matches(tables, (*SETTINGS, "max_new_tokens"))
    if not len(rows[0]):
        raise _nothing_in_common(first.run, second.run, tables)
    paired = _pools_of_pairs((first, second), tables, rows, rules)
    return paired, rows, (len(tables[0]) - len(rows[0]), len(tables[1]) - len(rows[1]))


def _matches(tables: Sequence[pa.Table], settings: Sequence[str]) -> tuple[Array, Array]:
    """Rows of the documents of each table that are of one prompt and have equal `settings`, [pairs] each."""
    places = {key: row for row, key in enumerate(_keys(tables[1], settings))}
    matches = [(row, places[key]) for row, key in enumerate(_keys(tables[0], settings)) if key in places]
    one, two = np.array(matches, dtype=np.int64).reshape(-1, 2).T
    return one, two


def _pools_of_pairs(
    sides: Sequence[RunDraft], tables: Sequence[pa.Table], rows: tuple[Array, Array], rules: Sequence[str]
) -> tuple[Pools, Pools]:
    documents = [table.take(chosen) for table, chosen in zip(tables, rows, strict=True)]
    units = Units.of(pa.concat_tables(documents)).take(slice(len(rows[0])))  # what belongs together in either run
    one, two = (_pools(side, Documents(table, units), rules) for side, table in zip(sides, documents, strict=True))
    return one, two


def _nothing_in_common(first: Run, second: Run, tables: Sequence[pa.Table]) -> NotComparable:
    """Why no document has a partner: other prompts, or other text on the same prompts."""
    runs = f"{first.path} and {second.path}"
    shared = len(set.intersection(*(set(table["prompt_hash"].to_pylist()) for table in tables)))
    imported = first.manifest.imported
    known_by = imported.prompts_known_by if imported else None  # the same of both: see `_require_same_origin`
    if imported and known_by in NO_PROMPT:
        fresh = ", which is new in every answer" if known_by else ""
        problem = f"no request of {runs} can be paired: their prompts are identified by {known_by or 'nothing'}{fresh}"
        hint = f"{LOG_PROMPTS}, or a custom_id of your own, in both runs, and import them again"
    elif imported and shared:
        domains = f"(domains {_names(tables, 'domain')})"
        problem = f"{runs} share {shared} prompts, but none in one domain with the same sampling settings {domains}"
        hint = "import both with the same --domain or --domain-key, and with the same --temperature, --top-k and --top-p"
    elif imported:
        problem, hint = (
            f"{runs} have no prompt in common: they were sent other prompts",
            "log answers to the same prompts in both",
        )
        if known_by == PROMPTS_KNOWN_BY[0]:
            problem += ", or made other token ids of them (another tokenizer or chat template)"
    elif shared:
        problem = f"{runs} share {shared} prompts, but no kind of text ({_names(tables, 'continuation')})"
        hint = "compare drafts on text of one kind, with the same sampling settings and max_new_tokens"
    else:
        problem = f"{runs} have no prompt in common"
        hint = "profile both on the same data; --reuse-continuations measures another draft on the same text"
    return NotComparable(problem, hint)


def _names(tables: Sequence[pa.Table], column: str) -> str:
    """The different values of a column in each of two tables."""
    return " / ".join(", ".join(sorted(set(table[column].cast(pa.string()).to_pylist()))) for table in tables)


def _keys(documents: pa.Table, settings: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    """Yields what pairs each document: domain, kind of text, prompt, settings, and its place among equal ones."""
    columns = [documents[name].cast(pa.string()).to_pylist() for name in ("domain", "continuation", "prompt_hash")]
    columns += [documents[name].to_pylist() for name in settings]
    seen = Counter[tuple[Any, ...]]()
    for key in zip(*columns, policies(documents).tolist(), strict=True):
        seen[key] += 1
        yield (*key, seen[key])


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


def _pools(side: RunDraft, documents: Documents, rules: Sequence[str]) -> Pools:
    """The pools of the paired documents. `rules`: their ids."""
    totals = read_totals(side.run, side.draft, TotalsRequest(rules, side.run.gammas))
    return {
        (domain, pool.continuation, pool.policy, str(pool.sampling), rule): pool
        for rule in rules
        for domain, pool in pools([totals], documents, rule, side.run.gammas)
    }


def _difference(
    key: tuple[str, ...], first: DocumentTotals, second: DocumentTotals, gammas: Sequence[int], confidence: float
) -> Difference:
    rule = parse_rule(key[-1])
    sides = [summed(pool) for pool in (first, second)]
    counted = all(counts.sum() > 0 for _, counts in sides)  # of imported runs they are not known: NaN
    alphas = [float(accepted.sum() / counts.sum()) if counts.sum() > 0 else None for accepted, counts in sides]
    coverages = [
        float(pool["proposals"].sum() / pool["positions"].sum()) if pool.observed else None for pool in (first, second)
    ]
    rounds = first.defined and second.defined
    return Difference(
        domain=key[0],
        continuation=first.continuation,
        sampling=first.sampling,
        rule=rule.id,
        on_policy=first.policy in rule.rule.policies,
        lossy=rule.rule.lossy,
        documents=len(first.cluster),
        clusters=distinct(first.cluster),
        first=alphas[0],
        second=alphas[1],
        first_coverage=coverages[0],
        second_coverage=coverages[1],
        difference=share_difference(sides[0], sides[1], confidence) if counted else None,
        tokens_per_round=tuple(_tokens(first, second, gamma, confidence) for gamma in gammas) if rounds else (),
    )


def summed(pool: DocumentTotals) -> tuple[Array, Array]:
    """Accepted and proposed positions by independent unit."""
    accepted, proposals = by_cluster(pool.cluster, pool["accepted"], pool["proposals"])
    return accepted, proposals


def _tokens(first: DocumentTotals, second: DocumentTotals, gamma: int, confidence: float) -> TokensDifference:
    sides = [spent_and_base(pool.counts(gamma), free_draft(gamma)) for pool in (first, second)]
    one, two = (float(base.sum() / spent.sum()) for spent, base in sides)
    positions = (_by_position(pool, gamma) for pool in (first, second))
    return TokensDifference(gamma, one, two, inverse_difference(sides[0], sides[1], confidence, gamma), *positions)


def _by_position(pool: DocumentTotals, gamma: int) -> tuple[float, ...]:
    free = speedup([pool.counts(gamma)], [1.0], free_draft(gamma))
    _, drafted, _, accepted = counted(pool, gamma, free)
    return tuple((accepted / drafted[0]).tolist()) if drafted[0] > 0 else ()


def require_comparable(first: RunDraft, second: RunDraft, other_target: bool = False) -> None:
    """Raise `NotComparable` where target, dtype, tokenizer or processing differ: a difference would not be the draft's.

    `other_target`: a fine-tuned or quantised target is what is asked about.
    """
    one, two = first.run.manifest, second.run.manifest
    here, there = first.run.path, second.run.path
    if first.label == second.label:
        raise NotComparable(f"{first.label} is compared with itself", "name two drafts, or two runs")
    _require_same_origin(first.run, second.run)
    methods = [_verification(side) for side in (first, second)]
    if methods[0] != methods[1]:
        problem = f"{here} was verified by {methods[0]}, and {there} by {methods[1]}"
        raise NotComparable(problem, "serve both with the same rejection_sample_method")
    if one.config.get("draft_processing") != two.config.get("draft_processing"):
        hint = "profile one of them again with the other's; --reuse-continuations keeps the text"
        raise NotComparable(f"{here} and {there} differ in draft_processing", hint)
    facts = () if other_target else ("fingerprint", "dtype")
    odd = [name for name in facts if getattr(one.target, name) != getattr(two.target, name)]
    odd += ["tokenizer"] if one.tokenizer != two.tokenizer else []
    if odd and first.run.imported:
        hint = "compare drafts of one target; if it is the same under another name, import both with the same --target"
        raise NotComparable(f"{here} was served by {one.target.reference}, and {there} by {two.target.reference}", hint)
    if odd:
        hint = "compare drafts of one target, profiled in one dtype"
        raise NotComparable(f"{here} and {there} have different targets ({', '.join(odd)} differ)", hint)


def _require_same_origin(first: Run, second: Run) -> None:
    """The same for runs of which one was imported from an engine's metrics, or both."""
    one, two = first.manifest.imported, second.manifest.imported
    if one is None or two is None:
        if one is two:
            return
        imported, profiled = (first, second) if two is None else (second, first)
        problem = f"{imported.path} was imported from an engine's metrics, and {profiled.path} was profiled"
        unknown = "nothing shows that both have the same target and text"
        raise NotComparable(
            f"{problem}: {unknown}", "import both, or profile both; compare shows what each says of a domain"
        )
    for name in ("drafting", "gamma", "rule"):
        served = [getattr(imported, name) for imported in (one, two)]
        if served[0] != served[1]:
            problem = f"{first.path} was served with {name} {served[0]}, and {second.path} with {name} {served[1]}"
            raise NotComparable(problem, "serve both with the same number of speculative tokens, and the same rule")
    if one.prompts_known_by != two.prompts_known_by:
        kinds = [imported.prompts_known_by or "nothing" for imported in (one, two)]
        problem = f"prompts of {first.path} are identified by {kinds[0]}, and those of {second.path} by {kinds[1]}"
        raise NotComparable(problem, f"{LOG_PROMPTS}, of both runs, and import them again")
