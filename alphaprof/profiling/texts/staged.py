"""Documents as tables: what is read and tokenised once is measured by any process later."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from alphaprof.log.run import Run
from alphaprof.log.schema import PROMPT_COLUMNS, arrow_schema
from alphaprof.profiling.models.processing import PLAIN, Processing
from alphaprof.profiling.texts.corpus import Document

# Fields of a document that tables hold under the same names.
STORED = ("document", "domain", "cluster", "time", "source", "source_row", "max_new_tokens", "on_policy", "seed")


def stored(document: Document) -> dict[str, Any]:
    """What the tables of prompts and of continuations both hold of a document."""
    return {
        **{name: getattr(document, name) for name in STORED},
        **{name: getattr(document.processing, name, None) for name in vars(PLAIN)},
        "continuation": document.kind,
        "prompt_ids": document.prompt,
    }


def prompt_table(documents: Sequence[Document]) -> pa.Table:
    """Rows of the prompts table, one a document."""
    rows = [{**stored(document), "cut": document.cut, "given_ids": document.given} for document in documents]
    return pa.Table.from_pylist(rows, schema=arrow_schema(PROMPT_COLUMNS))


def documents_of(table: pa.Table) -> Iterator[Document]:
    """Yields the documents of rows of the prompts table."""
    for row in table.to_pylist():
        yield document_of(row, row["given_ids"], row["cut"])


def document_of(row: Mapping[str, Any], given: Sequence[int] | None, cut: bool) -> Document:
    """The document of a row of either table."""
    drawn = row["temperature"] is not None
    return Document(
        **{name: row[name] for name in STORED},
        prompt=np.array(row["prompt_ids"], dtype=np.int32),
        given=None if given is None else np.array(given, dtype=np.int32),
        cut=cut,
        kind=row["continuation"],
        processing=Processing(**{name: row[name] for name in vars(PLAIN)}) if drawn else None,
    )


class Staged:
    """Stands in for a `Corpus`: the documents of a run as they were staged."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.skipped = run.manifest.skipped
        self.truncated = run.manifest.truncated

    def __iter__(self) -> Iterator[Document]:
        """The documents, in order."""
        for index in range(len(self.run.manifest.staged)):
            yield from documents_of(self.run.prompts(index))
