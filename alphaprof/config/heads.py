"""The list of heads that `alphaprof curve` reads: curve.yaml, which `alphaprof train --curve` writes, or one's own."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import Field, ValidationError

from alphaprof.config.load import read_tree
from alphaprof.config.options import Options, Whole
from alphaprof.errors import ProfileInvalid, cut
from alphaprof.log.training import CURVE

LIST = "list of heads"


class HeadBeside(Options):
    """A head that was tested by a run, as one of its drafts."""

    draft: str = Field(min_length=1, description="what the run that tested it calls it")
    run: str | None = Field(None, min_length=1, description="that run, where it is not the run of the list")
    head: str | None = Field(
        None, min_length=1, description="folder of its training.json; relative paths start at this file"
    )


class HeadEntry(HeadBeside):
    """A head of the curve. What its training.json says need not be said again."""

    units: Whole | None = Field(
        None, ge=1, description="independent units that it was trained on, where it has no training.json"
    )
    tokens: Whole | None = Field(
        None, ge=1, description="tokens of continuations that it was trained on, where it has no training.json"
    )
    order: Whole | None = Field(
        None,
        ge=0,
        description="heads of one order were trained on nested sets of units; none: nothing is known, no forecast",
    )


class HeadsBeside(Options):
    """Heads that are no point of the curve."""

    published: HeadBeside | None = Field(None, description="the head that one would serve without training")
    tuned: HeadBeside | None = Field(None, description="the published head, trained further on the same units")


class HeadsOptions(Options):
    """The heads of a learning curve, and the run that tested them."""

    run: str = Field(min_length=1, description="the run that has the heads as drafts, on documents held out from training")
    heads: list[HeadEntry] = Field(min_length=1, description="heads of all sizes and orders")
    beside: HeadsBeside = HeadsBeside()

    def resolved(self, folder: Path) -> HeadsOptions:
        """The same with absolute paths; relative ones start at `folder`. A run in an object store stays as it is."""

        def place(path: str | None) -> str | None:
            return path if path is None or "://" in path else str(folder / os.path.expanduser(path))

        tree = self.model_dump()
        for entry in (tree, *tree["heads"], *filter(None, tree["beside"].values())):
            entry |= {name: place(entry[name]) for name in ("run", "head") if name in entry}
        return HeadsOptions.model_validate(tree)


def load_heads(path: Path) -> tuple[HeadsOptions, Path]:
    """The list in a file, or in curve.yaml of a folder, with absolute paths, and where it lies. Raises `ProfileInvalid`."""
    file = path / CURVE if path.is_dir() else path
    tree = read_tree(file, LIST)
    try:
        options = HeadsOptions.model_validate(tree)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or LIST
        hint = "docs/curve.md shows a list; it needs run: RUN and heads: [{draft: NAME, head: FOLDER}, ...]"
        raise ProfileInvalid(f"{cut(str(file))}: {cut(where, 60)}: {cut(first['msg'], 100)}", hint) from None
    return options.resolved(file.parent.absolute()), file
