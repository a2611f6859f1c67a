"""A log of requests as JSON lines: what is read of a line, with errors that name file and line."""

from __future__ import annotations

import codecs
import contextlib
import gzip
import io
import itertools
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, ValidationError

from alphaprof.errors import DataUnreadable, OptionInvalid, cut, shown
from alphaprof.servers.files import ADDRESS, GZIP, Format, as_utf8, format_of

Count = Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)]  # up to what the log's columns hold
Name = Annotated[str, Field(coerce_numbers_to_str=True)]
Fields = Mapping[str, Any]
Model = TypeVar("Model", bound=BaseModel)
LOOKED_AT = 1000  # first lines of a file, by which its kind is recognized
DIAGNOSE = "alphaprof diagnose FILE shows what it counts; alphaprof diagnose RUN FILE compares it with a run"
# What lines that count no rounds are read as, so that the reader says what is missing.
LIKE = {"texts": '"prompt_token_ids".*"token_ids"|"token_ids".*"prompt_token_ids"', "sglang": '"(meta_info|sglext)"'}
LIKE |= {"vllm": '"(choices|usage|object|spec_decode_metrics)"'}
MERGE = "merge the chunks of each request into one line: the first and last are needed (see docs/import.md)"


@dataclass(frozen=True)
class Line:
    """One line of a log, or one of several answers in it: `fields`, and where they stand."""

    path: Path
    number: int
    fields: Fields

    @property
    def where(self) -> str:
        """File and line, for messages."""
        return f"{cut(str(self.path))}, line {self.number}"

    def inside(self, fields: Fields) -> Line:
        """Other fields of this line."""
        return Line(self.path, self.number, fields)

    def refuse(self, problem: str, hint: str) -> DataUnreadable:
        """Return what is wrong with this line."""
        return DataUnreadable(f"{self.where}: {problem}", hint)

    def other(self, kind: Format) -> DataUnreadable:
        """Return that this line is of a file that is not imported, and what to do with that."""
        return self.refuse(f"this is {kind.about}", (kind.next or DIAGNOSE).replace("FILE", cut(str(self.path))))

    def read(self, model: type[Model], fields: Fields) -> Model:
        """Return fields as `model` declares them; null is missing. Raises `DataUnreadable` for the first that differs."""
        try:
            return model.model_validate({name: value for name, value in fields.items() if value is not None})
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name, given = ".".join(map(str, first["loc"])), shown(first["input"])
            raise self.refuse(
                f"{name} is missing" if first["type"] == "missing" else f"{name} is {given}: {first['msg']}",
                "write the engine's answers unchanged; docs/import.md lists the fields",
            ) from None


class LeftOut(Exception):
    """A request whose rounds are not known. `unmeasured`: nothing was measured, so that it is left out unasked; else its
    metrics do not tell enough.
    """

    def __init__(self, reason: str, hint: str, unmeasured: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.hint, self.unmeasured = reason, hint, unmeasured


def json_lines(path: Path, digest: Callable[[bytes], object]) -> Iterator[Line]:
    """Yield the lines of a file that are not blank; a list becomes the `response` of an object. `digest` gets the bytes of
    each line. A file may be compressed by gzip. Raises `DataUnreadable`.
    """
    try:
        with path.open("rb") as file:
            packed = file.read(len(GZIP)) == GZIP
        with gzip.open(path) if packed else path.open("rb") as opened:
            wide = opened.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
            stream: Any = io.BytesIO(as_utf8(opened.read())) if wide else opened
            for number, text in enumerate(stream, 1):
                digest(text)
                if not text.strip():
                    continue
                line = Line(path, number, {})
                try:
                    content = json.loads(text.decode("utf-8-sig"))
                except (ValueError, RecursionError) as error:
                    chunk = text.startswith((b"data:", b"event:"))
                    looked = [] if chunk else [text, *itertools.islice(stream, LOOKED_AT)]
                    others = [other.decode(errors="replace") for other in looked]  # a log names itself in one of its lines
                    if text.lstrip().startswith((b"{", b"[{")) or text.strip() == b"[":
                        others = []
                        with contextlib.suppress(ValueError, RecursionError):  # one object over several lines
                            others = [json.dumps(json.loads(b"".join(looked)))]
                    if kind := next(filter(None, map(format_of, others)), None):
                        raise line.other(kind) from None
                    raise line.refuse(str(error), MERGE if chunk else "write one JSON object per line, in UTF-8") from None
                if not isinstance(content, dict | list):
                    raise line.refuse(f"{shown(content)} is not a JSON object", "write one response per line")
                yield line.inside(content if isinstance(content, dict) else {"response": content})
    except (OSError, EOFError, zlib.error) as error:
        raise DataUnreadable(
            f"cannot read {cut(str(path))}: {getattr(error, 'strerror', None) or error}", "give a JSON Lines file"
        ) from None


def kind_of(files: Sequence[str], texts: bool | None) -> str:
    """Return what some files are: vllm, sglang or texts; `texts`: whether a file without counts is taken for texts (None: by
    what it looks like). Raises `DataUnreadable`, also for a file that is not imported, and `OptionInvalid` for an address,
    and for files of several kinds.
    """
    if address := next((file for file in files if file.startswith(ADDRESS)), None):
        raise OptionInvalid(f"{cut(address)} is a server, not a file of requests", DIAGNOSE.replace("FILE", cut(address)))
    kinds = {_kind_of(Path(file), texts): file for file in files}
    if len(kinds) > 1:
        named = ", ".join(f"{cut(file)} ({kind})" for kind, file in kinds.items())
        raise OptionInvalid(f"the files are of several kinds: {named}", "import each kind alone, or name one: --format")
    return next(iter(kinds))


def _kind_of(path: Path, texts: bool | None) -> str:
    """Return what a file is, by its first line that counts rounds, else by what its lines look like."""
    like = {"texts"} if texts else set[str]()
    for line in itertools.islice(json_lines(path, len), LOOKED_AT):
        text = json.dumps(line.fields)
        if (kind := format_of(text)) is not None:
            if not kind.reader:
                raise line.other(kind)
            return kind.reader
        like |= {reader for reader, sign in LIKE.items() if re.search(sign, text)}
    if texts is False:
        return "sglang" if "sglang" in like else "vllm"
    return next((reader for reader in LIKE if reader in like), "texts")


def group(fields: Fields, name: str) -> Fields:
    """Return an object inside another one; empty if there is none."""
    value = fields.get(name)
    return value if isinstance(value, dict) else {}


def unwrapped(fields: Fields, is_answer: Callable[[Fields], bool]) -> tuple[Any, Any]:
    """Return the answer (or list of answers) that a batch file or a proxy wrapped in `response` and `body`, and the error
    that stands with it, if any.
    """
    body: Any = fields
    error = error_in(body)
    for name in ("response", "body"):
        if not isinstance(body, dict) or is_answer(body) or name not in body:
            break
        error = error or (name == "response" and body[name] is None)
        if not isinstance(body[name], dict | list):
            break
        body = body[name]
        error = error or (isinstance(body, dict) and error_in(body))
    return body, error


def error_in(fields: Fields) -> Any:
    """Return what an answer says of its failure; empty if it did not fail."""
    status = fields.get("status_code")
    failed = fields.get("object") == "error" or (isinstance(status, int) and status >= 400)
    return fields.get("error") or (failed and (fields.get("message") or group(fields, "body").get("error") or True))


def failure(error: Any) -> LeftOut:
    """Return a request that the engine answered with an error."""
    text = error.get("message") if isinstance(error, dict) else error
    hint = (
        f"change the requests and send them again; the engine said {cut(repr(text), 160)}"
        if isinstance(text, str)
        else "see the engine's log"
    )
    return LeftOut("the engine answered with an error", hint, unmeasured=True)
