"""`alphaprof export` of what one pastes into an engine: its exact text, the draft and gamma in it, and what is refused.

vLLM 0.32.0 accepted configurations of these shapes: see docs/exports.md, and scripts/check_vllm_config.py.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import binom

from alphaprof.commands.export.engines import WRITERS, ServedDraft, export, gamma_schedule, serving_command
from alphaprof.commands.export.scope import scope_of
from alphaprof.costs.steps import TARGET, StepRow, StepTable
from alphaprof.costs.timing import step_times
from alphaprof.errors import OptionInvalid
from alphaprof.report.build import build_report
from alphaprof.report.serving import paste_formats
from alphaprof.run.manifest import Imported
from alphaprof.run.reader import Run, RunDraft
from tests.commands.test_export import RECIPE, STORY, by_batch, table, written
from tests.loops import each
from tests.reporting import only
from tests.synthetic import SETTINGS, Domain, Recipe, draft_facts, head_facts, lookup_facts, write_run

HAND = ServedDraft(
    target="my models/target",
    draft=draft_facts("draft"),
    model="synthetic/draft",
    revision=None,
    drawn=False,
    blocks=False,
    gamma=3,
    schedule=((1, 8, 3), (9, 32, 0)),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return write_run(tmp_path_factory.mktemp("serving") / "run", RECIPE)


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A model, a head that lacks tokens of the target and prompt lookup on sampled text."""
    recipe = Recipe(
        domains={"story": STORY},
        rules=("one_hot", "lossless"),
        lookups=("lookup",),
        heads={"head": {"engine_method": "eagle3"}},
    )
    return write_run(tmp_path_factory.mktemp("sampled") / "run", recipe)


def changed(run: Run, draft: str, revision: str | None = None, **facts: Any) -> Run:
    """The run with other facts of a draft."""
    drafts = run.manifest.drafts | {draft: dataclasses.replace(run.manifest.drafts[draft], **facts)}
    options = run.manifest.config["drafts"][draft] | {"revision": revision}
    config = run.manifest.config | {"drafts": run.manifest.config["drafts"] | {draft: options}}
    return Run(run.path, dataclasses.replace(run.manifest, drafts=drafts, config=config))


def test_the_configuration_of_vllm_to_the_letter(run: Run, tmp_path: Path) -> None:
    side = RunDraft(run, "small").asked(table(tmp_path / "times.csv", run))
    assert written(side, "vllm-config", domain="code") == (
        "{\n"
        '  "method": "draft_model",\n'
        '  "model": "synthetic/small",\n'
        '  "num_speculative_tokens": 3,\n'
        '  "draft_sample_method": "greedy",\n'
        '  "rejection_sample_method": "standard",\n'
        '  "num_speculative_tokens_per_batch_size": [[1, 4, 3], [5, 7, 1], [8, 16, 0]]\n'
        "}\n"
    )
    assert written(RunDraft(run, "lookup"), "vllm-config", gamma=3) == (
        "{\n"
        '  "method": "ngram",\n'
        '  "prompt_lookup_max": 3,\n'
        '  "prompt_lookup_min": 1,\n'
        '  "num_speculative_tokens": 3,\n'
        '  "draft_sample_method": "greedy",\n'
        '  "rejection_sample_method": "standard"\n'
        "}\n"
    )


def test_vllm_looks_up_as_the_run_did_or_it_is_said(run: Run) -> None:
    """Both lengths are the run's; the place is that of a runner, which a configuration cannot choose."""
    for match, said in (("leftmost", True), ("rightmost", False)):
        settings = {"min_ngram": 2, "max_ngram": 4, "match": match}
        drafts = run.manifest.drafts | {"lookup": dataclasses.replace(run.manifest.drafts["lookup"], settings=settings)}
        found = export(
            RunDraft(run.view(dataclasses.replace(run.manifest, drafts=drafts)), "lookup"), "vllm-config", gamma=3
        )
        config = json.loads(found.text)
        assert (config["prompt_lookup_min"], config["prompt_lookup_max"]) == (2, 4)
        assert any("VLLM_USE_V2_MODEL_RUNNER=0" in line for line in found.warnings) == said


def test_the_arguments_of_sglang_to_the_letter(run: Run) -> None:
    assert written(RunDraft(run, "small"), "sglang-args", gamma=3) == (
        "--speculative-algorithm STANDALONE --speculative-draft-model-path synthetic/small "
        "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4\n"
    )


@each("to", ["vllm-config", "sglang-args", "llamacpp-args"])
def test_the_command_that_serves_can_be_pasted(to: str) -> None:
    """A shell takes it apart into the engine, the target, and what the export writes."""
    starts = {
        "vllm-config": ["vllm", "serve", HAND.target, "--speculative-config"],
        "sglang-args": ["python", "-m", "sglang.launch_server", "--model-path", HAND.target],
        "llamacpp-args": ["llama-server", "-m", HAND.target],
    }
    text = WRITERS[to](HAND)
    words, first = shlex.split(serving_command(to, HAND)), len(starts[to])
    assert words[:first] == starts[to]
    if to == "vllm-config":
        (config,) = words[first:]
        assert json.loads(config) == json.loads(text)
    else:
        assert words[first:] == shlex.split(text)


@pytest.mark.parametrize(
    ("method", "model", "algorithm"),
    [("eagle3", "my/head", "EAGLE3"), ("eagle", "my/head", "EAGLE"), ("mtp", None, "NEXTN")],
)
def test_heads_are_served_from_their_files_or_from_the_targets(method: str, model: str | None, algorithm: str) -> None:
    facts = head_facts("head", 3, engine_method=method, settings={"speculative_algorithm": algorithm})
    head = dataclasses.replace(HAND, draft=facts, model=model, drawn=True, schedule=None)
    config = json.loads(WRITERS["vllm-config"](head))
    draft = {"method": method} | ({"model": model} if model else {})
    expected = {"num_speculative_tokens": 3, "draft_sample_method": "probabilistic", "rejection_sample_method": "standard"}
    assert config == draft | expected
    words = shlex.split(WRITERS["sglang-args"](head))
    assert words[:2] == ["--speculative-algorithm", algorithm]
    assert words[-1] == "--speculative-use-rejection-sampling"
    assert ("--speculative-draft-model-path" in words) == (model is not None)


def test_the_rule_that_was_measured_decides_how_drafts_are_taken(sampled: Run) -> None:
    """Drawn under lossless; the top token under one_hot, which a verdict on sampled text takes unless asked."""
    for rule, method in ((None, "greedy"), ("one_hot", "greedy"), ("lossless", "probabilistic")):
        for draft in ("small", "head"):
            found = json.loads(written(RunDraft(sampled, draft), "vllm-config", rule=rule, gamma=2))
            assert (found["draft_sample_method"], found["rejection_sample_method"]) == (method, "standard")
    lookup = json.loads(written(RunDraft(sampled, "lookup"), "vllm-config", rule="lossless", gamma=2))
    assert lookup["draft_sample_method"] == "greedy"  # it proposes one token, drawn or not
    whole = changed(sampled, "head", reduced_vocabulary=False)
    words = {rule: written(RunDraft(whole, "head"), "sglang-args", rule=rule, gamma=2) for rule in ("one_hot", "lossless")}
    assert words["lossless"] == words["one_hot"].rstrip() + " --speculative-use-rejection-sampling\n"


def test_without_a_gamma_the_most_that_the_schedule_asks_for_is_served(run: Run, tmp_path: Path) -> None:
    """At the concurrency of the verdict the schedule has fewer."""
    config = table(tmp_path / "times.csv", run)
    config |= {"decision": config["decision"] | {"concurrency": 7}}
    side = RunDraft(run, "small").asked(config)
    verdict = only(build_report(run, config=config), "code").gamma
    found = export(side, "vllm-config", domain="code")
    content = json.loads(found.text)
    schedule = by_batch(content["num_speculative_tokens_per_batch_size"])
    assert (schedule[7], content["num_speculative_tokens"]) == (verdict, max(schedule.values()))
    assert verdict == 1 < max(schedule.values())


def test_a_schedule_without_drafts_still_names_a_gamma(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Recipe(domains={"code": Domain(documents=40, alpha=0.02)}, lookups=("lookup",)))
    config = table(tmp_path / "times.csv", run, batches=(1, 16))
    found = export(RunDraft(run, "small").asked(config), "vllm-config")
    content = json.loads(found.text)
    assert content["num_speculative_tokens_per_batch_size"] == [[1, 16, 0]]
    assert content["num_speculative_tokens"] == 1
    assert any(said.startswith("NO-GO: by the step times in times.csv: speedup ") for said in found.warnings)


def noisy(generator: np.random.Generator, dearer: bool) -> StepTable:
    """Eight rounds of steps that vary by 15 %; at 16 sequences verification takes longer, or all is as with one."""
    rows = []
    for batch in (1, 4, 16):
        more = 8.0 if dearer and batch == 16 else 0.8
        rounds = (10 + more * np.arange(6)) * np.exp(generator.normal(0, 0.15, (8, 6)))
        for n, (ms, taken) in enumerate(zip(step_times(rounds).tolist(), rounds.T.tolist(), strict=True), start=1):
            rows.append(StepRow(TARGET, "decode" if n == 1 else "verify", n, batch, 256, ms, rounds=tuple(taken)))
        rows.append(StepRow("lookup", "lookup", 1, batch, 256, 0.01))
        taken = tuple((0.6 * np.exp(generator.normal(0, 0.15, 8))).tolist())
        rows.append(StepRow("small", "draft", 1, batch, 256, float(np.median(taken)), rounds=taken))
    return StepTable(rows)


@pytest.mark.parametrize("dearer", [False, True])
def test_noise_of_step_times_makes_no_schedule_and_dear_verification_does(tmp_path: Path, dearer: bool) -> None:
    domains = {"code": dataclasses.replace(RECIPE.domains["code"], documents=60)}
    run = write_run(tmp_path / "run", dataclasses.replace(RECIPE, domains=domains))
    config = table(tmp_path / "times.csv", run)
    scope = scope_of(RunDraft(run, "small").asked(config), "vllm-config")
    best = only(build_report(run, config=config), "code").gamma
    assert scope.costs is not None
    generator, found = np.random.default_rng(5), []
    for _ in range(40):
        costs = dataclasses.replace(scope.costs, table=noisy(generator, dearer))
        found.append(gamma_schedule(dataclasses.replace(scope, costs=costs), best))
    changes = [each for each in found if each is not None]
    if dearer:
        assert len(changes) > 30
        assert all(each[-1][2] < each[0][2] for each in changes)
    else:
        assert len(changes) <= binom.ppf(0.999, len(found), 0.05)


def test_a_verdict_other_than_go_is_said_where_a_server_is_configured(run: Run) -> None:
    for least, verdict in ((1.01, ""), (1.5, "UNDECIDED: "), (3.0, "NO-GO: ")):
        config = run.manifest.config | {"decision": run.manifest.config["decision"] | {"min_speedup": least}}
        for to in ("vllm-config", "sglang-args"):
            warnings = export(RunDraft(run, "small").asked(config), to, gamma=2).warnings
            said = [line for line in warnings if line.startswith(("GO", "NO-GO", "UNDECIDED"))]
            assert [line.startswith(verdict) for line in said] == [True] * bool(verdict)


def test_a_head_that_drafts_in_one_step_has_no_schedule(run: Run, tmp_path: Path) -> None:
    parallel = changed(run, "small", kind="p_eagle", engine_method="eagle3", in_one_step=True)
    side = RunDraft(parallel, "small").asked(table(tmp_path / "times.csv", run))
    assert "num_speculative_tokens_per_batch_size" not in json.loads(written(side, "vllm-config", domain="code"))


def test_paths_and_revisions_are_those_of_the_profile(run: Run) -> None:
    side = RunDraft(changed(run, "small", "v1.2", reference="/my models/it's"), "small")
    config = json.loads(written(side, "vllm-config", gamma=2))
    assert (config["model"], config["revision"]) == ("/my models/it's", "v1.2")
    line = written(side, "sglang-args", gamma=2)
    expected = (
        "--speculative-algorithm STANDALONE --speculative-draft-model-path PATH --speculative-draft-model-revision v1.2"
    )
    said = subprocess.run(["sh", "-c", f"printf '%s\\n' {line}"], capture_output=True, text=True, check=True).stdout
    assert " ".join(said.splitlines()[:6]) == expected.replace("PATH", "/my models/it's")


REFUSED: dict[str, tuple[str, str, str | None, str]] = {
    "lookup in SGLang": ("sglang-args", "lookup", None, "SGLang has no method for a draft of kind prompt_lookup"),
    "drawn by a model": ("sglang-args", "small", "lossless", "uses the top tokens of model drafts"),
    "drawn by a head": ("sglang-args", "head", "lossless", "lack some of the target's tokens"),
}


@pytest.mark.parametrize(("to", "draft", "rule", "problem"), REFUSED.values(), ids=REFUSED)
def test_what_no_engine_does_is_refused(sampled: Run, to: str, draft: str, rule: str | None, problem: str) -> None:
    with pytest.raises(OptionInvalid, match=problem):
        written(RunDraft(sampled, draft), to, rule=rule, gamma=2)
    assert to not in paste_formats(sampled.manifest.drafts[draft], rule or "auto")


def test_layers_of_the_target_are_refused(run: Run) -> None:
    skipping = changed(run, "small", kind="layer_skip", engine_method=None, settings={}, shares_target_weights=True)
    with pytest.raises(OptionInvalid, match="vLLM has no method for a draft of kind layer_skip") as caught:
        export(RunDraft(skipping, "small"), "vllm-config", gamma=2)
    assert "simulate this one: --to rates" in caught.value.hint


def test_what_drafted_in_an_imported_run_is_not_known(run: Run) -> None:
    unknown = dict.fromkeys(("sampling", "prompts_known_by"))
    counts = dict.fromkeys(("without_steps", "plain_steps", "beyond_the_end"), 0)
    imported = Imported(engine="vLLM", files=("a",), rule="strict", gamma=3, **unknown, **counts)
    served = Run(run.path, dataclasses.replace(run.manifest, imported=imported))
    with pytest.raises(OptionInvalid, match="was imported from vLLM, whose log does not name the draft"):
        export(RunDraft(served, "small"), "vllm-config", gamma=3)


def test_drafts_that_an_engine_draws_otherwise_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for top_k, rule, processing, expected in (
        (20, "lossless", "same", 1),
        (20, "lossless", "temperature", 0),
        (20, "one_hot", "same", 0),
        (0, "lossless", "same", 0),
    ):
        monkeypatch.setattr("tests.synthetic.SETTINGS", SETTINGS | {"top_k": top_k})
        recipe = Recipe({"story": STORY}, rules=("one_hot", "lossless"), seed=top_k)  # equal recipes are written once
        cut = write_run(tmp_path / f"{top_k}{rule}{processing}", recipe)
        side = RunDraft(cut, "small").asked(cut.manifest.config | {"draft_processing": processing})
        found = export(side, "vllm-config", rule=rule, gamma=2).warnings
        assert sum("uses temperature only" in said for said in found) == expected


BOTH = ("vllm-config", "sglang-args")
MODEL, LOOKUP, HEAD = draft_facts("small"), lookup_facts("lookup"), head_facts("head", 3, reduced_vocabulary=False)
REDUCED = dataclasses.replace(HEAD, reduced_vocabulary=True)
PARALLEL = dataclasses.replace(HEAD, kind="p_eagle", settings={"parallel_drafting": True}, in_one_step=True)
SKIP = dataclasses.replace(MODEL, kind="layer_skip", engine_method=None, settings={})
SERVED = {
    "a model, greedy": (MODEL, "strict", (*BOTH, "llamacpp-args")),
    "a model, its top tokens": (MODEL, "one_hot", (*BOTH, "llamacpp-args")),
    "a model, drawn": (MODEL, "lossless", BOTH[:1]),  # SGLang draws from heads only
    "prompt lookup": (LOOKUP, "strict", BOTH[:1]),  # SGLang's NGRAM is another draft
    "prompt lookup has one token to draw": (LOOKUP, "lossless", BOTH[:1]),
    "one token to draw in both": (dataclasses.replace(LOOKUP, settings=MODEL.settings), "lossless", BOTH),
    "a head": (HEAD, "lossless", BOTH),
    "a head of few tokens": (REDUCED, "one_hot", BOTH),
    "a head of few tokens, drawn": (REDUCED, "lossless", BOTH[:1]),
    "in one step": (PARALLEL, "one_hot", BOTH[:1]),
    "in one step, drawn": (PARALLEL, "lossless", ()),  # vLLM takes its top tokens
    "layers of the target": (SKIP, "strict", ()),
    "a rule of no engine": (MODEL, "additive_0p1", ()),
    "trees": (MODEL, "tree_2", ()),
    "what engines do by default": (REDUCED, "auto", BOTH),
    "a verdict on greedy and on sampled text": (MODEL, "strict and lossless", BOTH[:1]),
}


@each("name", SERVED)
def test_a_format_is_offered_where_its_engine_does_what_was_measured(name: str) -> None:
    facts, rule, expected = SERVED[name]
    assert paste_formats(facts, rule) == expected
