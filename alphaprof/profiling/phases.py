"""Which positions lie in the part of a text in which the model thinks, between configured markers."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from alphaprof.config import Markers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Flags = np.ndarray[Any, np.dtype[np.bool_]]


def thinking(markers: Markers, tokenizer: PreTrainedTokenizerBase, prompt: Any, ids: Any) -> Flags:
    """Which tokens of a continuation belong to the thinking part, its markers included; [positions].

    Markers are looked for in the decoded text of prompt and continuation: how a tokenizer cuts them does not matter.
    Thinking that begins in the prompt (a chat template may open it) goes on; a part without an end, to the last token.
    """
    tokens = [int(token) for token in (*prompt, *ids)]

    def text(count: int) -> str:
        found = tokenizer.decode(tokens[:count], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(found)

    whole = text(len(tokens))
    counts = range(len(tokens) + 1)
    inside = np.zeros(len(tokens), dtype=bool)
    for first, last in _spans(whole, markers):
        # Bytes of a character that is not complete yet decode to a stand-in, which is why the end compares characters.
        begin = bisect_right(counts, first, key=lambda count: len(text(count))) - 1
        end = len(tokens) if last is None else _first_with(counts, whole[:last], text)
        inside[begin:end] = True
    return inside[len(prompt) :]


def _first_with(counts: range, beginning: str, text: Callable[[int], str]) -> int:
    """The fewest tokens whose text begins with `beginning`."""
    return bisect_left(counts, True, key=lambda count: text(count).startswith(beginning))


def _spans(text: str, markers: Markers) -> Iterator[tuple[int, int | None]]:
    """Where thinking begins and ends in a text, as character offsets, markers included; None: it does not end."""
    place = 0
    while (begin := text.find(markers.begin, place)) >= 0:
        end = text.find(markers.end, begin + len(markers.begin))
        yield begin, None if end < 0 else end + len(markers.end)
        if end < 0:
            return
        place = end + len(markers.end)
