"""Guards and tiny models that all tests share."""

from __future__ import annotations

import functools
import json
import math
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from alphaprof.run.reader import Run

ROOT = Path(__file__).parent.parent
Runner = Callable[..., tuple[int, str, str]]  # of a command line: exit code, standard output and standard error
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models: threads cost more than they give
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # no GPU: kernels run in NumPy; read once, when something imports triton
settings.register_profile("all", deadline=None, max_examples=200)  # a busy machine is no failure
settings.register_profile("default", deadline=None, max_examples=15)


def pytest_configure(config: pytest.Config) -> None:
    """Properties are tried on fewer examples where slow tests are left out."""
    settings.load_profile("default" if "not slow" in config.option.markexpr else "all")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long come first: a process that begins one at the end would work on alone."""
    long = {item.path for item in items if any(map(item.get_closest_marker, ("models", "demo_model", "slow")))}
    items.sort(key=lambda item: item.path not in long)


def slow(cases: Iterable[Sequence[Any]]) -> list[Any]:
    """Parameters of cases that `./scripts/test.sh --all` alone runs: other settings of what a quicker case shows."""
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


@pytest.fixture(autouse=True, scope="session")
def _no_waiting_for_disks() -> Iterator[None]:
    """Files count as on the disk at once: no test takes the power away, and thousands of small files would wait for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def _one_command_line() -> Iterator[None]:
    """The command line, which typer makes anew at every call, is made once: that takes as long as many a test."""
    from typer import main, testing

    once = functools.cache(main.get_command)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(main, "get_command", once)
        patch.setattr(testing, "_get_command", once)
        yield


@pytest.fixture(autouse=True, scope="session")
def _sections_raise() -> Iterator[None]:
    """What a section of a report raises fails the test, in place of standing where the section would."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("alphaprof.report.build.CAUGHT", ())
        yield


@pytest.fixture(autouse=True, scope="session")
def _every_json_answer_is_valid() -> Iterator[None]:
    """Whatever a test has written as JSON fits the schema that is published for it."""
    from alphaprof.commands import schema
    from alphaprof.render import json as written

    render = written.render_json
    validator = functools.cache(lambda name: jsonschema.Draft202012Validator(schema.json_schema(name)))

    def rendered(value: written.Published) -> str:
        text = render(value)
        name = value.format.removeprefix("alphaprof-")
        if name in schema.PUBLISHED:
            validator(name).validate(json.loads(text))
        return text

    with pytest.MonkeyPatch.context() as patch:
        for place in ("render.json", "render.answer", "report.formats.text", "commands.export.rates"):
            patch.setattr(f"alphaprof.{place}.render_json", rendered)
        yield


@pytest.fixture(autouse=True)
def _on_any_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No run of a test says that this machine is busy, and no text is as wide as the terminal of whoever started it."""
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("alphaprof.costs.timing.BUSY", math.inf)


@pytest.fixture(autouse=True)
def _no_network(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test opens a connection, but for those marked `loopback`, to a server of their own on this machine."""
    connect = socket.socket.connect
    own = request.node.get_closest_marker("loopback") is not None

    def refuse(opened: socket.socket, address: Any) -> None:
        if not (own and opened.family == socket.AF_INET and address[0] == "127.0.0.1"):
            raise AssertionError("a test tried to open a network connection")
        connect(opened, address)

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture(autouse=True)
def _no_models(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test loads a model only if it says so, by the marker `models` or `demo_model`."""
    if request.node.get_closest_marker("models") or request.node.get_closest_marker("demo_model"):
        return

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a unit test tried to load a model: mark it with @pytest.mark.models")

    import sys

    if "transformers" in sys.modules:
        from transformers import AutoModelForCausalLM

        monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", refuse)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny random models: `target` (4 layers), `draft` (the target with noise), `other` (another vocabulary),
    `wide` (the target's vocabulary with padding rows), `short` (a draft with a context of 24 tokens)."""
    from tests.tiny import save_models

    folder = tmp_path_factory.mktemp("models")
    save_models(folder)
    return folder


# Complete runs on the tiny models, each with its profile beside it. Tests that only read one share it.


@pytest.fixture(scope="session")
def greedy_run(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Greedy text, four drafts, step times."""
    from tests.runs import profile_file, run_profile

    folder = tmp_path_factory.mktemp("greedy")
    return run_profile(profile_file(folder, tiny), folder / "run")


@pytest.fixture(scope="session")
def sampled_run(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Sampled text beside greedy, given and plain text; a draft model and prompt lookup, thinking, certificates."""
    from tests.runs import mixed_file, run_profile

    folder = tmp_path_factory.mktemp("sampled")
    return run_profile(mixed_file(folder, tiny), folder / "run")


@pytest.fixture(scope="session")
def lookup_run(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Greedy text of 30 prompts, on which heads are trained, with prompt lookup alone."""
    from tests.runs import run_of_prompts

    return run_of_prompts(tmp_path_factory.mktemp("lookup"), tiny)


@pytest.fixture(scope="session")
def head_run(lookup_run: Run) -> Run:
    """The run that tested a head of twelve steps on texts that were held out; the head is the folder around it."""
    from tests.runs import train_head

    return train_head(lookup_run, Path(lookup_run.path).parent / "head")


def fetched(name: str) -> Path:
    """A model of scripts/fetch_demo_models.py. Where the environment promises it (test.sh does), its absence fails."""
    promised = os.environ.get("ALPHAPROF_DEMO_MODELS")
    path = ROOT / (promised or "models") / name
    if not path.exists():
        if promised or os.environ.get("CI"):
            pytest.fail(f"{path} is missing; scripts/fetch_demo_models.py fetches it")
        pytest.skip(f"{name} has not been fetched")
    return path


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo's GGUF file."""
    return fetched("SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="session")
def stories15m() -> Path:
    """The folder of stories15M: six layers, 15 million parameters, a context of 256 tokens, fluent stories."""
    return fetched("stories15m")


@pytest.fixture
def console_script(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """`alphaprof` in this process: exit code, standard output and standard error of a command line."""
    from alphaprof.cli import app

    def called(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["alphaprof", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            app.main()
        output = capsys.readouterr()
        return int(caught.value.code or 0), output.out, output.err

    return called


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch on one thread, for tests that compare float32 results exactly."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
