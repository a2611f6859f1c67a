"""Spans of a text: thinking, tool calls, code, JSON and the answer around them; which one each token belongs to."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from alphaprof.run.schema import ANSWER, THINKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from alphaprof.config.profile import ProfileOptions

UNFINISHED = "\ufffd"  # what bytes decode to that make no character
MOST_TOKENS = 16  # that are decoded together until they end with one
HEADER_END = "<|message|>"  # before the text of a channel
JSON = "json"
Names = np.ndarray[Any, np.dtype[np.str_]]


class Kind(NamedTuple):
    """A kind of span: its name, and the markers that begin and end it, which belong to it. One that does not end goes on to
    the end of the text.
    """

    name: str
    begin: str
    end: str


TEMPLATED = (  # of models whose chat template writes one of the two markers
    Kind(THINKING, "<think>", "</think>"),  # Qwen, DeepSeek, GLM, Nemotron, MiniMax
    Kind(THINKING, "[THINK]", "[/THINK]"),  # Magistral
    Kind(THINKING, "<seed:think>", "</seed:think>"),
    Kind(THINKING, "<|START_THINKING|>", "<|END_THINKING|>"),  # Command
    Kind(THINKING, "<|channel>thought", "<channel|>"),  # Gemma-4
    Kind(THINKING, "<|channel|>analysis<|message|>", "<|end|>"),  # gpt-oss
    Kind("tool call", "<|channel|>commentary to=", "<|call|>"),
    Kind("tool call", "<|start|>assistant to=", "<|call|>"),
    Kind("tool call", "<tool_call>", "</tool_call>"),  # Qwen, Hermes, GLM
    Kind("tool call", "<|tool_call>", "<tool_call|>"),  # Gemma-4
    Kind("tool call", "[TOOL_CALLS]", "</s>"),  # Mistral
    Kind("tool call", "<|python_tag|>", "<|eom_id|>"),  # Llama-3
    Kind("tool call", "<|START_ACTION|>", "<|END_ACTION|>"),
    Kind("tool call", "<\uff5ctool▁calls▁begin\uff5c>", "<\uff5ctool▁calls▁end\uff5c>"),  # DeepSeek
    Kind("tool call", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),  # Kimi
)
FENCES = (Kind(JSON, "```json", "```"), Kind("code", "```", "```"))  # of any model


def kinds_of(options: ProfileOptions, tokenizer: PreTrainedTokenizerBase) -> tuple[Kind, ...] | None:
    """Return the kinds of spans that a run tells apart; None: it does not. Those of the profile come before those of the
    same name that the target's chat template writes.
    """
    given = ({} if options.thinking is None else {THINKING: options.thinking}) | (options.spans or {})
    own = tuple(Kind(name, markers.begin, markers.end) for name, markers in given.items())
    if options.spans is None:
        return own or None
    template = str(tokenizer.chat_template)  # of several templates: all of them
    known = [kind for kind in TEMPLATED if kind.begin in template or kind.end in template]
    return (*own, *(kind for kind in (*known, *FENCES) if kind.name not in given))


def spans(kinds: Sequence[Kind], tokenizer: PreTrainedTokenizerBase, prompt: Any, ids: Any, ended: bool = False) -> Names:
    """Return the name of the span that each token of a continuation belongs to, the one that its first character is in;
    [positions]. `ended`: the last token ends the text, and is not part of it.

    Markers are looked for in decoded text: how a tokenizer cuts them does not matter. A span holds no others: the first
    marker wins, and code in a thinking part is thinking. Thinking that begins in the prompt (a chat template may open it)
    goes on. An answer is JSON if all of it is one JSON object or array, and fenced JSON is looked for if fenced code is.
    """
    text, offsets = decoded([int(token) for token in (*prompt, *ids)], tokenizer)
    starts = offsets[len(prompt) :]
    found = list(_found(text, kinds, starts[0]))
    rest, place = "", starts[0]
    for _, begin, end in [*found, ("", starts[-1] if ended else len(text), 0)]:
        rest, place = rest + text[place:begin], max(place, end)
    others = JSON if FENCES[0] in kinds and _is_json(rest.rpartition(HEADER_END)[2].strip()) else ANSWER
    names = np.array([others, *(name for name, _, _ in found)])
    inside = np.searchsorted([begin for _, begin, _ in found], starts, "right")
    return names[np.where(np.less(starts, np.array([0, *(end for _, _, end in found)])[inside]), inside, 0)]


def _found(text: str, kinds: Sequence[Kind], border: int) -> Iterator[tuple[str, int, int]]:
    """Yield the name of each span, and where it begins and ends, as character offsets; only thinking may begin before the
    `border`, in the prompt.
    """
    by_marker = {kind.begin: kind for kind in reversed(kinds)}  # the first of several, the profile's
    longest_first = sorted(by_marker, key=len, reverse=True)  # ```json is also ```
    markers, place = re.compile("|".join(map(re.escape, longest_first))), 0
    while (found := markers.search(text, place)) is not None:
        kind, begin = by_marker[found[0]], found.start()
        if begin < border and kind.name != THINKING:
            place = begin + 1
            continue
        end = text.find(kind.end, found.end())
        place = len(text) if end < 0 else end + len(kind.end)
        yield kind.name, begin, place


def _is_json(text: str) -> bool:
    """Return whether a text is a JSON object or array, or the beginning of one that was cut."""
    try:
        return text[:1] in ("{", "[") and json.loads(text) is not None
    except RecursionError:  # how deep the parser goes depends on the version of Python
        return True
    except ValueError as error:
        return getattr(error, "pos", -1) >= len(text) or str(error).startswith("Unterminated")


def decoded(tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[int]]:
    """Return the text of tokens, and the offset of the character that each begins with or within, [tokens].

    Pieces are decoded after the one before, since some tokenizers drop a space at the beginning of what they decode. One
    ends where a character does: until then its last bytes stand as U+FFFD.
    """

    def text_of(part: Sequence[int]) -> str:
        return str(tokenizer.decode(part, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    text, starts, before = "", list[int](), list[int]()
    while len(starts) < len(tokens):
        known, grown, rest = len(text_of(before)), [""], tokens[len(starts) : len(starts) + MOST_TOKENS]
        while len(grown) <= len(rest) and (len(grown) == 1 or grown[-1].endswith(UNFINISHED)):
            grown.append(text_of([*before, *rest[: len(grown)]])[known:])
        for part in grown[:-1]:
            same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(part, grown[-1], strict=False))
            starts.append(len(text) + len(list(same)))
        text, before = text + grown[-1], list(rest[: len(grown) - 1])
    return text, starts
