#!/usr/bin/env python3
"""Run alphaprof on hostile cases: damaged runs, strange input, failing disks, kills. Every case follows from seed and number.

    python scripts/campaign.py [--seed 0] [--files 1000] [--kills 100] ... [--only PART] [--case N]

files: a bit, a few bytes or a whole file of a run is changed; then report, check, compare, trees, export and `alphaprof.open`
read it. manifests: one value of manifest.json is edited, and its digest left as it was or worked out again. profiles, tables,
requests: profile files with overrides, tables of step times and logs of requests, edited as data and as bytes. A profile is
followed until its models would be loaded; of the others a report is asked. disk: one call that touches files fails, once or
from then on. kills: profiles of tiny models and imports are killed before a file event or after a random time, and resumed.

How a case ends: with the `same answer`, with another one and a word about it (`warned`), with an error of two lines (`refused`),
or, where the input is the user's own to change, with `another answer`. Failures: `silently different` (a number of the answer
is another one, or a row of a resumed run, and nothing was said), `not finished` (a run that cannot be resumed), `long message`,
`traceback` (any error but ours), `hang`. Exit code 1 where there is a failure; of 1,000 changed files 3 may be silent.
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import errno
import io
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "COLUMNS": "200"}

import pyarrow.parquet as pq
import yaml

import alphaprof
from alphaprof.cli import main as alphaprof_main
from alphaprof.errors import AlphaprofError, RunUnreadable
from alphaprof.log import manifest as manifests
from alphaprof.log.store import Run
from tests.synthetic import Domain, Recipe, write_run

Case = Callable[[random.Random], "Outcome"]
FINE = ("same answer", "warned", "refused", "another answer")
FAILURES = ("silently different", "not finished", "long message", "traceback", "hang")
ANSWERS = (0, 10, 11, 12, 13)  # exit codes of commands that answered
LIMIT_S = 60  # for one command; the slowest takes a second
LONGEST = 1200  # characters of an error and its hint, which may repeat 200 of what was given, and paths
LARGEST_SILENT = 3 / 1000


@dataclass(frozen=True)
class Outcome:
    """How a case ended, and what to look at."""

    kind: str
    detail: str = ""


@dataclass(frozen=True)
class Answer:
    """What a command printed: `kind` is answer, refused, or one of `FAILURES`; `detail` says where an error came from."""

    kind: str
    text: str = ""
    said: str = ""
    detail: str = ""


class Hang(BaseException):
    """A command took longer than `LIMIT_S`."""


class Reached(BaseException):
    """A profile came as far as the loading of its models."""


# --- one command, and what it printed ---------------------------------------------------------------------------------


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises `Hang` in the block when its time is over. Another alarm that was set, as that of a test, is set again."""

    def ring(*_: object) -> None:
        raise Hang

    handler, before = signal.signal(signal.SIGALRM, ring), signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *before)


def answer_of(call: Callable[[], str | None]) -> Answer:
    """What a call printed, or returned, and how it ended."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", errors) for errors in ("strict", "backslashreplace"))
    kind, detail, returned = "answer", "", None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            with time_limit(LIMIT_S):
                returned = call()
                out.flush()
        except AlphaprofError as error:
            kind = "refused"
            print(f"error: {error.message}\nhint: {error.hint}", file=sys.stderr)
        except SystemExit as end:
            kind = "answer" if (end.code or 0) in ANSWERS else "refused"
        except Reached:
            kind = "reached"
        except Hang as error:
            kind, detail = "hang", _place(error)
        except BaseException as error:
            kind, detail = "traceback", _place(error)
    text, said = (_content(stream) for stream in (out, err))
    if kind == "refused":
        kind, detail = _refusal(said)
    return Answer(kind, text if returned is None else returned, said, detail)


def _content(stream: io.TextIOWrapper) -> str:
    with contextlib.suppress(ValueError):  # what cannot be encoded is not in it
        stream.flush()
    return stream.buffer.getvalue().decode()  # type: ignore[attr-defined, no-any-return]


def _refusal(said: str) -> tuple[str, str]:
    """Whether an error is told in two lines, and its first line."""
    lines = re.search(r"^error: (.+)\nhint: (.+)$", said, re.MULTILINE)
    if lines is None:
        return "traceback", f"no error and hint in two lines: {said[-200:]!r}"
    return ("refused" if len(lines[0]) <= LONGEST else "long message"), lines[1][:200]


def _place(error: BaseException) -> str:
    """An error, and the last line of the product that it went through."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/alphaprof/" in frame.filename]
    where = f"{frames[-1].filename.rpartition('/alphaprof/')[2]}:{frames[-1].lineno}: " if frames else ""
    return f"{where}{type(error).__name__}: {error}".replace("\n", " ")[:240]


def command(*arguments: object) -> Answer:
    """What `alphaprof` prints with these arguments."""
    with patch.object(sys, "argv", ["alphaprof", *map(str, arguments)]):
        return answer_of(alphaprof_main)


# --- answers of a run, and whether two are the same -------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """A run with its files, and what it answers as long as nobody has touched it."""

    path: Path
    drafts: tuple[str, ...]
    files: dict[str, bytes]
    answers: dict[str, Answer]

    @classmethod
    def of(cls, path: Path) -> Subject:
        """The complete run in a directory."""
        files = {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}
        drafts = tuple(Run.open(path).manifest.drafts)
        return cls(path, drafts, files, {name: answer() for name, answer in readers(path, drafts).items()})

    def write(self, files: Mapping[str, bytes | None]) -> None:
        """Put other files into the directory; None: a directory of that name."""
        shutil.rmtree(self.path, ignore_errors=True)
        for name, content in files.items():
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            if content is None:
                (self.path / name).mkdir()
            else:
                (self.path / name).write_bytes(content)

    def judged(self) -> Outcome:
        """What its answers are now, beside what they were: the worst of them."""
        outcomes = [judged(name, self.answers[name], answer()) for name, answer in readers(self.path, self.drafts).items()]
        return max(outcomes, key=lambda outcome: (*FINE, *FAILURES).index(outcome.kind))


def readers(run: Path, drafts: Sequence[str]) -> dict[str, Callable[[], Answer]]:
    """What reads a run: commands by their name, and `alphaprof.open`."""
    of_draft = f"{run}:{drafts[0]}"
    arguments: dict[str, tuple[object, ...]] = {
        "report": ("report", run, "--format", "json"),
        "check": ("check", run, "--format", "json"),
        "compare": ("compare", of_draft, f"{run}:{drafts[-1]}", "--format", "json"),
        "trees": ("trees", of_draft, "--nodes", 4, "--format", "json"),
        "export": ("export", of_draft, "--to", "vllm"),
    }
    return {name: partial(command, *given) for name, given in arguments.items()} | {
        "open": partial(answer_of, partial(_opened, run))
    }


def _opened(path: Path) -> str:
    """The rows of a run's tables as text."""
    run = alphaprof.open(path)
    tables = [run.documents(), run.totals(), *([] if run.manifest.imported else [run.positions()])]
    return "".join(table.to_csv() for table in tables)


def judged(name: str, before: Answer, now: Answer) -> Outcome:
    """How an answer compares with the one before."""
    if now.kind != "answer":
        same = now.kind == before.kind == "refused"
        return Outcome("same answer" if same else now.kind, f"{name}: {now.detail}")
    first, second = figures(before.text), figures(now.text)
    if first == second:
        return Outcome("same answer")
    place = next(key for key in {**first, **second} if first.get(key) != second.get(key))
    detail = f"{name}: {place} {first.get(place, 'not there')} -> {second.get(place, 'not there')}"[:240]
    return Outcome("warned" if _warnings(now) != _warnings(before) else "silently different", detail)


def figures(text: str) -> dict[str, str]:
    """The numbers and verdicts of a JSON answer by their place; of other text its lines."""
    try:
        tree = json.loads(text)
    except ValueError:
        return {f"line {number}": line for number, line in enumerate(text.splitlines())}
    leaves = dict(_leaves(tree, ""))
    verdicts = ("inf", "-inf", "GO", "NO-GO", "UNDECIDED", "pass", "fail", "undecided")
    return {place: repr(leaf) for place, leaf in leaves.items() if not isinstance(leaf, str) or leaf in verdicts}


def _leaves(tree: object, place: str) -> Iterator[tuple[str, object]]:
    if not isinstance(tree, dict | list):
        yield place, tree
        return
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        if key != "warnings":
            yield from _leaves(value, f"{place}.{key}" if place else str(key))


def _warnings(answer: Answer) -> object:
    """What was said beside the numbers."""
    try:
        tree = json.loads(answer.text)
    except ValueError:
        tree = None
    return answer.said, tree.get("warnings") if isinstance(tree, dict) else None


# --- mutations --------------------------------------------------------------------------------------------------------

BYTES = (
    rb"""\0 \xff\xfe \xed\xa0\x80 \x1b[2J \r \t \n \xe2\x80\xae %s{} ' " \n\n---\n :\x20""".decode("unicode_escape")
    .encode("latin-1")
    .split(b" ")
)
VALUES = [  # a line each, as JSON; the deepest and longest are in JSON and YAML below
    json.loads(line)
    for line in r"""
null true false 0 -1 1 3.5 -2.5 1000000000000 10000000000000000000000000000000000000000 1e308 NaN Infinity
"" "\u0020" "x" "1" "auto" "\u0000" "\ud800" "../.." "\u202e" "a\nb" [] {} [null] {"":null} [[1]] {"a":{"b":[]}}
""".split()
] + ["a" * 5000]
JSON = """-0|01|.5|[1,]|{"a": 1, "a": 2}|NaN|1e999|1_0|"\\ud800"|""".split("|")
JSON += ["9" * 5000, "-" + "9" * 400, "[" * 20_000 + "]" * 20_000, '{"a":' * 20_000 + "1" + "}" * 20_000]
YAML = (
    r"""
&a [*a]|&a {b: *a}|*nowhere|{<<: *a}|{<<: 1}|!!int ""|!!float ""|!!bool ""|!!int "0x"|!!int "_"|!!binary aGk=|!!binary x
!!timestamp x|!!null x|!!python/object:os.system {}|!!set {a, b}|!!omap [a: 1]|!!pairs [a: 1]|!local x|2024-99-99|2024-01-01
0o777|1_000|1:60:60|.nan|.inf|-.inf|~|yes|"\0"|"\ud800"|"\x1b[2J"|? {a: b} : c|? [a] : b|{1: 2}|{null: 1}|{a: 1, a: 2}
@|`|%x|""|"|'|- - -|- a|<<|=|b: c: d|!!str 1|!!float 1|!!seq {}|!!map []|"a\nb"|..|/|-1|0|1e400|[]|{}|[null]
""".strip()
    .replace("\n", "|")
    .split("|")
)
BOMB = ",".join(f"&{name} [{','.join([f'*{before}'] * 9)}]" for before, name in itertools.pairwise("abcdefghi"))
YAML += ["9" * 5000, "[" * 3000 + "]" * 3000, "{a: " * 500 + "1" + "}" * 500, f"[&a [x,x,x,x,x,x,x,x,x],{BOMB}]"]


def damaged(rng: random.Random, data: bytes, flips: float = 0.2) -> bytes:
    """Bytes with one change; `flips`: how often it is a single bit."""
    place, end = sorted((rng.randrange(len(data) + 1), rng.randrange(len(data) + 1))) if data else (0, 0)
    end = min(end, place + rng.choice((1, 8, 500)))
    if data and rng.random() < flips:
        place = rng.randrange(len(data))
        return data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :]
    changes = (
        lambda: data[:place],
        lambda: data[:place] + data[end:],
        lambda: data[:end] + data[place:],
        lambda: data[:place] + rng.choice(BYTES) + data[place:],
        lambda: data[:place] + rng.randbytes(end - place) + data[end:],
        lambda: data + rng.randbytes(rng.choice((1, 16, 4096))),
        lambda: data + data,
        lambda: b"",
    )
    return rng.choice(changes)()


def edited(rng: random.Random, tree: Any, snippets: Sequence[str] = ()) -> tuple[Any, dict[str, str], str]:
    """A copy of plain data with one value edited, and its place; marks in it stand for text that only a file can hold."""
    tree = json.loads(json.dumps(tree))
    spots = list(_spots(tree, ""))
    node, key, place = rng.choice(spots)
    value, marks = node[key], {}
    if snippets and rng.random() < 0.5:
        marks["@MARK@"] = rng.choice(snippets)
        node[key] = "@MARK@"
        return tree, marks, place
    number = value if isinstance(value, int | float) else 1
    changes: list[Callable[[], Any]] = [
        *[lambda: node.__setitem__(key, rng.choice(VALUES))] * 5,
        lambda: node.__delitem__(key),
        lambda: node.__setitem__(
            key, rng.choice((-number, number + 1, number * 10**9, number / 3, str(number), not number))
        ),
        lambda: node.__setitem__(key, rng.choice(([value], {"a": value}, [value, value], str(value)))),
        lambda: node.__setitem__(key, (other := rng.choice(spots))[0][other[1]]),
        lambda: node.__setitem__(f"{key}x", value) if isinstance(node, dict) else node.insert(key, value),
    ]
    rng.choice(changes)()
    return tree, marks, place


def _spots(tree: Any, place: str) -> Iterator[tuple[Any, Any, str]]:
    """Every value in plain data: what holds it, its key, and its place."""
    for key, value in list(tree.items() if isinstance(tree, dict) else enumerate(tree)):
        here = f"{place}.{key}" if place else str(key)
        yield tree, key, here
        if isinstance(value, dict | list):
            yield from _spots(value, here)


def written(tree: Any, marks: Mapping[str, str], dump: Callable[[Any], str]) -> bytes:
    """Edited data as a file: marks replaced by the text that they stand for."""
    text = dump(tree)
    for mark, snippet in marks.items():
        text = re.sub(f"[\"']?{mark}[\"']?", lambda _, snippet=snippet: snippet, text)
    return text.encode("utf-8", "surrogatepass")


# --- parts: each prepares a folder, and returns a function that runs a case ---------------------------------------------


def synthetic_runs(folder: Path) -> list[Subject]:
    """Small runs of several kinds, and one that was imported."""
    small = Domain(documents=3, shortest=8, longest=14)
    drawn = Domain(documents=3, shortest=8, longest=14, temperature=0.8)
    recipes = {
        "greedy": Recipe(domains={"code": small, "chat": small}, lookups=("ngram",), gammas=(1, 2), shard_documents=2),
        "drawn": Recipe(
            domains={"code": drawn},
            gammas=(1, 3),
            rules=("one_hot", "lossless"),
            certificates=True,
            thinking=0.4,
            shard_documents=1,
        ),
    }
    runs = [write_run(folder / name / "run", recipe).path for name, recipe in recipes.items()]
    return [*map(Subject.of, runs), Subject.of(imported(folder / "imported", REQUESTS))]


def files(folder: Path, models: bool = True) -> Case:
    """Damaged files of runs; `models`: of one that tiny models made as well."""
    subjects = synthetic_runs(folder)
    if models:
        subjects.append(Subject.of(tiny_run(folder / "tiny")))

    def case(rng: random.Random) -> Outcome:
        subject = rng.choice(subjects)
        name = rng.choice(list(subject.files))
        changed: dict[str, bytes | None] = {**subject.files}
        alike = [other for other in changed if other.split("/")[0] == name.split("/")[0]]
        other = rng.choice(alike)
        change = rng.choices(("bytes", "swapped", "copied", "removed", "folder"), (80, 8, 6, 3, 3))[0]
        if change == "swapped":
            changed[name], changed[other] = changed[other], changed[name]
        elif change == "removed":
            del changed[name]
        else:
            changed[name] = {"copied": changed[other], "folder": None}.get(change, damaged(rng, subject.files[name], 0.75))
        subject.write(changed)
        outcome = subject.judged()
        return Outcome(outcome.kind, f"{subject.path.parent.name}: {name} {change}: {outcome.detail}")

    return case


def edited_manifests(folder: Path) -> Case:
    """Edited manifests. With a right digest an edit is a change by its owner, but for counts of what the shards hold."""
    subjects = synthetic_runs(folder)

    def case(rng: random.Random) -> Outcome:
        subject = rng.choice(subjects)
        tree, marks, place = edited(rng, json.loads(subject.files["manifest.json"]), JSON)
        digest_of = getattr(manifests, "digest_of", None)
        owned = not marks and place != "digest" and rng.random() < 0.5
        if owned and digest_of is not None:
            with contextlib.suppress(ValueError, TypeError):  # what has no digest is left with a wrong one
                tree["digest"] = digest_of(tree)
        subject.write(subject.files | {"manifest.json": written(tree, marks, partial(json.dumps, indent=2))})
        outcome = subject.judged()
        mine = owned and outcome.kind == "silently different" and not place.startswith("shards")
        kind = "another answer" if mine else outcome.kind
        return Outcome(kind, f"{subject.path.parent.name}: {place}{' with its digest' * owned}: {outcome.detail}")

    return case


def profiles(folder: Path) -> Case:
    """Profile files and overrides, until the models would be loaded."""
    import alphaprof.profiling.pipeline as pipeline  # imports torch

    shutil.copytree(ROOT / "profiles", folder, dirs_exist_ok=True)
    (folder / "stub").mkdir()
    (folder / "stub" / "config.json").write_text("{}")
    paths = sorted(folder.glob("*.yaml"))
    texts = [re.sub(r"Qwen/[\w.-]+|\.\./models/[\w.-]+|HuggingFaceH4/\w+", "stub", path.read_text()) for path in paths]
    texts.append(PROFILE)
    trees = [yaml.safe_load(text) for text in texts]
    out = folder / "run"

    def reached(options: Any, *_: object) -> None:
        json.dumps(options.model_dump(mode="json"), allow_nan=False)  # as the manifest will hold it
        raise Reached

    def case(rng: random.Random) -> Outcome:
        number = rng.randrange(len(texts))
        content, options = texts[number].encode(), []
        if rng.random() < 0.25:
            content = damaged(rng, content)
        else:
            tree, marks, _ = edited(rng, trees[number], YAML)
            content = written(tree, marks, partial(yaml.safe_dump, sort_keys=False))
        for _ in range(rng.choice((0, 0, 1, 2))):
            key = rng.choice([*_spots(trees[number], "")])[2]
            options += ["--set", f"{key}={rng.choice(YAML)}"]
        (folder / "case.yaml").write_bytes(content)
        with patch.object(pipeline, "load", reached):
            answer = command("profile", folder / "case.yaml", "--out", out, *options)
        shutil.rmtree(out, ignore_errors=True)
        kind = "another answer" if answer.kind == "reached" else answer.kind
        return Outcome(kind, f"{answer.detail} {' '.join(options)[:120]}".strip())

    return case


PROFILE = """
target: {model: stub, dtype: float32, device: cpu}
drafts: {a: {kind: model, model: stub}, b: {kind: layer_skip, drop_layers: [1]}, c: {kind: prompt_lookup}}
data:
  - {domain: {column: kind}, path: prompts/chat.jsonl, messages: messages, chat_options: {a: {b: [1]}}}
  - {domain: x, path: prompts/code.jsonl, prompt: "{prompt}", chat: true, system: s, cluster: c, limit: 3, shuffle_seed: 1}
  - {domain: y, path: prompts/code.jsonl, prompt_ids: ids, continuation: {kind: given, column: r, top_p: 0.9}}
continuation: {kind: sampled, temperature: 0.8, top_k: 5, top_p: 0.9, seed: 1, max_new_tokens: 9}
rules: [strict, {additive: 0.1}, {typical: {epsilon: 0.1, delta: 0.2}}, "top_m:3"]
gammas: [1, 2]
thinking: {begin: <a>, end: </a>}
costs: {source: roofline, accelerator: h100-sxm, tp: 2, overhead_ms: 0.5}
decision: {rule: one_hot, draft: a, gamma: 2, min_speedup: 1.1, confidence: 0.9, weights: {x: 0.4, y: 0.6}}
"""
TABLE = """model,tokens,batch,context,ms
target,1,1,256,10
target,2,1,256,10.5
target,3,1,256,11
small,1,1,256,1
small,1,8,256,2
ngram,1,1,256,0.01"""
BENCH = {"mode": "decode", "context_len": 512, "input_len": 1, "batch_size": 8, "latency_ms": 10.0, "model": "target"}


def tables(folder: Path) -> Case:
    """Step times of an engine, as a report of a run reads them."""
    run = synthetic_runs(folder)[0].path
    cells = [line.split(",") for line in TABLE.splitlines()]
    rows = [dict(zip(cells[0], map(json.loads, [f'"{line[0]}"', *line[1:]]), strict=True)) for line in cells[1:]]
    contents: tuple[Any, ...] = (
        rows,
        {"results": rows, "engine": "mine"},
        [{"results": rows[:3]}, *rows[3:]],
        [BENCH, *rows],
    )

    def case(rng: random.Random) -> Outcome:
        if rng.random() < 0.4:
            tree, marks, place = edited(rng, cells, JSON)
            text = "\n".join(",".join(map(str, line)) if isinstance(line, list) else str(line) for line in tree)
            content, name = written(text, marks, str), "costs.csv"
        else:
            tree, marks, place = edited(rng, rng.choice(contents), JSON)
            content, name = written(tree, marks, json.dumps), "costs.json"
        if rng.random() < 0.3:
            content, place = damaged(rng, content), f"{place} and bytes"
        (folder / name).write_bytes(content)
        named = ("--set", "costs.source=table", "--set", f"costs.path={folder / name}")
        answer = command("report", run, *named, "--format", "json")
        return Outcome("another answer" if answer.kind == "answer" else answer.kind, f"{name} {place}: {answer.detail}")

    return case


REQUEST = json.loads("""{
  "id": "chatcmpl-NUMBER", "object": "chat.completion", "model": "served/target", "prompt_token_ids": [1, 2, 3],
  "choices": [{"index": 0, "finish_reason": "length"}], "usage": {"prompt_tokens": 3, "completion_tokens": 8},
  "metrics": {"speculative_decoding": {"acceptance_histogram": [2, 1, 1], "num_spec_steps": 4, "num_accepted_draft_tokens": 3,
    "num_draft_tokens": 5, "num_spec_tokens": 2, "per_step_accepted": [1, 0, 2, 0], "per_step_drafted": [2, 1, 2, 0]}}
}""")
REQUESTS = [REQUEST | {"id": f"chatcmpl-{number}", "prompt_token_ids": [number, 7, 9]} for number in range(5)]
REQUESTS += [{"response": {"body": REQUEST}}, REQUEST | {"id": "last", "metadata": {"a": [1, {"b": None}]}}]


def lines_of(rows: Sequence[Any], marks: Mapping[str, str] | None = None) -> bytes:
    """Requests as a log holds them."""
    return b"".join(written(row, marks or {}, json.dumps) + b"\n" for row in rows)


def import_arguments(folder: Path) -> tuple[object, ...]:
    """The import of a log into a run beside it."""
    return "import", "vllm", folder / "requests.jsonl", "--rule", "strict", "--out", folder / "run"


def imported(folder: Path, rows: Sequence[Any]) -> Path:
    """The imported run of some requests."""
    folder.mkdir(parents=True)
    (folder / "requests.jsonl").write_bytes(lines_of(rows))
    answer = command(*import_arguments(folder))
    if answer.kind != "answer":
        raise RuntimeError(f"the requests are not imported: {answer.said}")
    return folder / "run"


def requests(folder: Path) -> Case:
    """Logs of requests, imported and reported."""
    run = imported(folder / "import", REQUESTS)

    def case(rng: random.Random) -> Outcome:
        tree, marks, place = edited(rng, REQUESTS, JSON)
        content = lines_of(tree if isinstance(tree, list) else [tree], marks)
        if rng.random() < 0.3:
            content, place = damaged(rng, content), f"{place} and bytes"
        shutil.rmtree(run, ignore_errors=True)
        (run.parent / "requests.jsonl").write_bytes(content)
        answers = [command(*import_arguments(run.parent), *rng.choice(((), ("--leave-out",))))]
        if answers[0].kind == "answer":
            answers += [command("report", run, "--format", "json"), answer_of(partial(_opened, run))]
        return Outcome(
            "another answer" if answers[-1].kind == "answer" else answers[-1].kind, f"{place}: {answers[-1].detail}"
        )

    return case


# --- disks that fail ----------------------------------------------------------------------------------------------------

ERRORS = ("EIO", "ESTALE", "EBUSY", "EFBIG", "ENOSPC", "EDQUOT", "EROFS", "EACCES", "ENAMETOOLONG")
CALLS: tuple[tuple[Any, str], ...] = (
    *((builtins, "open"), (io, "open"), (io, "write")),
    *(
        (os, name)
        for name in ("open", "replace", "rename", "link", "fsync", "mkdir", "rmdir", "unlink", "scandir", "listdir", "stat")
    ),
    *((pq.ParquetWriter, name) for name in ("__init__", "write_table", "close")),
    *((pq.ParquetFile, name) for name in ("__init__", "read", "read_row_groups")),
    *((pq, "read_metadata"),),
)


class Disk:
    """Makes the n-th call of a function that touches a folder fail, and those after it where it `stays` broken."""

    def __init__(self, folder: Path, number: int, failure: OSError, stays: bool) -> None:
        self.calls, self._folder, self._number = 0, str(folder), number
        self._failure, self._stays = failure, stays

    def touch(self) -> None:
        """Count a call, and fail if it is the one."""
        self.calls += 1
        if self.calls == self._number or (self._stays and self.calls > self._number):
            raise OSError(self._failure.errno, self._failure.strerror)

    def concerns(self, arguments: Sequence[Any]) -> bool:
        """Whether a call is about the folder; a file descriptor may be."""
        return any(isinstance(part, int) or str(part).startswith(self._folder) for part in arguments[:2])

    @contextlib.contextmanager
    def failing(self, owner: Any, name: str) -> Iterator[None]:
        """Put the failing function into the place of the true one; `io.write` is the method of files that were opened."""
        writes = (owner, name) == (io, "write")
        true = io.open if writes else getattr(owner, name)

        def function(*arguments: Any, **options: Any) -> Any:
            if writes:
                file = true(*arguments, **options)
                if self.concerns(arguments) and file.writable():
                    file.write = self._writing(file.write)
                return file
            if self.concerns(arguments):
                self.touch()
            return true(*arguments, **options)

        with patch.object(owner, "open" if writes else name, function):
            yield

    def _writing(self, write: Callable[[Any], int]) -> Callable[[Any], int]:
        def function(data: Any) -> int:
            self.touch()
            return write(data)

        return function


@dataclass(frozen=True)
class Scene:
    """Something that a disk may fail at: `begin` puts things in order, `act` is what meets the failure, `after` (the answer, now
    that the disk works again) says what was lost: how the case ends.
    """

    begin: Callable[[], None]
    act: Callable[[], Answer]
    after: Callable[[Answer], Outcome]


def disk(folder: Path, models: bool = True) -> Case:
    """Failing calls on the paths that write and read; `models`: a profile of tiny models as well."""
    subjects = synthetic_runs(folder)
    scenes = {name: reading(subjects[0], name) for name in subjects[0].answers} | {"report --out": report_out(subjects[0])}
    scenes |= {"import": importing(subjects[-1]), "write": writing(folder / "written" / "run")}
    if models:
        scenes["profile"] = profiling(folder / "tiny")
    counts = {(name, call): _calls(scene, folder, call) for name, scene in scenes.items() for call in CALLS}

    def case(rng: random.Random) -> Outcome:
        name, call = rng.choice([key for key, count in counts.items() if count])
        scene, code = scenes[name], rng.choice(ERRORS)
        number = rng.randint(1, counts[name, call])
        failure = OSError(getattr(errno, code), os.strerror(getattr(errno, code)))
        broken = Disk(folder, number, failure, stays=rng.random() < 0.5)
        scene.begin()
        with broken.failing(*call):
            answer = scene.act()
        outcome = scene.after(answer)
        return Outcome(outcome.kind, f"{name}: {code} of {call[0].__name__}.{call[1]}, call {number}: {outcome.detail}")

    return case


def _calls(scene: Scene, folder: Path, call: tuple[Any, str]) -> int:
    """How often a scene calls a function on a disk that works."""
    counter = Disk(folder, 0, OSError(), stays=False)
    scene.begin()
    with counter.failing(*call):
        scene.act()
    return counter.calls


def reading(subject: Subject, name: str) -> Scene:
    """One answer of a run."""
    begin = partial(subject.write, subject.files)
    return Scene(begin, readers(subject.path, subject.drafts)[name], partial(judged, name, subject.answers[name]))


def report_out(subject: Subject) -> Scene:
    """A report that takes the place of an older one: afterwards it is the old or the new one, whole, and nothing beside it."""
    page = subject.path.parent / "answer.json"

    def begin() -> None:
        subject.write(subject.files)
        for path in page.parent.glob("*answer.json*"):
            path.unlink()
        page.write_text("older")

    def after(answer: Answer) -> Outcome:
        new = page.read_text() if page.exists() else "nothing"
        if len([*page.parent.glob("*answer.json*"), *page.parent.glob(".*")]) > 1:
            return Outcome("silently different", "something was left beside the file")
        if answer.kind == "answer":
            return judged("report", subject.answers["report"], Answer("answer", new, answer.said))
        whole = new == "older" or figures(new) == figures(subject.answers["report"].text)
        return Outcome(answer.kind if whole else "silently different", f"{answer.detail}; the file holds {new[:20]!r}")

    return Scene(begin, lambda: command("report", subject.path, "--format", "json", "--out", page), after)


def importing(subject: Subject) -> Scene:
    """An import: it can be repeated where it failed."""

    def after(answer: Answer) -> Outcome:
        if answer.kind == "refused":
            again = command(*import_arguments(subject.path.parent))
            if again.kind == "refused":
                return Outcome("not finished", f"{answer.detail}; again: {again.detail}")
            answer = again
        return subject.judged() if answer.kind == "answer" else Outcome(answer.kind, answer.detail)

    return Scene(
        lambda: shutil.rmtree(subject.path, ignore_errors=True),
        lambda: command(*import_arguments(subject.path.parent)),
        after,
    )


def writing(run: Path) -> Scene:
    """A run as a profile writes it: shards that were complete can be read."""
    recipe = Recipe(domains={"code": Domain(documents=3, shortest=8, longest=14)}, gammas=(1,), shard_documents=1)

    def act() -> Answer:
        return answer_of(lambda: write_run(run, recipe) and "")

    act()
    whole = rows_of(run)

    def after(answer: Answer) -> Outcome:
        try:
            rows = rows_of(run, complete_only=True)
        except RunUnreadable as error:
            return Outcome(answer.kind if not (run / "manifest.json").exists() else "silently different", str(error))
        lost = [name for name, table in rows.items() if not whole[name].slice(0, len(table)).equals(table)]
        kind = "same answer" if answer.kind == "answer" else answer.kind
        return Outcome("silently different" if lost else kind, f"{', '.join(lost)} {answer.detail}")

    return Scene(lambda: shutil.rmtree(run, ignore_errors=True), act, after)


def profiling(folder: Path) -> Scene:
    """A profile of tiny models: it can be resumed to the same rows."""
    run = tiny_run(folder)
    whole = rows_of(run)

    def after(answer: Answer) -> Outcome:
        if answer.kind not in ("answer", "refused"):
            return Outcome(answer.kind, answer.detail)
        outcome = finished(command(*profile_arguments(folder), "--resume"), whole, run)
        fine = answer.kind == "refused" and outcome.kind == "same answer"
        return Outcome("refused", answer.detail) if fine else Outcome(outcome.kind, f"{answer.detail}; {outcome.detail}")

    return Scene(lambda: shutil.rmtree(run, ignore_errors=True), lambda: command(*profile_arguments(folder)), after)


def finished(answer: Answer, whole: Mapping[str, Any], run: Path) -> Outcome:
    """Whether a resumed run has the rows of one that nothing happened to, and no leftovers."""
    if answer.kind != "answer":
        return Outcome("not finished" if answer.kind == "refused" else answer.kind, answer.detail)
    rows = rows_of(run)
    other = [
        name for name in {**whole, **rows} if name not in rows or name not in whole or not rows[name].equals(whole[name])
    ]
    other += [path.name for path in run.rglob(".*")]
    return Outcome("silently different" if other else "same answer", ", ".join(other))


def rows_of(path: Path, complete_only: bool = False) -> dict[str, Any]:
    """Every table of a run but the step times; of one that goes on those of complete shards."""
    run = Run.open(path)
    rows = {
        f"positions {draft} {shard.index}": run.positions(draft, shard.index)
        for draft in run.manifest.drafts
        for shard in run.shards
    }
    rows |= {f"continuations {shard.index}": run.continuations(shard.index) for shard in run.shards}
    if not complete_only:
        rows |= {f"totals {draft}": [run.totals(part) for part in run.totals_parts(draft)] for draft in run.manifest.drafts}
        rows = {name: pq.pa.concat_tables(table) if isinstance(table, list) else table for name, table in rows.items()}
    return rows | {"documents": run.documents()}


# --- kills --------------------------------------------------------------------------------------------------------------


def profile_arguments(folder: Path) -> tuple[object, ...]:
    """The profile of tiny models in a folder."""
    return "profile", folder / "profile.yaml", "--out", folder / "run"


def tiny_run(folder: Path) -> Path:
    """A run of tiny random models, with the profile beside it."""
    from tests.tiny import save_models

    save_models(folder)
    rows = [{"text": f"{number} the quick brown fox"[: 8 + 2 * number]} for number in range(7)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = {
        "target": {"model": "target", "dtype": "float32"},
        "drafts": {"close": {"kind": "model", "model": "draft"}, "ngram": {"kind": "prompt_lookup"}},
        "data": [{"domain": "a", "path": "rows.jsonl", "prompt": "{text}", "chat": True}],
        "continuation": {"kind": "greedy", "max_new_tokens": 12},
        "gammas": [1, 2],
        "shard_documents": 2,
        "costs": {"context": 16, "repeats": 3},
    }
    (folder / "profile.yaml").write_text(yaml.safe_dump(tree))
    answer = command(*profile_arguments(folder))
    if answer.kind != "answer":
        raise RuntimeError(f"the tiny models are not profiled: {answer.said}{answer.detail}")
    return folder / "run"


class Server:
    """A process that has imported everything and forks one of its own for each command, so that a case takes no seconds."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "log.txt"
        command = [sys.executable, __file__, "--serve"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

    def run(self, *arguments: object, event: int = 0, seconds: float = LIMIT_S) -> Answer:
        """What a command says that is killed (the kind `killed`) just before its n-th file event (0: none), or after a time."""
        work = {"arguments": list(map(str, arguments)), "log": str(self._log), "event": event, "seconds": seconds}
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("a process without pipes")
        self._process.stdin.write(json.dumps(work) + "\n")
        code, said = int(self._process.stdout.readline()), self._log.read_text(errors="replace")
        if code == -signal.SIGKILL:
            return Answer("killed" if event or seconds < LIMIT_S else "hang", "", said)
        return Answer("answer", "", said) if code in ANSWERS else Answer(_refusal(said)[0], "", said, _refusal(said)[1])


def serve() -> None:
    """Read commands from standard input, run each in a process of its own, and print its exit code."""
    import alphaprof.analysis.totals_files
    import alphaprof.profiling.pipeline  # noqa: F401  # what is imported here need not be in each process

    for line in sys.stdin:
        if not (pid := os.fork()):
            run_and_die(**json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def run_and_die(arguments: Sequence[str], log: str, event: int, seconds: float) -> None:
    """Run a command in this process, which ends with it or is killed; the log says what it printed, and its file events."""
    stream, events = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 0
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    kill = partial(os.kill, os.getpid(), signal.SIGKILL)
    out = arguments[arguments.index("--out") + 1]

    def count(name: str, given: tuple[Any, ...]) -> None:
        nonlocal events
        if name in ("open", "os.rename", "os.mkdir", "os.remove", "os.link") and str(given[0]).startswith(out):
            events += 1
            if events == event:
                kill()

    sys.addaudithook(count)
    watch = threading.Timer(seconds, kill)
    watch.daemon = True
    watch.start()
    sys.argv, code = ["alphaprof", *arguments], 1
    try:
        alphaprof_main()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    print(f"file events: {events}")
    sys.stdout.flush()
    os._exit(code)


def kills(folder: Path) -> Case:
    """Profiles and imports that are killed one to three times, and then finished: all rows must be there, and the same."""
    rows = {"profile": rows_of(tiny_run(folder / "tiny")), "import": rows_of(imported(folder / "import", REQUESTS))}
    commands = {"profile": profile_arguments(folder / "tiny"), "import": import_arguments(folder / "import")}
    server, most, took = Server(folder), {}, {}
    for name, arguments in commands.items():
        shutil.rmtree(arguments[-1])  # type: ignore[arg-type]
        started = time.monotonic()
        said = server.run(*arguments).said
        most[name], took[name] = int(said.rpartition("file events: ")[2]), time.monotonic() - started

    def case(rng: random.Random) -> Outcome:
        name = rng.choices(("profile", "import"), (85, 15))[0]
        out, killed = folder / ("tiny" if name == "profile" else "import") / "run", []
        shutil.rmtree(out, ignore_errors=True)
        again = ("--resume",) if name == "profile" else ()
        for _ in range(rng.choice((1, 1, 2, 3))):
            by_event = rng.random() < 0.7
            plan = {"event": rng.randint(1, most[name])} if by_event else {"seconds": rng.uniform(0, took[name])}
            answer = server.run(*commands[name], *(again if killed else ()), **plan)
            if answer.kind != "killed":
                break
            killed.append(plan)
            partly = command("report", out, "--format", "json")
            if partly.kind not in ("answer", "refused"):
                return Outcome(partly.kind, f"{name}, report after {killed}: {partly.detail}")
        outcome = finished(server.run(*commands[name], *(again if killed else ())), rows[name], out)
        return Outcome(outcome.kind, f"{name} {killed}: {outcome.detail}")

    return case


# --- the campaign -------------------------------------------------------------------------------------------------------

PARTS: dict[str, tuple[Callable[[Path], Case], int]] = {
    "files": (files, 1000),
    "manifests": (edited_manifests, 500),
    "profiles": (profiles, 5000),
    "tables": (tables, 1000),
    "requests": (requests, 1000),
    "disk": (disk, 500),
    "kills": (kills, 100),
}


def run_cases(name: str, seed: int, numbers: Sequence[int], prepare: Callable[[Path], Case] | None = None) -> list[Outcome]:
    """How the cases of a part end; their folder is removed."""
    with tempfile.TemporaryDirectory(prefix="campaign-", ignore_cleanup_errors=True) as folder:
        case = (prepare or PARTS[name][0])(Path(folder) / name)
        return [case(random.Random(f"{seed} {name} {number}")) for number in numbers]  # noqa: S311


def failed(name: str, outcomes: Sequence[Outcome]) -> bool:
    """Whether a part misses its target."""
    counts = Counter(outcome.kind for outcome in outcomes)
    silent = counts.pop("silently different", 0)
    return any(counts[kind] for kind in FAILURES) or silent > (LARGEST_SILENT * len(outcomes) if name == "files" else 0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts, print every failure and a table, and return the exit code."""
    parser = argparse.ArgumentParser(description="Run alphaprof on hostile cases.")
    parser.add_argument("--seed", type=int, default=0, help="of all cases")
    parser.add_argument("--only", choices=PARTS, help="one part")
    parser.add_argument("--case", type=int, help="one case of it, by its number")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    for name, (_, count) in PARTS.items():
        parser.add_argument(f"--{name}", type=int, default=count, metavar="N", help=f"cases; default: {count}")
    options = parser.parse_args(arguments)
    if options.serve:
        serve()
        return 0
    missed, rows = [], []
    for name in [options.only] if options.only else PARTS:
        numbers = range(getattr(options, name)) if options.case is None else [options.case]
        started = time.monotonic()
        outcomes = run_cases(name, options.seed, numbers)
        for number, outcome in zip(numbers, outcomes, strict=True):
            if outcome.kind in FAILURES or options.case is not None:
                print(
                    f"{outcome.kind}: {outcome.detail}\n    --seed {options.seed} --only {name} --case {number}", flush=True
                )
        counts = Counter(outcome.kind for outcome in outcomes)
        rows.append(
            f"{name:10} {len(outcomes):6} {time.monotonic() - started:6.0f} s  "
            + ", ".join(f"{kind} {counts[kind]}" for kind in (*FINE, *FAILURES) if counts[kind])
        )
        missed += [name] if failed(name, outcomes) else []
    print("\n".join(["part        cases   took   how they ended", *rows]))
    print(f"missed: {', '.join(missed)}" if missed else "all targets met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
