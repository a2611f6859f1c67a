"""The commands that run models: `profile` and `train`. Heavy imports stay inside them."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option, Typer

from alphaprof.cli.common import (
    ProfileChanges,
    ProfileFile,
    Resume,
    command,
    formats,
    how,
    interruptible,
    output,
    show,
)
from alphaprof.errors import ExtraMissing
from alphaprof.version import install_line

if TYPE_CHECKING:
    from alphaprof.cli.progress import ConsoleProgress
    from alphaprof.config.profile import ProfileOptions


group = Typer()


@command(group, "alphaprof init Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --data traffic.jsonl")
def init(
    target: Annotated[str, Argument(metavar="TARGET", help="Hub id, local directory or .gguf file.")],
    data: Annotated[
        list[Path],
        Option(metavar="FILE", help="Prompts, one per row: .jsonl, .csv, .parquet... (repeatable: one domain per file)."),
    ],
    draft: Annotated[
        list[str] | None, Option(metavar="MODEL", help="A draft model or head (repeatable). Prompt lookup is always added.")
    ] = None,
    prompt: Annotated[
        str, Option(metavar="TEMPLATE", help="The column of prompts, or a template; default: found by name.")
    ] = "",
    messages: Annotated[str, Option(metavar="COLUMN", help="The column of chats; default: found by name and shape.")] = "",
    out: Annotated[Path, Option(metavar="PROFILE", help="The file to write.")] = Path("profile.yaml"),
) -> None:
    """Write a commented, ready-to-run profile from a target, drafts and files of prompts."""
    from alphaprof.commands import init as starting

    for first in starting.init(target, draft or [], data, out, prompt, messages):
        print(first)
    print(f"{out} is written. Next: alphaprof profile {shlex.quote(str(out))} --dry-run")


@command(group, "alphaprof profile my.yaml --dry-run", "alphaprof profile my.yaml --out runs/my")
def profile(
    profile_file: ProfileFile,
    out: Annotated[str | None, output(help="Directory of the run: new, or with --resume an interrupted one.")] = None,
    resume: Resume = False,
    limit: Annotated[
        int | None, Option(min=1, help="Maximum documents per source, or per domain if a column names it.")
    ] = None,
    reuse: Annotated[
        Path | None,
        how("--reuse-continuations", metavar="RUN", readable=False, help="Measure on the continuations of this run."),
    ] = None,
    dry_run: Annotated[
        bool,
        how("--dry-run", help="Check models, data and numerics, estimate time and memory, and write nothing."),
    ] = False,
    part: Annotated[
        str | None,
        how(metavar="I/N", help="Profile every N-th block of documents from the I-th; auto: as the scheduler says."),
    ] = None,
    texts_only: Annotated[
        bool, how("--texts-only", help="End when all texts are written; --resume scores them, here or elsewhere.")
    ] = False,
    take_over: Annotated[
        bool, how("--take-over", help="Go on although another process seems to write this run (object stores).")
    ] = False,
    retime: Annotated[
        bool, how("--retime", help="Time the steps of a complete run again, and nothing else; costs may have changed.")
    ] = False,
    form: Annotated[Literal["terminal", "json", "md", "html"] | None, formats(about="With --dry-run")] = None,
    overrides: ProfileChanges = None,
) -> None:
    """Stream the data through target and drafts once and write the position log."""
    if out is not None and not (resume or retime or part or dry_run):
        from alphaprof.run.place import require_no_run  # which loads neither profile nor pyarrow

        require_no_run(out)
    options = loaded_profile(profile_file, overrides, limit)
    from alphaprof.commands import profile as profiling
    from alphaprof.config.part import WHOLE, part_of
    from alphaprof.profiling.checks import check_early

    profiling.require_together(options.execution.workers, out, dry_run, form, resume, reuse, part, retime)
    share = part_of(part) if part else WHOLE
    check_early(options, out, resume or retime, reuse, share)
    if out is None or dry_run:
        with working(None) as progress:
            from alphaprof.commands.dry_run import dry_run as looked

            answer = looked(options, out, progress)
        show(answer, form)
        answer.require_runnable()
        return
    with working(out) as progress:
        done = profiling.profile(options, out, progress, resume, reuse, share, texts_only, take_over, retime)
    print(done)


@command(group, "alphaprof merge runs/0 runs/1 --out runs/merged")
def merge(
    runs: Annotated[list[str], Argument(metavar="RUN...", help="The runs of all parts, in any order.")],
    out: Annotated[str, output(help="Directory of the run: new.")],
) -> None:
    """Merge the runs of --part 0/N to N-1/N into the run that one process would have made."""
    from alphaprof.commands import merge as merging

    with interruptible(out):
        run = merging.merge(runs, out)
    manifest = run.manifest
    print(
        f"{out}: {manifest.documents} documents, {manifest.positions} positions. Next: alphaprof report {shlex.quote(out)}"
    )


def loaded_profile(profile_file: Path, overrides: list[str] | None, limit: int | None = None) -> ProfileOptions:
    """Return the options of a profile. Raises `ProfileInvalid`, and `ExtraMissing` if models cannot run at all."""
    from alphaprof.config.load import load_profile

    options = load_profile(profile_file, overrides, limit)
    if missing := [name for name in ("torch", "transformers", "datasets") if find_spec(name) is None]:
        raise ExtraMissing(f"profiling needs {', '.join(missing)}", install_line("profile"))
    return options


def _have_threads_sleep() -> None:
    """Make OpenMP threads sleep while they wait, unless the user has set how they wait. A spinning thread takes the core
    that the thread it waits for needs: beside other work, steps take at least ten times as long. OpenMP reads this once,
    when torch is loaded.
    """
    if not any(name in os.environ for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")):
        os.environ["OMP_WAIT_POLICY"] = "passive"


@contextlib.contextmanager
def working(out: str | None) -> Iterator[ConsoleProgress]:
    """Yield the progress to show. Import torch inside the block, so that Ctrl-C ends the import as well."""
    from alphaprof.cli.progress import ConsoleProgress

    _have_threads_sleep()
    with ConsoleProgress() as progress, interruptible(out):
        yield progress


heads_group = Typer()


@command(heads_group, "alphaprof train my.yaml --from runs/my --out heads/my")
def train(
    profile_file: ProfileFile,
    run: Annotated[str, Option("--from", metavar="RUN", help="Train the head on the continuations of this run.")],
    out: Annotated[Path, output(readable=False, help="Directory of the head: new, or with --resume an interrupted one.")],
    init: Annotated[str | None, Option(metavar="HEAD", help="Begin with this EAGLE-3 head instead of a new one.")] = None,
    loss: Annotated[
        Literal["kl", "lk"], how(help="kl: divergence from the target's distribution; lk: blended with 1 - acceptance.")
    ] = "kl",
    ttt: Annotated[int, how(metavar="N", min=1, max=16, help="Drafts per round to train.")] = 3,
    steps: Annotated[int | None, how(metavar="N", min=1, help="Optimizer steps; default: ten epochs.")] = None,
    batch_tokens: Annotated[int, how(metavar="N", min=1, help="Continuation tokens per step.")] = 1536,
    learning_rate: Annotated[float, how(metavar="X", min=1e-9, help="Peak learning rate, after the warm-up.")] = 2e-3,
    share: Annotated[
        float, how(metavar="X", min=0, max=1, help="Share of the training texts to use, to see what more text brings.")
    ] = 1.0,
    seed: Annotated[int, how(metavar="N", min=0, help="Seed of the initial weights and the document order.")] = 0,
    resume: Resume = False,
    overrides: ProfileChanges = None,
) -> None:
    """Train an EAGLE-3 head on the texts of a run, and profile it on held-out documents."""
    from alphaprof.profiling.models.hub import check_references

    options = loaded_profile(profile_file, overrides)
    check_references(options, data=False, drafts=False)
    with working(str(out)) as progress:
        from alphaprof.profiling import training

        asked = training.TrainingOptions(steps, ttt, batch_tokens, learning_rate, loss, init, share, seed)
        tested = training.train(options, run, out, asked, progress, resume)
    print(training.summary(out, tested))
