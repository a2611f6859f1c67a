"""A run from the metrics that an engine logged for each request: drafts that are served and cannot be loaded here.

Nothing here estimates. What metrics per request do not tell (`run.schema.UNKNOWN_TO_ENGINES`) is null: after a rejection an
engine never tests the drafts that follow, so alpha, an average over all positions, does not follow from what it counts.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from alphaprof.commands.importing import sglang, vllm
from alphaprof.commands.importing.lines import LeftOut, Line, json_lines
from alphaprof.commands.importing.vllm import EngineRequest
from alphaprof.config.load import SET, changed_question, validate
from alphaprof.config.options import DRAFT_NAME, named_model
from alphaprof.costs.engine_table import kept_table
from alphaprof.errors import VALUE, ColumnMissing, DataEmpty, OptionInvalid, ProfileInvalid, cut, shown
from alphaprof.run.manifest import (
    CHAIN,
    DOCUMENTS,
    LOG_PROMPTS,
    NO_PROMPT,
    PROMPTS_KNOWN_BY,
    UNKNOWN_DTYPE,
    DraftFacts,
    Drafting,
    Imported,
    Manifest,
    ModelFacts,
    Shard,
    now,
)
from alphaprof.run.notes import note
from alphaprof.run.reader import Run
from alphaprof.run.schema import DEPTH_COUNTS, DOCUMENT_COLUMNS, arrow_schema, depth_names, imported_totals_columns
from alphaprof.run.writer import RunWriter
from alphaprof.servers.pages import SERVERS
from alphaprof.version import __version__

MOST_DOMAINS = 200  # more are no domains
READERS = {"vllm": vllm, "sglang": sglang}  # what reads the answers of a line, and the request of an answer
DECIDED = ("decision.rule=", "costs.source=roofline")  # the rule is the engine's, and shapes are not known


@dataclass(frozen=True)
class ImportRequest:
    """What `alphaprof import` is asked for. `engine`: a key of `READERS`, or texts; `sampling` None: greedily; `gamma` None:
    what the metrics say; `target` None: the model of the responses; `domains`: one name for all files, or one for each;
    `domain_key`, `cluster_key`: fields of the lines; `drafting`: see `run.manifest.Imported`.
    """

    engine: str
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
    require_fitting_options(asked)
    read = Read()
    with RunWriter.opened(out, hint="choose another --out") as run:
        for source, path in enumerate(asked.files):
            _read_file(read, source, path, asked)
        if not read.requests:
            reasons = "; ".join(f"{reason} ({count})" for reason, count in read.left_out.items()) or "the files are empty"
            most = max(read.left_out, key=read.left_out.__getitem__, default="")
            raise DataEmpty(
                f"no request to import: {reasons}",
                read.advice.get(most, f"see docs/import.md for how to get metrics from {SERVERS[asked.engine]}"),
            )
        manifest, imported = _imported_manifest(asked, read)
        run.manifest = manifest
        run.write_totals(asked.draft, [[_totals_table(read.requests, imported)]])
        run.write_table(DOCUMENTS, _documents_table(read.requests, imported, read.digest.hexdigest()), DOCUMENT_COLUMNS)
        run.begin(manifest)
        return run


def require_known(kind: str, served: Mapping[str, Any], lookup: Mapping[str, Any], gammas: Sequence[int] | None) -> None:
    """Raise `OptionInvalid` for options that files of this kind do not have, or lack. `served`: options about how requests
    were served; `lookup`: those of prompt lookup in texts.
    """
    for name, value in (served if kind == "texts" else lookup).items():
        if value:
            about = "texts" if kind == "texts" else f"requests of {SERVERS[kind]}"
            raise OptionInvalid(f"{name} does not apply to {about}", "leave it out, or name what the files are: --format")
    if kind != "texts" and not served["--rule"]:
        raise OptionInvalid(
            "requests do not tell the acceptance rule of the engine",
            "add --rule strict (temperature 0), or one_hot, lossless or block with --temperature",
        )
    if kind == "sglang" and not served["--drafting"]:
        raise OptionInvalid(
            "SGLang's counts do not tell what a round drafts",
            "add --drafting chain (--speculative-eagle-topk 1), tree or adaptive",
        )
    if kind == "vllm" and served["--drafting"] not in (None, CHAIN):
        raise OptionInvalid("vLLM drafts chains", "leave out --drafting")
    if kind != "texts" and len(gammas or ()) > 1:
        raise OptionInvalid("requests have one --gamma, as served", "give it once")


def sampling_of(rule: str, temperature: float | None, top_k: int, top_p: float) -> dict[str, float] | None:
    """Return the settings of sampled text; None: greedy. Raises `OptionInvalid` if rule and temperature do not fit."""
    if (rule == "strict") == bool(temperature) or (rule == "strict" and (top_k, top_p) != (0, 1)):
        raise OptionInvalid(
            f"--rule {rule} does not fit temperature {temperature or 0:g}, top_k {top_k} and top_p {top_p:g}",
            "use strict for greedy only; one_hot (what engines use to sample), lossless and block need --temperature",
        )
    if rule == "strict" or not temperature:
        return None
    # Neither engine speculates with min_p: vLLM rejects it, SGLang ignores it.
    return {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": 0.0}


def remarks_on(manifest: Manifest) -> Iterator[str]:
    """Yield lines on an imported run: how many requests were left out, and by what prompts are identified."""
    for reason, count in manifest.skipped.items():
        yield f"warning: left out: {reason} ({count})"
    weak = next((each for each in manifest.warnings if each["code"] == "prompts_unknown"), None)
    if weak:
        yield f"warning: {weak['message']}; {weak['remedy']}"
    elif manifest.imported:
        yield f"prompts are identified by {manifest.imported.prompts_known_by}"


def require_fitting_options(asked: ImportRequest) -> None:
    """Raise `OptionInvalid` for names and files that contradict each other, and for rounds whose length nothing tells."""
    if asked.drafting != CHAIN and asked.gamma is None:
        raise OptionInvalid(
            f"with --drafting {asked.drafting}, the counts do not say how many drafts a round can accept",
            "add --gamma N: the server's --speculative-num-steps (if adaptive: the largest)",
        )
    domains, files = len(asked.domains), len(set(asked.files))
    if files < len(asked.files) or domains not in (0, 1, files) or (domains and asked.domain_key):
        key = " and a --domain-key" if asked.domain_key else ""
        raise OptionInvalid(
            f"{len(asked.files)} files ({files} distinct), given with {domains} --domain{key}",
            "give each file once, with one --domain for all, one per file, or only --domain-key",
        )
    if not DRAFT_NAME.fullmatch(asked.draft) or asked.draft in ("auto", "target"):
        raise OptionInvalid(
            f"--draft {shown(asked.draft)} is not a valid name",
            "use lower case, at most 200 characters, and neither auto nor target",
        )


def _read_file(read: Read, source: int, path: Path, asked: ImportRequest) -> None:
    engine = READERS[asked.engine]
    for line in json_lines(path, read.digest.update):
        for answer in engine.answers_of(line):
            try:
                request = engine.request_of(answer, asked.gamma, asked.drafting)
            except LeftOut as omitted:
                if not omitted.unmeasured and not asked.leave_out:
                    raise line.refuse(
                        omitted.reason, f"{omitted.hint}; use --leave-out to skip and count such requests"
                    ) from None
                read.left_out[omitted.reason] += 1
                read.advice.setdefault(omitted.reason, omitted.hint)
                continue
            _require_fitting(read, request, asked)
            domain, cluster = named_by(asked, line, source)
            read.requests.append(dataclasses.replace(request, source=source, domain=domain, cluster=cluster))


def _require_fitting(read: Read, request: EngineRequest, asked: ImportRequest) -> None:
    """Raise `DataUnreadable` for a request that was read before, or was served otherwise than the first, and `ColumnMissing`
    if no model is named.
    """
    if request.request_id is not None:
        before = read.seen.setdefault(request.request_id, request.line)
        if before is not request.line:
            raise request.line.refuse(
                f"the request {shown(request.request_id)} is also in {before.where}", "keep each request once"
            )
    if not asked.target and request.model is None:
        raise ColumnMissing(f"{request.line.where}: no model is named", "name the served model: --target NAME")
    first = (read.requests or [request])[0]
    served, at_first = ((asked.target or one.model, one.rounds.gamma) for one in (request, first))
    if served != at_first:
        problem = "model {!r} with {} speculative tokens, and {} has {!r} with {}"
        raise request.line.refuse(
            problem.format(*served, first.line.where, *at_first),
            "import requests that share target and number of speculative tokens; --target sets one target name",
        )


def named_by(asked: ImportRequest, line: Line, source: int) -> tuple[str, str | None]:
    """Return the domain and the cluster of a line in the file of this number. Raises `ColumnMissing`."""
    domain = asked.domains[source if len(asked.domains) > 1 else 0] if asked.domains else "traffic"
    domain = str(_named(line, asked.domain_key, "--domain-key")) if asked.domain_key else domain
    return domain, _named(line, asked.cluster_key, "--cluster-key") if asked.cluster_key else None


def _named(line: Line, key: str, option: str) -> str | None:
    """Return the text under a dotted key of a line, or of the response in it; None if it is null. Raises `ColumnMissing`."""
    value: Any = None
    for path in (key, f"response.{key}", f"response.body.{key}"):
        value = line.fields
        for name in path.split("."):
            value = value.get(name, ...) if isinstance(value, dict) else ...
        if value is not ...:
            break
    named = isinstance(value, str | int | None) and not isinstance(value, bool)
    halved = str(value).encode(errors="ignore").decode() != str(value)  # a JSON string may end in half a character
    if not named or halved or (value is None and option == "--domain-key"):
        known = ", ".join(shown(name) for name in list(line.fields)[:8])
        problem = f"{shown(key)} is missing" if value is ... else f"{shown(key)} is {shown(value)}, not a name"
        raise ColumnMissing(f"{line.where}: {problem}", f"name a field of the line with {option}: {known}")
    return None if value is None else str(value)


def distinct_domains(asked: ImportRequest, names: Iterable[str]) -> list[str]:
    """Return the different domains of requests in order. Raises `OptionInvalid` for more than reports can show."""
    domains = list(dict.fromkeys(names))
    if len(domains) > MOST_DOMAINS:
        raise OptionInvalid(
            f"{cut(str(asked.domain_key), VALUE)} names {len(domains)} domains, more than {MOST_DOMAINS}",
            "name a field with one value per kind of traffic",
        )
    return domains


def _config(asked: ImportRequest, gamma: int, domains: Sequence[str]) -> dict[str, Any]:
    """Return the profile that such a run answers to: decision and costs are what reports read of it. Models are in the
    manifest. Raises `ProfileInvalid`.
    """
    decided = DECIDED if asked.drafting == CHAIN else ("decision.rule=", "costs.")
    for override in asked.overrides:
        if not override.startswith(("decision.", "costs.")) or override.startswith(decided):
            raise ProfileInvalid(
                f"--set {cut(override, VALUE)}: the engine decided it, or the import lacks what it needs",
                "set only decision.* (not the rule), or costs.source=table if rounds drafted chains",
            )
    tree: dict[str, Any] = {
        "target": {"model": "served"},
        "drafts": {asked.draft: named_model(asked.draft)},
        "data": [{"domain": domain, "path": str(asked.files[0]), "prompt": "{prompt}"} for domain in domains],
        "continuation": {"kind": "given", "column": "response", "on_policy": True} | (asked.sampling or {}),
        "rules": [asked.rule],
        "gammas": [gamma],
        "decision": {"rule": asked.rule, "draft": asked.draft, "gamma": gamma},
    }
    return changed_question(validate(tree, SET).resolved(Path()).model_dump(mode="json"), list(asked.overrides))


def _imported_manifest(asked: ImportRequest, read: Read) -> tuple[Manifest, Imported]:
    requests, gamma = read.requests, read.requests[0].rounds.gamma
    imported = Imported(
        engine=SERVERS[asked.engine],
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
    manifest = Manifest(
        status="complete",
        alphaprof=__version__,
        created=now(),
        config=_config(asked, gamma, distinct_domains(asked, (request.domain for request in requests))),
        target=served_model(asked.target or str(requests[0].model)),
        # No metrics tell how an engine drafted: it counts as a model, and nothing of q is known.
        drafts={asked.draft: DraftFacts(**vars(served_model(asked.draft)), has_distribution=False, has_steps=True)},
        tokenizer="unknown",
        environment={},
        shards=(Shard(0, len(requests), sum(each.completion_tokens for each in requests), read.digest.hexdigest()),),
        skipped=dict(read.left_out),
        warnings=tuple(_import_notes(requests, imported)),
        imported=imported,
    )
    return dataclasses.replace(manifest, table=kept_table(manifest.profile.costs)), imported


def _documents_table(requests: Sequence[EngineRequest], imported: Imported, digest: str) -> pa.Table:
    """Return rows of documents; what they do not name is null. Without anything to know prompts by, each is one of its own:
    a line of the files that have this `digest`.
    """
    known_by = imported.prompts_known_by
    rows = [
        {
            "document": number,
            "domain": request.domain,
            "cluster": request.cluster,
            "source": request.source,
            "source_row": request.line.number - 1,  # rows count from 0
            "prompt_hash": request.names[known_by]
            if known_by
            else hashlib.sha256(f"{digest} {request.source} {request.line.number}".encode()).hexdigest(),
            "prompt_tokens": request.prompt_tokens,
            "continuation_tokens": request.completion_tokens,
            "finish": request.finish,
            "continuation": "given",
            "on_policy": True,
            **(imported.sampling or {}),
        }
        for number, request in enumerate(requests)
    ]
    return pa.Table.from_pylist(rows, schema=arrow_schema(DOCUMENT_COLUMNS))


def _totals_table(requests: Sequence[EngineRequest], imported: Imported) -> pa.Table:
    """Return rows of the totals; what they do not name is null. A round without a draft is one that the tokens ask for and
    the metrics do not count. What rounds drafted and accepted at each depth is known of chains only.
    """
    gamma = imported.gamma
    rows = []
    for number, request in enumerate(requests):
        rounds, written = request.rounds, request.completion_tokens
        row = {
            "document": number,
            "rule": imported.rule,
            "positions": written,
            "tokens": float(written - rounds.prefilled),
            f"rounds_{gamma}": float(rounds.steps + rounds.plain),
            f"control_{gamma}": 0.0,
        }
        if imported.drafting == CHAIN:
            row[f"drafted_{gamma}"] = float(sum(rounds.drafted))
            for name in DEPTH_COUNTS:
                row |= zip(depth_names(name, gamma), map(float, getattr(rounds, name)), strict=True)
        rows.append(row)
    return pa.Table.from_pylist(rows, schema=arrow_schema(imported_totals_columns([gamma])))


def served_model(name: str) -> ModelFacts:
    """Return what is known of a model that another engine ran: what it is called."""
    return ModelFacts(
        reference=name,
        kind="served",
        architecture="a served model",
        fingerprint=hashlib.sha256(f"served {name}".encode()).hexdigest(),
        dtype=UNKNOWN_DTYPE,
        device="unknown",
        parameters=None,
        context=None,
        vocabulary=None,
        eos=(),
        noise=None,
    )


def _import_notes(requests: Sequence[EngineRequest], imported: Imported) -> Iterator[dict[str, str]]:
    """Yield what a reader of the report has to know."""
    yield note("imported")
    gamma, known_by = imported.gamma, imported.prompts_known_by
    deepest = max(sum(map(bool, request.rounds.accepted)) for request in requests)  # counts never rise with depth
    if imported.drafting != CHAIN:
        yield note("rounds_only", drafting=imported.drafting, gamma=gamma)
    elif 0 < deepest < gamma:
        yield note("never_full", deepest=deepest, gamma=gamma)
    if known_by in NO_PROMPT:
        yield note(
            "prompts_unknown",
            known_by=known_by or "nothing",
            lacking=sum(PROMPTS_KNOWN_BY[0] not in request.names for request in requests),
            requests=len(requests),
            pairs="only requests with the same id" if known_by else "none of them",
            remedy=LOG_PROMPTS,
        )
    if plain := sum(request.rounds.plain > 0 for request in requests):
        yield note("plain_steps", rounds=imported.plain_steps, plain=plain, requests=len(requests))
    if idle := imported.without_steps:
        yield note("no_steps", idle=idle, requests=len(requests))
