"""Rounds of rule `tree:WIDTH`, read off one teacher-forced pass, against full trees decoded with real models, by branch."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from alphaprof.profiling.models.load import Model
from alphaprof.rules import parse_rule
from alphaprof.totals.replay import Trace, replay, run_lengths
from tests.profiling.test_huggingface import DOCUMENTS, pair, profiled  # noqa: F401  (a fixture)
from tests.reference import accepted_lengths

pytestmark = [pytest.mark.models, pytest.mark.usefixtures("one_thread")]
LEVELS = 3


def logits(model: Model, ids: list[int]) -> torch.Tensor:
    """Logits of the next token, from the whole text each time: no cache that could go wrong."""
    with torch.inference_mode():
        return model.network(torch.tensor([ids])).logits[0, -1, :260].float()


def decoded(target: Model, draft: Model, prompt: list[int], length: int, width: int) -> tuple[list[int], list[int]]:
    """The text of tree decoding and how many drafts each round accepted; the first token comes from the prefill."""
    ranks = range(1, width + 1)
    paths = [path for level in range(1, LEVELS + 1) for path in itertools.product(ranks, repeat=level)]
    text, rounds = [*prompt, int(logits(target, prompt).argmax())], list[int]()
    while len(text) - len(prompt) < length:
        drafted: dict[tuple[int, ...], list[int]] = {(): text}
        for path in paths:  # shallow ones first
            branch = drafted[path[:-1]]
            order = torch.argsort(logits(draft, branch), descending=True, stable=True)
            drafted[path] = [*branch, int(order[path[-1] - 1])]
        node: tuple[int, ...] = ()
        while True:
            own = int(logits(target, drafted[node]).argmax())
            follows = [path for path in paths if path[:-1] == node and drafted[path][-1] == own]
            if not follows or len(drafted[node]) - len(prompt) == length:
                break
            (node,) = follows
        rounds.append(len(node))
        text = [*drafted[node], own][: len(prompt) + length]
    return text[len(prompt) :], rounds


@pytest.mark.parametrize("width", [1, 2, 3])
def test_rounds_of_a_full_tree_are_those_of_decoding_it(pair: tuple[Model, Model], width: int) -> None:  # noqa: F811
    rule, seen = parse_rule(f"tree:{width}"), set[int]()
    for item, columns in profiled(*pair, documents=DOCUMENTS[:4]):
        text, rounds = decoded(*pair, item.document.prompt.tolist(), len(item.ids), width)
        assert text == item.ids.tolist()
        kept, start, stop = rule.accept(columns), np.array([0]), np.array([len(text)])
        trace = Trace(run_lengths(kept == 1, start, stop), np.full(len(text), LEVELS), start, stop)
        found = replay(trace, LEVELS)
        counts = [rounds.count(length) for length in range(LEVELS + 1)]
        assert accepted_lengths(found)[0].tolist() == counts
        assert found.rounds.tolist() == [len(rounds)]
        seen |= set(rounds)
    assert len(seen) >= 2  # rounds that accept nothing, and rounds that accept something
