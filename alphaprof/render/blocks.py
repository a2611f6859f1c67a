"""Every answer is made of blocks: headings, lines, tables, footnotes and figures. Terminal, Markdown and HTML draw them,
each in one place; blocks hold text, and compute nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from alphaprof.render import format as fmt

Row = tuple[str, Mapping[str, str]]  # its name, and its cells by heading: text, `fmt.Number`, `Verdict` or `Named`


@dataclass(frozen=True, kw_only=True)
class OfText:
    """What concerns one kind of text of a domain."""

    domain: str
    continuation: str  # how the text came about
    sampling: dict[str, float] | None  # settings that p was processed with, q by draft_processing; None: the plain softmax


@dataclass(frozen=True, kw_only=True)
class OfOneText(OfText):
    """What a row says of one kind of text."""

    on_policy: bool  # the rule's own decoding would emit this text; without a rule: the target's own


Item = TypeVar("Item", bound=OfOneText)


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
    wrapped: Collection[str] = ()  # columns of long words, which go on in the next line
    marked: Collection[str] = ()  # names of rows that stand out
    footer: Sequence[Row] = ()
    below: Sequence[str] = ()
    draft: str | None = None  # that it is about: the page hides it with that


@dataclass(frozen=True)
class Heading:
    """The heading of a part of an answer, with the part's name if it can be asked for by that."""

    title: str
    name: str = ""


@dataclass(frozen=True)
class Small:
    """A footnote: what a column means, or what is not promised."""

    text: str


@dataclass(frozen=True)
class Figure:
    """A figure of `render/html/figures.py` on the HTML page, unless it has no data; terminal and Markdown leave it out."""

    name: str


GOOD, BAD, UNSURE = "go", "no-go", "undecided"  # classes of the page, too
OUTCOMES = {
    "GO": GOOD,
    "NO-GO": BAD,
    "UNDECIDED": UNSURE,
    "PASS": GOOD,
    "FAIL": BAD,
    "WITHIN": GOOD,
    "OUTSIDE": BAD,
    "TOO NOISY TO TELL": UNSURE,
    "NOT PREDICTED": BAD,
    "AS PREDICTED": GOOD,
    "DIFFERS": BAD,
    "TOO FEW ROUNDS": UNSURE,
    "TOO FEW DOCUMENTS": UNSURE,
    "KEEP": GOOD,
    "RETRAIN": BAD,
    "TURN OFF": BAD,
    "ok": GOOD,
    "problem": BAD,
    "note": UNSURE,
}


class Verdict(str):
    """A verdict, an outcome or a note, as a cell or at the beginning of a line: text whose first `word` stands out."""

    word: str

    def __new__(cls, word: str, rest: str = "") -> Verdict:
        """Return a word of `OUTCOMES`, and what follows it."""
        found = super().__new__(cls, word + rest)
        found.word = word
        return found

    @property
    def kind(self) -> str:
        """Return whether it is good, bad or unsure."""
        return OUTCOMES[self.word]


class Named(str):
    """A cell that begins with a `name`, which drawers may cut; what follows it stays whole: a number cut is another one."""

    name: str

    def __new__(cls, name: str, value: str) -> Named:
        """Return a name, and the text of its value behind it."""
        found = super().__new__(cls, name + value)
        found.name = name
        return found


class Command(str):
    """A line to paste into a shell, which is never broken."""


# A str is a line: leading spaces indent it, an empty one sets apart.
Block = Table | Small | Figure | Heading | str


def table_of(
    title: str,
    items: Sequence[Item],
    columns: Mapping[str, Callable[[Item], str]],
    *,
    among: Sequence[OfText] | None = None,
    left: Collection[str] = (),
    below: Sequence[str] = (),
) -> Iterator[Table]:
    """Yield a table with a row an item, nothing if there are none: by its heading, each column writes an item as a cell.
    Items are named by their text `among` others (default: the items).
    """
    if items:
        names = text_names(items, items if among is None else among)
        cells = ({heading: cell(item) for heading, cell in columns.items()} for item in items)
        draft = getattr(items[0], "draft", None)  # the target alone has none
        yield Table(title, tuple(columns), list(zip(names, cells, strict=True)), left=left, below=below, draft=draft)


def table_by_columns(title: str, rows: Sequence[Row], **about: Any) -> Table:
    """Return a table of rows whose cells name its columns, in the order in which they come; `about`: its other fields."""
    return Table(title, tuple(dict.fromkeys(heading for _, cells in rows for heading in cells)), rows, **about)


def text_names(items: Sequence[OfOneText], among: Sequence[OfText]) -> list[str]:
    """Name the text of each item, marked if it is off-policy."""
    return [text_name(item, among, not item.on_policy) for item in items]


def text_name(item: OfText, items: Iterable[OfText], off_policy: bool = False) -> str:
    """Name the text of one of several items: the domain, with the kind of text if the domain has several among them, and
    if it is to be marked as off-policy. Of sampling settings the temperature is named, and what else differs there.
    """
    same = [other for other in items if other.domain == item.domain]
    several = len({(other.continuation, str(other.sampling)) for other in same}) > 1
    if not several and not off_policy:
        return fmt.short(item.domain)
    kind = item.continuation
    if several and item.sampling is not None:
        settings = [other.sampling for other in same if other.sampling is not None]
        differing = [name for name in item.sampling if len({each[name] for each in settings}) > 1 and name != "temperature"]
        kind += f" at {item.sampling['temperature']:g}"
        kind += "".join(f", {name} {item.sampling[name]:g}" for name in differing)
    return f"{fmt.short(item.domain)} ({kind}{', off-policy' if off_policy else ''})"


def table_of_rows(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], **about: Any) -> Table:
    """Return a table from the cells of each row below their headings, the row's name first; `about`: its other fields."""
    named, *columns = headings
    return Table(title, columns, [(name, dict(zip(columns, cells, strict=True))) for name, *cells in rows], named, **about)
