"""Which positions lie in the part of a text in which the model thinks, between configured markers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from alphaprof.config.profile import Markers

MOST_BYTES = 4  # of a character
UNFINISHED = "\ufffd"  # what bytes decode to that make no character
Flags = np.ndarray[Any, np.dtype[np.bool_]]


def thinking(markers: Markers, tokenizer: PreTrainedTokenizerBase, prompt: Any, ids: Any) -> Flags:
    """Which tokens of a continuation belong to the thinking part, its markers included; [positions].

    Markers are looked for in the decoded text of prompt and continuation: how a tokenizer cuts them does not matter.
    Thinking that begins in the prompt (a chat template may open it) goes on; a part without an end, to the last token.
    """
    tokens = [int(token) for token in (*prompt, *ids)]
    sizes, texts = zip(*_pieces(tokens, tokenizer), strict=True)
    stops = np.cumsum([len(text) for text in texts])
    starts = stops - [len(text) for text in texts]
    inside = np.zeros(len(texts), dtype=bool)
    for first, last in _spans("".join(texts), markers):
        inside |= (stops > first) & (starts < (stops[-1] if last is None else last))
    return np.repeat(inside, sizes)[len(prompt) :]


def _pieces(tokens: list[int], tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[int, str]]:
    """The text in pieces of whole characters: of how many tokens each is made, and what it says.

    A piece is decoded behind the one before, since some tokenizers drop a space at the beginning of what they decode.
    """

    def text(part: list[int]) -> str:
        return str(tokenizer.decode(part, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    before: list[int] = []
    place = 0
    while place < len(tokens):
        known = len(text(before))
        finished = (1, text([*before, tokens[place]])[known:])
        for size in range(2, min(MOST_BYTES, len(tokens) - place) + 1):
            if UNFINISHED not in finished[1]:
                break
            piece = text([*before, *tokens[place : place + size]])[known:]
            finished = (size, piece) if UNFINISHED not in piece else finished
        yield finished
        before = tokens[place : place + finished[0]]
        place += finished[0]


def _spans(text: str, markers: Markers) -> Iterator[tuple[int, int | None]]:
    """Where thinking begins and ends in a text, as character offsets, markers included; None: it does not end."""
    place = 0
    while (begin := text.find(markers.begin, place)) >= 0:
        end = text.find(markers.end, begin + len(markers.begin))
        yield begin, None if end < 0 else end + len(markers.end)
        if end < 0:
            return
        place = end + len(markers.end)
