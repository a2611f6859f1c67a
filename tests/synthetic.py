"""A complete run directory without models: random but consistent columns, written through the product's own store.

Acceptance of each document is drawn around the probability that its domain asks for, so that documents differ as they do
in real text. Nothing here imports torch.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import hashlib
import itertools
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from alphaprof.profiling.scoring.scorer import Extras
from alphaprof.rules import rules_of
from alphaprof.run.manifest import DraftFacts, File, Manifest, ModelFacts, Shard
from alphaprof.run.parquet import blocks_of
from alphaprof.run.reader import Run
from alphaprof.run.schema import (
    CONTINUATION_COLUMNS,
    DEPTH_COUNTS,
    DEPTHS,
    LATENCY_COLUMNS,
    OWN_PATH,
    PROMPT_COLUMNS,
    STARTS,
    LogRules,
    arrow_schema,
    depth_names,
)
from alphaprof.run.writer import RunWriter
from alphaprof.totals.files import write_totals
from alphaprof.totals.replay import runs_by_depth

Array = np.ndarray[Any, Any]
VOCABULARY = 1000
WORDS = np.arange(3, 15)  # the tokens of sampled text
SETTINGS = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0}
EOS = 2
NO_LIMIT = 256  # `proposed` of a draft that is always ready


@dataclass(frozen=True)
class Domain:
    """One domain: its documents, and the mean and spread over documents of the draft's acceptance probability.

    With a `temperature` the text is drawn from whole distributions, and `alpha` says how much of them the draft knows; a
    `uniform` text is drawn from another one, whatever it claims. Without, `bursts` is the correlation of acceptance from one
    position to the next.

    `shortest`, `longest`: tokens of a continuation; `coverage`: share of positions with a proposal; `clusters`: one name a
    document, None for documents that stand alone; `prompts`: likewise, equal names being equal prompts.
    """

    documents: int = 6
    alpha: float = 0.7
    spread: float = 0.1
    shortest: int = 20
    longest: int = 60
    coverage: float = 1.0
    on_policy: bool = True
    continuation: str = "greedy"
    temperature: float | None = None
    uniform: bool = False
    bursts: float = 0.0
    finish: str = "length"
    clusters: Sequence[str | None] | None = None
    prompts: Sequence[str] | None = None


@dataclass(frozen=True)
class Recipe:
    """What a synthetic run is made of. `drafts`: what each draft adds to the acceptance probability of every domain.

    Times in ms: a draft step takes `draft_ms`, verification of n tokens 10 + `extra_ms` (n - 1); `latency` False leaves the
    table out. `sources` adds domains a second time: (name, Domain) pairs, for a domain with two kinds of text. `thinking`:
    how far into a text its thinking goes at most, as a share of it; None: no spans. `heads`: draft heads, and what their
    facts have beside those of `head_facts`.
    """

    domains: Mapping[str, Domain] = field(default_factory=lambda: {"code": Domain(), "chat": Domain(alpha=0.4)})
    drafts: Mapping[str, float] = field(default_factory=lambda: {"small": 0.0})
    gammas: Sequence[int] = (1, 2, 3, 4)
    decision: Mapping[str, Any] = field(default_factory=dict)
    rules: Sequence[str] = ("strict",)
    lookups: Sequence[str] = ()
    heads: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    sources: Sequence[tuple[str, Domain]] = ()
    shard_documents: int = 4
    draft_ms: float = 1.0
    extra_ms: float = 0.5
    lookup_ms: float = 0.01
    timing_error: float = 0.01
    latency: bool = True
    thinking: float | None = None
    certificates: bool = False
    seed: int = 0

    @property
    def log_rules(self) -> LogRules:
        """What the log holds of which rules."""
        return Extras.of(self.rules, self.certificates).log_rules(self.rules)


@dataclass(frozen=True)
class Document:
    """One document of a synthetic run."""

    number: int
    domain: str
    options: Domain
    row: int
    length: int
    tokens: Array
    law: Array | None = None  # of sampled text: the target's distribution [positions, len(WORDS)] over WORDS


def write_run(path: Path, recipe: Recipe | None = None) -> Run:
    """A complete run in `path`, totals and step times included: a copy where this process has written the recipe before.

    Two calls are thus no two writes; `write_anew` writes.
    """
    recipe = recipe or Recipe()
    written = _written() / hashlib.sha256(repr(recipe).encode()).hexdigest()
    if not written.exists():
        write_anew(written, recipe)
    shutil.copytree(written, path, dirs_exist_ok=True)
    return Run.open(path)


@functools.cache
def _written() -> Path:
    """A folder of runs by recipe, which ends with the process."""
    folder = Path(tempfile.mkdtemp(prefix="synthetic-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def write_anew(path: Path, recipe: Recipe) -> None:
    """A complete run in `path`, by the store's own writer."""
    rng = np.random.default_rng(recipe.seed)
    documents = _documents(recipe, rng)
    parts = [documents[start : start + recipe.shard_documents] for start in range(0, len(documents), recipe.shard_documents)]
    with RunWriter.opened(path) as run:
        for part in parts:
            texts = continuation_table(part).to_pylist()
            rows = [row | {"cut": False, "given_ids": None} for row in texts]
            prompts = pa.Table.from_pylist(rows, schema=arrow_schema(PROMPT_COLUMNS))
            run.stage(prompts, hashlib.sha256(str([document.number for document in part]).encode()).hexdigest())
        run.begin(manifest(recipe))
        if recipe.latency:
            run.write_table("latency.parquet", latency(recipe), LATENCY_COLUMNS)
            run.update()
        for index, part in enumerate(parts):
            _write_shard(run, index, part, recipe, rng)
        run.finish(write_totals)


def rewritten(run: Run, draft: str, change: Callable[[pd.DataFrame], object]) -> Run:
    """The run with the position log of a draft changed, a shard at a time, and its totals computed again."""
    changed = {}
    for shard in run.shards:
        table = run.positions(draft, shard.index)
        frame = table.to_pandas()
        change(frame)
        changed[shard.index] = pa.Table.from_pandas(frame, schema=table.schema, preserve_index=False)
    return replaced(run, {draft: changed})


def replaced(run: Run, logs: Mapping[str, Mapping[int, pa.Table]], texts: Mapping[int, pa.Table] | None = None) -> Run:
    """The run with other tables of some shards, by draft and number, as if it had been measured like this."""
    with RunWriter.opened(run.storage, resume=True) as writer:
        shards = {index: record.shard for index, record in writer.journal["rows"].items()}
        for index, table in (texts or {}).items():
            writer.write_texts(shards[index], table)
        for index in sorted({index for log in logs.values() for index in log}):
            mine = {draft: logs.get(draft, {}).get(index) for draft in run.manifest.drafts}
            known = {draft: run.positions(draft, index) if table is None else table for draft, table in mine.items()}
            writer.write_rows(shards[index], known)
        writer.finish(write_totals)
    run.manifest = writer.manifest
    return run


def altered(run: Run, times: pa.Table | None = None, **changes: Any) -> Run:
    """The run with other fields of its manifest, and other step times."""
    with RunWriter.opened(run.storage, resume=True) as writer:
        if times is not None:
            writer.write_table("latency.parquet", times, LATENCY_COLUMNS)
        writer.update(**changes)
    run.manifest = Run.open(run.storage).manifest
    return run


def signed(run: Run) -> Run:
    """The run with a manifest that names its files as they are now: what a test wrote by hand is what was written."""
    there = [name for name in run.manifest.files if (run.path / name).exists()]
    writer = RunWriter(run.path, run.manifest)
    writer.files = {name: File.of((run.path / name).read_bytes()) for name in there}
    writer.write_manifest(run.manifest)
    return Run.open(run.path)


def flipped(path: Path, bit: int) -> bytes:
    """The content of a file with one bit changed."""
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    return bytes(content)


def stored_totals(run: Run, draft: str) -> pd.DataFrame:
    """The totals of a draft as they are stored, with lists of the counts by depth under one name a gamma."""
    table = pa.concat_tables(blocks_of(run.totals(draft), run.rules))
    return pd.DataFrame([listed(row, run.gammas) for row in table.to_pylist()])


def listed(row: dict[str, Any], gammas: Sequence[int]) -> dict[str, Any]:
    """A row of totals with counts by depth as lists, accepted_depths_2 for accepted_2_1 and accepted_2_2; or None."""
    for gamma, name in itertools.product(gammas, DEPTH_COUNTS):
        values = [row[column] for column in depth_names(name, gamma)]
        row = row | {f"{name}_depths_{gamma}": None if None in values else values}
    return row


def contents(run: Run) -> dict[str, bytes]:
    """Every file of a run directory, to see that reading changes nothing."""
    return {str(path.relative_to(run.path)): path.read_bytes() for path in sorted(run.path.rglob("*")) if path.is_file()}


def interrupted(run: Run, target: Path, shards: int | None = None) -> Run:
    """A copy of a run as a kill leaves it: still running, without totals, with the first `shards` shards (default: all)."""
    shutil.copytree(run.path, target)
    shutil.rmtree(target / "totals")
    (target / "documents.parquet").unlink()
    with RunWriter.opened(target, resume=True) as writer:
        without_rows(writer, set(writer.journal["rows"]) - set(range(len(run.shards) if shards is None else shards)))
        writer.update(status="running")
    return Run.open(target)


def without_rows(writer: RunWriter, lost: Collection[int]) -> None:
    """Take back what the rows step has recorded of some shards."""
    for each in writer.journal.forget("rows", lost):
        writer.storage.put(*writer.journal.segment(*each))


def facts(name: str) -> ModelFacts:
    """Facts of a model that does not exist."""
    return ModelFacts(
        reference=f"synthetic/{name}",
        kind="model",
        architecture="Synthetic",
        fingerprint=hashlib.sha256(name.encode()).hexdigest(),
        dtype="bfloat16",
        device="cpu",
        parameters=1_000_000,
        context=None,
        vocabulary=VOCABULARY,
        eos=(EOS,),
        noise=0.125,
    )


def draft_facts(name: str) -> DraftFacts:
    """Facts of a draft model that does not exist."""
    return DraftFacts(**vars(facts(name)), has_distribution=True, has_steps=True)


def lookup_facts(name: str) -> DraftFacts:
    """Facts of a prompt lookup, whose proposals are drawn all the same."""
    lookup = {"has_distribution": False, "has_steps": False, "starts_matter": True}
    return dataclasses.replace(draft_facts(name), kind="prompt_lookup", settings={"max_ngram": 3}, **lookup)


def head_facts(name: str, depths: int, **more: Any) -> DraftFacts:
    """Facts of a head on the target's states that does not exist, and has one word less than the target."""
    head = {"kind": "eagle3", "starts_matter": True, "depths": depths, "reduced_vocabulary": True}
    head["reading"] = {"layers": "2, 3, 5", "ids from": "config.json"}
    return dataclasses.replace(draft_facts(name), **head | more)


def manifest(recipe: Recipe) -> Manifest:
    decision = {"rule": "auto", "draft": "auto", "gamma": "auto", "min_speedup": 1.1, "confidence": 0.95, "weights": None}
    decision |= {"concurrency": 1}
    return Manifest(
        status="running",
        alphaprof="0.1.0",
        created="2026-01-01T00:00:00+00:00",
        config={
            "target": {"model": "synthetic/target"},
            "drafts": {name: {"kind": "model", "model": f"synthetic/{name}"} for name in recipe.drafts}
            | {name: {"kind": "prompt_lookup"} for name in recipe.lookups}
            | {name: {"kind": "eagle3", "model": f"synthetic/{name}"} for name in recipe.heads},
            "data": [{"path": "synthetic.jsonl", "prompt": "{text}", "domain": {"column": "domain"}, "limit": None}],
            "rules": list(recipe.rules),
            "gammas": list(recipe.gammas),
            "costs": {"source": "measured", "context": 256, "repeats": 20},
            "decision": decision | dict(recipe.decision),
        },
        target=facts("target"),
        drafts={name: draft_facts(name) for name in recipe.drafts}
        | {name: lookup_facts(name) for name in recipe.lookups}
        | {name: head_facts(name, max(recipe.gammas), **more) for name, more in recipe.heads.items()},
        tokenizer="0" * 64,
        environment={"device": "cpu", "torch_threads": 1, "packages": {"transformers": "5.17.0"}},
        certified=recipe.log_rules.certified,
    )


def _documents(recipe: Recipe, rng: np.random.Generator) -> list[Document]:
    """The documents in corpus order: domains take turns."""
    sources = [*recipe.domains.items(), *recipe.sources]
    places = [(row, name, options) for name, options in sources for row in range(options.documents)]
    found = []
    for number, (row, name, options) in enumerate(sorted(places, key=lambda place: place[0])):
        length = int(rng.integers(options.shortest, options.longest + 1))
        if options.temperature is None:
            found.append(Document(number, name, options, row, length, rng.integers(3, VOCABULARY, length)))
            continue
        law = rng.dirichlet(np.full(len(WORDS), 0.4), length)
        drawn = np.array([rng.choice(WORDS, p=None if options.uniform else weights) for weights in law])
        found.append(Document(number, name, options, row, length, drawn, law))
    return found


def _write_shard(
    run: RunWriter, index: int, documents: Sequence[Document], recipe: Recipe, rng: np.random.Generator
) -> None:
    target = [_target_columns(document, rng) | _span_column(document, recipe, rng) for document in documents]
    logs = {}
    for draft, shift in recipe.drafts.items():
        parts = [columns | _draft_columns(one, columns, shift, rng) for one, columns in zip(documents, target, strict=True)]
        logs[draft] = _position_table(documents, parts, draft, recipe.log_rules)
    for draft in recipe.lookups:
        parts = [columns | _lookup_columns(one, columns, rng) for one, columns in zip(documents, target, strict=True)]
        logs[draft] = _position_table(documents, parts, draft, recipe.log_rules)
    for draft in recipe.heads:
        rules = run.log_of(draft)
        parts = [columns | _head_columns(one, columns, rules, rng) for one, columns in zip(documents, target, strict=True)]
        logs[draft] = _position_table(documents, parts, draft, rules)
    positions = sum(document.length for document in documents)
    digest = hashlib.sha256(str([document.number for document in documents]).encode()).hexdigest()
    shard = Shard(index, len(documents), positions, digest)
    run.write_texts(shard, continuation_table(documents))
    run.write_rows(shard, logs)


def _target_columns(document: Document, rng: np.random.Generator) -> dict[str, Array]:
    """The target's columns: on text of its own its top token is the token, except for one in fifty (numerical noise)."""
    if document.law is not None:
        return _sampled_target_columns(document, document.law)
    size = document.length
    agrees = rng.random(size) < (0.98 if document.options.on_policy else 0.5)
    top = rng.uniform(0.35, 1.0, size).astype(np.float32)
    second = (np.minimum(top, 1 - top) * rng.random(size)).astype(np.float32)
    return {
        "token": document.tokens,
        "target_top": np.where(agrees, document.tokens, _other(document.tokens)),
        "target_top_prob": top,
        "target_second_prob": second,
        "target_margin": top - second,
        "target_entropy": rng.exponential(1.0, (2, size))[0],  # twice as many, so that what follows stays what tests know
        "target_token_prob": np.where(agrees, top, second),
        "top": np.column_stack([top, second]),
    }


def _span_column(document: Document, recipe: Recipe, rng: np.random.Generator) -> dict[str, Array]:
    """Thinking up to a place that differs from text to text, then the answer."""
    if recipe.thinking is None:
        return {}
    end = int(document.length * recipe.thinking * rng.random())
    return {"span": np.where(np.arange(document.length) < end, "thinking", "answer")}


def _other(tokens: Array) -> Array:
    """Another token at each position."""
    return np.asarray((tokens + 1) % VOCABULARY)


def _draft_columns(document: Document, target: dict[str, Array], shift: float, rng: np.random.Generator) -> dict[str, Array]:
    """The draft's columns: its top token is the document's token with the document's own acceptance probability."""
    if document.law is not None:
        return _sampled_draft_columns(document, document.law, shift, rng)
    size, options = document.length, document.options
    alpha = np.clip(rng.normal(options.alpha, options.spread) + shift, 0.0, 1.0)
    right = _markov(rng.random(size), alpha, options.bursts)
    top = rng.uniform(0.35, 1.0, size).astype(np.float32)
    second = (np.minimum(top, 1 - top) * rng.random(size)).astype(np.float32)
    draft_top = np.where(right, document.tokens, _other(_other(document.tokens)))
    same = draft_top == target["target_top"]
    divergence = rng.exponential(0.3, size)
    return {
        "draft_top": draft_top,
        "draft_top_prob": top,
        "draft_margin": top - second,
        "draft_entropy": rng.exponential(1.0, size),
        "draft_token_prob": np.where(right, top, second),
        "target_prob_of_draft_top": np.where(same, target["target_top_prob"], 0.5 * target["target_second_prob"]),
        "target_rank_of_draft_top": np.where(same, 1, 3),
        "draft_rank_of_token": np.where(right, 1, 2),
        "overlap": rng.random(size),
        "kl_target_draft": divergence,
        "kl_draft_target": rng.exponential(0.3, size),
        "proposed": np.where(rng.random(size) < options.coverage, NO_LIMIT, 0),
    }


def _markov(lots: Array, mean: float, correlation: float) -> Array:
    """A stationary chain of hits with a mean and a correlation from one position to the next; 0: independent ones."""
    hits = lots < mean
    for place in range(1, len(lots)) if correlation else ():
        hits[place] = lots[place] < correlation * hits[place - 1] + (1 - correlation) * mean
    return np.asarray(hits)


def _sampled_target_columns(document: Document, p: Array) -> dict[str, Array]:
    """The target's columns from its whole distributions, on text that was drawn from them."""
    ordered, rows = np.sort(p, axis=1), np.arange(len(p))
    entropy = -(p * np.log(np.maximum(p, 1e-300))).sum(1)
    return {
        "token": document.tokens,
        "target_top": WORDS[p.argmax(1)],
        "target_top_prob": ordered[:, -1],
        "target_second_prob": ordered[:, -2],
        "target_margin": ordered[:, -1] - ordered[:, -2],
        "target_entropy": entropy,
        "target_token_prob": p[rows, document.tokens - WORDS[0]],
        "top": ordered[:, ::-1],
    }


def _sampled_draft_columns(document: Document, p: Array, shift: float, rng: np.random.Generator) -> dict[str, Array]:
    """The draft's columns likewise: it knows the target's distribution by the share that the domain's `alpha` says."""
    options = document.options
    known = np.clip(options.alpha + shift, 0.0, 1.0)
    q = known * p + (1 - known) * rng.dirichlet(np.full(len(WORDS), 0.4), len(p))
    ordered, rows = np.sort(q, axis=1), np.arange(len(p))
    top, token = q.argmax(1), document.tokens - WORDS[0]
    divergence = (p * np.log(np.maximum(p, 1e-300) / np.maximum(q, 1e-300))).sum(1)
    return {
        "q": q,
        "draft_top": WORDS[top],
        "draft_top_prob": ordered[:, -1],
        "draft_margin": ordered[:, -1] - ordered[:, -2],
        "draft_entropy": -(q * np.log(np.maximum(q, 1e-300))).sum(1),
        "draft_token_prob": q[rows, token],
        "target_prob_of_draft_top": p[rows, top],
        "target_rank_of_draft_top": 1 + (p > p[rows, top][:, None]).sum(1),
        "draft_rank_of_token": 1 + (q > q[rows, token][:, None]).sum(1),
        "overlap": np.minimum(p, q).sum(1),
        "kl_target_draft": np.maximum(divergence, 0),
        "kl_draft_target": np.maximum(divergence, 0),
        "proposed": np.where(rng.random(len(p)) < options.coverage, NO_LIMIT, 0),
    }


def _lookup_columns(document: Document, target: dict[str, Array], rng: np.random.Generator) -> dict[str, Array]:
    """Columns of a prompt lookup draft: half of the positions have a proposal, up to four tokens of which are right.

    On sampled text it proposes without a look at what was drawn, so that its first token is right as often as p says.
    """
    size = document.length
    proposed = np.where(rng.random(size) < 0.5, rng.integers(1, 9, size), 0)
    accepted = np.minimum(np.minimum(rng.integers(0, 5, size), proposed), size - np.arange(size))
    top = np.where(accepted > 0, document.tokens, _other(_other(document.tokens)))
    same = top == target["target_top"]
    known, rank = np.where(same, target["target_top_prob"], 0.5 * target["target_second_prob"]), np.where(same, 1, 3)
    if document.law is not None:
        place, rows = rng.integers(0, len(WORDS), size), np.arange(size)
        top, known = WORDS[place], document.law[rows, place]
        rank = 1 + (document.law > known[:, None]).sum(1)
        accepted = np.where(top == document.tokens, np.minimum(np.maximum(accepted, 1), proposed), 0)
    return {
        "draft_top": top,
        "target_prob_of_draft_top": known,
        "target_rank_of_draft_top": rank,
        "proposed": proposed,
        "accepted_run": accepted,
    }


def _head_columns(
    document: Document, target: dict[str, Array], rules: LogRules, rng: np.random.Generator
) -> dict[str, Array]:
    """Columns of a head: those of a draft at depth 1, and less and less right further into a round. It cannot propose every
    twelfth token.
    """
    token, size = document.tokens, document.length
    known = token % len(WORDS) != WORDS[-1] % len(WORDS)
    columns = _draft_columns(document, target, 0.0, rng)
    proposed = np.where(columns["proposed"] > 0, np.minimum(rules.depths, np.arange(size, 0, -1) + rules.depths // 2), 0)
    columns |= {"proposed": proposed, "in_draft_vocabulary": known}
    _forget_unknown(columns, document, target, known)
    agrees = [columns["draft_top"] == token]
    for depth in range(2, rules.depths + 1):
        begun = np.arange(size) - depth + 1
        drafted = (begun >= 0) & (proposed[np.maximum(begun, 0)] >= depth)
        deeper = _draft_columns(document, target, -0.05 * depth, rng)
        _forget_unknown(deeper, document, target, known)
        agrees.append(deeper["draft_top"] == token)
        chances = {"agrees": agrees[-1]}
        for rule in rules.drawn:
            of_text = document.law is not None
            p, q = target["target_token_prob"], deeper["draft_token_prob"]
            chances[f"accept_{rule}"] = deeper["overlap"] if of_text else np.full(size, -1.0)
            chances[f"emitted_{rule}"] = np.minimum(1.0, q / p) if of_text else np.full(size, -1.0)
        columns |= {f"{name}_{depth}": np.where(drafted, values, -1) for name, values in chances.items()}
        if rules.own_path:
            odds = np.where(proposed >= depth, rng.normal(0.4, 1.0, size), np.nan)
            columns[f"draft_log_odds_{depth}"] = odds if document.law is None else np.full(size, np.nan)
    stop = np.array([size])
    return columns | {"accepted_run": runs_by_depth(np.stack(agrees, 1), proposed, np.array([0]), stop)}


def _forget_unknown(columns: dict[str, Array], document: Document, target: dict[str, Array], known: Array) -> None:
    """Take what a head cannot propose out of its columns."""
    token = document.tokens
    if document.law is None:
        wrong = ~known & (columns["draft_top"] == token)
        top = np.where(wrong, _other(_other(token)), columns["draft_top"])
        same = top == target["target_top"]
        prob = np.where(same, target["target_top_prob"], 0.5 * target["target_second_prob"])
        columns |= {"draft_top": top, "target_prob_of_draft_top": prob, "target_rank_of_draft_top": np.where(same, 1, 3)}
        columns["draft_token_prob"] = np.where(known, columns["draft_token_prob"], 0.0)
        columns["draft_rank_of_token"] = np.where(known, columns["draft_rank_of_token"], 900)
    else:
        p, rows = document.law, np.arange(len(token))
        q = columns["q"].copy()
        q[:, -1] = 0.0
        q /= q.sum(1, keepdims=True)
        top = q.argmax(1)
        columns |= {"q": q, "draft_top": WORDS[top], "target_prob_of_draft_top": p[rows, top]}
        columns |= {"target_rank_of_draft_top": 1 + (p > p[rows, top][:, None]).sum(1)}
        columns |= {"draft_token_prob": q[rows, token - WORDS[0]], "overlap": np.minimum(p, q).sum(1)}
        columns["draft_rank_of_token"] = 1 + (q > q[rows, token - WORDS[0]][:, None]).sum(1)
    columns["kl_target_draft"] = np.full(len(token), np.inf)


def _position_table(
    documents: Sequence[Document], parts: Sequence[dict[str, Array]], draft: str, rules: LogRules
) -> pa.Table:
    lengths = [document.length for document in documents]
    names = [name for name in parts[0] if name not in ("top", "q")]
    data: dict[str, Array] = {name: np.concatenate([part[name] for part in parts]) for name in names}
    data["domain"] = np.repeat([document.domain for document in documents], lengths)
    data["document"] = np.repeat([document.number for document in documents], lengths)
    data["position"] = np.concatenate([np.arange(length) for length in lengths])
    greedy = [document.options.on_policy and document.options.temperature is None for document in documents]
    data["greedy"] = np.repeat(greedy, lengths)
    if rules.certified:
        top, entropy = _wide([part["top"] for part in parts]), data["target_entropy"]
        data |= Extras.of(rules.certified, certificates=True).thresholds(top, entropy, VOCABULARY)
    return log_table(data, rules, draft)


def log_table(data: dict[str, Array], rules: LogRules, draft: str) -> pa.Table:
    """A table of the log from columns by name: with what rules accept, and null where the draft has or proposes nothing."""
    size, declared = len(data["token"]), rules.columns
    nothing = np.full(size, np.nan)
    columns = dict.fromkeys(("overlap", "draft_token_prob", "draft_rank_of_token"), nothing) | data
    data = data | {f"accept_{rule.id}": rule.accept(columns) for rule in rules_of(list(rules.accepted))}
    silent = data["proposed"] == 0
    masks = {column.name: silent for column in declared if column.nullable and column.name != "span"}
    masks |= {column.name: np.isnan(data[column.name]) for column in declared if column.needs == OWN_PATH}
    masks |= {
        column.name: (data[column.name] < 0) | (silent & (column.needs == STARTS))
        for column in declared
        if column.needs in (STARTS, DEPTHS) and column.name in data
    }
    arrays = [
        pa.array(data[column.name], mask=masks.get(column.name)).cast(column.type)
        if column.name in data
        else pa.nulls(size, column.type)
        for column in declared
    ]
    return pa.Table.from_arrays(arrays, schema=arrow_schema(declared, draft=draft, rules=list(rules.accepted)))


def _wide(parts: Sequence[Array]) -> Array:
    """Largest probabilities of several documents as one array: as many columns as the narrowest has."""
    return np.concatenate([part[:, : min(part.shape[1] for part in parts)] for part in parts])


def continuation_table(documents: Sequence[Document], max_new_tokens: int | None = None) -> pa.Table:
    """The texts of documents. `max_new_tokens`: what they were allowed to have; None: what each has."""
    rows = [_row(document) | ({"max_new_tokens": max_new_tokens} if max_new_tokens else {}) for document in documents]
    return pa.Table.from_pylist(rows, schema=arrow_schema(CONTINUATION_COLUMNS))


def _row(document: Document) -> dict[str, Any]:
    options, number = document.options, document.number
    prompt = options.prompts[document.row] if options.prompts else f"prompt {number}"
    return {
        "document": number,
        "domain": document.domain,
        "cluster": options.clusters[document.row] if options.clusters else None,
        "source": 0,
        "source_row": document.row,
        "prompt_hash": hashlib.sha256(prompt.encode()).hexdigest(),
        "prompt_tokens": 8,
        "continuation_tokens": document.length,
        "finish": options.finish,
        "continuation": options.continuation,
        "on_policy": options.on_policy,
        "max_new_tokens": document.length,
        **({} if options.temperature is None else SETTINGS | {"temperature": options.temperature}),
        "prompt_ids": list(range(3, 11)),
        "continuation_ids": document.tokens,
    }


def latency(recipe: Recipe) -> pa.Table:
    longest = max(recipe.gammas) + 1
    steps = [("target", "decode" if n == 1 else "verify", n, 10 + recipe.extra_ms * (n - 1)) for n in range(1, longest + 1)]
    steps += [(draft, "draft", 1, recipe.draft_ms) for draft in (*recipe.drafts, *recipe.heads)]
    steps += [(draft, "lookup", 1, recipe.lookup_ms) for draft in recipe.lookups]
    rows = [
        {
            "model": model,
            "step": step,
            "tokens": tokens,
            "batch": 1,
            "context": 256,
            "median_ms": ms,
            "p10_ms": 0.9 * ms,
            "p90_ms": 1.2 * ms,
            "relative_error": recipe.timing_error,
            "repeats": 20,
            "rounds_ms": [],
        }
        for model, step, tokens, ms in steps
    ]
    return pa.Table.from_pylist(rows, schema=arrow_schema(LATENCY_COLUMNS))


def simulated_rounds(rng: np.random.Generator, alpha: Array, tokens: int, gamma: int) -> Array:
    """Rounds that documents of so many tokens take, by plain simulation; `alpha` and the result have the same shape."""
    left, rounds = np.full(alpha.shape, tokens), np.zeros(alpha.shape)
    while (left > 0).any():
        rounds += left > 0
        left = left - 1 - np.minimum(rng.geometric(1 - alpha) - 1, gamma)
    return rounds


def expected_rounds(alpha: Array, tokens: int, gamma: int) -> Array:
    """The expectation of `simulated_rounds`, by recursion over the tokens left."""
    shares = [(1 - alpha) * alpha**accepted for accepted in range(gamma)] + [alpha**gamma]
    found = [np.zeros(alpha.shape)]
    for left in range(1, tokens + 1):
        found.append(1 + sum(share * found[max(0, left - 1 - accepted)] for accepted, share in enumerate(shares)))
    return np.asarray(found[tokens])


def drawn_alphas(rng: np.random.Generator, shape: tuple[int, ...], mean: float = 0.65, spread: float = 0.15) -> Array:
    """Acceptance probabilities of documents: normal, cut to [0.05, 0.98] by drawing again."""
    return np.asarray(alpha_law(mean, spread).ppf(rng.random(shape)))


def alpha_law(mean: float = 0.65, spread: float = 0.15) -> Any:
    """The law of `drawn_alphas`."""
    from scipy import stats  # here, because it looks for torch among the loaded modules

    return stats.truncnorm((0.05 - mean) / spread, (0.98 - mean) / spread, mean, spread)
