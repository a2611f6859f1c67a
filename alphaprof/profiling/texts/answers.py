"""The answer that ends a chat as the model wrote it after its prompt: with its thinking, which is begun once.

Chat templates begin thinking themselves, leave it out of earlier turns, or add an empty one. What the model wrote is only
known if the log holds its thinking, or if the prompt says that there is none: other rows are bad.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from alphaprof.profiling.texts.cells import BadRow
from alphaprof.profiling.texts.chat import render_chat, template_of, text_of
from alphaprof.profiling.texts.requests import Chat
from alphaprof.profiling.texts.spans import TEMPLATED, Kind
from alphaprof.run.schema import THINKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEYS = ("reasoning", "reasoning_content", "thinking")  # of a turn's thinking, in several logs
COLUMN = "give the answer as a column"
SERVED = "log the thinking too, or render as the server did, like chat_options: {enable_thinking: false}"


def answer_text(tokenizer: PreTrainedTokenizerBase, chat: Chat, prompt: str) -> str:
    """Return what the model wrote after its `prompt`. Raises `BadRow` where that is not known."""
    kinds, before = _kinds(template_of(tokenizer, None)), prompt.rstrip()
    opened = next((kind for kind in kinds if before.endswith(kind.begin)), None)
    content, calls = text_of(chat.answer[0].get("content")), any(turn.get("tool_calls") for turn in chat.answer)
    thoughts = [next((str(turn[key]) for key in KEYS if turn.get(key)), "") for turn in chat.answer]
    inline = next((kind for kind in kinds if kind.end in content), None)
    alone = len(chat.answer) == 1 and not calls
    if (any(thoughts) or inline) and any(before.endswith(kind.end) for kind in kinds):
        raise BadRow("has an answer with thinking after a prompt that says that there is none", "set enable_thinking: true")
    if inline is not None and alone:
        if opened is None and inline.begin not in content:
            raise BadRow("has an answer that ends thinking which was not begun", SERVED)
        again = opened is not None and content.lstrip().startswith(opened.begin)
        return content.lstrip().removeprefix(inline.begin).removeprefix(prompt[len(before) :]) if again else content
    answer = [turn | dict.fromkeys(KEYS, thought or None) for turn, thought in zip(chat.answer, thoughts, strict=True)]
    whole = render_chat(tokenizer, [*chat.turns, *answer], chat.variables, chat.tools, begin=False)
    text = whole.removeprefix(prompt) if whole.startswith(prompt) else None
    if text is None and not alone:
        raise BadRow("has an answer that the chat template does not write after the prompt", COLUMN)
    if not any(thoughts):
        if opened is not None or any(kind.begin in (text or "") and kind.begin not in content for kind in kinds):
            raise BadRow("has an answer without the thinking that the chat template expects", SERVED)
        text = content if text is None else text
    elif text is None or any(thought.strip() not in text for thought in thoughts):
        if not alone or not kinds:
            raise BadRow("has thinking that the chat template leaves out", COLUMN)
        text = _with_thought(text or "", thoughts[0], content, opened, opened or kinds[0], prompt[len(before) :])
    if content.strip() not in text:
        raise BadRow("has an answer that the chat template does not write as it stands", COLUMN)
    return text


def _kinds(template: str) -> list[Kind]:
    """Return the kinds of thinking markup in a chat template. `<|end|>` also ends messages without thinking."""
    kinds = (kind for kind in TEMPLATED if kind.name == THINKING)
    return [kind for kind in kinds if kind.begin in template or ("think" in kind.end.lower() and kind.end in template)]


def _with_thought(text: str, thought: str, content: str, opened: Kind | None, kind: Kind, tail: str) -> str:
    """Return an answer with its thinking, of which the template wrote nothing, or an empty one (Kimi). `tail`: the white
    space after the marker that the prompt ends with; models go on as it is written there.
    """
    if empty := re.search(rf"{re.escape(kind.begin)}(\s*){re.escape(kind.end)}", text):
        half = empty[1][: len(empty[1]) // 2]
        return f"{text[: empty.start(1)]}{half}{thought.strip()}{half}{text[empty.end(1) :]}"
    line = "\n" if (tail if opened else kind.begin == "<think>") else ""
    begin = "" if opened else kind.begin + line
    if thought.endswith("\n") or content.startswith("\n"):  # as it was cut out of what the model wrote
        return f"{begin}{thought}{kind.end}{content}"
    return f"{begin}{thought}{line}{kind.end}{line}{line}{content}"
