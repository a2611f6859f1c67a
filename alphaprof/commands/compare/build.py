"""Pairs the documents of two drafts and takes differences; whether they may be compared at all."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from alphaprof.commands.compare.answer import Comparison, Difference, OverallDifference, TokensDifference
from alphaprof.commands.importing.tables import ONE_BY_ONE
from alphaprof.costs.speedup import free_draft, speedup, spent_and_base
from alphaprof.errors import NotComparable, OptionInvalid
from alphaprof.log.manifest import CHAIN, LOG_PROMPTS, NO_PROMPT, PROMPTS_KNOWN_BY
from alphaprof.log.run_draft import RunDraft
from alphaprof.log.store import Run
from alphaprof.render.wording import text_name
from alphaprof.report import format as fmt
from alphaprof.report.result import counted
from alphaprof.report.speeds import tokens_interval
from alphaprof.rules import parse_rule
from alphaprof.stats.estimate import Array, Interval, by_cluster, distinct, present
from alphaprof.stats.paired import inverse_difference, share_difference, weighted_inverse_difference
from alphaprof.totals.count import TotalsRequest, policies
from alphaprof.totals.documents import SETTINGS, Documents, Units
from alphaprof.totals.files import read_totals
from alphaprof.totals.pool import DocumentTotals, merged, pools

Pools = dict[tuple[str, ...], DocumentTotals]  # by domain, kind of text, policy, settings and rule


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
    sums = [summed(pool) for pool in sides] if observed else []
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
        difference=share_difference(sums[0], sums[1], confidence) if one is not None and two is not None else None,
        tokens_per_round=tokens(first, second, gammas, confidence),
    )


def summed(pool: DocumentTotals) -> tuple[Array, Array]:
    """Accepted and proposed positions by independent unit."""
    accepted, proposals = by_cluster(pool.cluster, pool["accepted"], pool["proposals"])
    return accepted, proposals


def _has_rounds(*pools: DocumentTotals) -> bool:
    return all(pool.defined and pool["tokens"].sum() > 0 for pool in pools)


def _tokens(
    first: DocumentTotals, second: DocumentTotals, gammas: Sequence[int], confidence: float
) -> tuple[TokensDifference, ...]:
    """Tokens per round of paired documents at each gamma; empty where a side has no rounds."""
    differences = []
    for gamma in gammas if _has_rounds(first, second) else ():
        sides = [spent_and_base(pool.counts(gamma), free_draft(gamma)) for pool in (first, second)]
        one, two = (float(base.sum() / spent.sum()) for spent, base in sides)
        positions = (_by_position(pool, gamma) for pool in (first, second))
        difference = inverse_difference(sides[0], sides[1], confidence, gamma)
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
    given = run.manifest.config["decision"]["weights"]
    for (_, _, rule), domains in kinds.items():
        pairs = {name: tuple(map(merged, zip(*parts, strict=True))) for name, parts in domains.items()}
        total = sum(given[name] for name in pairs) if given and set(pairs) <= set(given) else 0.0
        weights = {name: given[name] / total for name in pairs if given[name] > 0} if total > 0 else None
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
    first, second = (
        [spent_and_base(pool.counts(gamma), free_draft(gamma)) for pool in side] for side in zip(*parts, strict=True)
    )
    units = [present(one.cluster) for one, _ in parts]
    one, two, difference = weighted_inverse_difference(first, second, units, weights, confidence, gamma)
    return TokensDifference(gamma, one, two, difference, (), ())


def deciding_gamma(run: Run, gammas: Sequence[int]) -> int | None:
    """The gamma of some that a comparison speaks of first: that of the run's decision, or the largest; None of none."""
    decided = run.manifest.config["decision"]["gamma"]
    return int(decided) if decided in gammas else max(gammas, default=None)


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
