"""Rounds that `replay_tree` reads off one teacher-forced pass against trees decoded with real models, branch by branch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from alphaprof.profiling.models.load import Model
from alphaprof.theory.trees import Tree, replay_tree
from tests.profiling.test_huggingface import DOCUMENTS, pair, profiled  # noqa: F401  (a fixture)
from tests.reference import accepted_lengths

pytestmark = [pytest.mark.models, pytest.mark.usefixtures("one_thread")]
TREES = {
    "chain": Tree.chain(3),
    "full": Tree.full(2, 3),
    "uneven": Tree.from_paths([(1,), (2,), (3,), (1, 1), (1, 2), (2, 1), (1, 1, 1), (1, 1, 2), (1, 1, 1, 1)]),
    "without its first branch": Tree.from_paths([(2,), (2, 1), (4,), (4, 3)]),
}


def logits(model: Model, ids: list[int]) -> torch.Tensor:
    """Logits of the next token, from the whole text each time: no cache that could go wrong."""
    with torch.inference_mode():
        return model.network(torch.tensor([ids])).logits[0, -1, :260].float()


def decoded(target: Model, draft: Model, prompt: list[int], length: int, tree: Tree) -> tuple[list[int], list[int]]:
    """The text of tree decoding and how many drafts each round accepted; the first token comes from the prefill."""
    text, rounds = [*prompt, int(logits(target, prompt).argmax())], list[int]()
    while len(text) - len(prompt) < length:
        drafted: dict[tuple[int, ...], list[int]] = {(): text}
        for path in tree.paths:  # shallow ones first
            branch = drafted[path[:-1]]
            order = torch.argsort(logits(draft, branch), descending=True, stable=True)
            drafted[path] = [*branch, int(order[path[-1] - 1])]
        node: tuple[int, ...] = ()
        while True:
            own = int(logits(target, drafted[node]).argmax())
            follows = [path for path in tree.paths if path[:-1] == node and drafted[path][-1] == own]
            if not follows or len(drafted[node]) - len(prompt) == length:
                break
            (node,) = follows
        rounds.append(len(node))
        text = [*drafted[node], own][: len(prompt) + length]
    return text[len(prompt) :], rounds


@pytest.mark.parametrize("name", TREES)
def test_replay_of_ranks_equals_tree_decoding_of_models(pair: tuple[Model, Model], name: str) -> None:  # noqa: F811
    tree, seen = TREES[name], set[int]()
    for item, columns in profiled(*pair, documents=DOCUMENTS[:4]):
        text, rounds = decoded(*pair, item.document.prompt.tolist(), len(item.ids), tree)
        assert text == item.ids.tolist()
        found = replay_tree(columns["draft_rank_of_token"], np.array([0]), np.array([len(text)]), tree)
        counts = [rounds.count(length) for length in range(tree.depth + 1)]
        assert accepted_lengths(found)[0].tolist() == counts
        assert found.rounds.tolist() == [len(rounds)]
        seen |= set(rounds)
    assert len(seen) >= 2  # rounds that accept nothing, and rounds that accept something
