"""A run from the metrics that an engine logged for each request: drafts that are served and cannot be loaded here."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from alphaprof.commands.importing.lines import LeftOut, Line, json_lines
from alphaprof.commands.importing.sglang import answers_of, sglang_request
from alphaprof.commands.importing.tables import ONE_BY_ONE, documents_table, notes, served_draft, served_model, totals_table
from alphaprof.commands.importing.vllm import EngineRequest, request_of
from alphaprof.config.load import apply_override, validate
from alphaprof.config.options import named_model
from alphaprof.errors import VALUE, ColumnMissing, DataEmpty, OptionInvalid, ProfileInvalid, RunExists, cut, shown
from alphaprof.log.files import DRAFT_NAME
from alphaprof.log.joining import joined
from alphaprof.log.manifest import CHAIN, PROMPTS_KNOWN_BY, Drafting, Imported, Manifest, Shard
from alphaprof.log.place import place_of
from alphaprof.log.store import Run, remove_unnamed
from alphaprof.version import __version__

MOST_DOMAINS = 200  # more are no domains
ORIGIN = "import"  # in messages about options


@dataclass(frozen=True)
class Engine:
    """An engine whose lines are read: the answers in a line (which may be a list: `lists`), and the request of an answer, by
    the gamma that was asked for and what rounds drafted.
    """

    name: str
    answers: Callable[[Line], Sequence[Line]]
    request: Callable[[Line, int | None, Drafting], EngineRequest]
    lists: bool


VLLM = Engine("vLLM", lambda line: (line,), lambda answer, gamma, _: request_of(answer, gamma), lists=False)
SGLANG = Engine("SGLang", answers_of, sglang_request, lists=True)


@dataclass(frozen=True)
class ImportRequest:
    """What `alphaprof import` is asked for. `sampling` None: greedily; `gamma` None: what the metrics say; `target` None:
    the model of the responses; `domains`: one name for all files, or one for each; `domain_key`, `cluster_key`: fields of
    the lines; `drafting`: see `log.manifest.Imported`; `verification`: token or block.
    """

    engine: Engine
    files: Sequence[Path]
    rule: str
    sampling: dict[str, float] | None
    gamma: int | None
    draft: str
    target: str | None
    domains: Sequence[str]
    domain_key: str | None
    cluster_key: str | None
    leave_out: bool
    overrides: Sequence[str]
    drafting: Drafting = CHAIN
    verification: str = ONE_BY_ONE


@dataclass
class Read:
    """What was read: requests in order, how many were left out by reason, and the hint of each reason's first request."""

    requests: list[EngineRequest] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    advice: dict[str, str] = field(default_factory=dict)
    seen: dict[str, Line] = field(default_factory=dict)
    digest: Any = field(default_factory=hashlib.sha256)  # of all lines


def import_requests(asked: ImportRequest, out: Path) -> Run:
    """Write the run of all requests of some files into a new directory.

    Raises `DataUnreadable` and `ColumnMissing` with file and line, `DataEmpty`, `OptionInvalid` and `ProfileInvalid` for
    what is asked, `RunExists` and `DiskFull`.
    """
    _require_names(asked)
    place, read = place_of(out), Read()
    config = vars(asked) | {"engine": asked.engine.name, "files": [str(path) for path in asked.files]}
    with joined(place, config, hint="choose another --out"):
        for source, path in enumerate(asked.files):
            _read_file(read, source, path, asked)
        if not read.requests:
            reasons = "; ".join(f"{reason} ({count})" for reason, count in read.left_out.items()) or "no line at all"
            (most,) = read.left_out.most_common(1) or [("", 0)]
            hint = read.advice.get(most[0], f"see docs/import.md for how to get metrics out of {asked.engine.name}")
            raise DataEmpty(f"no request to import: {reasons}", hint)
        manifest, imported = _manifest(asked, read)
        run = Run(place, manifest)
        with run.beginning():
            run.write_totals([totals_table(read.requests, imported)], (0, 0), asked.draft)
            run.write_documents(documents_table(read.requests, imported, read.digest.hexdigest()), (0, 0))
            if not run.begin():
                raise RunExists(f"{out} holds a run already", "choose another --out")
        remove_unnamed(place, run.manifest.files)  # what killed imports left, of files as they were then
        return run


def _require_names(asked: ImportRequest) -> None:
    """Raise `OptionInvalid` for names and files that contradict each other."""
    if asked.domains and asked.domain_key:
        raise OptionInvalid("--domain names the domain, and --domain-key the field that holds it", "use one of them")
    if not DRAFT_NAME.fullmatch(asked.draft) or asked.draft in ("auto", "target"):
        problem = f"--draft {shown(asked.draft)} is not a valid name"
        raise OptionInvalid(problem, "use lower case, at most 200 characters, and neither auto nor target")
    if len(asked.domains) > 1 and len(asked.domains) != len(asked.files):
        problem = f"{len(asked.domains)} domains for {len(asked.files)} files"
        raise OptionInvalid(problem, "name one --domain, or one for each file in their order")
    if twice := [str(path) for path in asked.files if asked.files.count(path) > 1]:
        raise OptionInvalid(f"{twice[0]} is named twice", "name every file once")


def _read_file(read: Read, source: int, path: Path, asked: ImportRequest) -> None:
    for line in json_lines(path, read.digest.update, asked.engine.lists):
        for answer in asked.engine.answers(line):
            try:
                request = asked.engine.request(answer, asked.gamma, asked.drafting)
            except LeftOut as omitted:
                if not omitted.settled and not asked.leave_out:
                    hint = f"{omitted.hint}; --leave-out imports the other requests and counts these"
                    raise line.refuse(omitted.reason, hint) from None
                read.left_out[omitted.kind] += 1
                read.advice.setdefault(omitted.kind, omitted.hint)
                continue
            _require_fitting(read, request)
            domain = _domain(line, source, asked)
            cluster = _named(line, asked.cluster_key, "--cluster-key") if asked.cluster_key else None
            read.requests.append(dataclasses.replace(request, source=source, domain=domain, cluster=cluster))


def _require_fitting(read: Read, request: EngineRequest) -> None:
    """Raise `DataUnreadable` for a request that was read before, or was served with another gamma than the first."""
    if request.request_id is not None:
        before = read.seen.setdefault(request.request_id, request.line)
        if before is not request.line:
            raise request.line.refuse(
                f"the request {shown(request.request_id)} is in {before.where} as well", "keep each request once"
            )
    if read.requests and (first := read.requests[0]).rounds.gamma != request.rounds.gamma:
        problem = f"served with {request.rounds.gamma} speculative tokens, and {first.line.where} with {first.rounds.gamma}"
        raise request.line.refuse(problem, "import requests of one number of speculative tokens at a time")


def _domain(line: Line, source: int, asked: ImportRequest) -> str:
    if not asked.domain_key:
        names = asked.domains or ("traffic",)
        return line.writable("--domain", names[source if len(names) > 1 else 0])
    name = _named(line, asked.domain_key, "--domain-key")
    if name is None:
        raise line.refuse(f"{cut(asked.domain_key, VALUE)} is null, no domain", "name every request's domain")
    return name


def _named(line: Line, key: str, option: str) -> str | None:
    """The text under a dotted key of a line, or of the response in it; None where it is null."""
    for path in (key, f"response.{key}", f"response.body.{key}"):
        present, value = line.at(path)
        if present:
            return line.inside({key: value}).text(key)
    raise ColumnMissing(f"{line.where}: there is no {shown(key)}", f"{option} names a field; the line has {line.known()}")


def _target(requests: Sequence[EngineRequest]) -> str:
    """The model that every request names. Raises `ColumnMissing` and `DataUnreadable`."""
    first = requests[0]
    for request in requests:
        if request.model is None:
            raise ColumnMissing(f"{request.line.where}: there is no model", "name the served model: --target NAME")
        if request.model != first.model:
            problem = f"model {shown(request.model)}, and {first.line.where} has {shown(first.model)}"
            raise request.line.refuse(problem, "import requests of one target at a time; or name it: --target NAME")
    return str(first.model)


def _config(asked: ImportRequest, gamma: int, domains: Sequence[str]) -> dict[str, Any]:
    """The profile that such a run answers to: decision and costs are what reports read of it. Models are in the manifest."""
    if len(domains) > MOST_DOMAINS:
        problem = f"{cut(str(asked.domain_key), VALUE)} names {len(domains)} domains, more than {MOST_DOMAINS}"
        raise OptionInvalid(problem, "name a field with one value for each kind of traffic")
    tree: dict[str, Any] = {
        "target": {"model": "served"},
        "drafts": {asked.draft: named_model(asked.draft)},
        "data": [{"domain": domain, "path": str(asked.files[0]), "prompt": "{prompt}"} for domain in domains],
        "continuation": {"kind": "given", "column": "response", "on_policy": True} | (asked.sampling or {}),
        "rules": [asked.rule],
        "gammas": [gamma],
        "decision": {"rule": asked.rule, "draft": asked.draft, "gamma": gamma},
    }
    # The source of step times goes before its options.
    for override in sorted(asked.overrides, key=lambda text: not text.startswith("costs.source=")):
        if not override.startswith(("decision.", "costs.")):
            problem = f"--set {cut(override, VALUE)}: an import can set decision.* and costs.* only"
            raise ProfileInvalid(problem, "everything else was decided by the engine")
        apply_override(tree, override)
    return _answerable(tree, asked)


def _answerable(tree: dict[str, Any], asked: ImportRequest) -> dict[str, Any]:
    """The profile as a manifest holds it. Raises `ProfileInvalid`, also for questions that such a run can never answer."""
    source = tree.get("costs", {}).get("source")
    if asked.drafting != CHAIN and source is not None:
        raise ProfileInvalid(
            f"--set costs.source={source}: with drafting {asked.drafting} it is not known what rounds drafted, so step "
            "times cannot be used",
            "leave it out: tokens per round need no step times",
        )
    if source == "roofline":
        raise ProfileInvalid(
            "--set costs.source=roofline: it needs the shapes of target and draft, and those of served models are not known",
            "give step times of your engine: --set costs.source=table --set costs.path=FILE",
        )
    try:
        options = validate(tree, ORIGIN)
    except ProfileInvalid as error:
        raise ProfileInvalid(error.message, _hint(error)) from None
    if options.decision.rule != asked.rule:
        raise ProfileInvalid(
            f"--set decision.rule={options.decision.rule}: the engine kept drafts by {asked.rule}, and counted its rounds",
            "leave it out: the decision is about the rule that --rule names",
        )
    return options.resolved(Path()).model_dump(mode="json")


def _hint(error: ProfileInvalid) -> str:
    """What to do about a problem of the profile that an import makes, in the options that it has."""
    place, _, problem = error.message.removeprefix(f"{ORIGIN}: ").partition(":")
    if place.startswith("unknown key "):
        return error.hint
    if place.startswith("continuation."):
        return f"name another --{place.removeprefix('continuation.').replace('_', '-')}"
    if problem.strip() == "Field required":
        return f"name it as well: --set {place}=VALUE"
    return f"write another value: --set {place if problem else 'KEY'}=VALUE"


def _manifest(asked: ImportRequest, read: Read) -> tuple[Manifest, Imported]:
    requests, gamma = read.requests, read.requests[0].rounds.gamma
    imported = Imported(
        engine=asked.engine.name,
        files=tuple(str(path) for path in asked.files),
        rule=asked.rule,
        gamma=gamma,
        sampling=asked.sampling,
        # The best kind that every request has.
        prompts_known_by=next((kind for kind in PROMPTS_KNOWN_BY if all(kind in each.names for each in requests)), None),
        without_steps=sum(request.rounds.steps == 0 for request in requests),
        plain_steps=sum(request.rounds.plain for request in requests),
        beyond_the_end=sum(request.rounds.beyond for request in requests),
        drafting=asked.drafting,
    )
    target = served_model(asked.target or _target(requests))
    manifest = Manifest(
        status="complete",
        alphaprof=__version__,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        config=_config(asked, gamma, list(dict.fromkeys(request.domain for request in requests))),
        target=target,
        drafts={asked.draft: served_draft(asked.draft, asked.verification)},
        tokenizer="unknown",
        environment={},
        shards=(Shard(0, len(requests), sum(each.completion_tokens for each in requests), read.digest.hexdigest()),),
        skipped=dict(read.left_out),
        warnings=tuple(notes(requests, imported)),
        imported=imported,
    )
    return manifest, imported
