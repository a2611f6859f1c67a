"""Draft trees that users bring: JSON lists of paths, as engines are configured with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from alphaprof.errors import OptionInvalid, cut
from alphaprof.theory.trees import Tree

MOST_NODES, MOST_LEVELS, MOST_RANK = 1024, 64, 1024  # beyond what any engine verifies at once


def read_trees(paths: Sequence[Path], top: int) -> dict[str, Tree]:
    """Trees by the names of their files; by whole paths where names are the same. `top`: see `read_tree`."""
    distinct = list(dict.fromkeys(paths))
    names = [path.name for path in distinct]
    return {str(path) if names.count(path.name) > 1 else path.name: read_tree(path, top) for path in distinct}


def read_tree(path: Path, top: int) -> Tree:
    """The tree in a file; `top`: how it calls the draft's top token, 0 or 1. Raises `OptionInvalid`."""
    name = cut(str(path))
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionInvalid(f"cannot read the tree {name}: {error.strerror}", "correct the path after --tree") from None
    except (ValueError, RecursionError):
        raise OptionInvalid(f"{name} holds no JSON", _form(top)) from None
    if not _paths(content):
        raise OptionInvalid(f"{name} is no list of paths", _form(top))
    if len(content) > MOST_NODES or max(map(len, content)) > MOST_LEVELS or max(map(max, content)) > MOST_RANK:
        limits = f"at most {MOST_NODES} nodes, {MOST_LEVELS} levels and rank {MOST_RANK}"
        raise OptionInvalid(f"{name} holds a larger tree than any engine verifies", f"give a tree of {limits}")
    try:
        tree = Tree.from_paths(content, top)
    except ValueError as error:
        raise OptionInvalid(f"{name} is no tree: {error}", _other(top)) from None
    if (1,) not in tree.paths:
        raise OptionInvalid(f"{name} never drafts the draft's top token", _other(top))
    return tree


def _paths(content: Any) -> bool:
    """Whether it is a list of lists of whole numbers, none of them empty."""
    return isinstance(content, list) and bool(content) and all(map(_path, content))


def _path(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(rank) is int for rank in value)


def _form(top: int) -> str:
    return f"write the paths of all nodes without the root: [[{top}], [{top + 1}], [{top}, {top}]]"


def _other(top: int) -> str:
    return (
        f"ranks are read as counting from {top} (change that with --top {1 - top}), and each path needs that of its parent"
    )
