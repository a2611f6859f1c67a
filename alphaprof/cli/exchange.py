"""The commands that hand a run's acceptance to other tools, and take theirs. Heavy imports stay inside them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Option, Typer

from alphaprof.cli.common import (
    DecisiveRule,
    Format,
    OutFile,
    OutFiles,
    QuestionChanges,
    RunOfDraft,
    command,
    how,
    interruptible,
    one_line,
    output,
    print_text,
    served,
    show,
)
from alphaprof.commands.export.formats import ABOUT, TEXTS

if TYPE_CHECKING:
    from alphaprof.run.reader import Run

group = Typer()
import_group = Typer(
    help="Read what an engine logged: requests as a run, texts as a run of prompt lookup, counters for a first look. "
    "If a run predicts your server, use diagnose; to test predicted speedups before you serve, validate.",
    no_args_is_help=True,
)
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


NewRun = Annotated[Path, output(readable=False, help="New directory for the run.")]
Rule = Annotated[
    Literal["strict", "one_hot", "lossless", "block"],
    served(help="Acceptance rule of the engine: strict (temperature 0), one_hot, lossless, block."),
]
Temperature = Annotated[
    float | None, served(metavar="X", min=0, help="Temperature of the requests; required unless the rule is strict.")
]
TopK = Annotated[int, served(metavar="N", min=0, help="top_k of the requests; 0: all tokens.")]
TopP = Annotated[float, served(metavar="X", min=0, max=1, help="top_p of the requests; 1: all tokens.")]
DraftName = Annotated[str, Option(help="Name of the draft in reports.")]
TargetName = Annotated[str | None, Option(help="Name of the target in reports; default: the model of the responses.")]
Domains = Annotated[list[str] | None, Option(help="The domain of all files, or one per file, in order (repeatable).")]
DomainKey = Annotated[str | None, Option(help="The field that holds the domain: domain, or metadata.domain.")]
ClusterKey = Annotated[str | None, Option(help="The field that groups dependent requests: conversation_id.")]
LeaveOut = Annotated[
    bool, how("--leave-out", help="Leave out and count requests whose metrics do not determine their rounds.")
]
Overrides = Annotated[
    list[str] | None,
    Option("--set", metavar="KEY=VALUE", help="decision.min_speedup=1.2, or costs.source=table (repeatable)."),
]


@command(import_group, "alphaprof import vllm requests.jsonl --rule strict --out runs/served", name="vllm")
def import_vllm(
    requests: Annotated[
        list[Path], Argument(metavar="REQUESTS.jsonl", readable=False, help="Responses of vLLM, one per line.")
    ],
    out: NewRun,
    rule: Rule,
    temperature: Temperature = None,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    draft: DraftName = "engine",
    target: TargetName = None,
    gamma: Annotated[
        int | None, served(metavar="N", min=1, help="Speculative tokens per round as served; default: from the metrics.")
    ] = None,
    domain: Domains = None,
    domain_key: DomainKey = None,
    cluster_key: ClusterKey = None,
    leave_out: LeaveOut = False,
    overrides: Overrides = None,
) -> None:
    """Import vLLM's per-request speculative decoding metrics as a run, for report, check, compare and diagnose."""
    from alphaprof.commands.importing.run import ImportRequest, import_requests, sampling_of

    sampling, named = sampling_of(rule, temperature, top_k, top_p), (draft, target, domain or (), domain_key, cluster_key)
    asked = ImportRequest("vLLM", requests, rule, sampling, gamma, *named, leave_out, overrides or ())
    _import(lambda: import_requests(asked, out), out)


@command(import_group, "alphaprof import sglang log.jsonl --rule strict --drafting chain --out runs/sg", name="sglang")
def import_sglang(
    requests: Annotated[
        list[Path],
        Argument(metavar="REQUESTS.jsonl", readable=False, help="SGLang's responses: one or a list per line."),
    ],
    out: NewRun,
    rule: Rule,
    drafting: Annotated[
        Literal["chain", "tree", "adaptive"],
        served(
            help="What a round drafted: a chain (--speculative-eagle-topk 1), a tree (topk above 1, or NGRAM), or adaptive "
            "steps (--speculative-adaptive). For the last two, only tokens per round are known."
        ),
    ],
    temperature: Temperature = None,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    draft: DraftName = "engine",
    target: TargetName = None,
    gamma: Annotated[
        int | None,
        served(
            metavar="N",
            min=1,
            max=64,
            help="--speculative-num-steps (adaptive: the largest); default: from a chain's counts.",
        ),
    ] = None,
    domain: Domains = None,
    domain_key: DomainKey = None,
    cluster_key: ClusterKey = None,
    leave_out: LeaveOut = False,
    overrides: Overrides = None,
) -> None:
    """Import SGLang's per-request speculative decoding counts as a run, for report, check, compare and diagnose."""
    from alphaprof.commands.importing.run import ImportRequest, import_requests, sampling_of

    sampling, named = sampling_of(rule, temperature, top_k, top_p), (draft, target, domain or (), domain_key, cluster_key)
    asked = ImportRequest("SGLang", requests, rule, sampling, gamma, *named, leave_out, overrides or (), drafting)
    _import(lambda: import_requests(asked, out), out)


@command(import_group, "alphaprof import texts answers.jsonl --out runs/lookup", name="texts")
def import_logged_texts(
    requests: Annotated[
        list[Path],
        Argument(metavar="REQUESTS.jsonl", readable=False, help="Prompts and answers: token ids, or text with --tokenizer."),
    ],
    out: NewRun,
    min_ngram: Annotated[list[int] | None, Option(min=1, max=64, help="Shortest n-gram; default: 1, 2, 3, 5.")] = None,
    max_ngram: Annotated[list[int] | None, Option(min=1, max=64, help="Longest n-gram; default: 3, 5.")] = None,
    match: Annotated[
        Literal["rightmost", "leftmost"],
        Option(help="rightmost, filled up to γ: vLLM's V2 runner; leftmost: V1 and CPU, transformers."),
    ] = "rightmost",
    gamma: Annotated[list[int] | None, Option(min=1, max=64, help="Drafted tokens a round; default: 1 to 8.")] = None,
    pool: Annotated[bool, how("--pool", help="Also look in earlier answers, in the order of the log.")] = False,
    earlier: Annotated[list[Path] | None, Option(readable=False, help="Requests that fill the pool first.")] = None,
    temperature: Annotated[float | None, served(min=0, help="Temperature of the requests; default: 0.")] = None,
    tokenizer: Annotated[Path | None, Option(readable=False, help="tokenizer.json, for lines without ids.")] = None,
    target: Annotated[str | None, Option(help="The target's name, or folder: a roofline reads its shape.")] = None,
    domain: Domains = None,
    domain_key: DomainKey = None,
    cluster_key: ClusterKey = None,
    overrides: Overrides = None,
) -> None:
    """Import prompts and answers as a run of prompt lookup drafts: does n-gram speculation pay? No model, no GPU."""
    from alphaprof.commands.importing.run import ImportRequest, sampling_of
    from alphaprof.commands.importing.texts import import_texts

    rule = "one_hot" if temperature else "strict"
    sampling, named = sampling_of(rule, temperature, 0, 1.0), ("lookup", target, domain or (), domain_key, cluster_key)
    asked = ImportRequest("texts", requests, rule, sampling, None, *named, False, overrides or ())
    how_read: dict[str, Any] = {"pool": pool, "earlier": earlier or (), "tokenizer": tokenizer}
    how_read |= {"ngrams": (min_ngram or (1, 2, 3, 5), max_ngram or (3, 5)), "gammas": gamma or range(1, 9)}
    _import(lambda: import_texts(asked, out, rightmost=match == "rightmost", **how_read), out)


@command(import_group, "alphaprof import prometheus before.txt after.txt", name="prometheus")
def import_prometheus(
    pages: Annotated[
        list[str],
        Argument(
            metavar="PAGES",
            help="A server's address; its /metrics page, saved once or before and after the traffic; or one file of counts: "
            "a server's log, a benchmark's result, llama.cpp's answers.",
        ),
    ],
    label: Annotated[
        list[str] | None,
        Option(metavar="NAME=VALUE", help="Read one of several servers or models: model_name=NAME, instance (repeatable)."),
    ] = None,
    seconds: Annotated[float, Option(min=1, help="Seconds to poll an address.")] = 60,
    form: Format = None,
    out: OutFiles = None,
) -> None:
    """Take a first look at a server of vLLM, SGLang or llama.cpp: its acceptance, its load and its step times.

    To compare that acceptance with a run, use diagnose.
    """
    from alphaprof.cli.progress import ConsoleProgress
    from alphaprof.commands.importing.counters import counters

    with ConsoleProgress() as progress, interruptible(None):
        answer = counters(pages, seconds, label or (), progress)
    show(answer, form, out)


def _import(written: Callable[[], Run], out: Path) -> None:
    """Write the run. Print what was imported on stdout, and what to know about it on stderr."""
    from alphaprof.commands.importing.run import remarks_on
    from alphaprof.render.format import many

    with interruptible(None):
        run = written()
    for remark in remarks_on(run.manifest):
        print(one_line(remark), file=sys.stderr)
    counts = f"{many(run.manifest.documents, 'request')}, {many(run.manifest.positions, 'token')}"
    print(f"{out}: {counts}, gamma {', '.join(map(str, run.gammas))}. Next: alphaprof report {shlex.quote(str(out))}")
