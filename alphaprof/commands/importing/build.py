"""A run from the metrics that an engine logged for each request: drafts that are served and cannot be loaded here."""

from __future__ import annotations

import datetime
import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from alphaprof.commands.importing.lines import LeftOut, Line, json_lines
from alphaprof.commands.importing.sglang import answers_of, sglang_request
from alphaprof.commands.importing.tables import (
    Labelled,
    Served,
    documents_table,
    identity,
    notes,
    served_draft,
    served_model,
    totals_table,
)
from alphaprof.commands.importing.vllm import EngineRequest, request_of
from alphaprof.config.load import apply_override, validate
from alphaprof.config.options import named_model
from alphaprof.errors import VALUE, ColumnMissing, DataEmpty, DataUnreadable, OptionInvalid, ProfileInvalid, cut, shown
from alphaprof.log.claim import Claim, claimed
from alphaprof.log.files import DRAFT_NAME
from alphaprof.log.manifest import CHAIN, Drafting, Imported, Manifest, Shard
from alphaprof.log.store import Run, begin
from alphaprof.version import __version__

MOST_DOMAINS = 200  # more are no domains
ORIGIN = "import"  # in messages about options


@dataclass(frozen=True)
class Naming:
    """What things are called, or which fields say it. `target` None: the model of the responses; `domains`: one name for all
    files, or one for each.
    """

    draft: str
    target: str | None
    domains: Sequence[str]
    domain_key: str | None
    cluster_key: str | None


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
    """What `alphaprof import` is asked for. `sampling` None: greedily; `gamma` None: what the metrics say; `drafting`: see
    `log.manifest.Imported`.
    """

    files: Sequence[Path]
    rule: str
    sampling: dict[str, float] | None
    names: Naming
    gamma: int | None
    leave_out: bool
    overrides: Sequence[str]
    engine: Engine = VLLM
    drafting: Drafting = CHAIN


@dataclass
class Read:
    """What was read: requests in order, how many were left out by reason, and the hint of each reason's first request."""

    labelled: list[Labelled] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    advice: dict[str, str] = field(default_factory=dict)
    seen: dict[str, Line] = field(default_factory=dict)
    digest: Any = field(default_factory=hashlib.sha256)  # of all lines


def import_requests(asked: ImportRequest, out: Path) -> Run:
    """Write the run of all requests of some files into a new directory.

    Raises `DataUnreadable` and `ColumnMissing` with file and line, `DataEmpty`, `OptionInvalid` and `ProfileInvalid` for
    what is asked, `RunExists` and `DiskFull`.
    """
    with claimed(out, None) as claim:
        begin(claim, "choose another --out")
        return _imported(asked, claim)


def _imported(asked: ImportRequest, claim: Claim) -> Run:
    if not DRAFT_NAME.fullmatch(asked.names.draft) or asked.names.draft in ("auto", "target"):
        raise OptionInvalid(
            f"--draft {shown(asked.names.draft)} is not a valid name",
            "use lower case, at most 200 characters, and neither auto nor target",
        )
    if len(asked.names.domains) > 1 and len(asked.names.domains) != len(asked.files):
        raise OptionInvalid(
            f"{len(asked.names.domains)} domains for {len(asked.files)} files",
            "name one --domain, or one for each file in their order",
        )
    if twice := [str(path) for path in asked.files if asked.files.count(path) > 1]:
        raise OptionInvalid(f"{twice[0]} is named twice", "name every file once")
    read = Read()
    for source, path in enumerate(asked.files):
        _read_file(read, source, path, asked)
    if not read.labelled:
        reasons = "; ".join(f"{reason} ({count})" for reason, count in read.left_out.items()) or "no line at all"
        (most,) = read.left_out.most_common(1) or [("", 0)]
        hint = read.advice.get(most[0], f"see docs/import.md for how to get metrics out of {asked.engine.name}")
        raise DataEmpty(f"no request to import: {reasons}", hint)
    requests = [item.request for item in read.labelled]
    served = Served(asked.rule, requests[0].rounds.gamma, asked.sampling, asked.drafting)
    target = asked.names.target or _target(requests)
    config = _config(asked, served, list(dict.fromkeys(item.domain for item in read.labelled)))
    known_by = identity(requests)
    run = Run(claim.folder, _manifest(asked, read, ManifestParts(served, config, target, known_by)), claim)
    run.write_totals(totals_table(read.labelled, served), (0, 0), asked.names.draft)
    run.write_documents(documents_table(read.labelled, served, known_by, read.digest.hexdigest()))
    run.write_manifest(run.manifest)
    return run


def _read_file(read: Read, source: int, path: Path, asked: ImportRequest) -> None:
    for line in json_lines(path, read.digest.update, asked.engine.lists):
        for answer in asked.engine.answers(line):
            try:
                request = asked.engine.request(answer, asked.gamma, asked.drafting)
            except LeftOut as found:
                if not found.settled and not asked.leave_out:
                    raise DataUnreadable(
                        f"{line.where}: {found.reason}",
                        f"{found.hint}; --leave-out imports the other requests and counts these",
                    ) from None
                read.left_out[found.kind] += 1
                read.advice.setdefault(found.kind, found.hint)
                continue
            _require_new_request(read, request)
            _require_gamma(read, request)
            domain = _domain(line, source, asked)
            cluster = _named(line, asked.names.cluster_key, "--cluster-key") if asked.names.cluster_key else None
            read.labelled.append(Labelled(request, source, domain, cluster))


def _require_new_request(read: Read, request: EngineRequest) -> None:
    if request.request_id is None:
        return
    before = read.seen.setdefault(request.request_id, request.line)
    if before is not request.line:
        raise request.line.refuse(
            f"the request {shown(request.request_id)} is in {before.where} as well", "keep each request once"
        )


def _require_gamma(read: Read, request: EngineRequest) -> None:
    if read.labelled and (first := read.labelled[0].request).rounds.gamma != request.rounds.gamma:
        raise request.line.refuse(
            f"served with {request.rounds.gamma} speculative tokens, and {first.line.where} with {first.rounds.gamma}",
            "import requests of one number of speculative tokens at a time",
        )


def _domain(line: Line, source: int, asked: ImportRequest) -> str:
    if asked.names.domain_key:
        found = _named(line, asked.names.domain_key, "--domain-key")
        if found is None:
            raise line.refuse(f"{cut(asked.names.domain_key, VALUE)} is null, no domain", "name every request's domain")
        return found
    names = asked.names.domains or ("traffic",)
    return line.writable("--domain", names[source if len(names) > 1 else 0])


def _named(line: Line, key: str, option: str) -> str | None:
    """The text under a dotted key of a line, or of the response in it; None where it is null."""
    found, value = line.at(key)
    if not found and (body := line.fields.get("response")) is not None:
        found, value = line.inside({"response": body}).at(f"response.{key}")
        if not found:
            found, value = line.inside({"response": body}).at(f"response.body.{key}")
    if not found:
        raise ColumnMissing(
            f"{line.where}: there is no {shown(key)}", f"{option} names a field; the line has {line.known()}"
        )
    return line.inside({key: value}).text(key)


def _target(requests: Sequence[EngineRequest]) -> str:
    """The model that every request names. Raises `ColumnMissing` and `DataUnreadable`."""
    first = requests[0]
    for request in requests:
        if request.model is None:
            raise ColumnMissing(f"{request.line.where}: there is no model", "name the served model: --target NAME")
        if request.model != first.model:
            raise request.line.refuse(
                f"model {shown(request.model)}, and {first.line.where} has {shown(first.model)}",
                "import requests of one target at a time; or name it: --target NAME",
            )
    return str(first.model)


def _config(asked: ImportRequest, served: Served, domains: Sequence[str]) -> dict[str, Any]:
    """The profile that such a run answers to: decision and costs are what reports read of it. Models are in the manifest."""
    if len(domains) > MOST_DOMAINS:
        raise OptionInvalid(
            f"{cut(str(asked.names.domain_key), VALUE)} names {len(domains)} domains, more than {MOST_DOMAINS}",
            "name a field with one value for each kind of traffic",
        )
    text: dict[str, Any] = {"kind": "given", "column": "response", "on_policy": True} | (served.sampling or {})
    tree: dict[str, Any] = {
        "target": {"model": "served"},
        "drafts": {asked.names.draft: named_model(asked.names.draft)},
        "data": [{"domain": domain, "path": str(asked.files[0]), "prompt": "{prompt}"} for domain in domains],
        "continuation": text,
        "rules": [served.rule],
        "gammas": [served.gamma],
        "decision": {"rule": served.rule, "draft": asked.names.draft, "gamma": served.gamma},
    }
    # The source of step times goes before its options.
    for override in sorted(asked.overrides, key=lambda text: not text.startswith("costs.source=")):
        if not override.startswith(("decision.", "costs.")):
            raise ProfileInvalid(
                f"--set {cut(override, VALUE)}: an import can set decision.* and costs.* only",
                "everything else was decided by the engine",
            )
        apply_override(tree, override)
    return _answerable(tree, served)


def _answerable(tree: dict[str, Any], served: Served) -> dict[str, Any]:
    """The profile as a manifest holds it. Raises `ProfileInvalid`, also for questions that such a run can never answer."""
    if served.drafting != CHAIN and "source" in tree.get("costs", {}):
        raise ProfileInvalid(
            f"--set costs.source={tree['costs']['source']}: with drafting {served.drafting} it is not known what rounds "
            "drafted, so step times cannot be used",
            "leave it out: tokens per round need no step times",
        )
    if tree.get("costs", {}).get("source") == "roofline":
        raise ProfileInvalid(
            "--set costs.source=roofline: it needs the shapes of target and draft, and those of served models are not known",
            "give step times of your engine: --set costs.source=table --set costs.path=FILE",
        )
    try:
        options = validate(tree, ORIGIN)
    except ProfileInvalid as error:
        raise ProfileInvalid(error.message, _hint(error)) from None
    if options.decision.rule != served.rule:
        raise ProfileInvalid(
            f"--set decision.rule={options.decision.rule}: the engine kept drafts by {served.rule}, and counted its rounds",
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


@dataclass(frozen=True)
class ManifestParts:
    """What a manifest says beside what was asked for: the profile, the target's name, and what prompts are known by."""

    served: Served
    config: dict[str, Any]
    target: str
    known_by: str | None


def _manifest(asked: ImportRequest, read: Read, found: ManifestParts) -> Manifest:
    requests = [item.request for item in read.labelled]
    shard = Shard(0, len(requests), sum(request.completion_tokens for request in requests), read.digest.hexdigest())
    return Manifest(
        status="complete",
        alphaprof=__version__,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        config=found.config,
        target=served_model(found.target),
        drafts={asked.names.draft: served_draft(asked.names.draft)},
        tokenizer="unknown",
        environment={},
        shards=(shard,),
        skipped=dict(read.left_out),
        warnings=tuple(notes(requests, found.known_by, found.served)),
        imported=Imported(
            engine=asked.engine.name,
            files=tuple(str(path) for path in asked.files),
            rule=found.served.rule,
            gamma=found.served.gamma,
            sampling=found.served.sampling,
            prompts_known_by=found.known_by,
            without_steps=sum(request.rounds.steps == 0 for request in requests),
            plain_steps=sum(request.rounds.plain for request in requests),
            beyond_the_end=sum(request.rounds.beyond for request in requests),
            drafting=found.served.drafting,
        ),
    )
