"""Parts of the totals: which shards each file covers, and how its rules and columns are written and read.

`part-00012.parquet` covers shard 12, `part-00000-00255.parquet` shards 0 to 255. Rows are sorted by rule, a row group each,
and by document, so that a report decodes the rules and columns that it asks for and nothing else.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from alphaprof.log.manifest import Shard

NAME = re.compile(r"part-(\d{5,})(?:-(\d{5,}))?\.parquet")
ENOUGH = 32_768  # documents that a file has at least, where there are as many


@dataclass(frozen=True)
class Part:
    """One file, and the first and the last shard that it covers."""

    path: Path
    first: int
    last: int

    @cached_property
    def metadata(self) -> pq.FileMetaData:
        """The footer, which tells of hundreds of columns and takes longer to read than a few of them."""
        return pq.read_metadata(self.path)

    def read(self, rules: Collection[str] | None = None, columns: Sequence[str] | None = None) -> pa.Table:
        """Rows of some rules and some columns (None: all)."""
        place = self.metadata.schema.names.index("rule")
        needed = None if columns is None else list(dict.fromkeys([*columns, "rule"]))
        told = [self.metadata.row_group(group).column(place) for group in range(self.metadata.num_row_groups)]
        groups = [group for group, column in enumerate(told) if rules is None or _may_hold(column, rules)]
        file = pq.ParquetFile(self.path, metadata=self.metadata, page_checksum_verification=True)
        table = file.read_row_groups(groups, columns=needed)
        if rules is not None and not all(_holds_one(told[group]) for group in groups):
            table = table.filter(pc.is_in(table["rule"].cast(pa.string()), pa.array(list(rules), pa.string())))
        return table if columns is None else table.select(columns)


def part_name(first: int, last: int) -> str:
    """The name of a file that covers shards from `first` to `last`; names sort as shards do."""
    return f"part-{first:05d}.parquet" if first == last else f"part-{first:05d}-{last:05d}.parquet"


def parts_in(folder: Path) -> list[Part]:
    """All parts in a folder, in the order of their shards; of those that start together the widest first."""
    names = [(path, NAME.fullmatch(path.name)) for path in (folder.iterdir() if folder.is_dir() else ())]
    found = [Part(path, int(name[1]), int(name[2] or name[1])) for path, name in names if name]
    return sorted(found, key=lambda part: (part.first, -part.last))


def readable(parts: Sequence[Part], shards: int) -> list[Part]:
    """Of parts in order those to read: nothing beyond the first `shards`, and no shard twice.

    A process that was killed just after it had joined several files leaves them beside the one that covers them all.
    """
    found: list[Part] = []
    for part in parts:
        if part.last < shards and not (found and part.first <= found[-1].last):
            found.append(part)
    return found


def remove_parts(folders: Sequence[Path], first: int) -> None:
    """Remove the files of shards from `first` on."""
    for part in itertools.chain.from_iterable(map(parts_in, folders)):
        if part.last >= first:
            part.path.unlink(missing_ok=True)


def ranges(shards: Sequence[Shard], complete: bool) -> Iterator[tuple[int, int]]:
    """The shards that files should cover, (first, last) each: those of `ENOUGH` documents together, whether the run goes on
    or not; the last ones together once it is complete, and one by one before.
    """
    first = documents = 0
    for shard in shards:
        documents += shard.documents
        if documents >= ENOUGH or (complete and shard.index == len(shards) - 1):
            yield first, shard.index
            first, documents = shard.index + 1, 0
    yield from ((index, index) for index in range(first, len(shards)))


def write_part(path: Path, table: pa.Table) -> None:
    """Write rows that are sorted by rule, a row group a rule; no rows, no row group."""
    split = [field.name for field in table.schema if pa.types.is_floating(field.type)]
    options = {
        "compression": "lz4",  # a third larger than zstd, and read in two thirds of the time
        "use_dictionary": [field.name for field in table.schema if field.name not in ("document", *split)],
        "write_statistics": ["rule"],  # of hundreds of columns they are half of what is read first
        "column_encoding": dict.fromkeys(split, "BYTE_STREAM_SPLIT") | {"document": "DELTA_BINARY_PACKED"},
        "write_page_checksum": True,
    }
    rules = table["rule"].cast(pa.string()).to_numpy()
    bounds = [0, *(np.flatnonzero(rules[1:] != rules[:-1]) + 1).tolist(), len(rules)] if len(rules) else []
    with pq.ParquetWriter(path, table.schema, **options) as writer:
        for start, stop in itertools.pairwise(bounds):
            writer.write_table(table.slice(start, stop - start), row_group_size=stop - start)


def of_rule(table: pa.Table, rule: str) -> pa.Table:
    """The rows of one rule: often all of them, as dictionaries tell without a look at the rows."""
    if all(chunk.dictionary.to_pylist() == [rule] for chunk in table["rule"].chunks):
        return table
    return table.filter(pc.equal(table["rule"].cast(pa.string()), rule))


def _may_hold(column: pq.ColumnChunkMetaData, rules: Collection[str]) -> bool:
    """Whether a row group has rows of some rules, as far as the statistics of the column of rules tell."""
    statistics = column.statistics
    if statistics is None or not statistics.has_min_max:
        return True
    return any(statistics.min <= rule <= statistics.max for rule in rules)


def _holds_one(column: pq.ColumnChunkMetaData) -> bool:
    """Whether a row group surely has rows of one rule alone, which then is one of those that it may hold rows of."""
    statistics = column.statistics
    return bool(statistics is not None and statistics.has_min_max and statistics.min == statistics.max)
