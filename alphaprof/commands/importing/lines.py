"""A log of requests as JSON lines: what is read of a line, with errors that name file and line. The file is not trusted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alphaprof.errors import ColumnMissing, DataUnreadable, cut, shown

LONGEST_LINE = 64 * 2**20  # bytes: a request with the token ids of its prompt fits, and no file fills the memory
MOST = 2**31 - 1  # of a count: what the log's columns hold
AGREE = "the metrics of a request must agree with each other"
MERGE = "write one line for each request, its chunks merged: the first and the last are needed (docs/import.md has a client)"


@dataclass(frozen=True)
class Line:
    """One line of a log, or an object inside it: `fields`, and where they stand."""

    path: Path
    number: int
    fields: Mapping[str, Any]

    @property
    def where(self) -> str:
        """File and line, for messages."""
        return f"{cut(str(self.path))}, line {self.number}"

    def inside(self, fields: Mapping[str, Any]) -> Line:
        """An object of this line."""
        return Line(self.path, self.number, fields)

    def refuse(self, problem: str, hint: str) -> DataUnreadable:
        """What is wrong with this line."""
        return DataUnreadable(f"{self.where}: {problem}", hint)

    def group(self, name: str) -> Line | None:
        """An object inside this one, None where there is none. Raises `DataUnreadable` for a value that is no object."""
        value = self.fields.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.refuse(f"{name} is {shown(value)}, no object", "each line is one response of the engine, as it came")
        return self.inside(value)

    def count(self, *names: str) -> int | None:
        """A whole number from 0 under the first of several names, None without it. Raises `DataUnreadable`."""
        for name in names:
            if self.fields.get(name) is not None:
                return self.whole(name, self.fields[name])
        return None

    def required(self, *names: str) -> int:
        """The same, which must be there. Raises `ColumnMissing`."""
        count = self.count(*names)
        if count is None:
            raise self.missing(names[0])
        return count

    def missing(self, name: str) -> ColumnMissing:
        """A field that this line lacks."""
        return ColumnMissing(f"{self.where}: {name} is missing", f"it belongs beside {self.known()}: see docs/import.md")

    def whole(self, name: str, value: Any) -> int:
        """A value as a whole number from 0. Raises `DataUnreadable`."""
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MOST:
            raise self.refuse(
                f"{name} is {shown(value)}, no whole number from 0 to {MOST}", "counts are written as they are"
            )
        return value

    def wholes(self, name: str, value: Any) -> list[int]:
        """A value as a list of such numbers. Raises `DataUnreadable`."""
        if not isinstance(value, list):
            raise self.refuse(f"{name} is {shown(value)}, no list", "it is a list of counts")
        return [self.whole(f"{name}[{index}]", item) for index, item in enumerate(value)]

    def text(self, name: str) -> str | None:
        """A name or id under a key; None without it. Raises `DataUnreadable` for what is neither text nor a number."""
        value = self.fields.get(name)
        if value is None:
            return None
        if isinstance(value, (dict, list, bool, float)):
            raise self.refuse(f"{name} is {shown(value)}, no name", "names are text")
        return self.writable(name, str(value))

    def writable(self, name: str, text: str) -> str:
        """Text that files can hold. Raises `DataUnreadable` for half a character."""
        try:
            text.encode()
        except UnicodeEncodeError:
            raise self.refuse(f"{name} holds half a character ({shown(text)})", "write the file as UTF-8") from None
        return text

    def at(self, path: str) -> tuple[bool, Any]:
        """Whether there is a value at a dotted path, and the value."""
        value: Any = self.fields
        for name in path.split("."):
            if not isinstance(value, dict) or name not in value:
                return False, None
            value = value[name]
        return True, value

    def known(self) -> str:
        """The fields that are here, for messages."""
        names = [shown(name) for name in list(self.fields)[:8]]
        return ", ".join(names) + (", ..." if len(self.fields) > len(names) else "") or "nothing"


class LeftOut(Exception):
    """A request whose rounds are not known. `settled`: nothing was measured, so that it is left out without being asked for;
    else its metrics do not tell enough. `kind`: what such requests are counted under, without the numbers of this one.
    """

    def __init__(self, reason: str, hint: str, settled: bool = False, kind: str | None = None) -> None:
        super().__init__(reason)
        self.reason, self.hint, self.settled, self.kind = reason, hint, settled, kind or reason


def _numbered(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file and their numbers, from 1. Raises `DataUnreadable`, for a line that is too long too."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b""), 1):
                if len(line) > LONGEST_LINE:
                    problem = f"{path}, line {number}: longer than {LONGEST_LINE // 2**20} MiB"
                    raise DataUnreadable(problem, "write one response per line")
                yield number, line
    except OSError as error:
        raise DataUnreadable(f"cannot read {cut(str(path))}: {error.strerror}", "give a file of JSON lines") from None


def json_lines(path: Path, digest: Callable[[bytes], object], lists: bool = False) -> Iterator[Line]:
    """The lines of a file that are not blank; `digest` gets the bytes of each line. `lists`: a line may be a list, which
    becomes the `response` of an object. Raises `DataUnreadable`.
    """
    for number, text in _numbered(path):
        digest(text)
        if text.strip():
            line = Line(path, number, {})
            yield line.inside(_object(line, text, lists))


def _object(line: Line, text: bytes, lists: bool) -> Mapping[str, Any]:
    try:
        content = json.loads(text.decode("utf-8-sig"), parse_constant=_no_number, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        if text.startswith((b"data:", b"event:")):
            raise line.refuse("an event of a stream, not an answer", MERGE) from None
        reason = "nested too deeply" if isinstance(error, RecursionError) else getattr(error, "msg", None) or str(error)
        raise line.refuse(reason, "each line is one JSON object, in UTF-8") from None
    if lists and isinstance(content, list):
        return {"response": content}
    if not isinstance(content, dict):
        raise line.refuse(f"{shown(content)} is not a JSON object", "write one response per line")
    return content


def _no_number(name: str) -> object:
    raise ValueError(f"{name} is not a JSON number")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {shown(next(name for name in names if names.count(name) > 1))} occurs twice")
    return content
