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
from alphaprof.report.speeds import tokens_interval
from alphaprof.rules import parse_rule
from alphaprof.stats.estimate import Array, Interval, by_cluster, distinct
from alphaprof.stats.paired import inverse_difference, share_difference
from alphaprof.totals.count import TotalsRequest, policies
from alphaprof.totals.documents import SETTINGS, Documents, Units
from alphaprof.totals.files import read_totals
from alphaprof.totals.pool import DocumentTotals, merged, pools

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
    an engine nothing is paired: each stands for its domain with documents of its own, and tokens per round alone are known.
    """

    format: ClassVar[str] = "alphaprof-compare"
    version: ClassVar[int] = 1

    first: str  # run and draft
    second: str  # run and draft
    paired: bool  # document by document; False: a run, which predicts, and what an engine was seen to do
    confidence: float
    same_text: bool | None  # both measured the same tokens; None: imported runs do not hold them
    documents: int
    interrupted: tuple[str, ...]  # sides whose run is not complete
    unpaired: tuple[int, int]  # documents without a partner: of the first, of the second
    notes: tuple[str, ...]  # where alpha is that of first drafts, or the two do not draft or verify alike
    differences: tuple[Difference, ...]  # one for each domain, kind of text and rule

    def terminal(self, console: Console) -> None:
        """Prints a table of acceptance, and one of tokens per round where rules have rounds."""
        console.print(plain(f"first   {self.first}"))
        console.print(plain(f"second  {self.second}"))
        paired = f"{fmt.many(self.documents, 'document')} paired by prompt, on {TEXTS[self.same_text]}"
        one, two = map(fmt.count, self.unpaired)
        if self.paired:
            console.print(f"{paired}; without a partner: {one} of first, {two} of second\n", highlight=False)
        else:
            console.print(f"predicted and engine, by domain: {one} documents of first, {two} of second\n", highlight=False)
        if self.same_text is not None:
            show(_acceptance(self), "alpha", console)
        for side in self.interrupted:
            note = plain(f"{side} is of an interrupted run: its first documents only")
            console.print(Text("note: ", "yellow").append_text(note))
        if rounds := [item for item in self.differences if item.tokens_per_round]:
            show(_rounds(rounds), "tokens per round", console)
        for unlike in self.notes:
            console.print(Text("note: ", "yellow").append_text(plain(unlike)))
        for line in (
            f"difference: second minus first, with a {fmt.level(self.confidence)} interval over documents; what both share",
            "cancels out."
            if self.paired
            else "is counted twice: intervals are of two samples that know nothing of each other.",
            "alpha is over positions with a proposal: where coverage differs, compare tokens per round.",
            "Tokens per round say nothing about what a draft costs: alphaprof report turns them into speedups.",
            "* off-policy: the rule's own decoding would not emit this text   ~ lossy: one step along the target's own text",
        ):
            console.print(line, style="dim", highlight=False)


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


def _rounds(differences: list[Difference]) -> Table:
    table = named_table("domain", "rule", "gamma", "first", "second", "difference", left=("rule",))
    for item in differences:
        for tokens in item.tokens_per_round:
            numbers = (fmt.number(tokens.first), fmt.number(tokens.second), fmt.difference(tokens.difference, 2))
            table.add_row(plain(text_name(item, differences)), item.rule, str(tokens.gamma), *numbers)
    return table


def compare(first: RunDraft, second: RunDraft, rules: Sequence[str] | None = None, gamma: int | None = None) -> Comparison:
    """Pair the documents of two runs by prompt and take differences. Raises `NotComparable` with the reason, and
    `OptionInvalid` for a gamma that was not replayed in both.

    `rules`: ids; default: those of the first run. `gamma`: the one length to compare; default: all that both runs have.
    The confidence is that of the first run's decision.
    """
    confidence = float(first.run.manifest.config["decision"]["confidence"])
    if first.run.imported != second.run.imported:
        return _confirmed(first, second, confidence)
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
        confidence=confidence,
        same_text=_same_text(first.run, second.run, rows),
        documents=len(rows[0]),
        interrupted=tuple(side.label for side in (first, second) if side.run.manifest.status != "complete"),
        unpaired=unpaired,
        notes=tuple(_of_heads(first, second)),
        differences=differences,
    )


def _of_heads(*sides: RunDraft) -> Iterator[str]:
    """Yields that alpha of a head is no alpha of a whole round."""
    heads = [side.label for side in sides if side.run.manifest.drafts[side.draft].depths is not None]
    if heads:
        yield f"alpha of {' and '.join(heads)} is accept@1, of a round's first draft: compare tokens per round"


def _confirmed(first: RunDraft, second: RunDraft, confidence: float) -> Comparison:
    """Compare what a run predicts with what an engine was seen to do, by domain. Raises `NotComparable` where they have no
    domain, text, rule and gamma in common.
    """
    run, served = (second, first) if first.run.imported else (first, second)
    (gamma,), (rule,) = served.run.gammas, served.run.rules  # all that an import has
    if gamma not in run.run.gammas:
        known = ", ".join(map(str, run.run.gammas))
        raise NotComparable(
            f"{served.run.path} was served with {gamma} speculative tokens, and {run.run.path} has {known}",
            f"profile with gammas that include {gamma}; --reuse-continuations keeps the text",
        )
    one, two = (_whole_texts(side, rule) for side in (first, second))
    common = [key for key in one if key in two]
    if not common:
        here, there = (" / ".join(f"{key[0]} ({key[1] or 'given'})" for key in side) or "none" for side in (one, two))
        raise NotComparable(
            f"{first.run.path} and {second.run.path} have no text in common with rounds of {rule}: {here}; {there}",
            "import with the --domain names of the profile, and with its sampling settings",
        )
    return Comparison(
        first=first.label,
        second=second.label,
        paired=False,
        confidence=confidence,
        same_text=None,
        documents=0,
        interrupted=tuple(side.label for side in (first, second) if side.run.manifest.status != "complete"),
        unpaired=(sum(len(one[key].cluster) for key in common), sum(len(two[key].cluster) for key in common)),
        notes=tuple(_unlike(run, served)),
        differences=tuple(_of_two_samples(key, one[key], two[key], gamma, confidence) for key in common),
    )


def _whole_texts(side: RunDraft, rule: str) -> Pools:
    """The pools that have rounds, by domain, policy, settings and rule, whatever kind of continuation they are."""
    texts: dict[tuple[str, ...], list[DocumentTotals]] = {}
    for key, pool in _pools(side, Documents.of(side.run.documents()), [rule]).items():
        if pool.defined:
            texts.setdefault((key[0], *key[2:]), []).append(pool)
    return {key: merged(parts) for key, parts in texts.items()}


def _unlike(run: RunDraft, served: RunDraft) -> Iterator[str]:
    """Yields in what an engine drafts or verifies otherwise than the rounds of a run."""
    drafting, verification = served.run.manifest.drafting, _verification(served)
    if drafting != CHAIN:
        yield f"{served.run.path} drafted by {drafting}, and rounds of {run.run.path} are chains: a tree accepts more"
    if verification != ONE_BY_ONE:
        least = f"at least what {run.run.path} predicts token by token"
        yield f"{served.run.path} was verified by {verification}, which accepts {least}"


def _verification(side: RunDraft) -> str:
    return str(side.run.manifest.drafts[side.draft].settings.get("verification", ONE_BY_ONE))


def _of_two_samples(
    key: tuple[str, ...], first: DocumentTotals, second: DocumentTotals, gamma: int, confidence: float
) -> Difference:
    """Tokens per round of independent samples of a domain. The interval of the difference is made of theirs (Zou and Donner
    2008, doi:10.1002/sim.3095).
    """
    rule = parse_rule(key[-1])
    free = [speedup([pool.counts(gamma)], [1.0], free_draft(gamma)) for pool in (first, second)]
    intervals = [tokens_interval(each, gamma, confidence) for each in free]
    tokens: tuple[TokensDifference, ...] = ()
    if (one := intervals[0]) is not None and (two := intervals[1]) is not None:
        off = two.value - one.value
        low, high = (
            math.hypot(two.value - two.low, one.high - one.value),
            math.hypot(two.high - two.value, one.value - one.low),
        )
        tokens = (TokensDifference(gamma, one.value, two.value, Interval(off, off - low, off + high)),)
    return Difference(
        domain=key[0],
        continuation=first.continuation,
        sampling=first.sampling,
        rule=rule.id,
        on_policy=first.policy in rule.rule.policies,
        lossy=rule.rule.lossy,
        documents=0,
        clusters=0,
        first=None,
        second=None,
        first_coverage=None,
        second_coverage=None,
        difference=None,
        tokens_per_round=tokens,
    )


def paired_pools(
    first: RunDraft, second: RunDraft, rules: Sequence[str]
) -> tuple[tuple[Pools, Pools], tuple[Array, Array], tuple[int, int]]:
    """Pair the documents of two sides by prompt. Raises `NotComparable` where they have none in common.

    Returns the pools of each side, in the order of their pairs, the rows of the pairs in each documents table, and how many
    documents of each have no partner.
    """
    tables = [side.run.documents() for side in (first, second)]
    places = {key: row for row, key in enumerate(_keys(tables[1]))}
    matches = [(row, places[key]) for row, key in enumerate(_keys(tables[0])) if key in places]
    if not matches:
        raise _nothing_in_common(first.run, second.run, tables)
    rows = np.array(matches).T
    documents = [table.take(chosen) for table, chosen in zip(tables, rows, strict=True)]
    units = Units.of(pa.concat_tables(documents)).take(slice(len(matches)))  # what belongs together in either run
    one, two = (_pools(side, Documents(table, units), rules) for side, table in zip((first, second), documents, strict=True))
    return (one, two), (rows[0], rows[1]), (len(tables[0]) - len(matches), len(tables[1]) - len(matches))


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


def _keys(documents: pa.Table) -> Iterator[tuple[Any, ...]]:
    """Yields what pairs each document: domain, kind of text, prompt, sampling settings, and its place among equal ones."""
    columns = [documents[name].cast(pa.string()).to_pylist() for name in ("domain", "continuation", "prompt_hash")]
    columns += [documents[name].to_pylist() for name in (*SETTINGS, "max_new_tokens")]
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
    return TokensDifference(gamma, one, two, inverse_difference(sides[0], sides[1], confidence, gamma))


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
