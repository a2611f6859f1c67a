"""A section is made of tables and lines. Terminal, Markdown and page draw them; they hold text, and compute nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from alphaprof.render import wording
from alphaprof.report.model import Result
from alphaprof.report.sections.attribution import Attribution
from alphaprof.report.sections.certificates import Certificate, LosslessBounds
from alphaprof.report.sections.predictability import Predictability
from alphaprof.report.sections.vocabulary import VocabularyCoverage

Row = tuple[str, Mapping[str, str]]  # its name, and its cells by heading
Named = Attribution | Certificate | LosslessBounds | Predictability | Result | VocabularyCoverage
Item = TypeVar("Item", Attribution, LosslessBounds, Predictability, Result, VocabularyCoverage)


@dataclass(frozen=True)
class Table:
    """A table below its title: rows by name, a `footer` of further rows below a line, and lines `below` the table.

    A cell that a row lacks is empty. A line break in a heading or cell is kept; an interval may go below its value.
    """

    title: str
    columns: Sequence[str]  # headings
    rows: Sequence[Row]
    named: str = "domain"  # heading of the names
    left: Collection[str] = ()  # columns that hold words
    footer: Sequence[Row] = ()
    below: Sequence[str] = ()
    draft: str | None = None  # that it is about: the page hides it with that


Block = Table | str  # a str is a line; leading spaces indent all of it, and an empty one sets apart


def table_of(
    title: str,
    items: Sequence[Item],
    columns: Mapping[str, Callable[[Item], str]],
    *,
    among: Sequence[wording.OfText] | None = None,
    left: Collection[str] = (),
    below: Sequence[str] = (),
) -> Iterator[Table]:
    """Yields a table with a row an item, nothing where there are none: by its heading, each column writes an item as a cell.
    Items are named by their text `among` others (default: the items).
    """
    if items:
        names = text_names(items, items if among is None else among)
        cells = ({heading: cell(item) for heading, cell in columns.items()} for item in items)
        draft = getattr(items[0], "draft", None)  # the target alone has none
        yield Table(title, tuple(columns), list(zip(names, cells, strict=True)), left=left, below=below, draft=draft)


def table_by_columns(
    title: str,
    rows: Sequence[Row],
    *,
    named: str = "domain",
    footer: Sequence[Row] = (),
    below: Sequence[str] = (),
    draft: str | None = None,
) -> Table:
    """Returns a table of rows whose cells name its columns, in the order in which they come."""
    columns = dict.fromkeys(heading for _, cells in rows for heading in cells)
    return Table(title, tuple(columns), rows, named, footer=footer, below=below, draft=draft)


def text_names(items: Sequence[Named], among: Sequence[wording.OfText]) -> list[str]:
    """Names the text of each item, marked where it is off-policy."""
    return [wording.text_name(item, among, not item.on_policy) for item in items]
