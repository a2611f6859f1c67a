"""Whole runs on tiny models: what they write, what interrupts them, and that resuming changes nothing."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from alphaprof.commands.check import SAME, check_baseline
from alphaprof.config.load import load_profile
from alphaprof.config.options import TargetOptions
from alphaprof.errors import (
    LogitsNotFinite,
    ModelUnloadable,
    OutOfMemory,
    ProfileInvalid,
    RunMismatch,
)
from alphaprof.profiling import profile as profiling
from alphaprof.profiling import shard as shards
from alphaprof.profiling.models.kinds import PromptLookup
from alphaprof.profiling.models.load import load_model
from alphaprof.profiling.texts.continuations import generate
from alphaprof.profiling.texts.spans import Kind, spans
from alphaprof.profiling.timing.steppers import Stepper
from alphaprof.report.build import build_report
from alphaprof.report.serving import paste_formats
from alphaprof.rules import DEFAULT_RULES
from alphaprof.run.manifest import part_name
from alphaprof.run.reader import Run, side_of
from alphaprof.run.schema import (
    CONTINUATION_COLUMNS,
    DOCUMENT_COLUMNS,
    LATENCY_COLUMNS,
    PROMPT_COLUMNS,
    LogRules,
    totals_columns,
    violations,
)
from alphaprof.run.storage import LocalStorage
from alphaprof.run.writer import RunWriter
from alphaprof.totals.count import TotalsRequest
from alphaprof.totals.files import read_totals
from tests.conftest import slow
from tests.runs import (
    MIXED,
    NEW_TOKENS,
    Silent,
    interrupted,
    log_of,
    mixed_file,
    openings,
    profile_file,
    require_same_tables,
    run_profile,
    tables,
)
from tests.synthetic import interrupted as left_running
from tests.synthetic import without_rows
from tests.tiny import edited, tokenizer

pytestmark = pytest.mark.models
ROOFLINE = {"source": "roofline", "accelerator": "h100-sxm"}  # nothing is timed
SKIP = {"skip": {"kind": "layer_skip", "drop_layers": [2]}}


def strict_totals(run: Run, draft: str) -> Any:
    """Totals of one draft under strict acceptance."""
    totals = read_totals(run, draft, TotalsRequest(run.rules, run.gammas))
    return totals.filter(pc.equal(totals["rule"].cast("string"), "strict"))


def test_the_log_holds_every_position_of_every_document_once_for_every_draft(greedy_run: Run) -> None:
    log = pd.read_parquet(greedy_run.path / "positions")
    documents = pd.read_parquet(greedy_run.path / "documents.parquet")
    assert sorted(log["draft"].unique()) == ["brief", "close", "skip", "wide"]
    assert len(documents) == 15 == greedy_run.manifest.documents
    assert documents["document"].tolist() == list(range(15))
    assert greedy_run.manifest.positions == documents["continuation_tokens"].sum() == len(log) / 4
    for _, rows in log.groupby("draft", observed=True):
        assert rows["document"].is_monotonic_increasing
        for number, document in rows.groupby("document"):
            assert document["position"].tolist() == list(range(documents["continuation_tokens"][number]))
    expected = [column.name for column in LogRules(DEFAULT_RULES).columns]
    assert [name for name in log.columns if name != "draft"] == expected


def test_continuations_hold_the_ids_that_the_log_was_measured_on(greedy_run: Run) -> None:
    log = pd.read_parquet(greedy_run.path / "positions", filters=[("draft", "==", "close")])
    for shard in greedy_run.shards:
        for row in greedy_run.continuations(shard.index).to_pylist():
            token = log.loc[log["document"] == row["document"], "token"]
            assert token.tolist() == row["continuation_ids"]
            assert (row["finish"] == "eos") == (row["continuation_ids"][-1] == 256)
            assert len(row["prompt_ids"]) == row["prompt_tokens"]


def test_target_columns_are_the_same_for_every_draft(greedy_run: Run) -> None:
    log = pd.read_parquet(greedy_run.path / "positions")
    shared = ["token", "target_top", "target_top_prob", "target_entropy", "target_margin"]
    parts = [rows[shared].reset_index(drop=True) for _, rows in log.groupby("draft", observed=True)]
    assert all(part.equals(parts[0]) for part in parts)


def test_a_draft_with_padding_rows_scores_like_the_same_draft_without(greedy_run: Run) -> None:
    log = pd.read_parquet(greedy_run.path / "positions")
    close, wide = (log[log["draft"] == name].reset_index(drop=True) for name in ("close", "wide"))
    assert np.isfinite(wide["kl_target_draft"]).all()
    for name in ("overlap", "kl_target_draft", "draft_entropy"):
        assert np.allclose(close[name], wide[name], atol=1e-5)
    assert (close["draft_top"] == wide["draft_top"]).all()


@pytest.mark.parametrize("whole", ["greedy_run", "sampled_run"])
def test_totals_are_the_sums_of_the_log(whole: str, request: pytest.FixtureRequest) -> None:
    """Of every draft and rule, by pandas."""
    run: Run = request.getfixturevalue(whole)
    log = pd.read_parquet(run.path / "positions")
    for draft in run.manifest.drafts:
        totals = read_totals(run, draft, TotalsRequest(run.rules, run.gammas)).to_pandas()
        by_document = log[log["draft"] == draft].groupby("document")
        proposals = by_document["proposed"].agg(lambda values: (values > 0).sum()).tolist()
        for rule, rows in totals.groupby("rule", observed=True):
            found = rows.sort_values("document")
            assert found["accepted"].to_numpy() == pytest.approx(by_document[f"accept_{rule}"].sum().to_numpy(), abs=1e-5)
            assert found["proposals"].tolist() == proposals
            assert found["positions"].tolist() == by_document.size().tolist()
        assert sorted(totals["rule"].unique()) == sorted(run.rules)


def test_a_draft_at_the_end_of_its_context_covers_part_of_the_positions(greedy_run: Run) -> None:
    totals = strict_totals(greedy_run, "brief").to_pandas()
    assert 0 < totals["proposals"].sum() < totals["positions"].sum()
    assert totals["rounds_4"].sum() > strict_totals(greedy_run, "close").to_pandas()["rounds_4"].sum()


def test_the_manifest_names_what_was_run(greedy_run: Run) -> None:
    manifest = greedy_run.manifest
    assert manifest.status == "complete"
    assert manifest.target.dtype == "float32"
    assert manifest.target.eos == (256,)
    assert manifest.drafts["brief"].context == 24
    assert paste_formats(manifest.drafts["brief"], "strict") == ("vllm-config", "sglang-args", "llamacpp-args")
    assert manifest.drafts["wide"].vocabulary == 320
    assert len({facts.fingerprint for facts in manifest.drafts.values()}) == 4
    assert manifest.environment["packages"]["numba"] == version("numba")


def test_a_repeated_run_passes_its_check_and_one_changed_bit_of_a_weight_makes_it_another_draft(
    greedy_run: Run, tmp_path: Path, tiny: Path
) -> None:
    shutil.copytree(tiny / "draft", tmp_path / "draft")
    weights = load_file(tmp_path / "draft" / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"].view(torch.int32)[3, 5] ^= 1
    save_file(weights, tmp_path / "draft" / "model.safetensors", {"format": "pt"})
    again = greedy_run.manifest.config["drafts"]
    drafts = {name: again[name] for name in ("close", "skip")} | {"changed": {"kind": "model", "model": "./draft"}}
    new = run_profile(profile_file(tmp_path, tiny, drafts=drafts, costs=ROOFLINE), tmp_path / "run")
    for name, old in (("close", "close"), ("skip", "skip"), ("changed", "close")):
        found = check_baseline(side_of(f"{new.path}:{name}"), side_of(f"{greedy_run.path}:{old}"), None, 0.02)
        if name != "changed":
            assert (found.outcome, found.reason) == ("pass", SAME)
            continue
        assert found.outcome == "undecided"


@pytest.mark.parametrize(("whole", "written"), [("sampled_run", mixed_file), *slow([("greedy_run", profile_file)])])
def test_a_run_interrupted_before_any_write_resumes_to_the_same_rows(
    whole: str, written: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """While prompts are staged, between the files of a shard and its record, while the run is finished."""
    timed = {"costs": {"context": 16, "repeats": 3}}
    path, out, expected = written(tmp_path, tiny, **timed), tmp_path / "run", request.getfixturevalue(whole)

    class Killed(BaseException):
        pass

    def dying(name: str) -> Any:
        original = getattr(LocalStorage, name)

        def call(place: LocalStorage, file: str, *content: Any) -> Any:
            if budget[0] == 0:
                raise Killed
            budget[0] -= 1
            told.append(f"{name} {file}")
            return original(place, file, *content)

        return call

    budget, told, ended = [3], list[str](), list[str]()
    for name in ("put", "remove"):
        monkeypatch.setattr(LocalStorage, name, dying(name))
    while True:
        try:
            run_profile(path, out, resume=bool(ended))
            break
        except Killed:
            ended.append(told[-1].partition("/")[0])
            budget[0] = 24 if len(ended) == 1 else 6 + len(ended) % 3  # the second reaches the manifest and a little more
    assert len(ended) > 4
    assert {"put prompts", "put positions"} <= set(ended)
    require_same_tables(out, expected)


@pytest.mark.parametrize("damaged", [False, True])
def test_an_early_ctrl_c_keeps_each_batch_of_texts(
    damaged: bool, sampled_run: Run, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after each batch: no batch is written twice, unless what was kept is `damaged`."""
    path, out, generate = mixed_file(tmp_path, tiny), tmp_path / "run", shards.generate
    batches, said, fresh = list[tuple[int, ...]](), list[str](), True

    def once(target: Any, documents: Any, width: int) -> Any:
        nonlocal fresh
        if not fresh:
            raise KeyboardInterrupt
        fresh = False
        batches.append(tuple(each.document for each in documents))
        return generate(target, documents, width)

    monkeypatch.setattr(shards, "generate", once)
    while fresh:
        try:
            run_profile(path, out, resume=bool(batches))
            break
        except KeyboardInterrupt as error:
            said += error.__notes__
            fresh = True
            if damaged and len(batches) == 1:
                damage(out / "unfinished.parquet", "a bit")
    assert (batches[0] == batches[1]) == damaged
    assert len(set(batches)) == len(batches) - damaged > 4
    assert said[0] == "2 texts are written and kept"  # one is given
    assert len(said) == len(batches) - 1
    require_same_tables(out, sampled_run)


def test_logits_that_are_not_finite_show_before_any_text_is_written(tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny / "draft", tmp_path / "draft")
    weights = load_file(tmp_path / "draft" / "model.safetensors")
    save_file({name: weight * torch.nan for name, weight in weights.items()}, tmp_path / "draft" / "model.safetensors")
    path = profile_file(tmp_path, tiny, drafts={"bad": {"kind": "model", "model": "./draft"}}, costs=ROOFLINE)
    with pytest.raises(LogitsNotFinite, match="logits of bad"):
        run_profile(path, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_options_say_of_a_draft_what_its_facts_will(greedy_run: Run, lookup_run: Run, head_run: Run) -> None:
    """By them a table of step times is read before any draft is loaded."""
    seen = set[tuple[bool, bool]]()
    for run in (greedy_run, lookup_run, head_run):
        options = run.manifest.profile.drafts
        said = {name: (draft.has_steps, draft.by_depth) for name, draft in options.items()}
        assert said == {name: (facts.has_steps, facts.by_depth) for name, facts in run.manifest.drafts.items()}
        seen |= set(said.values())
    assert seen == {(True, False), (False, False), (True, True)}


def test_a_complete_run_is_left_alone(greedy_run: Run, tiny: Path, tmp_path: Path) -> None:
    before = (greedy_run.path / "manifest.json").stat().st_mtime_ns
    run_profile(greedy_run.path.parent / "profile.yaml", greedy_run.path, resume=True)
    assert (greedy_run.path / "manifest.json").stat().st_mtime_ns == before


def test_damaged_step_times_are_measured_again_and_nothing_else(
    greedy_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunWriter.open(Path(shutil.copytree(greedy_run.path, tmp_path / "run")))
    old = {"code": "not_timed_there", "message": "of the times that are lost", "remedy": "none"}
    earlier = (old, old | {"code": "busy"})
    left_out = dataclasses.replace(run.manifest, skipped={"too long": 40}, truncated={"cut": 9}, warnings=earlier)
    run.write_manifest(left_out)
    for folder in ("latency.parquet", "documents.parquet", "totals/draft=close/"):
        (name,) = (name for name in run.manifest.files if name.startswith(folder))
        (run.path / name).write_bytes(b"PAR1")
    monkeypatch.setattr(profiling, "write_shard", None)
    monkeypatch.setattr(profiling, "score_shard", None)
    again = run_profile(greedy_run.path.parent / "profile.yaml", run.path, resume=True)
    again.verify()
    expected, found = tables(greedy_run.path), tables(again.path)
    assert found.keys() == expected.keys()
    assert [name for name in expected if not found[name].equals(expected[name])] == []
    assert len(again.latency()) == len(greedy_run.latency())
    assert (again.manifest.skipped, again.manifest.truncated, again.manifest.warnings) == ({"too long": 40}, {"cut": 9}, ())


def damage(file: Path, how: str) -> None:
    """Remove a file, cut it in half, or change one bit of it."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.unlink()
    if how != "removed":
        file.write_bytes(content[: len(content) // 2] if how == "cut" else content)


@pytest.mark.parametrize(
    ("folder", "how", "complete"),
    [
        ("positions/draft=skip", "a bit", True),
        ("continuations", "removed", True),
        *slow([("continuations", "cut", False), ("positions/draft=close", "removed", False)]),
        ("positions/draft=brief", "cut", False),
    ],
)
def test_damaged_shards_are_measured_again_and_no_other_ones(
    greedy_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, how: str, complete: bool
) -> None:
    """They are found beyond a gap too, and their rows are what they were; of texts that are lost the rows are, too."""
    out, written, scored = tmp_path / "run", list[int](), list[int]()
    if complete:
        shutil.copytree(greedy_run.path, out)
    else:
        with RunWriter.opened(left_running(greedy_run, out).storage, resume=True) as writer:
            without_rows(writer, [1])
    for index in (0, 2):
        damage(out / folder / part_name(index), how)
    texts, rows = profiling.write_shard, profiling.score_shard

    def writing(loaded: Any, index: int, *rest: Any) -> Any:
        written.append(index)
        return texts(loaded, index, *rest)

    def scoring(loaded: Any, drafts: Any, shard: Any, *rest: Any) -> Any:
        scored.append(shard.index)
        return rows(loaded, drafts, shard, *rest)

    monkeypatch.setattr(profiling, "write_shard", writing)
    monkeypatch.setattr(profiling, "score_shard", scoring)
    told = Silent()
    profiling.profile(load_profile(greedy_run.path.parent / "profile.yaml"), out, told, resume=True)
    assert "measuring 2 damaged shards again: 0, 2" in told.lines
    assert written == ([0, 2] if folder == "continuations" else [])
    assert scored == ([0, 2] if complete else [0, 1, 2])
    require_same_tables(out, greedy_run)


def test_changed_profile_is_noticed_on_resume_and_changed_data_cannot_matter(
    sampled_run: Run, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts are read once, before anything is measured: who goes on needs no data at all."""
    path, out = mixed_file(tmp_path, tiny), tmp_path / "run"
    interrupted(path, out, monkeypatch)
    with pytest.raises(RunMismatch, match=r"another profile \(gammas changed\)"):
        run_profile(path, out, True, "gammas=[1]")
    data = tmp_path / "long.jsonl"
    data.write_text(data.read_text().replace("0 ", "7 "))
    (tmp_path / "short.jsonl").unlink()
    run_profile(path, out, resume=True)
    require_same_tables(out, sampled_run)


def test_given_responses_are_scored_as_they_are(tiny: Path, tmp_path: Path) -> None:
    ways = {"ids": {"path": "long.jsonl", "column": "ids", "on_policy": True}}
    ways["text"] = {"path": "short.jsonl", "column": "response"}
    data = [
        {"domain": name, "path": way.pop("path"), "prompt": "{text}", "continuation": {"kind": "given"} | way}
        for name, way in ways.items()
    ]
    run = run_profile(profile_file(tmp_path, tiny, data=data), tmp_path / "run")
    log = pd.read_parquet(tmp_path / "run" / "positions", filters=[("draft", "==", "close")])
    totals = strict_totals(run, "close").to_pandas()
    documents = run.documents().to_pandas()
    rows = [json.loads(line) for line in (tmp_path / "long.jsonl").read_text().splitlines()]
    for number, source_row in documents.loc[documents["domain"] == "ids", "source_row"].items():
        assert log.loc[log["document"] == number, "token"].tolist() == rows[source_row]["ids"]
    given_ids, given_text = documents["domain"] == "ids", documents["domain"] == "text"
    assert (documents.loc[given_ids, "finish"] == "eos").all()
    assert totals.loc[given_ids, "rounds_1"].notna().all()
    assert totals.loc[given_text, "rounds_1"].isna().all()  # another policy's text: no rounds
    text = log[log["domain"] == "text"]
    assert (text["accept_strict"] == (text["draft_top"] == text["target_top"])).all()
    ids = log[log["domain"] == "ids"]
    assert (ids["accept_strict"] == (ids["draft_top"] == ids["token"])).all()


def test_running_out_of_memory_halves_batches_and_says_so(
    greedy_run: Run, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = generate

    def small(target: Any, documents: Any, ids_drawn: int) -> Any:
        if len(documents) > 1:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")
        return original(target, documents, ids_drawn)

    monkeypatch.setattr("alphaprof.profiling.shard.generate", small)
    path = profile_file(tmp_path, tiny, drafts=SKIP, costs=ROOFLINE)
    run = run_profile(path, tmp_path / "run")
    assert sum(shard.halved_batches for shard in run.shards) > 0
    expected, found = tables(greedy_run.path), tables(run.path)
    for name in expected:
        if name.startswith("continuations"):
            assert found[name].equals(expected[name])
    monkeypatch.setattr("alphaprof.profiling.shard.generate", lambda *_: (_ for _ in ()).throw(MemoryError()))
    with pytest.raises(OutOfMemory, match=r"out of memory on document \d+"):
        run_profile(path, tmp_path / "other")


@pytest.fixture
def own_target(tiny: Path, tmp_path: Path) -> Path:
    """A copy of the target that a test may change."""
    return Path(shutil.copytree(tiny / "target", tmp_path / "own"))


def test_another_eos_or_another_version_is_noticed_on_resume(
    tiny: Path, own_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, out = {"model": str(own_target), "dtype": "float32"}, tmp_path / "run"
    path = profile_file(tmp_path, tiny, target=target, drafts=SKIP, costs=ROOFLINE)
    interrupted(path, out, monkeypatch)
    edited(own_target / "generation_config.json", eos_token_id=[256, 97])
    with pytest.raises(RunMismatch, match=r"not those of the run \(other target eos, skip eos\)"):
        run_profile(path, out, True)
    edited(own_target / "generation_config.json", eos_token_id=256)
    with monkeypatch.context() as patch:
        patch.setattr(profiling, "version", lambda name: "1.0")
        with pytest.raises(RunMismatch, match=rf"torch 1\.0, not {re.escape(version('torch'))}; transformers 1\.0, not"):
            run_profile(path, out, True)
    with monkeypatch.context() as patch:
        patch.setattr(profiling.dispatch, "checksum", lambda device: "other")
        with pytest.raises(RunMismatch, match=r"\(other statistics of the same logits\)"):
            run_profile(path, out, True)
    run = run_profile(path, out, True, "decision.min_speedup=2")
    assert run.manifest.status == "complete"
    assert build_report(run).traffic.min_speedup == 2
    assert build_report(run_profile(path, out, True, "decision.min_speedup=3")).traffic.min_speedup == 3


def test_a_text_ends_at_the_tokenizers_eos_too(tiny: Path, own_target: Path, tmp_path: Path) -> None:
    edited(own_target / "generation_config.json", eos_token_id=97)
    edited(own_target / "config.json", eos_token_id=97)
    path = profile_file(tmp_path, tiny, target={"model": str(own_target), "dtype": "float32"}, costs={"source": "none"})
    run = profiling.profile(load_profile(path, limit=1), tmp_path / "run", Silent())
    assert run.manifest.target.eos == (97, 256)


def test_weights_that_a_checkpoint_lacks_are_an_error_and_not_random(own_target: Path) -> None:
    weights = load_file(own_target / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, own_target / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelUnloadable, match=r"lacks weights .*lm_head\.weight"):
        load_model("target", TargetOptions(model=str(own_target)), "float32")


def test_weights_that_miss_a_domain_are_refused_before_anything_is_measured(tiny: Path, tmp_path: Path) -> None:
    """The names in a column are known once prompts are read."""
    (tmp_path / "data").mkdir()
    file = tmp_path / "data" / "teams.jsonl"
    file.write_text("".join(json.dumps({"text": team, "team": team}) + "\n" for team in "aab"))
    source = {"domain": {"column": "team"}, "path": str(file), "prompt": "{text}"}
    path = profile_file(tmp_path, tiny, data=[source], decision={"weights": {"a": 1.0}})
    with pytest.raises(ProfileInvalid, match=r"decision\.weights does not name domain 'b'"):
        profiling.profile(load_profile(path), tmp_path / "run", Silent())
    assert not (tmp_path / "run" / "positions").exists()


def test_models_that_do_not_fit_into_memory_say_so(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(profiling, "load_model", full)
    with pytest.raises(OutOfMemory, match="the models do not fit into memory"):
        run_profile(profile_file(tmp_path, tiny), tmp_path / "run")


@pytest.mark.parametrize("there", [True, False])
def test_memory_of_models_is_given_back_where_there_is_a_gpu(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    emptied: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    profiling.release_memory()
    assert emptied == [True] * there


def test_a_target_whose_cache_cannot_be_cut_back_is_profiled_without_step_times(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise ValueError("a recurrent state has no length")

    monkeypatch.setattr(Stepper, "take_back", refuse)
    progress = Silent()
    drafts = {"close": {"kind": "model", "model": str(tiny / "draft")}}
    path = profile_file(tmp_path, tiny, drafts=drafts)
    run = profiling.profile(load_profile(path), tmp_path / "run", progress)
    assert "not_timed" in progress.warnings
    assert run.latency() is None
    report = build_report(run)
    assert report.answer.verdict == "UNDECIDED"
    assert report.results[0].alpha is not None
    assert report.results[0].gammas[0].tokens_per_round is not None


def test_every_file_of_a_run_keeps_to_its_declaration(sampled_run: Run, greedy_run: Run) -> None:
    """Names, types, ranges, units and meanings."""
    assert violations(greedy_run.latency(), LATENCY_COLUMNS) == []
    declared = {"positions": sampled_run.log_rules.columns, "totals": totals_columns(sampled_run.gammas)}
    declared |= {"documents": DOCUMENT_COLUMNS, "continuations": CONTINUATION_COLUMNS, "prompts": PROMPT_COLUMNS}
    seen = set()
    for name in sampled_run.manifest.files:
        folder = name.partition("/")[0].removesuffix(".parquet")
        table = pq.ParquetFile(sampled_run.path / name).read()
        assert violations(table, declared[folder]) == [], name
        for column in declared[folder]:
            metadata = table.schema.field(column.name).metadata
            assert (metadata[b"doc"], metadata[b"unit"]) == (column.doc.encode(), column.unit.encode()), (name, column.name)
        seen.add(folder)
    assert seen >= {"positions", "totals", "documents", "continuations"}


def test_documents_of_a_mixed_run_say_how_they_came_about(sampled_run: Run) -> None:
    found = pd.read_parquet(sampled_run.path / "documents.parquet").groupby("source")
    settings = ["continuation", "on_policy", "temperature", "top_k", "top_p", "min_p", "seed", "max_new_tokens"]
    expected = [
        ("greedy", True, None, None, None, None, None, NEW_TOKENS),
        ("sampled", True, 1.2, 0, 0.9, 0.0, 3, 20),
        ("sampled", True, 1.0, 40, 1.0, 0.0, 0, 15),
        ("given", False, 0.8, 0, 1.0, 0.0, None, None),
        ("text", False, None, None, None, None, None, 256),
    ]
    for source, rows in found:
        distinct = rows[settings].astype(object).where(rows[settings].notna(), None).drop_duplicates()
        assert [tuple(row) for row in distinct.itertuples(index=False)] == [expected[int(source)]]
    drawn = pd.read_parquet(sampled_run.path / "documents.parquet").query("domain == 'drawn'")
    assert set(drawn["finish"]) == {"eos", "length"}


def test_sampled_text_is_scored_with_its_settings_and_every_token_is_possible(sampled_run: Run) -> None:
    close = log_of(sampled_run, "close")
    documents = pd.read_parquet(sampled_run.path / "documents.parquet").set_index("document")
    sampled = close["document"].map(documents["continuation"] == "sampled")
    assert (close.loc[sampled, "target_token_prob"] > 0).all()
    nucleus = close["document"].map(documents["top_p"] == 0.9)
    assert np.isinf(close.loc[nucleus, "kl_target_draft"]).any()
    plain = close["document"].map(documents["temperature"].isna())
    assert np.isfinite(close.loc[plain, "kl_target_draft"]).all()
    totals = read_totals(sampled_run, "close", TotalsRequest(sampled_run.rules, sampled_run.gammas)).to_pandas()
    lossless = totals[totals["rule"] == "lossless"].set_index("document").sort_index()
    assert lossless["impossible"].sum() == 0
    assert lossless["tokens"].notna().tolist() == (documents["continuation"] == "sampled").tolist()


def test_spans_of_a_run_are_those_of_its_texts(sampled_run: Run, greedy_run: Run) -> None:
    kinds, words = [Kind("thinking", **MIXED["thinking"])], tokenizer()
    for draft in ("close", "ngram"):
        log = log_of(sampled_run, draft)
        for shard in sampled_run.shards:
            for row in sampled_run.continuations(shard.index).to_pylist():
                found = log.loc[log["document"] == row["document"], "span"]
                assert found.tolist() == spans(kinds, words, row["prompt_ids"], row["continuation_ids"]).tolist()
    assert set(log_of(sampled_run, "close")["span"]) == {"thinking", "answer"}
    assert log_of(greedy_run, "close")["span"].isna().all()


def test_prompt_lookup_of_a_run_is_that_of_its_texts(sampled_run: Run) -> None:
    draft = PromptLookup("ngram", 2, (256,), 260, "float32")
    log = log_of(sampled_run, "ngram")
    for shard in sampled_run.shards:
        for row in sampled_run.continuations(shard.index).to_pylist():
            expected = draft.columns(np.array(row["prompt_ids"] + row["continuation_ids"]), row["prompt_tokens"])
            found = log[log["document"] == row["document"]]
            assert found["proposed"].tolist() == expected["proposed"].tolist()
            assert (
                found["draft_top"].fillna(-1).tolist()
                == np.where(expected["proposed"] > 0, expected["draft_top"], -1).tolist()
            )
            assert found["accepted_run"].fillna(0).tolist() == expected["accepted_run"].tolist()
    assert 0 < (log["proposed"] > 0).mean() < 1
    assert log["accepted_run"].max() > 1


def test_texts_are_measured_again_without_writing_them(
    sampled_run: Run, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("alphaprof.profiling.shard.generate", None)
    options = load_profile(sampled_run.path.parent / "profile.yaml", ["batch_tokens=300", "shard_documents=9"])
    run = profiling.profile(options, tmp_path / "run", Silent(), reuse=sampled_run.path)
    assert run.manifest.reused == str(sampled_run.path)
    assert run.documents().to_pylist() == sampled_run.documents().to_pylist()
    for draft in ("close", "ngram"):
        before, now = log_of(sampled_run, draft), log_of(run, draft)
        pd.testing.assert_frame_equal(before, now, check_categorical=False, atol=1e-4)
    shutil.copytree(tiny / "target", tmp_path / "chat")
    template = tmp_path / "chat" / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    others = {
        "data.1.continuation.seed=4": r"profile \(other data\)",
        f"target.model={tmp_path / 'chat'}": "another tokenizer or device",
    }
    for change, words in others.items():
        other = load_profile(sampled_run.path.parent / "profile.yaml", [change])
        with pytest.raises(RunMismatch, match=words):
            profiling.profile(other, tmp_path / "other", Silent(), reuse=sampled_run.path)


def test_a_profile_reads_each_source_once(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = pd.DataFrame({"text": [f"{index} and so on" for index in range(5)]})
    (tmp_path / "splits").mkdir()
    rows.to_json(tmp_path / "rows.jsonl", orient="records", lines=True)
    rows.to_csv(tmp_path / "rows.csv", index=False)
    rows.to_parquet(tmp_path / "rows.parquet")
    rows.to_csv(tmp_path / "splits" / "train.csv", index=False)  # which `datasets` reads
    names = ["rows.jsonl", "rows.csv", "rows.parquet", "splits"]
    data = [{"domain": name.replace(".", "_"), "path": name, "prompt": "{text}"} for name in names]
    drafts = {"ngram": {"kind": "prompt_lookup"}}
    continuation = {"kind": "greedy", "max_new_tokens": 2}
    path = profile_file(tmp_path, tiny, drafts=drafts, data=data, continuation=continuation, costs={"source": "none"})
    found = openings(monkeypatch)
    run = profiling.profile(load_profile(path), tmp_path / "run", Silent())
    assert run.manifest.documents == 20
    assert {name: found[str(tmp_path / name)] for name in names} == dict.fromkeys(names, 1)


@pytest.mark.parametrize("generation_config", [True, False])
def test_penalties_of_a_model_are_warned_about_where_its_own_settings_are_asked_for(
    tiny: Path, own_target: Path, tmp_path: Path, generation_config: bool
) -> None:
    edited(own_target / "generation_config.json", repetition_penalty=1.1, temperature=0.6, top_k=20, do_sample=True)
    progress = Silent()
    continuation = {"kind": "sampled", "max_new_tokens": 4, "top_k": 30, "generation_config": generation_config}
    target = {"model": str(own_target), "dtype": "float32"}
    path = profile_file(tmp_path, tiny, target=target, continuation=continuation, costs={"source": "none"})
    run = profiling.profile(load_profile(path, limit=1), tmp_path / "run", progress)
    assert progress.warnings.count("not_modelled") == generation_config
    told = [warning["message"] for warning in run.manifest.warnings if warning["code"] == "not_modelled"]
    assert len(told) == generation_config
    assert all("sets repetition_penalty: 1.1, which is not supported" in message for message in told)
    found = run.documents().select(["temperature", "top_k"]).to_pylist()
    assert found == [{"temperature": 0.6 if generation_config else 1.0, "top_k": 30}] * 2


@pytest.mark.parametrize(
    ("lookup", "costs", "said"),
    [
        ({}, {"context": 8, "repeats": 3}, 1),
        ({"match": "rightmost"}, {"context": 8, "repeats": 3}, 0),
        ({"match": "leftmost"}, {"context": 8, "repeats": 3}, 0),
        ({}, {"source": "none"}, 0),
    ],
)
def test_filled_rounds_that_a_cpu_times_are_said_unless_they_were_asked_for(
    tiny: Path, tmp_path: Path, lookup: dict[str, Any], costs: dict[str, Any], said: int
) -> None:
    drafts = {"ngram": {"kind": "prompt_lookup"} | lookup}
    progress, path = Silent(), profile_file(tmp_path, tiny, drafts=drafts, costs=costs, gammas=[1, 2])
    run = profiling.profile(load_profile(path, limit=1), tmp_path / "run", progress)
    assert [warning["code"] for warning in run.manifest.warnings].count("padded_here") == said
    assert run.manifest.drafts["ngram"].settings["match"] == lookup.get("match", "rightmost")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["temperature", ["lossless"]]),
        ({"rules": ["one_hot", "block", "lossless"]}, ["temperature", ["block", "lossless"]]),
        ({"draft_processing": "same"}, ["same", []]),
        ({"rules": ["one_hot"]}, ["temperature", []]),  # nothing is drawn from q
        ({"continuation": {"kind": "sampled", "temperature": 0.7, "max_new_tokens": 4}}, ["temperature", []]),  # nor cut
        ({"continuation": {"kind": "greedy", "max_new_tokens": 4}}, ["temperature", []]),
        ({"drafts": {"ngram": {"kind": "prompt_lookup"}}}, ["temperature", []]),
    ],
    ids=["default", "rules", "same", "not drawn", "not cut", "greedy", "lookup"],
)
def test_how_drafts_are_drawn_is_said_where_it_matters(
    tiny: Path, tmp_path: Path, changes: dict[str, Any], expected: list[Any]
) -> None:
    sampled = {"kind": "sampled", "top_p": 0.9, "max_new_tokens": 4}
    drafts = {"close": {"kind": "model", "model": str(tiny / "draft")}}
    given = {"continuation": sampled, "drafts": drafts, "costs": {"source": "none"}} | changes
    progress = Silent()
    run = profiling.profile(load_profile(profile_file(tmp_path, tiny, **given), limit=1), tmp_path / "run", progress)
    said = [warning["message"] for warning in run.manifest.warnings if warning["code"] == "draft_processing"]
    assert [message.split(":")[0].split(", ") for message in said] == [expected[1]] * bool(expected[1])
    assert progress.warnings.count("draft_processing") == len(said)
    assert run.manifest.config["draft_processing"] == expected[0]


def test_settings_of_a_model_do_not_reach_greedy_text(greedy_run: Run, tiny: Path, own_target: Path, tmp_path: Path) -> None:
    served = {"temperature": 0.6, "top_k": 3, "repetition_penalty": 2.0, "do_sample": True, "min_new_tokens": 20}
    edited(own_target / "generation_config.json", **served)
    target = {"model": str(own_target), "dtype": "float32"}
    run = run_profile(profile_file(tmp_path, tiny, target=target, drafts=SKIP, costs=ROOFLINE), tmp_path / "run")
    assert log_of(run, "skip")["token"].tolist() == log_of(greedy_run, "skip")["token"].tolist()


# What is measured on request, and runs of versions that did not have it.

CERTIFIED = ("strict", "additive_0p1", "multiplicative_0p3", "top_m_3", "typical_0p09_0p3", "trtllm_10_0p6", "tree_2")


def test_a_run_with_certificates_says_so_and_its_log_holds_them(sampled_run: Run) -> None:
    """Every position of every text has thresholds, with or without a proposal; pandas reads them without further ado."""
    stored = json.loads((sampled_run.path / "manifest.json").read_text())
    assert stored["certified"] == list(CERTIFIED)
    assert stored["config"]["certificates"] is True
    log = pd.read_parquet(sampled_run.path / "positions")
    extra = ["target_top_10_prob", "thresholds_exact", *(f"threshold_{rule}" for rule in CERTIFIED)]
    names = [name for name in log.columns if name != "draft"]
    assert names == [column.name for column in LogRules(tuple(sampled_run.rules)).columns] + extra
    assert log[extra].notna().all().all()
    assert (log["target_top_10_prob"] >= log["target_top_prob"] - 1e-6).all()
    # The cheapest draft that strict rejects gives both top tokens what they have on average.
    level = (log["target_top_prob"] + log["target_second_prob"]) / 2
    parts = [
        log[name] * np.log((log[name] / level).where(log[name] > 0, 1)) for name in ("target_top_prob", "target_second_prob")
    ]
    assert log["threshold_strict"].to_numpy() == pytest.approx((parts[0] + parts[1]).to_numpy(), abs=1e-5)


def test_certificates_are_those_of_the_target_and_equal_in_every_log(sampled_run: Run) -> None:
    names = ["document", "position", "target_top_10_prob", "thresholds_exact", *(f"threshold_{rule}" for rule in CERTIFIED)]
    close, ngram = (log_of(sampled_run, draft)[names] for draft in ("close", "ngram"))
    pd.testing.assert_frame_equal(close, ngram)
    assert len(close.drop_duplicates(names[2:])) > 100
