"""`alphaprof export` of what one pastes into an engine: its exact text, the draft and gamma in it, and what is refused.

What engines accept, and what they make of it: docs/research/engine-conformance.txt.
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

from alphaprof.commands.export.engines import (
    WRITERS,
    ServedDraft,
    export,
    export_step_costs,
    gamma_schedule,
    serving_command,
)
from alphaprof.config.engines import FORMATS, VLLM
from alphaprof.costs.steps import TARGET, StepRow, StepTable
from alphaprof.costs.timing import step_times
from alphaprof.errors import OptionInvalid
from alphaprof.report.build import build_report
from alphaprof.report.scope import scope_of
from alphaprof.report.serving import paste_formats, why_not_served
from alphaprof.run.manifest import Imported
from alphaprof.run.reader import Run, RunDraft
from tests.commands.test_export import RECIPE, STORY, by_batch, table, written
from tests.loops import each
from tests.reporting import only
from tests.synthetic import SETTINGS, Domain, Recipe, draft_facts, head_facts, lookup_facts, write_run

HAND = ServedDraft(
    target="my models/target",
    draft=draft_facts("draft"),
    engine=VLLM,
    method=VLLM.methods["model"],
    model="synthetic/draft",
    revision=None,
    rule="one_hot",
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
        rules=("one_hot", "lossless", "block"),
        lookups=("lookup",),
        heads={"head": {}},
    )
    return write_run(tmp_path_factory.mktemp("sampled") / "run", recipe)


def changed(run: Run, draft: str, revision: str | None = None, **facts: Any) -> Run:
    """The run with other facts of a draft."""
    drafts = run.manifest.drafts | {draft: dataclasses.replace(run.manifest.drafts[draft], **facts)}
    options = run.manifest.config["drafts"][draft] | ({"revision": revision} if revision else {})
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
        '  "num_speculative_tokens_per_batch_size": [[1, 1, 3], [2, 3, 2], [4, 7, 1], [8, 16, 0]]\n'
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
    engine = FORMATS[to][0]
    hand = dataclasses.replace(HAND, engine=engine, method=engine.methods["model"], schedule=None)
    text = WRITERS[to](hand)
    words, first = shlex.split(serving_command(hand)), len(starts[to])
    assert words[:first] == starts[to]
    if to == "vllm-config":
        (config,) = words[first:]
        assert json.loads(config) == json.loads(text)
    else:
        assert words[first:] == shlex.split(text)


# What each engine starts a kind of draft with.
WORDS = {
    "vllm-config": {"model": "draft_model", "eagle1": "eagle", "eagle3": "eagle3", "mtp": "mtp", "dflash": "dflash"},
    "sglang-args": {"model": "STANDALONE", "eagle1": "EAGLE", "eagle3": "EAGLE3", "mtp": "NEXTN", "dflash": "DFLASH"},
    "llamacpp-args": {"model": "draft-simple", "eagle3": "draft-eagle3", "mtp": "draft-mtp", "dflash": "draft-dflash"},
}


@each("kind", WORDS["vllm-config"])
@each("to", WORDS)
def test_a_draft_is_called_what_its_engine_calls_it(to: str, kind: str, run: Run) -> None:
    """With its own files, but for modules of the target's checkpoint; DFlash in SGLang has no steps to count."""
    block, inside = kind == "dflash", kind == "mtp"
    facts = {"reference": run.manifest.target.reference} if inside else {}
    side = RunDraft(changed(run, "small", kind=kind, in_one_step=block, depths=3 if inside else None, **facts), "small")
    if kind not in WORDS[to]:
        with pytest.raises(OptionInvalid, match=f"has no method for a draft of kind {kind}"):
            written(side, to, gamma=2)
        return
    text = written(side, to, gamma=2)
    assert WORDS[to][kind] in (json.loads(text)["method"] if to == "vllm-config" else text.split())
    assert ("synthetic/small" in text) == (not inside)
    assert ("--speculative-num-steps" in text) == (to == "sglang-args" and not block)


def test_parallel_drafts_are_told_to_vllm(run: Run) -> None:
    for kind, method in (("p_eagle", "eagle3"), ("pard", "draft_model")):
        config = json.loads(
            written(RunDraft(changed(run, "small", kind=kind, in_one_step=True), "small"), "vllm-config", gamma=2)
        )
        assert (config["method"], config["parallel_drafting"]) == (method, True)


# How a rule is asked for: draft_sample_method and rejection_sample_method in vLLM; the last words of the others.
ASKED: dict[str, dict[str, Any]] = {
    "vllm-config": {
        "one_hot": ("greedy", "standard"),
        "lossless": ("probabilistic", "standard"),
        "block": ("probabilistic", "block"),
    },
    "sglang-args": {
        "one_hot": (),
        "lossless": ("--speculative-use-rejection-sampling",),
        "block": ("--speculative-use-rejection-sampling", "--speculative-use-block-verification"),
    },
    "llamacpp-args": {"one_hot": (), "lossless": ("--spec-draft-sampling", "probabilistic")},
}
TOP, DRAWN, EVERY = ("one_hot",), ("one_hot", "lossless"), ("one_hot", "lossless", "block")
RULED = {  # the rules that an engine applies to a kind of draft
    ("vllm-config", "0.33"): {
        "model": EVERY,
        "eagle3": EVERY,
        "mtp": EVERY,
        "dflash": EVERY,
        "p_eagle": DRAWN,
        "pard": DRAWN,
    },
    ("vllm-config", "0.32"): {"model": EVERY, "dflash": EVERY, "p_eagle": DRAWN},
    ("vllm-config", "0.29"): {"model": DRAWN, "eagle3": EVERY, "dflash": EVERY, "pard": DRAWN},
    ("sglang-args", "0.5.23"): {"model": TOP, "eagle1": EVERY, "eagle3": EVERY, "mtp": EVERY, "dflash": TOP},
    ("sglang-args", "0.5.15"): {"model": TOP, "eagle3": DRAWN, "dflash": TOP},
    ("llamacpp-args", "b11549"): {"model": DRAWN, "eagle3": TOP, "mtp": DRAWN, "dflash": TOP},
    ("llamacpp-args", "b11063"): {"model": TOP, "mtp": TOP},
}


@each("to, version", RULED)
def test_a_rule_is_asked_for_where_the_engine_applies_it_and_refused_elsewhere(to: str, version: str, sampled: Run) -> None:
    for kind, rules in RULED[to, version].items():
        side = RunDraft(changed(sampled, "small", kind=kind, in_one_step=kind in ("dflash", "p_eagle", "pard")), "small")
        for rule in EVERY:
            if rule not in rules:
                with pytest.raises(OptionInvalid, match=f"{version}.* {kind} drafts"):
                    written(side, to, rule=rule, gamma=2, version=version)
                continue
            text = written(side, to, rule=rule, gamma=2, version=version)
            if to == "vllm-config":
                config = json.loads(text)
                assert (config["draft_sample_method"], config["rejection_sample_method"]) == ASKED[to][rule]
            else:
                known = {word for words in ASKED[to].values() for word in words}
                assert tuple(word for word in text.split() if word in known) == ASKED[to][rule]


def test_the_rule_that_was_measured_decides_how_drafts_are_taken(sampled: Run) -> None:
    """Drawn under lossless; the top token under one_hot, which a verdict on sampled text takes unless asked."""
    for rule, method in ((None, "greedy"), ("one_hot", "greedy"), ("lossless", "probabilistic")):
        for draft in ("small", "head"):
            found = json.loads(written(RunDraft(sampled, draft), "vllm-config", rule=rule, gamma=2))
            assert (found["draft_sample_method"], found["rejection_sample_method"]) == (method, "standard")
    lookup = json.loads(written(RunDraft(sampled, "lookup"), "vllm-config", rule="block", gamma=2))
    assert (lookup["draft_sample_method"], lookup["rejection_sample_method"]) == (
        "greedy",
        "standard",
    )  # it proposes one token, drawn or not
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


def test_dear_verification_makes_a_schedule_that_falls(tmp_path: Path) -> None:
    """Whatever the noise of the step times."""
    domains = {"code": dataclasses.replace(RECIPE.domains["code"], documents=60)}
    run = write_run(tmp_path / "run", dataclasses.replace(RECIPE, domains=domains))
    config = table(tmp_path / "times.csv", run)
    scope = scope_of(RunDraft(run, "small").asked(config), "vllm-config")
    best = only(build_report(run, config=config), "code").gamma
    assert scope.costs is not None
    generator, found = np.random.default_rng(5), []
    for _ in range(40):
        costs = dataclasses.replace(scope.costs, table=noisy(generator, dearer=True))
        found.append(gamma_schedule(dataclasses.replace(scope, costs=costs), best))
    changes = [each for each in found if each is not None]
    assert len(changes) > 30
    assert all(each[-1][2] < each[0][2] for each in changes)


def test_a_verdict_other_than_go_is_said_where_a_server_is_configured(run: Run) -> None:
    for least, verdict in ((1.01, ""), (1.5, "UNDECIDED: "), (3.0, "NO-GO: ")):
        config = run.manifest.config | {"decision": run.manifest.config["decision"] | {"min_speedup": least}}
        for to in ("vllm-config", "sglang-args"):
            warnings = export(RunDraft(run, "small").asked(config), to, gamma=2).warnings
            said = [line for line in warnings if line.startswith(("GO", "NO-GO", "UNDECIDED"))]
            assert [line.startswith(verdict) for line in said] == [True] * bool(verdict)


def test_what_vllms_v1_runner_drafts_in_one_step_has_no_schedule(run: Run, tmp_path: Path) -> None:
    for kind, scheduled in (("p_eagle", False), ("pard", False), ("dflash", True)):
        parallel = changed(run, "small", kind=kind, in_one_step=True)
        side = RunDraft(parallel, "small").asked(table(tmp_path / "times.csv", run))
        config = json.loads(written(side, "vllm-config", domain="code"))
        assert ("num_speculative_tokens_per_batch_size" in config) == scheduled


def test_a_schedule_as_each_engine_takes_it(run: Run, tmp_path: Path) -> None:
    """SGLang goes by the largest batch size of its file that is not above the batch's, and holds the one number there."""
    side = RunDraft(changed(run, "small", kind="eagle3"), "small").asked(table(tmp_path / "times.csv", run))
    config = json.loads(written(side, "vllm-config", domain="code"))
    adaptive = export(side, "sglang-adaptive", domain="code")
    steps = {int(size): entry["candidate_steps"] for size, entry in json.loads(adaptive.text).items()}
    expected = by_batch(config["num_speculative_tokens_per_batch_size"])
    assert len(set(expected.values())) > 2
    assert {size: steps[max(first for first in steps if first <= size)] for size in expected} == {
        size: [gamma] for size, gamma in expected.items()
    }
    (command,) = [note.removeprefix("serve with: ") for note in adaptive.notes if note.startswith("serve with: ")]
    words = shlex.split(command)
    assert words[-3:] == ["--speculative-adaptive", "--speculative-adaptive-config", "adaptive.json"]
    assert [int(words[words.index("--speculative-num-steps") + 1])] in steps.values()  # which SGLang demands
    one = export(side, "sglang-args", domain="code")
    assert any("--to sglang-adaptive" in note for note in one.notes)
    assert "adaptive" not in one.text
    for to in ("vllm-config", "sglang-adaptive"):
        said = export(side, to, domain="code").warnings
        assert any("drops a schedule with" in line and "data-parallel" in line for line in said)
    assert not any("drops a schedule" in line for line in one.warnings)
    with pytest.raises(OptionInvalid, match="one gamma for all concurrencies"):
        export(side, "sglang-adaptive", gamma=2)
    model = RunDraft(run, "small").asked(side.run.manifest.config)
    with pytest.raises(OptionInvalid, match="one gamma for all concurrencies"):
        export(model, "sglang-adaptive", domain="code")  # of heads alone


def test_sglangs_step_costs_add_up_to_the_run_s_step_times(run: Run, tmp_path: Path) -> None:
    """As its planner reads them: between two probes linear, beyond the ends constant."""
    side = RunDraft(run, "small").asked(table(tmp_path / "times.csv", run))
    made = export_step_costs(side, gamma=3)
    costs = json.loads(made.text)
    for size, n in ((1, 1), (1, 4), (4, 2), (16, 4)):
        alpha = np.interp(size, costs["bs_probes"], costs["alpha_seconds"])
        theta = np.interp(size * n, costs["m_probes"], costs["theta_seconds"])
        expected = (10 + size * n + 3 * 0.6 * size) / 1000  # `table`
        assert costs["bias_seconds"] + alpha + theta == pytest.approx(expected, rel=1e-9)
    assert costs["alpha_seconds"][0] == costs["theta_seconds"][0] == 0 < costs["bias_seconds"]  # which SGLang demands
    assert made.notes == ("3 tokens are drafted in each round; the sum is within 0.0% of all step times (1, 4, 16)",)
    with pytest.raises(OptionInvalid, match="no step times of 3 drafts"):
        export_step_costs(RunDraft(run, "small").asked(run.manifest.config | {"costs": {"source": "none"}}), gamma=3)


def test_more_drafts_than_mtp_modules_are_a_multiple_of_them(run: Run) -> None:
    """VLLM: `num_speculative_tokens:3 must be divisible by n_predict=2`."""
    reading = {"modules": "2", "use of modules": "the first module at every depth"}
    side = RunDraft(changed(run, "small", kind="mtp", reading=reading), "small")
    for gamma in (1, 2):
        assert json.loads(written(side, "vllm-config", gamma=gamma))["num_speculative_tokens"] == gamma
    for gamma in (3, 5):
        with pytest.raises(OptionInvalid, match="a multiple of it") as caught:
            written(side, "vllm-config", gamma=gamma)
        assert caught.value.hint == "name another: --gamma 1 or 2"
    assert "--speculative-num-steps 3" in written(side, "sglang-args", gamma=3)
    said = export(side, "vllm-config", gamma=2).warnings
    assert any("VLLM_USE_V2_MODEL_RUNNER=0, or profile with reuse: false" in line for line in said)
    chain = RunDraft(changed(run, "small", kind="mtp", reading=reading | {"use of modules": "a chain"}), "small")
    assert not any("reuse: false" in line for line in export(chain, "vllm-config", gamma=2).warnings)


def test_the_version_of_the_engine_is_the_newest_unless_one_that_was_read_is_named(run: Run) -> None:
    side = RunDraft(run, "small")
    for named, shown in ((None, "vLLM 0.33"), ("0.32", "vLLM 0.32"), ("0.32.1", "vLLM 0.32.1"), ("0.29", "vLLM 0.29")):
        assert f", gamma 2, {shown}, model runner V" in export(side, "vllm-config", gamma=2, version=named).notes[0]
    for unknown in ("0.3", "0.34", "1"):
        with pytest.raises(OptionInvalid, match="this version of vLLM was not read") as caught:
            export(side, "vllm-config", gamma=2, version=unknown)
        assert caught.value.hint.endswith("0.33, 0.32, 0.29")
    rightmost = changed(run, "lookup", settings={"min_ngram": 1, "max_ngram": 3, "match": "rightmost"})
    for version, said in (("0.33", 0), ("0.29", 1)):  # in which prompt lookup is V1's
        lines = export(RunDraft(rightmost, "lookup"), "vllm-config", gamma=2, version=version).warnings
        assert sum("profile with match: leftmost" in line for line in lines) == said


def test_llama_cpp_reads_gguf_and_samples_few_tokens(sampled: Run) -> None:
    said = export(RunDraft(sampled, "small"), "llamacpp-args", rule="lossless", gamma=2).warnings
    assert any("convert synthetic/target and synthetic/small with its convert_hf_to_gguf.py" in line for line in said)
    assert any("samples the draft's top ten tokens only" in line for line in said)
    said = export(RunDraft(sampled, "small"), "llamacpp-args", rule="one_hot", gamma=2).warnings
    assert not any("top ten" in line for line in said)


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
    skipping = changed(run, "small", kind="layer_skip", shares_target_weights=True)
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
PARALLEL = dataclasses.replace(HEAD, kind="p_eagle", in_one_step=True)
DFLASH2 = dataclasses.replace(HEAD, kind="dflash", in_one_step=True, reading={"candidates": "8 a row"})
GEMMA, DSPARK = (dataclasses.replace(HEAD, kind=kind) for kind in ("gemma4_assistant", "dspark"))
ALL = (*BOTH, "llamacpp-args")
SKIP = dataclasses.replace(MODEL, kind="layer_skip")
POOLED = dataclasses.replace(LOOKUP, foreign=("vLLM",))
SERVED = {
    "a model, greedy": (MODEL, "strict", ALL),
    "a model, its top tokens": (MODEL, "one_hot", ALL),
    "a model, drawn": (MODEL, "lossless", ("vllm-config", "llamacpp-args")),  # SGLang draws from heads only
    "prompt lookup": (LOOKUP, "strict", BOTH[:1]),  # SGLang's NGRAM is another draft
    "prompt lookup has one token to draw": (LOOKUP, "lossless", BOTH[:1]),
    "one token to verify in a block": (LOOKUP, "block", BOTH[:1]),
    "prompt lookup in other texts too": (POOLED, "strict", ()),
    "a head": (HEAD, "lossless", BOTH),
    "a head, in blocks": (HEAD, "block", BOTH),
    "a head of few tokens": (REDUCED, "one_hot", ALL),
    "a head of few tokens, drawn": (REDUCED, "lossless", BOTH[:1]),
    "in one step": (PARALLEL, "one_hot", BOTH[:1]),
    "in one step, drawn": (PARALLEL, "lossless", BOTH[:1]),
    "in one step, in blocks": (PARALLEL, "block", ()),  # vLLM's V1 runner ignores it
    "candidates, greedy text": (DFLASH2, "strict", ALL),
    "candidates, their top tokens": (DFLASH2, "one_hot", ("vllm-config", "llamacpp-args")),  # SGLang always draws from them
    "candidates, drawn": (DFLASH2, "block", BOTH),
    "an assistant": (GEMMA, "one_hot", BOTH),
    "an assistant, drawn": (GEMMA, "lossless", BOTH[:1]),
    "layers of the target": (SKIP, "strict", ()),
    "a rule of no engine": (MODEL, "additive_0p1", ()),
    "trees": (MODEL, "tree_2", ()),
    "what engines do by default": (REDUCED, "auto", ALL),
    "a verdict on greedy and on sampled text": (MODEL, "strict and lossless", ("vllm-config", "llamacpp-args")),
}


@each("name", SERVED)
def test_a_format_is_offered_where_its_engine_does_what_was_measured(name: str) -> None:
    facts, rule, expected = SERVED[name]
    assert paste_formats(facts, rule) == expected


def test_llamacpp_stops_dspark_by_another_number_than_a_p_min() -> None:
    (llamacpp, _), words = (
        FORMATS["llamacpp-args"],
        "llama.cpp stops dspark drafts at a confidence of their own, not at a p_min",
    )
    assert why_not_served(llamacpp, DSPARK, "strict", 0.4) == words
    assert why_not_served(llamacpp, HEAD, "strict", 0.4) == why_not_served(llamacpp, DSPARK, "strict") == ""
