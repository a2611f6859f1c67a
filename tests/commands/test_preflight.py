"""A dry run: what it finds of models, data and numerics, what stops it, and that it writes nothing."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jsonschema
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers.processors import TemplateProcessing

from alphaprof.cli import app
from alphaprof.commands.preflight import trial
from alphaprof.commands.preflight import trial as inspection
from alphaprof.commands.preflight.build import Finding, Preflight, build_preflight, require_clear
from alphaprof.commands.preflight.facts import (
    Bos,
    Memory,
    ModelSeen,
    NoiseFloor,
    PreflightFacts,
    Refusal,
    SelfDraft,
    SourceSeen,
    Special,
    Speed,
    Storage,
    estimated,
)
from alphaprof.commands.preflight.measure import preflight
from alphaprof.config.load import load_profile
from alphaprof.config.options import ModelOptions
from alphaprof.errors import ColumnMissing
from alphaprof.profiling.models.drafts import DraftModel, layer_skip
from alphaprof.profiling.models.load import load_model
from alphaprof.profiling.scoring.scorer import Scorer
from alphaprof.profiling.texts.continuations import Continuation
from alphaprof.profiling.texts.corpus import Document
from alphaprof.render.answer import answer_text
from alphaprof.render.json import json_schema
from scripts.gpu.setting import random_head
from tests.loops import each
from tests.profiling.test_pipeline import Silent, profile_file
from tests.synthetic import facts
from tests.tiny import llama, tokenizer

FINE = "none of which stops the run. Nothing was written."
BOS = 257  # <pad> of the tiny tokenizers, here the token that begins texts


def beginning(template: str | None = None) -> Any:
    """A tiny tokenizer that adds BOS to plain text."""
    fast = tokenizer()
    fast.bos_token = "<pad>"
    fast.backend_tokenizer.post_processor = TemplateProcessing(single="<pad> $A", special_tokens=[("<pad>", BOS)])
    fast.chat_template = template if template is not None else fast.chat_template
    return fast


def found(checks: Preflight, name: str, subject: str | None = None) -> list[Finding]:
    return [check for check in checks.checks if check.name == name and subject in (None, check.subject)]


# Facts and what is said of them.


def source(**changes: Any) -> SourceSeen:
    seen = SourceSeen(
        source=0,
        path="code.jsonl",
        domains=("code",),
        prompts="chat",
        generated=True,
        documents=10,
        planned=100,
        shortest_prompt=5,
        median_prompt=20,
        longest_prompt=40,
        prompt_tokens=200,
        new_tokens=500,
        longest=90,
        skipped={},
        truncated={},
        double_bos=0,
        without_bos=0,
    )
    return dataclasses.replace(seen, **changes)


SPEED = Speed(documents=4, positions=64, prompts=100.0, generated=50.0, batch=8, scored=700.0, timing_s=30.0, untimed=None)
STORAGE = Storage(position_bytes=100.0, shard_bytes=1000.0, columns=36, free=None)


def seen(**changes: Any) -> PreflightFacts:
    """Nothing to complain about."""
    small = dataclasses.replace(facts("small"), context=512, vocabulary=260)
    everything = PreflightFacts(
        target=ModelSeen("target", dataclasses.replace(small, context=2048), 260),
        drafts=(ModelSeen("small", small, 260, 260),),
        dtype=None,
        scored_ids=260,
        template=True,
        bos=Bos("<s>", added=True, in_template=True),
        sources=(source(),),
        repeated=0,
        warnings=(),
        self_draft=SelfDraft(False, 64, 64, 64, 0),
        noise=NoiseFloor(4, 64, 0, 2, 0.125, 0.25, 0.01),
        speed=SPEED,
        storage=STORAGE,
        memory=Memory(10**9, None, 2 * 10**9),
        estimate=estimated([source()], SPEED, STORAGE, 64),
        refusals=(),
    )
    return dataclasses.replace(everything, **changes)


def draft(**changes: Any) -> tuple[ModelSeen, ...]:
    return (dataclasses.replace(seen().drafts[0], **changes),)


def sized(logits: int, **changes: Any) -> tuple[ModelSeen, ...]:
    return draft(facts=dataclasses.replace(seen().drafts[0].facts, vocabulary=logits), **changes)


RAW = {"code": "raw_prompts", "message": "prompts are profiled without it (a.jsonl)", "remedy": "set chat: true"}
ODD = {"code": "no_verdict", "message": "there will be no verdict", "remedy": "leave it out"}
DTYPE = {"code": "other_dtype", "message": "measured in float32: why", "remedy": "name one"}
UNKNOWN = (source(planned=None),)
SLOW = dataclasses.replace(SPEED, generated=None, timing_s=None, untimed="no cache")
# Changes of the facts; then of which check, about what, how bad, and words of its cause or remedy.
SAID: dict[str, tuple[dict[str, Any], str, str, str, str]] = {
    "a dtype that auto chose": ({"dtype": "bfloat16: why"}, "dtype", "target", "ok", "bfloat16: why"),
    "another dtype than stored": (
        {"dtype": "float32: why", "warnings": (DTYPE,)},
        "dtype",
        "run",
        "note",
        "name one",
    ),
    "padding of a draft": ({"drafts": sized(320)}, "vocabulary", "small", "note", "the last 60 of them padding"),
    "tokens without logits": ({"drafts": sized(250)}, "vocabulary", "small", "note", "10 tokens of the target have none"),
    "special tokens": (
        {"drafts": draft(special=(Special("eos", "</s>", None),))},
        "vocabulary",
        "small",
        "note",
        "eos </s> / None",
    ),
    "raw prompts": ({"warnings": (RAW,)}, "chat template", "run", "note", "set chat: true"),
    "template in use": ({}, "chat template", "target", "ok", "used for 1 of 1 source"),
    "no template": ({"template": False}, "chat template", "target", "ok", "no source asks for one"),
    "double BOS": (
        {"sources": (source(double_bos=3),)},
        "bos",
        "code.jsonl",
        "problem",
        "3 of 10 documents begin with BOS twice",
    ),
    "no BOS": ({"sources": (source(without_bos=10),)}, "bos", "code.jsonl", "note", "10 of 10 documents begin without BOS"),
    "lost BOS": ({"sources": (source(lost_bos=2),)}, "bos", "code.jsonl", "problem", "2 of 10 documents lost BOS"),
    "no such token": ({"bos": Bos(None, added=False, in_template=None)}, "bos", "target", "ok", "no BOS token"),
    "short draft": (
        {"drafts": draft(beyond=4, silent=1)},
        "context",
        "small",
        "note",
        "4 of 10 documents (40%) go beyond it: there it proposes nothing, in 1 of them from the start",
    ),
    "silent draft": ({"drafts": draft(beyond=10, silent=10)}, "context", "small", "problem", "10 of 10"),
    "self-draft": ({}, "self-draft", "target", "ok", "has alpha 1 at 64 positions in bfloat16"),
    "broken scoring": (
        {"self_draft": SelfDraft(False, 64, 63, 63, 0)},
        "self-draft",
        "target",
        "problem",
        "another top token than itself at 1 of 64",
    ),
    "noise in the text": (
        {"self_draft": SelfDraft(True, 64, 64, 60, 3)},
        "self-draft",
        "target",
        "note",
        "is 0.938: 4 tokens no longer top when scored (1 beyond a near-tie)",
    ),
    "quiet": ({}, "noise floor", "target", "ok", "0 of 64 top tokens flip (0%), near-ties (top logits within 0.125) 3%"),
    "flips": (
        {"noise": NoiseFloor(4, 64, 2, 2, 0.125, 0.25, 0.01)},
        "noise floor",
        "target",
        "note",
        "2 of 64 top tokens flip (3%)",
    ),
    "data": ({}, "data", "code.jsonl", "ok", "code: about 100 documents; prompts of 5 to 40, median 20 tokens"),
    "equal lengths": (
        {"sources": (source(shortest_prompt=20, longest_prompt=20),)},
        "data",
        "code.jsonl",
        "ok",
        "prompts of 20 tokens",
    ),
    "single": ({"sources": (source(documents=1, planned=1),)}, "data", "code.jsonl", "note", "has no interval"),
    "left out": (
        {"sources": (source(skipped={"longer than the context": 3}),)},
        "data",
        "code.jsonl",
        "note",
        "3 rows left out longer than the context lower max_new_tokens",
    ),
    "cut": (
        {"sources": (source(truncated={"texts cut": 2}),)},
        "data",
        "code.jsonl",
        "note",
        "2 texts cut their acceptance may differ",
    ),
    "twice the same": ({"repeated": 2}, "data", "run", "note", "2 of 10 prompts seen occur before"),
    "a draft larger than its target": (
        {"drafts": draft(facts=dataclasses.replace(seen().drafts[0].facts, parameters=10**12))},
        "costs",
        "small",
        "note",
        "has 1,000,000,000,000 parameters, the target 1,000",
    ),
    "untimed": ({"speed": SLOW}, "costs", "run", "note", "no step times: no cache"),
    "timed": ({}, "costs", "run", "ok", "takes about 30 s"),
    "timed within its budget": (
        {"speed": dataclasses.replace(SPEED, budget_s=30.0)},
        "costs",
        "run",
        "ok",
        "takes about 30 s",
    ),
    "timed past its budget": (
        {"speed": dataclasses.replace(SPEED, budget_s=20.0)},
        "costs",
        "run",
        "note",
        "the fewest rounds of all steps that give times a bound take about 30 s, more than costs.budget (20 s)",
    ),
    "time": ({}, "time", "run", "ok", "roughly 2.7 min for 100 documents"),
    "endless": (
        {"estimate": estimated(UNKNOWN, SPEED, STORAGE, 64)},
        "time",
        "run",
        "note",
        "roughly 1.3 s a document; how many there are is not known",
    ),
    "unknown speed": (
        {"speed": SLOW, "estimate": estimated([source()], SLOW, STORAGE, 64)},
        "time",
        "run",
        "note",
        "the target's generation speed is not known",
    ),
    "disk": ({}, "disk", "run", "ok", "about 530 kB for at most 5,000 positions (100 bytes a position"),
    "full disk": (
        {"storage": dataclasses.replace(STORAGE, free=1000)},
        "disk",
        "run",
        "problem",
        "1 kB are free",
    ),
    "memory": (
        {},
        "memory",
        "run",
        "ok",
        "weights 1 GB; 2 GB are free beside the weights; batches that do not fit are halved",
    ),
    "memory of a GPU": (
        {"memory": Memory(10**9, 10**8, None)},
        "memory",
        "run",
        "ok",
        "weights 1 GB; the run in small took 100 MB beside them; batches",
    ),
    "other warnings": ({"warnings": (ODD,)}, "no verdict", "run", "note", "there will be no verdict"),
}


@each("name", SAID)
def test_every_fact_becomes_a_check_with_its_level_and_words(name: str) -> None:
    changes, check, subject, level, words = SAID[name]
    checks = found(build_preflight(seen(**changes)), check, subject)
    assert any(item.level == level and words in f"{item.cause} {item.remedy}" for item in checks), checks
    assert all((item.remedy is None) == (item.level == "ok") for item in checks)


def test_nothing_to_complain_about_is_ok_everywhere() -> None:
    report = build_preflight(seen())
    assert {check.level for check in report.checks} == {"ok"}
    assert (report.stops, report.conclusion) == (False, f"0 problems and 0 notes, {FINE}")
    require_clear(report)


def test_the_first_error_is_raised_after_all_were_listed_at_their_checks() -> None:
    errors = (
        Refusal("data", "code.jsonl", "ColumnMissing", "no column 'x'", "did you mean y?", 3),
        Refusal("vocabulary", "other", "VocabularyMismatch", "another vocabulary", "choose another draft", 4),
    )
    report = build_preflight(seen(refusals=errors))
    names = [check.name for check in report.checks]
    assert names == sorted(names, key=names.index)  # together with the others of their name
    assert [(check.subject, check.remedy) for check in report.checks if check.stops] == [
        ("other", "choose another draft"),
        ("code.jsonl", "did you mean y?"),
    ]
    assert report.conclusion.startswith("2 problems and 3 notes, of which 2 would stop the run")
    with pytest.raises(ColumnMissing, match="no column 'x'") as caught:
        require_clear(report)
    assert caught.value.hint == "did you mean y?"


LEFT_OUT = (
    Refusal("vocabulary", "alien", "VocabularyMismatch", "another vocabulary", "choose another draft", 4),
    Refusal("data", "odd.jsonl", "ColumnMissing", "no column 'x'", "did you mean y?", 3),
)


@pytest.mark.parametrize(
    ("name", "sources"), [("time", ", source odd.jsonl"), ("disk", ", source odd.jsonl"), ("memory", "")]
)
def test_what_a_run_takes_says_which_drafts_and_sources_it_leaves_out(name: str, sources: str) -> None:
    (check,) = found(build_preflight(seen(refusals=LEFT_OUT)), name)
    assert check.level == "note"
    assert check.cause.startswith(f"without draft alien{sources}: ")
    assert check.remedy is not None


def test_what_a_run_takes_without_any_draft_is_not_known() -> None:
    changes: dict[str, Any] = dict.fromkeys(("speed", "storage", "estimate"))
    report = build_preflight(seen(drafts=(), refusals=LEFT_OUT[:1], **changes))
    assert [(check.level, check.cause) for name in ("time", "disk") for check in found(report, name)] == [
        ("note", "not known: no draft could be loaded")
    ] * 2


def test_an_estimate_by_hand() -> None:
    """Two sources of which the second is given: 10 of 100 and 5 of 5 documents seen, 64 a shard."""
    given = source(generated=False, documents=5, planned=5, prompt_tokens=70, new_tokens=70)
    result = estimated([source(), given], SPEED, STORAGE, 64)
    assert result is not None
    assert (result.documents, result.positions) == (105, 5000 + 70)
    assert result.seconds == pytest.approx(10 * (200 / 100 + 500 / 50 + 700 / 700) + 140 / 700 + 30)
    assert result.disk == 10 * (500 * 100 + 4 * 700) + 70 * 100 + 4 * 140 + 2 * 1000
    assert result.document_seconds == pytest.approx((13 + 0.2) / 15)
    assert estimated([], SPEED, STORAGE, 64) is None


def test_the_json_holds_checks_and_facts_and_no_nan() -> None:
    text = answer_text(build_preflight(seen(estimate=estimated(UNKNOWN, SPEED, STORAGE, 64))), "json")
    content = json.loads(text, parse_constant=pytest.fail)
    jsonschema.validate(content, json.loads(json_schema("preflight")))
    assert (content["format"], content["schema_version"], content["stops"]) == ("alphaprof-preflight", "1.0", False)
    assert {"name", "subject", "level", "cause", "remedy", "stops"} == set(content["checks"][0])
    assert content["seen"]["estimate"]["seconds"] is None


def test_names_from_data_are_made_visible() -> None:
    text = answer_text(build_preflight(seen(sources=(source(path="a\x1b[2J", domains=("b\u202e[red]",)),))), "terminal")
    assert "\\x1b[2J" in text
    assert "\\u202e[red]" in text
    assert not set(text) & {"\x1b", "\u202e"}


# Data and tokenizers, without a model.


def look(folder: Path, words: Any, texts: list[str], monkeypatch: pytest.MonkeyPatch, **changes: Any) -> SourceSeen:
    """What is seen of a source of these texts."""
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (folder / "model").mkdir()
    tree = {
        "target": {"model": "./model"},
        "drafts": {"ngram": {"kind": "prompt_lookup"}},
        "data": [{"domain": "code", "path": "data.jsonl", "prompt": "{text}"} | changes],
        "continuation": {"max_new_tokens": 8},
    }
    (folder / "profile.yaml").write_text(json.dumps(tree))
    monkeypatch.setattr(inspection, "FIRST", 4)
    target = cast(Any, SimpleNamespace(context=20, vocabulary=260, served={}))
    options = load_profile(folder / "profile.yaml")
    return inspection.first_documents(options, 0, words, target, inspection.bos_of(words))[0]


def test_documents_lengths_and_what_is_left_out_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts of 20 hold prompts of 12 tokens; every second row is too long, and 4 of 12 rows are taken before the end."""
    texts = ["a" * size for size in (3, 30, 5, 31, 12, 33, 3, 34)] + ["b", "c" * 30, "d", "e" * 30]
    view = look(tmp_path, tokenizer(), texts, monkeypatch)
    assert (view.documents, view.shortest_prompt, view.median_prompt, view.longest_prompt) == (4, 3, 4, 12)
    assert (view.prompt_tokens, view.new_tokens, view.longest) == (23, 32, 20)
    assert sum(view.skipped.values()) == 3
    assert view.planned == round(12 * 4 / 7)


@pytest.mark.parametrize(
    ("texts", "limit", "rows", "planned"),
    [(2, None, 9, 2), (9, None, 9, 9), (9, 6, 9, 6), (9, 6, None, 6), (9, None, None, None), (9, 3, None, 3)],
)
def test_how_many_documents_are_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, texts: int, limit: int | None, rows: int | None, planned: int | None
) -> None:
    monkeypatch.setattr(inspection, "row_count", lambda _: rows)
    assert look(tmp_path, tokenizer(), ["text"] * texts, monkeypatch, limit=limit).planned == planned


@pytest.mark.parametrize(
    ("words", "text", "changes", "double", "without"),
    [
        (beginning, "a", {}, 0, 0),
        (beginning, "<pad>a", {}, 3, 0),
        (beginning, "a", {"chat": True}, 0, 3),
        (lambda: beginning("<pad>{{ messages[0]['content'] }}"), "a", {"chat": True}, 0, 0),
        (lambda: beginning("<pad>{{ messages[0]['content'] }}"), "<pad>a", {"chat": True}, 3, 0),
        (tokenizer, "<pad>a", {}, 0, 0),
    ],
)
def test_bos_is_found_twice_or_missing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: Callable[[], Any],
    text: str,
    changes: dict[str, Any],
    double: int,
    without: int,
) -> None:
    view = look(tmp_path, words(), [text] * 3, monkeypatch, **changes)
    assert (view.double_bos, view.without_bos) == (double, without)


@pytest.mark.parametrize(
    ("words", "changes", "lost", "without"),
    [
        (beginning, {"too_long": "truncate"}, 2, 0),
        (beginning, {"too_long": "truncate", "chat": True}, 0, 4),
        (lambda: beginning("<pad>{{ messages[0]['content'] }}"), {"too_long": "truncate", "chat": True}, 2, 0),
        (beginning, {"too_long": "skip"}, 0, 0),
        (tokenizer, {"too_long": "truncate"}, 0, 0),
    ],
)
def test_bos_that_goes_with_the_beginning_of_a_long_prompt_is_counted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: Callable[[], Any],
    changes: dict[str, Any],
    lost: int,
    without: int,
) -> None:
    view = look(tmp_path, words(), ["a", "b" * 30, "c", "d" * 40], monkeypatch, **changes)
    assert (view.lost_bos, view.without_bos) == (lost, without)
    assert sum(view.truncated.values()) == (2 if changes["too_long"] == "truncate" else 0)


def test_what_becomes_of_bos() -> None:
    assert inspection.bos_of(tokenizer()) == Bos(None, added=False, in_template=None)
    assert inspection.bos_of(beginning()) == Bos("<pad>", added=True, in_template=False)
    assert inspection.bos_of(beginning("<pad>{{ messages[0]['content'] }}")) == Bos("<pad>", True, True)
    assert inspection.bos_of(beginning("{{ raise_exception('two turns') }}")) == Bos("<pad>", True, None)


def test_special_tokens_that_differ_are_named() -> None:
    assert inspection.differing_specials(tokenizer(), tokenizer()) == ()
    assert inspection.differing_specials(tokenizer(), beginning()) == (Special("bos", None, "<pad>"),)


# Numbers, on models.


class Shaky:
    """A head whose logits prefer token 1 to token 0 by 1, and token 0 by 3 for the first text of a batch of several."""

    model = SimpleNamespace(dtype=torch.float32)

    def rows(self, ids: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        return (row == 0).float() * (len(ids) > 1)

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.stack([4 * rows, torch.ones_like(rows), torch.full_like(rows, -9.0), torch.full_like(rows, 99.0)], 1)


def texts(*lengths: int) -> list[Continuation]:
    prompts = [np.arange(2, dtype=np.int32) for _ in lengths]
    return [
        Continuation(cast(Any, SimpleNamespace(prompt=prompt)), np.arange(size, dtype=np.int32), "length")
        for prompt, size in zip(prompts, lengths, strict=True)
    ]


def test_the_noise_floor_counts_what_a_batch_flips() -> None:
    floor = trial.noise_floor(cast(Any, Shaky()), texts(3, 5), 3)  # the fourth id is padding
    assert (floor.documents, floor.positions, floor.flips, floor.near_ties) == (2, 8, 3, 0)
    assert floor.logit_difference == 4.0
    # Of token 0: 1 / (1 + e) alone, e^4 / (e^4 + e) in the batch; the third id hardly counts.
    assert floor.probability_difference == pytest.approx(0.9526 - 0.2689, abs=1e-3)


def test_memory_that_torch_holds_for_reuse_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU: what the checks of models took before a dry run looks is not gone."""
    held = {"mem_get_info": (100, 1000), "memory_reserved": 50, "memory_allocated": 30}
    for name, value in held.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert trial.free_memory(torch.device("cuda:1")) == 120


def snapshot(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.fixture(scope="module")
def looked(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> PreflightFacts:
    """A dry run with drafts of every kind, of which one has another vocabulary; one source lacks a column."""
    folder = tmp_path_factory.mktemp("looked")
    path = profile_file(folder, tiny)
    options = load_profile(path, ["data.0.limit=4", "batch_tokens=4096"])
    drafts = options.drafts | {"alien": options.drafts["close"].model_copy(update={"model": str(tiny / "other")})}
    data = [*options.data, options.data[0].model_copy(update={"prompt": "{txt}"})]
    before = snapshot(folder)
    result = preflight(options.model_copy(update={"drafts": drafts, "data": data}), folder / "run", Silent())
    assert snapshot(folder) == before
    return result


@pytest.mark.models
def test_a_dry_run_goes_on_behind_what_would_stop_the_run(looked: PreflightFacts) -> None:
    assert [(item.check, item.subject, item.kind, item.exit_code) for item in looked.refusals] == [
        ("vocabulary", "alien", "VocabularyMismatch", 4),
        ("data", "long.jsonl", "ColumnMissing", 3),
    ]
    assert {view.name for view in looked.drafts} == {"close", "skip", "wide", "brief"}
    assert [view.documents for view in looked.sources] == [4, 6]


@pytest.mark.models
def test_without_a_draft_nothing_is_said_of_speed_and_size(tiny: Path, tmp_path: Path) -> None:
    drafts = {"alien": {"kind": "model", "model": str(tiny / "other")}}
    path = profile_file(tmp_path, tiny, drafts=drafts, costs=ROOFLINE)
    result = preflight(load_profile(path, ["data.0.limit=1", "data.1.limit=1"]), None, Silent())
    assert (result.speed, result.storage, result.estimate) == (None, None, None)
    assert result.self_draft is not None


@pytest.mark.models
def test_a_dry_run_sees_padding_contexts_and_raw_prompts(looked: PreflightFacts) -> None:
    views = {view.name: view for view in looked.drafts}
    assert (views["wide"].facts.vocabulary, views["wide"].tokens, views["wide"].shared) == (320, 260, 260)
    assert (views["skip"].tokens, looked.scored_ids) == (None, 260)
    assert views["brief"].beyond > views["close"].beyond == 0
    checks = build_preflight(looked)
    jsonschema.validate(json.loads(answer_text(checks, "json")), json.loads(json_schema("preflight")))
    assert found(checks, "vocabulary", "wide")[0].level == "note"
    assert found(checks, "context", "brief")[0].level == "note"
    assert found(checks, "chat template")[0].level == "note"


@pytest.mark.models
def test_the_target_is_its_own_perfect_draft_and_a_batch_changes_nothing_in_float32(looked: PreflightFacts) -> None:
    assert looked.self_draft is not None
    assert looked.noise is not None
    assert looked.self_draft == SelfDraft(True, looked.self_draft.positions, *[looked.self_draft.positions] * 2, 0)
    assert (looked.noise.flips, looked.noise.documents) == (0, 10)
    assert 0 < looked.noise.logit_difference < 2e-4


@pytest.mark.models
def test_a_dry_run_measures_speed_and_size(looked: PreflightFacts) -> None:
    assert looked.speed is not None
    assert looked.estimate is not None
    assert looked.storage is not None
    assert (looked.speed.documents, looked.speed.positions, looked.speed.untimed) == (10, 240, None)
    assert min(looked.speed.prompts or 0, looked.speed.generated or 0, looked.speed.scored, looked.speed.timing_s or 0) > 0
    assert (looked.estimate.documents, looked.estimate.positions) == (10, 240)
    owners = [looked.target, *(view for view in looked.drafts if view.name != "skip")]
    assert looked.memory.weights == sum(4 * view.facts.parameters for view in owners)
    assert looked.memory.trial is None
    assert looked.storage.free is not None
    assert 0 < looked.storage.position_bytes < 4 * 200  # of four drafts


@pytest.mark.models
def test_a_layer_skip_that_is_not_the_target_is_a_problem(
    looked: PreflightFacts, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scoring itself is held against itself: a draft that should be the target, and lacks a layer, is found."""
    monkeypatch.setattr(trial, "layer_skip", lambda name, target, _: layer_skip(name, target, [1]))
    path = profile_file(tmp_path, tiny, drafts={"skip": {"kind": "layer_skip", "drop_layers": [2]}}, costs=ROOFLINE)
    result = preflight(load_profile(path), None, Silent())
    check = found(build_preflight(result), "self-draft")[0]
    assert check.level == "problem"
    assert "through layer skip without a dropped layer has another top token than itself" in check.cause
    assert result.speed is not None
    assert (result.speed.timing_s, result.storage and result.storage.free) == (None, None)


SHAPE = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size", "rms_norm_eps")
SHAPE += ("max_position_embeddings",)
ROOFLINE = {"source": "roofline", "accelerator": "h100-sxm"}
MIXED = {
    "drafts": {"close": {"kind": "model"}, "ngram": {"kind": "prompt_lookup"}},
    "data": [
        {"domain": "a", "path": "long.jsonl", "prompt": "{text}", "continuation": {"kind": "given", "column": "response"}},
        {
            "domain": "b",
            "path": "short.jsonl",
            "prompt": "{text}",
            "chat": True,
            "continuation": {"kind": "sampled", "max_new_tokens": 9},
        },
    ],
}


@pytest.mark.models
def test_a_dry_run_looks_at_a_head(tiny: Path, tmp_path: Path) -> None:
    """Its ids, dtype and layers, how its files are read and what else they could mean; it has no tokenizer, steps, and
    memory that is known.
    """
    target = load_model("target", ModelOptions(model=str(tiny / "target")), "float32")
    ids = list(range(0, 200, 2))
    network: Any = random_head(target, (1, 2, 3), len(ids)).network
    network.ids = torch.tensor(ids)
    shape = {key: target.network.config.to_dict()[key] for key in SHAPE} | {"num_hidden_layers": 1}
    config = {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": len(ids), **shape}
    config["eagle_aux_hidden_state_layer_ids"] = [1, 2, 3]
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "config.json").write_text(json.dumps(config))
    names = {"blocks.0": "midlayer", "hidden_norm": "midlayer.hidden_norm"}
    tensors = {"d2t": network.ids - torch.arange(len(ids))}
    for name, weight in network.state_dict().items():
        head = next((old for old in names if name.startswith(old)), None)
        tensors[name if head is None else names[head] + name.removeprefix(head)] = weight
    tensors.pop("ids")
    save_file(tensors, tmp_path / "head" / "model.safetensors")
    draft = {"kind": "eagle3", "model": str(tmp_path / "head"), "dtype": "float32"}
    path = profile_file(tmp_path, tiny, drafts={"eagle": draft}, rules=["strict"])
    result = preflight(load_profile(path), None, Silent())
    assert result.refusals == ()
    checks = build_preflight(result)
    (own,) = found(checks, "vocabulary", "eagle")
    assert (own.level, own.cause) == ("note", "can propose 100 of the target's 260 ids (38%), and reads all of them")
    reading, *warned = found(checks, "wiring")
    assert (reading.subject, reading.level) == ("eagle", "ok")
    assert reading.cause.startswith("Eagle3 in float32, 4 drafts a round. read as ")
    assert [item.level for item in warned] == ["note"] * len(warned)
    (context,) = found(checks, "context", "eagle")
    assert context.cause == "512 tokens"
    assert result.memory.weights > 4 * target.parameters
    assert result.speed is not None
    assert (result.speed.untimed, result.storage is not None) == (None, True)


@pytest.mark.models
def test_sampled_and_given_text_can_be_tried_out(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = MIXED | {"costs": ROOFLINE, "batch_tokens": 1024}
    tree["drafts"] = {"close": {"kind": "model", "model": str(tiny / "draft")}, "ngram": {"kind": "prompt_lookup"}}
    path = profile_file(tmp_path, tiny, **tree)
    rows = [json.loads(line) for line in (tmp_path / "long.jsonl").read_text().splitlines()]
    rows[0]["response"] = "x"  # one short answer makes the others no shorter
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    now, score = [0.0], Scorer.score

    def slow_at_first(self: Scorer, batch: Any) -> Any:
        """As where kernels are compiled when they are first needed."""
        now[0] += 1.0 if now[0] else 1e9
        return score(self, batch)

    monkeypatch.setattr(trial, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(Scorer, "score", slow_at_first)
    result = preflight(load_profile(path), None, Silent())
    assert [(view.prompts, view.generated) for view in result.sources] == [("prompt", False), ("chat", True)]
    assert result.refusals == ()
    assert result.self_draft is not None
    assert result.self_draft.accepted == result.self_draft.agreeing == result.self_draft.positions
    assert result.speed is not None
    assert result.speed.scored > 1  # tokens a second
    logged = sum(min(32, len(row["response"])) for row in rows[:6])  # a token a byte
    assert logged + 6 <= result.speed.positions <= logged + 6 * 9
    assert result.noise is not None
    assert result.noise.positions > 6 * 32  # greedy texts beside short answers are no shorter than the others
    assert result.noise.documents == result.speed.documents == 12  # greedy text is written for all of them
    assert result.speed.batch == 2  # of the four documents of a shard; the given ones are not generated


def document(number: int, prompt: int) -> Document:
    ids = np.arange(prompt, dtype=np.int32)
    return Document(number, "code", None, 0, number, ids, None, cut=False, max_new_tokens=8, kind="greedy", on_policy=True)


@each("prompt", [1, 5, 9, 10, 11, 12])
@each("new", [1, 2, 5, 6, 7])
def test_a_document_goes_beyond_a_context_where_scoring_sees_no_proposal(prompt: int, new: int) -> None:
    item = dataclasses.replace(document(0, prompt), max_new_tokens=new)
    draft = cast(Any, SimpleNamespace(vocabulary=300, context=10))
    proposed = DraftModel.columns(draft, np.zeros(prompt + new, dtype=np.int32), prompt)["proposed"]
    assert inspection.outside([item], 10) == (bool((proposed == 0).any()), bool((proposed == 0).all()))
    assert inspection.outside([item], None) == (0, 0)


def test_documents_are_taken_in_turns_from_their_sources_and_numbered_anew() -> None:
    turns = trial.in_turns([[document(0, 1), document(1, 2), document(2, 3)], [document(0, 4)]])
    assert [(item.document, len(item.prompt)) for item in turns] == [(0, 1), (1, 4), (2, 2), (3, 3)]


@pytest.mark.parametrize(
    ("prompts", "device", "parameters", "budget", "count"),
    [
        ([8] * 99, "cpu", 1, 10**6, trial.DOCUMENTS),
        ([8] * 99, "cpu", 1, 160, 4),  # 8 + 32 tokens each
        ([8, 8, 48, 8], "cpu", 1, 160, 2),  # three of 80, padded
        ([8] * 99, "cpu", trial.PARAMETER_TOKENS // 200, 10**6, 5),
        ([8] * 99, "cuda", trial.PARAMETER_TOKENS // 200, 10**6, trial.DOCUMENTS),
        ([900, 900, 900], "cpu", 1, 160, 2),  # never fewer: a batch has others in it
        ([8], "cpu", 1, 160, 1),
    ],
)
def test_a_trial_stays_small(prompts: list[int], device: str, parameters: int, budget: int, count: int) -> None:
    target = SimpleNamespace(device=SimpleNamespace(type=device), parameters=parameters)
    every = [document(number, size) for number, size in enumerate(prompts)]
    assert trial.chosen(every, cast(Any, target), budget) == every[:count]


@pytest.fixture
def ordinary(tiny: Path, tmp_path: Path) -> Path:
    """A profile whose target is a copy that a test may change."""
    shutil.copytree(tiny / "target", tmp_path / "target")
    drafts = {"skip": {"kind": "layer_skip", "drop_layers": [2]}}
    return profile_file(
        tmp_path, tiny, target={"model": "./target", "dtype": "float32"}, drafts=drafts, costs=ROOFLINE, gammas=[1, 2]
    )


def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object
) -> tuple[int | str | None, str, str]:
    """Exit code and output of `alphaprof profile`, in this process."""
    monkeypatch.setattr(sys, "argv", ["alphaprof", "profile", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        app.main()
    output = capsys.readouterr()
    return caught.value.code, output.out, output.err


@pytest.mark.models
def test_a_dry_run_prints_its_checks_and_ends_in_0(
    ordinary: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = snapshot(ordinary.parent)
    code, text, _ = command(monkeypatch, capsys, ordinary, "--dry-run", "--limit", 2, "--set", "batch_tokens=80")
    assert code == 0
    assert text.count("2 documents; prompts of") == 2
    assert text.startswith(f"0 problems and 1 note, {FINE}\n")
    code, text, _ = command(monkeypatch, capsys, ordinary, "--dry-run", "--format", "json", "--out", ordinary.parent / "run")
    assert (code, json.loads(text)["format"]) == (0, "alphaprof-preflight")
    assert snapshot(ordinary.parent) == before


@pytest.mark.models
def test_logits_that_are_not_finite_stop_the_run(
    ordinary: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = llama()
    with torch.no_grad():
        broken.model.norm.weight[0] = torch.nan
    broken.save_pretrained(ordinary.parent / "target")
    code, text, errors = command(monkeypatch, capsys, ordinary, "--dry-run", "--format", "json")
    content = json.loads(text)
    assert [check["name"] for check in content["checks"] if check["stops"]] == ["trial"]
    assert [content["seen"][name] for name in ("self_draft", "noise", "speed", "storage", "estimate")] == [None] * 5
    assert code == 4
    assert "the logits of target hold NaN or infinity" in errors


@pytest.mark.models
def test_a_template_that_is_missing_stops_the_run_after_everything_was_listed(
    ordinary: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = tokenizer()
    words.chat_template = None
    shutil.rmtree(ordinary.parent / "target")
    llama().save_pretrained(ordinary.parent / "target")
    words.save_pretrained(ordinary.parent / "target")
    out = ordinary.parent / "model"
    (out / "mine").mkdir(parents=True)
    (out / "mine" / "notes.txt").touch()
    code, text, errors = command(monkeypatch, capsys, ordinary, "--dry-run", "--format", "json", "--out", out)
    stopping = [(check["name"], check["subject"]) for check in json.loads(text)["checks"] if check["stops"]]
    assert stopping == [("chat template", "long.jsonl"), ("disk", str(out))]
    assert code == 6  # what a run would say first
    assert "error: " in errors
    assert f"{out} exists and is not empty" in errors


# Options that contradict each other, and words of the error.
CONTRADICTIONS: dict[str, tuple[list[str], str]] = {
    "resumed": (["--dry-run", "--resume"], "--resume cannot be combined with it"),
    "reused": (["--dry-run", "--reuse-continuations", "x"], "--reuse-continuations cannot be combined with it"),
    "until decided": (["--dry-run", "--until-decided"], "--until-decided cannot be combined with it"),
    "a run as a table": (["--out", "run", "--format", "json"], "--format needs --dry-run"),
    "a run to nowhere": ([], "a run needs a directory"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_options_that_contradict_each_other_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    options, words = CONTRADICTIONS[name]
    path = profile_file(tmp_path, tmp_path)
    code, text, errors = command(monkeypatch, capsys, path, *options)
    assert (code, text) == (2, "")
    assert words in errors
    assert len(errors.splitlines()) == 2
