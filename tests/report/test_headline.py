"""A headline that its own draft and gamma confirm: asked for by name they never say otherwise, whatever the noise."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from alphaprof.commands.check import checked
from alphaprof.commands.export.export import export
from alphaprof.costs.timing import step_times
from alphaprof.report.asked import Asked
from alphaprof.report.judge import Judge
from alphaprof.run.reader import Run
from alphaprof.run.schema import LATENCY_COLUMNS, arrow_schema
from tests.reporting import asked
from tests.synthetic import Domain, Recipe, altered, write_run

GAMMAS, ROUNDS, TABLES = tuple(range(1, 9)), 11, 25
STEPS = [("target", "decode" if n == 1 else "verify", n) for n in range(1, 10)] + [("a", "draft", 1), ("b", "draft", 1)]
MS = np.array([10 + 0.3 * n for n in range(9)] + [0.2, 0.2])


def noisy(run: Run, rng: np.random.Generator) -> Run:
    """The same run with step times of 11 rounds, each step off by 10%."""
    ms = MS * np.exp(0.1 * rng.standard_normal((ROUNDS, len(MS))))
    rows = [
        {"model": model, "step": step, "tokens": tokens, "batch": 1, "context": 64, "median_ms": time}
        | {"p10_ms": time, "p90_ms": time, "relative_error": 0.0, "repeats": ROUNDS, "rounds_ms": each.tolist()}
        for (model, step, tokens), time, each in zip(STEPS, step_times(ms), ms.T, strict=True)
    ]
    return altered(run, pa.Table.from_pylist(rows, schema=arrow_schema(LATENCY_COLUMNS)))


def runs(path: Path, seed: int) -> Iterator[Run]:
    """25 runs: one set of documents, whose steps are timed anew."""
    domains = {"code": Domain(documents=14, alpha=0.6, spread=0.15), "chat": Domain(documents=10, alpha=0.45, spread=0.15)}
    run = write_run(path / "run", Recipe(domains, drafts={"a": 0.0, "b": 0.01}, gammas=GAMMAS, seed=seed))
    rng = np.random.default_rng(seed)
    yield from (noisy(run, rng) for _ in range(TABLES))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
def test_nothing_contradicts_the_headline(seed: int, tmp_path: Path) -> None:
    """100 runs in all. The bounds of the headline enclose those of its draft and gamma by name, for the traffic and for each
    domain, so that no threshold lies between them; halves that chose otherwise are the rule.
    """
    torn = 0
    for run in runs(tmp_path, seed):
        profile = run.manifest.profile
        judge = Judge.of(Asked.of(run, profile))
        for domain in (None, "code", "chat"):
            pair, decision = judge.judged(domain, list(judge.candidates))
            assert pair is not None
            assert decision.tested is not None
            torn += decision.tested.choice is not None and set(decision.tested.choice.halves) != {pair}
            _, alone = Judge.of(Asked.of(run, profile.deciding(pair[0], None, pair[1]))).judged(domain, [pair[0]])
            assert decision.low <= alone.low < alone.high <= decision.high
    assert torn > TABLES


def test_a_headline_stands_in_the_gate_and_at_the_fastest_end_of_its_row(tmp_path: Path) -> None:
    """At a threshold that the lower bound just reaches, `check` passes, and so do draft and gamma by name, which `export`
    writes too. No other gamma of the row is shown as faster.
    """
    for run, _ in zip(runs(tmp_path, 9), range(5), strict=False):
        low = asked(run).answer.speedup.low
        report = asked(run, min_speedup=low)
        draft, gamma = report.answer.draft, report.answer.gamma
        assert report.answer.verdict == "GO"
        assert asked(run, min_speedup=low, draft=draft, gamma=gamma).answer.verdict == "GO"
        overrides = [f"decision.min_speedup={low!r}"]
        assert checked(run.path, None, None, None, {}, None, 0.03, overrides).outcome == "pass"
        assert checked(run.path, draft, None, gamma, {}, None, 0.03, overrides).outcome == "pass"
        served = export(f"{run.path}:{draft}", "vllm-config", None, None, None, None, overrides, None).text
        assert json.loads(served)["num_speculative_tokens"] == gamma
        (row,) = [item.by_gamma for item in report.drafts if item.answer.draft == draft]
        assert max(row, key=lambda item: item.speedup.value).gamma == gamma
        for result in report.results:
            assert max(result.gammas, key=lambda item: item.speedup.value).gamma == result.gamma
