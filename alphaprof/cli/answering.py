"""The commands that answer from a run, from numbers or from declarations, without models. Heavy imports stay inside them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from alphaprof.cli.common import (
    Format,
    OutFile,
    RunFolder,
    RunOfDraft,
    Undecided,
    one_line,
    print_text,
    show,
    without_pandas,
)
from alphaprof.errors import OptionInvalid

CheckFormat = Annotated[
    Literal["terminal", "json", "md", "html", "junit"], Option("--format", help="terminal, json, md, html or junit.")
]


def _completed(incomplete: str) -> list[str]:
    """Returns the sections whose names begin with what was typed, for the completion of shells."""
    from alphaprof.render.sections.contents import ALL, NAMES

    return [name for name in (*NAMES, ALL) if name.startswith(incomplete)]


def _sections(names: list[str] | None, output: str, out: Path | None) -> tuple[str, ...]:
    """Returns the names of sections. Raises `OptionInvalid` for unknown ones, and for an `output` that cannot have them or
    does not fit a terminal.
    """
    from alphaprof.render.sections.contents import known_sections

    if output == "html" and out is None and sys.stdout.isatty():
        raise OptionInvalid(
            "the HTML page is five megabytes of text, too much for a terminal", "write it to a file: --out report.html"
        )
    if names and output not in ("terminal", "md"):
        holds = "is the one table" if output == "csv" else "holds every section"
        raise OptionInvalid(
            f"--show chooses what terminal and md print; {output} {holds}", f"leave --show or --format {output} out"
        )
    return known_sections(names or ())


Sections = Annotated[
    list[str] | None,
    Option(
        "--show",
        metavar="SECTION",
        help="Print this section: drafts, gammas, causes, load, notes, legend... or all (repeatable).",
        autocompletion=_completed,
    ),
]


def report(
    run: RunFolder,
    sections: Sections = None,
    output: Annotated[
        Literal["terminal", "json", "md", "html", "csv"], Option("--format", help="terminal, json, md, html or csv.")
    ] = "terminal",
    out: OutFile = None,
    overrides: Annotated[
        list[str] | None,
        Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change the question, decision.min_speedup=1.2, or the step times, costs.source=roofline (repeatable).",
        ),
    ] = None,
    rules: Annotated[
        list[str] | None,
        Option(metavar="RULE", help="Report on this rule, measured or not: additive:0.2 (repeatable); --show rules."),
    ] = None,
    replay: Annotated[
        Literal["engine", "llamacpp"],
        Option(help="How texts end: engine caps no draft; llamacpp drafts at most the tokens left - 1."),
    ] = "engine",
    whole_log: Annotated[
        bool, Option("--whole-log", help="Read the whole position log of a large run, not a part of its shards.")
    ] = False,
    verify: Annotated[
        bool, Option("--verify", help="First check every byte of the run's files against the manifest.")
    ] = False,
) -> None:
    """Print the answer on one screen: GO, NO-GO or UNDECIDED, the route, and what to use for each domain."""
    from alphaprof.log.store import Run
    from alphaprof.render.report import ReportAnswer
    from alphaprof.report.build import build_report

    shown = _sections(sections, output, out)
    opened = Run.open(run)
    if verify:
        opened.verify()
    config = ids = None
    if overrides or rules:
        from alphaprof.config.load import changed_question, known_rules  # what validates profiles takes a while to load

        config = changed_question(opened.manifest.config, overrides) if overrides else None
        ids = known_rules(rules) if rules else None
    with without_pandas():
        show(ReportAnswer.of(build_report(opened, replay, config, ids, whole_log), shown), output, out)


def check(
    run: RunFolder,
    draft: Annotated[str | None, Option(help="The draft to check; default: the decision's.")] = None,
    rule: Annotated[str | None, Option(help="The acceptance rule; default: that of the run's decision.")] = None,
    gamma: Annotated[int | None, Option(min=1, help="Drafted tokens per round; default: the gamma of the decision.")] = None,
    min_alpha: Annotated[
        list[str] | None,
        Option(metavar="[DOMAIN=]X", help="Smallest alpha that passes: 0.6, or code=0.6 (repeatable)."),
    ] = None,
    min_length: Annotated[
        list[str] | None,
        Option("--min-acceptance-length", metavar="[DOMAIN=]X", help="Least acceptance length: 1.8, or code=1.8."),
    ] = None,
    min_speedup: Annotated[
        list[str] | None, Option(metavar="[DOMAIN=]X", help="Least speedup of a domain: 1.2, or code=1.2.")
    ] = None,
    baseline: Annotated[
        str | None, Option(metavar="RUN[:DRAFT]", help="An older run to compare with: no domain may be worse.")
    ] = None,
    margin: Annotated[
        float,
        Option(min=0, max=1, help="By how much alpha (imported runs, heads, with --gamma: tokens per round) may be lower."),
    ] = 0.02,
    target_change: Annotated[
        bool,
        Option("--allow-target-change", help="Allow another target than the baseline's: fine-tuned or quantised."),
    ] = False,
    undecided: Annotated[Undecided, Option(help="Whether an undecided check passes (exit code 0) or fails (11).")] = "pass",
    output: CheckFormat = "terminal",
    out: OutFile = None,
) -> None:
    """A gate for CI: exit code 0 pass, 10 fail, 11 undecided (with --undecided fail), 12 not comparable.

    Without thresholds and without a baseline, the run's own decision is checked.
    """
    from alphaprof.commands.check import Minimums, checked, require_passed
    from alphaprof.config.load import known_rules

    named = known_rules([rule], "--rule")[0] if rule else None
    least: Minimums = {"alpha": min_alpha, "acceptance_length": min_length, "speedup": min_speedup}
    answer = checked(run, draft, named, gamma, least, baseline, margin, target_change)
    show(answer, output, out)
    if answer.outcome == "undecided" and undecided == "pass":
        print(f"warning: {one_line(answer.reason)}\n  it passes; --undecided fail makes it exit code 11", file=sys.stderr)
    require_passed(answer, undecided_fails=undecided == "fail")


def compare(
    first: RunOfDraft,
    second: Annotated[str, Argument(metavar="RUN[:DRAFT]", help="The other one.")],
    rules: Annotated[
        list[str] | None, Option(metavar="RULE", help="Compare under this rule, measured or not (repeatable).")
    ] = None,
    gamma: Annotated[int | None, Option(min=1, help="Compare tokens per round at this gamma only; default: all.")] = None,
    output: Format = "terminal",
    out: OutFile = None,
) -> None:
    """Compare two drafts on the same prompts: paired differences of acceptance and tokens per round.

    RUN:DRAFT and a run imported from an engine: what was predicted beside what was served, and whether they agree.
    """
    from alphaprof.commands.compare import compare as compare_sides
    from alphaprof.config.load import known_rules
    from alphaprof.log.run_draft import side_of

    show(compare_sides(side_of(first), side_of(second), known_rules(rules) if rules else None, gamma), output, out)


def trees(
    run: RunOfDraft,
    nodes: Annotated[
        list[int] | None,
        Option(min=0, max=512, help="Choose the best tree of this size (repeatable; 0: none). Default: 4, 8, 16, 32, 64."),
    ] = None,
    depth: Annotated[
        int | None, Option(min=1, max=64, help="Most levels of a chosen tree. Default: the run's largest gamma.")
    ] = None,
    files: Annotated[
        list[Path] | None,
        Option("--tree", metavar="FILE", readable=False, help="A tree of your own: JSON list of paths (repeatable)."),
    ] = None,
    top: Annotated[int, Option(min=0, max=1, help="The number of the draft's top token in these files.")] = 0,
    output: Format = "terminal",
    out: OutFile = None,
) -> None:
    """Predict tokens per round of static draft trees: the best of each size, and your own. There is no verdict."""
    from alphaprof.commands.trees import NODES, build_trees, read_trees
    from alphaprof.log.run_draft import side_of

    given = read_trees(files or [], top)
    show(build_trees(side_of(run), NODES if nodes is None else nodes, depth, given), output, out)


def predict(
    cost: Annotated[float | None, Option(help="A draft step, in plain decode steps of the target (c).")] = None,
    alpha: Annotated[float | None, Option(help="Share of positions where the draft's proposal is kept.")] = None,
    rate: Annotated[
        float | None, Option("--accepted-per-drafted", help="Instead of alpha: the acceptance rate an engine shows.")
    ] = None,
    length: Annotated[
        float | None, Option("--acceptance-length", help="Instead of alpha: tokens per round, as model cards give them.")
    ] = None,
    rates: Annotated[
        str | None, Option(help="Instead of alpha: shares of rounds that accepted at least 1, 2, ... drafts: 0.8,0.6,0.5.")
    ] = None,
    at_gamma: Annotated[int | None, Option(help="The gamma of that rate or length; default: --gamma.")] = None,
    gamma: Annotated[
        int | None, Option(help="Drafted tokens per round; default: 1 to 8, or as many as there are rates.")
    ] = None,
    verify: Annotated[float, Option(help="Verifying a round, in decode steps (v).")] = 1.0,
    verify_slope: Annotated[float, Option(help="Added to --verify for every drafted token.")] = 0.0,
    overhead: Annotated[float, Option(help="Everything else that a round costs, in decode steps.")] = 0.0,
    target_config: Annotated[
        Path | None, Option(readable=False, help="Instead of --cost: config.json of the target.")
    ] = None,
    draft_config: Annotated[
        Path | None, Option(readable=False, help="config.json of the draft: an EAGLE-3 head, or a model.")
    ] = None,
    accelerator: Annotated[str, Option(help="The device that costs are computed for (docs/costs.md).")] = "h200",
    engine: Annotated[str, Option(help="Whose overheads count: sglang-h200, or none.")] = "sglang-h200",
    tp: Annotated[int, Option(help="Devices in tensor parallelism.")] = 1,
    batch: Annotated[int, Option(help="Sequences decoded at a time.")] = 1,
    context: Annotated[int, Option(help="Tokens in the cache of each.")] = 1024,
    request_share: Annotated[
        float, Option(help="Share of a request's time without a draft that is not decoding: prefill, client.")
    ] = 0.0,
    burstiness: Annotated[
        float, Option(help="Lag-1 autocorrelation of acceptance; 0: independent from position to position.")
    ] = 0.0,
    output: Format = "terminal",
    out: OutFile = None,
) -> None:
    """Apply the formulas, without models: tokens per round, break-even and speedup from an acceptance and a cost."""
    from alphaprof.commands.predict import GAMMAS, ComputedCost, acceptance_of, build_prediction, computed_cost
    from alphaprof.errors import OptionInvalid
    from alphaprof.stats.formulas import RoundCost

    at_gamma = at_gamma or (gamma if rate is not None or length is not None else None)
    acceptance = acceptance_of(alpha, rate, length, rates, at_gamma)
    gammas = GAMMAS if gamma is None else (gamma,)
    if rates is not None and gamma is None:
        gammas = tuple(range(1, rates.count(",") + 2))
    if cost is not None and target_config is draft_config is None:
        costs: RoundCost | ComputedCost = RoundCost(cost, verify, verify_slope, overhead)
    elif cost is None and target_config is not None and draft_config is not None:
        from alphaprof.costs.cost_model import RooflineSetting

        setting = RooflineSetting(accelerator, tp, engine=engine)
        costs = computed_cost(target_config, draft_config, setting, batch, context, max(*gammas, 1))
    else:
        raise OptionInvalid(
            "a round's cost is either given or computed", "give --cost, or --target-config and --draft-config"
        )
    show(build_prediction(acceptance, burstiness, costs, gammas, request_share), output, out)


def schema(
    of: Annotated[
        str | None,
        Option(
            metavar="NAME", help="The JSON Schema of what a command writes with --format json: report, check, predict..."
        ),
    ] = None,
) -> None:
    """List the columns of the position log: name, type, unit and meaning. With --of: print the JSON Schema of an answer."""
    if of is not None:
        from alphaprof.render.json import json_schema

        print_text(json_schema(of), None)
        return
    from alphaprof.log.schema import HEAD_COLUMNS, LogRules

    beside = "of a draft head, beside these (depth 2; there is one for each depth, and each rule that draws drafts):"
    for heading, columns in (("", LogRules(("RULE",), ("RULE",), ("RULE",)).columns), (beside, HEAD_COLUMNS)):
        if heading:
            print(f"\n{heading}")
        for column in columns:
            unit = f" [{column.unit}]" if column.unit else ""
            print(f"{column.name:26} {column.type_name}{unit}\n    {column.doc}")


def rules() -> None:
    """List the acceptance rules: when is a drafted token d kept? p: target, q: draft, x0: the target's top token."""
    from alphaprof.rules import NOT_MODELLED, RULES, spelling

    for name, rule in RULES.items():
        text = " and ".join(rule.policies) + " text"
        print(f"{spelling(name):28} {'lossy' if rule.lossy else 'exact'}, on {text}\n    {rule.about}")
        if rule.used_by:
            print(f"    used by {rule.used_by}")
        for parameter in rule.parameters:
            more = "larger" if parameter.relaxes > 0 else "smaller"
            print(f"    {parameter.name}: {parameter.low:g} to {parameter.high:g}; {more} values accept more")
    print("\nnot modelled:")
    for name, about in NOT_MODELLED.items():
        print(f"{name:28} {about}")


def doctor(output: Format = "terminal", out: OutFile = None) -> None:
    """Show versions, devices and their speed, threads, room, and what is missing: text to paste into a bug report."""
    from alphaprof.commands.doctor.build import build_doctor

    show(build_doctor(), output, out)
