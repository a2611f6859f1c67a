#!/usr/bin/env python3
"""Recompute a report's numbers from the files of its run, without a function of alphaprof.

    python scripts/research/recompute.py RUN REPORT.json

REPORT.json is `alphaprof report RUN --format json`, of a run that was timed here at one context, in which every prompt is
another one, without `weights`, p_min, heads and clusters: such as both runs of the demo. Recomputed are the tables verdict,
domains, drafts and gammas with their intervals: acceptance, rounds replayed token by token (expected ones where drafts are
drawn), what each half of the documents and timing rounds chooses, speedups cross-fitted, their bounds by documents and by
timing rounds (docs/decision.md, docs/costs.md and docs/decisions/005, 020, 021, 100, 101; formulas as there), and verdicts.

Not recomputed: what Parquet does not hold, and so is read from manifest.json (the share of their time in which steps waited
for a CPU; nothing is drawn at random: halves follow from the hashes of prompts); Holm's correction, `ahead`, `alike`, the
number of documents needed; tables of other loads and contexts; what the target alone says, causes, spans and notes.
Prints how many values are equal (to 1e-9; of expected rounds to 1e-6, since totals hold them in single precision), and those
that are not; exit code 1 if there are any.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import t as student

EXACT, SINGLE, MISSED, FEWEST, BUSY = 1e-9, 1e-6, 0.05, 5, 0.1
Array = np.ndarray[Any, Any]
Pair = tuple[str, int]  # a draft and a gamma


class Comparison:
    """Values that are equal, and those that are not."""

    def __init__(self) -> None:
        self.equal: Counter[str] = Counter()
        self.off: list[str] = []
        self.tolerance = EXACT

    def of(self, name: str, where: str, reported: Any, own: Any) -> None:
        """Compare a value, a list of them, an interval or a word; null is equal to NaN."""
        if isinstance(reported, dict):
            reported = [reported["value"], reported["low"], reported["high"]]
        if isinstance(own, str):
            pairs, same = [(reported, own)], lambda one, other: one == other
        else:
            each = (np.atleast_1d(np.array(values, float)) for values in (reported, own))
            pairs = list(zip(*each, strict=True))
            same = lambda one, other: np.isclose(one, other, rtol=self.tolerance, atol=self.tolerance, equal_nan=True)  # noqa: E731
        for one, other in pairs:
            self.equal[name] += bool(same(one, other))
            self.off += [] if same(one, other) else [f"{where} {name}: reported {one}, recomputed {other}"]


# --- rounds -------------------------------------------------------------------------------------------------------------


@dataclass
class Rounds:
    """Rounds of documents at a gamma, [documents] or [documents, depths]; `exactly`: that draft m = 0..gamma tokens."""

    tokens: Array
    exactly: Array
    drafted: Array
    tested: Array
    accepted: Array
    source: Array

    def of(self, rows: Array) -> Rounds:
        """Those of some documents."""
        return Rounds(*(values[rows] for values in vars(self).values()))


def replayed(accepts: Any, proposed: Sequence[int], gamma: int) -> tuple[Array, Array, Array, Array]:
    """Rounds of one document after a prefill that emits the first token, as an engine runs them. `accepts(t, i)`: the chance
    that draft i + 1 of a round that starts at t is accepted, if all before it were.
    """
    size = len(proposed)
    exactly, drafted, tested, accepted = np.zeros(gamma + 1), *np.zeros((3, gamma))
    begins = np.zeros(size + 1)
    begins[1:2] = 1.0
    for at in range(1, size):
        ready, reached = min(gamma, proposed[at]), begins[at]
        exactly[ready] += reached
        drafted[:ready] += reached
        longest = min(ready, size - at)
        for i in range(longest):
            kept = reached * accepts(at, i)
            tested[i] += reached
            accepted[i] += kept
            begins[at + i + 1] += reached - kept
            reached = kept
        begins[min(at + longest + 1, size)] += reached
    return exactly, drafted, tested, accepted


class Text:
    """What one draft does under one rule on the documents of a domain."""

    def __init__(self, rows: pd.DataFrame, rule: str, texts: pd.DataFrame) -> None:
        self.rows, self.proposed = rows, (rows["proposed"] > 0).to_numpy()
        self.accept = np.where(self.proposed, rows[f"accept_{rule}"].to_numpy(float), 0.0)
        kept = self.proposed & (rows["draft_top"] == rows["token"]).to_numpy()
        p, q = (rows[name].to_numpy(float) for name in ("target_token_prob", "draft_token_prob"))
        self.drawn = rule == "lossless" and bool((~np.isnan(q)).any())
        ratio = np.divide(q, p, out=np.zeros_like(q), where=p > 0)
        self.kept = np.where(self.proposed, np.minimum(1.0, ratio), 0.0) if self.drawn else kept.astype(float)
        self.by_start = bool(rows["accepted_run"].notna().any())  # a lookup's drafts depend on where a round starts
        self.starts = np.flatnonzero(np.diff(rows["document"].to_numpy(), prepend=-1))
        about = texts.loc[rows["document"].to_numpy()[self.starts]]
        self.lots = np.array([int(name[:16], 16) for name in about["prompt_hash"]], dtype=np.uint64)
        self.source, self.prompts = about["source"].to_numpy(), about["prompt_tokens"].to_numpy()
        self._known: dict[int, Rounds] = {}

    def sums(self, values: Array) -> Array:
        """Sums [documents] of values [positions]."""
        return np.asarray(np.add.reduceat(values.astype(float), self.starts))

    def rounds(self, gamma: int) -> Rounds:
        """Of every document."""
        if gamma not in self._known:
            found, sizes = [], np.diff(self.starts, append=len(self.rows))
            runs = np.nan_to_num(self.rows["accepted_run"].to_numpy(float))
            for start, size in zip(self.starts, sizes, strict=True):
                own, kept = runs[start : start + size], self.kept[start : start + size]

                def accepts(at: int, i: int, own: Array = own, kept: Array = kept) -> float:
                    return float(i < own[at]) if self.by_start else float(kept[at + i])

                found.append(replayed(accepts, self.rows["proposed"].to_numpy()[start : start + size].tolist(), gamma))
            self._known[gamma] = Rounds(sizes - 1.0, *map(np.array, zip(*found, strict=True)), self.source)
        return self._known[gamma]


# --- step times ---------------------------------------------------------------------------------------------------------


@dataclass
class Steps:
    """Times of the steps that rounds of a draft at a gamma run: verifications of 1 to gamma + 1 tokens, a draft step, one
    over two tokens, a search and bookkeeping. `ms` [kinds]; `turns` [timing rounds, kinds]; `runs` [gamma + 1, kinds]: how
    often a round of m drafts runs each; `after` [kinds]: and one that was accepted in full, more.
    """

    ms: Array
    turns: Array
    runs: Array
    after: Array

    def spent(self, rounds: Rounds) -> Array:
        """How often documents run each step, [documents, kinds]."""
        return rounds.exactly @ self.runs + rounds.accepted[:, -1:] * self.after

    def ends(self) -> tuple[float, float]:
        """The least and the most decode steps that a token can take, whatever is drafted and accepted."""
        gamma, ms = len(self.runs) - 1, self.ms.copy()
        after = np.array([0.0] * gamma + [self.after @ ms]) / ms[0]
        price, ms[: gamma + 1] = self.runs @ ms / ms[0], np.maximum(ms[: gamma + 1], ms[0])
        pairs = [(m, a) for m in range(gamma + 1) for a in range(m + 1)]
        least = min((price[m] + after[a]) / (a + 1) for m, a in pairs)
        return least, max((self.runs @ ms / ms[0])[m] + after[a] for m, a in pairs)


class Times:
    """The table of step times at batch 1."""

    def __init__(self, run: Path) -> None:
        rows = pd.read_parquet(run / "latency.parquet").query("batch == 1")
        self.prefill = dict(list(rows[rows["step"] == "prefill"].groupby("model")))
        rows = rows[rows["step"] != "prefill"]
        self.rows = {
            (row.model, row.step, row.tokens): (row.median_ms, np.array(row.rounds_ms, float)) for row in rows.itertuples()
        }
        self.waiting = json.loads((run / "manifest.json").read_text())["environment"].get("timing_waiting") or 0.0
        modeled = [np.log(turns) for (_, step, _), (_, turns) in self.rows.items() if step not in ("lookup", "bookkeeping")]
        own = np.array(modeled) - np.mean(modeled, 0) - np.mean(modeled, 1, keepdims=True)
        ranks = own.argsort(1).argsort(1) - (own.shape[1] - 1) / 2
        plain = float(np.mean((ranks[:, 1:] * ranks[:, :-1]).sum(1) / (ranks**2).sum(1)))
        self.r = min(max((own.shape[1] * plain + 1) / max(own.shape[1] - 4, 2), 0.0), 0.9)

    @cache  # noqa: B019  one table a process
    def steps(self, pair: Pair, half: int | None = None) -> Steps:
        """Of a draft at a gamma, by all timing rounds, or by those of a half: Thue and Morse's sequence divides them."""
        (draft, gamma), decode = pair, self.rows["target", "decode", 1][1]
        mine = [place for place in range(len(decode)) if half is None or place.bit_count() % 2 == half]
        names = [[("target", "verify" if n > 1 else "decode", n)] for n in range(1, gamma + 2)]
        names += [[(draft, "draft", 1)], [(draft, "draft", 2)], [(draft, "lookup", 1)]]
        names.append([("target", "bookkeeping", 1), (draft, "bookkeeping", 1)])
        ms, turns = np.zeros(len(names)), np.zeros((len(mine), len(names)))
        for kind, keys in enumerate(names):
            for whole, each in (self.rows[key] for key in keys if key in self.rows):
                by = [np.median(decode[rows]) * np.median((each / decode)[rows]) for rows in (mine, slice(None))]
                ms[kind] += whole * by[0] / by[1]
                turns[:, kind] += each[mine]
        runs, after = np.zeros((gamma + 1, len(names))), np.zeros(len(names))
        runs[np.arange(gamma + 1), np.arange(gamma + 1)], runs[1:, -1] = 1.0, 1.0
        runs[:, gamma + 1], runs[:, gamma + 3] = np.arange(gamma + 1) * (ms[gamma + 1] > 0), ms[gamma + 3] > 0
        if ms[gamma + 2]:
            after[gamma + 1], after[gamma + 2] = -1.0, 1.0
        return Steps(ms, turns, runs, after)


FREE = {
    gamma: Steps(np.ones(gamma + 1), np.empty((0, gamma + 1)), np.eye(gamma + 1), np.zeros(gamma + 1)) for gamma in range(99)
}
Part = tuple[Rounds, Steps, int | None]  # documents, how they are decoded, and the half of the timing rounds


# --- estimates ----------------------------------------------------------------------------------------------------------


def small_sample(counts: Array) -> tuple[float, float]:
    """Bell and McCaffrey's (2002) correction of a ratio's squared residuals, and their degrees of freedom."""
    h = counts / counts.sum()
    centred = np.eye(len(h)) - np.outer(np.ones(len(h)), h)
    m = centred.T @ np.diag(h**2) @ centred
    return float((h**2).sum() / np.trace(m)), float(np.trace(m) ** 2 / (m**2).sum())


def influences(totals: Array, counts: Array, strata: Array | None) -> tuple[Array, float]:
    """What each document adds to the error of sum(totals) / sum(counts), and the degrees of freedom."""
    errors = (totals - totals.sum() / counts.sum() * counts) / counts.sum()
    if strata is None or len(set(strata)) == 1:
        correction, freedom = small_sample(counts)
        return errors * math.sqrt(correction), freedom
    squares = []
    for stratum in set(strata):  # of fixed size: what strata differ by is no error
        rows = strata == stratum
        correction, freedom = small_sample(counts[rows])
        errors[rows] = math.sqrt(correction) * (errors[rows] - errors[rows].mean())
        squares.append((float((errors[rows] ** 2).sum()), freedom))
    return errors, sum(each for each, _ in squares) ** 2 / sum(each**2 / freedom for each, freedom in squares)


def share(totals: Array, counts: Array, confidence: float) -> list[float]:
    """A share with its t interval over documents."""
    kept, tail = counts > 0, (1 - confidence) / 2
    errors, freedom = influences(totals[kept], counts[kept], None)
    value, error = totals.sum() / counts.sum(), math.sqrt((errors**2).sum())
    if error <= 1e-6 * value:  # all documents agree: what those that differ could make of it
        agree = tail ** (1 / kept.sum())
        return [value, value * agree, 1 - (1 - value) * agree]
    half = student.ppf(1 - tail, freedom) * error
    return [value, max(0.0, value - half), min(1.0, value + half)]


def burstiness(text: Text, confidence: float) -> list[float]:
    """The correlation of acceptance at neighbouring positions, with its jackknife over documents."""
    paired = text.proposed & np.roll(text.proposed, -1)
    paired[np.append(text.starts[1:], len(paired)) - 1] = False
    after = np.roll(text.kept, -1)
    sums = np.array([text.sums(np.where(paired, each, 0.0)) for each in (1.0, text.kept, after, text.kept * after)])
    sums = sums[:, sums[0] > 0]

    def correlation(n: Array, first: Array, second: Array, both: Array) -> Array:
        first, second, both = first / n, second / n, both / n
        return np.asarray((both - first * second) / np.sqrt(first * (1 - first) * second * (1 - second)))

    value, units = float(correlation(*sums.sum(1))), sums.shape[1]
    with np.errstate(invalid="ignore", divide="ignore"):
        others = correlation(*(sums.sum(1, keepdims=True) - sums))
    if not np.isfinite(others).all():
        return [value, -1.0, 1.0]
    half = student.ppf((1 + confidence) / 2, units - 1) * math.sqrt(
        (units - 1) / units * ((others - others.mean()) ** 2).sum()
    )
    return [value, max(-1.0, value - half), min(1.0, value + half)]


def reach(logs: Array, r: float) -> float:
    """The farther end of the 95% interval of a median of timing rounds: order statistics, of fewer than six rounds t."""
    size = len(logs)
    if size >= 6:
        ordered, covered = np.sort(logs), 1 - 2 * np.cumsum([math.comb(size, k) / 2**size for k in range(size // 2)])
        place = int((covered >= 0.95).sum())
        over = (covered[place - 1] - 0.95) / (covered[place - 1] - covered[place])
        part = (size - place) * over / (place + (size - 2 * place) * over)
        ends = [(1 - part) * side[place - 1] + part * side[place] for side in (ordered, ordered[::-1])]
    else:
        half = student.ppf(0.975, size - 1) * logs.std(ddof=1) / math.sqrt(size)
        ends = [logs.mean() - half, logs.mean() + half]
    return max(-ends[0], ends[1], 0.0) * math.sqrt((1 + r) / (1 - r))


def stretched(distance: float) -> float:
    """The exponential function, from 1 on its tangent."""
    return math.exp(distance) if distance < 1 else math.e * distance


class Estimate:
    """The speedup of documents, by domain and part, and its bounds."""

    def __init__(self, domains: Sequence[Sequence[Part]], strata: bool, times: Times) -> None:
        parts = [part for domain in domains for part in domain]
        spent = np.concatenate([steps.spent(rounds) @ steps.ms / steps.ms[0] for rounds, steps, _ in parts])
        tokens = np.concatenate([rounds.tokens for rounds, _, _ in parts])
        source = np.concatenate([rounds.source for rounds, _, _ in parts]) if strata else None
        kept = tokens > 0
        source = None if source is None else source[kept]
        errors, self.freedom = influences(spent[kept], tokens[kept], source)
        time, variance = float(spent.sum() / tokens.sum()), float((errors**2).sum())
        kish = tokens.sum() ** 2 / (tokens**2).sum()
        third = float((errors**3).sum()) * kish / max(kish - 2, 0.5)
        self.value, self.documents, self.error = 1 / time, int(kept.sum()), math.sqrt(variance) / time
        self.skewness = third / variance / time if variance else 0.0
        ends = [steps.ends() for _, steps, _ in parts]
        least, most = min(low for low, _ in ends), max(high for _, high in ends)
        self.least, self.most, unseen = 1 / most, 1 / least, 1 - MISSED ** (1 / self.documents)
        self.slower, self.faster = unseen * max(most / time - 1, 0), unseen * max(1 - least / time, 0)
        self.waited = -math.log1p(-times.waiting) if times.waiting > BUSY and len(parts[0][1].turns) else 0.0
        self._time(parts, float(spent.sum()), times.r)

    def _time(self, parts: Sequence[Part], whole: float, r: float) -> None:
        """Errors by timing rounds: those of two halves are independent."""
        medians, freedoms, self.tail, means, self.flattered = [], [], 0.0, [], 0.0
        for half in dict.fromkeys(half for _, _, half in parts):
            steps = next(steps for _, steps, other in parts if other == half)
            shares = sum(steps.spent(rounds).sum(0) for rounds, _, other in parts if other == half) * steps.ms
            shares /= steps.ms[0] * whole
            verified = slice(len(steps.runs))
            self.flattered += float(shares[verified] @ np.maximum(steps.ms[0] / steps.ms[verified] - 1, 0))
            if not len(steps.turns):
                continue
            ratios = np.divide(steps.turns, steps.ms, out=np.ones_like(steps.turns), where=steps.ms > 0)
            plain, draft = 1 + (ratios[:, 0] - 1) * shares.sum(), 1 + (ratios - 1) @ shares
            size, ratio = len(plain), draft.mean() / plain.mean()
            medians.append(reach(np.log(plain) - np.log(draft), r) / student.ppf(0.975, size - 1))
            freedoms.append(size - 1)
            own = (draft - ratio * plain).std(ddof=1) / draft.mean() / math.sqrt(size)
            means.append(own * math.sqrt((1 + r) / (1 - r)))
            self.tail += ratio - 1
        self.timing, self.mean_error = math.hypot(*medians), math.hypot(*means)
        moments = sum(each**4 / freedom for each, freedom in zip(medians, freedoms, strict=True))
        self.timing_freedom = self.timing**4 / moments if moments else math.inf

    def distances(self, tail: float) -> tuple[float, float]:
        """How far off step times may be, as logarithms: by medians of rounds and by means."""
        each = [
            student.ppf(1 - tail, self.timing_freedom) * error if error else 0.0 for error in (self.timing, self.mean_error)
        ]
        return max(each[0], self.waited), max(each[1], self.waited)

    def possible(self, tail: float) -> tuple[float, float]:
        """Bounds that step times alone give."""
        medians, means = self.distances(tail)
        return self.least / max(math.exp(medians), (1 + self.tail) * math.exp(means)), self.most * math.exp(medians)

    def bounds(self, tail: float) -> tuple[float, float]:
        """Lower and upper bound, each wrong with probability `tail`."""
        (medians, means), (low, high), t = self.distances(tail), self.possible(tail), student.ppf(1 - tail, self.freedom)
        spread, skew = t * self.error, self.skewness / 6 * (1 + 2 * t**2)
        slower = math.log(max(stretched(spread) + max(skew, 0), 1 + self.slower))
        shortest = min(math.exp(-spread) - max(-skew, 0), 1 - self.faster)
        fastest = self.value * math.exp(math.hypot(-math.log(shortest), medians)) if shortest > 0 else math.inf
        above = max(stretched(math.hypot(slower, medians)), (1 + self.tail) * stretched(math.hypot(slower, means)))
        return max(low, self.value / (1 + self.flattered) / above), min(high, fastest)

    def deciding(self, tail: float) -> tuple[float, float]:
        """The same; by step times alone where documents are few."""
        return self.bounds(tail) if self.documents >= FEWEST else self.possible(tail)


# --- choosing and testing -----------------------------------------------------------------------------------------------


class Judged:
    """What is chosen among drafts and gammas for some domains, and the verdict on it. `texts`: by draft, then domain."""

    def __init__(
        self, texts: dict[str, dict[str, Text]], gammas: Sequence[int], times: Times, report: dict[str, Any]
    ) -> None:
        self.texts, self.times, self.strata = texts, times, len(next(iter(texts.values()))) > 1
        self.tail, threshold = 1 - report["confidence"], report["traffic"]["min_speedup"]
        options = [(draft, gamma) for draft in texts for gamma in gammas]
        lots = {domain: text.lots for domain, text in next(iter(texts.values())).items()}
        order = sorted((domain, int(lot), row) for domain in lots for row, lot in enumerate(lots[domain]))
        self.second = {domain: np.zeros(len(each), bool) for domain, each in lots.items()}
        for domain, _, row in order[1::2]:
            self.second[domain][row] = True

        def fastest(half: int | None) -> Pair:
            return max(options, key=lambda pair: self.speed(self.decoded(pair, half)))

        self.pair, halves = fastest(None), (fastest(0), fastest(1))
        self.named = self.shown = self.of(self.pair)
        tested = [self.named]
        if set(halves) != {self.pair}:
            sides = zip(self.decoded(halves[1], 0), self.decoded(halves[0], 1), strict=True)
            crossed = Estimate([[*one, *two] for one, two in sides], self.strata, times)
            low, high = crossed.bounds(self.tail)
            self.shown = crossed if low <= self.named.value <= high else self.named
            tested.append(crossed)
        ends = [each.deciding(self.tail) for each in tested]
        low, high = min(low for low, _ in ends), max(high for _, high in ends)
        self.verdict = "GO" if low >= threshold else "NO-GO" if high < threshold else "UNDECIDED"
        unknown = max(self.shown.waited, self.shown.distances(self.tail)[0]) > math.log(2)
        self.untold = self.verdict == "UNDECIDED" and unknown
        self.interval = [self.shown.value, low, high]

    def decoded(self, pair: Pair, half: int | None) -> list[list[Part]]:
        """How each domain is decoded, on all documents, or those of a half by its timing rounds."""
        found, steps = [], self.times.steps(pair, half)
        for domain, text in self.texts[pair[0]].items():
            rounds = text.rounds(pair[1])
            found.append([(rounds if half is None else rounds.of(self.second[domain] == bool(half)), steps, half)])
        return found

    @staticmethod
    def speed(domains: Sequence[Sequence[Part]]) -> float:
        """A speedup alone."""
        parts = [part for domain in domains for part in domain]
        spent = sum(float((steps.spent(rounds) @ steps.ms).sum()) / steps.ms[0] for rounds, steps, _ in parts)
        return float(sum(rounds.tokens.sum() for rounds, _, _ in parts)) / spent

    def of(self, pair: Pair) -> Estimate:
        """The speedup of a draft and gamma on all documents."""
        return Estimate(self.decoded(pair, None), self.strata, self.times)

    def at(self, gamma: int) -> list[float]:
        """The named draft at a gamma: another one stands at what all documents gain or lose beside the named one."""
        if gamma == self.pair[1]:
            return self.interval
        other, ratio = self.of((self.pair[0], gamma)), self.shown.value / self.named.value
        return [ratio * each for each in (other.value, *other.deciding(self.tail))]

    def tokens(self, gamma: int) -> list[float]:
        """Tokens per round of the named draft at a gamma: the speedup if rounds cost a decode step each."""
        free = [[(text.rounds(gamma), FREE[gamma], None)] for text in self.texts[self.pair[0]].values()]
        found = Estimate(free, self.strata, self.times)
        low, high = found.bounds(self.tail / 2)
        return [min(max(1.0, end), gamma + 1.0) for end in (found.value, min(low, found.value), max(high, found.value))]

    def answers(self, found: Comparison, where: str, answer: dict[str, Any]) -> None:
        """Compare one answer of the report."""
        draft, gamma = self.pair
        found.of("draft", where, answer["draft"], draft)
        found.of("chosen gamma", where, answer["gamma"], gamma)
        found.of("verdict", where, answer["verdict"], self.verdict)
        found.of("speedup", where, answer["speedup"] or [math.nan] * 3, [math.nan] * 3 if self.untold else self.interval)
        found.of("tokens per round", where, answer["tokens_per_round"], self.tokens(gamma))
        texts = self.texts[draft].values()
        accepted, counts = (
            np.concatenate([text.sums(values) for text, values in sides])
            for sides in ([(text, text.accept) for text in texts], [(text, text.proposed) for text in texts])
        )
        found.of("acceptance", where, answer["acceptance"], share(accepted, counts, 1 - self.tail))
        found.of("documents", where, [answer["documents"], answer["held_out"]], [len(counts), self.shown.documents])


def compare_gammas(found: Comparison, where: str, result: dict[str, Any], judged: Judged, text: Text) -> None:
    """Compare a row for each gamma of one domain, draft and rule."""
    draft, prefill = result["draft"], judged.times.prefill

    def ms(model: str) -> float:
        rows = prefill[model].sort_values("tokens")
        tokens, known = rows["tokens"].to_numpy(float), rows["median_ms"].to_numpy(float)
        rise = max((known[-1] - known[-2]) / (tokens[-1] - tokens[-2]), 0.0)
        return float((np.interp(text.prompts, tokens, known) + rise * np.maximum(text.prompts - tokens[-1], 0)).sum())

    for item in result["gammas"]:
        gamma, at = item["gamma"], f"{where}, gamma {item['gamma']}"
        rounds, steps = text.rounds(gamma), judged.times.steps((draft, gamma))
        spent, tokens, price = (
            steps.spent(rounds) @ steps.ms / steps.ms[0],
            rounds.tokens,
            steps.runs @ steps.ms / steps.ms[0],
        )
        number, kept, drafted = rounds.exactly.sum(), rounds.accepted.sum(0), rounds.drafted.sum(0)
        found.of("rounds", at, item["rounds"], number)
        found.of("tokens per round", at, item["tokens_per_round"], judged.tokens(gamma))
        found.of("acceptance length", at, item["acceptance_length"], 1 + kept.sum() / drafted[0])
        found.of("accepted per drafted", at, item["accepted_per_drafted"], kept.sum() / drafted.sum())
        found.of("marginal", at, item["marginal"], kept / drafted[0])
        with np.errstate(invalid="ignore"):
            found.of("conditional", at, item["conditional"], kept / rounds.tested.sum(0))
        found.of("reached", at, item["reached"], rounds.tested.sum(0))
        found.of("break-even", at, item["break_even_length"], spent.sum() / number)
        costs = [price[-1], steps.ms[gamma + 1] / steps.ms[0], steps.ms[gamma] / steps.ms[0]]
        found.of("costs", at, [item[name] for name in ("full_round_cost", "draft_cost", "verify_cost")], costs)
        speeds = (tokens / spent)[tokens > 0]
        ends = [item["of_documents"][name] for name in ("p10", "p50", "p90", "slower")]
        found.of("of documents", at, ends, [*np.percentile(speeds, [10, 50, 90]), (speeds < 1).mean()])
        own = [math.nan] * 3 if judged.untold and gamma == judged.pair[1] else judged.at(gamma)
        found.of("speedup", at, item["speedup"] or [math.nan] * 3, own)
        reading = (
            ms("target") / (steps.ms[0] * tokens.sum()),
            ms(draft) / (steps.ms[0] * tokens.sum()) if draft in prefill else 0,
        )
        whole = [(reading[0] + 1) / (sum(reading) + 1 / end) if end else 0.0 for end in own]
        found.of("speedup of requests", at, item["request_speedup"] or [math.nan] * 3, whole)
        if item["iid_tokens_per_round"] is not None:
            alpha = text.accept.sum() / text.proposed.sum()
            found.of("textbook formula", at, item["iid_tokens_per_round"], sum(alpha**i for i in range(gamma + 1)))


def main() -> int:
    """Recompute and compare."""
    run, report = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    log = pd.read_parquet(run / "positions").sort_values(["draft", "document", "position"])
    texts = pd.read_parquet(run / "documents.parquet").set_index("document")
    if texts["prompt_hash"].duplicated().any() or texts["cluster"].notna().any():
        sys.exit("recompute.py reads runs in which every document is a unit of its own")
    times, found, candidates = Times(run), Comparison(), dict[str, dict[str, Text]]()
    for result in [*report["sections"]["drafts"], *report["sections"]["rules"]]:
        draft, domain, rule = result["draft"], result["domain"], result["rule"]
        where = f"{domain}, {draft}, {rule}"
        rows = log[(log["draft"] == draft) & (log["domain"].astype(str) == domain)].reset_index(drop=True)
        text = Text(rows, rule, texts)
        found.tolerance = SINGLE if text.drawn else EXACT
        counts = [len(rows), rows["document"].nunique()]
        found.of("positions and documents", where, [result["positions"], result["documents"]], counts)
        found.of("coverage", where, result["coverage"], text.proposed.mean())
        found.of(
            "alpha", where, result["alpha"], share(text.sums(text.accept), text.sums(text.proposed), report["confidence"])
        )
        if result["mismatches"] is not None:
            found.of("mismatches", where, result["mismatches"], (rows["token"] != rows["target_top"]).mean())
        if not result["gammas"]:
            continue
        if text.drawn and len(text.starts) >= 10:
            sys.exit("recompute.py has no control variate, which alphaprof fits to expected rounds of 10 or more documents")
        found.of("burstiness", where, result["burstiness"], burstiness(text, report["confidence"]))
        gammas = [item["gamma"] for item in result["gammas"]]
        judged = Judged({draft: {domain: text}}, gammas, times, report)
        compare_gammas(found, where, result, judged, text)
        if result["verdict"] is not None:
            judged.answers(found, where, result)
            candidates.setdefault(draft, {})[domain] = text
    found.tolerance = EXACT
    names = [name for name in json.loads((run / "manifest.json").read_text())["drafts"] if name in candidates]
    candidates = {name: candidates[name] for name in names}
    by_domain = texts.groupby(texts["domain"].astype(str))["continuation_tokens"].sum()
    for item in report["domains"]:
        domain, answer = item["answer"]["domain"], item["answer"]
        found.of("share", domain, item["share"], by_domain[domain] / by_domain.sum())
        here = {draft: {domain: candidates[draft][domain]} for draft in candidates}
        judged = Judged(here, gammas, times, report)
        judged.answers(found, domain, answer)
        others = {draft: each for draft, each in here.items() if draft != judged.pair[0]}
        Judged(others, gammas, times, report).answers(found, f"{domain}, next best", item["next_best"])
    whole = Judged(candidates, gammas, times, report)
    whole.answers(found, "all traffic", report["answer"])
    length = whole.tokens(whole.pair[1])[0] / whole.named.value
    found.of("break-even", "all traffic", report["traffic"]["break_even_length"], length)
    for item in report["drafts"]:
        draft = item["answer"]["draft"]
        judged = whole if draft == whole.pair[0] else Judged({draft: candidates[draft]}, gammas, times, report)
        judged.answers(found, draft, item["answer"])
        for at in item["by_gamma"]:
            where = f"{draft}, gamma {at['gamma']}"
            found.of("tokens per round", where, at["tokens_per_round"], judged.tokens(at["gamma"])[0])
            found.of("speedup", where, at["speedup"], judged.at(at["gamma"]))
    print(*(f"{count:6} equal: {name}" for name, count in found.equal.items()), sep="\n")
    print(*found.off, f"{sum(found.equal.values())} values are equal, {len(found.off)} are not", sep="\n")
    return 1 if found.off else 0


if __name__ == "__main__":
    sys.exit(main())
