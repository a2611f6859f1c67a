"""The ids that a head can propose: the most frequent ones of its training texts, special tokens among them."""

from __future__ import annotations

import numpy as np
import pytest

from alphaprof.errors import OptionInvalid
from alphaprof.profiling.training.initial import chosen_vocabulary, outside
from alphaprof.run.split import RunText


def text(prompt: list[int], ids: list[int]) -> RunText:
    return RunText(0, "a", "u", "greedy", True, None, np.array(prompt, dtype=np.int32), np.array(ids, dtype=np.int32))


TEXTS = [text([9, 9, 5], [3, 3, 3, 4]), text([5], [4, 5, 6, 3])]  # 3 four times, 4 twice, 5 and 6 once


def test_all_ids_that_continuations_hold_are_in_it_and_those_of_prompts_alone_are_not() -> None:
    assert chosen_vocabulary(TEXTS, None, [], 12).tolist() == [3, 4, 5, 6]


def test_the_most_frequent_ids_are_taken_first_and_prompts_decide_between_equals() -> None:
    assert [chosen_vocabulary(TEXTS, count, [], 12).tolist() for count in (1, 2, 3)] == [[3], [3, 4], [3, 4, 5]]


def test_special_tokens_are_always_in_it() -> None:
    assert chosen_vocabulary(TEXTS, 3, [0, 11], 12).tolist() == [0, 3, 11]
    assert chosen_vocabulary(TEXTS, None, [0, 11, 400], 12).tolist() == [0, 3, 4, 5, 6, 11]
    with pytest.raises(OptionInvalid, match="no room beyond 2 special tokens"):
        chosen_vocabulary(TEXTS, 2, [0, 11], 12)


@pytest.mark.parametrize(("share", "ids"), [(0.1, [3]), (0.5, [3]), (0.51, [3, 4]), (0.75, [3, 4]), (0.8, [3, 4, 5])])
def test_a_share_asks_for_the_fewest_ids_that_cover_it(share: float, ids: list[int]) -> None:
    """Of eight tokens four are 3, two are 4."""
    assert chosen_vocabulary(TEXTS, share, [], 12).tolist() == ids


def test_more_ids_than_occur_are_filled_up_from_prompts_and_then_in_order() -> None:
    assert chosen_vocabulary(TEXTS, 6, [], 12).tolist() == [0, 3, 4, 5, 6, 9]


def test_the_first_token_of_a_continuation_is_emitted_by_no_round() -> None:
    assert outside(np.array([4]), text([1], [3, 4, 3, 5])) == 2
    assert outside(None, text([1], [3, 4])) == 0
