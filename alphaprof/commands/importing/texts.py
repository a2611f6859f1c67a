"""A run of prompt lookup drafts alone, from prompts and answers that a server logged: no model, no GPU.

What prompt lookup drafts, and how much of it is accepted, follows from the text. What the target thought of other tokens is
not known: the run has documents and totals, no position log, and near-ties and mismatches are null.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import BaseModel

from alphaprof.commands.importing.lines import Count, Fields, LeftOut, Line, failure, json_lines, unwrapped
from alphaprof.commands.importing.run import named, served_model
from alphaprof.config.load import SET, changed_question, validate
from alphaprof.config.options import lookup_draft
from alphaprof.costs.roofline import ModelShape
from alphaprof.errors import DataEmpty, ExtraMissing, OptionInvalid, ProfileInvalid
from alphaprof.run.manifest import DOCUMENTS, Manifest, ModelFacts, Shard, now
from alphaprof.run.reader import Run
from alphaprof.run.schema import DOCUMENT_COLUMNS, POSITION_COLUMNS, arrow_schema
from alphaprof.run.writer import RunWriter
from alphaprof.totals.count import READ, TotalsRequest, counts, table_of
from alphaprof.totals.lookup import NONE, Array, Ints, joined_texts, lookup_facts, offers, places_by_size
from alphaprof.version import __version__

UNSCORED = ("impossible", "mismatches", "clear_mismatches", "near_ties")  # of totals: what takes the target
POOL = " in the text and the newest earlier answer"


@dataclass(frozen=True)
class TextsRequest:
    """What `alphaprof import texts` is asked for. A draft for each of `shortest` and `longest` that fit each other, matched
    `rightmost` (and filled up) or leftmost; `pool`: one more that also looks in answers before, those of `earlier` files
    first. `tokenizer`: of lines that have no token ids; `sampling` None: greedily; `domains`: one name for all files, or one
    for each; `domain_key`, `cluster_key`: fields of the lines.
    """

    files: Sequence[Path]
    shortest: Sequence[int]
    longest: Sequence[int]
    gammas: Sequence[int]
    target: str | None = None
    rightmost: bool = True
    pool: bool = False
    earlier: Sequence[Path] = ()
    tokenizer: Path | None = None
    sampling: dict[str, float] | None = None
    domains: Sequence[str] = ()
    domain_key: str | None = None
    cluster_key: str | None = None
    overrides: Sequence[str] = ()


class Ids(BaseModel):
    """Token ids of a prompt and its answer."""

    prompt_token_ids: list[Count]
    token_ids: list[Count]


@dataclass(frozen=True)
class Text:
    """One answer, with its prompt."""

    line: Line
    ids: Ids


def import_texts(asked: TextsRequest, out: Path) -> Run:
    """Write the run of all answers of some files into a new directory. Raises `DataUnreadable` and `ColumnMissing` with file
    and line, `DataEmpty`, `OptionInvalid` and `ProfileInvalid` for what is asked, `ExtraMissing`, `RunExists`, `DiskFull`.
    """
    pairs = [(low, high) for high in sorted(set(asked.longest)) for low in sorted(set(asked.shortest)) if low <= high]
    if not pairs:
        raise OptionInvalid("every --min-ngram exceeds every --max-ngram", "give a --min-ngram that fits, like 1")
    if len(asked.domains) not in (0, 1, len(asked.files)) or (asked.domains and asked.domain_key):
        problem = f"{len(asked.files)} files, given with {len(asked.domains)} --domain" + " and --domain-key" * bool(
            asked.domain_key
        )
        raise OptionInvalid(problem, "give one --domain for all, one per file, or only --domain-key")
    digest, skipped = hashlib.sha256(), Counter[str]()
    encode = _encoder(asked.tokenizer)
    with RunWriter.opened(out, hint="choose another --out") as run:
        before = [text for path in asked.earlier for text in _texts(path, encode, Counter(), digest)]
        texts = [(source, text) for source, path in enumerate(asked.files) for text in _texts(path, encode, skipped, digest)]
        if not texts:
            reasons = "; ".join(f"{reason} ({count})" for reason, count in skipped.items()) or "the files are empty"
            raise DataEmpty(f"no answer to look up: {reasons}", "see docs/import.md for the fields of a line")
        documents = _documents(asked, texts)
        positions = sum(len(text.ids.token_ids) for _, text in texts)
        ways = {f"ngram-{low}-{high}": (low, high, "") for low, high in pairs}
        ways |= {f"pool-{low}-{high}": (low, high, POOL) for low, high in pairs} if asked.pool or asked.earlier else {}
        target = _target(asked.target)
        facts = {
            name: lookup_facts(high, low, asked.rightmost, None, (), target.dtype, pool)
            for name, (low, high, pool) in ways.items()
        }
        rule = "strict" if asked.sampling is None else "one_hot"
        run.manifest = Manifest(
            status="complete",
            alphaprof=__version__,
            created=now(),
            config=_config(asked, rule, {name: way[:2] for name, way in ways.items()}, documents),
            target=target,
            drafts=facts,
            tokenizer="unknown",
            environment={},
            shards=(Shard(0, len(texts), positions, digest.hexdigest()),),
            skipped=dict(skipped),
        )
        request = TotalsRequest([rule], run.gammas)
        scored = dataclasses.replace(target, noise=0.0)
        for name, table in _positions(before + [text for _, text in texts], len(before), ways, asked.rightmost):
            found = counts(table, documents, (scored, facts[name]), request)
            for part in (part for parts in found.values() for part in parts):
                for column in UNSCORED:
                    del part[column]
            run.write_totals(name, [[table_of([found], run.totals_columns)]])
        run.write_table(DOCUMENTS, documents, DOCUMENT_COLUMNS)
        run.begin(run.manifest)
        return run


def _texts(path: Path, encode: Any, skipped: Counter[str], digest: Any) -> Iterator[Text]:
    """Yield the answers of a file. A line holds the ids or texts itself, or an answer of vLLM in `response` or `body`."""
    for line in json_lines(path, digest.update):
        body, error = unwrapped(line.fields, lambda fields: bool({"choices", "token_ids"} & fields.keys()))
        body = body if isinstance(body, dict) else {}
        choices = [choice for choice in body.get("choices") or [{}] if isinstance(choice, dict)]
        for choice in choices:
            try:
                if error:
                    raise failure(error)
                fields = _ids({**line.fields, **body, **choice}, encode)
            except LeftOut as omitted:
                if not omitted.unmeasured:
                    raise line.refuse(omitted.reason, omitted.hint) from None
                skipped[omitted.reason] += 1
                continue
            yield Text(line, line.read(Ids, fields))


def _ids(fields: Fields, encode: Any) -> Fields:
    """Return the ids in a line, encoded if it has texts alone. Raises `LeftOut`."""
    message = fields.get("message")
    answer = fields.get("response") if isinstance(fields.get("response"), str) else fields.get("text")
    answer = message.get("content") if isinstance(message, dict) and answer is None else answer
    ids = {name: fields.get(name) for name in ("prompt_token_ids", "token_ids")}
    if None in ids.values() and encode is not None and isinstance(fields.get("prompt"), str) and isinstance(answer, str):
        ids = {"prompt_token_ids": encode(fields["prompt"], True), "token_ids": encode(answer, False)}
    if None in ids.values():
        hint = "log them (return_token_ids: true), or give prompt and response as text with --tokenizer"
        raise LeftOut("prompt_token_ids or token_ids are missing", hint)
    for name, kind in (("prompt_token_ids", "prompt"), ("token_ids", "answer")):
        if ids[name] == []:
            raise LeftOut(f"with an empty {kind}", "see the log", unmeasured=True)
    return ids


def _encoder(path: Path | None) -> Any:
    """Return what encodes a text, with special tokens or without; None: nothing does."""
    if path is None:
        return None
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ExtraMissing("--tokenizer needs the package tokenizers", "pip install tokenizers, or log token ids") from None
    try:
        tokenizer = Tokenizer.from_file(str(path / "tokenizer.json" if path.is_dir() else path))
    except Exception as error:  # tokenizers raises nothing narrower
        raise OptionInvalid(f"--tokenizer {path}: {str(error)[:100]}", "name a tokenizer.json or its folder") from None
    return lambda text, special: tokenizer.encode(text, add_special_tokens=special).ids


def _positions(
    texts: Sequence[Text], earlier: int, ways: dict[str, tuple[int, int, str]], rightmost: bool
) -> Iterator[tuple[str, pa.Table]]:
    """Yield for each draft the columns of a position log that counts read, of all texts but the first, `earlier` ones. What
    is not known is the same everywhere.
    """
    prompts, answers = ([getattr(text.ids, name) for text in texts] for name in ("prompt_token_ids", "token_ids"))
    sizes, lengths = (np.array([*map(len, parts)]) for parts in (prompts, answers))
    flat = np.concatenate([np.array(ids, dtype=np.int64) for ids in answers])
    tokens, start, continued = joined_texts(pa.array(prompts, pa.list_(pa.int32())), sizes, flat, lengths)
    begin = np.repeat(start + sizes, sizes + lengths)
    pooled = np.where(continued, np.arange(len(tokens)) - begin, NONE)
    pooled[start + sizes + lengths - 1] = NONE  # nothing follows an answer's last token
    kept = continued & (np.arange(len(tokens)) >= (start[earlier]))
    most = max(high for _, high, _ in ways.values())
    own = list(places_by_size(tokens, start, most, rightmost))
    pool = list(places_by_size(tokens, start, most, True, pooled)) if any(way[2] for way in ways.values()) else []
    same = dict.fromkeys(("token", "target_top"), pa.array(tokens[kept], pa.int32()))
    types = {column.name: column.type for column in POSITION_COLUMNS}
    same |= {name: pa.repeat(pa.scalar(1, types[name]), len(tokens[kept])) for name in READ if name not in same}
    for name, (low, high, pooling) in ways.items():
        places = np.full(len(tokens), NONE)
        for size in range(low, high + 1):
            found = own[size - 1]
            found = np.where(found == NONE, pool[size - 1], found) if pooling else found
            places = np.where(found == NONE, places, found)
        yield name, pa.table(same | _offered(offers(tokens, start, places, rightmost)[:, kept], tokens[kept]))


def _offered(found: Array, token: Ints) -> dict[str, Array]:
    """Return the columns of one draft. On sampled text `one_hot` keeps a draft by its probability, which is not known: it
    counts as kept if it is the token, which is so as often.
    """
    top, proposed, accepted = found
    kept = ((top == token) & (proposed > 0)).astype(np.float32)
    return {"draft_top": top, "proposed": proposed, "accepted_run": accepted, "target_prob_of_draft_top": kept}


def _documents(asked: TextsRequest, texts: Sequence[tuple[int, Text]]) -> pa.Table:
    """Return rows of documents; what they do not name is null."""
    rows = []
    for number, (source, text) in enumerate(texts):
        line, prompt = text.line, np.array(text.ids.prompt_token_ids, dtype="<i4")
        domain = asked.domains[source if len(asked.domains) > 1 else 0] if asked.domains else "traffic"
        row = {
            "document": number,
            "domain": named(line, asked.domain_key, "--domain-key") if asked.domain_key else domain,
            "cluster": named(line, asked.cluster_key, "--cluster-key") if asked.cluster_key else None,
            "source": source,
            "source_row": line.number - 1,  # rows count from 0
            "prompt_hash": hashlib.sha256(prompt.tobytes()).hexdigest(),
            "prompt_tokens": len(prompt),
            "continuation_tokens": len(text.ids.token_ids),
            "finish": "unknown",
            "continuation": "given",
            "on_policy": True,
        }
        rows.append(row | (asked.sampling or {}))
    return pa.Table.from_pylist(rows, schema=arrow_schema(DOCUMENT_COLUMNS))


def _config(asked: TextsRequest, rule: str, ways: dict[str, tuple[int, int]], documents: pa.Table) -> dict[str, Any]:
    """Return the profile that such a run answers to. Raises `ProfileInvalid`."""
    for override in asked.overrides:
        if not override.startswith(("decision.", "costs.")):
            raise ProfileInvalid(f"--set {override}: there is nothing to profile", "set only decision.* or costs.*")
    match = "rightmost" if asked.rightmost else "leftmost"
    drafts = {name: lookup_draft(low, high, match) for name, (low, high) in ways.items()}
    domains = dict.fromkeys(documents["domain"].to_pylist())
    tree: dict[str, Any] = {
        "target": {"model": asked.target or "served"},
        "drafts": drafts,
        "data": [{"domain": name, "path": str(asked.files[0]), "prompt_ids": "prompt_token_ids"} for name in domains],
        "continuation": {"kind": "given", "column": "token_ids", "on_policy": True} | (asked.sampling or {}),
        "rules": [rule],
        "gammas": list(asked.gammas),
        "costs": {"source": "none"},
    }
    config = validate(tree, SET).resolved(Path()).model_dump(mode="json")
    return changed_question(config, list(asked.overrides)) if asked.overrides else config


def _target(name: str | None) -> ModelFacts:
    """Return what is known of the target: its name, and if that is a folder with its config.json, its dtype and, unless its
    weights are quantised, its shape, from which a roofline computes step times.
    """
    facts, file = served_model(name or "served"), Path(name or "") / "config.json"
    if name is None or not file.is_file():
        return facts
    try:
        config = json.loads(file.read_bytes())
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "dtype unknown")
        shape = ModelShape.from_config(config, 4.0 if dtype == "float32" else 2.0, 4.0 if dtype == "float32" else 2.0)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError):
        return facts
    known = None if config.get("quantization_config") else dataclasses.asdict(shape)
    return dataclasses.replace(facts, dtype=dtype, shape=known)
