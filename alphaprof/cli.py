"""The command line: parse, call the library, print, exit. Heavy imports stay inside the commands."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from alphaprof import __version__
from alphaprof.errors import AlphaprofError, DiskFull, ExtraMissing

app = typer.Typer(
    help="Will speculative decoding pay: for which traffic, which draft, how many speculative tokens? And how sure is that?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class ReportFormat(StrEnum):
    """Renderings of a report."""

    terminal = "terminal"
    json = "json"


class ReplayFlavour(StrEnum):
    """Flavours of rounds."""

    engine = "engine"
    hf = "hf"


def _version(wanted: bool) -> None:
    if wanted:
        print(f"alphaprof {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")] = False,
) -> None:
    pass


@app.command()
def profile(
    profile_file: Annotated[Path, typer.Argument(metavar="PROFILE", help="Profile file (YAML).")],
    out: Annotated[Path, typer.Option(help="Directory of the run; new, or with --resume the interrupted one.")],
    resume: Annotated[bool, typer.Option("--resume", help="Finish the interrupted run in --out.")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="At most this many documents from every source.")] = None,
    reuse: Annotated[
        Path | None, typer.Option("--reuse-continuations", metavar="RUN", help="Measure on the text of a complete run.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override an option: target.dtype=float32.")
    ] = None,
) -> None:
    """Stream the data through target and drafts once and write the position log."""
    from alphaprof.loader import load_profile
    from alphaprof.profiling.hub import check_references
    from alphaprof.progress import ConsoleProgress

    options = load_profile(profile_file, overrides, limit)
    _require_packages("torch", "transformers", "datasets")
    check_references(options)
    with ConsoleProgress() as progress, _interruptible(out):
        from alphaprof.analysis.totals import write_totals
        from alphaprof.profiling.pipeline import profile as run_profile

        run = run_profile(options, out, progress, resume, reuse)
        progress.say("adding up totals")
        write_totals(run)
    print(f"{out}: {run.manifest.documents} documents, {run.manifest.positions} positions. Next: alphaprof report {out}")


@app.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run.")],
    output: Annotated[ReportFormat, typer.Option("--format", help="terminal or json.")] = ReportFormat.terminal,
    out: Annotated[Path | None, typer.Option(help="Write to this file instead of the standard output.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Decide otherwise: decision.min_speedup=1.2.")
    ] = None,
    rules: Annotated[
        list[str] | None,
        typer.Option(metavar="RULE", help="Report on this rule, measured or not: additive:0.2 (repeatable)."),
    ] = None,
    replay: Annotated[
        ReplayFlavour, typer.Option(help="Rounds as engines run them, or as Hugging Face does.")
    ] = ReplayFlavour.engine,
) -> None:
    """Answer per domain: alpha, tokens per round, speedup, and GO, NO-GO or UNDECIDED."""
    from alphaprof.loader import changed_decision, known_rules
    from alphaprof.log.store import Run
    from alphaprof.report.build import build_report
    from alphaprof.report.render import render
    from alphaprof.report.verdict import Question

    opened = Run.open(run)
    question = Question.of(changed_decision(opened.manifest.config, overrides)) if overrides else None
    ids = known_rules(rules) if rules else None
    _print(render(build_report(opened, replay.value, question, ids), output.value, to_file=out is not None), out)


@app.command()
def compare(
    first: Annotated[str, typer.Argument(metavar="RUN[:DRAFT]", help="A run, and one of its drafts where it has several.")],
    second: Annotated[str, typer.Argument(metavar="RUN[:DRAFT]", help="The other one.")],
    rules: Annotated[
        list[str] | None, typer.Option(metavar="RULE", help="Compare under this rule, measured or not (repeatable).")
    ] = None,
    gamma: Annotated[int | None, typer.Option(min=1, help="Tokens per round at this length only; default: at all.")] = None,
    output: Annotated[ReportFormat, typer.Option("--format", help="terminal or json.")] = ReportFormat.terminal,
    out: Annotated[Path | None, typer.Option(help="Write to this file instead of the standard output.")] = None,
) -> None:
    """Paired differences of two drafts on the same prompts: acceptance and tokens per round."""
    from alphaprof.loader import known_rules
    from alphaprof.report.compare import compare as compare_sides
    from alphaprof.report.compare import side_of
    from alphaprof.report.render import render_comparison

    found = compare_sides(side_of(first), side_of(second), known_rules(rules) if rules else None, gamma)
    _print(render_comparison(found, output.value, to_file=out is not None), out)


@app.command()
def trees(
    run: Annotated[str, typer.Argument(metavar="RUN[:DRAFT]", help="A run, and one of its drafts where it has several.")],
    nodes: Annotated[
        list[int] | None,
        typer.Option(
            min=0, max=512, help="Choose the best tree of this size (repeatable; 0: none). Default: 4, 8, 16, 32, 64."
        ),
    ] = None,
    depth: Annotated[
        int | None, typer.Option(min=1, max=64, help="Most levels of a chosen tree. Default: the run's largest gamma.")
    ] = None,
    files: Annotated[
        list[Path] | None,
        typer.Option("--tree", metavar="FILE", help="A tree of your own: JSON list of paths (repeatable)."),
    ] = None,
    top: Annotated[int, typer.Option(min=0, max=1, help="What these files call the draft's top token.")] = 0,
    output: Annotated[ReportFormat, typer.Option("--format", help="terminal or json.")] = ReportFormat.terminal,
    out: Annotated[Path | None, typer.Option(help="Write to this file instead of the standard output.")] = None,
) -> None:
    """What static draft trees would give: the best of each size, and your own. Tokens per round, no verdict."""
    from alphaprof.report.compare import side_of
    from alphaprof.report.render import render_trees
    from alphaprof.report.tree_files import read_trees
    from alphaprof.report.trees import build_trees, request_of

    found = build_trees(side_of(run), request_of(nodes, depth, read_trees(files or [], top)))
    _print(render_trees(found, output.value, to_file=out is not None), out)


@app.command()
def validate(
    profile_file: Annotated[Path, typer.Argument(metavar="PROFILE", help="Profile file (YAML).")],
    documents: Annotated[int, typer.Option(min=1, help="Documents of every source.")] = 4,
    gamma: Annotated[
        list[int] | None,
        typer.Option(
            min=1, max=64, help="Drafted tokens per round (repeatable); default: 1, 2, 3, 5 as the profile has them."
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="How often every text is decoded in every way.")] = 3,
    tolerance: Annotated[float, typer.Option(min=0, help="Exit code 13 beyond this median error of the speedup.")] = 0.10,
    out: Annotated[Path | None, typer.Option(help="Keep the run of the prediction in this new directory.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override an option: target.dtype=float32.")
    ] = None,
    output: Annotated[ReportFormat, typer.Option("--format", help="terminal or json.")] = ReportFormat.terminal,
) -> None:
    """Hold the prediction against a clock: real speculative decoding of a few documents. Exit code 13: too far off."""
    from alphaprof.loader import load_profile
    from alphaprof.log.store import run_directory
    from alphaprof.profiling.hub import check_references
    from alphaprof.progress import ConsoleProgress

    options = load_profile(profile_file, overrides, documents)
    _require_packages("torch", "transformers", "datasets")
    check_references(options)
    with run_directory(out) as folder, ConsoleProgress() as progress, _interruptible(None):
        from alphaprof.profiling.validate import validate as run_validation
        from alphaprof.report.render import render_validation
        from alphaprof.report.validate import build_validation, require_within

        found = build_validation(*run_validation(options, folder, gamma, repeats, progress), tolerance, kept=out is not None)
    _print(render_validation(found, output.value), None)
    require_within(found)


@app.command()
def predict(
    cost: Annotated[float, typer.Option(help="A draft step, in plain decode steps of the target (c).")],
    alpha: Annotated[float | None, typer.Option(help="Share of positions where the draft's proposal is kept.")] = None,
    rate: Annotated[
        float | None, typer.Option("--accepted-per-drafted", help="Instead of alpha: the acceptance rate an engine shows.")
    ] = None,
    at_gamma: Annotated[int | None, typer.Option(help="The gamma at which the engine showed it.")] = None,
    gamma: Annotated[int | None, typer.Option(help="Drafted tokens per round; default: 1 to 8.")] = None,
    verify: Annotated[float, typer.Option(help="Verifying a round, in decode steps (v).")] = 1.0,
    verify_slope: Annotated[float, typer.Option(help="Added to it for every drafted token.")] = 0.0,
    overhead: Annotated[float, typer.Option(help="Everything else in a round, in decode steps.")] = 0.0,
    burstiness: Annotated[
        float, typer.Option(help="Lag-1 autocorrelation of acceptance; 0: independent from position to position.")
    ] = 0.0,
    output: Annotated[ReportFormat, typer.Option("--format", help="terminal or json.")] = ReportFormat.terminal,
    out: Annotated[Path | None, typer.Option(help="Write to this file instead of the standard output.")] = None,
) -> None:
    """The formulas, without models: tokens per round, break-even and speedup from an acceptance and a cost."""
    from alphaprof.analysis.formulas import RoundCost
    from alphaprof.report.predict import GAMMAS, acceptance_of, build_prediction
    from alphaprof.report.render import render_prediction

    costs = RoundCost(cost, verify, verify_slope, overhead)
    gammas = GAMMAS if gamma is None else (gamma,)
    found = build_prediction(acceptance_of(alpha, rate, at_gamma), burstiness, costs, gammas)
    _print(render_prediction(found, output.value, to_file=out is not None), out)


@app.command()
def schema() -> None:
    """The columns of the position log: name, type, unit and meaning."""
    from alphaprof.log.schema import LogRules

    for column in LogRules(("RULE",), ("RULE",), ("RULE",)).columns:
        unit = f" [{column.unit}]" if column.unit else ""
        print(f"{column.name:26} {column.type_name}{unit}\n    {column.doc}")


@app.command()
def rules() -> None:
    """The acceptance rules: when is a drafted token d kept? p: target, q: draft, x0: the target's top token."""
    from alphaprof.analysis.rule_names import spelling
    from alphaprof.analysis.rules import NOT_MODELLED, RULES

    for name, rule in RULES.items():
        text = " and ".join(rule.policies) + " text"
        print(f"{spelling(name):28} {'lossy' if rule.lossy else 'exact'}, on {text}\n    {rule.about}")
        for parameter in rule.parameters:
            more = "larger" if parameter.relaxes > 0 else "smaller"
            print(f"    {parameter.name}: {parameter.low:g} to {parameter.high:g}; {more} values accept more")
    print("\nnot modelled:")
    for name, about in NOT_MODELLED.items():
        print(f"{name:28} {about}")


@contextlib.contextmanager
def _interruptible(out: Path | None) -> Iterator[None]:
    """Ctrl-C ends the command with a word about what is left (None: nothing to go on with), and the shells' exit code."""
    try:
        yield
    except KeyboardInterrupt:
        begun = out is not None and (out / "manifest.json").exists()
        hint = f"complete shards are in {out}: finish with the same line and --resume"
        nothing = "nothing was written yet" if out is not None else "start again, with another --out if one was named"
        print(f"interrupted\nhint: {_one_line(hint if begun else nothing)}", file=sys.stderr)
        raise typer.Exit(130) from None


def _print(text: str, path: Path | None) -> None:
    if path is None:
        sys.stdout.write(text)
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DiskFull(f"cannot write {path}: {error.strerror}", "choose another --out, in an existing directory") from None


def _require_packages(*names: str) -> None:
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise ExtraMissing(f"profiling needs {', '.join(missing)}", "pip install 'alphaprof[profile]'")


def main() -> None:
    """The console script: the one place that prints the errors a user can cause, as two lines on stderr."""
    try:
        app()
    except AlphaprofError as error:
        print(f"error: {_one_line(error.message)}\nhint: {_one_line(error.hint)}", file=sys.stderr)
        sys.exit(error.exit_code)


def _one_line(text: str) -> str:
    """Text that may quote data: without line breaks, control or direction characters."""
    return "".join(char if char.isprintable() else " " for char in text)
