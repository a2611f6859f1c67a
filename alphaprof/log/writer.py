"""How any number of processes write a run without locks (docs/decisions/029 says why).

1. `joined`: `profile.json`, the first file, names the profile. Processes with the same one share the run.
2. `RunWriter.stage`, `write_latency`, `begin`: prompts and step times are written, then the manifest that names them, by
   the first process.
3. `register` and `commit`: each process says who it is. It writes the files of a shard, once and under names of its own, and
   then the commit that names them. Of two processes that measure one shard the second removes its files.
4. `finish`: a process that finds all shards committed collects documents, joins totals, writes the complete manifest, and
   removes what nothing names. What is joined is named after its content, so that two who finish at once write the same.
5. `reopen`: the commits of damaged shards are withdrawn, and the run is running again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import platform
import re
import secrets
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

import pyarrow as pa

from alphaprof.errors import AlphaprofError, RunDamaged, RunExists, RunMismatch, RunUnreadable, cut
from alphaprof.log.files import attempt_of, file_of, ranges, shards_of
from alphaprof.log.manifest import (
    LATENCY,
    MANIFEST,
    PROFILE,
    Commit,
    File,
    Manifest,
    Shard,
    Worker,
    commit_name,
    now,
    part_name,
    read_commit,
    read_manifest,
    read_status,
)
from alphaprof.log.notes import note
from alphaprof.log.run import Run
from alphaprof.log.schema import CONTINUATION_COLUMNS, DOCUMENT_COLUMNS, LATENCY_COLUMNS, PROMPT_COLUMNS
from alphaprof.log.storage import Storage, require_put_if_absent
from alphaprof.log.tables import table_content, totals_content

SIGN = ".beginning"  # what the process that begins a run writes again and again, until there is a manifest
BEAT = 60.0  # seconds between two of these
FREE = ("decision", "execution")  # parts of the profile that may change when a run is resumed
OURS = re.compile(r"(positions|totals)/draft=[a-z][a-z0-9_-]*|documents|continuations|prompts")  # folders of a run
TIMES = re.compile(r"latency\.[0-9a-f]{8}\.parquet")


@dataclass(frozen=True)
class Beginning:
    """The content of profile.json, the first file of a run: the `digest` of its profile, and the process that began it."""

    digest: str
    host: str
    process: int
    since: str

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Beginning:
        """Return what this process writes there."""
        text = json.dumps({name: value for name, value in config.items() if name not in FREE}, sort_keys=True)
        return cls(hashlib.sha256(text.encode()).hexdigest(), platform.node(), os.getpid(), now())

    def require_same(self, storage: Storage) -> None:
        """Raise `RunExists` unless the run in storage was begun with the same profile."""
        try:
            theirs = Beginning(**json.loads(storage.read(PROFILE)))
        except FileNotFoundError:  # the other process has failed meanwhile, and taken it back
            return
        except (OSError, ValueError, TypeError):  # somebody's own file of that name
            raise RunExists(f"{storage.shown} exists and is not empty", "choose a new directory for --out") from None
        if theirs.digest != self.digest:
            raise RunExists(
                f"{storage.shown} was begun with another profile "
                f"(process {theirs.process} on {theirs.host}, since {theirs.since})",
                f"choose another --out; if that process has ended, delete {storage.shown}",
            )


def require_new(storage: Storage, hint: str = "add --resume to finish it, or choose another --out") -> None:
    """Raise `RunExists` if a run is there, and `DiskFull` if the directory cannot be made.

    `hint`: what to do if it already holds a run.
    """
    storage.require_writable()
    names = set(storage.names(""))
    if MANIFEST in names:
        raise RunExists(f"{storage.shown} already holds a run", hint)
    if PROFILE not in names and names:
        raise RunExists(f"{storage.shown} exists and is not empty", "choose a new directory for --out")


@contextlib.contextmanager
def joined(
    storage: Storage, config: Mapping[str, Any], resume: bool = False, hint: str | None = None, several: bool = False
) -> Iterator[None]:
    """Create the directory of a run if it is missing, and reserve it for this profile; processes that have the same one
    share it. If the block ends before there is a manifest, the next process may have any profile.

    `resume`: go on with a run that has a manifest; `hint`: what to do about one, without; `several`: processes share the
    work, so that the storage must heed put-if-absent. Raises `RunExists` and `DiskFull`.
    """
    mine, begun, made = Beginning.of(config), False, False
    resumed = resume and storage.has(MANIFEST)
    if not resumed:
        require_new(storage, *([hint] if hint else []))
        made = storage.make()
    if several:
        require_put_if_absent(storage)
    if not resumed:
        begun = storage.put_new(PROFILE, (json.dumps(dataclasses.asdict(mine), indent=2) + "\n").encode())
        if not begun:
            mine.require_same(storage)
    try:
        yield
    finally:
        with contextlib.suppress(Exception):  # nothing may hide what ended the block
            if begun and set(storage.names("")) == {PROFILE}:
                storage.remove(PROFILE)
                if made:
                    storage.discard()


@contextlib.contextmanager
def alive(storage: Storage) -> Iterator[None]:
    """Have a thread write who this process is, and when, for others that wait for the block to end: however long."""
    me, ended = f"process {os.getpid()} on {platform.node()}", Event()

    def beat() -> None:
        going = True
        while going:
            with contextlib.suppress(AlphaprofError):  # what this process writes next will tell
                storage.put(SIGN, f"{me}, at {now()}".encode())
            going = not ended.wait(BEAT)

    thread = Thread(target=beat, name="beat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        with contextlib.suppress(AlphaprofError):
            storage.remove(SIGN)


def last_seen(storage: Storage) -> str:
    """Return who begins the run in storage, and when it last said so; empty if nobody has."""
    with contextlib.suppress(FileNotFoundError):
        return cut(storage.read(SIGN).decode(errors="replace"))
    return ""


@contextlib.contextmanager
def run_directory(out: Path | None) -> Iterator[Path]:
    """Yield a directory for a new run: `out`, or if that is None one that is removed in the end."""
    if out is not None:
        yield out
        return
    with tempfile.TemporaryDirectory(prefix="alphaprof-", ignore_cleanup_errors=True) as folder:
        yield Path(folder) / "run"


class RunWriter(Run):
    """A run that this process writes, beside any number of others.

    `worker`: tells the files of this process apart from those of others; `refused`: its commits that came later than
    another's. Files that are recorded are named by the next manifest that is written.
    """

    def __init__(self, where: Storage | Path | str, manifest: Manifest) -> None:
        super().__init__(where, manifest)
        self.worker = secrets.token_hex(4)
        self.refused = 0
        self._written: set[str] = set()
        self._recording = Lock()

    @contextlib.contextmanager
    def beginning(self) -> Iterator[None]:
        """Remove what this process has written, and no other one, if the block ends and the run is not its own."""
        self.storage.make()  # a process that began the same run, and failed, may have removed it
        try:
            yield
        finally:
            with contextlib.suppress(Exception):  # nothing may hide what ended the block
                named = read_manifest(self.storage).files if self.storage.has(MANIFEST) else {}
                for name in self._written - named.keys():
                    self.storage.remove(name)

    def stage(self, prompts: pa.Table, index: int) -> None:
        """Write the documents of a shard as they are to be measured."""
        name = f"prompts/{part_name(index, index, self.worker)}"
        self._record(name, table_content(prompts, PROMPT_COLUMNS, name))

    def write_latency(self, table: pa.Table) -> None:
        """Write the step times, in the place of earlier ones."""
        content = table_content(table, LATENCY_COLUMNS, "latency")
        self._record(f"{LATENCY}{attempt_of(content)}.parquet", content, lambda other: other.startswith(LATENCY))

    def begin(self, part: str = "0/1") -> bool:
        """Write the manifest of a run that begins; False if another process has written one. `part`: this process's."""
        begun = self.storage.put_new(MANIFEST, (self.manifest.to_json() + "\n").encode())
        if begun and self.manifest.imported is None:
            self.register(Worker.here(self.manifest.target.device, self.manifest.environment, part))
        return begun

    def register(self, worker: Worker) -> None:
        """Say who this process is, before its first shard."""
        self.storage.put(f"workers/{self.worker}.json", worker.to_json().encode())

    def commit(
        self,
        shard: Shard,
        positions: Mapping[str, pa.Table],
        continuations: pa.Table,
        totals: Mapping[str, pa.Table] | None = None,
        seconds: float = 0.0,
    ) -> bool:
        """Write a shard, tables by draft, and commit it. False if another process was faster, or has finished the run
        without this shard: what this one wrote is removed then. Raises `DiskFull`.
        """
        tables = {f"positions/draft={draft}": (table, self.log_of(draft).columns) for draft, table in positions.items()}
        tables["continuations"] = continuations, CONTINUATION_COLUMNS
        tables |= {f"totals/draft={draft}": (table, self.totals_columns) for draft, table in (totals or {}).items()}
        part, files = part_name(shard.index, shard.index, self.worker), dict[str, File]()
        for folder, (table, columns) in tables.items():
            name = f"{folder}/{part}"
            files[name] = self._write(name, table_content(table, columns, name))
        commit = Commit(shard, files, self.worker, round(seconds, 3), now())
        named = commit_name(shard.index)
        if (mine := self.storage.put_new(named, commit.to_json().encode())) and self._is_wanted(commit):
            self._commits[named] = commit
            return True
        self.refused += 1
        for name in [named] * mine + list(files):
            self.storage.remove(name)
        return False

    def _is_wanted(self, commit: Commit) -> bool:
        """Return whether a run holds a shard whose commit was just written: it is running, or was finished with it. If it
        was finished with an earlier commit that was withdrawn meanwhile, it is running again.
        """
        if read_status(self.storage) == "running":
            return True
        stored = read_manifest(self.storage)
        if commit.shard.index >= len(stored.shards):
            return False
        if not {name for name in commit.files if not name.startswith("totals/")} <= stored.files.keys():
            self.write_manifest(stored.reopened())
        return True

    def finish(self, join_totals: Callable[[RunWriter], None], shards: int | None = None) -> None:
        """Collect the documents of a run, join the totals of its shards, mark it complete, and remove what nothing names.

        Any process may do it, at any time and again: the outcome is the same. `join_totals`: that of `totals.files`;
        `shards`: how many of the first ones belong to the run, if a verdict was sure before the others were measured. Raises
        `RunMismatch` if some are not measured yet, or not on the documents that were staged.
        """
        self.refresh(afresh=True)  # a commit may have been withdrawn and replaced since it was read
        if shards is None:
            shards = len(self.manifest.staged) if self.manifest.status == "running" else len(self.shards)
        self._require_measured(shards)
        self.manifest = dataclasses.replace(self.manifest, shards=self.shards[:shards], warnings=self._warnings())
        try:
            self._complete(join_totals)
        except RunUnreadable:  # another process has finished it meanwhile, and removed what it has joined
            stored = read_manifest(self.storage)
            if self.manifest.status == "complete" or stored.status != "complete":
                raise
            self.manifest = stored
        if set(self.manifest.files) - set(self.storage.names("")):  # the same, and some of these are gone
            self._complete(join_totals)

    def _require_measured(self, shards: int) -> None:
        """Raise `RunMismatch` unless the first shards are measured, and on the documents that were staged for them."""
        if len(self.shards) < shards:
            committed = self.commits()
            missing = [index for index in range(shards) if index not in committed]
            raise RunMismatch(
                f"{self.path} lacks {len(missing)} of {shards} shards ({_first_few(missing)})",
                "measure them with alphaprof profile --resume",
            )
        if self.manifest.status == "running" and (
            odd := [shard.index for shard in self.shards[:shards] if not self.manifest.is_of_staged(shard)]
        ):
            raise RunMismatch(
                f"{len(odd)} shards of {self.path} ({_first_few(odd)}) do not match the staged documents",
                "measure them again with alphaprof profile --resume",
            )

    def _warnings(self) -> tuple[dict[str, str], ...]:
        """Return the warnings of a run, with one if its processes do not compute alike. Raises `RunMismatch` if its profile
        does not allow that.
        """
        if self.manifest.status == "complete":
            return self.manifest.warnings
        measured = {commit.worker for commit in self.commits().values()}
        others = [worker.differs_from(self.manifest) for name, worker in self.workers().items() if name in measured]
        earlier = tuple(warning for warning in self.manifest.warnings if warning["code"] != "mixed_devices")
        if not (odd := list(dict.fromkeys(each for found in others for each in found))):
            return earlier
        mixed = note("mixed_devices", where="; ".join(odd))
        if not read_manifest(self.storage).profile.mixed_devices:
            accept = "accept it: alphaprof profile with --resume and --set execution.mixed_devices=true"
            raise RunMismatch(mixed["message"], accept)
        return (*earlier, mixed)

    def _complete(self, join_totals: Callable[[RunWriter], None]) -> None:
        """Join the files of shards that are not joined yet, and write the manifest that names them."""
        before = self.manifest
        joined_already = self._whole_documents()
        for first, last in ranges(self.shards):
            if (first, last) not in joined_already:
                self.write_documents(self.collected(self.shards[first : last + 1]), (first, last))
        join_totals(self)
        stored = read_manifest(self.storage)  # another process may have changed the decision, or timed the steps again
        kept = {name: file for name, file in self.manifest.files.items() if not _is_beyond(name, len(self.shards))}
        complete = dataclasses.replace(self.manifest, status="complete", files=kept, config=stored.config)
        if complete != before:
            self.write_manifest(complete)
        for index in self.committed():
            if index >= len(self.shards):
                self.storage.remove(commit_name(index))
        self.storage.remove(SIGN)  # of a process that was killed as the run began
        stored = read_manifest(self.storage)
        if stored.status == "running":  # a shard was withdrawn meanwhile: the files of the others are named by commits alone
            return
        remove_unnamed(self.storage, stored.files)
        self.storage.remove_temporary()  # a process that is still at it writes its own again

    def _whole_documents(self) -> set[tuple[int, int]]:
        """Return the (first, last) shards of documents whose own file is as it was written."""
        names = self._parts("documents")
        whole = zip(names, self._each(self._is_whole, names), strict=True)
        return {shards for name, there in whole if there and (shards := shards_of(name)) is not None}

    def write_documents(self, table: pa.Table, shards: tuple[int, int]) -> None:
        """Write the documents of shards, from the first to the last, in the place of parts that overlap them."""
        content = table_content(table, DOCUMENT_COLUMNS, "documents")
        self._record_joined(f"documents/{part_name(*shards, attempt_of(content))}", content)

    def write_totals(self, tables: Sequence[pa.Table], shards: tuple[int, int], draft: str) -> None:
        """Write a draft's totals of shards, from the first to the last, which tables hold one after the other, in the place
        of parts that overlap them.
        """
        folder = f"totals/draft={draft}"
        content = totals_content(tables, self.totals_columns, folder)
        self._record_joined(f"{folder}/{part_name(*shards, attempt_of(content))}", content)

    def _record_joined(self, name: str, content: pa.Buffer) -> None:
        self._record(name, content, lambda other: _overlap(other, name))

    def reopen(self, damaged: Sequence[int]) -> None:
        """Withdraw damaged shards: the run is running again, and the next process to resume it measures them again. A run
        that ended before its last shard ends there again.
        """
        for index in damaged:
            self.withdraw(index)
        self.manifest = read_manifest(self.storage)
        if self.manifest.status == "complete":
            self.write_manifest(self.manifest.reopened())
        self.refresh()

    def withdraw(self, index: int) -> None:
        """Remove the commit of a damaged shard, so that it is measured again; not if another process has done that."""
        name = commit_name(index)
        known = self._commits.pop(name, None)
        try:
            stored = read_commit(self.storage, name)
        except RunDamaged:
            stored = known
        if stored == known:
            self.storage.remove(name)

    def write_manifest(self, manifest: Manifest) -> None:
        """Replace manifest.json."""
        self.manifest = manifest
        self.storage.put(MANIFEST, (manifest.to_json() + "\n").encode())

    def update_manifest(self, change: Callable[[Manifest], Manifest]) -> None:
        """Change some fields of the manifest as it is stored now, whatever other processes have written meanwhile."""
        self.storage.put(MANIFEST, (change(read_manifest(self.storage)).to_json() + "\n").encode())
        self.manifest = change(self.manifest)

    def _record(self, name: str, content: pa.Buffer, is_gone: Callable[[str], bool] = lambda _: False) -> None:
        """Write a file and take it into the manifest, which is not written yet, in the place of those that are gone."""
        file = self._write(name, content)
        with self._recording:  # files may be written by several threads
            gone = {other for other in self.manifest.files if is_gone(other)}
            files = {other: known for other, known in self.manifest.files.items() if other not in gone}
            self.damaged -= {name, *gone}
            self.manifest = dataclasses.replace(self.manifest, files=files | {name: file})

    def _write(self, name: str, content: pa.Buffer) -> File:
        self._written.add(name)  # a write that fails may leave it there
        self.storage.put(name, content)
        return file_of(content)


def remove_unnamed(storage: Storage, named: Collection[str]) -> None:
    """Remove files of a run that are not among some names; files of a user's own stay, wherever they lie."""
    for name in storage.names(""):
        folder, _, file = name.rpartition("/")
        ours = OURS.fullmatch(folder) and shards_of(file) is not None
        if (ours or (not folder and TIMES.fullmatch(file))) and name not in named:
            storage.remove(name)


def _is_beyond(name: str, shards: int) -> bool:
    """Return whether a file is of a shard that the run was finished without."""
    covered = shards_of(name)
    return covered is not None and covered[1] >= shards and not name.startswith("prompts/")


def _overlap(one: str, other: str) -> bool:
    """Return whether two files of one folder cover the same shards."""
    first, second = shards_of(one), shards_of(other)
    if one.rpartition("/")[0] != other.rpartition("/")[0] or first is None or second is None:
        return False
    return first[0] <= second[1] and second[0] <= first[1]


def _first_few(numbers: Sequence[int]) -> str:
    """Return the first five of some numbers, in words."""
    return ", ".join([*map(str, numbers[:5]), *["..."] * (len(numbers) > 5)])
