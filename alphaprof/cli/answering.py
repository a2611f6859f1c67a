"""The commands that answer from a run, without models. Heavy imports stay inside them."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option, Typer

from alphaprof.cli.common import (
    DecisiveRule,
    Format,
    OutFiles,
    QuestionChanges,
    RunFolder,
    RunOfDraft,
    Undecided,
    asked_formats,
    command,
    files,
    formats,
    how,
    interruptible,
    one_line,
    output,
    served,
    show,
)

group = Typer()
Margin = Annotated[
    float, Option(metavar="X", min=0, max=1, help="Allowed loss of tokens per round, as a share: 0.03 is 3%.")
]


def _completed(incomplete: str) -> list[str]:
    """Return the sections whose names begin with what was typed, for shell completion."""
    from alphaprof.report.sections import ALL, NAMES

    return [name for name in (*NAMES, ALL) if name.startswith(incomplete)]


@command(
    group,
    "alphaprof report runs/my",
    "alphaprof report runs/my --show causes,load",
    "alphaprof report runs/my --out report.html --out verdict.svg",
)
def report(
    run: RunFolder,
    sections: Annotated[
        list[str] | None,
        output(
            "--show",
            metavar="SECTION",
            help="Print this section: drafts, gammas, causes, load, notes, legend... or all (repeatable; or with commas).",
            autocompletion=_completed,
        ),
    ] = None,
    form: Format = None,
    out: Annotated[list[Path] | None, files("svg", "png", about="; .svg, .png: a figure of the domains")] = None,
    overrides: QuestionChanges = None,
    rules: Annotated[
        list[str] | None,
        Option(metavar="RULE", help="Report on this rule, measured or not: additive:0.2 (repeatable; see --show rules)."),
    ] = None,
    whole_log: Annotated[
        bool, how("--whole-log", help="Read the whole position log of a large run, not just part of its shards.")
    ] = False,
    verify: Annotated[bool, how("--verify", help="First check every byte of the run's files against the manifest.")] = False,
) -> None:
    """Print the answer on one screen: GO, NO-GO or UNDECIDED, and what to use for each domain."""
    from alphaprof.commands.report import report as reported

    answer = reported(run, sections or (), asked_formats(form, out), overrides, rules, whole_log, verify)
    show(answer, form, out)
    for name, failed in answer.report.failures():
        print(f"warning: section {name}: {one_line(failed.error)}\n  {one_line(failed.hint)}", file=sys.stderr)


@command(
    group,
    "alphaprof check runs/my:small",
    "alphaprof check runs/my:small --min-alpha code=0.5",
    "alphaprof check runs/new:small --baseline runs/old",
)
def check(
    run: Annotated[Path, Argument(metavar="RUN[:DRAFT]", readable=False, help="A run, and the draft to check.")],
    draft: Annotated[str | None, Option(help="The draft to check; default: the decision's draft.")] = None,
    rule: DecisiveRule = None,
    gamma: Annotated[
        int | None, Option(metavar="N", min=1, help="Drafted tokens per round; default: the gamma of the decision.")
    ] = None,
    min_alpha: Annotated[
        list[str] | None,
        Option(metavar="[DOMAIN=]X", help="Smallest alpha: 0.6, or code=0.6 (repeatable)."),
    ] = None,
    min_length: Annotated[
        list[str] | None,
        Option("--min-acceptance-length", metavar="[DOMAIN=]X", help="Smallest acceptance length: 1.8, or code=1.8."),
    ] = None,
    min_speedup: Annotated[
        list[str] | None, Option(metavar="[DOMAIN=]X", help="Smallest speedup: 1.2, or code=1.2.")
    ] = None,
    baseline: Annotated[
        str | None, Option(metavar="RUN[:DRAFT]", help="Earlier run: tokens per round must be kept, on the same prompts.")
    ] = None,
    margin: Margin = 0.03,
    golden: Annotated[
        str | None,
        Option(metavar="FILE[#ENTRY]", help="Published acceptance lengths that the run should hold."),
    ] = None,
    undecided: Undecided = "pass",
    form: Annotated[Literal["terminal", "json", "md", "html", "junit"] | None, formats("junit")] = None,
    out: Annotated[list[Path] | None, files("junit", about=", .xml (JUnit)")] = None,
    overrides: QuestionChanges = None,
) -> None:
    """Check a run in CI: exit code 0 pass, 10 fail, 11 undecided (with --undecided fail), 12 not comparable.

    Without a threshold, a baseline or golden lengths, check whether the draft named, or the run's own decision, is GO.
    """
    from alphaprof.commands.check import Minimums, checked, require_passed

    least: Minimums = {"alpha": min_alpha, "acceptance_length": min_length, "speedup": min_speedup}
    answer = checked(run, draft, rule, gamma, least, baseline, margin, overrides or (), golden)
    answer = dataclasses.replace(answer, undecided=undecided)
    show(answer, form, out)
    if answer.outcome == "undecided" and undecided == "pass":
        print(f"warning: {one_line(answer.reason)}\n  this passes; use --undecided fail for exit code 11", file=sys.stderr)
    require_passed(answer)


@command(group, "alphaprof compare runs/my:small runs/my:ngram", "alphaprof compare runs/new:small runs/old:small")
def compare(
    first: RunOfDraft,
    second: Annotated[str, Argument(metavar="RUN[:DRAFT]", help="The run and draft to compare with.")],
    rules: Annotated[
        list[str] | None, Option(metavar="RULE", help="Compare under this rule, measured or not (repeatable).")
    ] = None,
    gamma: Annotated[
        int | None, Option(metavar="N", min=1, help="Compare tokens per round only at this gamma; default: all.")
    ] = None,
    margin: Margin = 0.03,
    form: Format = None,
    out: OutFiles = None,
) -> None:
    """Compare two drafts on the same prompts: paired differences of acceptance and tokens per round.

    Of runs with two targets (fine-tuned, quantized): whether to keep the draft, retrain it or turn it off. To compare an
    engine with a run's prediction, use diagnose.
    """
    from alphaprof.commands.compare.comparison import compare as compare_sides
    from alphaprof.config.load import known_rules
    from alphaprof.run.reader import side_of

    sides = side_of(first), side_of(second)
    show(compare_sides(*sides, known_rules(rules) if rules else None, gamma, margin), form, out)


@command(
    group,
    "alphaprof diagnose before.txt after.txt",
    "alphaprof diagnose runs/my:small metrics.txt",
    "alphaprof diagnose runs/my:small --acceptance 0.71,0.51,0.4 --rounds 4000",
)
def diagnose(
    places: Annotated[
        list[str],
        Argument(
            metavar="[RUN[:DRAFT]] SERVER",
            help="A run that predicts the server, if you have one; then the server: its address; its /metrics page, or two, "
            "before and after; a file of counts (a log, a benchmark's result, llama.cpp's answers); or an imported run.",
        ),
    ],
    label: Annotated[
        list[str] | None,
        served(metavar="NAME=VALUE", help="One of several servers or models: model_name=NAME, instance (repeatable)."),
    ] = None,
    seconds: Annotated[
        float | None,
        served(metavar="X", min=1, help="Poll an address for so long; default: its counts since it started."),
    ] = None,
    acceptance: Annotated[
        str | None,
        served(metavar="X,X,...", help="In place of SERVER: shares of rounds that accepted at least 1, 2, ... drafts."),
    ] = None,
    rounds: Annotated[int | None, served(metavar="N", min=1, help="Rounds that --acceptance was counted over.")] = None,
    plain: Annotated[
        list[str] | None,
        served(metavar="PAGE", help="A page of the same server without speculation, or two: compare speeds (repeatable)."),
    ] = None,
    gamma: Annotated[
        int | None, Option(metavar="N", min=1, help="Drafts per round as decided; default: decision.gamma, if it is fixed.")
    ] = None,
    domain: Annotated[
        str | None, Option(metavar="NAME", help="What the server got: one domain; default: the run's whole traffic.")
    ] = None,
    undecided: Undecided = "pass",
    form: Format = None,
    out: OutFiles = None,
) -> None:
    """Ask why live acceptance is lower than predicted: a run beside a server that speculates. Without a run, a first look.

    The first look shows acceptance, load and step times. To test predicted speedups before you serve, use validate. Exit
    code 0: as predicted, or too few rounds to tell; 13: it differs; 11: too few, with --undecided fail.
    """
    from alphaprof.cli.progress import ConsoleProgress
    from alphaprof.commands.diagnose import diagnose as diagnosed
    from alphaprof.commands.diagnose import require_as_predicted, require_run
    from alphaprof.commands.first_look import first_look
    from alphaprof.config.paths import addressed
    from alphaprof.run.reader import side_of
    from alphaprof.servers.files import ADDRESS
    from alphaprof.stats.formulas import shares_by_depth

    places, plain = [addressed(place) for place in places], [addressed(page) for page in plain or ()]
    with ConsoleProgress() as progress, interruptible(None):
        if seconds is not None:
            progress.start(f"reading {places[-1]}", round(seconds), "s")
        if places[0].startswith(ADDRESS) or Path(places[0]).is_file():
            need = {"--acceptance": acceptance, "--rounds": rounds, "--plain": plain, "--gamma": gamma, "--domain": domain}
            require_run(need | {"--undecided": undecided == "fail"})
            show(first_look(places, label or (), seconds, progress.advance), form, out)
            return
        shares = shares_by_depth("--acceptance", acceptance) if acceptance is not None else ()
        server = (places[1:], plain, shares, rounds, gamma, domain, label or (), seconds, progress.advance)
        answer = diagnosed(side_of(places[0]), *server)
    show(answer, form, out)
    require_as_predicted(answer, undecided_fails=undecided == "fail")
