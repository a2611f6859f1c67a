#!/usr/bin/env python3
"""Run alphaprof on hostile cases: damaged runs, strange input, failing disks, kills. Seed and number say all of a case.

    python scripts/campaign.py [--seed 0] [--files 1000] [--kills 100] ... [--only PART [--case N]]

forged: a field of a signed manifest is another value, or a file of a run is a pipe. servers: `diagnose` reads a server that
sends what no server should. secrets: a password or a token stands in an address or an option of a profile.
files: a bit, some bytes or a whole file of a run is changed; then report, check, compare, export and `alphaprof.open`
read it. disk: a call that touches files fails, once or from then on. kills: profiles of tiny models and imports are killed
at a file event or at a random time, and finished.

How a case ends: with the `same answer`; with another one and a word about it (`warned`); with whatever a stranger has a run
say (`answered`); or with an error of two lines (`refused`). Failures: `silently different` (a number of the answer or a row
of a finished run is another one, and nothing was said), `told` (a secret or a file of this machine was kept or printed),
`not finished` (what was interrupted cannot be finished), `long message`, `traceback` (any error but ours), `hang`. Exit code
1 where there is one; of 1,000 changed files 3 may be silent. All of it takes about 20 minutes on one idle core.
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import errno
import gzip
import io
import itertools
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pandas as pd
import pyarrow.parquet as pq
from typer.main import get_command

sys.path.insert(0, str(Path(__file__).parent.parent))

import alphaprof
from alphaprof.cli import app
from alphaprof.errors import AlphaprofError
from alphaprof.run.manifest import digest_of
from alphaprof.run.reader import Run
from alphaprof.servers import client
from tests.synthetic import Domain, Recipe, write_anew, write_run

ROOT = Path(__file__).parent.parent
Case = Callable[[random.Random], "Outcome"]
FINE = ("same answer", "answered", "warned", "refused")
FAILURES = ("silently different", "told", "not finished", "long message", "traceback", "hang")
SILENT = 3 / 1000  # of changed files
ANSWERED = (0, 10, 11, 12, 13)  # exit codes of commands that answered
VERDICTS = ("inf", "-inf", "GO", "NO-GO", "UNDECIDED", "pass", "fail", "undecided")
LIMIT_S = 60  # of CPU time for one command; the slowest takes a second
WAITING = 10  # times that by the clock: other work may have the CPU, and what waits for ever takes none
LONGEST = 1200  # characters of an error and its hint, which may repeat 200 of what was given, and paths


@dataclass(frozen=True)
class Outcome:
    """How a case or one command ended, what to look at, and what the command printed to stdout and stderr. A command that
    printed an answer, which nobody has judged yet, ends as `answer`.
    """

    kind: str
    detail: str = ""
    text: str = ""
    said: str = ""


class Hang(BaseException):
    """A command took more CPU time than `LIMIT_S`, or `WAITING` times as long by the clock."""


# --- one command --------------------------------------------------------------------------------------------------------


def command(*arguments: object) -> Outcome:
    """What `alphaprof` prints with these arguments."""
    with patch.object(sys, "argv", ["alphaprof", *map(str, arguments)]), patch.object(app, "app", built()):
        return outcome_of(app.main)


@cache
def built() -> Callable[[], object]:
    """The command line as `app()` makes it anew at every call, which takes as long as many a case."""
    return get_command(app.app)


def outcome_of(call: Callable[[], str | None]) -> Outcome:
    """How a call ended, and what it printed, or returned."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", errors) for errors in ("strict", "backslashreplace"))
    kind, detail, returned = "answer", "", None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            with time_limit(LIMIT_S):
                returned = call()
                out.flush()  # half a character cannot be printed
        except AlphaprofError as error:
            kind = "refused"
            print(f"error: {error.message}\nhint: {error.hint}", file=sys.stderr)
        except SystemExit as end:
            kind = "answer" if (end.code or 0) in ANSWERED else "refused"
        except Hang as error:
            kind, detail = "hang", _place(error)
        except BaseException as error:
            kind, detail = "traceback", _place(error)
    text, said = _content(out), _content(err)
    if kind == "refused":
        kind, detail = refusal(said)
    return Outcome(kind, detail, text if returned is None else returned, said)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises `Hang` in the block when its time is over, again and again, since a destructor may swallow it.

    Another alarm that was set, as that of a test, is set again.
    """

    def ring(*_: object) -> None:
        raise Hang

    timers = ((signal.SIGPROF, signal.ITIMER_PROF, seconds), (signal.SIGALRM, signal.ITIMER_REAL, WAITING * seconds))
    before = [(each, signal.signal(each, ring), timer, signal.setitimer(timer, limit, 1)) for each, timer, limit in timers]
    try:
        yield
    finally:
        for each, handler, timer, earlier in before:
            signal.setitimer(timer, *earlier)
            signal.signal(each, handler)


def refusal(said: str) -> tuple[str, str]:
    """The kind of an error by what was printed, and its first line."""
    lines = re.search(r"^error: (.+)\nhint: (.+)$", said, re.MULTILINE)
    if lines is None or "Traceback (most" in said:
        return "traceback", f"no error and hint in two lines: {said[-200:]!r}"
    return ("refused" if len(lines[0]) <= LONGEST else "long message"), lines[1][:240]


def _content(stream: io.TextIOWrapper) -> str:
    with contextlib.suppress(ValueError):
        stream.flush()
    return stream.buffer.getvalue().decode()


def _place(error: BaseException) -> str:
    """An error, and the last line of the product that it went through."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/alphaprof/" in frame.filename]
    where = f"{frames[-1].filename.rpartition('/alphaprof/')[2]}:{frames[-1].lineno}: " if frames else ""
    return f"{where}{type(error).__name__}: {error}".replace("\n", " ")[:240]


# --- answers of a run, and whether two are the same ---------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """A run, its files, and what it answers as long as nobody has touched it."""

    path: Path
    files: dict[str, bytes]
    readers: dict[str, Callable[[], Outcome]]
    answers: dict[str, Outcome]

    @classmethod
    def of(cls, path: Path) -> Subject:
        """The complete run in a directory. Raises ValueError for a reader that refuses it: its answers could not change."""
        files = {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}
        found = readers(path, list(Run.open(path).manifest.drafts))
        answers = {name: reader() for name, reader in found.items()}
        for name, answer in answers.items():
            if answer.kind != "answer":
                raise ValueError(f"{name} of {path}, which nobody has damaged, is no answer: {answer.detail}")
        return cls(path, files, found, answers)

    def write(self, files: Mapping[str, bytes | None]) -> None:
        """Put other files into the directory; None: a directory of that name."""
        shutil.rmtree(self.path, ignore_errors=True)
        for name, content in files.items():
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            (self.path / name).mkdir() if content is None else (self.path / name).write_bytes(content)

    def judged(self) -> Outcome:
        """What its answers are now, beside what they were: the worst of them, and all that was printed."""
        now = {name: reader() for name, reader in self.readers.items()}
        outcomes = [judged(name, self.answers[name], outcome) for name, outcome in now.items()]
        worst = max(outcomes, key=lambda outcome: (*FINE, *FAILURES).index(outcome.kind))
        printed = "".join(outcome.text + outcome.said for outcome in now.values())
        return Outcome(worst.kind, f"{self.path.parent.name}, {worst.detail}", printed)


def readers(run: Path, drafts: Sequence[str]) -> dict[str, Callable[[], Outcome]]:
    """What reads a run: commands by their name, and `alphaprof.open`."""
    first, last = f"{run}:{drafts[0]}", f"{run}:{drafts[-1]}"
    arguments: list[tuple[object, ...]] = [
        ("report", run),
        ("check", run),
        *([("compare", first, last)] if first != last else []),
    ]
    found = {str(given[0]): partial(command, *given, "--format", "json") for given in arguments}
    found["export"] = partial(command, "export", first, "--to", "rates")
    return found | {"open": partial(outcome_of, lambda: "".join(table.to_csv() for table in tables_of(run).values()))}


def tables_of(path: Path) -> dict[str, pd.DataFrame]:
    """The rows of a run that `alphaprof.open` reads."""
    run = alphaprof.open(path)
    tables = {"documents": run.documents(), "totals": run.totals()}
    return tables if run.manifest.imported else tables | {"positions": run.positions()}


def rows_of(path: Path) -> dict[str, pd.DataFrame]:
    """All rows of a run but those of step times."""
    run = Run.open(path)
    parts = [] if run.imported else [run.continuations(shard.index).to_pandas().astype(str) for shard in run.shards]
    return tables_of(path) | ({"continuations": pd.concat(parts, ignore_index=True)} if parts else {})


def judged(name: str, before: Outcome, now: Outcome) -> Outcome:
    """How an answer compares with the one before."""
    if now.kind != "answer":
        return Outcome(now.kind, f"{name}: {now.detail}")
    (first, warned_before), (second, warned) = figures(before.text), figures(now.text)
    if first == second:
        return Outcome("same answer")
    place = next(key for key in first | second if first.get(key) != second.get(key))
    detail = f"{name}: {place} {first.get(place, 'absent')} -> {second.get(place, 'absent')}"[:240]
    return Outcome("warned" if (warned, now.said) != (warned_before, before.said) else "silently different", detail)


def figures(text: str) -> tuple[dict[str, str], object]:
    """The numbers and verdicts of a JSON answer by their place, and its notes; of other text its lines."""
    try:
        tree = json.loads(text)
    except ValueError:
        return {f"line {number}": line for number, line in enumerate(text.splitlines())}, None
    said = tree.pop("notes", None) if isinstance(tree, dict) else None
    values = {place: node[key] for node, key, place in spots(tree) if not isinstance(node[key], dict | list)}
    return {place: repr(value) for place, value in values.items() if not isinstance(value, str) or value in VERDICTS}, said


def spots(tree: Any, place: str = "") -> Iterator[tuple[Any, Any, str]]:
    """Every value in plain data: what holds it, its key, and its place."""
    for key, value in list(tree.items() if isinstance(tree, dict) else enumerate(tree)):
        here = f"{place}.{key}" if place else str(key)
        yield tree, key, here
        if isinstance(value, dict | list):
            yield from spots(value, here)


# --- mutations ----------------------------------------------------------------------------------------------------------

BYTES = ["\0", "\x1b[2J", "\r", "\t", "\n", "\u202e", "\ud800", "%s{}", "'", '"', "\n\n---\n", ": ", "*", "&a ", "- ", "é"]


def damaged(rng: random.Random, data: bytes, flips: float = 0.2) -> bytes:
    """Bytes with one change; `flips`: how often it is a single bit."""
    start = rng.randrange(len(data) + 1)
    end = min(len(data), start + rng.choice((1, 8, 500)))
    before, inside, after = data[:start], data[start:end], data[end:]
    if inside and rng.random() < flips:
        return before + bytes([inside[0] ^ 1 << rng.randrange(8)]) + inside[1:] + after
    odd = rng.choice(BYTES).encode("utf-8", "surrogatepass")
    changed = [before, before + after, before + inside + inside + after, before + odd + inside + after, data + data, b""]
    noise = rng.randbytes(rng.choice((1, 16, 4096)))
    return rng.choice([*changed, before + noise[: len(inside)] + after, data + noise])


# --- parts: each prepares a folder, and yields what runs a case ---------------------------------------------------------


def synthetic_runs(folder: Path) -> list[Subject]:
    """Small runs of several kinds, and one that was imported."""
    small, drawn = Domain(3, shortest=8, longest=14), Domain(3, shortest=8, longest=14, temperature=0.8)
    greedy = Recipe(domains={"code": small, "chat": small}, lookups=("ngram",), gammas=(1, 2), shard_documents=2)
    sampled = Recipe(domains={"code": drawn}, gammas=(1, 3), rules=("one_hot", "lossless"), thinking=0.4, shard_documents=1)
    runs = [write_run(folder / name / "run", recipe).path for name, recipe in (("greedy", greedy), ("sampled", sampled))]
    return [*map(Subject.of, runs), Subject.of(imported(folder / "imported"))]


@contextmanager
def files(folder: Path, models: bool = True) -> Iterator[Case]:
    """Changed files of runs; `models`: of one that tiny models made as well."""
    subjects = synthetic_runs(folder) + ([Subject.of(tiny_run(folder / "tiny"))] if models else [])

    def case(rng: random.Random) -> Outcome:
        subject = rng.choice(subjects)
        name = rng.choice(list(subject.files))
        other = rng.choice([path for path in subject.files if path.split("/")[0] == name.split("/")[0]])
        changed: dict[str, bytes | None] = {**subject.files}
        change = rng.choices(("damaged", "swapped", "copied", "removed", "a folder"), (80, 8, 6, 3, 3))[0]
        if change == "removed":
            del changed[name]
        elif change == "swapped":
            changed[name], changed[other] = changed[other], changed[name]
        else:
            content = damaged(rng, subject.files[name], flips=0.75)
            changed[name] = {"damaged": content, "copied": changed[other], "a folder": None}[change]
        subject.write(changed)
        outcome = subject.judged()
        return Outcome(outcome.kind, f"{name} {change}: {outcome.detail}")

    yield case


REQUEST = json.loads("""{
  "id": "first", "object": "chat.completion", "model": "served/target", "prompt_token_ids": [1, 2, 3],
  "choices": [{"index": 0, "finish_reason": "length"}], "usage": {"prompt_tokens": 3, "completion_tokens": 8},
  "metrics": {"speculative_decoding": {"acceptance_histogram": [2, 1, 1], "num_spec_steps": 4,
    "num_accepted_draft_tokens": 3, "num_draft_tokens": 5, "num_spec_tokens": 2,
    "per_step_accepted": [1, 0, 2, 0], "per_step_drafted": [2, 1, 2, 0]}}
}""")
REQUESTS = [REQUEST | {"id": f"request {number}", "prompt_token_ids": [number, 7, 9]} for number in range(5)]
REQUESTS += [{"response": {"body": REQUEST}}, REQUEST | {"id": "last", "metadata": {"a": [1, {"b": None}]}}]


def as_lines(rows: Sequence[Any]) -> str:
    """Requests as a log holds them."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def import_arguments(folder: Path) -> tuple[object, ...]:
    """The import of the log in a folder into a run beside it."""
    return "import", folder / "requests.jsonl", "--rule", "strict", "--out", folder / "run"


def imported(folder: Path) -> Path:
    """The imported run of `REQUESTS`."""
    folder.mkdir(parents=True)
    (folder / "requests.jsonl").write_text(as_lines(REQUESTS))
    return made(folder / "run", command(*import_arguments(folder)))


def made(run: Path, outcome: Outcome) -> Path:
    """The run that a command has made. Raises `RuntimeError` where it has not: then there is nothing to try."""
    if outcome.kind != "answer":
        raise RuntimeError(f"{run} was not made: {outcome.detail} {outcome.said}")
    return run


# --- disks that fail ----------------------------------------------------------------------------------------------------

ERRORS = ("EIO", "ESTALE", "EACCES", "EBUSY", "EFBIG", "ENOSPC", "EDQUOT", "EROFS", "ENAMETOOLONG")
READING = ("stat", "scandir", "listdir", "read", "read_row_groups")  # of these the first three alone
WRITE = (io, "write")  # the method of files that `io.open` has opened
CALLS: list[tuple[Any, str]] = [(builtins, "open"), (io, "open"), WRITE]
CALLS += [(os, name) for name in ("open", "replace", "rename", "link", "fsync", "mkdir", "rmdir", "unlink", "stat")]
CALLS += [(os, name) for name in ("scandir", "listdir")]
CALLS += [(pq.ParquetFile, "read"), (pq.ParquetFile, "read_row_groups")]


@dataclass
class Disk:
    """A folder whose n-th call of a function fails (0: none), and those after it where it `stays` broken."""

    folder: Path
    number: int = 0
    error: int = errno.EIO
    stays: bool = False
    calls: int = 0

    @contextmanager
    def failing(self, owner: Any, name: str) -> Iterator[None]:
        """Put a function that fails into the place of another one."""
        true = io.open if (owner, name) == WRITE else getattr(owner, name)

        def touching(*arguments: Any, **options: Any) -> Any:
            if self._concerned(owner, arguments):
                self._touch()
            return true(*arguments, **options)

        def opening(*arguments: Any, **options: Any) -> Any:
            file = true(*arguments, **options)
            if self._concerned(owner, arguments) and file.writable():
                write = file.write
                file.write = lambda data: (self._touch(), write(data))[1]
            return file

        with patch.object(owner, "open", opening) if (owner, name) == WRITE else patch.object(owner, name, touching):
            yield

    def _concerned(self, owner: Any, arguments: Sequence[Any]) -> bool:
        """Whether a call is about the folder, as a file descriptor and what pyarrow does may be."""
        paths = [str(part) for part in arguments[:2] if isinstance(part, str | Path)]
        return owner not in (builtins, io, os) or isinstance(arguments[0], int) or str(self.folder) in "".join(paths)

    def _touch(self) -> None:
        self.calls += 1
        if self.calls == self.number or (self.stays and self.calls > self.number > 0):
            raise OSError(self.error, os.strerror(self.error))


@dataclass(frozen=True)
class Scene:
    """What a disk may fail at: `begin` puts things in order, `act` meets the failure, and `after` says how the case ended by
    the outcome of `act` and by what is there once the disk works again.
    """

    begin: Callable[[], object]
    act: Callable[[], Outcome]
    after: Callable[[Outcome], Outcome]


@contextmanager
def disk(folder: Path, models: bool = True) -> Iterator[Case]:
    """Failing calls on the ways that write and read; `models`: in a profile of tiny models as well."""
    run = synthetic_runs(folder)[0]
    scenes = {
        name: Scene(partial(run.write, run.files), reader, partial(judged, name, run.answers[name]))
        for name, reader in run.readers.items()
    }
    scenes["write"] = writing(folder / "written")
    if models:
        scenes["profile"] = profiling(folder / "tiny")
    counts = {(name, call): count for name, scene in scenes.items() for call, count in calls_of(scene, folder).items()}

    def case(rng: random.Random) -> Outcome:
        name, call = rng.choice(list(counts))
        number, stays = rng.randint(1, counts[name, call]), rng.random() < 0.5
        error = rng.choice(ERRORS[: 3 if call[1] in READING else None])
        scenes[name].begin()
        with Disk(folder, number, getattr(errno, error), stays).failing(*call):
            outcome = scenes[name].act()
        outcome = scenes[name].after(outcome)
        where = f"{error} of {call[0].__name__}.{call[1]}, call {number}{' and later' * stays}"
        return Outcome(outcome.kind, f"{name}: {where}: {outcome.detail}")

    yield case


def calls_of(scene: Scene, folder: Path) -> dict[tuple[Any, str], int]:
    """How often a scene calls each function on a disk that works."""
    disks = {call: Disk(folder) for call in CALLS}
    scene.begin()
    with contextlib.ExitStack() as stack:
        for call, counter in disks.items():
            stack.enter_context(counter.failing(*call))
        scene.act()
    return {call: counter.calls for call, counter in disks.items() if counter.calls}


def writing(run: Path) -> Scene:
    """A run as a profile writes it: shards that were complete can be read."""
    recipe = Recipe(domains={"code": Domain(3, shortest=8, longest=14)}, gammas=(1,), shard_documents=1)
    whole = rows_of(write_run(run, recipe).path)

    def write() -> str:
        write_anew(run, recipe)
        return str(run)

    def after(outcome: Outcome) -> Outcome:
        if outcome.kind == "answer":
            return finished(outcome, run, whole)
        now = outcome_of(lambda: " ".join(lost(rows_of(run), whole) if (run / "manifest.json").exists() else ()))
        if now.kind != "answer" or now.text:
            return Outcome("silently different", f"{outcome.detail}; afterwards {now.detail}{now.text}")
        return outcome

    begin = partial(shutil.rmtree, run, ignore_errors=True)
    return Scene(begin, partial(outcome_of, write), after)


def profiling(folder: Path) -> Scene:
    """A profile of tiny models: it can be finished, with the same rows."""
    run = tiny_run(folder)
    whole = rows_of(run)

    def after(outcome: Outcome) -> Outcome:
        if outcome.kind not in ("answer", "refused"):
            return outcome
        return ended(outcome, finished(carry_on(profile_arguments(folder)), run, whole))

    return Scene(partial(shutil.rmtree, run, ignore_errors=True), partial(command, *profile_arguments(folder)), after)


def ended(outcome: Outcome, finish: Outcome) -> Outcome:
    """How a case ended that was finished after a failure, if there was one."""
    kind = outcome.kind if outcome.kind == "refused" and finish.kind == "same answer" else finish.kind
    return Outcome(kind, f"{outcome.detail}; {finish.detail}")


def carry_on(arguments: tuple[object, ...], call: Callable[..., Outcome] = command, **plan: Any) -> Outcome:
    """Run a profile or an import, or go on with what is there of it: with a complete import there is nothing to do."""
    name, *others, run = arguments
    if name == "profile":
        return call(name, *(["--resume"] if Path(str(run)).exists() else []), *others, run, **plan)
    manifest = Path(str(run)) / "manifest.json"
    done = manifest.exists() and json.loads(manifest.read_text())["status"] == "complete"
    return Outcome("answer", said="file events: 0") if done else call(name, *others, run, **plan)


def lost(now: Mapping[str, pd.DataFrame], whole: Mapping[str, pd.DataFrame]) -> list[str]:
    """Tables of a part of a run whose rows are not those of the whole one."""
    read = {name: table for name, table in now.items() if len(table)}
    same = {name: table[table["document"].isin(read[name]["document"])] for name, table in whole.items() if name in read}
    return [name for name, table in same.items() if not table.reset_index(drop=True).equals(now[name])]


def finished(outcome: Outcome, run: Path, whole: Mapping[str, pd.DataFrame]) -> Outcome:
    """Whether a run that was finished has the rows of one that nothing happened to, and nothing else in its directory."""

    def differences() -> str:
        now = rows_of(run)
        other = [name for name in whole if not whole[name].equals(now.get(name))]
        return ", ".join([*other, *(path.name for path in run.rglob("*.tmp"))])

    end = outcome_of(differences) if outcome.kind == "answer" else outcome
    kinds = {"answer": "silently different" if end.text else "same answer", "refused": "not finished"}
    return Outcome(kinds.get(end.kind, end.kind), end.detail or end.text)


# --- kills --------------------------------------------------------------------------------------------------------------


def profile_arguments(folder: Path) -> tuple[object, ...]:
    """The profile of tiny models in a folder, into a run beside it."""
    return "profile", folder / "profile.yaml", "--out", folder / "run"


def tiny_run(folder: Path) -> Path:
    """A run of tiny random models, with all that its profile names beside it."""
    write_profile(folder)
    return made(folder / "run", command(*profile_arguments(folder)))


def write_profile(folder: Path) -> None:
    """A profile, its tiny random models and its data."""
    from tests.tiny import save_models

    with contextlib.redirect_stderr(io.StringIO()):
        save_models(folder)
    rows = [{"text": f"{number} the quick brown fox"[: 8 + 2 * number]} for number in range(7)]
    (folder / "rows.jsonl").write_text(as_lines(rows))
    (folder / "profile.yaml").write_text("""
target: {model: target, dtype: float32}
drafts: {close: {kind: model, model: draft}, ngram: {kind: prompt_lookup}}
data: [{domain: a, path: rows.jsonl, prompt: "{text}", chat: true}]
continuation: {kind: greedy, max_new_tokens: 12}
gammas: [1, 2]
shard_documents: 2
costs: {context: 16, repeats: 3}
""")


class Server:
    """A process that has run a command already, and forks a process for each further one, which need not import anything."""

    def __init__(self, *arguments: object) -> None:
        serving = [sys.executable, __file__, "--serve"]
        self._process = subprocess.Popen(serving, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._log = Path(str(arguments[-1])).parent / f"log-{self._process.pid}.txt"
        made(Path(str(arguments[-1])), Outcome(*self._asked(list(map(str, arguments)))))

    def _asked(self, work: Any) -> Any:
        """What the process answers to a line."""
        print(json.dumps(work), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def run(self, *arguments: object, event: int = 0, seconds: float = LIMIT_S) -> Outcome:
        """How a command ends, which is killed (the kind `killed`) at its n-th file event (0: none), or after a time."""
        work = {"arguments": list(map(str, arguments)), "log": str(self._log), "event": event, "seconds": seconds}
        code, said = self._asked(work), self._log.read_text(errors="replace")
        if code == -signal.SIGKILL:
            return Outcome("killed" if event or seconds < LIMIT_S else "hang", "", "", said)
        kind, detail = ("answer", "") if code in ANSWERED else refusal(said)
        return Outcome(kind, detail, "", said)


def serve() -> None:
    """Read commands from standard input: run the first one here, each other in a process of its own; print how it ends."""
    first = command(*json.loads(sys.stdin.readline()))
    print(json.dumps([first.kind, first.detail, first.text, first.said]), flush=True)
    for line in sys.stdin:
        if not (process := os.fork()):
            run_and_die(**json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)


def run_and_die(arguments: Sequence[str], log: str, event: int, seconds: float) -> None:
    """Run a command in this process, which ends with it or is killed; the log holds what it printed, and its file events."""
    stream, events = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 0
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    run, kill = arguments[-1], partial(os.kill, os.getpid(), signal.SIGKILL)

    def count(name: str, given: tuple[Any, ...]) -> None:
        nonlocal events
        if name in ("open", "os.rename", "os.mkdir", "os.remove", "os.link") and run in str(given[0]):
            events += 1
            if events == event:
                kill()

    sys.addaudithook(count)
    watch = threading.Timer(seconds, kill)
    watch.daemon = True
    watch.start()
    code: Any = 1
    try:
        with patch.object(sys, "argv", ["alphaprof", *arguments]):
            app.main()
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    print(f"file events: {events}", flush=True)
    os._exit(code)


@contextmanager
def kills(folder: Path) -> Iterator[Case]:
    """Profiles and imports that are killed one to three times, and then finished: all rows are there, and the same."""
    write_profile(folder / "tiny")
    whole = {folder / "tiny" / "run": profile_arguments, imported(folder / "import"): import_arguments}
    with contextlib.closing(Server(*profile_arguments(folder / "tiny"))) as server:
        rows = {run: rows_of(run) for run in whole}

        def attempt(run: Path, **plan: float) -> Outcome:
            return carry_on(whole[run](run.parent), server.run, **plan)

        def events_of(run: Path) -> int:
            shutil.rmtree(run)
            return int(attempt(run).said.rpartition("file events: ")[2])

        started = time.monotonic()
        events = {run: events_of(run) for run in whole}
        took = time.monotonic() - started

        def case(rng: random.Random) -> Outcome:
            run = rng.choices(list(whole), (85, 15))[0]
            shutil.rmtree(run, ignore_errors=True)
            plans = [
                {"event": rng.randint(1, events[run])} if rng.random() < 0.7 else {"seconds": rng.uniform(0, took)}
                for _ in range(rng.choice((1, 1, 2, 3)))
            ]
            for plan in plans:
                attempt(run, **plan)
                partly = command("report", run, "--format", "json")
                if partly.kind not in ("answer", "refused"):
                    return Outcome(partly.kind, f"report after {plans}: {partly.detail}")
            outcome = finished(attempt(run), run, rows[run])
            return Outcome(outcome.kind, f"{run.parent.name}, killed at {plans}: {outcome.detail}")

        yield case


# --- strangers ----------------------------------------------------------------------------------------------------------

WRONG: list[Any] = [None, {}, [], [1], [{}], {"a": 1}, "", "x", "../../etc/passwd", "/etc/passwd", -1, 0, 0.5, 10**9, 10**30]
WRONG += [1e308, True, "nan", "0/0", "9" * 5000, [[[]]], {"source": "table", "path": "/etc/passwd"}, "\x1b[2J\u202e"]


@contextmanager
def forged(folder: Path) -> Iterator[Case]:
    """Runs whose manifest is signed, and says what it cannot; and pipes in the place of their files."""
    subjects = synthetic_runs(folder)

    def case(rng: random.Random) -> Outcome:
        subject = rng.choice(subjects)
        subject.write(subject.files)
        if rng.random() < 0.05:
            name = rng.choice(list(subject.files))
            (subject.path / name).unlink()
            os.mkfifo(subject.path / name)
        else:
            tree = json.loads(subject.files["manifest.json"])
            fields = [spot for spot in spots(tree) if spot[2].partition(".")[0] not in ("format", "version", "digest")]
            node, key, name = rng.choice(fields)
            node[key] = value = rng.choice(WRONG)
            tree["digest"] = digest_of(tree)
            (subject.path / "manifest.json").write_text(json.dumps(tree))
            name = f"{name} = {json.dumps(value)[:60]}"
        outcome = subject.judged()
        if "root:" in outcome.text:  # of /etc/passwd
            return Outcome("told", f"{name}: {outcome.detail}")
        return Outcome("answered" if outcome.kind == "silently different" else outcome.kind, f"{name}: {outcome.detail}")

    yield case


def strange(rng: random.Random) -> Iterator[bytes]:
    """What a server sends that is none, or means harm; the connection ends after the last piece."""
    page = b"# TYPE vllm:spec_decode_num_drafts counter\nvllm:spec_decode_num_drafts_total 5\n"
    ok = b"HTTP/1.1 200 OK\r\n"
    packed = zlib.compressobj(9, zlib.DEFLATED, 31)
    bomb = b"".join(packed.compress(b"# x\n" * 1_000_000) for _ in range(rng.randint(20, 120))) + packed.flush()
    whole = {
        "TLS": b"\x15\x03\x01\x00\x02\x02P\r\n\r\n",
        "gRPC": b"\x00\x00\x12\x04" + rng.randbytes(40),
        "noise": rng.randbytes(rng.choice((1, 200, 70_000))),
        "nothing": b"",
        "short": ok + b"Content-Length: 9999\r\n\r\n" + page,
        "chunks": ok + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + page,
        "half a chunk": ok + b"Transfer-Encoding: chunked\r\n\r\nffff\r\n" + page,
        "long header": ok + b"X: " + b"a" * 100_000 + b"\r\n\r\n" + page,
        "many headers": ok + b"X: a\r\n" * 500 + b"\r\n" + page,
        "bad length": ok + b"Content-Length: -5\r\n\r\n" + page,
        "bomb": ok + b"\r\n" + bomb,
        "damaged gzip": ok + b"\r\n" + damaged(rng, gzip.compress(page)),
        "damaged page": ok + b"\r\n" + damaged(rng, page),
        "redirect": b"HTTP/1.1 302 Found\r\nLocation: " + rng.choice((b"file:///etc/passwd", b"/metrics")) + b"\r\n\r\n",
        "code": f"HTTP/1.1 {rng.choice((401, 404, 500, 501, 999))} No\r\n\r\n".encode() + rng.randbytes(900),
    }
    kind = rng.choice([*whole, "endless", "drip", "drip of headers"])
    yield kind.encode()
    if kind in whole:
        yield whole[kind]
    elif kind == "endless":
        yield ok + b"\r\n"
        yield from itertools.repeat(b"# x\n" * 250_000, 1000)
    else:
        yield ok + (b"\r\n" if kind == "drip" else b"X: ")
        for _ in range(40):
            time.sleep(0.5)
            yield b"#"


@contextmanager
def servers(folder: Path) -> Iterator[Case]:
    """Servers that `diagnose` is pointed at; an answer to a request may take a second."""
    folder.mkdir(parents=True)

    def case(rng: random.Random) -> Outcome:
        pieces = strange(rng)
        kind = next(pieces).decode()
        with socket.create_server(("127.0.0.1", 0)) as listening:
            port = listening.getsockname()[1]

            def serve() -> None:
                with contextlib.suppress(OSError):
                    for turn in range(12):
                        connection, _ = listening.accept()
                        with connection, contextlib.suppress(OSError):
                            connection.recv(65536)
                            for piece in pieces if not turn else (b"",):
                                connection.sendall(piece)

            threading.Thread(target=serve, daemon=True).start()
            with patch.object(client.fetched, "__defaults__", (None, 1.0)):
                outcome = command("diagnose", f"http://127.0.0.1:{port}", "--format", "json")
            with contextlib.suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)
        if "root:" in outcome.text + outcome.said:
            outcome = Outcome("told", "a file of this machine")
        return Outcome("answered" if outcome.kind == "answer" else outcome.kind, f"{kind}: {outcome.detail}")

    yield case


PLANTS = {  # where a user may put a secret: what is added to a profile, or the address that a command is given
    "vllm.url": "vllm: {url: 'ADDRESS'}",
    "vllm.url that writes": "vllm: {url: 'ADDRESS'}\ncontinuation: {kind: greedy, max_new_tokens: 3, writer: vllm}",
    "vllm.args": "vllm: {url: 'http://127.0.0.1:9', args: {kv_transfer_config: {NAME: SECRET}}}",
    "vllm.args as JSON": """vllm: {url: 'http://127.0.0.1:9', args: {kv_transfer_config: '{"a": [{"NAME": "SECRET"}]}'}}""",
    "vllm.env": "vllm: {url: 'http://127.0.0.1:9', env: {NAME: SECRET}}",
    "vllm.args with an address": "vllm: {url: 'http://127.0.0.1:9', args: {download: 'ADDRESS'}}",
    "data": "data: [{domain: a, path: 'ADDRESS', prompt: '{text}'}]",
    "target": "target: {model: 'ADDRESS', dtype: float32}",
    "draft": "drafts: {other: {kind: model, model: 'ADDRESS'}}",
    "costs": "costs: {source: table, path: 'ADDRESS'}",
    "diagnose": "",
    "report": "",
    "--set": "",
}
NAMES = ("aws_secret_access_key", "AWS_CREDENTIALS", "api_token", "HF_TOKEN")
NAMES += ("db_password", "auth", "s3.credential", "apiKey")
ADDRESSES = ("http://user:SECRET@127.0.0.1:9/x.jsonl", "https://127.0.0.1:9/x.jsonl?api_key=SECRET&b=SECRET")
ADDRESSES += ("hf://user:SECRET@datasets/a/b", "http://SECRET@127.0.0.1:9/", "s3://user:SECRET@b/x.jsonl")


@contextmanager
def secrets(folder: Path) -> Iterator[Case]:
    """Profiles and addresses with a secret: it is neither kept nor printed, whatever comes of the command."""
    from tests.tiny import save_models

    folder.mkdir(parents=True)
    with contextlib.redirect_stderr(io.StringIO()):
        save_models(folder)
    (folder / "rows.jsonl").write_text(as_lines([{"text": "the quick brown fox"}]))
    plain = {
        "target": "target: {model: target, dtype: float32}",
        "drafts": "drafts: {ngram: {kind: prompt_lookup}}",
        "data": "data: [{domain: a, path: rows.jsonl, prompt: '{text}'}]",
        "continuation": "continuation: {kind: greedy, max_new_tokens: 3}",
        "gammas": "gammas: [1]",
        "costs": "costs: {source: none}",
    }

    def case(rng: random.Random) -> Outcome:
        secret = "".join(rng.choices("ABCDEFGHJKLMNP", k=12)) + rng.choice(("", "x" * 80))
        address = rng.choice((rng.choice(ADDRESSES[:2]), *ADDRESSES[2:]))
        kind, run = rng.choice(list(PLANTS)), folder / "run"
        shutil.rmtree(run, ignore_errors=True)
        lines = dict(plain)
        for line in PLANTS[kind].replace("ADDRESS", address).replace("NAME", rng.choice(NAMES)).splitlines():
            lines[line.partition(":")[0]] = line
        (folder / "profile.yaml").write_text("\n".join(lines.values()).replace("SECRET", secret))
        address = address.replace("SECRET", secret)
        if kind in ("diagnose", "report"):
            outcomes = [command(kind, address)]
        else:
            more = ["--set", f"vllm={{url: '{address}'}}"] if kind == "--set" else []
            outcomes = [command("profile", folder / "profile.yaml", *more, "--out", run)]
            if (run / "manifest.json").exists():
                outcomes += [command("report", run, "--format", form) for form in ("json", "html")]
        kept = b"".join(path.read_bytes() for path in run.rglob("*") if path.is_file()) if run.exists() else b""
        bad = next((each for each in outcomes if each.kind in FAILURES), None)
        part = secret[:12]
        if part.encode() in kept or any(part in each.text + each.said for each in outcomes):
            where = "the run" if part.encode() in kept else next(e for e in outcomes if part in e.text + e.said).said[:300]
            return Outcome("told", f"{kind} ({address}): {where}")
        kind_of = bad.kind if bad else outcomes[0].kind
        return Outcome("answered" if kind_of == "answer" else kind_of, f"{kind}: {(bad or outcomes[0]).detail}")

    yield case


# --- the campaign -------------------------------------------------------------------------------------------------------

PARTS: dict[str, tuple[Callable[..., AbstractContextManager[Case]], int]] = {
    "files": (files, 1000),
    "disk": (disk, 500),
    "kills": (kills, 100),
    "servers": (servers, 60),
    "forged": (forged, 200),
    "secrets": (secrets, 30),
}


def run_cases(name: str, seed: int, numbers: Sequence[int], **options: bool) -> Iterator[Outcome]:
    """How the cases of a part end; their folder is removed afterwards."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="campaign-", ignore_cleanup_errors=True))
        case = stack.enter_context(PARTS[name][0](Path(folder) / name, **options))
        for number in numbers:
            yield case(chance(seed, name, number))


def chance(seed: int, name: str, number: int) -> random.Random:
    """What decides a case: its own generator of random numbers."""
    return random.Random(f"{seed} {name} {number}")  # noqa: S311


def missed(name: str, kinds: Counter[str]) -> bool:
    """Whether a part misses its target."""
    granted = SILENT * kinds.total() if name == "files" else 0
    return any(kinds[kind] > (granted if kind == "silently different" else 0) for kind in FAILURES)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts, print every failure and a table, and return the exit code."""
    parser = argparse.ArgumentParser(description="Run alphaprof on hostile cases.")
    parser.add_argument("--seed", type=int, default=0, help="of all cases")
    parser.add_argument("--only", choices=PARTS, help="one part")
    parser.add_argument("--case", type=int, help="one case of it")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    for name, (_, count) in PARTS.items():
        parser.add_argument(f"--{name}", type=int, default=count, metavar="N", help=f"number of cases; default: {count}")
    options = parser.parse_args(arguments)
    if options.serve:
        serve()
        return 0
    failed = []
    print("part       cases  CPU time  how they ended", flush=True)
    for name in [options.only] if options.only else PARTS:
        numbers = range(getattr(options, name)) if options.case is None else [options.case]
        started, kinds = os.times(), Counter[str]()
        for number, outcome in zip(numbers, run_cases(name, options.seed, numbers), strict=True):
            kinds[outcome.kind] += 1
            if outcome.kind in FAILURES or options.case is not None:
                print(
                    f"{outcome.kind}: {outcome.detail}\n    --seed {options.seed} --only {name} --case {number}", flush=True
                )
        ends = ", ".join(f"{kind} {kinds[kind]}" for kind in (*FINE, *FAILURES) if kinds[kind])
        took = sum(os.times()[:4]) - sum(started[:4])
        print(f"{name:9} {kinds.total():6} {took:7.0f} s  {ends}", flush=True)
        failed += [name] if missed(name, kinds) else []
    print(f"missed: {', '.join(failed)}" if failed else "every part met its target")
    return 1 if failed else 0


if __name__ == "__main__":
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    sys.exit(main())
