"""Requests to three APIs as a real vLLM renders them under four chat templates, recorded in tests/golden/chat."""

from __future__ import annotations

import copy
import json
import resource
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from alphaprof.config.profile import SourceOptions
from alphaprof.profiling.texts.cells import BadRow
from alphaprof.profiling.texts.chat import render_chat
from alphaprof.profiling.texts.corpus import encode
from tests.conftest import ROOT
from tests.tiny import tokenizer as tiny_tokenizer

CHAT = ROOT / "tests/golden/chat"
RECORDED = json.loads((CHAT / "vllm.json").read_text(encoding="utf-8"))
DEFAULTS = RECORDED["default_chat_template_kwargs"]
CHATS, BODIES = (
    [json.loads(line) for line in (CHAT / name).read_text(encoding="utf-8").splitlines()]
    for name in ("conversations.jsonl", "bodies.jsonl")
)
EVERY = "channels coder headers inst"
# Requests that vLLM refuses, and logs may hold: they are rendered as if the content were parts, and the arguments text.
LENIENT = {"only_strings", "call_with_object"}
# A prompt that says nothing is left out, and the answer that ends a chat is cut off: these are rendered as they are.
WHOLE = {"empty_contents", "assistant_at_the_end"}
# A role that vLLM hands on to a template that does not know it: a bad row.
UNKNOWN = {"unknown_role"}

KINDS = {"prompts": CHATS, "bodies": BODIES}


def named(value: Any) -> str:
    return str(value["name"]) if isinstance(value, dict) else ""


def rendered(name: str, request: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> list[int] | None:
    """The token ids of a request's prompt, None if it is refused or says nothing."""
    source = {"domain": "chat", "path": "x", "messages": "body", "chat_options": DEFAULTS}
    try:
        if name in WHOLE:
            text = render_chat(tokenizer, request["messages"], DEFAULTS)
            return list(tokenizer(text, add_special_tokens=False)["input_ids"])
        found = encode(SourceOptions.model_validate(source), {"body": request}, tokenizer)[0].tolist()
    except BadRow:
        return None
    return found or None


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(CHAT, local_files_only=True)


@pytest.mark.parametrize("template", EVERY.split())
@pytest.mark.parametrize(("kind", "chat"), [(kind, chat) for kind, chats in KINDS.items() for chat in chats], ids=named)
def test_a_request_has_the_token_ids_of_vllm(
    template: str, kind: str, chat: dict[str, Any], tokenizer: PreTrainedTokenizerBase
) -> None:
    """To /v1/chat/completions, /v1/messages and /v1/responses."""
    tokenizer.chat_template = (CHAT / f"{template}.jinja").read_text(encoding="utf-8")
    found, ours = RECORDED[kind][template][chat["name"]], rendered(chat["name"], copy.deepcopy(chat["request"]), tokenizer)
    if chat["name"] in LENIENT:
        assert isinstance(found, str)
        assert ours is not None
    else:
        assert ours == (found if isinstance(found, list) and chat["name"] not in UNKNOWN else None)


@pytest.mark.parametrize(
    ("template", "refused"),
    [
        ("{% if a %}" * 5000 + "{% endif %}" * 5000, "refused by the chat template"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "refused by the chat template"),
        ("{{ 'user' * 3000000000 }}", "more than 256 MiB"),
        ("{{ 'user' | center(3000000000) }}", "more than 256 MiB"),
    ],
)
def test_a_template_without_a_bottom_is_refused(template: str, refused: str) -> None:
    words, limits = tiny_tokenizer(), resource.getrlimit(resource.RLIMIT_AS)
    words.chat_template = template
    with pytest.raises(BadRow, match=refused):
        render_chat(words, [{"role": "user", "content": "a"}], {})
    assert resource.getrlimit(resource.RLIMIT_AS) == limits


def test_the_record_holds_every_chat_under_every_template() -> None:
    """And says of most how they are rendered: a witness that refuses everything shows nothing."""
    for kind, chats in KINDS.items():
        assert set(RECORDED[kind]) == {path.stem for path in CHAT.glob("*.jinja")} == set(EVERY.split())
        assert all(list(named) == [chat["name"] for chat in chats] for named in RECORDED[kind].values())
        assert all(sum(isinstance(ids, list) for ids in named.values()) >= 33 for named in RECORDED[kind].values())
