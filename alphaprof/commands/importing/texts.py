"""A run of prompt lookup drafts alone, from prompts and answers that a server logged: no model, no GPU.

What prompt lookup drafts, and how much of it is accepted, follows from the text. What the target thought of other tokens is
not known: the run has documents and totals, no position log, and near-ties and mismatches are null.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, Field

from alphaprof.commands.importing.lines import Count, Fields, LeftOut, Line, failure, json_lines, unwrapped
from alphaprof.commands.importing.run import (
    ImportRequest,
    distinct_domains,
    named_by,
    require_fitting_options,
    served_model,
)
from alphaprof.config.load import SET, changed_question, validate
from alphaprof.costs.shapes import ModelShape
from alphaprof.errors import DataEmpty, ExtraMissing, OptionInvalid
from alphaprof.run.manifest import DOCUMENTS, DraftFacts, Manifest, ModelFacts, Shard, now
from alphaprof.run.reader import Run
from alphaprof.run.schema import DOCUMENT_COLUMNS, POSITION_COLUMNS, arrow_schema
from alphaprof.run.writer import RunWriter
from alphaprof.totals.count import READ, TotalsRequest, counts, table_of
from alphaprof.totals.lookup import NONE, joined_texts, lookup_facts, offers, places_by_size
from alphaprof.version import __version__

UNSCORED = ("impossible", "mismatches", "clear_mismatches", "near_ties")  # of totals: what takes the target
POOL = " in the text and the newest earlier answer"
Way = tuple[int, int, str]  # shortest and longest n-gram, and POOL
Encoder = Callable[[str, bool], list[int]]  # of a text, with special tokens or without


class Text(BaseModel):
    """Token ids of a prompt and its answer."""

    prompt: list[Count] = Field(alias="prompt_token_ids")
    answer: list[Count] = Field(alias="token_ids")


def import_texts(
    asked: ImportRequest,
    out: Path,
    *,
    ngrams: tuple[Sequence[int], Sequence[int]],
    gammas: Sequence[int],
    rightmost: bool = True,
    pool: bool = False,
    earlier: Sequence[Path] = (),
    tokenizer: Path | None = None,
) -> Run:
    """Write the run of all answers of some files into a new directory. `ngrams`: shortest and longest ones, a draft for each
    pair that fits; `rightmost`: and filled up, else leftmost; `pool`: one more of each that also looks in answers before,
    those of `earlier` files first; `tokenizer`: of lines that have no token ids.

    Raises `DataUnreadable` and `ColumnMissing` with file and line, `DataEmpty`, `OptionInvalid`, `ProfileInvalid`,
    `ExtraMissing`, `RunExists` and `DiskFull`.
    """
    require_fitting_options(asked)
    pairs = [(low, high) for high in sorted(set(ngrams[1])) for low in sorted(set(ngrams[0])) if low <= high]
    if not pairs:
        raise OptionInvalid("every --min-ngram exceeds every --max-ngram", "give a --min-ngram that fits, like 1")
    ways: dict[str, Way] = {f"ngram-{low}-{high}": (low, high, "") for low, high in pairs}
    ways |= {f"pool-{low}-{high}": (low, high, POOL) for low, high in pairs} if pool or earlier else {}
    digest, skipped, encode = hashlib.sha256(), Counter[str](), _encoder(tokenizer)
    with RunWriter.opened(out, hint="choose another --out") as run:
        before = [text for path in earlier for _, text in _texts(path, encode, Counter(), digest)]
        rows, texts = list[dict[str, Any]](), list[Text]()
        for source, path in enumerate(asked.files):
            for line, text in _texts(path, encode, skipped, digest):
                rows.append(_document(asked, len(rows), source, line, text))
                texts.append(text)
        if not texts:
            reasons = "; ".join(f"{reason} ({count})" for reason, count in skipped.items()) or "the files are empty"
            raise DataEmpty(f"no answer to look up: {reasons}", "see docs/import.md for the fields of a line")
        documents = pa.Table.from_pylist(rows, schema=arrow_schema(DOCUMENT_COLUMNS))
        target = _target(asked.target or "served")
        drafts = {
            name: lookup_facts(high, low, rightmost, None, (), target.dtype, where)
            for name, (low, high, where) in ways.items()
        }
        run.manifest = Manifest(
            status="complete",
            alphaprof=__version__,
            created=now(),
            config=_config(asked, drafts, gammas, distinct_domains(asked, (row["domain"] for row in rows))),
            target=target,
            drafts=drafts,
            tokenizer="unknown",
            environment={},
            shards=(Shard(0, len(texts), sum(len(text.answer) for text in texts), digest.hexdigest()),),
            skipped=dict(skipped),
        )
        for name, table in _positions([*before, *texts], len(before), ways, rightmost):
            models = replace(target, noise=0.0), drafts[name]
            found = counts(table, documents, models, TotalsRequest(run.rules, run.gammas))
            for column in UNSCORED:
                del found[asked.rule][column]
            run.write_totals(name, [[table_of(found, run.totals_columns)]])
        run.write_table(DOCUMENTS, documents, DOCUMENT_COLUMNS)
        run.begin(run.manifest)
        return run


def _texts(path: Path, encode: Encoder | None, skipped: Counter[str], digest: Any) -> Iterator[tuple[Line, Text]]:
    """Yield the answers of a file. A line holds ids or texts itself, or an answer of vLLM, also in `response` or `body`."""
    for line in json_lines(path, digest.update):
        body, error = unwrapped(line.fields, lambda fields: bool({"choices", "token_ids"} & fields.keys()))
        body = body if isinstance(body, dict) else {}
        several = body.get("choices")
        choices = [each for each in several if isinstance(each, dict)] if isinstance(several, list) else []
        for choice in choices or [{}]:
            try:
                if error:
                    raise failure(error)
                text = line.read(Text, _ids(line, {**line.fields, **body, **choice}, encode))
                if not text.prompt or not text.answer:
                    raise LeftOut("with an empty prompt or answer", "log both")
                yield line, text
            except LeftOut as omitted:
                skipped[omitted.reason] += 1


def _ids(line: Line, fields: Fields, encode: Encoder | None) -> Fields:
    """Return the ids in a line, or those of its texts. Raises `DataUnreadable`."""
    if fields.get("prompt_token_ids") is not None and fields.get("token_ids") is not None:
        return fields
    message, response, prompt = fields.get("message"), fields.get("response"), fields.get("prompt")
    answer = message.get("content") if isinstance(message, dict) else fields.get("text", response)
    if encode is None or not isinstance(prompt, str) or not isinstance(answer, str):
        raise line.refuse(
            "prompt_token_ids or token_ids are missing",
            "log them (return_token_ids: true), or give prompt and response as text with --tokenizer",
        )
    return {"prompt_token_ids": encode(prompt, True), "token_ids": encode(answer, False)}


def _encoder(path: Path | None) -> Encoder | None:
    if path is None:
        return None
    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(path / "tokenizer.json" if path.is_dir() else path))
    except ImportError:
        raise ExtraMissing("--tokenizer needs the package tokenizers", "pip install tokenizers, or log token ids") from None
    except Exception as error:  # tokenizers raises nothing narrower
        raise OptionInvalid(f"--tokenizer {path}: {str(error)[:100]}", "name a tokenizer.json or its folder") from None
    return lambda text, special: list(tokenizer.encode(text, add_special_tokens=special).ids)


def _positions(texts: Sequence[Text], earlier: int, ways: dict[str, Way], rightmost: bool) -> Iterator[tuple[str, pa.Table]]:
    """Yield for each draft the columns of a position log that counts read, of all texts but the first, `earlier` ones.
    Columns that only the target knows are the same everywhere.
    """
    prompts = pa.array([text.prompt for text in texts], pa.list_(pa.int32()))
    sizes, lengths = (np.array([len(getattr(text, part)) for text in texts]) for part in ("prompt", "answer"))
    answers = np.concatenate([np.array(text.answer, dtype=np.int64) for text in texts])
    tokens, start, continued = joined_texts(prompts, sizes, answers, lengths)
    place = np.arange(len(tokens))
    pooled = np.where(continued, place - np.repeat(start + sizes, sizes + lengths), NONE)
    pooled[start + sizes + lengths - 1] = NONE  # nothing follows an answer's last token
    kept = continued & (place >= start[earlier])
    most = max(high for _, high, _ in ways.values())
    own = list(places_by_size(tokens, start, most, rightmost))
    pool = list(places_by_size(tokens, start, most, True, pooled)) if any(way[2] for way in ways.values()) else []
    written, types = tokens[kept], {column.name: column.type for column in POSITION_COLUMNS}
    columns: dict[str, Any] = {name: pa.repeat(pa.scalar(1, types[name]), len(written)) for name in READ}
    columns |= dict.fromkeys(("token", "target_top"), written)
    for name, (low, high, pooling) in ways.items():
        places = np.full(len(tokens), NONE)
        for size in range(low, high + 1):
            found = np.where(own[size - 1] == NONE, pool[size - 1], own[size - 1]) if pooling else own[size - 1]
            places = np.where(found == NONE, places, found)
        top, proposed, accepted = offers(tokens, start, places, rightmost)[:, kept]
        # one_hot keeps a draft by its probability, which is not known: it counts as kept where it was written, as often.
        agrees = ((top == written) & (proposed > 0)).astype(np.float32)
        own_columns = {"draft_top": top, "proposed": proposed, "accepted_run": accepted, "target_prob_of_draft_top": agrees}
        yield name, pa.table(columns | own_columns)


def _document(asked: ImportRequest, number: int, source: int, line: Line, text: Text) -> dict[str, Any]:
    """Return a row of documents; what it does not name is null."""
    domain, cluster = named_by(asked, line, source)
    return {
        "document": number,
        "domain": domain,
        "cluster": cluster,
        "source": source,
        "source_row": line.number - 1,  # rows count from 0
        "prompt_hash": hashlib.sha256(np.array(text.prompt, dtype="<i4").tobytes()).hexdigest(),
        "prompt_tokens": len(text.prompt),
        "continuation_tokens": len(text.answer),
        "finish": "unknown",
        "continuation": "given",
        "on_policy": True,
        **(asked.sampling or {}),
    }


def _config(
    asked: ImportRequest, drafts: dict[str, DraftFacts], gammas: Sequence[int], domains: Sequence[str]
) -> dict[str, Any]:
    """Return the profile that such a run answers to. Raises `ProfileInvalid`."""
    tree: dict[str, Any] = {
        "target": {"model": asked.target or "served"},
        "drafts": {name: {"kind": facts.kind} | facts.settings for name, facts in drafts.items()},
        "data": [{"domain": name, "path": str(asked.files[0]), "prompt_ids": "prompt_token_ids"} for name in domains],
        "continuation": {"kind": "given", "column": "token_ids", "on_policy": True} | (asked.sampling or {}),
        "rules": [asked.rule],
        "gammas": list(gammas),
        "costs": {"source": "none"},
    }
    return changed_question(validate(tree, SET).resolved(Path()).model_dump(mode="json"), list(asked.overrides))


def _target(name: str) -> ModelFacts:
    """Return what is known of the target: its name, and of a folder with its config.json the dtype and, unless its weights
    are quantised, the shape, from which a roofline computes step times.
    """
    facts, file = served_model(name), Path(name) / "config.json"
    try:
        config = json.loads(file.read_bytes()) if file.is_file() else {}
        dtype = str(config.get("dtype") or config.get("torch_dtype") or facts.dtype)
        size = 4.0 if dtype == "float32" else 2.0
        shape = None if config.get("quantization_config") else asdict(ModelShape.from_config(config, size, size))
        return replace(facts, dtype=dtype, shape=shape)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError):
        return facts
