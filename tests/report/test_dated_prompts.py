"""Prompts that differ only in the date that a chat template writes are told from prompts of other data."""

from __future__ import annotations

import pyarrow as pa
import pytest

from alphaprof.report.pairing import differ_alike
from tests.loops import each

PROMPTS = [[1, 9, 27, 11, 5, 6], [1, 9, 27, 11, 7, 27, 8], [1, 9, 27, 11]]


def table(prompts: list[list[int]], first_row: int = 0) -> pa.Table:
    rows = range(first_row, first_row + len(prompts))
    return pa.table({"source": [0] * len(prompts), "source_row": list(rows), "prompt_ids": prompts})


@each("date", [[28], [2, 8], [29, 12]])
def test_one_piece_that_is_the_same_in_all_prompts_is_a_date(date: list[int]) -> None:
    other = [[*prompt[:2], *date, *prompt[3:]] for prompt in PROMPTS]
    assert differ_alike(table(PROMPTS), table(other))
    assert differ_alike(table(other), table(PROMPTS))


OTHERS = {
    "another piece in each": [[1, 9, 30 + row, *prompt[3:]] for row, prompt in enumerate(PROMPTS)],
    "other texts": [[4, 4, 4], [3, 3], [2]],
    "a long piece": [[*prompt[:2], *range(100, 140), *prompt[3:]] for prompt in PROMPTS],
    "one prompt": [[1, 9, 28, 11, 5, 6]],
}


@pytest.mark.parametrize("what", OTHERS)
def test_anything_else_is_not(what: str) -> None:
    assert not differ_alike(table(PROMPTS), table(OTHERS[what]))
    assert not differ_alike(table(PROMPTS), table(OTHERS[what], first_row=100))
