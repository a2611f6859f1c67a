"""`alphaprof compare`: two drafts on the same prompts, paired document by document; whether they may be compared at all.

Not here: the gate against a baseline, which uses the pairs (`check`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from rich.console import Console
from rich.table import Table
from rich.text import Text

from alphaprof.costs.speedup import free_draft, spent_and_base
from alphaprof.errors import NotComparable, OptionInvalid
from alphaprof.log.manifest import LOG_PROMPTS, NO_PROMPT, PROMPTS_KNOWN_BY
from alphaprof.log.run_draft import RunDraft
from alphaprof.log.store import Run
from alphaprof.render.tables import named_table, plain, show
from alphaprof.render.wording import text_name
from alphaprof.report import format as fmt
from alphaprof.rules import rules_of
from alphaprof.stats.estimate import Interval, by_cluster, distinct
from alphaprof.stats.paired import inverse_difference, share_difference
from alphaprof.totals.count import TotalsRequest, policies
from alphaprof.totals.documents import SETTINGS, Documents, Units
from alphaprof.totals.files import read_totals
from alphaprof.totals.pool import DocumentTotals, pools

Array = np.ndarray[Any, Any]
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
    """The paired comparison of two drafts. Documents without a partner are left out and counted."""

    format: ClassVar[str] = "alphaprof-compare"
    version: ClassVar[int] = 1

    first: str  # run and draft
    second: str  # run and draft
    confidence: float
    same_text: bool | None  # both measured the same tokens; None: imported runs do not hold them
    documents: int
    interrupted: tuple[str, ...]  # sides whose run is not complete
    unpaired: tuple[int, int]  # documents without a partner: of the first, of the second
    differences: tuple[Difference, ...]  # one for each domain, kind of text and rule

    def terminal(self, console: Console) -> None:
        """Prints a table of acceptance, and one of tokens per round where rules have rounds."""
        console.print(plain(f"first   {self.first}"))
        console.print(plain(f"second  {self.second}"))
        text = TEXTS[self.same_text]
        left = ", ".join(
            f"{fmt.count(count)} of {name}" for count, name in zip(self.unpaired, ("first", "second"), strict=True)
        )
        console.print(
            f"{fmt.many(self.documents, 'document')} paired by prompt, on {text}; without a partner: {left}\n",
            highlight=False,
        )
        if self.same_text is not None:
            show(_acceptance(self), "alpha", console)
        for side in self.interrupted:
            console.print(
                Text("note: ", "yellow").append_text(plain(f"{side} is of an interrupted run: its first documents only"))
            )
        if rounds := [item for item in self.differences if item.tokens_per_round]:
            show(_rounds(rounds), "tokens per round", console)
        for line in (
            f"difference: second minus first, with a {fmt.level(self.confidence)} interval over documents; what both share",
            "cancels out.",
            "alpha is over positions with a proposal: where coverage differs, compare tokens per round.",
            "Tokens per round say nothing about what a draft costs: alphaprof report turns them into speedups.",
            "* off-policy: the rule's own decoding would not emit this text   ~ lossy: one step along the target's own text",
        ):
            console.print(line, style="dim", highlight=False)


def _acceptance(comparison: Comparison) -> Table:
    table = named_table("domain", "rule", "docs", "coverage", "first", "second", "difference", left=("rule",))
    for item in comparison.differences:
        coverage = f"{fmt.share(item.first_coverage, 2)} / {fmt.share(item.second_coverage, 2)}"
        alphas = (fmt.share(item.first), fmt.share(item.second))
        table.add_row(
            plain(text_name(item, comparison.differences)),
            item.rule + fmt.mark(item.on_policy, item.lossy),
            fmt.documents(item.documents, item.clusters),
            coverage,
            *alphas,
            fmt.difference(item.difference, 3),
        )
    return table


def _rounds(differences: list[Difference]) -> Table:
    table = named_table("domain", "rule", "gamma", "first", "second", "difference", left=("rule",))
    for item in differences:
        for found in item.tokens_per_round:
            numbers = (fmt.number(found.first), fmt.number(found.second), fmt.difference(found.difference, 2))
            table.add_row(plain(text_name(item, differences)), item.rule, str(found.gamma), *numbers)
    return table


def compare(first: RunDraft, second: RunDraft, rules: Sequence[str] | None = None, gamma: int | None = None) -> Comparison:
    """Pair the documents of two runs by prompt and take differences. Raises `NotComparable` with the reason.

    `rules`: ids; default: those of the first run. `gamma`: the one length to compare; default: all that both runs have.
    The confidence is that of the first run's decision.
    """
    confidence = float(first.run.manifest.config["decision"]["confidence"])
    require_comparable(first, second)
    gammas = _gammas(first.run, second.run, gamma)
    pairs = paired_pools(first, second, list(rules or first.run.rules))
    one, two = pairs.pools
    differences = tuple(_difference(key, pool, two[key], gammas, confidence) for key, pool in one.items() if key in two)
    return Comparison(
        first=first.label,
        second=second.label,
        confidence=confidence,
        same_text=_same_text(first.run, second.run, pairs.rows),
        documents=pairs.documents,
        interrupted=tuple(side.label for side in (first, second) if side.run.manifest.status != "complete"),
        unpaired=pairs.unpaired,
        differences=differences,
    )


@dataclass(frozen=True)
class Paired:
    """Documents of two sides that have the same prompts: their `rows` in each documents table, and the pools of each side by
    domain, kind of text, policy, settings and rule, in the order of their pairs; `unpaired`: documents without a partner.
    """

    rows: tuple[Array, Array]
    pools: tuple[dict[tuple[str, ...], DocumentTotals], dict[tuple[str, ...], DocumentTotals]]
    unpaired: tuple[int, int]

    @property
    def documents(self) -> int:
        """Pairs of documents."""
        return len(self.rows[0])


def paired_pools(first: RunDraft, second: RunDraft, rules: Sequence[str]) -> Paired:
    """Pair the documents of two sides by prompt. Raises `NotComparable` where they have none in common."""
    tables = [side.run.documents() for side in (first, second)]
    rows = paired_rows(*tables)
    if len(rows[0]) == 0:
        raise _nothing_in_common(first, second, tables)
    documents = [table.take(chosen) for table, chosen in zip(tables, rows, strict=True)]
    units = Units.of(pa.concat_tables(documents)).take(slice(len(rows[0])))  # what belongs together in either run
    one, two = (_pools(side, Documents(table, units), rules) for side, table in zip((first, second), documents, strict=True))
    return Paired(rows, (one, two), (len(tables[0]) - len(rows[0]), len(tables[1]) - len(rows[1])))


def paired_rows(first: pa.Table, second: pa.Table) -> tuple[Array, Array]:
    """Rows of two documents tables that have the same domain, kind of text, prompt and sampling settings; the n-th of equal
    ones with the n-th.
    """
    places: dict[tuple[Any, ...], int] = {key: row for row, key in enumerate(_keys(second))}
    pairs = [(row, places[key]) for row, key in enumerate(_keys(first)) if key in places]
    rows = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return rows[:, 0], rows[:, 1]


def _gammas(first: Run, second: Run, wanted: int | None) -> list[int]:
    """The lengths to compare. Raises `OptionInvalid` for one that a run does not have."""
    both = sorted(set(first.gammas) & set(second.gammas))
    if wanted is None:
        return both
    if wanted not in both:
        raise OptionInvalid(
            f"gamma {wanted} was not replayed in both runs", f"choose from {', '.join(map(str, both)) or 'none'}"
        )
    return [wanted]


def _nothing_in_common(first: RunDraft, second: RunDraft, tables: Sequence[pa.Table]) -> NotComparable:
    """Why no document has a partner: other prompts, or other text on the same prompts."""
    if first.run.imported:
        return no_imported_pair(first, second, tables)
    prompts = [set(table["prompt_hash"].to_pylist()) for table in tables]
    shared = len(prompts[0] & prompts[1])
    if shared:
        kinds = [", ".join(sorted(set(table["continuation"].cast(pa.string()).to_pylist()))) for table in tables]
        return NotComparable(
            f"{first.run.path} and {second.run.path} share {shared} prompts, but no kind of text ({kinds[0]} / {kinds[1]})",
            "compare drafts on text of one kind, with the same sampling settings and max_new_tokens",
        )
    return NotComparable(
        f"{first.run.path} and {second.run.path} have no prompt in common",
        "profile both on the same data; --reuse-continuations measures another draft on the same text",
    )


def _keys(documents: pa.Table) -> Iterator[tuple[Any, ...]]:
    columns = [documents[name].cast(pa.string()).to_pylist() for name in ("domain", "continuation", "prompt_hash")]
    columns += [documents[name].to_pylist() for name in (*SETTINGS, "max_new_tokens")]
    seen: dict[tuple[Any, ...], int] = {}
    for key in zip(*columns, policies(documents).tolist(), strict=True):
        seen[key] = seen.get(key, 0) + 1
        yield (*key, seen[key])


def _same_text(first: Run, second: Run, rows: tuple[Array, Array]) -> bool | None:
    """Whether paired documents hold the same tokens; None where that is not known."""
    if first.path == second.path:
        return True
    if first.imported:
        return None
    texts = []
    for run, chosen in zip((first, second), rows, strict=True):
        parts = [run.continuations(shard.index, ["continuation_ids"]) for shard in run.shards]
        texts.append(pa.concat_tables(parts)["continuation_ids"].take(chosen).combine_chunks())
    return bool(texts[0].equals(texts[1]))


def _pools(side: RunDraft, documents: Documents, rules: Sequence[str]) -> dict[tuple[str, ...], DocumentTotals]:
    """Returns the pools of the paired documents by domain, kind of text, settings and rule, in the order of their pairs."""
    gammas = side.run.gammas
    totals = read_totals(side.run, side.draft, TotalsRequest(rules, gammas))
    by_text: dict[tuple[str, ...], DocumentTotals] = {}
    for rule in rules_of(rules):
        for domain, pool in pools([totals], documents, rule.id, gammas):
            by_text[domain, pool.continuation, pool.policy, str(pool.sampling), rule.id] = pool
    return by_text


def _difference(
    key: tuple[str, ...], first: DocumentTotals, second: DocumentTotals, gammas: Sequence[int], confidence: float
) -> Difference:
    (rule,) = rules_of([key[-1]])
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
    if first.label == second.label:
        raise NotComparable(f"{first.label} is compared with itself", "name two drafts, or two runs")
    _require_same_origin(first, second)
    one, two = first.run.manifest, second.run.manifest
    if one.config.get("draft_processing") != two.config.get("draft_processing"):
        raise NotComparable(
            f"{first.run.path} and {second.run.path} differ in draft_processing",
            "profile one of them again with the other's; --reuse-continuations keeps the text",
        )
    facts = () if other_target else ("fingerprint", "dtype")
    odd = [name for name in facts if getattr(one.target, name) != getattr(two.target, name)]
    odd += ["tokenizer"] if one.tokenizer != two.tokenizer else []
    if odd and first.run.imported:
        raise NotComparable(
            f"{first.run.path} was served by {one.target.reference}, and {second.run.path} by {two.target.reference}",
            "compare drafts of one target; if it is the same under another name, import both with the same --target",
        )
    if odd:
        raise NotComparable(
            f"{first.run.path} and {second.run.path} have different targets ({', '.join(odd)} differ)",
            "compare drafts of one target, profiled in one dtype",
        )


def _require_same_origin(first: RunDraft, second: RunDraft) -> None:
    """The same for runs of which one was imported from an engine's metrics, or both."""
    one, two = first.run.manifest, second.run.manifest
    if first.run.imported != second.run.imported:
        imported, profiled = (first, second) if first.run.imported else (second, first)
        raise NotComparable(
            f"{imported.run.path} was imported from an engine's metrics, and {profiled.run.path} was profiled: nothing "
            "shows that both have the same target and text",
            "import both, or profile both",
        )
    if one.imported is None or two.imported is None:
        return
    for name in ("drafting", "gamma", "rule"):
        served = [getattr(found, name) for found in (one.imported, two.imported)]
        if served[0] != served[1]:
            raise NotComparable(
                f"{first.run.path} was served with {name} {served[0]}, and {second.run.path} with {name} {served[1]}",
                "serve both with the same number of speculative tokens, and the same rule",
            )
    if one.imported.prompts_known_by != two.imported.prompts_known_by:
        kinds = [found.prompts_known_by or "nothing" for found in (one.imported, two.imported)]
        raise NotComparable(
            f"prompts of {first.run.path} are identified by {kinds[0]}, and those of {second.run.path} by {kinds[1]}",
            f"{LOG_PROMPTS}, of both runs, and import them again",
        )


def no_imported_pair(first: RunDraft, second: RunDraft, tables: Sequence[pa.Table]) -> NotComparable:
    """Why no request of two imported runs, whose documents are `tables`, has a partner in the other."""
    runs = f"{first.run.path} and {second.run.path}"
    imported = first.run.manifest.imported
    known_by = imported.prompts_known_by if imported else None  # the same of both: see `_require_same_origin`
    if known_by in NO_PROMPT:
        fresh = ", which is new in every answer" if known_by else ""
        return NotComparable(
            f"no request of {runs} can be paired: their prompts are identified by {known_by or 'nothing'}{fresh}",
            f"{LOG_PROMPTS}, or a custom_id of your own, in both runs, and import them again",
        )
    shared = len(set.intersection(*(set(table["prompt_hash"].to_pylist()) for table in tables)))
    if shared:
        names = [", ".join(sorted(set(table["domain"].cast(pa.string()).to_pylist()))) for table in tables]
        return NotComparable(
            f"{runs} share {shared} prompts, but none in one domain with the same sampling settings (domains {names[0]} / "
            f"{names[1]})",
            "import both with the same --domain or --domain-key, and with the same --temperature, --top-k and --top-p",
        )
    other = (
        ", or made other token ids of them (another tokenizer or chat template)" if known_by == PROMPTS_KNOWN_BY[0] else ""
    )
    return NotComparable(
        f"{runs} have no prompt in common: they were sent other prompts{other}", "log answers to the same prompts in both"
    )
