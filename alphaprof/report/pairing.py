"""Two drafts on the same prompts: whether they can be compared, which documents are pairs, and what each did on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from alphaprof.config.profile import AUTO, ProfileOptions
from alphaprof.costs.rounds import free_draft
from alphaprof.costs.speedup import spent_and_base
from alphaprof.errors import NotComparable, OptionInvalid
from alphaprof.report.asked import Asked
from alphaprof.report.judge import Judge
from alphaprof.report.verdict import judge
from alphaprof.run.manifest import LOG_PROMPTS, NO_PROMPT, PARTIAL, ModelFacts
from alphaprof.run.reader import Run, RunDraft
from alphaprof.stats.estimate import Array, Interval, by_cluster, present
from alphaprof.stats.grouping import grouped
from alphaprof.stats.paired import inverse_difference, share_difference, weighted_inverse_difference
from alphaprof.totals.count import TotalsRequest, policies
from alphaprof.totals.documents import SETTINGS, Documents, Units
from alphaprof.totals.files import read_totals
from alphaprof.totals.pool import DocumentTotals, merged, pools

Pools = dict[tuple[str, ...], DocumentTotals]  # by domain, kind of text, policy, settings and rule
Totals = tuple[Array, Array]  # and counts, by independent unit, [units]


@dataclass(frozen=True)
class TextPair:
    """What two drafts did on one kind of text of a domain under one rule: on the same documents, if these are paired."""

    domain: str
    rule: str
    first: DocumentTotals
    second: DocumentTotals

    @classmethod
    def of(cls, first: Pools, second: Pools) -> list[TextPair]:
        """Return what both sides have, in the order of the first."""
        return [cls(key[0], key[-1], pool, second[key]) for key, pool in first.items() if key in second]

    @classmethod
    def together(cls, domain: str, texts: Iterable[TextPair]) -> TextPair:
        """Return several texts of one rule as one, under another name."""
        every = list(texts)
        return cls(domain, every[0].rule, merged([text.first for text in every]), merged([text.second for text in every]))

    @property
    def sides(self) -> tuple[DocumentTotals, DocumentTotals]:
        """Both sides."""
        return self.first, self.second

    @property
    def has_rounds(self) -> bool:
        """Whether both sides have rounds."""
        return all(pool.defined and pool["tokens"].sum() > 0 for pool in self.sides)

    def totals(self, gamma: int | None) -> tuple[Totals, Totals]:
        """Accepted and proposed positions of each side; at a gamma, its rounds and tokens."""
        return _totals(self.first, gamma), _totals(self.second, gamma)

    def difference(self, gamma: int | None, confidence: float) -> Interval:
        """Alpha of the second less that of the first, paired; at a gamma, tokens per round."""
        one, two = self.totals(gamma)
        return share_difference(one, two, confidence) if gamma is None else inverse_difference(one, two, confidence, gamma)


def _totals(pool: DocumentTotals, gamma: int | None) -> Totals:
    if gamma is not None:
        return spent_and_base(pool.counts(gamma), free_draft(gamma))
    accepted, proposals = by_cluster(pool.cluster, pool["accepted"], pool["proposals"])
    return accepted, proposals


def require_comparable(first: RunDraft, second: RunDraft) -> None:
    """Raise `NotComparable` if processing, or how an engine served them, differ: a difference would be that of the setting.
    Targets may differ: `changed_facts`.
    """
    one, two = first.run.manifest, second.run.manifest
    here, there = first.run.path, second.run.path
    if first.label == second.label:
        raise NotComparable(f"{first.label} is compared with itself", "name two drafts, or two runs")
    if first.run.imported != second.run.imported:
        imported, profiled = (here, there) if first.run.imported else (there, here)
        raise NotComparable(
            f"{imported} was imported from an engine's metrics, and {profiled} was profiled",
            f"import both, or profile both; or ask alphaprof diagnose {profiled} {imported}",
        )
    for (name, value, hint), (_, other, _) in zip(_must_be_equal(first), _must_be_equal(second), strict=True):
        if value != other:
            raise NotComparable(f"{here} was measured with {name} {value}, and {there} with {name} {other}", hint)
    if one.tokenizer != two.tokenizer and one.profile.data != two.profile.data:
        raise NotComparable(
            f"{here} and {there} have targets with other tokenizers or chat templates, and other data",
            "profile both on the same data: their documents are then paired by row",
        )


def changed_facts(first: Run, second: Run) -> tuple[str, ...]:
    """Return in which facts the targets of two runs differ; none: they are one."""
    one, two = first.manifest, second.manifest
    odd = [name for name in ("fingerprint", "dtype") if getattr(one.target, name) != getattr(two.target, name)]
    return (*odd, *(["tokenizer"] if one.tokenizer != two.tokenizer else []))


def surely_one(first: ModelFacts, second: ModelFacts) -> bool:
    """Return whether two models are surely the same."""
    known = not first.fingerprint.startswith(PARTIAL)
    return known and (first.fingerprint, first.dtype) == (second.fingerprint, second.dtype)


def _must_be_equal(side: RunDraft) -> Iterator[tuple[str, object, str]]:
    """Yield what must be equal on both sides, with what to do if it is not."""
    imported = side.run.manifest.imported
    if imported is not None:
        for name in ("drafting", "gamma", "rule"):
            yield name, getattr(imported, name), "serve both with the same rule and number of speculative tokens"
        yield (
            "prompts keyed by",
            imported.prompts_known_by or "nothing",
            f"{LOG_PROMPTS} of both runs, and import them again",
        )
    hint = "profile one again with the other's setting; --reuse-continuations keeps the text"
    yield "draft_processing", side.run.manifest.profile.draft_processing, hint


def common_gammas(first: RunDraft, second: RunDraft, named: int | None) -> list[int]:
    """Return the gammas of both drafts, or the one that is named. Raises `OptionInvalid` if it is not one of both."""
    both = sorted(set(first.gammas) & set(second.gammas))
    if named not in (None, *both):
        names = " or ".join(map(str, both)) or "none"
        raise OptionInvalid(f"gamma {named} was not replayed in both runs", f"name a shared one: {names}")
    return both if named is None else [named]


def deciding_gamma(side: RunDraft, gammas: Sequence[int], asked: ProfileOptions | None = None) -> int | None:
    """Return the gamma that a comparison names first, one of `gammas`: that of the decision, or that the side's verdict
    prefers for the draft by step times, or the largest; None of none. `asked`: a profile whose gamma, concurrency and source
    of step times count before the side's own.
    """
    run, own = side.run, side.run.manifest.profile
    asked = asked or own
    for decided in (asked.decision.gamma, own.decision.gamma):
        if decided in gammas:
            return int(decided)
    # Pairs are compared without p_min.
    decision = own.decision.model_copy(update={"gamma": AUTO, "concurrency": asked.decision.concurrency, "p_min": 0.0})
    question = Asked.of(run, own.model_copy(update={"decision": decision, "costs": asked.costs}).deciding(side.draft))
    largest = max(gammas, default=None)
    if not gammas or side.draft not in question.timing.times:
        return largest
    judged = Judge.of(question)
    if judged.undecidable:
        return largest
    pair, _ = judge(judged.candidates, judged.timing, judged.mix, question.question, gammas)
    return pair[1] if pair else largest


def over_domains(
    texts: Sequence[TextPair], given: Mapping[str, float] | None
) -> tuple[list[TextPair], dict[str, float] | None]:
    """Return texts of one rule by domain, with the shares of their domains by `given` weights if these name them all; else
    all as one, without shares.
    """
    domains = grouped((text.domain, text) for text in texts)
    total = sum(given[name] for name in domains) if given and set(domains) <= set(given) else 0.0
    if not given or not total:
        return [TextPair.together("", texts)], None
    weights = {name: given[name] / total for name in domains if given[name] > 0}
    return [TextPair.together(name, domains[name]) for name in weights], weights


def difference_over(
    parts: Sequence[TextPair],
    weights: Mapping[str, float] | None,
    gamma: int,
    confidence: float,
    relative: bool = False,
) -> tuple[float, float, Interval]:
    """Return tokens per round of both sides over some texts, as `over_domains` gives them, and second less first.
    `relative`: as of `weighted_inverse_difference`.
    """
    first, second = zip(*(text.totals(gamma) for text in parts), strict=True)
    units, shares = [present(text.first.cluster) for text in parts], list(weights.values()) if weights else [1.0]
    return weighted_inverse_difference(first, second, units, shares, confidence, gamma, relative=relative)


def paired_texts(
    first: RunDraft, second: RunDraft, rules: Sequence[str]
) -> tuple[list[TextPair], tuple[Array, Array], tuple[int, int]]:
    """Pair the documents of two sides by prompt, or by row of the data where tokenizers write prompts otherwise. Raises
    `NotComparable` if they have none in common.

    Returns the texts, the rows of the pairs in each documents table, and how many documents of each have no partner.
    """
    tables = [side.run.documents() for side in (first, second)]
    same_tokenizer = first.run.manifest.tokenizer == second.run.manifest.tokenizer
    rows = matches(tables, (*SETTINGS, "max_new_tokens"), ("prompt_hash",) if same_tokenizer else ("source", "source_row"))
    if not len(rows[0]):
        raise _nothing_in_common(first.run, second.run, tables)
    texts = TextPair.of(*pools_of_pairs((first, second), tables, rows, rules))
    return texts, rows, (len(tables[0]) - len(rows[0]), len(tables[1]) - len(rows[1]))


def matches(
    tables: Sequence[pa.Table], settings: Sequence[str], known_by: Sequence[str] = ("prompt_hash",)
) -> tuple[Array, Array]:
    """Return rows of the documents of each table that are of one prompt and have equal `settings`, [pairs] each."""
    names = (*known_by, *settings)
    places = {key: row for row, key in enumerate(_keys(tables[1], names))}
    found = [(row, places[key]) for row, key in enumerate(_keys(tables[0], names)) if key in places]
    one, two = np.array(found, dtype=np.int64).reshape(-1, 2).T
    return one, two


def pools_of_pairs(
    sides: Sequence[RunDraft], tables: Sequence[pa.Table], rows: tuple[Array, Array], rules: Sequence[str]
) -> tuple[Pools, Pools]:
    """Return the pools of each side, on the `rows` of its documents table that have a partner."""
    documents = [table.take(chosen) for table, chosen in zip(tables, rows, strict=True)]
    units = Units.of(pa.concat_tables(documents)).take(slice(len(rows[0])))  # what belongs together in either run
    one, two = (side_pools(side, Documents(table, units), rules) for side, table in zip(sides, documents, strict=True))
    return one, two


def side_pools(side: RunDraft, documents: Documents, rules: Sequence[str]) -> Pools:
    """Return the pools of some documents of a side. `rules`: their ids."""
    totals = read_totals(side.run, side.draft, TotalsRequest(rules, side.run.gammas))
    return {
        (domain, pool.continuation, pool.policy, str(pool.sampling), rule): pool
        for rule in rules
        for domain, pool in pools(totals, documents, rule, side.run.gammas)
    }


def _keys(documents: pa.Table, names: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    """Yield what pairs each document: domain, kind of text, the columns of some names, and its place among equal ones."""
    columns = [documents[name].cast(pa.string()).to_pylist() for name in ("domain", "continuation")]
    columns += [documents[name].to_pylist() for name in names]
    seen = Counter[tuple[Any, ...]]()
    for key in zip(*columns, policies(documents).tolist(), strict=True):
        seen[key] += 1
        yield (*key, seen[key])


def _nothing_in_common(first: Run, second: Run, tables: Sequence[pa.Table]) -> NotComparable:
    """Return why no document has a partner: other prompts, or other text on the same prompts."""
    runs = f"{first.path} and {second.path}"
    shared = len(set.intersection(*(set(table["prompt_hash"].to_pylist()) for table in tables)))
    imported = first.manifest.imported
    if imported and imported.prompts_known_by in NO_PROMPT:
        known_by = imported.prompts_known_by or "nothing"
        problem = f"no request of {runs} can be paired: their prompts are keyed by {known_by}"
        hint = f"{LOG_PROMPTS}, or a custom_id of your own, in both runs, and import them again"
    elif shared:
        names = ", ".join(f"{column} {_names_in_both(tables, column)}" for column in ("domain", "continuation"))
        problem = f"{runs} share {shared} prompts, but no kind of text ({names})"
        hint = "compare drafts on text of one kind: the same domains, sampling settings and max_new_tokens"
    else:
        problem = f"{runs} have no prompt in common"
        again = "profile both on the same data (--reuse-continuations: on the same text); if a chat template writes today's "
        again += "date, set chat_options.date_string"
        hint = "log answers to the same prompts in both, with one tokenizer and chat template" if imported else again
    return NotComparable(problem, hint)


def _names_in_both(tables: Sequence[pa.Table], column: str) -> str:
    """Return the different values of a column in each of two tables."""
    return " / ".join(", ".join(sorted(set(table[column].cast(pa.string()).to_pylist()))) for table in tables)
