"""How text is written in Markdown: untrusted text means nothing but itself, and a verdict has its sign."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from alphaprof.render.blocks import BAD, GOOD, UNSURE, Block, Figure, Heading, Small, Table, Verdict
from alphaprof.render.format import sentence, short, visible

SYMBOLS = re.compile(r"([\\`*_{}\[\]()#+\-.!|~>@:$])")
SYMBOLS_IN_SENTENCES = re.compile(r"([\\`*_{}\[\]#|~>@$])")
LINKS = re.compile(r"(?i)://|\bwww\.|:(?=[^\s:]+:)")  # what a page of Markdown makes a link or an emoji of by itself
SIGNS = {GOOD: "✅", BAD: "❌", UNSURE: "❔"}


def escaped(text: str) -> str:
    """Untrusted text as Markdown that means nothing but itself: no markup, HTML, mentions, links or line breaks."""
    return _neutral(SYMBOLS, short(text))


def escaped_sentence(text: str) -> str:
    """Return a sentence of ours that may quote names: escaped whole, but for what sentences are made of. An address in a
    name does not become a link, nor a code an emoji.
    """
    return LINKS.sub(lambda found: SYMBOLS.sub(r"\\\1", found[0]), _neutral(SYMBOLS_IN_SENTENCES, text))


def signed(text: str) -> str:
    """Return a sentence; an outcome has its sign before it."""
    return (f"{SIGNS[text.kind]} " if isinstance(text, Verdict) else "") + escaped_sentence(text)


def _neutral(symbols: re.Pattern[str], text: str) -> str:
    return symbols.sub(r"\\\1", visible(text)).replace("&", "&amp;").replace("<", "&lt;")


def text(blocks: Iterable[Block]) -> str:
    """Return an answer as Markdown: its first line as a heading with the outcome's sign, then its other blocks."""
    first, *others = blocks
    assert isinstance(first, str)  # noqa: S101  every answer begins with a line
    lines = [f"## {signed(first)}", ""]
    return "\n".join([*lines, *block_lines(others)]).rstrip() + "\n"


def row(*cells: str) -> str:
    """Return a row of a table."""
    return f"| {' | '.join(cells)} |"


def block_lines(blocks: Iterable[Block]) -> Iterator[str]:
    """Yield the lines of blocks: tables below their titles, and lists of the lines between them, indented as these are."""
    item = False
    for block in blocks:
        if isinstance(block, Figure):
            continue
        if isinstance(block, Heading):
            yield from (*([""] if item else []), f"### {escaped_sentence(sentence(block.title))}", "")
            item = False
            continue
        if isinstance(block, Small):
            block = block.text
        if item and (isinstance(block, Table) or not block):
            yield ""
        if isinstance(block, Table):
            yield from (f"**{escaped_sentence(block.title)}**", "", *table_lines(block))
        elif block:
            yield f"{'  ' if item and block.startswith(' ') else ''}- {escaped_sentence(block.strip())}"
        item = isinstance(block, str) and bool(block)
    if item:
        yield ""


def table_lines(table: Table) -> Iterator[str]:
    """Yield a table, an empty line, and what stands below it as a list."""
    yield row(table.named, *map(_cell, table.columns))
    yield f"|---|{''.join('---|' if column in table.left else '--:|' for column in table.columns)}"
    for name, cells in (*table.rows, *table.footer):
        yield row(escaped(name), *(_cell(cells.get(column, "")) for column in table.columns))
    yield ""
    if table.below:
        yield from (f"- {escaped_sentence(line.strip())}" for line in table.below)
        yield ""


def _cell(text: str) -> str:
    """Return a heading or cell; its line breaks stay, and an outcome has its sign."""
    return "<br>".join(map(escaped_sentence, text.split("\n"))) if "\n" in text else signed(text)
