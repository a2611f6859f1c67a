"""A run of any size without models, to measure what reads it: drawn columns, through the schema and the store's own writer.

    python scripts/synthetic_log.py RUN --positions 1000000 [--lookup] [--kind sampled]
    python scripts/synthetic_log.py RUN --documents 400000        # documents, totals and step times: no position log

Texts have up to 256 tokens; one in twenty ends early, with EOS. Acceptance comes in runs, and differs from document to
document and from domain to domain. Continuous columns have full float32 mantissas and ids follow Zipf's law, so that files
are as large as real ones. After 64 shards tables come again under other document numbers.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

sys.path.insert(0, str(Path(__file__).parent.parent))


from alphaprof.rules import DEFAULT_RULES
from alphaprof.run.manifest import Shard
from alphaprof.run.reader import Run
from alphaprof.run.schema import DOCUMENT_COLUMNS, LATENCY_COLUMNS, PROMPT_COLUMNS, arrow_schema
from alphaprof.run.writer import RunWriter
from alphaprof.totals.count import TotalsRequest
from alphaprof.totals.files import read_totals, write_totals
from tests.synthetic import Document, Domain, Recipe, continuation_table, latency, log_table, manifest

Array = np.ndarray[Any, Any]
VOCABULARY, EOS, LONGEST = 49_152, 2, 256
DOMAINS = {"code": 0.85, "chat": 0.55, "math": 0.75, "stories": 0.5, "extraction": 0.9, "translation": 0.65}
KINDS = {"greedy": (None,), "sampled": (0.8,), "mixed": (None, 0.8)}  # temperatures, in turn from domain to domain
DISTINCT = 64  # shards that are drawn
DIGEST = "0" * 32


@dataclass(frozen=True)
class Size:
    """What is written: `documents` in shards of `shard`, texts of a `kind`; `lookup`: prompt lookup as a second draft."""

    documents: int
    shard: int = 64
    kind: str = "mixed"
    lookup: bool = False
    seed: int = 0

    @classmethod
    def of(cls, positions: int, **options: Any) -> Size:
        """As many documents as have about `positions` positions."""
        return cls(max(1, round(positions / (0.95 * LONGEST + 0.05 * (20 + LONGEST) / 2))), **options)

    @property
    def recipe(self) -> Recipe:
        """What the manifest and the step times say."""
        domains = {
            name: Domain(alpha=alpha, temperature=temperature, continuation="sampled" if temperature else "greedy")
            for (name, alpha), temperature in zip(DOMAINS.items(), itertools.cycle(KINDS[self.kind]), strict=False)
        }
        lookups = ["ngram"] if self.lookup else []
        return Recipe(domains, {"small": 0.0}, range(1, 9), rules=DEFAULT_RULES, lookups=lookups, shard_documents=self.shard)

    @property
    def shards(self) -> list[tuple[int, int]]:
        """The first document of each shard, and how many it has."""
        return [(first, min(self.shard, self.documents - first)) for first in range(0, self.documents, self.shard)]


@dataclass(frozen=True)
class Drawn:
    """One shard: its documents, their lengths, and the position log of each draft."""

    documents: pa.Table
    lengths: Array
    logs: dict[str, pa.Table]


def write_log(path: Path, size: Size) -> Run:
    """A complete run in `path`."""
    base: list[Drawn] = []
    with RunWriter.opened(path) as run:
        for index, (first, count) in enumerate(size.shards):
            if index < DISTINCT:
                base.append(_drawn(size, index))
            run.stage(_prompts(_texts(base[index % len(base)], first, count)), DIGEST)
        _begin(run, size)
        for index, (first, count) in enumerate(size.shards):
            drawn = base[index % len(base)]
            shard = _shard(drawn, index, count)
            run.write_texts(shard, _texts(drawn, first, count))
            run.write_rows(
                shard, {draft: _numbered(log.slice(0, shard.positions), first) for draft, log in drawn.logs.items()}
            )
        run.finish(write_totals)
    return Run.open(path)


def write_many(path: Path, size: Size) -> Run:
    """A complete run in `path` without a position log: documents, totals and step times of many documents."""
    small = dataclasses.replace(size, documents=min(size.documents, DISTINCT * size.shard))
    source = write_log(path.with_name(f"{path.name}-base"), small)
    request, size = TotalsRequest(source.rules, source.gammas), dataclasses.replace(size, shard=small.documents)
    drawn = Drawn(source.documents(), source.documents()["continuation_tokens"].to_numpy(), {})
    shards = tuple(_shard(drawn, index, count) for index, (_, count) in enumerate(size.shards))
    with RunWriter.opened(path) as run:
        _begin(run, size)
        run.write_table(
            "documents.parquet", pa.concat_tables(_texts(drawn, *each) for each in size.shards), DOCUMENT_COLUMNS
        )
        for draft in source.manifest.drafts:
            totals = read_totals(source, draft, request)
            kept = [totals.filter(pc.less(totals["document"], count)) for _, count in size.shards]
            run.write_totals(draft, ([_numbered(rows, first)] for rows, (first, _) in zip(kept, size.shards, strict=True)))
        run.write_manifest(dataclasses.replace(run.manifest, status="complete", shards=shards))
    return Run.open(path)


def _begin(run: RunWriter, size: Size) -> None:
    facts = manifest(size.recipe)
    run.begin(dataclasses.replace(facts, target=dataclasses.replace(facts.target, vocabulary=VOCABULARY)))
    run.write_table("latency.parquet", latency(size.recipe), LATENCY_COLUMNS)
    run.update()


def _numbered(table: pa.Table, first: int) -> pa.Table:
    """The table with the numbers of its documents, which count from 0, starting at `first`."""
    place = table.schema.get_field_index("document")
    return table.set_column(place, table.schema.field(place), pc.add(table["document"], first))


def _texts(drawn: Drawn, first: int, count: int) -> pa.Table:
    """The documents of a shard, with numbers from `first` on and prompts of their own."""
    table = _numbered(drawn.documents.slice(0, count), first)
    hashes = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(first, first + count)]
    return table.set_column(table.schema.get_field_index("prompt_hash"), table.schema.field("prompt_hash"), [hashes])


def _prompts(texts: pa.Table) -> pa.Table:
    """The documents of a shard as they are staged."""
    rows = [row | {"cut": False, "given_ids": None} for row in texts.to_pylist()]
    return pa.Table.from_pylist(rows, schema=arrow_schema(PROMPT_COLUMNS))


def _shard(drawn: Drawn, index: int, count: int) -> Shard:
    return Shard(index, count, int(drawn.lengths[:count].sum()), DIGEST)


def _drawn(size: Size, index: int) -> Drawn:
    rng = np.random.default_rng([size.seed, index])
    options = list(size.recipe.domains.items())
    turns = [options[(index * size.shard + place) % len(options)] for place in range(size.shard)]
    ended = rng.random(size.shard) < 0.05
    lengths = np.where(ended, rng.integers(20, LONGEST, size.shard), LONGEST)
    greedy = np.array([domain.temperature is None for _, domain in turns])
    mask = np.arange(LONGEST) < lengths[:, None]
    common = {
        "domain": np.repeat([name for name, _ in turns], lengths),
        "document": np.repeat(np.arange(size.shard), lengths),
        "position": np.nonzero(mask)[1],
        "greedy": np.repeat(greedy, lengths),
    } | _target(rng, np.repeat(greedy, lengths))
    end = (np.cumsum(lengths) - 1)[ended]
    common["token"][end] = EOS
    for place, name in enumerate(("target_top", "second")):  # whichever of them was drawn is EOS too
        common[name][end] = np.where(common["drawn"][end] == place, EOS, common[name][end])
    alpha = np.array([np.clip(rng.normal(domain.alpha, 0.1), 0.05, 0.97) for _, domain in turns])
    hits = _bursts(rng, alpha)[mask]
    left = np.repeat(lengths, lengths) - common["position"]
    made = {"small": common | _model(rng, common, hits)}
    if size.lookup:
        made["ngram"] = common | _lookup(rng, common, _bursts(rng, alpha)[mask], left)
    documents = _documents(turns, lengths, ended, common["token"])
    return Drawn(documents, lengths, {draft: log_table(data, size.recipe.log_rules, draft) for draft, data in made.items()})


def _zipf(rng: np.random.Generator, count: int) -> Array:
    """Ids whose frequency falls as one over their rank; which id has which rank is the same everywhere."""
    order = np.random.default_rng(7).permutation(VOCABULARY)
    return np.asarray(order[np.minimum(np.exp(rng.random(count) * np.log(VOCABULARY + 1)).astype(int), VOCABULARY) - 1])


def _bursts(rng: np.random.Generator, mean: Array, correlation: float = 0.4) -> Array:
    """Chains of hits [documents, LONGEST] with a mean each, correlated from one position to the next."""
    lots = rng.random((len(mean), LONGEST))
    hits = lots < mean[:, None]
    for place in range(1, LONGEST):
        hits[:, place] = lots[:, place] < correlation * hits[:, place - 1] + (1 - correlation) * mean
    return hits


def _target(rng: np.random.Generator, greedy: Array) -> dict[str, Array]:
    """The target's columns. `p`: its probabilities of the top token, the second one and all others, [positions, 3]."""
    count = len(greedy)
    p = _simplex(rng, count)
    drawn = np.where(greedy, rng.random(count) > 0.999, (rng.random(count)[:, None] > p.cumsum(1)).sum(1))
    ids = np.stack([_zipf(rng, count) for _ in range(3)])
    share = rng.random(count)  # of the others, the token's, in p and q alike
    entropy = -(p * np.log(p)).sum(1) + p[:, 2] * rng.exponential(2.0, count)
    return {
        "p": p,
        "drawn": drawn,
        "second": ids[1],
        "share": share,
        "token": np.take_along_axis(ids, drawn[None], 0)[0],
        "target_top": ids[0],
        "target_top_prob": p[:, 0],
        "target_second_prob": p[:, 1],
        "target_margin": p[:, 0] - p[:, 1],
        "target_entropy": entropy,
        "target_token_prob": _of_token(p, drawn, share),
    }


def _simplex(rng: np.random.Generator, count: int) -> Array:
    """Probabilities of the top token, the second one and all others, [count, 3]."""
    top = 1 - 0.9 * rng.random(count) ** 2
    second = np.minimum(top, (1 - top) * rng.uniform(0.2, 0.95, count))
    return np.stack([top, second, 1 - top - second], axis=1)


def _of_token(p: Array, drawn: Array, share: Array) -> Array:
    """The probability of the token under `p` [positions, 3]."""
    return np.asarray(np.take_along_axis(p, drawn[:, None], 1)[:, 0] * np.where(drawn == 2, share, 1.0))


def _model(rng: np.random.Generator, target: dict[str, Array], hits: Array) -> dict[str, Array]:
    """Columns of a draft that is a model: where it hits, its two top tokens are in the target's order."""
    p = target["p"]
    strange = _simplex(rng, len(hits))
    weight = np.where(hits, 0.3, 0.8)[:, None] * rng.random((len(hits), 1))
    q = (1 - weight) * p + weight * strange
    first, second = q[:, :2].max(1), q[:, :2].min(1)
    q[:, 0], q[:, 1] = np.where(hits, first, second), np.where(hits, second, first)
    kl, back = ((x * np.log(x / y)).sum(1).clip(0) for x, y in ((p, q), (q, p)))
    ranks = 2 + np.exp(rng.exponential(1.2, len(hits))).astype(int)
    found = _proposal(rng, target, hits) | {
        "draft_top_prob": first,
        "draft_margin": first - second,
        "draft_entropy": -(q * np.log(q)).sum(1) + q[:, 2] * rng.exponential(2.0, len(hits)),
        "draft_token_prob": _of_token(q, target["drawn"], target["share"]),
        "overlap": np.minimum(p, q).sum(1),
        "kl_target_draft": kl,
        "kl_draft_target": back,
        "proposed": np.full(len(hits), LONGEST),
    }
    return found | {"draft_rank_of_token": np.where(found["draft_top"] == target["token"], 1, ranks)}


def _lookup(rng: np.random.Generator, target: dict[str, Array], hits: Array, left: Array) -> dict[str, Array]:
    """Columns of prompt lookup: half of the positions have a proposal of up to ten tokens."""
    proposed = np.where(rng.random(len(hits)) < 0.5, rng.integers(1, 11, len(hits)), 0)
    found = _proposal(rng, target, hits)
    most = np.minimum(np.minimum(rng.geometric(0.35, len(hits)), proposed), left)
    accepted = np.where(found["draft_top"] == target["token"], most, 0)
    return found | {"proposed": proposed, "accepted_run": accepted}


def _proposal(rng: np.random.Generator, target: dict[str, Array], hits: Array) -> dict[str, Array]:
    """The target's top token, or its second one, whose rank is drawn for files as large as real ones."""
    ranks = 2 + np.exp(rng.exponential(1.2, len(hits))).astype(int)
    return {
        "draft_top": np.where(hits, target["target_top"], target["second"]),
        "target_prob_of_draft_top": np.where(hits, target["p"][:, 0], target["p"][:, 1]),
        "target_rank_of_draft_top": np.where(hits, 1, ranks),
    }


def _documents(turns: list[tuple[str, Domain]], lengths: Array, ended: Array, tokens: Array) -> pa.Table:
    texts = np.split(tokens, np.cumsum(lengths)[:-1])
    documents = [
        Document(
            place, name, dataclasses.replace(domain, finish="eos" if ended[place] else "length"), place, len(text), text
        )
        for place, ((name, domain), text) in enumerate(zip(turns, texts, strict=True))
    ]
    return continuation_table(documents, LONGEST)


def main() -> None:
    """Write a run."""
    parser = argparse.ArgumentParser(description="Write a run of any size without models.")
    parser.add_argument("run", type=Path)
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--positions", type=int, help="number of positions, with their log")
    size.add_argument("--documents", type=int, help="number of documents, with totals and without a log")
    parser.add_argument("--kind", choices=KINDS, default="mixed", help="how the texts were written")
    parser.add_argument("--lookup", action="store_true", help="prompt lookup as a second draft")
    given = parser.parse_args()
    options = {"kind": given.kind, "lookup": given.lookup}
    if given.positions:
        write_log(given.run, Size.of(given.positions, **options))
    else:
        write_many(given.run, Size(given.documents, **options))


if __name__ == "__main__":
    main()
