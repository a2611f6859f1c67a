"""The end of a run: shards that any number of processes have committed become one complete run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from alphaprof.errors import RunMismatch, RunUnreadable
from alphaprof.log.files import ranges, shards_of
from alphaprof.log.joining import SIGN
from alphaprof.log.manifest import commit_name, read_manifest
from alphaprof.log.notes import note
from alphaprof.log.store import Run, remove_unnamed
from alphaprof.totals.files import join_totals


def finish(run: Run, shards: int | None = None) -> None:
    """Collect the documents of a run, join the totals of its shards, mark it complete, and remove what no manifest names.

    Any process may do it, at any time and again: the outcome is the same. `shards`: how many of the first ones belong to the
    run, where a verdict was sure before the others were measured. Raises `RunMismatch` where some are not measured yet, or
    not on the documents that were staged.
    """
    run.refresh(afresh=True)
    if shards is None:
        shards = len(run.manifest.staged) if run.manifest.status == "running" else len(run.shards)
    if len(run.shards) < shards:
        commits = run.commits()
        missing = [index for index in range(shards) if index not in commits]
        named = ", ".join([*map(str, missing[:5]), *["..."] * (len(missing) > 5)])
        raise RunMismatch(
            f"{run.path} lacks {len(missing)} of {shards} shards ({named})",
            "alphaprof profile with --resume measures them",
        )
    if run.manifest.status == "running":
        _require_staged(run, shards)
    run.manifest = dataclasses.replace(run.manifest, shards=run.shards[:shards], warnings=_with_mixture(run))
    try:
        _join(run)
    except RunUnreadable:  # another process has finished it meanwhile, and removed what it has joined
        now = read_manifest(run.place)
        if run.manifest.status == "complete" or now.status != "complete":
            raise
        run.manifest = now
    if set(run.manifest.files) - set(run.place.names("")):  # the same, and some of these are gone
        _join(run)


def _require_staged(run: Run, shards: int) -> None:
    """Raise `RunMismatch` unless the first shards of a run were measured on the documents that were staged for them."""
    if odd := [shard.index for shard in run.shards[:shards] if not run.manifest.is_of_staged(shard)]:
        named = ", ".join([*map(str, odd[:5]), *["..."] * (len(odd) > 5)])
        raise RunMismatch(
            f"{len(odd)} shards of {run.path} ({named}) are of other documents than were staged",
            "alphaprof profile with --resume measures them again",
        )


def _with_mixture(run: Run) -> tuple[dict[str, str], ...]:
    """The warnings of a run, with one where its processes do not compute alike. Raises `RunMismatch` where its profile does
    not allow that.
    """
    if run.manifest.status == "complete":
        return run.manifest.warnings
    measured = {commit.worker for commit in run.commits().values()}
    others = [worker.differs_from(run.manifest) for name, worker in run.workers().items() if name in measured]
    earlier = tuple(warning for warning in run.manifest.warnings if warning["code"] != "mixed_devices")
    if not (odd := list(dict.fromkeys(each for found in others for each in found))):
        return earlier
    mixed = note("mixed_devices", where="; ".join(odd))
    if not read_manifest(run.place).config.get("execution", {}).get("mixed_devices"):
        accept = "accept it: alphaprof profile with --resume and --set execution.mixed_devices=true"
        raise RunMismatch(mixed["message"], accept)
    return (*earlier, mixed)


def _join(run: Run) -> None:
    """Join what shards have each, as far as it is not joined yet, and write the manifest that names it."""
    before = run.manifest
    known = run.documents_parts()
    for first, last in ranges(run.shards):
        if (first, last) not in known:
            run.write_documents(run.collected(run.shards[first : last + 1]), (first, last))
    join_totals(run)
    stored = read_manifest(run.place)  # another process may have changed the decision, or timed the steps again
    kept = {name: file for name, file in run.manifest.files.items() if not _is_beyond(name, len(run.shards))}
    now = dataclasses.replace(run.manifest, status="complete", files=kept, config=stored.config)
    if now != before:
        run.write_manifest(now)
    for index in run.committed():
        if index >= len(run.shards):
            run.place.remove(commit_name(index))
    run.place.remove(SIGN)  # of a process that was killed as the run began
    stored = read_manifest(run.place)
    if stored.status == "running":  # a shard was withdrawn meanwhile: the files of the others are named by commits alone
        return
    remove_unnamed(run.place, stored.files)
    run.place.remove_temporary()  # a process that is still at it writes its own again


def _is_beyond(name: str, shards: int) -> bool:
    """Whether a file is of a shard that the run was finished without."""
    covered = shards_of(name)
    return covered is not None and covered[1] >= shards and not name.startswith("prompts/")


def reopen(run: Run, damaged: Sequence[int]) -> None:
    """Take shards back that are damaged: the run is running again, and whoever goes on with it measures them anew. One that
    ended before its last shard ends there again.
    """
    for index in damaged:
        run.withdraw(index)
    run.manifest = read_manifest(run.place)
    if run.manifest.status == "complete":
        run.write_manifest(run.manifest.reopened())
    run.refresh()
