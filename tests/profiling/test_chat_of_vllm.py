"""Chats as a real vLLM renders them: forty conversations under four chat templates, recorded in tests/golden/chat."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.conftest import ROOT

CHAT = ROOT / "tests/golden/chat"
RECORDED = json.loads((CHAT / "vllm.json").read_text(encoding="utf-8"))
DEFAULTS = RECORDED["default_chat_template_kwargs"]
PROMPTS = RECORDED["prompts"]  # by template and conversation: token ids, or why vLLM refuses it
CHATS = [json.loads(line) for line in (CHAT / "conversations.jsonl").read_text(encoding="utf-8").splitlines()]
EVERY = "channels coder headers inst"
# What transformers alone renders in another way, by template: all that a renderer does before the template. These fail.
OTHERS = {
    # Parts of a content are one text, by lines; a template that reads parts gets nothing but parts.
    "system_in_parts": "coder headers inst",
    "several_parts": "coder headers inst",
    "empty_part": "coder headers inst",
    "text_and_part": EVERY,
    "parts_with_more_keys": "coder headers inst",
    "refusal_part": EVERY,
    "thinking_part": EVERY,
    "empty_contents": "coder headers inst",
    # A developer is the system where the template knows none, and the system's messages are one, the first.
    "developer": "coder headers inst",
    "system_and_developer": "coder headers inst",
    "developer_late_in_parts": "coder headers inst",
    # The arguments of a call are an object, and its keys stand in vLLM's order.
    "call": EVERY,
    "call_without_arguments": EVERY,
    "call_with_nested_arguments": EVERY,
    "call_with_broken_arguments": EVERY,
    "calls_together": "channels coder inst",  # headers refuses several calls
    "no_calls_in_list": "channels headers",  # tests whether a turn has the key tool_calls
    # A result is a text.
    "results_in_parts": EVERY,
    # A function has a description and parameters, null if need be, and no keys that vLLM does not know.
    "tools_of_few_words": "coder headers inst",
    # Reasoning has two names.
    "reasoning_with_calls": EVERY,
    # Variables that are null or "auto" are left out; the request's add_generation_prompt counts, and reasoning_effort.
    "variables": "channels coder headers",
    "variables_auto": "channels headers",
    "documents_and_effort": "channels coder",
    # The first line of a system message may be one that vLLM drops.
    "billing_header": EVERY,
    # Requests that are not in OpenAI's format are refused.
    "only_strings": EVERY,
    "call_with_object": EVERY,
    "nothing_said": EVERY,
}


def rendered(request: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> list[int] | None:
    """The token ids of a request's prompt, None if it is refused.

    CONNECT HERE the renderer of alphaprof, and delete `OTHERS`: this is transformers alone. Keys that hold nothing are left
    out, as newer versions of transformers do.
    """
    turns = [{key: value for key, value in turn.items() if value is not None} for turn in request["messages"]]
    given = {name: request.get(name) for name in ("tools", "documents")}
    variables = {"add_generation_prompt": True, **DEFAULTS, **request.get("chat_template_kwargs", {})}
    try:
        return list(tokenizer.apply_chat_template(turns, return_dict=False, **given, **variables))
    except Exception:  # templates raise jinja's errors and those of whatever they call
        return None


def cases() -> list[Any]:
    """Every conversation under every template."""
    failing = {(name, template) for name, templates in OTHERS.items() for template in templates.split()}
    return [
        pytest.param(
            template,
            chat["name"],
            chat["request"],
            id=f"{template}-{chat['name']}",
            marks=[pytest.mark.xfail(strict=True)] if (chat["name"], template) in failing else [],
        )
        for template in PROMPTS
        for chat in CHATS
    ]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(CHAT, local_files_only=True)


@pytest.mark.parametrize(("template", "name", "chat"), cases())
def test_a_chat_has_the_token_ids_of_vllm(
    template: str, name: str, chat: dict[str, Any], tokenizer: PreTrainedTokenizerBase
) -> None:
    tokenizer.chat_template = (CHAT / f"{template}.jinja").read_text(encoding="utf-8")
    found = PROMPTS[template][name]
    assert rendered(copy.deepcopy(chat), tokenizer) == (found if isinstance(found, list) else None)


def test_the_record_holds_every_chat_under_every_template() -> None:
    """And says of most how they are rendered: a witness that refuses everything shows nothing."""
    assert set(PROMPTS) == {path.stem for path in CHAT.glob("*.jinja")} == set(EVERY.split())
    assert all(list(named) == [chat["name"] for chat in CHATS] for named in PROMPTS.values())
    assert all(sum(isinstance(ids, list) for ids in named.values()) >= 34 for named in PROMPTS.values())
