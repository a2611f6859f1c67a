#!/usr/bin/env python3
"""Hold the certificates of four divergences, and bounds that know a margin alone, against the models of a finished run.

    python scripts/research/divergences.py RUN [--documents 100] [--dtype float32]

A log keeps thresholds of KL(target || draft) alone. Here the models of RUN are loaded again and its texts scored once more,
with thresholds for KL in both directions, total variation and Jensen-Shannon. Printed, with 95 % intervals over documents:
quantiles of the thresholds; for each rule and each draft with a distribution, the share of positions that each divergence
certifies, that any of them does, and that are accepted; and how much of a threshold its bound from a margin has. A position
that is certified and yet rejected would contradict the theory: exit code 1.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from alphaprof.cli.progress import ConsoleProgress
from alphaprof.config.options import ModelDraft
from alphaprof.config.profile import ProfileOptions
from alphaprof.errors import AlphaprofError, OptionInvalid, RunMismatch
from alphaprof.log.store import Run
from alphaprof.profiling.models.drafts import Arrays, load_drafts, token_count
from alphaprof.profiling.models.dtype import DTYPES
from alphaprof.profiling.models.load import Model, load_model, load_tokenizer, tokenizer_fingerprint
from alphaprof.profiling.run.resume import Reused
from alphaprof.profiling.scoring.extras import Extras
from alphaprof.profiling.scoring.scorer import Scorer, by_document
from alphaprof.profiling.texts.continuations import Continuation, continuation_table, given, halving, scoring_batches
from alphaprof.report import format as fmt
from alphaprof.report.sections.certificates import SLACK, judged_positions
from alphaprof.rules import BoundRule
from alphaprof.stats.estimate import Interval, by_cluster, quantile_interval, ratio, share_interval
from alphaprof.theory.bounds import coverage_bound, margin_bound
from alphaprof.theory.certificates import ACCEPTED, DIVERGENCES, Array, Divergence, Target, certify, draft_width
from alphaprof.totals.count import Shape
from alphaprof.totals.documents import Units

CONFIDENCE = 0.95
QUANTILES = {"median": 0.5, "5th percentile": 0.05}
MARGIN, COVERAGE, BOTH = "margin", "coverage margin", "larger of both"
READ_THRESHOLDS = """\
The divergence from which on a rule can reject, over positions: a draft below the 5th percentile is certain at 95 % of them.
kl = KL(target || draft), rkl = KL(draft || target), js = Jensen-Shannon, in nats; tv = total variation, from 0 to 1."""
READ_SHARES = f"""\
kl to js: share of positions where that divergence + {SLACK:g} lies below its threshold, acceptance being certain beforehand.
any: where one of the four does. accepted: certain or not. wrong: certified by one of them and yet rejected."""
READ_TIGHTNESS = """\
Bound / threshold (kl), over positions where the threshold is exact, positive and finite: 1 where a margin tells everything.
margin: lead of the target's top token over the best rejected one; coverage margin: over token w + 1, w a tree's width."""
Row = list[str]
number = partial(fmt.interval, digits=3)


@dataclass(frozen=True)
class Measured(Extras):
    """Extras that also hold bounds from margins against the thresholds of kl, while the largest probabilities are there."""

    def thresholds(self, top: Array, entropy: Array, vocabulary: int) -> dict[str, Array]:
        """Likewise, and a column for each rule and bound: its share of the threshold."""
        found, target = super().thresholds(top, entropy, vocabulary), Target(top, vocabulary, entropy)
        for rule in self.certified:
            found |= {f"{bound}_{rule.id}": values for bound, values in tightness(rule, target).items()}
        return found


def tightness(rule: BoundRule, target: Target) -> dict[str, Array]:
    """Bounds over thresholds [positions]; NaN where the threshold is inexact, 0 or infinite."""
    found, width = certify(rule, target), draft_width(rule)

    def lead(rank: Array) -> Array:
        place = np.minimum(rank, target.top.shape[1] - 1)  # of what is beyond, exact thresholds say that it has nothing
        return np.asarray(target.top[:, 0] - np.take_along_axis(target.top, place[:, None], 1)[:, 0])

    count = ACCEPTED[rule.name](target, **rule.arguments).count
    bounds = {MARGIN: margin_bound(rule, lead(count), width)}
    if rule.name == "tree":
        bounds[COVERAGE] = coverage_bound(lead(np.full(len(count), width)), width)
        bounds[BOTH] = np.maximum(bounds[MARGIN], bounds[COVERAGE])
    usable = found.exact & (found.value > 0) & np.isfinite(found.value)
    nothing = np.full(len(count), np.nan)
    return {name: np.divide(bound, found.value, out=nothing.copy(), where=usable) for name, bound in bounds.items()}


def _threshold(rule: BoundRule, divergence: Divergence) -> str:
    """A column of `Extras.thresholds`."""
    return f"threshold_{rule.id}" + ("" if divergence == "kl" else f"_{divergence}")


@dataclass(frozen=True)
class Scored:
    """Columns [positions] of documents by draft, those of the target in each; where the documents lie in them, and the
    independent unit of each. `models`: the drafts that have a distribution.
    """

    columns: dict[str, Arrays]
    shape: Shape
    cluster: Array
    models: tuple[str, ...]

    @property
    def target(self) -> Arrays:
        """The target's columns."""
        return next(iter(self.columns.values()))

    def share(self, chosen: Array, among: Array) -> Interval | None:
        """Share of `among` [positions] that is `chosen`; None for a share of nothing."""
        counts = self.shape.sums(among)
        if counts.sum() == 0:
            return None
        totals = self.shape.sums(chosen & among)
        return share_interval(ratio(*by_cluster(self.cluster, totals, counts)), CONFIDENCE)

    def quantile(self, values: Array, probability: float) -> Interval | None:
        """Quantile of values [positions] that are not NaN."""
        known = ~np.isnan(values)
        if not known.any():
            return None
        counts = self.shape.sums(known).astype(np.int64)
        return quantile_interval(values[known], counts, self.cluster, probability, CONFIDENCE)


@dataclass(frozen=True)
class Shares:
    """One rule and draft: shares of the judged positions, and how many of those that are certified were rejected."""

    by: dict[Divergence, Interval | None]
    union: Interval | None
    accepted: Interval | None
    certified: int
    wrong: int


def shares(scored: Scored, draft: str, rule: BoundRule) -> Shares:
    """What each divergence certifies, and what was accepted, as in reports: `certified.judged_positions`."""
    columns = scored.columns[draft]
    judged = judged_positions(rule, columns, scored.shape)
    accepted = judged & (rule.accept(columns | {"greedy": np.zeros(len(judged), dtype=bool)}) > 0)
    kl, rkl, js = (columns[name] for name in ("kl_target_draft", "kl_draft_target", "js"))
    amounts = {"kl": kl, "rkl": rkl, "tv": 1 - columns["overlap"], "js": js}
    limits = {name: columns[_threshold(rule, name)] for name in DIVERGENCES}
    certain = {name: judged & (np.maximum(amounts[name], 0) + SLACK < limit) for name, limit in limits.items()}
    union = np.any(list(certain.values()), axis=0)
    return Shares(
        by={name: scored.share(mask, judged) for name, mask in certain.items()},
        union=scored.share(union, judged),
        accepted=scored.share(accepted, judged),
        certified=int(union.sum()),
        wrong=int((union & ~accepted).sum()),
    )


def certified_rules(run: Run) -> tuple[BoundRule, ...]:
    """The rules of a run that have thresholds. Raises `OptionInvalid` where there are none."""
    if rules := Extras.of(run.rules, certificates=True).certified:
        return rules
    raise OptionInvalid(f"{run.path} was profiled with no rule that has a threshold", "profile with strict, for example")


def score(run: Run, rules: tuple[BoundRule, ...], most: int, dtype: str | None) -> Scored:
    """Score the first `most` documents of a run again. Raises `RunMismatch`, and what loading models raises."""
    if run.manifest.status != "complete":
        raise RunMismatch(f"{run.path} is not complete", "finish it with alphaprof profile --resume first")
    options = _options(run, dtype)
    tokenizer = load_tokenizer(options.target)
    eos = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
    target = load_model("target", options.target, options.target.dtype, extra_eos=eos)
    drafts = load_drafts(options, target, tokenizer)
    models = [draft for draft in drafts if isinstance(draft, Model)]
    if tokenizer_fingerprint(tokenizer) != run.manifest.tokenizer:
        raise RunMismatch(f"the target's tokenizer is not that of {run.path}", "put the tokenizer of the run back")
    before = run.manifest.drafts | {"target": run.manifest.target}
    for model in (target, *models):
        if dtype is None and model.facts().fingerprint != before[model.name].fingerprint:  # which depends on the dtype
            raise RunMismatch(f"{model.name} is not the model of {run.path}", "put the model of the run back")
    extras = Measured(certified=rules, divergences=DIVERGENCES)
    scorer = Scorer(target, drafts, token_count(tokenizer), options.draft_processing, extras)
    texts = given(itertools.islice(Reused(run), most), target.eos)
    table = continuation_table(texts)
    cluster = Units.of(table).codes
    names = tuple(model.name for model in models)
    return Scored(_columns(scorer, texts, options.batch_tokens), Shape.of(table), cluster, names)


def _options(run: Run, dtype: str | None) -> ProfileOptions:
    """The profile of a run; with a `dtype`, all models in that one."""
    options = ProfileOptions.model_validate(run.manifest.config)
    if dtype is None:
        return options
    drafts = {
        name: draft.model_copy(update={"dtype": dtype}) if isinstance(draft, ModelDraft) else draft
        for name, draft in options.drafts.items()
    }
    return options.model_copy(update={"target": options.target.model_copy(update={"dtype": dtype}), "drafts": drafts})


def _columns(scorer: Scorer, texts: Sequence[Continuation], budget: int) -> dict[str, Arrays]:
    """Columns by draft, documents in order."""
    found: dict[str, dict[int, Arrays]] = {}
    with ConsoleProgress() as progress:
        progress.start("scoring", len(texts), "documents")
        for batch in scoring_batches(texts, budget):
            for items, result in halving(lambda items: [(items, scorer.score(items))], batch, _name)[0]:
                for draft, arrays in result.items():
                    found.setdefault(draft, {}).update(by_document(items, arrays))
            progress.advance(len(batch), positions=sum(len(item.ids) for item in batch))
    order = [item.document.document for item in texts]
    return {
        draft: {name: np.concatenate([parts[number][name] for number in order]) for name in parts[order[0]]}
        for draft, parts in found.items()
    }


def _name(item: Continuation) -> str:
    return f"document {item.document.document}"


def threshold_rows(scored: Scored, rules: Sequence[BoundRule]) -> list[Row]:
    """Quantiles of the thresholds of each rule."""
    rows = [["rule", "threshold", *DIVERGENCES]]
    for rule in rules:
        columns = [scored.target[_threshold(rule, divergence)] for divergence in DIVERGENCES]
        for name, probability in QUANTILES.items():
            rows.append([rule.id, name, *(number(scored.quantile(values, probability)) for values in columns)])
    return rows


def share_rows(found: dict[BoundRule, Shares]) -> list[Row]:
    """What is certified and accepted under each rule."""
    rows = [["rule", *DIVERGENCES, "any", "accepted", "wrong"]]
    for rule, item in found.items():
        cells = map(fmt.share_with_interval, (*item.by.values(), item.union, item.accepted))
        rows.append([rule.id, *cells, f"{fmt.count(item.wrong)} of {fmt.count(item.certified)}"])
    return rows


def tightness_rows(scored: Scored, rules: Sequence[BoundRule]) -> list[Row]:
    """How near the bounds of each rule come to its thresholds."""
    rows = [["rule", "bound from", "positions", *QUANTILES]]
    for rule in rules:
        for bound in (MARGIN, COVERAGE, BOTH) if rule.name == "tree" else (MARGIN,):
            values = scored.target[f"{bound}_{rule.id}"]
            cells = [number(scored.quantile(values, probability)) for probability in QUANTILES.values()]
            rows.append([rule.id, bound, fmt.count(int((~np.isnan(values)).sum())), *cells])
    return rows


def show(title: str, reading: str, rows: Sequence[Row]) -> None:
    """Print a table, which is Markdown and aligned, between its title and how it is read."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    print(f"## {title}", "", *lines, "", reading, "", sep="\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Score, print the tables; 1 if a certified position was rejected, or the exit code of a failure."""
    parser = argparse.ArgumentParser(description="Hold the certificates of four divergences against the models of a run.")
    parser.add_argument("run", metavar="RUN", type=Path, help="directory of a complete run whose models are still there")
    parser.add_argument("--documents", type=int, default=100, help="score so many documents of the run")
    parser.add_argument("--dtype", choices=DTYPES, help="load all models in this one; default: as in the run")
    options = parser.parse_args(arguments)
    if options.documents < 1:
        parser.error("--documents must be at least 1")
    try:
        run = Run.open(options.run)
        rules = certified_rules(run)
        scored = score(run, rules, options.documents, options.dtype)
    except AlphaprofError as error:
        print(f"error: {error.message}\nhint: {error.hint}", file=sys.stderr)
        return error.exit_code
    size = f"{fmt.count(len(scored.cluster))} documents, {fmt.count(int(scored.shape.stop[-1]))} positions"
    print(f"{options.run}: {size}; in brackets 95 % over documents\n")
    show("Thresholds", READ_THRESHOLDS, threshold_rows(scored, rules))
    wrong = 0
    for draft in scored.models:
        found = {rule: shares(scored, draft, rule) for rule in rules}
        show(f"Certified and accepted: draft {draft}", READ_SHARES, share_rows(found))
        wrong += sum(item.wrong for item in found.values())
    show("Bounds from margins", READ_TIGHTNESS, tightness_rows(scored, rules))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
