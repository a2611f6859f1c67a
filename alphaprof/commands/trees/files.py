"""Trees of the user, from JSON files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

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
    form = f"write the paths of all nodes without the root: [[{top}], [{top + 1}], [{top}, {top}]]"
    other = f"ranks count from {top} (--top {1 - top} changes that), and each path needs the path of its parent"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionInvalid(f"cannot read the tree {name}: {error.strerror}", "correct the path after --tree") from None
    except (ValueError, RecursionError):
        raise OptionInvalid(f"{name} is not JSON", form) from None
    paths = isinstance(content, list) and content and all(isinstance(path, list) and path for path in content)
    if not paths or not all(type(rank) is int for path in content for rank in path):
        raise OptionInvalid(f"{name} is not a list of paths", form)
    if len(content) > MOST_NODES or max(map(len, content)) > MOST_LEVELS or max(map(max, content)) > MOST_RANK:
        limits = f"at most {MOST_NODES} nodes, {MOST_LEVELS} levels and rank {MOST_RANK}"
        raise OptionInvalid(f"{name} holds a larger tree than any engine verifies", f"give a tree of {limits}")
    try:
        tree = Tree.from_paths(content, top)
    except ValueError as error:
        raise OptionInvalid(f"{name} is not a tree: {error}", other) from None
    if (1,) not in tree.paths:
        raise OptionInvalid(f"{name} never drafts the draft's top token", other)
    return tree
