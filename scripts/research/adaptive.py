#!/usr/bin/env python3
"""Does it pay to verify fewer drafts when they look bad? Policies of engines, played on the rounds of a finished run.

    python scripts/research/adaptive.py RUN DRAFT:KIND [...] [--gpus a100-80gb ...] [--loads 1 4 ...] [--splits 6]

RUN (of profiles/adaptive.yaml) is of greedy text, where heads read their own drafts: there a round from every position is
known: how many drafts it accepts, and how sure the head was of each. KIND is what a draft costs: head (an EAGLE-3 head of
Llama-3.1-8B), block (a DSpark drafter of five layers; with a fixed K its rounds are those of dspark1, 2, 3, 5 and 7, and
`own` is dspark7 by its confidence head) or lookup. In place of a draft, a number draws a head with so many tokens per round
of seven drafts, as good ones have.

Policies, on a batch whose sequences come one after the other from the documents, in float64:

- off, and fixed K: all K drafts of each round are verified.
- K by load: the fastest K for this number of sequences; fixed: one K for all loads up to 64.
- adaptive: vLLM 0.33 (`enable_adaptive_verification`). MOST tokens are drafted. Draft k is accepted with probability
  sigmoid(w f + b_k), f its log-odds, refitted every 100 steps by one damped Newton step; own confidences are taken as they
  are. The number of verified drafts maximizes (sequences + expected accepted drafts) / (draft ms + verify ms), by
  confidences of the step before; they go to the drafts that survive most surely now. Costs are those of captured sizes.
- adaptive, K by load: the same, where MOST is chosen by load as well.
- EMA: SGLang 0.5.23 (`--speculative-adaptive`): K from the batch's candidates, by an average of accepted drafts.
- oracle: knows how many drafts will be accepted, and drafts as many as pays best.

What is chosen by load is chosen on one half of the documents, and all policies are played on the other; intervals are 1.96
standard deviations over random halves, which estimate the error of all documents.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit
from scipy.optimize import brentq

import alphaprof
from alphaprof.config.options import RooflineCosts
from alphaprof.costs.cost_model import roofline_rows
from alphaprof.costs.shapes import ModelShape
from alphaprof.costs.steps import StepTable

Array = np.ndarray[Any, Any]
MOST, CONTEXT = 7, 1024
LOADS, DEPTHS = (1, 4, 16, 64, 256), (1, 2, 3, 5, 7)
FIXED, EMA, ADAPTIVE, ORACLE = range(4)
REFIT, DAMPING, RIDGE, SURE = 100, 50.0, 1e-3, 40.0
SLOPE, BIAS = 0.5, -0.2  # where vLLM's estimator starts
CANDIDATES = {1: (1, 3, 5, 7), 8: (0, 1, 3), 32: (0, 1), 64: (0,)}
CAPTURED = np.array([1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)])
TARGET = {  # Llama-3.1-8B
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "tie_word_embeddings": False,
}  # fmt: skip
HEADS = {
    "head": TARGET | {"num_hidden_layers": 1, "draft_vocab_size": 32000, "architectures": ["LlamaForCausalLMEagle3"]},
    "block": TARGET | {
        "model_type": "qwen3", "architectures": ["Qwen3DSparkModel"], "num_hidden_layers": 5, "head_dim": 128,
        "block_size": 7, "markov_rank": 256, "markov_head_type": "vanilla", "target_layer_ids": [1, 8, 15, 22, 29],
    },
    "lookup": None,
}  # fmt: skip


@dataclass(frozen=True)
class Rounds:
    """Rounds from every position of a run's texts, of drafts up to MOST: `accepted` and `proposed` drafts [positions],
    log-odds `odds` [positions, MOST], and where each document starts and stops [documents].
    """

    accepted: Array
    proposed: Array
    odds: Array
    start: Array
    stop: Array

    @classmethod
    def of(cls, run: str, draft: str) -> Rounds:
        """Of a draft of a run, or of `own`. Raises `SystemExit` for one whose log does not hold whole rounds."""
        log = alphaprof.open(run).positions(where=[("draft", "=", "dspark7" if draft == "own" else draft)])
        log = log.sort_values(["document", "position"])
        if log.empty or log["accepted_run"].isna().any():
            raise SystemExit(f"{run} has no whole rounds of {draft}\nhint: name a head or prompt lookup, on greedy text")
        odds, depths = np.zeros((len(log), MOST)), range(1, MOST + 1)  # prompt lookup has no confidence: log-odds of 0
        names = [
            f"draft_confidence_{d}" if draft == "own" else "draft_top_prob" for d in (depths if draft == "own" else [1])
        ]
        with np.errstate(divide="ignore"):
            for place, name in enumerate(names):
                sure = log[name].fillna(0.5).to_numpy(float)
                odds[:, place] = np.log(sure) - np.log1p(-sure)
        for depth in depths[len(names) :]:
            if (name := f"draft_log_odds_{depth}") in log:
                odds[:, depth - 1] = log[name].fillna(0).to_numpy(float)
        start = np.flatnonzero(log["position"].to_numpy() == 0)
        counts = (np.minimum(log[name].to_numpy(np.int64), MOST) for name in ("accepted_run", "proposed"))
        return cls(*counts, np.clip(odds, -SURE, SURE), start, np.append(start[1:], len(log)))

    @classmethod
    def drawn(cls, length: float, seed: int = 0) -> Rounds:
        """Of a head that is not there, with `length` tokens per round of MOST drafts, on 120 texts of 200 tokens. It is as
        sure as it is right; its log-odds tell drafts apart as well as vLLM says of DeepSeek-V4's (an AUC of 0.85).
        """
        random, start = np.random.default_rng(seed), np.arange(120) * 200
        text, within = random.normal(0, 0.75, (120, 1, 1)), random.normal(0, 1.6, (120, 200, MOST))
        chances, left = random.random((120, 200, MOST)), 200 - np.arange(200)

        def rounds(level: float) -> Rounds:
            odds = level + text + within
            right = (chances < 1 / (1 + np.exp(-odds))).cumprod(2).sum(2)
            accepted = np.minimum(right, left).reshape(-1)
            return cls(accepted, np.full(24_000, MOST), odds.reshape(-1, MOST), start, start + 200)

        return rounds(brentq(lambda level: rounds(level).replayed(np.arange(120), MOST)[0] - length, -6, 9, xtol=1e-3))

    def replayed(self, documents: Array, gamma: int) -> tuple[float, float]:
        """Return tokens and drafts per round of these documents with a fixed gamma."""
        tokens, rounds, drafts = _replayed(self.accepted, self.proposed, self.start[documents], self.stop[documents], gamma)
        return tokens / rounds, drafts / rounds


@njit(cache=True)
def _replayed(accepted, proposed, start, stop, gamma):
    tokens = rounds = drafts = 0
    for document in range(len(start)):
        place = start[document]
        tokens += stop[document] - place
        while place < stop[document]:
            rounds += 1
            drafts += min(gamma, proposed[place])
            place += min(accepted[place], gamma) + 1
    return tokens, rounds, drafts


@dataclass(frozen=True)
class Costs:
    """Milliseconds of a batch: of drafting k tokens in each sequence `draft` [MOST + 1], of verifying T tokens in all
    `verify` [T], and where steps are padded to a captured size `padded` [T].
    """

    draft: Array
    verify: Array
    padded: Array

    @classmethod
    def of(cls, gpu: str, kind: str, batch: int) -> Costs:
        """By the roofline that docs/costs.md holds against published rounds."""
        target = ModelShape.from_config(TARGET)
        options = RooflineCosts(source="roofline", accelerator=gpu, preset="vllm-0.11")
        shape = None if HEADS[kind] is None else ModelShape.of_head(HEADS[kind], target)
        draft, tokens = np.zeros(MOST + 1), np.arange(batch * (MOST + 1) + 1)
        for k in range(1, MOST + 1):  # what drafts in one pass has other steps for every k
            heads = ["draft"] if shape is not None else []
            rows = roofline_rows(target, {"draft": shape}, options, k, [batch], [CONTEXT], [], heads)
            times = StepTable(rows).times("draft", k, batch, CONTEXT)
            first = times.draft_first[k + 1].ms if shape is not None else times.lookup.ms
            draft[k] = first + (k - 1) * times.draft.ms + times.bookkeeping.ms
        verify = np.interp(tokens / batch, np.arange(1, MOST + 2), [times.target[n].ms for n in range(1, MOST + 2)])
        place = np.searchsorted(CAPTURED, tokens)
        size = np.where(place < len(CAPTURED), CAPTURED[np.minimum(place, len(CAPTURED) - 1)], tokens)
        padded = np.interp(size / batch, tokens / batch, verify)
        return cls(draft, verify, np.maximum.accumulate(padded))

    def per_second(self, batch: int, gamma: int, tokens: float, drafts: float) -> float:
        """Return tokens per millisecond with a fixed gamma, from tokens and drafts per round."""
        verified = np.interp(batch * (1 + drafts), np.arange(len(self.verify)), self.verify)
        return batch * tokens / (self.draft[gamma] + float(verified))


@njit(cache=True)
def _refitted(weights, slope_terms, terms):
    """One damped Newton step of a logistic with one slope and a bias by depth. `weights` [1 + depths]: slope and biases;
    `slope_terms`: sums of w f f and (y - p) f; `terms` [depths, 4]: sums of w f, w, y - p and 1.
    """
    information, score, coupled = slope_terms[0] + RIDGE, slope_terms[1], terms[:, 1] + RIDGE
    step = (score - (terms[:, 0] * terms[:, 2] / coupled).sum()) / (information - (terms[:, 0] ** 2 / coupled).sum())
    step *= terms[:, 3].sum() / (terms[:, 3].sum() + DAMPING)
    if weights[0] + step < 0:
        step = 0.0
    weights[0] += step
    weights[1:] += (terms[:, 2] - terms[:, 0] * step) / coupled * terms[:, 3] / (terms[:, 3] + DAMPING)


@njit(cache=True)
def played(
    policy, gamma, accepted, proposed, odds, start, stop, batch, draft, verify, padded, candidates, given, refit, steps
):
    """Play a policy on documents in this order, again and again, and return tokens, milliseconds and verified drafts of the
    last three quarters of the steps. `gamma`: tokens drafted at most; `given`: slope and biases of the estimator, which
    change if `refit`.
    """
    documents, weights = len(start), given.copy()
    which, following = np.arange(batch) % documents, batch
    place, ends = start[which].copy(), stop[which].copy()
    stale, live, counts = np.ones((batch, gamma)), np.ones((batch, gamma)), np.zeros(batch, np.int64)
    slope_terms, terms = np.zeros(2), np.zeros((gamma, 4))
    chosen, average, seen = len(candidates) // 2, 0.0, 0
    if policy == EMA:
        for index in range(len(candidates)):
            chosen = index if candidates[index] == 3 else chosen
        average = candidates[chosen] - 1.0
    tokens, ms, drafts = 0, 0.0, 0
    for step in range(steps):
        k = candidates[chosen] if policy == EMA else gamma
        if policy >= ADAPTIVE:
            for i in range(batch):
                for depth in range(gamma):
                    if policy == ORACLE:
                        live[i, depth] = 1.0 if depth < accepted[place[i]] else 0.0
                    else:
                        live[i, depth] = 1 / (1 + np.exp(-weights[0] * odds[place[i], depth] - weights[1 + depth]))
            expected, survive, last = (live if policy == ORACLE else stale), np.zeros((batch, gamma)), 0
            scores = np.empty(batch * gamma)
            for i in range(batch):
                product = 1.0
                for depth in range(min(gamma, proposed[place[i]])):
                    product *= expected[i, depth]
                    scores[last] = product
                    last += 1
            budget, best, total = 0, batch / (draft[gamma] + padded[batch]), float(batch)
            ranked = -np.sort(-scores[:last])
            for number in range(1, last + 1):
                total += ranked[number - 1]
                if total / (draft[gamma] + padded[batch + number]) > best:
                    budget, best = number, total / (draft[gamma] + padded[batch + number])
            survive[:] = -1.0
            for i in range(batch):
                product = 1.0
                for depth in range(min(gamma, proposed[place[i]])):
                    product *= live[i, depth]
                    survive[i, depth] = product
            counts[:] = 0
            for slot in np.argsort(-survive.reshape(-1), kind="mergesort")[:budget]:
                counts[slot // gamma] += 1
            spent = draft[gamma] + padded[batch + budget]
        else:
            for i in range(batch):
                counts[i] = min(k, proposed[place[i]])
            spent = draft[k] + verify[batch + counts.sum()]
        kept = 0
        for i in range(batch):
            right = min(accepted[place[i]], counts[i])
            kept += right
            if policy == ADAPTIVE and refit:
                for depth in range(min(right + 1, counts[i])):
                    p, f, y = live[i, depth], odds[place[i], depth], 1.0 if depth < right else 0.0
                    slope_terms += np.array([p * (1 - p) * f * f, (y - p) * f])
                    terms[depth] += np.array([p * (1 - p) * f, p * (1 - p), y - p, 1.0])
            emitted = min(right + 1, ends[i] - place[i])
            if step >= steps // 4:
                tokens, drafts = tokens + emitted, drafts + counts[i]
            place[i] += emitted
            stale[i] = live[i]
            if place[i] == ends[i]:
                place[i], ends[i], following = start[following % documents], stop[following % documents], following + 1
                stale[i] = 1.0
        if step >= steps // 4:
            ms += spent
        if refit and step % REFIT == REFIT - 1:
            _refitted(weights, slope_terms, terms)
            slope_terms[:], terms[:] = 0, 0
        if policy == EMA:
            average, seen = (0.8 * average + 0.2 * kept / batch if k else average), seen + 1
            if seen > 10 and (seen - 10) % 5 == 0:
                before = chosen
                if k == 0:
                    chosen = min(chosen + 1, len(candidates) - 1)
                while k and chosen > 0 and average <= max(candidates[chosen - 1], 1) - 0.75:
                    chosen -= 1
                while k and chosen >= before and chosen < len(candidates) - 1 and average > candidates[chosen] - 0.5:
                    chosen += 1
    return tokens, ms, drafts


@dataclass(frozen=True)
class Study:
    """A draft with costs on a GPU. `fixed`: its rounds by gamma; `adaptive`: those that adaptive policies trim. Confidences
    that are its `own` are taken as they are.
    """

    gpu: str
    kind: str
    fixed: dict[int, Rounds]
    adaptive: Rounds
    own: bool

    def play(self, policy: int, gamma: int, documents: Array, batch: int, costs: Costs) -> tuple[float, float, float]:
        """Return tokens per millisecond, tokens per round and verified drafts per round of a policy."""
        rounds = self.fixed[gamma] if policy in (FIXED, EMA) and gamma else self.adaptive
        given = np.array([1.0, *[0.0] * gamma] if self.own else [SLOPE, *[BIAS] * gamma])
        slot = max(size for size in CANDIDATES if size <= batch)
        steps = 4 * max(250, 4000 // batch)
        tokens, ms, drafts = played(
            policy, gamma, rounds.accepted, rounds.proposed, rounds.odds, rounds.start[documents], rounds.stop[documents],
            batch, costs.draft, costs.verify, costs.padded, np.array(CANDIDATES[slot]), given, not self.own, steps,
        )  # fmt: skip
        played_rounds = batch * (steps - steps // 4)
        return tokens / ms, tokens / played_rounds, drafts / played_rounds

    def split(self, loads: Sequence[int], choose: Array, test: Array) -> dict[str, Array]:
        """Return by policy what it reaches at the loads [loads], in tokens per millisecond; what is chosen is chosen on
        other documents.
        """
        found, gammas = defaultdict[str, list[float]](list), [0, *self.fixed]
        costs = [Costs.of(self.gpu, self.kind, batch) for batch in loads]
        expected = np.array([
            [each.per_second(batch, k, *(self.fixed[k].replayed(choose, k) if k else (1.0, 0.0))) for k in gammas]
            for batch, each in zip(loads, costs, strict=True)
        ])  # fmt: skip
        usual = gammas[np.log(expected / expected[:, :1])[[batch <= 64 for batch in loads]].mean(0).argmax()]
        depths = (MOST,) if self.kind == "block" else DEPTHS
        for batch, each, per_gamma in zip(loads, costs, expected, strict=True):
            by_load, given = gammas[per_gamma.argmax()], (batch, each)
            best = max(depths, key=lambda depth, given=given: self.play(ADAPTIVE, depth, choose, *given)[0])
            off = self.play(FIXED, 0, test, *given)[0]
            every, trimmed = self.play(FIXED, MOST, test, *given), self.play(ADAPTIVE, MOST, test, *given)
            oracle = max(self.play(ORACLE, depth, test, *given)[0] for depth in depths)
            found["K"].append(by_load)
            found["off"].append(off)
            found["K by load"].append(self.play(FIXED, by_load, test, *given)[0])
            found["fixed"].append(self.play(FIXED, usual, test, *given)[0])
            found["fixed 7"].append(every[0])
            found["adaptive 7"].append(trimmed[0])
            found["adaptive by load"].append(self.play(ADAPTIVE, best, test, *given)[0])
            if self.kind == "head":
                found["EMA"].append(self.play(EMA, MOST, test, *given)[0])
            found["oracle"].append(max(oracle, off))
            found["tokens of 7"].append(every[1])
            found["tokens of adaptive 7"].append(trimmed[1])
            found["verified of adaptive 7"].append(trimmed[2])
        return {name: np.array(values) for name, values in found.items()}


def table(study: Study, loads: Sequence[int], splits: int, seed: int) -> Iterator[str]:
    """Yield lines of Markdown: K by load over off, and the others in percent of K by load, with intervals."""
    drawn, documents = np.random.default_rng(seed), np.arange(len(study.adaptive.start))
    halves = [np.array_split(drawn.permutation(documents), 2) for _ in range(splits)]
    found = [study.split(loads, *half) for half in halves]
    values = {name: np.array([each[name] for each in found]) for name in found[0]}
    yield "| " + " | ".join(["policy", *map(str, loads)]) + " |"
    yield "|---" * (1 + len(loads)) + "|"

    def line(words: str, cells: Array, form: str) -> str:
        middle, error = cells.mean(0), 1.96 * cells.std(0, ddof=1)
        return f"| {words} | " + " | ".join(form.format(*pair) for pair in zip(middle, error, strict=True)) + " |"

    base = values["K by load"]
    yield line("K", values["K"], "{0:.1f}")
    yield line("K by load, over off", base / values["off"], "{0:.2f}±{1:.2f}")
    for name in ("fixed", "EMA", "adaptive 7", "adaptive by load", "oracle"):
        if name in values:
            yield line(f"{name}, %", 100 * (values[name] / base - 1), "{0:+.1f}±{1:.1f}")
    yield line("adaptive 7 over fixed 7, %", 100 * (values["adaptive 7"] / values["fixed 7"] - 1), "{0:+.1f}±{1:.1f}")
    for name in ("tokens of 7", "tokens of adaptive 7", "verified of adaptive 7"):
        yield line(name, values[name], "{0:.2f}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Study and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("drafts", nargs="+")
    parser.add_argument("--gpus", nargs="*", default=["a100-80gb", "h100-sxm", "h20"])
    parser.add_argument("--loads", nargs="*", type=int, default=LOADS)
    parser.add_argument("--splits", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    for pair in options.drafts:
        draft, _, kind = pair.partition(":")
        rounds = Rounds.drawn(float(draft)) if draft[0].isdigit() else Rounds.of(options.run, draft)
        fixed = {k: Rounds.of(options.run, f"dspark{k}") if kind == "block" else rounds for k in DEPTHS}
        for gpu in options.gpus:
            print(f"\n{draft}, {gpu}\n")
            for line in table(Study(gpu, kind, fixed, rounds, draft == "own"), options.loads, options.splits, options.seed):
                print(line, flush=True)


if __name__ == "__main__":
    main()
