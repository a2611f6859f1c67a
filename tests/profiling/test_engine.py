"""vLLM as the engine: a stand-in (`tests/fake_vllm.py`) answers as a real one did, and one test runs a real one."""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from alphaprof.commands.export.engines import export
from alphaprof.commands.validate.engine import Decoding, rounds_of, validate_by
from alphaprof.commands.validate.measure import DecodableText
from alphaprof.config.load import load_profile
from alphaprof.config.options import MeasuredCosts, VllmOptions
from alphaprof.costs.timing import reach
from alphaprof.errors import AlphaprofError, EngineFailed, OptionInvalid, ProfileInvalid
from alphaprof.profiling.checks import check_costs
from alphaprof.profiling.engine import steps, vllm_worker
from alphaprof.profiling.engine.client import VllmEngine, engine_environment
from alphaprof.profiling.engine.server import VllmServer, arguments_of
from alphaprof.profiling.engine.steps import FORCED, PLAIN, EngineTimes, speculation, steps_of_rounds, time_engines
from alphaprof.profiling.engine.texts import checked_ids
from alphaprof.profiling.engine.vllm_worker import Forced, SteppedEngine
from alphaprof.profiling.profile import load
from alphaprof.profiling.texts.corpus import Document
from alphaprof.profiling.timing import latency
from alphaprof.profiling.timing.latency import Timed
from alphaprof.run.manifest import DraftFacts
from alphaprof.run.reader import Run, RunDraft
from alphaprof.servers.client import KEY, fetched
from tests.commands.test_import import failure, invoke
from tests.engine import OPTIONS, ROOT, fake_python, written_profile
from tests.loops import each
from tests.runs import Silent
from tests.synthetic import Recipe, altered, write_run

Served = tuple[str, dict[str, Any], list[tuple[str, Any, str | None]]]  # of a server: address, answers by path, questions
VLLM = "ALPHAPROF_VLLM_PYTHON"  # the python of an environment with vLLM, for the test that runs a real one


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    return fake_python(tmp_path)


def changed(path: Path, **changes: Any) -> Path:
    """The same profile with other groups."""
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | changes))
    return path


# Texts


@pytest.mark.demo_model
def test_texts_of_vllm_are_those_of_the_target_also_where_it_had_died(
    tmp_path: Path, fake: Path, stories15m: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile, ours = written_profile(tmp_path, str(fake), str(stories15m)), tmp_path / "ours"
    options = ["--limit", "6", "--set", "costs.source=none"]
    monkeypatch.setenv("FAKE_VLLM_DIES", "ValueError: no room")
    code, text = failure(invoke("profile", profile, "--out", tmp_path / "run", *options))
    assert (code, "ValueError: no room" in text) == (4, True)
    monkeypatch.delenv("FAKE_VLLM_DIES")
    assert invoke("profile", profile, "--out", tmp_path / "run", *options, "--resume").exit_code == 0
    greedy = "continuation={kind: greedy, max_new_tokens: 48}"
    assert invoke("profile", profile, "--out", ours, *options, "--set", greedy).exit_code == 0
    run, other = Run.open(tmp_path / "run"), Run.open(ours)
    assert run.manifest.environment["packages"]["vllm"] == "0.32.0"
    assert "vllm" not in other.manifest.environment["packages"]
    texts, own = (each.continuations(0).to_pylist() for each in (run, other))
    assert [text["continuation_ids"] for text in texts] == [text["continuation_ids"] for text in own]
    assert {(text["continuation"], text["on_policy"]) for text in texts} == {("greedy", True)}
    columns = [each.positions("head", 0).to_pylist() for each in (run, other)]
    assert columns[0] == columns[1]


@pytest.mark.demo_model
def test_a_text_that_the_target_would_not_write_is_noticed(tmp_path: Path, fake: Path, stories15m: Path) -> None:
    fake.write_text(fake.read_text().replace("exec", "FAKE_VLLM_SHIFTS=1 FAKE_VLLM_VERSION=0.99.1 exec"))
    profile = written_profile(tmp_path, str(fake), str(stories15m))
    assert invoke("profile", profile, "--out", tmp_path / "run", "--limit", "6", "--set", "costs.source=none").exit_code == 0
    found = json.loads(invoke("report", tmp_path / "run", "--format", "json").stdout)["notes"]
    notes = {note["code"]: note["message"] for note in found}
    assert notes["not_greedy"].startswith("stories: ")
    assert notes["other_vllm"].startswith("vLLM 0.99.1 is untested")


# Steps


def facts(has_steps: bool) -> DraftFacts:
    model: dict[str, Any] = dict.fromkeys(("fingerprint", "dtype", "device", "parameters", "context", "vocabulary", "noise"))
    named = {"kind": "model" if has_steps else "prompt_lookup", "reference": "r", "architecture": "a", "eos": ()}
    return DraftFacts(**model | named, has_distribution=False, has_steps=has_steps)


def test_steps_of_a_round_follow_from_those_of_the_engines() -> None:
    """Hand values in ms: plain 10; forced 12, 13, 14, 15 for 0 to 3 tokens; a draft's rounds 16 and 24 at gamma 1 and 3."""
    forced = {("forced", "verify", tokens): np.array([11.0 + tokens]) for tokens in (1, 2, 3, 4)}
    known = {("plain", "decode", 1): np.array([10.0])} | forced
    known |= {("d", "draft", 1): np.array([16.0]), ("d", "draft", 3): np.array([24.0])}
    known["n", "lookup", 1] = np.array([14.0])  # and it found 1.5 tokens, of which a verification takes 13.5
    drafts = {"d": facts(True), "n": facts(False)}
    found = {kind: ms[0] for kind, ms in steps_of_rounds(known, {"n": np.array([1.5])}, drafts, 3).items()}
    assert found == pytest.approx(
        {
            ("target", "decode", 1): 10.0,
            ("target", "verify", 2): 11.0,  # 13 less the 2 that speculation costs once a round
            ("target", "verify", 3): 12.0,
            ("target", "verify", 4): 13.0,
            ("d", "draft", 1): 3.0,  # of rounds of 16 and 24, 11 and 13 verify: 5 and 11, so that two tokens more take 6
            ("d", "draft", 2): 3.0,
            ("d", "bookkeeping", 1): 2.0,
            ("n", "lookup", 1): 2.5,  # half a ms of searching, and the 2
        }
    )
    # A round costs what it took: verification, drafts and the rest.
    assert found["target", "verify", 4] + 3 * found["d", "draft", 1] + found["d", "bookkeeping", 1] == pytest.approx(24.0)


def test_reading_a_prompt_costs_a_draft_what_its_engine_takes_beyond_the_plain_one() -> None:
    """Of the rounds that both have."""
    rows = [
        {"engine": engine, "step": "prefill", "tokens": 8, "start": 0, "rounds_ms": ms}
        for engine, ms in (("plain", [4.0, 4.0]), ("head", [5.0, 7.0, 99.0]))
    ]
    found = [(row["model"], row["median_ms"], row["repeats"]) for row in steps.prompts_read(rows)]
    assert found == [("target", 4.0, 2), ("head", 2.0, 2)]


class Engines:
    """Stands in for vLLM's engines: how many are alive, and how the machine's speed drifts while one after another runs, or
    with each command. A step takes 10 ms, and for each token 1 ms more to verify it and 2 to draft it; a command takes a
    tenth of a second, and a start a second. `fails`: the one that ends at once; `asynchronous`: methods with which it
    schedules so, and then plain decoding by itself takes 1 ms less; `cpu`: two of them have room on a CPU;
    `slow`: how much slower all is.
    """

    asynchronous: tuple[str, ...] = ()
    cpu, slow = False, 1.0

    def __init__(self, drift: float = 0.0, fails: int | None = None, drift_of_commands: float = 0.0) -> None:
        self.drift, self.fails, self.drift_of_commands = drift, fails, drift_of_commands
        self.running, self.most, self.started, self.said = set[Engine](), 0, list[str](), list[str]()
        self.rng, self.commands, self.clock = np.random.default_rng(0), 0, 0.0

    def __call__(self, options: VllmOptions, model: Any, speculation: dict[str, Any] | None = None) -> Engine:
        return Engine(self, options, speculation or {"method": "plain", "num_speculative_tokens": 0})


class Engine:
    """One of them."""

    def __init__(self, engines: Engines, options: VllmOptions, speculation: dict[str, Any]) -> None:
        self.engines, self.speculation, self.stopped = engines, speculation, False
        asynchronous = speculation["method"] in engines.asynchronous and options.args.get("async_scheduling", True)
        self.facts = {"context": 256, "waited_s": 0.0, "async_scheduling": asynchronous, "cpu": engines.cpu}

    def start(self) -> None:
        self.engines.running.add(self)
        self.engines.most = max(self.engines.most, len(self.engines.running))
        self.engines.started.append(f"{self.speculation['method']} {self.speculation['num_speculative_tokens']}")
        self.engines.clock += 1

    def pause(self, stopped: bool = True) -> None:
        self.stopped = stopped

    def ask(self, do: str, proposed: int | None = 0, **_: Any) -> dict[str, float]:
        engines = self.engines
        engines.clock, engines.commands = engines.clock + 0.1, engines.commands + 1
        assert [each for each in engines.running if not each.stopped] == [self]
        if len(engines.started) == engines.fails:
            raise EngineFailed("vLLM failed: no room", "see the log")
        speed = (
            engines.slow
            * (1 + engines.drift * (len(engines.started) - 1))
            * (1 + engines.drift_of_commands * engines.commands)
        )
        noise = float(np.exp(0.01 * engines.rng.standard_normal()))
        drafting = 0 if self.speculation["method"] == "custom_class" else 2
        ms = 10 + (1 + drafting) * (proposed or 0) - self.facts["async_scheduling"]
        return {"ms": ms * speed * noise, "proposed": 1.0, "waited_s": 0.0}

    def close(self) -> None:
        self.engines.running.discard(self)


def timed_by(
    engines: Engines,
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    budget: float | None = None,
    known: Sequence[dict[str, Any]] = (),
    **more: Any,
) -> Timed:
    """The step times of a profile with prompt lookup and a head at gamma 1 and 3, and one sequence or two."""
    monkeypatch.setattr("alphaprof.profiling.engine.steps.VllmEngine", engines)
    monkeypatch.setattr("alphaprof.profiling.engine.steps.free_memory", iter([9, 8] * 9).__next__)
    monkeypatch.setattr(latency.time, "monotonic", lambda: engines.clock)
    options = load_profile(written_profile(folder, "python", "model"))
    assert options.vllm is not None
    assert isinstance(options.costs, MeasuredCosts)
    drafts = {"ngram": facts(False), "head": facts(True)}
    costs = options.costs.model_copy(update={"repeats": 20, "budget": budget, "concurrency": [1, 2]})
    ticks = list[float]()
    subjects = options, options.vllm, facts(True), drafts
    timed = time_engines(*subjects, costs, engines.said.append, ticks.append, known, **more)
    assert sum(ticks) == pytest.approx(1)
    return timed


def costs_of(timed: Timed, *kinds: tuple[str, str, int], batch: int = 1) -> np.ndarray[Any, Any]:
    """What some steps cost together in decode steps, [rounds]."""
    rows = {(row["model"], row["step"], row["tokens"]): row for row in timed.table.to_pylist() if row["batch"] == batch}
    rounds = [np.array(rows[kind]["rounds_ms"]) for kind in (("target", "decode", 1), *kinds)]
    least = min(map(len, rounds))
    return np.sum([each[:least] for each in rounds[1:]], axis=0) / rounds[0][:least]


ROUND = [("target", "verify", 4), *[("head", "draft", 1)] * 3, ("head", "bookkeeping", 1)]  # of 19 ms


def test_one_engine_runs_at_a_time_and_the_plain_one_again_at_the_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engines = Engines()
    table = timed_by(engines, monkeypatch, tmp_path).table.to_pylist()
    assert (engines.most, len(engines.running)) == (1, 0)
    assert engines.started == ["plain 0", "custom_class 3", "ngram 3", "draft_model 3", "draft_model 1", "plain 0"]
    rows = {(row["model"], row["step"], row["tokens"]): row for row in table}
    assert {row["repeats"] for row in table if row["step"] != "prefill"} == {20}
    assert rows["target", "decode", 1]["median_ms"] == pytest.approx(10, rel=0.02)
    assert rows["target", "verify", 4]["median_ms"] == pytest.approx(13, rel=0.02)


def test_what_drifts_between_the_first_engine_and_the_last_is_in_the_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Steps become 2% slower from engine to engine, by 10% in all: far more than the noise of 1%."""
    times = [timed_by(Engines(drift), monkeypatch, tmp_path) for drift in (0.0, 0.02)]
    errors = [reach(np.log(costs_of(each, *ROUND) / 1.9), 0.0) for each in times]
    assert errors[0] < 0.015
    assert 0.04 < errors[1] < 0.1


def test_with_room_for_two_engines_plain_decoding_takes_turns_with_every_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every command makes the machine .2% slower, more than threefold in all."""
    engines = Engines(drift_of_commands=0.002)
    engines.cpu = True
    used = list[tuple[str, int]]()

    def use(name: tuple[str, int], engine: Engine, beside: Engine | None) -> None:
        assert engines.running == {each for each in (engine, beside) if each is not None}
        used.append(name)

    timed = timed_by(engines, monkeypatch, tmp_path, use=use)
    assert engines.started == ["plain 0", "custom_class 3", "ngram 3", "draft_model 3", "draft_model 1"]
    assert used == [PLAIN, FORCED, ("ngram", 3), ("head", 3), ("head", 1), PLAIN]
    assert (engines.most, len(engines.running)) == (2, 0)
    assert reach(np.log(costs_of(timed, *ROUND) / 1.9), 0.0) < 0.015
    assert "timing takes about 3 min: 4 s" in engines.said[1]  # 50 s, and 101 s in which engines that rested warm up


def test_a_small_budget_drops_gammas_before_rounds_and_another_start_times_the_rest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The second start is twice as slow: drafts are divided by plain decoding of their own."""
    first, second = Engines(), Engines()
    second.slow = 2.0
    timed = timed_by(first, monkeypatch, tmp_path, budget=7)
    assert first.started == ["plain 0", "custom_class 3", "ngram 3", "plain 0"]
    assert "verifications of 3 tokens" in first.said[1]
    assert "head of 1 tokens, 2 sequences of" in first.said[1]
    assert [reason.partition(": ")[2] for reason in timed.late] == ["no time for head", "no time for ngram, head"]
    assert costs_of(timed, ("target", "verify", 3)).mean() == pytest.approx(1.2, rel=0.01)
    assert timed.engines is not None
    again = timed_by(second, monkeypatch, tmp_path, None, timed.engines.to_pylist())
    assert second.started == ["plain 0", "custom_class 3", "ngram 3", "draft_model 3", "draft_model 1", "plain 0"]
    assert again.late == ()
    assert costs_of(again, *ROUND).mean() == pytest.approx(1.9, rel=0.01)
    assert again.table.filter(again.table["repeats"].to_numpy() > 20).num_rows > 0  # those of both starts


@each("fails", [1, 2, 6])
def test_an_engine_that_fails_is_ended_before_its_error_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fails: int
) -> None:
    engines = Engines(fails=fails)
    with pytest.raises(EngineFailed, match="no room"):
        timed_by(engines, monkeypatch, tmp_path)
    assert (engines.most, len(engines.running), len(engines.started)) == (1, 0, fails)


def test_plain_decoding_is_timed_on_the_path_that_a_draft_forces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As vLLM does on GPUs: no asynchronous scheduling with prompt lookup and classes of one's own, as `forced` is. All
    costs are in units of the default path, of 9 ms.
    """
    engines = Engines()
    engines.asynchronous = ("plain", "draft_model")
    timed = timed_by(engines, monkeypatch, tmp_path)
    assert engines.started.count("plain 0") == 3
    assert costs_of(timed, ("ngram", "path", 1)).mean() == pytest.approx(10 / 9, rel=0.01)
    assert "head" not in [row["model"] for row in timed.table.to_pylist() if row["step"] == "path"]
    assert costs_of(timed, *ROUND).mean() == pytest.approx(18 / 9, rel=0.01)


@pytest.mark.parametrize("rested", [False, True])
def test_a_step_takes_as_long_as_slow_ones_make_it_on_average(rested: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A median of 0, 5, 0, 62 and 10 ms would say 5; a server pays 15.4. An engine that rested takes steps for 300 ms more
    that do not count.
    """
    engine = SteppedEngine.__new__(SteppedEngine)
    engine.count, engine.held, engine.grown, engine.slack, engine.waits = [0], (1, 64), 0.0, 8, {}  # type: ignore[assignment]
    engine.stepped, now = 0.0, 1.0 if rested else 0.01
    times = iter([120.0] * 3 * rested + [9.0] * 3 + [0.0, 5.0, 0.0, 62.0, 10.0])  # the first three warm up

    def decoded() -> dict[str, Any]:
        nonlocal now
        now += (ms := next(times)) / 1e3
        return {"wall_ms": ms, "tokens": 1}

    monkeypatch.setattr(engine, "_decoded", decoded)
    monkeypatch.setattr(vllm_worker, "time", SimpleNamespace(perf_counter=lambda: now))
    assert engine.steps(1, 64, 0, 5)["ms"] == pytest.approx(15.4)


def test_waiting_is_that_of_one_process_since_the_engine_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes that take turns wait for a processor no longer than the clock runs."""
    engine = SteppedEngine.__new__(SteppedEngine)
    engine.waits = {"thread-self": 5 * 10**9, "7": 10**9}
    now = {"thread-self": 5 * 10**9 + 10**8, "7": 10**9 + 9 * 10**8}
    monkeypatch.setattr(vllm_worker, "_waits", lambda: now)
    assert engine.waited_s() == pytest.approx(0.9)
    monkeypatch.undo()
    assert sys.platform != "linux" or {*vllm_worker._waits()} == {"thread-self"}


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes of Linux")
def test_an_engine_runs_as_the_server_at_the_address_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options and variables of the process come first, and of the profile before them; keys are not among them."""
    program, python = tmp_path / "vllm", tmp_path / "python"
    program.write_text("import time\ntime.sleep(600)\n")
    python.write_text('#!/bin/sh\nenv > "$0.env"\necho "$2" > "$0.settings"\necho "{}"\ncat > /dev/null\n')
    python.chmod(0o755)
    monkeypatch.setenv("NUMBA_NUM_THREADS", "5")
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    url = "http://127.0.0.1:65123/v1"
    theirs = {"OMP_NUM_THREADS": "3", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_MAX_TOKENS_PER_EXPERT": "8"}
    secret = {"VLLM_API_KEY": "theirs", "VLLM_S3_SECRET": "theirs"}
    words = ["serve", "models/small", "--port", "65123", "--max_num_seqs", "16", "--enforce-eager"]
    secrets = ["--api-key", "one", "two", "--hf_token=three"]
    with subprocess.Popen(
        [sys.executable, program, *words[:2], *secrets, *words[2:]], env=theirs | secret | {"PATH": os.environ["PATH"]}
    ) as server:
        try:
            for _ in range(200):
                if arguments_of(url):
                    break
                time.sleep(0.05)
            known = {"port": "65123", "max-num-seqs": "16", "enforce-eager": "", "model": "models/small"}
            assert arguments_of(url) == known
            assert arguments_of("http://127.0.0.1:65124") == arguments_of("http://elsewhere:65123") == {}
            options = VllmOptions(url=url, python=str(python), env={"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "4"})
            matters = theirs | {"OMP_NUM_THREADS": "4", "OMP_WAIT_POLICY": "passive"}
            assert engine_environment(options) == matters
            with contextlib.closing(VllmEngine(options, {"model": "m"})) as engine:
                engine.start()
        finally:
            server.kill()
    started = dict(line.split("=", 1) for line in Path(f"{python}.env").read_text().splitlines() if "=" in line)
    assert matters.items() <= started.items()
    assert (started["VLLM_API_KEY"], "NUMBA_NUM_THREADS" in started) == ("secret", False)
    settings = json.loads(Path(f"{python}.settings").read_text())
    assert (settings["engine"]["model"], settings["served"]) == ("m", ["--model", *words[1:]])
    here = engine_environment(VllmOptions(python="python"))
    assert (here["NUMBA_NUM_THREADS"], "VLLM_API_KEY" in here) == ("5", False)


def test_the_environment_of_timed_steps_stands_beside_an_export(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Recipe())
    assert run.manifest.timed_in == ""
    costs = {"source": "vllm"}
    for variables, words in (
        ({"OMP_NUM_THREADS": "1", "OMP_PLACES": "{0 1}"}, "OMP_NUM_THREADS=1 OMP_PLACES='{0 1}'"),
        ({}, "none of"),
    ):
        environment: Any = run.manifest.environment | {"engine": variables}
        config = run.manifest.config | {"costs": run.manifest.config["costs"] | costs, "vllm": {"python": "python"}}
        altered(run, environment=environment, config=config)
        assert words in run.manifest.timed_in
        assert run.manifest.timed_in in export(RunDraft(run, "small"), "vllm-config", gamma=2).notes


class Waiting:
    """Stands in for an engine whose thread waited 5 s for a processor while it loaded, and 0.25 s in every command, which
    takes half a second.
    """

    def __init__(self, clock: list[float]) -> None:
        self.facts, self.waited_s, self.clock = {"context": 256, "waited_s": 5.0}, 5.0, clock

    def ask(self, do: str, **_: Any) -> dict[str, float]:
        self.waited_s += 0.25
        self.clock[0] += 0.5
        return {"ms": 500.0, "proposed": 0.0, "waited_s": self.waited_s}


def test_engines_waited_for_a_processor_while_they_were_timed_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(latency.time, "monotonic", lambda: clock[0])
    timing, plain = EngineTimes({}, MeasuredCosts(context=8, repeats=6), 1), Waiting(clock)
    timing.plan([FORCED], plain, beside=False, all_names=False)  # type: ignore[arg-type]
    for name, engine in ((PLAIN, plain), (FORCED, Waiting(clock)), (PLAIN, Waiting(clock))):
        timing.time(name, engine)  # type: ignore[arg-type]
    assert timing.timed().waiting == pytest.approx(0.5)


def test_the_forced_drafter_proposes_as_many_tokens_as_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "drafts"
    told.write_bytes(b"\2")
    monkeypatch.setenv("ALPHAPROF_FORCED_DRAFTS", str(told))
    config = type("Config", (), {"speculative_config": type("Speculation", (), {"num_speculative_tokens": 3})})
    forced = Forced(config)
    assert forced.propose([[7], [], [8, 9]]) == [[3, 4], [], [3, 4]]
    forced._told[0] = 9
    assert forced.propose([[7]]) == [[3, 4, 5]]


# The clock


ROUNDS = {
    "all told": ({"ids": [1] * 6, "rounds": 2, "drafted": [3, 3], "accepted": [1, 2]}, [3, 3], [1, 2]),
    "one without a proposal": ({"ids": [1] * 5, "rounds": 3, "drafted": [3, 3], "accepted": [1, 0]}, [3, 3, 0], [1, 0, 0]),
    "the end cuts the target's token": (
        {"ids": [1] * 4, "rounds": 2, "drafted": [3, 3], "accepted": [0, 2]},
        [3, 3],
        [0, 2],
    ),
    "the end cuts drafts too": ({"ids": [1] * 4, "rounds": 2, "drafted": [3, 3], "accepted": [0, 3]}, [3, 3], [0, 2]),
    "one token": ({"ids": [1], "rounds": 0, "drafted": [], "accepted": []}, [], []),
}


@each(("answer", "drafted", "accepted"), ROUNDS.values())
def test_rounds_of_an_answer(answer: dict[str, Any], drafted: list[int], accepted: list[int]) -> None:
    found = rounds_of(answer)
    assert (found[0].tolist(), found[1].tolist()) == (drafted, accepted)


NONE_DRAFTED: dict[str, list[int]] = {"accepted": [], "drafted": []}


class Writer:
    """Stands in for an engine that takes `ms` a token at first; the machine becomes slower with every text."""

    def __init__(self, clock: list[float], ms: float) -> None:
        self.clock, self.ms, self.stopped, self.turns = clock, ms, False, list[int]()

    def pause(self, stopped: bool = True) -> None:
        self.stopped = stopped

    def write(self, prompts: list[dict[str, Any]], concurrency: int) -> Iterator[dict[str, Any]]:
        assert not self.stopped
        self.turns.append(len(prompts))
        for place, prompt in enumerate(prompts):
            self.clock[0] += 0.02
            count, ms = prompt["max_tokens"] - 1, self.ms * self.clock[0]
            yield {"place": place, "ids": [1] * (count + 1), "rounds": count, "emitted": count, "wall_ms": ms} | NONE_DRAFTED


@pytest.mark.parametrize("together", [1, 10])
def test_texts_are_decoded_in_turn_with_plain_decoding_of_the_same_minutes(tmp_path: Path, together: int) -> None:
    """One by one five at a time are, so that the first steps of an engine that rested count little."""
    run, clock = write_run(tmp_path / "run", Recipe()), [1.0]
    plain, drafted, name = Writer(clock, 8.0), Writer(clock, 4.0), next(iter(run.manifest.drafts))
    document = Document(0, "code", None, 0, 0, np.array([1]), None, False, 9, "generate", True)
    decoding = Decoding(run, [DecodableText(document, np.array([1] * 9))] * 10, 2, together, Silent())
    decoding.decode(PLAIN, plain)  # type: ignore[arg-type]
    decoding.decode((name, 3), drafted, plain)  # type: ignore[arg-type]
    assert drafted.stopped
    decoding.decode(PLAIN, plain)  # type: ignore[arg-type]
    times = decoding.times("strict", ["strict"], 0, 0)
    (way,) = times.drafted
    assert way.plain_s is not None
    assert way.plain_s.shape == way.wall_s.shape == (2, 10)
    assert drafted.turns[1:] == ([5] * 4 if together == 1 else [10] * 2)  # the first warms up
    assert way.plain_s.sum() / way.wall_s.sum() == pytest.approx(2.0, rel=0.1)
    apart = [seconds.sum() / way.wall_s[repeat].sum() for repeat, seconds in enumerate(times.plain.wall_s)]
    assert max(abs(ratio / 2 - 1) for ratio in apart) > 0.15


@pytest.mark.demo_model
@pytest.mark.parametrize("concurrency", [1, 2])
def test_validate_by_vllm_decodes_the_rounds_of_the_replay(
    tmp_path: Path, fake: Path, stories15m: Path, concurrency: int
) -> None:
    profile = written_profile(tmp_path, str(fake), str(stories15m))
    result = invoke(
        "validate", profile, *OPTIONS, "--concurrency", concurrency, "--out", tmp_path / "run", "--format", "json"
    )
    assert result.exit_code in (0, 13), result.output  # the step times of a busy machine were recorded
    found = json.loads(result.stdout)
    assert (found["engine"], found["concurrency"], found["plain_same_text"]) == ("vLLM 0.32.0", concurrency, 6)
    cells = {(cell["draft"], cell["gamma"]): cell for cell in found["cells"]}
    assert set(cells) == {("ngram", 1), ("ngram", 3), ("head", 1), ("head", 3)}
    for cell in cells.values():
        assert (cell["documents"], cell["same_text"], cell["same_rounds"]) == (6, 6, 6)
        assert cell["tokens_per_round"]["measured"] == pytest.approx(cell["tokens_per_round"]["predicted"])
        assert cell["measured_round_ms"] is None
    latency = Run.open(tmp_path / "run").latency()
    assert latency is not None


# What can go wrong


@each(
    ("environment", "words"),
    [({"FAKE_VLLM_DIES": "ValueError: no room"}, "ValueError: no room"), ({"FAKE_VLLM_DIES": " "}, "without output")],
)
def test_an_engine_that_dies_says_why(
    environment: dict[str, str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    engine = VllmEngine(VllmOptions(python=str(fake_python(tmp_path))), {"model": "m"})
    assert engine.start()["context"] == 256
    with pytest.raises(EngineFailed) as error:
        engine.ask("steps", batch=1, context=8, proposed=0, count=1)
    assert words in error.value.message
    assert Path(error.value.hint.split(";")[0].removeprefix("see ")).exists()


@pytest.mark.demo_model
def test_steps_are_timed_again_without_texts_and_rows(tmp_path: Path, fake: Path, stories15m: Path) -> None:
    """A budget that holds one draft is not the end, other options of costs time again, and neither needs a model."""
    path, out = written_profile(tmp_path, str(fake), str(stories15m)), tmp_path / "run"
    costs = {"source": "vllm", "context": 47, "repeats": 6, "budget": 0}
    profile = ["profile", changed(path, costs=costs), "--limit", "6", "--out", out]
    found = invoke(*profile)
    assert found.exit_code == 0, found.output
    run = Run.open(out)
    rows, notes = run.latency(), [note["message"] for note in run.manifest.warnings if note["code"] == "out_of_time"]
    assert rows is not None
    assert {*rows["model"].to_pylist()} == {"target", "head"}
    assert notes == ["step times missing: 1 sequence of 47 tokens: no time for ngram"]
    code, text = failure(invoke("report", out, "--set", "costs.repeats=9"))
    assert (code, "--retime" in text) == (2, True)
    for name in ("continuations", "positions"):
        shutil.rmtree(out / name)
    again = invoke(*profile, "--retime", "--set", "costs.concurrency=[1,2]", "--set", "costs.budget=20")
    assert (again.exit_code, "loading" in again.output) == (0, False), again.output
    run = Run.open(out)
    rows = run.latency()
    assert rows is not None
    assert {(row["model"], row["batch"]) for row in rows.to_pylist() if row["step"] in ("draft", "lookup")} == {
        (draft, batch) for draft in ("head", "ngram") for batch in (1, 2)
    }
    assert [note for note in run.manifest.warnings if note["code"] == "out_of_time"] == []
    assert {row["start"] for row in run.engine_rounds()} == {0}
    assert (run.manifest.status, run.manifest.profile.costs.concurrency) == ("complete", [1, 2])  # type: ignore[union-attr]


def test_a_draft_that_vllm_does_not_have_has_no_speculation(tmp_path: Path) -> None:
    """`profile` refuses it before, by its options."""
    options = load_profile(written_profile(tmp_path, "python", "model"))
    check_costs(options)
    with pytest.raises(EngineFailed, match="vLLM has no method for draft head"):
        speculation(options, "head", dataclasses.replace(facts(True), kind="layer_skip"), 2)


@pytest.mark.demo_model
def test_a_dry_run_starts_no_engine_to_time_steps(
    tmp_path: Path, fake: Path, stories15m: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would need the memory that the models have."""
    monkeypatch.setenv("FAKE_VLLM_DIES", "ValueError: started")
    profile = written_profile(tmp_path, str(fake), str(stories15m))
    greedy = "continuation={kind: greedy, max_new_tokens: 8}"
    result = invoke("profile", profile, "--dry-run", "--limit", "6", "--set", greedy, "--format", "json")
    assert result.exit_code == 0, result.output
    assert "timing its steps takes up to 20 s" in " ".join(result.output.split())


@pytest.mark.loopback
@each(
    ("engine", "costs", "words"),
    [
        ({"python": "./none"}, {"source": "vllm"}, "has no vLLM"),
        ({"python": sys.executable, "args": {"model": "./none"}}, {"source": "vllm"}, "vllm.args.model './none' does not"),
        ({"url": "SERVER", "model": "other"}, {"source": "measured"}, "vllm.model is 'other'"),
        ({"url": "SERVER"}, {"source": "measured"}, "does not use the target's tokenizer"),
    ],
)
def test_a_wrong_engine_is_found_before_weights_are_loaded(
    engine: dict[str, Any], costs: dict[str, str], words: str, tiny: Path, server: Served, tmp_path: Path
) -> None:
    """A test without the marker `models` cannot load any."""
    if engine.get("python") == sys.executable:
        engine = engine | {"python": str(fake_python(tmp_path))}
    if engine.get("url") == "SERVER":
        engine = engine | {"url": server[0]}
    path = changed(written_profile(tmp_path, "", str(tiny / "target")), vllm=engine, costs=costs, drafts={})
    with pytest.raises(EngineFailed) as error:
        load(load_profile(path), Silent())
    assert words in error.value.message


@each(
    ("engine", "costs", "words"),
    [
        (None, {}, "continuation.writer vllm needs vllm.python or vllm.url"),
        ({"url": "http://127.0.0.1:1"}, {"source": "vllm"}, "costs.source vllm needs vllm.python"),
        ({}, {}, "needs python, to start vLLM"),
        ({"url": "http://a", "env": {"HF_TOKEN": "hf_x"}}, {}, "must not hold 'HF_TOKEN', which the run would keep"),
        ({"url": "file:///etc/passwd"}, {}, "does not begin with http:// or https://"),
    ],
)
def test_a_profile_says_where_vllm_is(engine: Any, costs: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = changed(written_profile(tmp_path, "python", "model"), vllm=engine, costs=costs)
    with pytest.raises(ProfileInvalid, match=words):
        load_profile(path)


def test_validate_says_that_it_decodes_no_hybrid(tmp_path: Path) -> None:
    said: list[str] = []
    told = Silent()
    told.say = said.append  # type: ignore[method-assign]
    hybrids = {"both": {"first": "ngram", "then": "head", "min_match": 1}}
    path = changed(written_profile(tmp_path, "python", "model"), hybrids=hybrids)
    with pytest.raises(OptionInvalid):  # before anything is loaded
        validate_by("transformers", load_profile(path), tmp_path, None, 1, told, [], 2)
    assert said == ["both is a hybrid, which is not decoded: ngram and head are, by themselves"]


@each(
    ("engine", "rules", "concurrency", "words"),
    [
        ("transformers", [], 2, "decodes one text at a time"),
        ("vllm", ["additive:0.1"], 1, "vLLM decodes by decision.rule"),
        ("vllm", [], 1, "needs vllm.python"),
    ],
)
def test_validate_refuses_what_the_engine_does_not_do(
    engine: str, rules: list[str], concurrency: int, words: str, tmp_path: Path
) -> None:
    path = changed(written_profile(tmp_path, "", "model"), vllm={"url": "http://127.0.0.1:1"}, costs={"source": "none"})
    with pytest.raises(OptionInvalid, match=words):
        validate_by(engine, load_profile(path), tmp_path, None, 1, Silent(), rules, concurrency)


# A server


MODELS = {"data": [{"id": "stories15m", "root": "models/stories15m"}]}
ANSWERS: dict[str, Any] = {
    "/version": {"version": "0.32.0"},
    "/v1/models": MODELS,
    "/tokenize": {"count": 2, "tokens": [22172, 904]},
    "/v1/completions": {"choices": [{"token_ids": [6482, 29891]}]},
}


@pytest.fixture
def server() -> Iterator[tuple[str, dict[str, Any], list[tuple[str, Any, str | None]]]]:
    """The address of a server, its answers by path, and what it was asked: path, body and key."""
    answers, asked = dict(ANSWERS), list[tuple[str, Any, str | None]]()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.do_POST()

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            asked.append((self.path, json.loads(body) if body else None, self.headers.get("Authorization")))
            answer = answers.get(self.path)
            self.send_response(answer if isinstance(answer, int) else 200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as service:
        thread = threading.Thread(target=service.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{service.server_port}", answers, asked
        service.shutdown()
        thread.join()


@pytest.mark.loopback
def test_a_server_writes_texts_as_ids(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    url, _, asked = server
    monkeypatch.setenv(KEY, "secret")
    there = VllmServer(VllmOptions(url=f"{url}/v1"), f"{url}/v1")
    prompts = [{"ids": [1, number], "max_tokens": 2, "temperature": 0.8, "seed": 7} for number in range(3)]
    assert list(there.write(prompts, 2)) == [{"place": place, "ids": [6482, 29891]} for place in range(3)]
    assert there.tokens("hello é") == [22172, 904]
    bodies = sorted((body for path, body, _ in asked if path == "/v1/completions"), key=lambda body: int(body["prompt"][1]))
    assert bodies[2] == {
        "model": "stories15m",
        "prompt": [1, 2],
        "max_tokens": 2,
        "temperature": 0.8,
        "seed": 7,
        "repetition_penalty": 1.0,
        "return_token_ids": True,
    }
    assert {key for _, _, key in asked} == {"Bearer secret"}


@pytest.mark.loopback
@each(
    ("path", "answer", "words"),
    [
        ("/v1/models", {"data": []}, "serves 0 models"),
        ("/v1/models", 401, "answers /v1/models with 401"),
        ("/v1/completions", {"choices": [{"text": "hello"}]}, "without token ids"),
        ("/v1/completions", 500, "answers /v1/completions with 500"),
    ],
)
def test_a_server_that_cannot_help_is_refused(
    path: str, answer: Any, words: str, server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, answers, _ = server
    monkeypatch.setenv(KEY, "secret")
    answers |= ANSWERS | {path: answer}
    with pytest.raises(AlphaprofError) as error:
        list(VllmServer(VllmOptions(url=url), url).write([{"ids": [1], "max_tokens": 1}], 1))
    assert words in error.value.message
    assert "secret" not in error.value.message + error.value.hint
    answers["/metrics"] = 404
    with pytest.raises(EngineFailed) as error:
        fetched(url, "/metrics")
    assert "--enable-metrics" in error.value.hint


@pytest.mark.engine
@pytest.mark.demo_model
def test_a_real_vllm_decodes_the_rounds_of_the_replay(tmp_path: Path, stories15m: Path) -> None:
    python = os.environ.get(VLLM)
    if python is None:
        pytest.skip(f"{VLLM} does not name the python of an environment with vLLM: see scripts/engine_check.sh")
    path = written_profile(tmp_path, python, str(stories15m))
    pard = {"kind": "pard", "model": str(ROOT / "tests" / "golden" / "pard_stories15m"), "depths": 3}
    profile = changed(path, drafts=yaml.safe_load(path.read_text())["drafts"] | {"pard": pard})
    result = invoke("validate", profile, *OPTIONS, "--repeats", "1", "--format", "json")
    assert result.exit_code in (0, 13), result.output
    found = json.loads(result.stdout)
    assert found["plain_same_text"] == 6
    assert {cell["draft"] for cell in found["cells"]} == {"ngram", "head", "pard"}
    assert {(cell["same_text"], cell["same_rounds"]) for cell in found["cells"]} == {(6, 6)}


@pytest.mark.parametrize("ids", [[1000000000], [260], [-1], [1] * 7, [70.9], [True], [[1]], [], None, "12"])
def test_what_an_engine_answers_is_checked_before_it_is_a_text(ids: Any) -> None:
    """Of a vocabulary of 260 ids and 6 tokens that were asked for."""
    assert checked_ids([0, 259], 6, 260).tolist() == [0, 259]
    with pytest.raises(EngineFailed, match="the engine answers"):
        checked_ids(ids, 6, 260)
