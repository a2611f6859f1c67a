"""`alphaprof profile`: what its options mean together. The run itself is `profiling`'s, which loads torch when it begins."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from alphaprof.config.part import Part
from alphaprof.config.profile import ProfileOptions
from alphaprof.errors import OptionInvalid

if TYPE_CHECKING:
    from alphaprof.profiling.shard import Progress

# Options that contradict others, and the remedy.
APART = (
    ("execution.workers", ("--part",), "leave one of them out: Ray shares the work of one run, parts are runs of their own"),
    (
        "--dry-run",
        ("--resume", "--reuse-continuations", "--part", "--retime"),
        "leave them out: the dry run checks the same models and data",
    ),
)


def require_together(
    workers: int | str,
    out: str | None,
    dry_run: bool,
    form: str | None,
    resume: bool,
    reuse: Path | None,
    part: str | None,
    retime: bool,
) -> None:
    """Raise `OptionInvalid` for options that contradict each other, or that lack another one."""
    if form is not None and not dry_run:
        raise OptionInvalid(
            "--format needs --dry-run: a run prints no report", "run alphaprof report RUN --format after the run"
        )
    given = {"--resume": resume, "--reuse-continuations": reuse is not None, "--retime": retime}
    given |= {"--part": part is not None, "--dry-run": dry_run, "execution.workers": workers != 1}
    for option, others, hint in APART:
        if given[option] and (odd := [name for name in others if given[name]]):
            raise OptionInvalid(f"{option} cannot be combined with {' and '.join(odd)}", hint)
    if out is None and not dry_run:
        raise OptionInvalid("--out is missing", "add --out RUN, or --dry-run to check the profile first")


def profile(
    options: ProfileOptions,
    out: str,
    progress: Progress,
    resume: bool,
    reuse: Path | None,
    part: Part,
    texts_only: bool,
    take_over: bool,
    retime: bool,
) -> str:
    """Write the run into `out`, by Ray's actors if `execution.workers` asks for them. Returns what it holds and what is
    next, in words. Raises the errors of `errors.py`.
    """
    if options.execution.workers != 1 and not retime:
        from alphaprof.profiling.on_ray import profile_on_ray

        run = profile_on_ray(options, out, progress, resume, reuse, texts_only, take_over)
    else:
        from alphaprof.profiling import profile as profiling

        run = profiling.profile(options, out, progress, resume, reuse, part, None, texts_only, take_over, retime)
    manifest, place = run.manifest, shlex.quote(out)
    if manifest.status == "complete":
        return f"{out}: {manifest.documents} documents, {manifest.positions} positions. Next: alphaprof report {place}"
    return f"{out}: the texts of {manifest.staged} shards. Next: alphaprof profile ... --out {place} --resume"
