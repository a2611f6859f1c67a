"""The list of heads that `alphaprof curve` reads: curve.yaml, which `alphaprof train --curve` writes, or one's own."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import Field, ValidationError

from alphaprof.config.load import read_tree
from alphaprof.config.options import Name, Options, Whole
from alphaprof.errors import ProfileInvalid, cut
from alphaprof.log.split import RANDOM, SplitBy
from alphaprof.log.training import CURVE

LIST = "list of heads"


class HeadEntry(Options):
    """A head of the curve. What its training.json says need not be said again."""

    head: Name = Field(min_length=1, description="folder of the head; relative paths start at this file")
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


class HeadBeside(Options):
    """A head that is shown beside the curve."""

    head: Name = Field(min_length=1, description="folder of the head; relative paths start at this file")


class HeadsBeside(Options):
    """Heads that are no point of the curve."""

    published: HeadBeside | None = Field(None, description="the head that one would serve without training")
    tuned: HeadBeside | None = Field(None, description="the published head, trained further on the same units")


class HeadsOptions(Options):
    """The heads of a learning curve, and the run whose texts they are tested on."""

    run: Name | None = Field(None, min_length=1, description="the run that holds the texts and step times; or --from")
    heads: list[HeadEntry] = Field(min_length=1, description="heads of all sizes and orders")
    beside: HeadsBeside = HeadsBeside()
    split: SplitBy = Field(
        RANDOM, description="how the texts were parted (export --split), where no head has a training.json"
    )

    def resolved(self, folder: Path) -> HeadsOptions:
        """The same with absolute paths; relative ones start at `folder`. A run in an object store stays as it is."""

        def place(path: str) -> str:
            return path if "://" in path else str(folder / os.path.expanduser(path))

        heads = [entry.model_copy(update={"head": place(entry.head)}) for entry in self.heads]
        beside = {
            name: HeadBeside(head=place(each.head))
            for name in HeadsBeside.model_fields
            if (each := getattr(self.beside, name))
        }
        run = place(self.run) if self.run else None
        return self.model_copy(update={"heads": heads, "beside": HeadsBeside(**beside), "run": run})


def load_heads(path: Path) -> tuple[HeadsOptions, Path]:
    """The list in a file, or in curve.yaml of a folder, with absolute paths, and where it lies. Raises `ProfileInvalid`."""
    file = path / CURVE if path.is_dir() else path
    tree = read_tree(file, LIST)
    try:
        options = HeadsOptions.model_validate(tree)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or LIST
        hint = "docs/curve.md shows a list; it needs heads: [{head: FOLDER}, ...]"
        raise ProfileInvalid(f"{cut(str(file))}: {cut(where, 60)}: {cut(first['msg'], 100)}", hint) from None
    return options.resolved(file.parent.absolute()), file
