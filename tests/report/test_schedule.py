"""Which gamma a server should draft with by load: the fastest, and little is lost by it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np

from alphaprof.config.options import TableCosts
from alphaprof.costs.cost_model import CostModel
from alphaprof.costs.speedup import Mix
from alphaprof.costs.steps import TARGET, StepRow, StepTable
from alphaprof.report.asked import Asked, draft_pools
from alphaprof.report.schedule import GammaByLoad
from alphaprof.run.reader import Run
from alphaprof.stats.estimate import Interval
from alphaprof.totals.pool import DocumentTotals
from tests.loops import each
from tests.synthetic import Domain, Recipe, write_run

BATCHES, CONTEXTS, GAMMAS = (1, 2, 4, 8, 16, 32, 64, 128), (1024, 4096, 16384), tuple(range(1, 9))


def step_ms(tokens: int, batch: int, context: int) -> float:
    """Reading weights overlaps computing, as GPUs do; the cache and each sequence come on top."""
    return float(np.hypot(5.0, 0.06 * batch * tokens) + 2e-6 * batch * context + 0.026 * batch)


def costs_of(run: Run, context: int, noise: Callable[[], float] = lambda: 1.0) -> CostModel:
    """Step times of a GPU, each off by `noise`."""
    rows = []
    for batch in BATCHES:
        for cached in CONTEXTS:
            for n in range(1, 10):
                ms, name = noise() * step_ms(n, batch, cached), "decode" if n == 1 else "verify"
                rows.append(StepRow(TARGET, name, n, batch, cached, ms))
            rows.append(StepRow("small", "draft", 1, batch, cached, noise() * (0.35 + 0.002 * batch)))
    options = TableCosts(source="table", path="times.csv")
    return CostModel(StepTable(rows), options, run.manifest, max(GAMMAS), context)


def load_of(run: Run, pool: DocumentTotals, costs: CostModel) -> GammaByLoad:
    return GammaByLoad("small", [pool], Mix.of({"code": 1.0}), costs, GAMMAS, 0.95)


def value(load: GammaByLoad, batch: int, context: int, gamma: int) -> float:
    """The speedup on all documents of `load`, by its costs."""
    times = load.costs.at(context).times(batch)["small"]
    return load.mix.value(load.mix.decoded([pool.counts(gamma) for pool in load.pools], times)) or 0.0


@each(("alpha", "noise"), [(0.55, 0.0), (0.55, 0.01), (0.8, 0.0), (0.8, 0.01)])
def test_a_schedule_loses_at_most_one_percent(alpha: float, noise: float, tmp_path: Path) -> None:
    """On average over all loads, off where that is right, by samples of 64 documents: against an oracle that knows the
    acceptance of all documents and every cost.
    """
    recipe = Recipe({"code": Domain(documents=400, alpha=alpha, longest=120)}, gammas=GAMMAS)
    run, generator, losses, gammas = write_run(tmp_path / "run", recipe), np.random.default_rng(3), [], set()
    (found,) = draft_pools(Asked.of(run, run.manifest.profile), ["strict"], ["small"])
    known = load_of(run, found.pool, costs_of(run, 1024))
    places = list(product(BATCHES, CONTEXTS))
    truth = {(*place, gamma): value(known, *place, gamma) if gamma else 1.0 for place in places for gamma in (0, *GAMMAS)}
    for _ in range(3):
        sample = found.pool.rows(generator.choice(400, 64, replace=False))
        load = load_of(run, sample, costs_of(run, 1024, lambda: float(np.exp(generator.normal(0, noise)))))
        best = max(GAMMAS, key=partial(value, load, 1, 1024))
        for item in load.at_loads(1, best, Interval(2.0, 2.0, 2.0), everywhere=True):
            place = item.concurrency, item.context
            losses.append(max(truth[*place, gamma] for gamma in (0, *GAMMAS)) / truth[*place, item.gamma] - 1)
            gammas.add(item.gamma)
    assert len(losses) == 3 * len(places)
    assert np.mean(losses) <= 0.01
    assert len(gammas) > 2  # else one gamma is right everywhere
