"""The commands about runs that processes work on."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Typer

from alphaprof.cli.common import Format, OutFile, command, show
from alphaprof.errors import RunMismatch

RunPlace = Annotated[str, Argument(metavar="RUN", help="Directory of the run, or its URI in an object store.")]
group = Typer(help="How far a run is that one or several processes work on, and its end.", no_args_is_help=True)


@command(group, "alphaprof runs status runs/my")
def status(run: RunPlace, form: Format = "terminal", out: OutFile = None) -> None:
    """Say what is measured, by whom, and how long the rest takes."""
    from alphaprof.commands.runs import RunStatus
    from alphaprof.log.run import Run

    show(RunStatus.of(Run.open(run)), form, out)


@command(group, "alphaprof runs finish runs/my")
def finish(run: RunPlace) -> None:
    """Make a run complete whose shards are all measured. Whoever measures the last one does this by itself."""
    from alphaprof.log.writer import RunWriter
    from alphaprof.totals.files import join_totals

    opened = RunWriter.open(run)
    if opened.manifest.sequential is not None and opened.manifest.status == "running":
        hint = "finish it with alphaprof profile --until-decided --resume, or go on to its last document without"
        raise RunMismatch(f"{run} stops when its verdict is sure, which only its profile can tell", hint)
    opened.finish(join_totals)
    print(f"{run}: {opened.manifest.documents} documents, {opened.manifest.positions} positions")


@command(group, "alphaprof runs clean runs/my")
def clean(run: RunPlace) -> None:
    """Remove files that killed processes left. Only where no process works on the run."""
    from alphaprof.log.run import Run
    from alphaprof.log.writer import remove_unnamed

    opened = Run.open(run)
    if damaged := opened.damaged_shards():
        raise RunMismatch(
            f"{run} has damaged shards ({', '.join(map(str, damaged[:5]))})",
            "measure them again: alphaprof profile --resume",
        )
    before = len(opened.place.names(""))
    named = {name for commit in opened.commits().values() for name in commit.files}
    remove_unnamed(opened.place, {*opened.manifest.files, *named})
    opened.place.remove_temporary()  # a living process would miss its own
    print(f"{run}: {before - len(opened.place.names(''))} files removed")
