"""The commands beside a run: speculative decoding itself, the formulas, what alphaprof declares, and `runs`. Heavy imports
stay inside them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option, Typer

from alphaprof.cli.common import (
    Format,
    OutFiles,
    ProfileChanges,
    ProfileFile,
    Undecided,
    command,
    how,
    output,
    print_text,
    run_directory,
    show,
)
from alphaprof.cli.measuring import loaded_profile, working

group = Typer()


@command(
    group,
    "alphaprof validate my.yaml --documents 8 --gamma 3",
    "alphaprof validate my.yaml --documents 16 --rule additive:0.1",
    "alphaprof validate my.yaml --engine vllm --gamma 3 --concurrency 4",
)
def validate(
    profile_file: ProfileFile,
    documents: Annotated[int, Option(min=1, help="Documents per source (per domain if a column names it).")] = 4,
    gamma: Annotated[
        list[int] | None,
        Option(
            metavar="N",
            min=1,
            max=64,
            help="Drafted tokens per round (repeatable); default: 1, 2, 3, 5 if in the profile.",
        ),
    ] = None,
    rule: Annotated[
        list[str] | None, Option(help="Decode by this rule too, exact or lossy: additive:0.1 (repeatable).")
    ] = None,
    engine: Annotated[
        Literal["transformers", "vllm"], Option(help="Decode with transformers here, or with the profile's vLLM.")
    ] = "transformers",
    concurrency: Annotated[int, Option(min=1, help="Sequences that vLLM decodes at once.")] = 1,
    repeats: Annotated[int, how(min=1, help="Decode each text this many times, with and without each draft.")] = 3,
    tolerance: Annotated[float, Option(min=0, help="Largest tolerated median error of predicted speedups.")] = 0.10,
    undecided: Undecided = "pass",
    out: Annotated[Path | None, output(readable=False, help="Keep the prediction's run in this new directory.")] = None,
    overrides: ProfileChanges = None,
    form: Format = None,
) -> None:
    """Compare predicted speedups with measured ones: decode a few documents speculatively, here or in your vLLM.

    To compare the acceptance of a running server with a run, use diagnose.

    Exit code 0: within the tolerance, or too noisy to tell; 13: outside; 11: too noisy, with --undecided fail.
    """
    from alphaprof.config.load import known_rules
    from alphaprof.profiling.checks import check_early

    rules = known_rules(rule or [], "--rule")
    options = loaded_profile(profile_file, overrides, documents)
    check_early(options, out)
    with run_directory(out) as folder, working(None) as progress:
        from alphaprof.commands.validate.engine import validate_by
        from alphaprof.commands.validate.validation import build_validation, require_within

        run, measured = validate_by(engine, options, folder, gamma, repeats, progress, rules, concurrency)
        answer = build_validation(run, measured, tolerance, out is not None, concurrency)
    show(answer, form)
    require_within(answer, undecided_fails=undecided == "fail")


@command(
    group,
    "alphaprof predict --alpha 0.75 --cost 0.04",
    "alphaprof predict --alpha 0.51 --coverage 0.7 --cost 0",
    "alphaprof predict --accepted-per-drafted 0.6 --at-gamma 3 --cost 0.04",
    "alphaprof predict --rates 0.8,0.6,0.5 --cost 0.04",
)
def predict(
    cost: Annotated[float | None, Option(help="Cost of a draft step, in decode steps of the target (c).")] = None,
    alpha: Annotated[float | None, Option(help="Share of positions with a proposal at which it is kept.")] = None,
    coverage: Annotated[float, Option(help="Beside --alpha: share of positions with a proposal (prompt lookup).")] = 1.0,
    rate: Annotated[
        float | None, Option("--accepted-per-drafted", help="Instead of alpha: the acceptance rate an engine reports.")
    ] = None,
    length: Annotated[
        float | None, Option("--acceptance-length", help="Instead of alpha: tokens per round, as model cards state it.")
    ] = None,
    rates: Annotated[
        str | None, Option(help="Instead of alpha: shares of rounds that accepted at least 1, 2, ... drafts: 0.8,0.6,0.5.")
    ] = None,
    at_gamma: Annotated[int | None, Option(help="Gamma of the given rate or length; default: --gamma.")] = None,
    gamma: Annotated[
        int | None,
        Option(metavar="N", help="Drafted tokens per round; default: 1 to 8, or up to that of a given rate or length."),
    ] = None,
    verify: Annotated[float, how(help="Verification of a round, in decode steps (v).")] = 1.0,
    overhead: Annotated[float, how(help="All other costs of a round, in decode steps.")] = 0.0,
    path_overhead: Annotated[
        float, how(help="What plain decoding slows down by on the path that the draft needs (0.1: 10%).")
    ] = 0.0,
    target_config: Annotated[
        Path | None, Option(readable=False, help="Instead of --cost: config.json of the target.")
    ] = None,
    draft_config: Annotated[
        Path | None, Option(readable=False, help="config.json of the draft: an EAGLE-3 head, or a model.")
    ] = None,
    accelerator: Annotated[str, how(help="The device to compute costs for (docs/costs.md).")] = "h200",
    preset: Annotated[
        str, how(help="Engine whose overheads to add: sglang-h200, vllm-0.11, none, or a JSON file.")
    ] = "sglang-h200",
    tp: Annotated[int, how(help="Tensor-parallel devices.")] = 1,
    weight_bytes: Annotated[float | None, how(help="Bytes per weight if quantized: 1 for fp8.")] = None,
    batch: Annotated[int, how(help="Sequences decoded at once.")] = 1,
    context: Annotated[int, how(help="Cached tokens per sequence.")] = 1024,
    output_tokens: Annotated[int, how(help="Tokens of an output, for the speedup of throughput.")] = 256,
    form: Format = None,
    out: OutFiles = None,
) -> None:
    """Compute tokens per round, break-even and speedup from an acceptance and a cost, without models."""
    from alphaprof.commands.predict import acceptance_of
    from alphaprof.commands.predict import predict as predicted
    from alphaprof.stats.formulas import RoundCost

    acceptance = acceptance_of(alpha, rate, length, rates, at_gamma or gamma)
    given = RoundCost(cost, verify, overhead, path_overhead) if cost is not None else None
    hardware = {"accelerator": accelerator, "tp": tp, "preset": preset, "weight_bytes": weight_bytes}
    configs, place = (target_config, draft_config), (batch, context, output_tokens)
    show(predicted(acceptance, gamma, given, configs, hardware, place, coverage, path_overhead), form, out)


@command(group, "alphaprof schema", "alphaprof schema report")
def schema(
    answer: Annotated[
        str | None,
        Argument(metavar="[ANSWER]", help="report, check, compare, validate, diagnose, predict or rates: its JSON Schema."),
    ] = None,
) -> None:
    """List the columns of the position log: name, type, unit and meaning. Or print the JSON Schema of an answer."""
    from alphaprof.commands.schema import schema_text

    print_text(schema_text(answer), None)


@command(group, "alphaprof rules")
def rules() -> None:
    """List the acceptance rules: when is a drafted token d kept? p: target, q: draft, x0: the target's top token."""
    from alphaprof.commands.rules import rules_text

    print_text(rules_text(), None)


@command(group, "alphaprof doctor")
def doctor(form: Format = None, out: OutFiles = None) -> None:
    """Show versions, devices, and what is missing and how to install it, to paste into a bug report."""
    from alphaprof.commands.doctor import build_doctor

    show(build_doctor(), form, out)
