"""Answers that end a chat: prompt and answer are the text that the model wrote, under templates as they are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from alphaprof.errors import AlphaprofError
from tests.loops import each
from tests.profiling.test_corpus import corpus, texts, tokenizer

LOOP = "{% for m in messages %}"
SPLIT = "{% set c = m.content %}{% if '</think>' in c %}{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}"
PARSED = (  # the thinking of a turn, from its own key or within its content
    "{% set r = m.reasoning_content or '' %}{% set c = m.content %}{% if not r and '</think>' in c %}"
    "{% set r = c.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}"
)
NEW = "{{ '\\n' }}"
WRITES = "<{{ m.role }}>{% if m.role == 'assistant' %}"
LATE = f"{LOOP}{PARSED}{WRITES}{{% if loop.last %}}<think>\n{{{{ r.strip('\n') }}}}\n</think>\n\n{{% endif %}}"
ASKED = "{% endfor %}{% if add_generation_prompt %}<assistant>"
DONE = "{% endif %}"
SAID = "{{ c }}{{ eos_token }}"
OFF = "{% if enable_thinking is defined and not enable_thinking %}"
TEMPLATES = {  # the shapes of public ones
    "r1": LOOP + SPLIT + "<{{ m.role }}>" + SAID + ASKED + "<think>\n" + DONE,
    "qwen3": LATE + DONE + SAID + ASKED + OFF + "<think>\n\n</think>\n\n{% endif %}" + DONE,
    "qwen3 thinking": LATE + DONE + SAID + ASKED + "<think>\n" + DONE,
    "qwen3 instruct": LOOP + "<{{ m.role }}>{{ m.content }}{{ eos_token }}" + ASKED + DONE,
    "glm": LOOP
    + PARSED
    + WRITES
    + NEW
    + "{% if loop.last and r %}<think>{{ r.strip() }}</think>{% else %}<think></think>{% endif %}"
    + NEW
    + "{{ c.strip() }}{% else %}"
    + NEW
    + "{{ m.content }}{% endif %}"
    + ASKED
    + OFF
    + NEW
    + "<think></think>{% endif %}"
    + DONE,
    "kimi": LOOP + WRITES + "<think></think>{% endif %}{{ m.content }}{{ eos_token }}" + ASKED + DONE,
    "deepseek v3.1": LOOP
    + SPLIT
    + "<{{ m.role }}>{% if m.role == 'assistant' %}</think>{% endif %}"
    + SAID
    + ASKED
    + "{{ '<think>' if thinking else '</think>' }}"
    + DONE,
    "gpt-oss": LOOP
    + "{% if m.role == 'assistant' %}{% if loop.last and m.thinking %}<|start|>assistant<|channel|>analysis<|message|>"
    + "{{ m.thinking }}<|end|>{% endif %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}{{ eos_token }}"
    + "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}"
    + "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}",
}
BARE = {"content": "Ok."}
INLINE = {"content": "<think>\nHm.\n</think>\n\nOk."}
OPEN = {"content": "Hm.\n</think>\n\nOk."}  # as a server without a parser returns it
APART = {"content": "Ok.", "reasoning_content": "Hm."}
CUT_OUT = {"content": "\n\nOk.", "reasoning": "\nHm.\n"}  # as vLLM's parser returns it
LACKS, ENDS, NONE = "without the thinking", "ends thinking which was not begun", "a prompt that says that there is none"
WRITTEN: dict[str, list[tuple[dict[str, Any], dict[str, Any], str]]] = {  # answers, chat_options, what the model wrote
    "r1": [
        (INLINE, {}, "Hm.\n</think>\n\nOk."),
        ({"content": "<think>Hm.</think>Ok."}, {}, "Hm.</think>Ok."),
        (OPEN, {}, "Hm.\n</think>\n\nOk."),
        (APART, {}, "Hm.\n</think>\n\nOk."),
        ({"content": "\n\nOk.", "reasoning": "Hm.\n"}, {}, "Hm.\n</think>\n\nOk."),
        (BARE, {}, LACKS),
    ],
    "qwen3": [
        (INLINE, {}, "<think>\nHm.\n</think>\n\nOk."),
        (APART, {}, "<think>\nHm.\n</think>\n\nOk."),
        (CUT_OUT, {}, "<think>\nHm.\n</think>\n\n\n\nOk."),
        (BARE, {}, LACKS),
        (BARE, {"enable_thinking": False}, "Ok."),
        (APART, {"enable_thinking": False}, NONE),
        (INLINE, {"enable_thinking": False}, NONE),
        (OPEN, {}, ENDS),
    ],
    "qwen3 thinking": [
        (INLINE, {}, OPEN["content"]),
        (APART, {}, OPEN["content"]),
        (OPEN, {}, OPEN["content"]),
        (BARE, {}, LACKS),
    ],
    "qwen3 instruct": [
        (BARE, {}, "Ok."),
        (INLINE, {}, INLINE["content"]),
        (APART, {}, "thinking that the chat template leaves out"),
    ],
    "glm": [
        (APART, {}, "\n<think>Hm.</think>\nOk."),
        (INLINE, {}, INLINE["content"]),
        (BARE, {}, LACKS),
        (BARE, {"enable_thinking": False}, "\nOk."),
    ],
    "kimi": [(APART, {}, "<think>Hm.</think>Ok."), (BARE, {}, LACKS)],
    "deepseek v3.1": [
        (BARE, {}, "Ok."),
        (APART, {}, NONE),
        (APART, {"thinking": True}, "Hm.</think>Ok."),
        (BARE, {"thinking": True}, LACKS),
    ],
    "gpt-oss": [
        (APART, {}, "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Ok."),
        (
            {"content": "Ok.", "thinking": "Hm."},
            {},
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Ok.",
        ),
        (BARE, {}, "<|channel|>final<|message|>Ok."),
    ],
}


def measured(path: Path, template: str, *answer: dict[str, Any], **options: Any) -> str:
    """Prompt and answer as one text, or why there are none."""
    turns = [{"role": "user", "content": "hi"}, *({"role": "assistant", **turn} for turn in answer)]
    path.write_text(json.dumps({"messages": turns}))
    words = tokenizer()
    words.chat_template = template
    source = {"path": str(path), "messages": "messages", "chat_options": options}
    try:
        (document,) = corpus(source, words=words, continuation={"kind": "given", "answer": "last"})
    except AlphaprofError as error:
        return error.message
    assert document.given is not None
    return texts([document])[0] + words.decode(document.given)


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompt_and_answer_are_what_the_model_wrote_or_the_row_is_bad(tmp_path: Path, name: str) -> None:
    for answer, options, wanted in WRITTEN[name]:
        words = tokenizer()
        words.chat_template = TEMPLATES[name]
        prompt = words.apply_chat_template(
            [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True, **options
        )
        found = measured(tmp_path / "rows.jsonl", TEMPLATES[name], answer, **options)
        assert (
            wanted in found
            if wanted in (LACKS, ENDS, NONE) or wanted.startswith("thinking that")
            else found == prompt + wanted
        ), (
            answer,
            found,
        )


CALLS = [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]
WITH_CALLS = LOOP + "<{{ m.role }}>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
WITH_CALLS += "{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.function.name }}]{% endfor %}" + ASKED + DONE


@each(
    ("template", "answer", "wanted"),
    [
        (WITH_CALLS, [APART | {"tool_calls": CALLS}], "<user>hi<assistant><think>Hm.</think>Ok.[f]"),
        (
            WITH_CALLS,
            [APART | {"tool_calls": CALLS}, {"content": "More."}],
            "<user>hi<assistant><think>Hm.</think>Ok.[f]<assistant>More.",
        ),
        (TEMPLATES["r1"], [APART | {"tool_calls": CALLS}], "does not write after the prompt"),
        (TEMPLATES["kimi"], [APART | {"tool_calls": CALLS}], "thinking that the chat template leaves out"),
        (LOOP + "<{{ m.role }}>{{ m.content | upper }}" + ASKED + DONE, [BARE], "write as it stands"),
    ],
)
def test_an_answer_with_calls_is_as_the_template_writes_it(
    tmp_path: Path, template: str, answer: list[dict[str, Any]], wanted: str
) -> None:
    found = measured(tmp_path / "rows.jsonl", template, *answer)
    assert found == wanted if wanted.startswith("<user>") else wanted in found
