#!/usr/bin/env python3
"""Recompute a report's numbers from the Parquet files of its run, without a function of alphaprof.

    python scripts/research/recompute.py RUN REPORT.json

REPORT.json is `alphaprof report RUN --format json`. Recomputed are facts of texts and acceptance of each domain and draft;
on greedy text also rounds at every gamma, replayed token by token, what they cost by the run's own step times, speedups,
and the whole traffic. What one half of the documents chose for the other is not: of a table of gammas, ratios to the chosen
gamma are compared. Prints how many values are equal (to 1e-9), and those that are not; exit code 1 if there are any.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

TOLERANCE = 1e-9


class Comparison:
    """Values that are equal, and those that are not."""

    def __init__(self) -> None:
        self.equal: Counter[str] = Counter()
        self.off: list[str] = []

    def of(self, name: str, where: str, reported: Any, own: Any) -> None:
        """Compare a value, or a list of them; null is equal to NaN."""
        for one, other in zip(np.atleast_1d(np.array(reported, float)), np.atleast_1d(np.array(own, float)), strict=True):
            same = np.isclose(one, other, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
            self.equal[name] += bool(same)
            self.off += [] if same else [f"{where} {name}: reported {one}, recomputed {other}"]


def replayed(runs: list[int], proposed: list[int], gamma: int) -> dict[str, Any]:
    """Rounds of one document after a prefill that emits the first token, as an engine runs them. `runs`: tokens that a round
    which starts there would get right if it drafted without end.
    """
    found: dict[str, Any] = {name: np.zeros(gamma + 1) for name in ("of", "full")}
    found |= {name: np.zeros(gamma) for name in ("accepted", "tested", "drafted")}
    place = 1
    while place < len(runs):
        ready, left = min(gamma, proposed[place]), len(runs) - place
        kept = min(ready, runs[place])
        found["of"][ready] += 1
        found["full"][ready] += ready > 0 and kept == ready
        found["drafted"][:ready] += 1
        found["accepted"][:kept] += 1
        found["tested"][: min(ready, kept + 1, left)] += 1
        place += min(kept + 1, left)
    return found | {"rounds": found["of"].sum(), "tokens": float(len(runs) - 1)}


def runs_of(rows: pd.DataFrame) -> list[int]:
    """From each position on, how many tokens in a row the draft gets right: a lookup those that it copies from there."""
    if rows["accepted_run"].notna().any():
        return rows["accepted_run"].fillna(0).astype(int).tolist()
    found = [0]
    for agrees in reversed(((rows["draft_top"] == rows["token"]) & (rows["proposed"] > 0)).tolist()):
        found.append(found[-1] + 1 if agrees else 0)
    return found[:0:-1]


def step_times(run: Path) -> dict[tuple[str, str, int], float]:
    """The medians of the steps at batch 1, in ms, of a run that was timed at one context; none if it was not timed."""
    if not (run / "latency.parquet").exists():
        return {}
    rows = pd.read_parquet(run / "latency.parquet").query("batch == 1 and step != 'prefill'")
    return {(row.model, row.step, row.tokens): row.median_ms for row in rows.itertuples()}


def cost_of(draft: str, gamma: int, ms: dict[tuple[str, str, int], float]) -> tuple[np.ndarray[Any, Any], float]:
    """What a round of m = 0..gamma drafts costs in decode steps, and what the step after a full one costs more."""
    decode, draft_ms = ms["target", "decode", 1], ms.get((draft, "draft", 1), 0.0)
    kept = ms.get(("target", "bookkeeping", 1), 0.0) + ms.get((draft, "bookkeeping", 1), 0.0)
    rounds = [
        (decode if not m else ms["target", "verify", m + 1])
        + m * draft_ms
        + kept * (m > 0)
        + ms.get((draft, "lookup", 1), 0)
        for m in range(gamma + 1)
    ]
    more = max(ms.get((draft, "draft", 2), draft_ms) - draft_ms, 0.0)
    return np.array(rounds) / decode, more / decode


def main() -> int:
    """Recompute and compare."""
    run, report = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    log = pd.read_parquet(run / "positions").sort_values(["draft", "document", "position"])
    texts = pd.read_parquet(run / "documents.parquet").set_index("document")
    ms, found, sums = step_times(run), Comparison(), {}
    for result in [*report["sections"]["drafts"], *report["sections"]["rules"]]:
        where = f"{result['domain']}, {result['draft']}, {result['rule']}"
        column = f"accept_{result['rule']}"
        rows = log[(log["draft"] == result["draft"]) & (log["domain"].astype(str) == result["domain"])]
        rows = rows[rows["document"].map(texts["continuation"].astype(str)) == result["continuation"]]
        if column not in rows:
            continue
        proposed = rows["proposed"] > 0
        found.of("positions", where, result["positions"], len(rows))
        found.of("documents", where, result["documents"], rows["document"].nunique())
        found.of("coverage", where, result["coverage"], proposed.mean())
        found.of("alpha", where, result["alpha"]["value"], rows.loc[proposed, column].to_numpy(float).sum() / proposed.sum())
        if result["mismatches"] is not None:
            found.of("mismatches", where, result["mismatches"], (rows["token"] != rows["target_top"]).mean())
        if result["continuation"] != "greedy" or result["rule"] != "strict":
            continue
        documents = [(runs_of(each), each["proposed"].tolist()) for _, each in rows.groupby("document")]
        chosen = next(item for item in result["gammas"] if item["gamma"] == result["gamma"])
        for item in result["gammas"]:
            gamma = item["gamma"]
            each = [replayed(runs, ready, gamma) for runs, ready in documents]
            total = {name: sum(one[name] for one in each) for name in each[0]}
            price, more = cost_of(result["draft"], gamma, ms)
            spent = np.array([one["of"] @ price + more * one["full"].sum() for one in each])
            tokens = np.array([one["tokens"] for one in each])
            sums.setdefault((result["draft"], gamma), []).append((total["rounds"], spent.sum(), tokens.sum()))
            at = f"{where}, gamma {gamma}"
            found.of("rounds", at, item["rounds"], total["rounds"])
            found.of("tokens per round", at, item["tokens_per_round"]["value"], tokens.sum() / total["rounds"])
            began, kept = total["drafted"][0], total["accepted"].sum()
            found.of("acceptance length", at, item["acceptance_length"], 1 + kept / began)
            found.of("accepted per drafted", at, item["accepted_per_drafted"], kept / total["drafted"].sum())
            found.of("marginal", at, item["marginal"], total["accepted"] / began)
            with np.errstate(invalid="ignore"):
                found.of("conditional", at, item["conditional"], total["accepted"] / total["tested"])
            found.of("reached", at, item["reached"], total["tested"])
            found.of("break-even", at, item["break_even_length"], spent.sum() / total["rounds"])
            found.of("full round", at, item["full_round_cost"], price[-1])
            found.of("verification", at, item["verify_cost"], ms["target", "verify", gamma + 1] / ms["target", "decode", 1])
            speeds = (tokens / spent)[tokens > 0]
            ends = [item["of_documents"][name] for name in ("p10", "p50", "p90", "slower")]
            found.of("of documents", at, ends, [*np.percentile(speeds, [10, 50, 90]), (speeds < 1).mean()])
            of_chosen = chosen["speedup"]["value"] * chosen["break_even_length"] / chosen["tokens_per_round"]["value"]
            found.of("speedup", at, item["speedup"]["value"], of_chosen * tokens.sum() / spent.sum())
    weights = log.drop_duplicates(["document"])["document"].map(texts["continuation_tokens"])
    by_domain = weights.groupby(log.drop_duplicates(["document"])["domain"].astype(str).to_numpy()).sum()
    for domain, share in report["traffic"]["weights"].items():
        found.of("weights", domain, share, by_domain[domain] / by_domain.sum())
    for item in report["drafts"]:
        draft, named = item["answer"]["draft"], item["answer"]["gamma"]
        for at in item["by_gamma"]:
            if (key := (draft, at["gamma"])) in sums:
                rounds, spent, tokens = np.sum(sums[key], axis=0)
                own = np.sum(sums[draft, named], axis=0)
                found.of("traffic's tokens per round", str(key), at["tokens_per_round"], tokens / rounds)
                shown = item["answer"]["speedup"]["value"] * (tokens / spent) / (own[2] / own[1])
                found.of("traffic's speedup", str(key), at["speedup"]["value"], shown)
    print(*(f"{count:6} equal: {name}" for name, count in found.equal.items()), sep="\n")
    print(*found.off, f"{sum(found.equal.values())} values are equal, {len(found.off)} are not", sep="\n")
    return 1 if found.off else 0


if __name__ == "__main__":
    sys.exit(main())
