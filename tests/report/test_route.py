"""The route: pools of servers that half of the documents choose and the other half tests, and the answer of each domain."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alphaprof.costs.speedup import Decoded, Mix, StepTimes, without_draft
from alphaprof.log.run import Run
from alphaprof.report.build import Report, build_report
from alphaprof.report.inputs import ReportInputs, draft_pools
from alphaprof.report.model import ServerPool
from alphaprof.report.speeds import speedup_interval
from alphaprof.report.verdict import held_out
from alphaprof.totals.documents import lots_of
from alphaprof.totals.pool import DocumentTotals
from tests.conftest import slow
from tests.reporting import reported
from tests.synthetic import Domain, Recipe, stored_totals, write_run

Option = tuple[str, int] | None

# The draft model is right in code, and hardly ever in notes; prompt lookup finds as much everywhere.
DOMAINS = {
    "code": Domain(documents=40, alpha=0.95, spread=0.03),
    "chat": Domain(documents=48, alpha=0.3, spread=0.05),
    "notes": Domain(documents=24, alpha=0.03, spread=0.02),
}
MIXED = Recipe(domains=DOMAINS, lookups=("ngram",), gammas=(1, 4), decision={"min_speedup": 1.05})
WEIGHTS = {"code": 0.6, "chat": 0.15, "notes": 0.25}
# One draft model that costs half a step: from code it gains, in chat nothing pays.
DEAR = Recipe(
    domains={"code": DOMAINS["code"], "chat": DOMAINS["notes"]},
    gammas=(1, 4),
    draft_ms=2.0,
    decision={"min_speedup": 1.05, "min_route_gain": 0.03},
)
ALIKE = Recipe(domains={"a": DOMAINS["code"], "b": dataclasses.replace(DOMAINS["code"], documents=30)}, gammas=(4,))


def asked(run: Run, by: str = "domain", **decision: Any) -> Report:
    """The report of a run with another decision."""
    config = run.manifest.config
    return build_report(run, config=config | {"decision": config["decision"] | decision, "route": {"by": by}})


class Anew:
    """A run read again: tokens and times of its documents by every option, from the stored totals and the recipe's times."""

    def __init__(self, run: Run, recipe: Recipe) -> None:
        self.options: list[Option] = [None]
        documents = run.documents().to_pandas().set_index("document")
        self.domain, self.tokens, self.spent = documents["domain"].astype(str).to_numpy(), np.zeros(0), {}
        for draft in run.manifest.drafts:
            totals = stored_totals(run, draft)
            totals = totals[totals["rule"] == "strict"].set_index("document").loc[documents.index]
            self.tokens = totals["tokens"].to_numpy(dtype=float)
            for gamma in run.gammas:
                drafted = np.array(totals[f"drafted_depths_{gamma}"].tolist()).sum(1)
                each = recipe.extra_ms + (recipe.draft_ms if draft in recipe.drafts else 0.0)
                once = 10 + (0.0 if draft in recipe.drafts else recipe.lookup_ms)
                self.options.append((draft, gamma))
                self.spent[draft, gamma] = (totals[f"rounds_{gamma}"].to_numpy() * once + drafted * each) / 10
        self.spent[None] = self.tokens
        lots = {name: lots_of(documents["prompt_hash"][self.domain == name].tolist()) for name in set(self.domain)}
        tests = held_out(lots)
        self.tested = np.zeros(len(self.domain), dtype=bool)
        for name, mask in tests.items():
            self.tested[self.domain == name] = mask

    def time(self, route: dict[str, Option], weights: dict[str, float] | None, tested: bool) -> float:
        """The time of one half's documents by a route, in units of that without drafts."""
        spent, tokens = {}, {}
        for name, option in route.items():
            rows = (self.domain == name) & (self.tested == tested)
            spent[name], tokens[name] = self.spent[option][rows].sum(), self.tokens[rows].sum()
        if weights is None:
            return float(sum(spent.values()) / sum(tokens.values()))
        return float(sum(weights[name] * spent[name] / tokens[name] for name in route))

    def best(self, pools: Sequence[Option], weights: dict[str, float] | None) -> tuple[float, dict[str, Option]]:
        """The fastest route over some pools: every domain to any of them, whatever it may be."""
        names = [name for name in dict.fromkeys(self.domain) if weights is None or weights[name] > 0]
        routes = [dict(zip(names, each, strict=True)) for each in itertools.product(pools, repeat=len(names))]
        return min(((self.time(route, weights, False), route) for route in routes), key=lambda item: item[0])

    def chosen(self, weights: dict[str, float] | None, least_gain: float) -> tuple[Option, dict[str, Option]]:
        single = min(self.options, key=lambda option: self.best([option], weights)[0])
        pairs = list(itertools.combinations(self.options, 2))
        two = min(pairs, key=lambda pair: self.best(pair, weights)[0])
        three = min((self.best([*two, option], weights) for option in self.options), key=lambda item: item[0])
        before = self.best(two, weights)
        return single, (three if before[0] >= (1 + least_gain) * three[0] else before)[1]


def goes(pools: Sequence[ServerPool]) -> dict[str, Option]:
    return {
        domain: None if pool.draft is None or pool.gamma is None else (pool.draft, pool.gamma)
        for pool in pools
        for domain in pool.domains
    }


SEARCHED = [(MIXED, None, 0.0), (MIXED, WEIGHTS, 0.03), (DEAR, WEIGHTS, 0.0), (DEAR, None, 0.5)]
MORE = [case for case in itertools.product([MIXED, DEAR], [None, WEIGHTS], [0.0, 0.03, 0.5]) if case not in SEARCHED]


@pytest.mark.parametrize(("recipe", "weights", "least_gain"), [*SEARCHED, *slow(MORE)])
def test_the_route_is_that_of_a_search_through_all(
    tmp_path: Path, recipe: Recipe, weights: dict[str, float] | None, least_gain: float
) -> None:
    """Chosen on one half, and what it gains on the other, with every route tried on totals that are added up anew."""
    if weights is not None:
        kept = {name: weights[name] for name in recipe.domains}
        weights = {name: share / sum(kept.values()) for name, share in kept.items()}
    run = write_run(tmp_path / "run", recipe)
    report, anew = asked(run, weights=weights, min_route_gain=least_gain), Anew(run, recipe)
    route = report.routing
    single, assigned = anew.chosen(weights, least_gain)
    assert goes(route.pools) == assigned
    assert set(goes([route.over]).values()) == {single}
    times = [anew.time(way, weights, True) for way in (dict.fromkeys(assigned, single), assigned)]
    assert route.gain.value == pytest.approx(times[0] / times[1] - 1)
    assert route.speedup.value == pytest.approx(1 / times[1])
    assert route.documents == anew.tested.sum()
    shares = weights or report.traffic.weights
    for pool in (*route.pools, route.over):
        assert pool.share == pytest.approx(sum(shares[domain] for domain in pool.domains))
    assert [pool.share for pool in route.pools] == sorted((pool.share for pool in route.pools), reverse=True)


def pools_of(run: Run) -> tuple[dict[str, dict[str, DocumentTotals]], dict[str, StepTimes], ReportInputs]:
    inputs = ReportInputs.of(run, "engine", run.manifest.profile)
    pools: dict[str, dict[str, DocumentTotals]] = {}
    for item in draft_pools(inputs, inputs.deciding):
        pools.setdefault(item.draft, {})[item.domain] = item.pool
    return pools, dict(inputs.costs.timing(1).times), inputs


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["as observed", "given weights"])
def test_intervals_of_a_route_are_those_of_its_tested_documents(tmp_path: Path, weights: dict[str, float] | None) -> None:
    run = write_run(tmp_path / "run", MIXED)
    route, (pools, times, inputs) = asked(run, weights=weights).routing, pools_of(run)
    tested = held_out({name: pools["small"][name].units.lots for name in DOMAINS})

    def way(assigned: dict[str, Option]) -> list[Decoded]:
        decoded = []
        for domain in DOMAINS:
            draft, gamma = assigned[domain] or ("small", 1)
            one = pools[draft][domain].counts(gamma).rows(tested[domain]), times[draft]
            decoded.append(one if assigned[domain] else without_draft(*one))
        return decoded

    first, second = way(goes([route.over])), way(goes(route.pools))
    second = [one if goes([route.over])[name] == goes(route.pools)[name] else two for name, one, two in each(first, second)]
    mix = Mix.of(weights) if weights else Mix(tuple(DOMAINS), None, inputs.strata)
    gain = speedup_interval(mix.gain(first, second), 0.95)
    assert dataclasses.astuple(route.gain) == pytest.approx([value - 1 for value in dataclasses.astuple(gain)])
    assert route.speedup == speedup_interval(mix.routed(second), 0.95)


def each(first: list[Decoded], second: list[Decoded]) -> list[tuple[str, Decoded, Decoded]]:
    return list(zip(DOMAINS, first, second, strict=True))


def test_a_domain_where_nothing_pays_goes_without_speculation(tmp_path: Path) -> None:
    report = reported(tmp_path, DEAR)
    route = report.routing
    assert goes(route.pools) == {"code": ("small", 4), "chat": None}
    assert route.worth_it
    assert report.route == route.pools
    answers = {item.domain: item.best for item in report.domains}
    assert (answers["code"].verdict, answers["chat"].verdict) == ("GO", "NO-GO")
    speedup = answers["chat"].speedup
    assert speedup.high < 1


def test_what_is_deployed_follows_the_verdict(tmp_path: Path) -> None:
    """One pool with the draft, none while undecided, and one without a draft."""
    run = write_run(tmp_path / "run", ALIKE)
    whole = asked(run).speedup
    for least, verdict, pools in (
        (1.05, "GO", (ServerPool("small", 4, ("a", "b"), 1.0),)),
        (whole.value, "UNDECIDED", ()),
        (9.0, "NO-GO", (ServerPool(None, None, ("a", "b"), 1.0),)),
    ):
        report = asked(run, min_speedup=least)
        assert (report.verdict, report.route, report.routing) == (verdict, pools, None)


@pytest.mark.parametrize("asks", ["min_route_gain", "min_speedup"])
def test_both_lower_ends_decide_whether_a_route_is_worth_it(tmp_path: Path, asks: str) -> None:
    """At the end itself it is; a little above it is not, and the single pool stays."""
    run = write_run(tmp_path / "run", DEAR)
    report = asked(run, min_speedup=1.0)
    end = report.routing.gain.low if asks == "min_route_gain" else report.routing.speedup.low
    assert end > {"min_route_gain": 0.0, "min_speedup": 1.0}[asks]
    at, above = (asked(run, **{"min_speedup": 1.0, asks: end + more}) for more in (0.0, 1e-6))
    assert (at.routing.worth_it, above.routing.worth_it) == (True, False)
    assert above.routing.pools == at.routing.pools
    assert at.route == at.routing.pools
    assert len(above.route) == (1 if above.verdict != "UNDECIDED" else 0)


def test_a_domain_without_weight_is_in_no_pool(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", MIXED)
    weights = {"code": 0.5, "chat": 0.5, "notes": 0.0}
    for report in (asked(run, weights=weights), asked(run, weights=weights, min_route_gain=0.9)):
        assert {domain for pool in report.route for domain in pool.domains} == {"code", "chat"}
        assert sum(pool.share for pool in report.route) == pytest.approx(1)
        assert {item.domain: item.share for item in report.domains} == weights


def test_fewer_than_five_documents_tell_of_no_gain(tmp_path: Path) -> None:
    """However far apart the domains are: two documents of each are tested, and a fifth would do."""
    code, chat = (Domain(4, alpha, 0.0, 400, 400) for alpha in (1.0, 0.0))
    for documents, worth_it in ((4, False), (6, True)):
        domains = {
            "code": dataclasses.replace(code, documents=documents),
            "chat": dataclasses.replace(chat, documents=documents),
        }
        recipe = dataclasses.replace(DEAR, domains=domains, decision={"min_speedup": 0.5, "min_route_gain": -0.9})
        route = reported(tmp_path / str(documents), recipe).routing
        assert route.documents == documents
        assert route.gain.low > -0.9
        assert route.worth_it == worth_it


def test_the_best_and_the_next_best_by_hand(tmp_path: Path) -> None:
    """Of each domain: what is fastest on one half, and then of the other draft; both by what the other half says."""
    run = write_run(tmp_path / "run", MIXED)
    report, anew = asked(run), Anew(run, MIXED)
    assert [item.share for item in report.domains] == sorted((item.share for item in report.domains), reverse=True)
    for item in report.domains:
        time = {
            option: [anew.time({item.domain: option}, None, tested) for tested in (False, True)]
            for option in anew.options
            if option is not None
        }
        best = min(time, key=lambda option: time[option][0])
        second = min((option for option in time if option[0] != best[0]), key=lambda option: time[option][0])
        assert item.next_best is not None
        assert [(one.draft, one.gamma) for one in (item.best, item.next_best)] == [best, second]
        for one, option in ((item.best, best), (item.next_best, second)):
            assert one.speedup.value == pytest.approx(1 / time[option][1])
        assert item.ahead.value == pytest.approx(time[second][1] / time[best][1])
        pools, times, _ = pools_of(run)
        tested = held_out({item.domain: pools["small"][item.domain].units.lots})[item.domain]
        ways = [[(pools[draft][item.domain].counts(gamma).rows(tested), times[draft])] for draft, gamma in (second, best)]
        assert item.ahead == speedup_interval(Mix((item.domain,), (1.0,)).gain(*ways), 0.95)
