"""Chats as a real vLLM renders them: forty conversations under four chat templates, recorded in tests/golden/chat."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from alphaprof.config.profile import SourceOptions
from alphaprof.profiling.texts.cells import BadRow
from alphaprof.profiling.texts.chat import render_chat, turns_of
from alphaprof.profiling.texts.corpus import encode
from tests.conftest import ROOT

CHAT = ROOT / "tests/golden/chat"
RECORDED = json.loads((CHAT / "vllm.json").read_text(encoding="utf-8"))
DEFAULTS = RECORDED["default_chat_template_kwargs"]
PROMPTS = RECORDED["prompts"]  # by template and conversation: token ids, or why vLLM refuses it
CHATS = [json.loads(line) for line in (CHAT / "conversations.jsonl").read_text(encoding="utf-8").splitlines()]
EVERY = "channels coder headers inst"
# Requests that vLLM refuses, and logs may hold: they are rendered as if the content were parts, and the arguments text.
LENIENT = {"only_strings", "call_with_object"}
# A prompt that says nothing is left out, and the answer that ends a chat is cut off: these are rendered as they are.
WHOLE = {"empty_contents", "assistant_at_the_end"}


def rendered(name: str, request: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> list[int] | None:
    """The token ids of a request's prompt, None if it is refused or says nothing."""
    variables = request.get("chat_template_kwargs", {})
    if effort := request.get("reasoning_effort"):  # which vLLM turns into a variable beside
        variables = {"enable_thinking": effort != "none", **variables, "reasoning_effort": effort}
    row = {**request, "variables": variables | ({"documents": request["documents"]} if "documents" in request else {})}
    source = {
        "domain": "chat",
        "path": "x",
        "messages": "messages",
        "chat_template_kwargs": "variables",
        "chat_options": DEFAULTS,
    }
    source |= {"tools": "tools"} if "tools" in request else {}
    try:
        if name in WHOLE:
            text = render_chat(tokenizer, turns_of(request["messages"]), DEFAULTS)
            return list(tokenizer(text, add_special_tokens=False)["input_ids"])
        found = encode(SourceOptions.model_validate(source), row, tokenizer)[0].tolist()
    except BadRow:
        return None
    return found or None


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(CHAT, local_files_only=True)


@pytest.mark.parametrize("template", PROMPTS)
@pytest.mark.parametrize("chat", CHATS, ids=[chat["name"] for chat in CHATS])
def test_a_chat_has_the_token_ids_of_vllm(template: str, chat: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = (CHAT / f"{template}.jinja").read_text(encoding="utf-8")
    found, ours = PROMPTS[template][chat["name"]], rendered(chat["name"], copy.deepcopy(chat["request"]), tokenizer)
    if chat["name"] in LENIENT:
        assert isinstance(found, str)
        assert ours is not None
    else:
        assert ours == (found if isinstance(found, list) else None)


def test_the_record_holds_every_chat_under_every_template() -> None:
    """And says of most how they are rendered: a witness that refuses everything shows nothing."""
    assert set(PROMPTS) == {path.stem for path in CHAT.glob("*.jinja")} == set(EVERY.split())
    assert all(list(named) == [chat["name"] for chat in CHATS] for named in PROMPTS.values())
    assert all(sum(isinstance(ids, list) for ids in named.values()) >= 34 for named in PROMPTS.values())
