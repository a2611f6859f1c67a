"""The commands that run models. Heavy imports stay inside them."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

from typer import Exit, Option

from alphaprof.cli.common import Format, OutFile, ProfileChanges, ProfileFile, Undecided, has_begun, interruptible, show
from alphaprof.errors import ExtraMissing, OptionInvalid
from alphaprof.version import install_line

if TYPE_CHECKING:
    from alphaprof.cli.progress import ConsoleProgress
    from alphaprof.config.profile import ProfileOptions


# Options of `profile` that contradict others, and what to do instead.
APART = (
    ("--workers", ("--part",), "use --workers on one machine, --part on several"),
    ("engine ray", ("--part", "--workers"), "set execution.workers, or use --engine local"),
    ("--until-decided", ("--reuse-continuations",), "use one of them: each has its own order of documents"),
    (
        "--dry-run",
        ("--resume", "--reuse-continuations", "--until-decided", "--part", "--workers"),
        "leave these out for the dry run: models and data are the same",
    ),
)


def profile(
    profile_file: ProfileFile,
    out: Annotated[str | None, Option(help="Directory of the run; new, or with --resume the interrupted one.")] = None,
    resume: Annotated[bool, Option("--resume", help="Continue the interrupted run in --out, or start it.")] = False,
    limit: Annotated[
        int | None, Option(min=1, help="At most this many documents of each source or domain of a column.")
    ] = None,
    reuse: Annotated[
        Path | None,
        Option("--reuse-continuations", metavar="RUN", readable=False, help="Measure on the texts of this complete run."),
    ] = None,
    until_decided: Annotated[
        bool, Option("--until-decided", help="Take documents in random order, and stop when the verdict is sure.")
    ] = False,
    dry_run: Annotated[
        bool,
        Option("--dry-run", help="Check models, data and numerics, estimate what the run takes, and write nothing."),
    ] = False,
    part: Annotated[
        str | None,
        Option(metavar="I/N", help="Measure this part of the shards, beside other processes; auto: as the scheduler says."),
    ] = None,
    workers: Annotated[
        int | None, Option(min=1, metavar="N", help="Share the work among this many processes here, a GPU each.")
    ] = None,
    engine: Annotated[
        Literal["local", "ray"] | None, Option(help="ray: share the work among actors of Ray, here or on a cluster.")
    ] = None,
    output: Annotated[
        Literal["terminal", "json"] | None, Option("--format", help="With --dry-run: terminal or json.")
    ] = None,
    overrides: ProfileChanges = None,
) -> None:
    """Stream the data through target and drafts once and write the position log."""
    overrides = [*(overrides or []), *([f"execution.engine={engine}"] if engine else [])]
    options = loaded_profile(profile_file, overrides, limit)
    _require_together(dry_run, output, resume, reuse, until_decided, part, workers, options.execution.engine)
    if dry_run:
        _dry_run(options, out, output or "terminal")
    if out is None:
        raise OptionInvalid("a run needs a directory", "add --out RUN, or --dry-run to check the profile first")
    require_references(options, data=not _is_staged(out, part))
    if workers is not None:
        _share(profile_file, out, workers, resume, limit, reuse, until_decided, overrides)
    else:
        _measure(options, out, resume, reuse, until_decided, part)
    _say_done(out)


def _measure(
    options: ProfileOptions, out: str, resume: bool, reuse: Path | None, until_decided: bool, part: str | None
) -> None:
    """Profile in this process: the whole run, or a part of its shards."""
    from alphaprof.profiling.run.parts import WHOLE, part_of

    share = part_of(part) if part is not None else WHOLE
    resume = resume or (part is not None and share == WHOLE)  # a part is started again by the same command
    with working(out) as progress:
        from alphaprof.profiling.run import profile as profiling
        from alphaprof.report.build import settled

        if options.execution.engine == "ray":
            from alphaprof.profiling.run.on_ray import profile_on_ray

            profile_on_ray(options, out, progress, resume, reuse, settled if until_decided else None)
        else:
            profiling.profile(options, out, progress, resume, reuse, settled if until_decided else None, share)


def _say_done(out: str) -> None:
    """Prints how much of a run there is, and what to do next."""
    from alphaprof.log.run import Run

    run = Run.open(out)
    done = f"{out}: {run.manifest.documents} documents, {run.manifest.positions} positions"
    complete = run.manifest.status == "complete"
    print(f"{done}. Next: alphaprof report {out}" if complete else f"{done} so far. See: alphaprof runs status {out}")


def _share(
    profile_file: Path,
    out: str,
    workers: int,
    resume: bool,
    limit: int | None,
    reuse: Path | None,
    until_decided: bool,
    overrides: list[str] | None,
) -> None:
    """Profile in several processes, with the options of this one."""
    from alphaprof.commands.workers import work_together
    from alphaprof.log.place import place_of
    from alphaprof.log.writer import require_new

    if not resume:
        require_new(place_of(out))
    arguments = [str(profile_file), "--out", out]
    arguments += ["--limit", str(limit)] if limit is not None else []
    arguments += ["--reuse-continuations", str(reuse)] if reuse is not None else []
    arguments += ["--until-decided"] if until_decided else []
    arguments += ["--resume"] if resume else []  # so that each compares what others wrote of its part
    arguments += [word for override in overrides or [] for word in ("--set", override)]
    with interruptible(out):
        work_together(arguments, workers, place_of(out), lambda message: print(message, file=sys.stderr))


def loaded_profile(profile_file: Path, overrides: list[str] | None, limit: int | None = None) -> ProfileOptions:
    """Returns the options of a profile. Raises `ProfileInvalid`, and `ExtraMissing` where models cannot run at all."""
    from alphaprof.config.load import load_profile

    options = load_profile(profile_file, overrides, limit)
    if missing := [name for name in ("torch", "transformers", "datasets") if find_spec(name) is None]:
        raise ExtraMissing(f"profiling needs {', '.join(missing)}", install_line("profile"))
    return options


def _is_staged(out: str, part: str | None) -> bool:
    """Whether this process reads no data: a run is there whose prompts are staged, or another part stages them."""
    from alphaprof.profiling.run.parts import part_of

    return has_begun(out) or (part is not None and part_of(part).index > 0)


def require_references(options: ProfileOptions, data: bool = True, drafts: bool = True) -> None:
    """Raises what `check_references` says of the profile's models and its data, before torch is imported."""
    from alphaprof.profiling.models.hub import check_references

    check_references(options, data, drafts)


def _have_threads_sleep() -> None:
    """Has threads of OpenMP sleep while they wait, unless the user has said how they wait. A thread that spins takes the
    processor that the one it waits for needs: beside other work, steps take ten times as long and more. OpenMP reads this
    once, when torch is loaded.
    """
    if not any(name in os.environ for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")):
        os.environ["OMP_WAIT_POLICY"] = "passive"


@contextlib.contextmanager
def working(out: str | None) -> Iterator[ConsoleProgress]:
    """Yields the progress to show. What imports torch is imported in the block: Ctrl-C ends that as well."""
    from alphaprof.cli.progress import ConsoleProgress

    _have_threads_sleep()
    with ConsoleProgress() as progress, interruptible(out):
        yield progress


def _require_together(
    dry_run: bool,
    output: str | None,
    resume: bool,
    reuse: Path | None,
    until_decided: bool,
    part: str | None,
    workers: int | None,
    engine: str,
) -> None:
    """Raise `OptionInvalid` for options of `profile` that contradict each other."""
    if output is not None and not dry_run:
        hint = "use alphaprof report RUN --format after the run"
        raise OptionInvalid("--format needs --dry-run: a run prints no report", hint)
    given = {"--resume": resume, "--reuse-continuations": reuse is not None, "--until-decided": until_decided}
    given |= {"--part": part is not None, "--workers": workers is not None}
    given |= {"--dry-run": dry_run, "engine ray": engine == "ray"}
    for option, others, hint in APART:
        if given[option] and (odd := [name for name in others if given[name]]):
            raise OptionInvalid(f"{option} cannot be combined with {' and '.join(odd)}", hint)


def _dry_run(options: ProfileOptions, out: str | None, output: str) -> NoReturn:
    """Prints the checks of a run before it runs, and ends the command."""
    with working(None) as progress:
        from alphaprof.commands.preflight.measure import preflight

        answer = preflight(options, out, progress)
    show(answer, output)
    raise Exit


def latency(
    profile_file: ProfileFile,
    output: Annotated[
        Literal["terminal", "json", "csv"],
        Option("--format", help="terminal, json, or the csv that costs.path reads."),
    ] = "terminal",
    out: OutFile = None,
    overrides: Annotated[
        list[str] | None, Option("--set", metavar="KEY=VALUE", help="Override an option: costs.concurrency=[1,8].")
    ] = None,
) -> None:
    """Time the steps of target and drafts here, over batch sizes and contexts, without profiling any text."""
    from alphaprof.log.writer import run_directory

    options = loaded_profile(profile_file, overrides)
    require_references(options)
    with run_directory(None) as folder, working(None) as progress:
        from alphaprof.commands.latency import Latency
        from alphaprof.profiling.run.profile import time_steps

        answer = Latency.of(time_steps(options, folder, progress))
    show(answer, output, out)


def validate(
    profile_file: ProfileFile,
    documents: Annotated[int, Option(min=1, help="Documents of each source or domain of a column.")] = 4,
    gamma: Annotated[
        list[int] | None,
        Option(min=1, max=64, help="Drafted tokens per round (repeatable); default: those of 1, 2, 3, 5 in the profile."),
    ] = None,
    rule: Annotated[
        list[str] | None, Option(help="Decode by this rule too, exact or lossy: additive:0.1 (repeatable).")
    ] = None,
    repeats: Annotated[int, Option(min=1, help="How often each text is decoded with and without each draft.")] = 3,
    tolerance: Annotated[float, Option(min=0, help="Largest median error of the predicted speedup that passes.")] = 0.10,
    undecided: Annotated[
        Undecided, Option(help="Whether clocks that are too noisy to tell pass (exit code 0) or fail (11).")
    ] = "pass",
    out: Annotated[Path | None, Option(readable=False, help="Keep the run of the prediction in this new directory.")] = None,
    overrides: ProfileChanges = None,
    output: Format = "terminal",
) -> None:
    """Compare the prediction with measured times: real speculative decoding of a few documents, in alphaprof's own loop.

    Exit code 0: within the tolerance, or too noisy to tell; 13: outside; 11: too noisy, with --undecided fail.
    """
    from alphaprof.config.load import known_rules
    from alphaprof.log.writer import run_directory

    rules = known_rules(rule or [], "--rule")
    options = loaded_profile(profile_file, overrides, documents)
    require_references(options)
    with run_directory(out) as folder, working(None) as progress:
        from alphaprof.commands.validate.answer import require_within
        from alphaprof.commands.validate.build import build_validation
        from alphaprof.commands.validate.measure import validate as run_validation

        run, measured = run_validation(options, folder, gamma, repeats, progress, rules)
        answer = build_validation(run, measured, tolerance, kept=out is not None)
    show(answer, output)
    require_within(answer, undecided_fails=undecided == "fail")
