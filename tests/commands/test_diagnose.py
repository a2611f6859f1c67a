"""Does a server do as predicted, and if not, why: against counts whose rates are known, and pages as engines write them."""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from alphaprof.commands import diagnose as module
from alphaprof.commands.diagnose import (
    ERROR,
    Diagnosis,
    Served,
    as_mixture,
    ask_server,
    compare_prompts,
    compared,
    diagnose,
    digests_of,
    rendered_otherwise,
    served_run,
    shape_of,
)
from alphaprof.errors import AlphaprofError
from alphaprof.report.build import build_report
from alphaprof.run.reader import Run, RunDraft
from alphaprof.servers import pages
from alphaprof.servers.pages import bucket_quantile, page_of, times_of
from tests.commands.test_first_look import page
from tests.commands.test_import import STRICT, as_requests, counted, end_wrong, failure, imported, invoke, response
from tests.commands.test_import_sglang import STRICT as SGLANG
from tests.commands.test_import_sglang import imported as served_by_sglang
from tests.commands.test_import_sglang import of_rounds
from tests.loops import each
from tests.reporting import only
from tests.synthetic import Domain, Recipe, altered, rewritten, write_run

TREE = (*SGLANG, "--drafting", "tree", "--gamma", "3")
RECIPE = Recipe(
    domains={"code": Domain(documents=60, alpha=0.8, shortest=60, longest=120)},
    gammas=(2, 3, 7),
    lookups=("ngram",),
    seed=1,
)
# Shares of rounds by depth that people published of live servers: a wrong KV scale, as it was and as it should be; a block
# drafter whose window was run as full attention.
SCALE, RIGHT_SCALE, WINDOW = (0.71, 0.42, 0.21, 0.10), (0.86, 0.71, 0.55, 0.42), (0.60, 0.39, 0.22, 0.11, 0.06, 0.0, 0.0)


@pytest.fixture(scope="module")
def side(tmp_path_factory: pytest.TempPathFactory) -> RunDraft:
    return RunDraft(write_run(tmp_path_factory.mktemp("diagnose") / "run", RECIPE), "small")


def chain(shares: Sequence[float], rounds: float = 20000, units: int = 1, **more: Any) -> Served:
    """What was counted if these shares are accepted at each depth, of the drafts that are reached."""
    counts = np.tile(rounds / units * np.cumprod([1.0, *shares]), (units, 1))
    return Served("server", counts[:, 0], counts[:, :-1], counts[:, 1:], float(counts[:, 1:].sum()), **more)


def as_page(shares: Sequence[float], rounds: int = 20000, **labels: Any) -> str:
    """A page of vLLM after rounds that accept these shares at each depth."""
    counts = np.rint(rounds * np.cumprod([1.0, *shares])).astype(int)
    exactly = [*(counts[:-1] - counts[1:]), counts[-1]]
    lots = [(len(shares), kept) for kept, count in enumerate(exactly) for _ in range(count)]
    return page({"0": lots}, gamma=len(shares), **labels)


def shares_of(side: RunDraft, gamma: int) -> list[float]:
    return [float(share) for share in served_run(side, gamma, None).estimates()[0][:-1]]


def of(answer: Diagnosis, state: str = "possible") -> set[str]:
    return {cause.name for cause in answer.causes if cause.state == state}


def test_shares_are_those_of_the_log(side: RunDraft) -> None:
    """Counted from rounds that are walked one by one; those that end with the text test fewer drafts."""
    rounds = [row["metrics"]["speculative_decoding"]["acceptance_histogram"] for row in as_requests(side.run, "small", 3)]
    histogram = np.array(rounds).sum(0)
    run = served_run(side, 3, None)
    assert run.rounds.sum() == histogram.sum()
    assert run.accepted.sum(0).tolist() == [histogram[depth:].sum() for depth in (1, 2, 3)]
    tested = run.tested.sum(0)
    assert tested[0] == histogram.sum()
    ended = [histogram[depth:].sum() - tested[depth] for depth in (1, 2)]
    assert all(0 < lost <= 60 for lost in ended)  # at most the last round of each document


def test_independent_rounds_are_compared_as_two_shares_are() -> None:
    """Documents of one round, so that nothing is correlated: the pooled variance of two binomials, by scipy."""
    rng = np.random.default_rng(0)
    ones, rounds = rng.random(400) < 0.6, np.ones(400)
    run = Served("run", rounds, rounds[:, None], ones[:, None].astype(float), float(ones.sum()))
    known = chain([0.5], 1000)
    ((depth,), *_), ours = compared(run, known), ones.mean()
    common = (400 * ours + 500) / 1400
    effect = max(1.0, 400 / 399)  # of a sample's variance
    error = math.sqrt(common * (1 - common) * effect * (1 / 400 + 1 / 1000))
    far = stats.t.ppf(1 - ERROR / 4, 399) * error + (1 / 400 + 1 / 1000) / 2
    assert depth.difference is not None
    assert depth.difference.value == pytest.approx(0.5 - ours)
    assert depth.difference.high - depth.difference.value == pytest.approx(far, rel=1e-6)


def test_rounds_of_one_request_are_not_independent() -> None:
    """A run whose documents accept all or nothing learns as little from 100 rounds of a request as from one."""
    always = np.arange(60) % 2 == 0
    rounds = np.full(60, 100.0)
    run = Served("run", rounds, rounds[:, None], (rounds * always)[:, None], float((rounds * always).sum()))
    known = chain([0.6], 2000)  # 20 requests
    (depth,), _, sign, missed, own, _ = compared(run, known)
    assert (depth.sign, sign) == (0, 0)
    assert missed > own > 0.3
    (longer,), *_ = compared(run, chain([0.6], 2000, requests=5))
    assert longer.difference is not None
    assert depth.difference is not None
    assert longer.difference.high > 1.3 * depth.difference.high


def test_requests_that_differ_more_than_documents_widen_what_they_say() -> None:
    """18 of 30 requests accept everything and the others nothing; the run's documents are all alike."""
    run, rounds = chain([0.75], 6000, units=60), np.full(30, 50.0)
    kept = rounds * (np.arange(30) < 18)
    (by_request,), *_ = compared(run, Served("requests", rounds, rounds[:, None], kept[:, None], float(kept.sum())))
    (together,), *_ = compared(run, chain([0.6], 1500))
    assert (by_request.sign, together.sign) == (0, -1)


def test_of_servers_that_do_as_predicted_one_in_a_hundred_is_said_to_differ(side: RunDraft) -> None:
    """Their requests are documents of the run, drawn anew. docs/research/log.md has 2,000 of each kind."""
    run, rng, wrong = served_run(side, 3, None), np.random.default_rng(0), 0
    for _ in range(300):
        rows = rng.integers(60, size=40)
        sums = [getattr(run, name)[rows].sum(0, keepdims=True) for name in ("rounds", "tested", "accepted")]
        depths, _, sign, *_ = compared(run, Served("drawn", *sums, float(sums[2].sum()), requests=40))
        wrong += bool(shape_of(depths, sign, 2000)[0])
    assert wrong <= 7  # of 300 at 1%: more in one of 100 cases


@each(
    ("change", "causes"),
    [
        ((1.0,) * 7, set()),
        ((0.7, *(1.0,) * 6), {"template", "thinking", "draft", "traffic", "context", "rule"}),
        ((0.8, *(0.8,) * 6), {"template", "thinking", "draft", "traffic", "context", "rule", "feedback"}),
        ((1.0, 0.75, 0.65, 0.6, 0.5, 0.5, 0.5), {"feedback", "draft", "window"}),
        ((1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0), {"window"}),
        ((0.0,) * 7, {"draft", "feedback"}),
        ((1.15, *(1.0,) * 6), {"template", "thinking", "draft", "traffic", "context", "rule"}),
    ],
)
def test_each_shape_has_its_causes(change: Sequence[float], causes: set[str], side: RunDraft, tmp_path: Path) -> None:
    shares = [min(1.0, share * factor) for share, factor in zip(shares_of(side, 7), change, strict=True)]
    (tmp_path / "page.txt").write_text(as_page(shares))
    answer = diagnose(side, [str(tmp_path / "page.txt")])
    assert answer.outcome == ("differs" if causes else "as_predicted"), answer.reason
    assert of(answer) == causes


def test_two_depths_that_lose_drafts_are_more_than_the_first() -> None:
    depths, _, sign, *_ = compared(chain([0.8, 0.6, 0.6], 8000, units=80), chain([0.6, 0.4, 0.6]))
    assert [depth.sign for depth in depths] == [-1, -1, 0]
    words, causes = shape_of(depths, sign, 20000)
    assert ("later ones too" in words, "feedback" in causes) == (True, True)


@each(
    ("requests", "more", "sure"),
    [(2, 3.0, True), (4, 3.0, True), (3, 3.0, False), (2, 0.0, False), (3, 0.0, False), (2, 2.5, False)],
)
def test_prompts_that_are_the_runs_own_tell_to_the_token(requests: int, more: float, sure: bool) -> None:
    """Each of them as often, and so many tokens longer: with another number of requests it may be chance."""
    run = chain([0.8], units=2, requests=2, prompts=np.array([10.0, 50.0]))
    found, out, surely = compare_prompts(run, chain([0.8], requests=requests, prompts=np.array([30.0 + more])))
    assert (surely, set(found)) == (sure, {"template", "thinking"} if sure else set())
    assert bool(out) == (requests % 2 == 0 and more == 0)


@each(
    ("right", "live", "causes"),
    [(RIGHT_SCALE, SCALE, {"feedback"}), ((0.86, 0.72, 0.6, 0.5, 0.42, 0.35, 0.3), WINDOW, {"window"})],
)
def test_the_shapes_that_people_published_have_their_causes(
    right: Sequence[float], live: Sequence[float], causes: set[str]
) -> None:
    """A run of 80 documents that predicts what is right."""
    steps = [after / before for before, after in zip((1.0, *right), right, strict=False)]
    known = [after / before if before else 0.0 for before, after in zip((1.0, *live), live, strict=False)]
    depths, _, sign, *_ = compared(chain(steps, 8000, units=80), chain(known, 1000))
    found = {*shape_of(depths, sign, 1000)[1]}
    assert causes <= found
    assert ("window" in found) == (causes == {"window"})


def test_shares_without_rounds_are_never_as_predicted(side: RunDraft) -> None:
    marginal = np.cumprod(shares_of(side, 3)).tolist()
    assert diagnose(side, shares=marginal, rounds=20000).outcome == "as_predicted"
    answer = diagnose(side, shares=marginal)
    assert (answer.outcome, answer.rounds) == ("too_few", None)
    assert "give --rounds" in answer.reason
    assert diagnose(side, shares=[0.3, 0.1, 0.05]).outcome == "differs"


def test_a_few_rounds_are_too_few_to_tell(side: RunDraft, tmp_path: Path) -> None:
    (tmp_path / "page.txt").write_text(as_page(shares_of(side, 3), 60))
    answer = diagnose(side, [str(tmp_path / "page.txt")])
    assert answer.outcome == "too_few"
    assert answer.visible > 0.25
    found = invoke("diagnose", side.label, tmp_path / "page.txt", "--undecided", "fail")
    assert failure(found)[0] == 11


def test_another_number_of_drafts_is_found_and_the_rest_is_as_predicted(side: RunDraft, tmp_path: Path) -> None:
    (tmp_path / "page.txt").write_text(as_page(shares_of(side, 2)))
    answer = diagnose(side, [str(tmp_path / "page.txt")], gamma=3)
    assert (answer.outcome, of(answer, "found"), of(answer)) == ("differs", {"gamma"}, set())
    assert "drafts 2 tokens a round; 3 were decided" in answer.reason
    assert all(depth.sign == 0 for depth in answer.depths)


def test_a_server_that_trims_rounds_is_compared_by_first_drafts(side: RunDraft, tmp_path: Path) -> None:
    """Half of its rounds have two drafts of three."""
    half = [
        (drafted, min(kept, drafted))
        for drafted in (2, 3)
        for kept, count in enumerate((231, 154, 115, 500))
        for _ in range(count)
    ]
    (tmp_path / "page.txt").write_text(page({"0": half * 10}))
    answer = diagnose(side, [str(tmp_path / "page.txt")])
    assert (answer.outcome, of(answer, "found"), len(answer.depths)) == ("as_predicted", set(), 1)
    assert "2.50 tokens a round on average, the run 3: only first drafts are compared" in answer.reason


def test_a_page_and_then_an_address_are_asked_as_an_address_alone(
    side: RunDraft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What both counted is subtracted, and the server's template and weights are compared."""
    good = shares_of(side, 3)
    before, url = tmp_path / "before.txt", "http://127.0.0.1:1"
    before.write_text(as_page(good, rounds=10))
    monkeypatch.setattr(pages, "fetched", lambda *_: as_page([0.8 * share for share in good]).encode())
    monkeypatch.setattr(module, "ask_server", lambda _side, _rule, place: ({"template": f"asked {place}"}, {}))
    answer = diagnose(side, [str(before), url])
    assert (answer.outcome, [cause.evidence for cause in answer.causes if cause.state == "found"]) == (
        "differs",
        [f"asked {url}"],
    )


def test_few_documents_are_named_as_what_is_too_few(tmp_path: Path) -> None:
    """Six documents that differ much, and rounds without end: so many documents would do, by the error of the run alone."""
    recipe = Recipe(domains={"code": Domain(documents=6, alpha=0.6, spread=0.3)}, gammas=(3,))
    side = RunDraft(write_run(tmp_path / "run", recipe), "small")
    (tmp_path / "page.txt").write_text(as_page(shares_of(side, 3)))
    answer = diagnose(side, [str(tmp_path / "page.txt")])
    assert answer.outcome == "too_few_documents"
    assert answer.documents_needed is not None
    recipe = dataclasses.replace(recipe, domains={"code": Domain(documents=answer.documents_needed, alpha=0.6, spread=0.3)})
    enough = RunDraft(write_run(tmp_path / "enough", recipe), "small")
    (tmp_path / "more.txt").write_text(as_page(shares_of(enough, 3), 200_000))
    assert diagnose(enough, [str(tmp_path / "more.txt")]).outcome == "as_predicted"
    found = invoke("diagnose", side.label, tmp_path / "page.txt", "--undecided", "fail")
    assert failure(found)[0] == 11
    assert "TOO FEW DOCUMENTS" in found.output
    assert f"profile about {answer.documents_needed} documents" in found.output


def test_other_shares_of_the_runs_own_domains_are_asked_first(tmp_path: Path) -> None:
    """A server that serves one of two domains; one that keeps 30% fewer first drafts, and one whose second drafts
    are broken, which no mixture does.
    """
    domains = {"code": Domain(documents=80, alpha=0.9, spread=0.05), "chat": Domain(documents=80, alpha=0.4, spread=0.05)}
    side = RunDraft(write_run(tmp_path / "run", Recipe(domains=domains, gammas=(3,))), "small")
    own, code = shares_of(side, 3), served_run(side, 3, "code").estimates()[0][:-1].tolist()
    said = "its own domains in other shares of the rounds do the same"
    for name, shares, first, among in (
        ("code", code, "traffic", said),
        ("fewer", [0.7 * own[0], *own[1:]], "template", "later ones as predicted"),
        ("broken", [own[0], 0.3 * own[1], own[2]], "feedback", "fewer from depth 2 on"),
    ):
        (tmp_path / f"{name}.txt").write_text(as_page(shares))
        answer = diagnose(side, [str(tmp_path / f"{name}.txt")])
        assert answer.outcome == "differs"
        assert (answer.causes[0].name, among in answer.reason) == (first, True), answer.reason
        assert (said in answer.reason) == (name == "code")


def test_a_mixture_and_a_loss_everywhere_that_do_the_same_are_both_said() -> None:
    """Domains that differ in first drafts alone."""
    one, other = chain([0.8, 0.6, 0.6], 4000, units=40), chain([0.4, 0.6, 0.6], 4000, units=40)
    both = {
        name: np.concatenate([getattr(side, name) for side in (one, other)]) for name in ("rounds", "tested", "accepted")
    }
    domains = {"code": np.arange(40), "chat": np.arange(40, 80)}
    run = Served("run", **both, kept=one.kept + other.kept, requests=80, domains=domains)
    said = "its own domains in other shares of the rounds do the same (code 25%, chat 75%)"
    assert as_mixture(run, chain([0.5, 0.6, 0.6])) == (
        f"{said}, and so does the same loss of first drafts in all of them",
        True,
    )
    assert as_mixture(run, chain([0.5, 0.2, 0.6])) is None
    assert as_mixture(one, chain([0.5, 0.6, 0.6])) is None  # of one domain there is no mixture


def test_padded_rounds_of_prompt_lookup_lower_the_rate_alone(side: RunDraft, tmp_path: Path) -> None:
    lookup = RunDraft(side.run, "ngram")
    run = served_run(lookup, 3, None)
    assert run.every is not None
    padded = [run.every, *run.accepted.sum(0)]
    (tmp_path / "page.txt").write_text(as_page([after / before for before, after in pairwise(padded)], round(padded[0])))
    answer = diagnose(lookup, [str(tmp_path / "page.txt")])
    assert of(answer, "found") == {"lookup"}
    assert all(depth.sign == 0 for depth in answer.depths)


def test_requests_that_were_imported_bring_their_own_variation_and_rule(side: RunDraft, tmp_path: Path) -> None:
    rows = as_requests(side.run, "small", 3)
    served = imported(tmp_path, rows)
    answer = diagnose(side, [str(served.path)])
    assert (answer.outcome, answer.requests) == ("as_predicted", 60)
    assert answer.domains == ()  # their domain is called traffic
    other = imported(tmp_path, rows, "--rule", "one_hot", "--temperature", "0.7", name="sampled")
    code, text = failure(invoke("diagnose", side.label, other.path))
    assert (code, "share no text with rounds under one_hot: none; sampled at temperature 0.7" in text) == (12, True)


@pytest.fixture(scope="module")
def two_domains(tmp_path_factory: pytest.TempPathFactory) -> Run:
    domains = {
        name: Domain(documents=40, alpha=alpha, shortest=60, longest=90) for name, alpha in (("code", 0.8), ("chat", 0.5))
    }
    run = write_run(tmp_path_factory.mktemp("domains") / "run", Recipe(domains=domains, gammas=(3,), seed=3))
    return rewritten(run, "small", end_wrong)


def test_each_domain_of_requests_stands_beside_its_own(two_domains: Run, tmp_path: Path) -> None:
    """An engine that does what the log says differs by nothing, as two samples by both intervals; then chat loses drafts."""
    side, rows = RunDraft(two_domains, "small"), as_requests(two_domains, "small", 3)
    asked = (*STRICT, "--domain-key", "domain", "--draft", "small")
    answer = diagnose(side, [str(imported(tmp_path, rows, *asked, name="engine").path)])
    assert (answer.outcome, answer.paired, answer.notes) == ("as_predicted", False, ())
    report = build_report(two_domains)
    for item in answer.domains:
        expected = only(report, item.domain, "small", "strict").gammas[0].tokens_per_round
        assert (item.predicted, item.measured) == pytest.approx((expected.value, expected.value))
        half = math.hypot(expected.high - expected.value, expected.value - expected.low)
        assert half < item.difference.high < 2.5 * half  # at 1% over both domains, and not 5% each
    assert {item.domain for item in answer.domains} == {"code", "chat"}
    for row in rows:
        if row["domain"] == "chat":
            rounds = row["usage"]["completion_tokens"] - 1
            row["metrics"]["speculative_decoding"] = counted([0] * rounds, [3] * rounds, 3)
    lost = imported(tmp_path, [row for row in rows if row["domain"] == "chat"], *asked, name="lost")
    answer = diagnose(side, [str(lost.path)])
    assert [(item.domain, item.measured, item.sign) for item in answer.domains] == [("chat", 1.0, -1)]
    found = invoke("diagnose", side.label, lost.path).stdout
    assert re.search(r"^ chat +40 / 40 .* lower *$", found, re.MULTILINE), found


def test_a_domain_alone_can_differ(two_domains: Run, tmp_path: Path) -> None:
    """Code gains what chat loses, so that the depths of all traffic show nothing."""
    side = RunDraft(two_domains, "small")
    rows = as_requests(two_domains, "small", 3)
    for row in rows:
        row["domain"] = {"code": "chat", "chat": "code"}[row["domain"]]
    swapped = imported(tmp_path, rows, *STRICT, "--domain-key", "domain", "--draft", "small", name="swapped")
    answer = diagnose(side, [str(swapped.path)])
    assert {(item.domain, item.sign) for item in answer.domains} == {("code", -1), ("chat", 1)}
    assert all(depth.sign == 0 for depth in answer.depths)
    assert (answer.outcome, answer.reason) == ("differs", "fewer tokens per round than predicted: code")


def same_prompts(folder: Path, documents: int, alpha: float = 0.7) -> Run:
    """A run whose prompts are the token ids of the requests that `as_requests` makes of it."""
    prompts = [np.array([number, 7], "<i4").tobytes().decode() for number in range(documents)]
    domain = Domain(documents=documents, alpha=alpha, prompts=prompts)
    run = write_run(folder, Recipe(domains={"code": domain}, drafts={"small": 0.0, "large": 0.2}, seed=4))
    return rewritten(run, "small", end_wrong)


def test_requests_and_documents_are_paired_where_prompts_are_known_by_token_ids(tmp_path: Path) -> None:
    """What both have cancels out of the difference, in any order; what few share is not worth it."""
    run = same_prompts(tmp_path / "profiled", 24)
    side, requests = RunDraft(run, "small"), as_requests(run, "small", 3)[::-1]
    asked = (*STRICT, "--domain", "code")
    answer = diagnose(side, [str(imported(tmp_path, requests[:20], *asked, name="engine").path)])
    (item,) = answer.domains
    assert (answer.paired, item.documents, item.requests, item.difference.value) == (True, 20, 20, 0)
    assert answer.outcome == "as_predicted"  # two samples of this size are too few
    assert answer.visible == pytest.approx(-item.difference.low / (item.predicted - 1))
    few = imported(tmp_path, [*requests[:2], *(response(number) for number in range(100, 112))], *asked)
    answer = diagnose(side, [str(few.path)])
    assert (answer.paired, answer.domains[0].documents, answer.domains[0].requests) == (False, 24, 14)


def test_another_draft_is_seen_and_named(tmp_path: Path) -> None:
    run = same_prompts(tmp_path / "profiled", 24)
    rows, side = as_requests(run, "large", 3), RunDraft(run, "small")
    eagle = imported(tmp_path, rows, *STRICT, "--domain", "code", "--draft", "eagle", name="eagle")
    answer = diagnose(side, [str(eagle.path)])
    assert (answer.outcome, answer.domains[0].sign) == ("differs", 1)
    assert "do not show which draft was served" in answer.notes[0]
    named = imported(tmp_path, rows, *STRICT, "--domain", "code", "--draft", "large", name="large")
    code, text = failure(invoke("diagnose", side.label, named.path))
    assert (code, "was served with draft large" in text, f"diagnose {run.path}:large" in text) == (12, True, True)
    assert diagnose(RunDraft(run, "large"), [str(named.path)]).notes == ()


def test_trees_are_compared_by_tokens_per_round_alone(tmp_path: Path) -> None:
    run = same_prompts(tmp_path / "profiled", 24)
    rows = [of_rounds([3, 0, 2, 1, 3, 1], 7, number) for number in range(30)]
    tree = served_by_sglang(tmp_path, rows, *TREE, "--domain", "code")
    answer = diagnose(RunDraft(run, "small"), [str(tree.path)])
    assert (answer.depths, answer.rounds, answer.measured_length.value) == ((), 180, pytest.approx(16 / 6))
    assert answer.domains[0].measured == pytest.approx(16 / 6)
    assert "used tree drafting" in answer.notes[-1]


def test_what_only_long_prompts_lose_is_a_matter_of_context(side: RunDraft, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = []
    for number in range(120):
        long, right = number % 2 == 1, shares_of(side, 3)
        kept = [0] * 40
        for place in range(40):
            while kept[place] < 3 and rng.random() < right[kept[place]] * (0.6 if long else 1.0):
                kept[place] += 1
        row = response(number, **counted(kept, [3] * 40, 3))
        rows.append(row | {"usage": {"prompt_tokens": 900 if long else 20, "completion_tokens": 41 + sum(kept)}})
    answer = diagnose(side, [str(imported(tmp_path, rows).path)])
    assert answer.outcome == "differs"
    assert of(answer) == {"context", "traffic", "window"}
    assert "prompts of more than" in answer.reason


PROMPTS = "vllm:request_prompt_tokens_{}{{{}}} {}\n"


def with_prompts(text: str, requests: int, tokens: float) -> str:
    labels = 'engine="0",model_name="served/target"'
    return text + PROMPTS.format("count", labels, requests) + PROMPTS.format("sum", labels, tokens)


def test_prompts_of_the_same_length_rule_out_what_changes_them(side: RunDraft, tmp_path: Path) -> None:
    """The run's prompts, sent twice each, or with three more tokens each."""
    run = served_run(side, 3, None)
    assert run.prompts is not None
    total = 2 * float(run.prompts.sum())
    low = as_page([0.7 * share for share in shares_of(side, 3)])
    path = tmp_path / "page.txt"
    path.write_text(with_prompts(low, 120, total))
    answer = diagnose(side, [str(path)])
    assert of(answer, "no") == {"template", "thinking", "traffic", "context"}
    assert of(answer) == {"draft", "rule", "feedback"}
    path.write_text(with_prompts(low, 120, total + 3 * 120))
    assert of(diagnose(side, [str(path)])) == {"template", "thinking"}
    path.write_text(with_prompts(low, 121, 10 * total))
    answer = diagnose(side, [str(path)])  # nothing is ruled out, but these come with evidence
    assert of(answer) == {"traffic", "context", "template", "thinking", "draft", "rule", "feedback"}
    assert [cause.name for cause in answer.causes if "prompts have" in cause.evidence] == [
        "template",
        "thinking",
        "traffic",
        "context",
    ]
    path.write_text(with_prompts(as_page(shares_of(side, 3)), 121, 10 * total))
    answer = diagnose(side, [str(path)])
    assert (answer.outcome, of(answer)) == ("as_predicted", set())
    assert "but prompts have" in answer.reason


def lines(engine: str, labels: str = "", **counts: float) -> str:
    return "".join(f"{engine}{name}{labels} {value}\n" for name, value in counts.items())


def test_pages_of_other_engines_and_versions_are_read(side: RunDraft, tmp_path: Path) -> None:
    """llama.cpp, vLLM under Ray, vLLM's V0 (no rounds, no positions), SGLang (verifications), and a compressed page."""
    counts = [20000.0, *(20000.0 * np.cumprod(shares_of(side, 3))).round().tolist()]
    kept, path = sum(counts[1:]), tmp_path / "page.txt"
    drafts = {"num_drafts_total": counts[0], "num_draft_tokens_total": 3 * counts[0], "num_accepted_tokens_total": kept}
    spec = {f"spec_decode_{name}": value for name, value in drafts.items()}
    positions = "".join(
        f'{{}}spec_decode_num_accepted_tokens_per_pos_total{{{{position="{place}"}}}} {count}\n'
        for place, count in enumerate(counts[1:])
    )
    old = {"spec_decode_num_emitted_tokens_total": counts[0] + kept}
    old |= {name: value for name, value in spec.items() if "num_drafts" not in name}
    sglang = {"spec_verify_calls_total": counts[0], "spec_num_steps": 3, "num_requests_total": 300}
    sglang["generation_tokens_total"] = counts[0] + kept + 300
    for text, engine, depths in (
        (lines("llamacpp:", **spec) + positions.format(*["llamacpp:"] * 3), "llama.cpp", 3),
        (lines("ray_vllm_", **spec) + positions.format(*["ray_vllm_"] * 3), "vLLM", 3),
        (lines("vllm:", '{model_name="a"}', **old), "vLLM", 0),
        (lines("sglang:", '{model_name="a"}', **sglang), "SGLang", 0),
    ):
        path.write_text(text)
        answer = diagnose(side, [str(path)])
        assert (answer.server.partition(",")[0], answer.gamma, len(answer.depths)) == (engine, 3, depths)
        assert answer.outcome == "as_predicted"
        assert answer.measured_length.value == pytest.approx(1 + kept / counts[0], rel=1e-4)
    path.write_bytes(gzip.compress(text.encode()))
    assert diagnose(side, [str(path)]).outcome == "as_predicted"


def test_engines_are_added_up_and_models_are_not(side: RunDraft, tmp_path: Path) -> None:
    right, path = shares_of(side, 3), tmp_path / "page.txt"
    both = as_page(right, 4000) + as_page([0.2, 0.1, 0.1], model="other")
    path.write_text(both + as_page(right, 6000).replace('engine="0"', 'engine="1"'))
    with pytest.raises(AlphaprofError, match="counts 2 models: other, served/target") as caught:
        diagnose(side, [str(path)])
    assert "--label model_name=other" in caught.value.hint
    answer = diagnose(side, [str(path)], labels=["model_name=served/target"])
    assert (answer.rounds, answer.outcome) == (10000, "as_predicted")
    assert diagnose(side, [str(path)], labels=["model_name=other"]).outcome == "differs"
    path.write_text(as_page(right) + lines("llamacpp:", spec_decode_num_drafts_total=0))
    assert diagnose(side, [str(path)]).server.startswith("vLLM,")
    path.write_text("".join(as_page(right).replace('engine="0"', f'engine="0",instance="{host}"') for host in "ab"))
    with pytest.raises(AlphaprofError, match=r"page.txt counts 2 instances: a, b"):
        diagnose(side, [str(path)])


def test_depths_that_nothing_reached_are_not_as_predicted(side: RunDraft) -> None:
    found = invoke("diagnose", side.label, "--acceptance", "0,0,0", "--rounds", "1000").stdout
    assert "lower" in found
    assert "as predicted" not in found


def test_answers_that_do_not_tell_gamma_need_it(side: RunDraft, tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text(json.dumps({"timings": {"predicted_n": 61, "draft_n": 75, "draft_n_accepted": 36}}))
    code, text = failure(invoke("diagnose", side.label, path))
    assert (code, "does not tell how many tokens a round drafts" in text, "--gamma N" in text) == (2, True, True)
    assert (diagnose(side, [str(path)], gamma=3).gamma, diagnose(side, [str(path)], gamma=3).rounds) == (3, 25)


def test_counters_that_were_reset_or_came_late_count_from_zero(side: RunDraft, tmp_path: Path) -> None:
    """Of two engines one restarted in between: one time with fewer rounds than before, one time with more."""
    before, after = tmp_path / "before.txt", tmp_path / "after.txt"
    wrong, right = [0.1, 0.1, 0.1], shares_of(side, 3)
    late = as_page(right, 1000).replace('engine="0"', 'engine="1"')
    for earlier in (30000, 2000):
        before.write_text(as_page(wrong, earlier))
        after.write_text(as_page(right, 19000, created=1.8e9) + late)
        answer = diagnose(side, [str(before), str(after)])
        assert (answer.rounds, answer.outcome) == (20000, "as_predicted")
        assert answer.server.endswith("after.txt, reset between the pages")


@each(
    ("content", "exit_code", "words"),
    [
        ('{"metrics": {}}', 3, "holds JSON, not a metrics page.*alphaprof import"),
        ("vllm:generation_tokens_total 12\n", 3, "counts no speculative decoding: vLLM has it off.*with speculation"),
        (
            "sglang:spec_accept_length 2.4\nsglang:generation_tokens_total 9\n",
            3,
            "does not count rounds.*import logged",
        ),
        ("python_gc_objects_collected_total 1\n", 3, "has no counter of vLLM, SGLang or llama.cpp.*curl"),
        ("not a page\n", 3, "is not a metrics page"),
        (page({"0": []}), 3, "no round was counted.*send requests first"),
        (as_page([0.5] * 5, 100), 12, "drafts 5 tokens a round; .*was not replayed at this gamma.*--reuse-continuations"),
        (page({"0": [(3, 1)] * 9}).replace('"1"} 0.0', '"1"} 11.0'), 3, "contradict each other"),
    ],
)
def test_a_page_that_tells_nothing_says_what_to_do(
    content: str, exit_code: int, words: str, side: RunDraft, tmp_path: Path
) -> None:
    (tmp_path / "page.txt").write_text(content)
    code, text = failure(invoke("diagnose", side.label, tmp_path / "page.txt"))
    assert code == exit_code
    assert re.search(words, text), text


@each(
    ("arguments", "words"),
    [
        ((), "name what a server counted, once"),
        (("page.txt", "--acceptance", "0.5,0.4,0.3"), "name what a server counted, once"),
        (("--acceptance", "0.5,0.6,0.3"), "does not fall from 1 to 0"),
        (("--acceptance", "high"), "does not fall from 1 to 0"),
        (("--acceptance", "0.5,0.4,0.3", "--domain", "poems"), "has no domain 'poems'"),
        (("a", "b", "c"), "expected an address, or 1 or 2 pages, got 3"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments: tuple[str, ...], words: str, side: RunDraft) -> None:
    code, text = failure(invoke("diagnose", side.label, *arguments))
    assert code in (2, 12)
    assert words in text


def test_a_run_that_no_engine_served_is_no_server(side: RunDraft, tmp_path: Path) -> None:
    code, text = failure(invoke("diagnose", side.label, write_run(tmp_path / "run").path))
    assert code == 2
    assert "was not imported from an engine" in text


def test_the_outcome_is_the_exit_code_in_every_format(side: RunDraft, tmp_path: Path) -> None:
    (tmp_path / "right.txt").write_text(as_page(shares_of(side, 3)))
    (tmp_path / "low.txt").write_text(as_page([0.6 * share for share in shares_of(side, 3)]))
    for form, begins in (("terminal", "AS PREDICTED: a loss of"), ("md", ""), ("json", '{"format'), ("html", "<!")):
        found = invoke("diagnose", side.label, tmp_path / "right.txt", "--format", form)
        assert found.exit_code == 0, found.output
        assert "".join(found.stdout.split()).startswith("".join(begins.split())), form
    found = invoke("diagnose", side.label, tmp_path / "low.txt")
    assert failure(found)[0] == 13
    assert "DIFFERS: fewer first drafts are accepted" in found.stdout
    assert "possible cause: " in found.stdout


SPEEDS = """vllm:inter_token_latency_seconds_sum {gap}
vllm:inter_token_latency_seconds_count 100
vllm:inter_token_latency_seconds_bucket{{le="0.01"}} {fast}
vllm:inter_token_latency_seconds_bucket{{le="0.1"}} 100
vllm:inter_token_latency_seconds_bucket{{le="+Inf"}} 100
vllm:time_to_first_token_seconds_count 10
vllm:generation_tokens_total 110
"""


def test_speeds_of_both_pages_stand_beside_the_prediction(side: RunDraft, tmp_path: Path) -> None:
    """100 tokens after the first ones of 10 requests: 5 s without speculation, 2 s with it."""
    plain, spec = tmp_path / "plain.txt", tmp_path / "spec.txt"
    plain.write_text(SPEEDS.format(gap=5.0, fast=20))
    spec.write_text(as_page(shares_of(side, 3)).replace(',model_name="served/target"', "") + SPEEDS.format(gap=2.0, fast=80))
    answer = diagnose(side, [str(spec)], [str(plain)])
    speeds = {speed.name: speed for speed in answer.speeds}
    tokens = speeds["tokens/s of a request"]
    assert (tokens.plain, tokens.speculative, tokens.speedup) == (20.0, 50.0, 2.5)
    assert tokens.predicted is not None
    assert tokens.predicted.low < tokens.predicted.value < tokens.predicted.high
    median = speeds["ms between outputs, p50"]
    assert (median.plain, median.speculative) == (pytest.approx(10 + 90 * 30 / 80), pytest.approx(6.25))
    assert not any(name.startswith("ms to the first token") for name in speeds)  # neither page tells
    with pytest.raises(AlphaprofError, match=r"spec.txt counts speculative decoding"):
        diagnose(side, [str(spec)], [str(spec)])


OF_VLLM = """vllm:cache_config_info{{block_size="16",num_gpu_blocks="{blocks}",engine="0"}} 1.0
vllm:kv_cache_usage_perc{{model_name="m"}} {used}
vllm:num_preemptions_total{{model_name="m"}} {preempted}
vllm:prefix_cache_queries_total{{model_name="m"}} 200
vllm:prefix_cache_hits_total{{model_name="m"}} {cached}
vllm:time_to_first_token_seconds_sum{{model_name="m"}} {first}
vllm:time_to_first_token_seconds_count{{model_name="m"}} 10
vllm:generation_tokens_total{{model_name="m"}} 110
"""
OF_SGLANG = """sglang:max_total_num_tokens{{model_name="m"}} {slots}
sglang:token_usage{{model_name="m"}} {used}
sglang:num_retracted_requests_total{{model_name="m"}} {preempted}
sglang:prompt_tokens_total{{model_name="m"}} 200
sglang:cached_tokens_total{{model_name="m",cache_source="device"}} {cached}
sglang:time_to_first_token_seconds_sum{{model_name="m"}} {first}
sglang:time_to_first_token_seconds_count{{model_name="m"}} 10
sglang:generation_tokens_total{{model_name="m"}} 110
"""
OF_LLAMA = """llamacpp:kv_cache_usage_ratio {used}
llamacpp:tokens_predicted_total 110
"""
CACHE = {
    "KV cache, tokens": (101_520, 54_192),
    "KV cache in use now, %": (pytest.approx(40), pytest.approx(90)),
    "preemptions": (0, 7),
    "prefix-cache hits, %": (25, 5),
    "ms to the first token, mean": (pytest.approx(80), pytest.approx(200)),
}


@each(
    ("page", "told"),
    [(OF_VLLM, list(CACHE)), (OF_SGLANG, list(CACHE)), (OF_LLAMA, ["KV cache in use now, %"])],
    ids=["vllm", "sglang", "llamacpp"],
)
def test_what_fills_the_cache_stands_beside_that_of_the_plain_server(page: str, told: list[str]) -> None:
    """The slots are those of a public measurement of Qwen3-14B without and with a draft model on an RTX 5090."""
    values = {"used": (0.4, 0.9), "preempted": (0, 7), "cached": (50, 10), "first": (0.8, 2.0)}
    values |= {"slots": (101_520, 54_192), "blocks": (6345, 3387)}
    both = [page.format(**{name: each[side] for name, each in values.items()}).encode() for side in (0, 1)]
    plain, speculative = (times_of(pages.counted([page_of(each, "page")], "page").sums) for each in both)
    found = {name: (plain[name], speculative[name]) for name in CACHE}
    assert found == {name: both if name in told else (None, None) for name, both in CACHE.items()}


def test_a_quantile_beyond_the_last_bound_is_not_known() -> None:
    assert bucket_quantile([(0.1, 50.0), (math.inf, 100.0)], 0.99) is None
    assert bucket_quantile([(0.1, 50.0), (math.inf, 100.0)], 0.25) == pytest.approx(50.0)
    assert bucket_quantile([], 0.5) is None


def of_a_source(run: Run, source: dict[str, Any]) -> RunDraft:
    config = run.manifest.config | {"data": [{"domain": "code", **source}]}
    return RunDraft(altered(run, config=config), "small")


def test_prompts_that_the_server_renders_otherwise_are_shown(
    side: RunDraft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "run", RECIPE)
    row = run.continuations(0, ["source_row", "prompt_ids"]).to_pylist()
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": f"row {number}"}) + "\n" for number in range(60)))
    asked: list[tuple[str, Any]] = []
    more = [99]

    def answer_of(_: str, path: str, content: Any = None) -> dict[str, Any]:
        asked.append((path, content))
        if path == "/v1/models":
            return {"data": [{"id": "target"}]}
        if path == "/detokenize":
            return {"prompt": " ".join(map(str, content["tokens"]))}
        text = content["prompt"] if "prompt" in content else content["messages"][-1]["content"]
        place = next(each for each in row if each["source_row"] == int(text.split()[1]))
        return {"tokens": [*place["prompt_ids"][:1], *more, *place["prompt_ids"][1:]]}

    monkeypatch.setattr(module, "answer_of", answer_of)
    mine = of_a_source(run, {"path": str(data), "prompt": "{text}"})
    found = rendered_otherwise(mine.run, "http://127.0.0.1:1")
    assert found.startswith("from token 1 of a prompt on the server writes '99 ")
    more.clear()
    assert rendered_otherwise(mine.run, "http://127.0.0.1:1") == ""
    monkeypatch.setattr(
        module, "answer_of", lambda *asked: {k: v[:1] if k == "tokens" else v for k, v in answer_of(*asked).items()}
    )
    assert rendered_otherwise(mine.run, "http://127.0.0.1:1").startswith("from token 1 of a prompt on the server writes '',")
    monkeypatch.setattr(module, "answer_of", answer_of)
    assert "template" in ask_server(mine, "strict", "http://elsewhere:1")[1]
    thinking = {"enable_thinking": False}
    chats = of_a_source(run, {"path": str(data), "prompt": "{text}", "chat": True, "chat_options": thinking})
    assert rendered_otherwise(chats.run, "http://127.0.0.1:1") == ""
    assert asked[-1][1]["chat_template_kwargs"] == thinking
    turns = [[{"role": "user", "content": f"row {number}"}] for number in range(60)]
    data.write_text("".join(json.dumps({"turns": each, "own": {"enable_thinking": True}}) + "\n" for each in turns))
    logged = {"path": str(data), "messages": "turns", "chat_options": thinking, "chat_template_kwargs": "own"}
    assert rendered_otherwise(of_a_source(run, logged).run, "http://127.0.0.1:1") == ""
    assert asked[-1][1]["chat_template_kwargs"] == {"enable_thinking": True}  # of the row


def test_files_and_arguments_of_a_server_that_runs_here_are_compared(
    side: RunDraft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, weights in (("one", b"a"), ("same", b"a"), ("other", b"b")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(weights)
        (tmp_path / name / "config.json").write_text("{}")
    assert digests_of(str(tmp_path / "one")) == digests_of(str(tmp_path / "same")) != digests_of(str(tmp_path / "other"))
    config = side.run.manifest.config
    config = config | {
        "target": {"model": str(tmp_path / "one")},
        "drafts": config["drafts"] | {"small": {"kind": "model", "model": str(tmp_path / "one")}},
    }
    mine = RunDraft(altered(write_run(tmp_path / "run", RECIPE), config=config), "small")
    served: dict[str, str] = {}
    monkeypatch.setattr(module, "arguments_of", lambda _: served)
    monkeypatch.setattr(module, "answer_of", lambda *_: {})

    def serve(draft: str, **more: str) -> tuple[dict[str, str], dict[str, str]]:
        spec = json.dumps({"method": "draft_model", "model": str(tmp_path / draft), "num_speculative_tokens": 3})
        served.update({"model": str(tmp_path / "same"), "speculative-config": spec, **more})
        return ask_server(mine, "strict", "http://127.0.0.1:9")

    found, out = serve("same")
    assert (set(found), set(out)) == (set(), {"draft"})
    found, out = serve("other")
    assert "holds other weights" in found["draft"]
    assert serve("same", **{"kv-cache-dtype": "fp8"})[0] == {"feedback": "the server keeps KV in fp8"}
