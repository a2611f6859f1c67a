"""Step times in reports: every source, every concurrency, whole requests and single documents."""

from __future__ import annotations

import csv
import dataclasses
import functools
import io
import itertools
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from alphaprof.commands.check import checked
from alphaprof.config.hardware import PRESETS
from alphaprof.config.load import changed_question
from alphaprof.config.options import RooflineCosts
from alphaprof.costs.cost_model import open_costs, roofline_ms
from alphaprof.costs.engine_table import COLUMNS
from alphaprof.costs.shapes import ModelShape
from alphaprof.errors import CostsUnreadable, ProfileInvalid
from alphaprof.render.format import percent
from alphaprof.report.answer import GammaResult
from alphaprof.report.build import RunReport, build_report
from alphaprof.run.reader import Run
from alphaprof.run.schema import LATENCY_COLUMNS, arrow_schema
from tests.costs.test_roofline import LLAMA, QWEN3
from tests.reporting import as_terminal, asked, codes, only
from tests.synthetic import Domain, Recipe, altered, stored_totals, write_run

RECIPE = Recipe(
    domains={"code": Domain(documents=8, alpha=0.8), "chat": Domain(documents=8, alpha=0.4)},
    drafts={"small": 0.0},
    lookups=("ngram",),
    gammas=(1, 3),
    timing_error=0.0,
)


def step(model: str, kind: str, tokens: int, batch: int, context: int, ms: float) -> dict[str, Any]:
    return {
        "model": model,
        "step": kind,
        "tokens": tokens,
        "batch": batch,
        "context": context,
        "median_ms": ms,
        "p10_ms": ms,
        "p90_ms": ms,
        "relative_error": 0.0,
        "repeats": 5,
        "rounds_ms": [],
    }


def verified(tokens: int, batch: int, context: int) -> float:
    """Verification gets dearer with the batch, and everything with the context."""
    return 10 + 0.1 * batch * (tokens - 1) + context / 100


def rows(batches: tuple[int, ...] = (1, 16, 64), contexts: tuple[int, ...] = (8, 2008)) -> list[dict[str, Any]]:
    found = []
    for batch in batches:
        for context in contexts:
            found += [
                step("target", "decode" if n == 1 else "verify", n, batch, context, verified(n, batch, context))
                for n in range(1, 5)
            ]
            found += [
                step("target", "bookkeeping", 1, batch, context, 0.25),
                step("small", "bookkeeping", 1, batch, context, 0.5),
            ]
            found += [step("small", "draft", 1, batch, context, 1.0), step("small", "draft", 2, batch, context, 1.5)]
            found.append(step("ngram", "lookup", 1, batch, context, 0.1))
    for model, ms in (("target", 20.0), ("small", 4.0)):
        found += [step(model, "prefill", 2, 1, 0, ms), step(model, "prefill", 1002, 1, 0, 11 * ms)]
    return found


def timed(path: Path, table: list[dict[str, Any]] | None = None, recipe: Recipe = RECIPE, **costs: Any) -> Run:
    """A synthetic run with these step times."""
    run = write_run(path, recipe)
    settings = {"source": "measured", "concurrency": [1, 16, 64], "context": [8, 2008], "repeats": 5}
    times = pa.Table.from_pylist(table or rows(), schema=arrow_schema(LATENCY_COLUMNS))
    return altered(run, times, config=run.manifest.config | {"costs": settings | costs})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return timed(tmp_path_factory.mktemp("costs") / "run")


def totals(run: Run, domain: str, draft: str) -> pd.DataFrame:
    """Strict totals of a domain's documents, with what is known of them."""
    frame = stored_totals(run, draft)
    frame = frame[frame["rule"].astype(str) == "strict"].merge(run.documents().to_pandas(), on="document")
    return frame[frame["domain"].astype(str) == domain]


def context_of(run: Run, domain: str | None = None) -> float:
    documents = run.documents().to_pandas()
    documents = documents[documents["domain"].astype(str) == domain] if domain else documents
    length = documents["continuation_tokens"]
    return float(((documents["prompt_tokens"] + length / 2) * length).sum() / length.sum())


def spent_of(
    run: Run, domain: str, draft: str, gamma: int, batch: int, context: float | None = None
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Decode times in ms of each document with the draft and without, one round after the other. The other sequences of a
    batch draft as any round of the domain does.
    """
    frame, context = totals(run, domain, draft), context_of(run, domain) if context is None else context
    exactly = [-np.diff([row[f"rounds_{gamma}"], *row[f"drafted_depths_{gamma}"], 0.0]) for _, row in frame.iterrows()]
    others = functools.reduce(np.convolve, [np.sum(exactly, 0) / np.sum(exactly)] * (batch - 1), np.ones(1))
    sizes = range(1, gamma + 2)
    times = [verified(tokens, batch, context) for tokens in sizes]
    with_draft, plain = [], []
    for (_, row), rounds in zip(frame.iterrows(), exactly, strict=True):
        ms = 0.0
        for drafted, count in enumerate(rounds):
            verify = others @ np.interp(1 + (drafted + np.arange(len(others))) / batch, sizes, times)
            any_drafts = 1.0 if drafted else 1 - others[0]
            own = 0.1 + 0.25 * any_drafts if draft == "ngram" else drafted * 1.0 + 0.75 * any_drafts
            ms += count * (own + verify)
        if draft == "small":
            ms += row[f"accepted_depths_{gamma}"][-1] * 0.5
        with_draft.append(ms)
        plain.append(row["tokens"] * verified(1, batch, context))
    return np.array(with_draft), np.array(plain)


def at(report: RunReport, domain: str, draft: str, gamma: int) -> GammaResult:
    return next(item for item in only(report, domain, draft, "strict").gammas if item.gamma == gamma)


@pytest.mark.parametrize("draft", ["small", "ngram"])
@pytest.mark.parametrize("gamma", [1, 3])
def test_times_are_interpolated_at_the_documents_context_and_every_part_of_a_round_is_charged(
    run: Run, report: RunReport, draft: str, gamma: int
) -> None:
    for domain in ("code", "chat"):
        spent, plain = spent_of(run, domain, draft, gamma, 1)
        found = at(report, domain, draft, gamma)
        assert found.speedup.value == pytest.approx(plain.sum() / spent.sum())
        each = plain / spent
        assert dataclasses.astuple(found.of_documents) == pytest.approx(
            (*np.percentile(each, [10, 50, 90]), (each < 1).mean())
        )


def test_the_gamma_of_every_load_and_what_it_brings(run: Run) -> None:
    """By hand, of exact step times: the fastest gamma, or none; whole requests, whose prompts are read one by one."""
    report = asked(run, draft="small", weights={"code": 1, "chat": 0})
    load, documents = report.traffic.load, totals(run, "code", "small")
    assert [item.concurrency for item in load] == [1, 16, 64]
    for item in load:
        values = {}
        for gamma in run.gammas:
            spent, plain = spent_of(run, "code", "small", gamma, item.concurrency, context_of(run))
            values[gamma] = plain.sum() / spent.sum()
        best = max(values, key=values.__getitem__)
        assert item.gamma == (best if values[best] >= 1 else 0)
        if item.gamma:
            assert item.speedup.value == pytest.approx(values[item.gamma])
            assert item.speedup.low < item.speedup.value < item.speedup.high
            spent, plain = spent_of(run, "code", "small", item.gamma, item.concurrency, context_of(run))
            read = item.concurrency * sum(20 + 0.2 * (tokens - 2) for tokens in documents["prompt_tokens"])
            whole = (read + plain.sum()) / (1.2 * read + spent.sum())  # the draft reads them too, in a fifth of the time
            assert item.throughput.value == pytest.approx(whole)
    assert {item.gamma for item in load} > {0}
    assert load[0].speedup == report.answer.speedup
    every = {(item.concurrency, item.context): item for item in report.section("load")}
    own = load[0].context
    assert set(every) == set(itertools.product((1, 16, 64), (8, own, 2008)))
    assert [every[item.concurrency, own] for item in load] == list(load)
    longest = int((documents["prompt_tokens"] + documents["continuation_tokens"]).max())
    assert {item.context for item in every.values() if item.beyond} == {2008}
    assert own < longest < 2008
    spent, plain = spent_of(run, "code", "small", every[64, 2008].gamma, 64, 2008)
    assert every[64, 2008].speedup.value == pytest.approx(plain.sum() / spent.sum())
    lines = as_terminal(report, 120, "load").splitlines()
    assert next(line for line in lines if line.startswith(" at a time")).split() == [
        "at",
        "a",
        "time",
        "8",
        str(own),
        "2,008",
        "+",
    ]
    row = next(line for line in lines if line.startswith(" 64 "))
    assert row.split().count("off") == sum(not every[64, context].gamma for context in (8, own, 2008))
    assert f"{every[64, 2008].gamma}: {every[64, 2008].speedup.value:.2f}x / " in row


@pytest.mark.parametrize("batch", [1, 16])
def test_whole_requests_read_their_prompts_alone_and_share_the_batch(run: Run, batch: int) -> None:
    """The draft model reads in a fifth of the target's time, prompt lookup in none."""
    report = asked(run, concurrency=batch)
    reading = 20 * (1 + 10 * (totals(run, "code", "small")["prompt_tokens"].to_numpy() - 2) / 1000)
    for draft, share in (("small", 1.2), ("ngram", 1.0)):
        spent, plain = spent_of(run, "code", draft, 3, batch)
        found = at(report, "code", draft, 3).request_speedup
        assert found.value == pytest.approx((reading + plain / batch).sum() / (reading * share + spent / batch).sum())


def test_a_domain_is_judged_at_its_own_context_and_the_traffic_at_that_of_all(tmp_path: Path) -> None:
    """Batches of one domain hold its contexts, those of the traffic all: answers of domains, results and check agree."""
    domains = {"short": Domain(documents=12, alpha=0.7), "long": Domain(documents=12, shortest=900, longest=1000)}
    run = timed(tmp_path / "run", recipe=dataclasses.replace(RECIPE, domains=domains))
    report = asked(run, draft="small", gamma=3, concurrency=16)
    contexts = {domain: context_of(run, domain) for domain in domains}
    assert contexts["long"] > 10 * contexts["short"]
    for answer in (item.answer for item in report.domains):
        spent, plain = spent_of(run, answer.domain, "small", 3, 16)
        assert answer.speedup.value == pytest.approx(plain.sum() / spent.sum())
        assert answer.speedup == at(report, answer.domain, "small", 3).speedup
        threshold = {"speedup": [f"{answer.domain}=0.5"]}
        asks = ["decision.draft=small", "decision.gamma=3", "decision.concurrency=16"]
        found = checked(Path(run.path), None, None, None, threshold, None, 0.05, asks)
        assert [item.value for item in found.items] == pytest.approx([answer.speedup.value])
    assert report.times.context == pytest.approx(context_of(run))
    costs = open_costs(run, run.manifest.profile.costs, context_of(run), contexts)
    assert costs.of_domain("long").times(16)["small"].decode.ms == pytest.approx(verified(1, 16, contexts["long"]))
    assert costs.of_domain("another") is costs
    mean = costs.times(16)["small"].decode.ms
    assert mean == pytest.approx(verified(1, 16, context_of(run)))


def test_reports_say_what_a_verification_in_a_batch_is_charged(run: Run) -> None:
    shared = "verification: one step for the tokens of all sequences in the batch, which draft independently"
    alone, batch = asked(run, concurrency=1), asked(run, concurrency=16)
    assert shared not in as_terminal(alone, 120, "times")
    assert shared in as_terminal(batch, 120, "times")


def test_the_verdict_holds_at_the_concurrency_that_is_asked_for(run: Run) -> None:
    report = asked(run, concurrency=64, draft="small", gamma=3)
    spent, plain = spent_of(run, "code", "small", 3, 64)
    found = at(report, "code", "small", 3).speedup
    assert found.value == pytest.approx(plain.sum() / spent.sum())
    assert report.times.concurrency == 64
    between = asked(run, concurrency=40)
    assert between.times.target_ms[4] == pytest.approx(verified(4, 40, context_of(run)))


def test_rounds_mean_and_spread_stand_beside_the_median_and_the_lower_bound_counts_the_mean(tmp_path: Path) -> None:
    """Ten rounds that differ by a few per cent, of which two take ten times as long to verify three drafts."""
    factors, table = np.linspace(0.97, 1.03, 10), rows(batches=(1,), contexts=(8,))
    for row in table:
        if row["step"] != "prefill":
            slow = np.where(np.arange(10) % 5 == 3, 10.0, 1.0) if row["tokens"] == 4 else 1.0
            row["rounds_ms"] = (row["median_ms"] * factors * slow).tolist()
    run = timed(tmp_path / "run", table)
    report = asked(run, draft="small", gamma=3)
    verify = next(each for each in report.times.spread if (each.model, each.tokens) == ("target", 4))
    median = verified(4, 1, 8)
    assert report.times.rounds == 10
    assert verify.mean_ms == pytest.approx(np.mean(median * factors * np.where(np.arange(10) % 5 == 3, 10.0, 1.0)))
    assert verify.p10_ms == pytest.approx(np.quantile(median * factors, 0.1), rel=0.01)
    assert verify.p90_ms > 9 * median
    text = as_terminal(report, 120, "times")
    assert "medians of 10 rounds" in text
    assert re.search(r"target, 4 tokens +10\.380 +1\.030 +29\.189 +10\.131 +103\.108", text)
    assert report.answer.speedup.low < report.answer.speedup.value / 2
    other = asked(run, draft="small", gamma=1).answer.speedup
    assert other.low > 0.9 * other.value


def test_halves_of_times_without_rounds_have_one_error(tmp_path: Path) -> None:
    """The steps of a half are those of the other, and so are their errors: a cross-fitted speedup is no surer of them."""
    table = [row | {"relative_error": 0.1 if row["step"] == "draft" else 0.0} for row in rows(batches=(1,))]
    run = timed(tmp_path / "run", table)
    costs = open_costs(run, run.manifest.profile.costs, context_of(run))
    assert costs is not None
    timing = costs.timing(1)
    assert timing.halves is not None
    assert all(half["small"] is timing.times["small"] for half in timing.halves)
    crossed, known = asked(run, draft="small"), asked(run, draft="small", gamma=3)
    chosen, fixed = (only(each, "code", "small", "strict") for each in (crossed, known))
    assert (chosen.chosen, chosen.gamma, fixed.chosen, fixed.gamma) == (True, 3, False, 3)
    assert dataclasses.astuple(chosen.speedup) == pytest.approx(dataclasses.astuple(fixed.speedup))


def test_a_table_decides_the_gamma_that_it_covers_and_names_the_rows_that_lack(tmp_path: Path) -> None:
    """A table up to 3 tokens for a run with gamma 1 to 4: both that it covers are judged, the others shown without a
    speedup. One that is fixed beyond it is not judged, and says why.
    """
    run = write_run(tmp_path / "run", dataclasses.replace(RECIPE, gammas=(1, 2, 3, 4)))
    table = tmp_path / "steps.csv"
    table.write_text(
        "model,step,tokens,batch,context,ms\ntarget,decode,1,1,8,10\ntarget,verify,2,1,8,10.5\n"
        "target,verify,3,1,8,11\nsmall,draft,1,1,8,1\nngram,lookup,1,1,8,0.1\n"
    )
    costs = {"costs": {"source": "table", "path": str(table)}}
    config = run.manifest.config | costs

    def decided(**decision: Any) -> RunReport:
        return build_report(run, config=config | {"decision": config["decision"] | decision})

    report = decided()
    assert report.answer.gamma in (1, 2)
    assert report.answer.speedup is not None
    shown = only(report, "code", "small", "strict").gammas
    assert [item.speedup is not None for item in shown] == [True, True, False, False]
    assert [item.verify_cost for item in shown] == [pytest.approx(1.05), pytest.approx(1.1), None, None]
    assert all(item.tokens_per_round is not None for item in shown)
    (note,) = [each for each in report.notes if each.code == "not_covered"]
    assert "above gamma 2 there is no speedup" in note.message
    assert "target, verify, 5 tokens, batch 1" in note.remedy
    table.write_text(table.read_text() + "huge,draft,1,1,8,1\n")
    assert "rows of huge, which this run does not have" in as_terminal(decided(), 120, "times")
    fixed = decided(draft="small", gamma=2)
    assert (fixed.answer.gamma, fixed.traffic.chosen) == (2, False)
    assert fixed.answer.speedup is not None
    beyond = decided(draft="small", gamma=4)
    assert (beyond.answer.verdict, beyond.answer.speedup) == ("UNDECIDED", None)
    assert "step times do not reach gamma 4: that takes steps over 5 tokens" in beyond.answer.reason


def test_a_context_outside_takes_the_nearest_and_a_note_says_so(tmp_path: Path) -> None:
    report = build_report(timed(tmp_path / "run", rows(contexts=(1000, 2000)), context=[1000, 2000]))
    assert (report.times.context, report.times.contexts) == (1000, (1000, 2000))
    assert report.times.target_ms[1] == verified(1, 1, 1000)
    assert "other_context" in codes(report)


def test_prompts_longer_than_any_that_was_timed_are_told(tmp_path: Path) -> None:
    short = [row | {"tokens": row["tokens"] // 500 + 1} if row["step"] == "prefill" else row for row in rows()]
    report = build_report(timed(tmp_path / "run", short))
    assert 0 < (report.times.beyond_prefill or 0) <= 1
    share = percent(report.times.beyond_prefill)
    assert f"{share} of the prompts are longer than the longest timed prefill" in as_terminal(report, 120, "requests")
    without = build_report(timed(tmp_path / "none", [row for row in rows() if row["step"] != "prefill"]))
    assert at(without, "code", "small", 3).request_speedup is None
    assert without.times.beyond_prefill is None


def test_a_draft_that_was_timed_at_some_batches_only(tmp_path: Path) -> None:
    part = [row for row in rows() if not (row["model"] == "ngram" and row["batch"] == 1)]
    run = timed(tmp_path / "run", part)
    report = build_report(run)
    assert at(report, "code", "ngram", 3).speedup is None
    assert "lookup of draft ngram" in only(report, "code", "ngram", "strict").reason
    config = run.manifest.config | {"decision": run.manifest.config["decision"] | {"draft": "ngram", "concurrency": 16}}
    assert [item.concurrency for item in build_report(run, config=config).traffic.load] == [16, 64]
    assert at(report, "code", "small", 3).speedup is not None
    assert report.answer.draft == "small"
    assert "; ngram was left out: " in report.answer.reason
    assert [item.answer.draft for item in report.drafts] == ["small"]


# --- other sources ---


def times_csv(run: Run) -> str:
    """The step times of a run as the table that `costs.path` reads."""
    waiting, text = run.manifest.environment.get("timing_waiting") or 0.0, io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in run.latency().to_pylist():
        writer.writerow(row | {"ms": row["median_ms"], "rounds": " ".join(map(str, row["rounds_ms"])), "waiting": waiting})
    return text.getvalue()


def test_a_run_that_asked_for_no_step_times_says_so_and_takes_them_later(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", dataclasses.replace(RECIPE, latency=False))
    altered(run, config=run.manifest.config | {"costs": {"source": "none"}})
    run = Run.open(run.path)
    plain = build_report(run)
    assert (plain.times, plain.answer.verdict, plain.answer.speedup) == (None, "UNDECIDED", None)
    assert all(result.alpha is not None and result.gammas[0].tokens_per_round is not None for result in plain.results)
    (warning,) = [item for item in plain.notes if item.code == "no_step_times"]
    assert "no step times were asked for (costs.source: none)" in warning.message
    assert "--set costs.source=table" in warning.remedy
    assert warning.message in " ".join(as_terminal(plain).split())
    path = tmp_path / "own.csv"
    path.write_text(times_csv(timed(tmp_path / "timed")))
    config = changed_question(run.manifest.config, ["costs.source=table", f"costs.path={path}"])
    later = build_report(run, config=config)
    assert later.times is not None
    assert later.answer.speedup is not None
    assert "no_step_times" not in codes(later)
    with pytest.raises(ProfileInvalid, match="a report measures no step times"):
        changed_question(run.manifest.config, ["costs.source=measured"])


def test_notes_on_local_timing_stay_with_the_times_they_are_about(tmp_path: Path) -> None:
    """The run's machine was busy, and decoded slower than it verified: a table of the same times keeps the second alone."""
    slow = [row | {"median_ms": 2 * row["median_ms"]} if row["step"] == "decode" else row for row in rows()]
    run = shaped(timed(tmp_path / "run", slow), tmp_path / "run")
    local = {"busy", "not_timed", "not_timed_there"}
    told = tuple({"code": code, "message": "on this machine", "remedy": "idle machine"} for code in sorted(local))
    other = {"code": "raw_prompts", "message": "no template", "remedy": "set chat"}
    altered(run, warnings=(*told, other))
    path = tmp_path / "h100.csv"
    path.write_text(times_csv(run))
    config = run.manifest.config
    own = build_report(run)
    table = build_report(run, config=changed_question(config, ["costs.source=table", f"costs.path={path}"]))
    computed = build_report(run, config=changed_question(config, ["costs.source=roofline", "costs.accelerator=h100-sxm"]))
    untimed = build_report(run, config=changed_question(config, ["costs.source=none"]))
    assert local | {"slow_baseline", "raw_prompts"} <= codes(own)
    assert {"slow_baseline", "raw_prompts"} <= codes(table)
    for report in (table, computed, untimed):
        assert not local & codes(report)
        assert "raw_prompts" in codes(report)
        assert not any(word in note.remedy for note in report.notes for word in ("idle machine", "costs.budget"))


def shaped(run: Run, path: Path) -> Run:
    """The run with models of known shapes."""
    shapes = {"target": ModelShape.from_config(LLAMA), "small": ModelShape.from_config(QWEN3)}
    fields = {name: dataclasses.asdict(shape) for name, shape in shapes.items()}
    manifest = run.manifest
    drafts = {name: dataclasses.replace(facts, shape=fields.get(name)) for name, facts in manifest.drafts.items()}
    target = dataclasses.replace(manifest.target, shape=fields["target"])
    return altered(run, target=target, drafts=drafts)


def test_a_roofline_says_what_it_is_and_what_a_draft_takes(tmp_path: Path) -> None:
    run = shaped(timed(tmp_path / "run"), tmp_path / "run")
    overrides = ["costs.source=roofline", "costs.accelerator=h100-sxm", "costs.tp=2", "costs.overhead_ms=0.5"]
    report = build_report(run, config=changed_question(run.manifest.config, overrides))
    assert "by step times computed for 2 x h100-sxm, not measured: " in report.answer.reason
    assert "not_measured" in codes(report)
    target = ModelShape.from_config(LLAMA)
    setting = RooflineCosts(source="roofline", accelerator="h100-sxm", tp=2)
    for tokens in (1, 4):
        context = round(context_of(run))
        assert report.times.target_ms[tokens] == pytest.approx(
            roofline_ms(setting, target, True, tokens, 1, context) + 0.5, rel=1e-3
        )
    (memory,) = report.times.memory
    small = ModelShape.from_config(QWEN3)
    assert (memory.draft, memory.weight_bytes) == ("small", small.total_weight_bytes)
    assert memory.kv_share == pytest.approx(
        small.kv_bytes_per_token / (small.kv_bytes_per_token + target.kv_bytes_per_token)
    )
    lost = 1 - memory.slots_with_draft / memory.slots
    assert memory.kv_share < lost < memory.kv_share + 0.05
    assert f"tokens at most, {memory.slots_with_draft:,.0f} with the draft" in " ".join(as_terminal(report).split())
    assert [item.concurrency for item in report.traffic.load] == [1, 2, 4, 8, 16, 32, 64, 128]


def test_the_error_of_computed_times_is_part_of_the_interval_and_larger_elsewhere(tmp_path: Path) -> None:
    run = shaped(timed(tmp_path / "run"), tmp_path / "run")
    widths, pages = [], []
    for accelerator in ("h200", "l4"):
        overrides = ["costs.source=roofline", f"costs.accelerator={accelerator}", "costs.preset=sglang-h200"]
        report = build_report(run, config=changed_question(run.manifest.config, overrides))
        speedup = next(item.speedup for item in report.results[0].gammas if item.gamma == 3)  # of a draft that always drafts
        assert speedup is not None
        widths.append(math.log(speedup.high / speedup.low))
        pages.append(" ".join(as_terminal(report).split()))
    overrides.append(f"decision.min_speedup={report.answer.speedup.value}")
    close = build_report(run, config=changed_question(run.manifest.config, overrides)).answer
    assert close.verdict == "UNDECIDED"
    assert "use step times measured in your engine" in close.reason.partition("; by step times computed")[0]
    assert widths[0] >= 2 * 1.96 / 1.645 * math.log(1.25)  # two-sided 95 %: what step times alone would give
    assert widths[1] > 1.2 * widths[0]  # the steps of a draft model are off as far on the ground of heads, its own
    assert "roofline of h200 (x/÷ 1.25): not measured" in pages[0]
    assert "roofline of l4 (x/÷ 1.56): not measured" in pages[1]
    assert "90% of published speedups lie within factor 1.25" in pages[0]
    assert "this is outside that range, so the error is that of elsewhere: factor 1.56" in pages[1]


def test_a_time_that_is_not_linear_in_the_context_holds_at_the_mean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here of layers that read 100 tokens at most: places at 0 and beyond the mean alone would give half of it."""
    run = shaped(timed(tmp_path / "run"), tmp_path / "run")
    whole = ModelShape.cache_bytes
    monkeypatch.setattr(ModelShape, "cache_bytes", lambda shape, context: whole(shape, min(context, 100)))
    setting = RooflineCosts(source="roofline", accelerator="a100-80gb", preset="vllm-0.11", concurrency=[8])
    target, engine = ModelShape.from_config(LLAMA), PRESETS["vllm-0.11"]
    for context in (99.0, 100.0, 130.0, 5000.0):
        costs = open_costs(run, setting, context)
        assert costs is not None
        expected = roofline_ms(setting, target, True, 4, 8, round(context)) + engine.target_ms(32, False, 8)
        assert costs.times(8)["small"].target[4].ms == pytest.approx(expected, rel=1e-12)
    between = open_costs(run, setting, 99.5)
    assert between is not None
    ends = [roofline_ms(setting, target, True, 4, 8, context) + engine.target_ms(32, False, 8) for context in (99, 100)]
    assert between.times(8)["small"].target[4].ms == pytest.approx(sum(ends) / 2)


def test_a_roofline_needs_shapes(run: Run) -> None:
    config = changed_question(run.manifest.config, ["costs.source=roofline", "costs.accelerator=h100-sxm"])
    with pytest.raises(CostsUnreadable, match=r"the shape of (small|target)"):
        build_report(run, config=config)
