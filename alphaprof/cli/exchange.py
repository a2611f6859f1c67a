"""The commands that hand a run's acceptance to other tools, and take theirs. Heavy imports stay inside them."""

from __future__ import annotations

import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Option, Typer

from alphaprof.cli.common import (
    DecisiveRule,
    OutFile,
    QuestionChanges,
    RunOfDraft,
    command,
    how,
    interruptible,
    one_line,
    output,
    print_text,
    served,
    texts,
)
from alphaprof.commands.export.formats import ABOUT, TEXTS

group = Typer()
ExportFormat = StrEnum("ExportFormat", list(ABOUT))  # type: ignore[misc]


@command(
    group,
    "alphaprof export runs/my:small --to vllm-config",
    "alphaprof export runs/my:small --to rates --domain code",
    "alphaprof export runs/my --to texts --out data",
)
def export(
    run: RunOfDraft,
    to: Annotated[
        ExportFormat, Option(metavar="FORMAT", help="; ".join(f"{name}: {about}" for name, about in ABOUT.items()) + ".")
    ],
    rule: DecisiveRule = None,
    gamma: Annotated[
        int | None,
        Option(metavar="N", min=1, help="Drafted tokens per round; default: the decision's, or the best; rates: all."),
    ] = None,
    domain: Annotated[
        str | None, Option(metavar="NAME", help="One domain; default: the whole traffic, by the decision's weights.")
    ] = None,
    engine_version: Annotated[
        str | None, Option(metavar="X", help="Version of the engine, e.g. 0.32; default: the newest that was read.")
    ] = None,
    overrides: QuestionChanges = None,
    out: OutFile = None,
) -> None:
    """Export start options for engines, rates for simulators, or texts for training heads. Assumptions go to stderr."""
    from alphaprof.commands.export.export import export as exported

    artefact = exported(run, to.value, rule, gamma, domain, engine_version, overrides or (), out)
    print_text(artefact.text, None if to.value == TEXTS else out)
    for kind, lines in (("note", artefact.notes), ("warning", artefact.warnings)):
        for line in lines:
            print(f"{kind}: {one_line(line)}", file=sys.stderr)


NO_RULE = "strict (temperature 0), or one_hot, lossless or block with --temperature"


@command(
    group,
    "alphaprof import requests.jsonl --rule strict --out runs/served",
    "alphaprof import answers.jsonl --out runs/lookup",
    name="import",
)
def import_files(
    files: Annotated[
        list[str],
        Argument(metavar="FILE", help="JSON lines: answers of vLLM or SGLang with their counts, or prompts and answers."),
    ],
    out: Annotated[Path, output(readable=False, help="New directory for the run.")],
    form: Annotated[
        Literal["vllm", "sglang", "texts"] | None, Option("--format", help="What the files are; default: recognized.")
    ] = None,
    rule: Annotated[
        Literal["strict", "one_hot", "lossless", "block"] | None,
        served(help=f"Acceptance rule of the engine: {NO_RULE}. Not for texts."),
    ] = None,
    temperature: Annotated[
        float | None, served(metavar="X", min=0, help="Temperature of the requests; required unless the rule is strict.")
    ] = None,
    top_k: Annotated[int, served(metavar="N", min=0, help="top_k of the requests; 0: all tokens.")] = 0,
    top_p: Annotated[float, served(metavar="X", min=0, max=1, help="top_p of the requests; 1: all tokens.")] = 1.0,
    drafting: Annotated[
        Literal["chain", "tree", "adaptive"] | None,
        served(
            help="What a round of SGLang drafted: a chain (--speculative-eagle-topk 1), a tree (topk above 1, or NGRAM), or "
            "adaptive steps (--speculative-adaptive). Of the last two, only tokens per round are known."
        ),
    ] = None,
    gamma: Annotated[
        list[int] | None,
        served(
            metavar="N",
            min=1,
            max=64,
            help="Drafted tokens per round; default: what a chain's counts say; of texts: 1 to 8 (repeatable).",
        ),
    ] = None,
    draft: Annotated[str | None, Option(help="Name of the draft in reports; default: engine.")] = None,
    target: Annotated[
        str | None,
        Option(help="Name of the target; default: the model of the answers. Of texts, a folder tells its shape."),
    ] = None,
    domain: Annotated[
        list[str] | None, Option(help="The domain of all files, or one per file, in order (repeatable).")
    ] = None,
    domain_key: Annotated[str | None, Option(help="The field that holds the domain: domain, or metadata.domain.")] = None,
    cluster_key: Annotated[str | None, Option(help="The field that groups dependent requests: conversation_id.")] = None,
    overrides: Annotated[
        list[str] | None,
        Option("--set", metavar="KEY=VALUE", help="decision.min_speedup=1.2, or costs.source=table (repeatable)."),
    ] = None,
    leave_out: Annotated[
        bool, how("--leave-out", help="Leave out and count requests whose metrics do not determine their rounds.")
    ] = False,
    min_ngram: Annotated[list[int] | None, texts(min=1, max=64, help="Shortest n-gram; default: 1, 2, 3, 5.")] = None,
    max_ngram: Annotated[list[int] | None, texts(min=1, max=64, help="Longest n-gram; default: 3, 5.")] = None,
    match: Annotated[
        Literal["rightmost", "leftmost"] | None,
        texts(help="rightmost, filled up to γ (default): vLLM's V2 runner; leftmost: V1 and CPU, transformers."),
    ] = None,
    pool: Annotated[bool, texts("--pool", help="Also look in earlier answers, in the order of the log.")] = False,
    earlier: Annotated[list[Path] | None, texts(readable=False, help="Requests that fill the pool first.")] = None,
    tokenizer: Annotated[Path | None, texts(readable=False, help="tokenizer.json, for lines without ids.")] = None,
) -> None:
    """Make a run of what an engine logged: requests with their counts, or prompts and answers, for prompt lookup drafts.

    The run is for report, check, compare and diagnose; it needs no model. Of a server's counters, use diagnose.
    """
    from alphaprof.commands.importing.lines import kind_of
    from alphaprof.commands.importing.run import ImportRequest, import_requests, remarks_on, require_known, sampling_of
    from alphaprof.commands.importing.texts import import_texts
    from alphaprof.render.format import many

    about = {"--rule": rule, "--drafting": drafting, "--draft": draft, "--leave-out": leave_out}
    lookup: dict[str, object] = {"--min-ngram": min_ngram, "--max-ngram": max_ngram, "--match": match}
    lookup |= {"--pool": pool, "--earlier": earlier, "--tokenizer": tokenizer}
    kind = form or kind_of(files, any(lookup.values()) or (False if any(about.values()) else None))
    require_known(kind, about, lookup, gamma)
    rule = rule or ("one_hot" if temperature else "strict")
    asked = ImportRequest(
        engine=kind,
        files=[Path(file) for file in files],
        rule=rule,
        sampling=sampling_of(rule, temperature, top_k, top_p),
        gamma=gamma[0] if gamma else None,
        draft=draft or "engine",
        target=target,
        domains=domain or (),
        domain_key=domain_key,
        cluster_key=cluster_key,
        leave_out=leave_out,
        overrides=overrides or (),
        drafting=drafting or "chain",
    )
    ngrams = min_ngram or (1, 2, 3, 5), max_ngram or (3, 5)
    searched: dict[str, Any] = {"ngrams": ngrams, "gammas": gamma or range(1, 9), "rightmost": match != "leftmost"}
    searched |= {"pool": pool, "earlier": earlier or (), "tokenizer": tokenizer}
    with interruptible(None):
        run = import_texts(asked, out, **searched) if kind == "texts" else import_requests(asked, out)
    for remark in remarks_on(run.manifest):
        print(one_line(remark), file=sys.stderr)
    counts = f"{many(run.manifest.documents, 'request')}, {many(run.manifest.positions, 'token')}"
    print(f"{out}: {counts}, gamma {', '.join(map(str, run.gammas))}. Next: alphaprof report {shlex.quote(str(out))}")
