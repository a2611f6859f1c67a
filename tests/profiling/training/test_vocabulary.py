"""The ids that a new head can propose: the most frequent ones of its training texts, special tokens among them."""

from __future__ import annotations

import numpy as np
import pytest

from alphaprof.profiling import training
from alphaprof.profiling.training import frequent_ids
from alphaprof.run.split import RunText


def text(prompt: list[int], ids: list[int]) -> RunText:
    return RunText(0, "a", "u", True, np.array(prompt, dtype=np.int32), np.array(ids, dtype=np.int32))


TEXTS = [text([9, 9, 5], [3, 3, 3, 4]), text([5], [4, 5, 6, 3])]  # 3 four times, 4 twice, 5 and 6 once


def test_all_ids_that_continuations_hold_are_in_it_and_those_of_prompts_alone_are_not() -> None:
    assert frequent_ids(TEXTS, set(), 12).tolist() == [3, 4, 5, 6]
    assert frequent_ids(TEXTS, {0, 11, 400}, 12).tolist() == [0, 3, 4, 5, 6, 11]


@pytest.mark.parametrize(("most", "ids"), [(1, [11]), (2, [3, 11]), (3, [3, 4, 11]), (4, [3, 4, 5, 11])])
def test_special_tokens_and_the_most_frequent_ids_are_taken_first(
    most: int, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "MOST_IDS", most)
    assert frequent_ids(TEXTS, {11}, 12).tolist() == ids
