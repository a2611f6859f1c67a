"""Spans of a text: which tokens lie between the markers, however a tokenizer cuts them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from alphaprof.config.load import validate
from alphaprof.config.profile import Markers
from alphaprof.profiling.texts.spans import FENCES, TEMPLATED, Kind, decoded, kinds_of, spans
from tests.loops import each
from tests.tiny import tokenizer

BYTES = tokenizer()  # cuts every marker into single characters
MARKERS = Markers()


def words_of(*merged: str) -> PreTrainedTokenizerFast:
    """The byte tokenizer with further tokens, each of them several characters long."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *dict.fromkeys(piece[:end] for piece in merged for end in range(2, len(piece) + 1))]
    merges = list(dict.fromkeys((piece[:end], piece[end]) for piece in merged for end in range(1, len(piece))))
    core = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.Split("|", "isolated")
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core)


def ids(words: PreTrainedTokenizerFast, text: str) -> list[int]:
    return list(words(text, add_special_tokens=False)["input_ids"])


def kind(markers: Markers) -> list[Kind]:
    return [Kind("thinking", markers.begin, markers.end)]


def thinking(markers: Markers, words: PreTrainedTokenizerFast, prompt: list[int], text: list[int]) -> Any:
    """Which tokens of a continuation are thinking, where nothing else is told apart."""
    found = spans(kind(markers), words, prompt, text)
    assert set(found) <= {"thinking", "answer"}
    return found == "thinking"


def marked(prompt: str, text: str, markers: Markers = MARKERS) -> str:
    """The characters of a continuation that are thinking, one token a byte; the others as dots."""
    found = thinking(markers, BYTES, ids(BYTES, prompt), ids(BYTES, text))
    assert len(found) == len(text)
    return "".join(letter if flag else "." for letter, flag in zip(text, found, strict=True))


BY_HAND = [
    # prompt, continuation, thinking
    ("p", "<think>a</think>b", "<think>a</think>."),
    ("p", "xy<think>a</think>b", "..<think>a</think>."),
    ("p", "abc", "..."),
    ("p", "<think>a", "<think>a"),
    ("p<think>", "a</think>b", "a</think>."),
    ("p<thi", "nk>a</think>b", "nk>a</think>."),
    ("p<think>a</thi", "nk>b", "nk>."),
    ("<think>a</think>p<think>", "b</think>c", "b</think>."),
    ("p", "<think>a</think>b<think>c</think>d", "<think>a</think>.<think>c</think>."),
    ("p", "<think>a<think>b</think>c</think>", "<think>a<think>b</think>........."),  # what is opened is open
    ("p", "</think><think>a</think>", "........<think>a</think>"),
    ("p", "<think>a</think><think>b", "<think>a</think><think>b"),
]


@each(("prompt", "text", "expected"), BY_HAND)
def test_thinking_lies_between_its_markers_which_belong_to_it(prompt: str, text: str, expected: str) -> None:
    assert marked(prompt, text) == expected


def test_markers_are_what_the_profile_says() -> None:
    odd = Markers(begin="[[", end="]]")
    assert marked("", "a[[b]]<think>", odd) == ".[[b]]......."
    same = Markers(begin="##", end="##")
    assert marked("", "a##b##c##d", same) == ".##b##.##d"


def test_a_token_across_a_border_belongs_to_where_it_starts() -> None:
    words = words_of(".<", "think", ">a", "</", ">b")
    text = ids(words, "x.<think>ab</think>bc")
    assert words.convert_ids_to_tokens(text) == ["x", ".<", "think", ">a", "b", "</", "think", ">b", "c"]
    assert thinking(MARKERS, words, [], text).tolist() == [False, False, True, True, True, True, True, True, False]


def fallback() -> PreTrainedTokenizerFast:
    """A tokenizer with a token for every ASCII character and one for every byte of all others, as SentencePiece has them."""
    tokens = [*(f"<0x{byte:02X}>" for byte in range(256)), *(chr(code) for code in range(32, 127)), "<unk>"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    core.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=core)


def test_a_tokenizer_that_drops_a_space_at_the_beginning_of_what_it_decodes_hides_no_marker() -> None:
    vocabulary = {token: index for index, token in enumerate(["\u2581", "a", "b", "[", "]"])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    core.decoder = decoders.Metaspace(prepend_scheme="always")
    words = PreTrainedTokenizerFast(tokenizer_object=core)
    assert words.decode(ids(words, " a b")) == "a b"
    text = "a b [ [ a ] ] b a"
    found = thinking(Markers(begin=" [ [", end="] ] "), words, ids(words, "a"), ids(words, text))
    assert "".join(letter if flag else "." for letter, flag in zip(text, found, strict=True)) == "... [ [ a ] ] ..."


def walked(text: str, markers: Markers) -> list[bool]:
    """Which bytes of a text are thinking, found character by character."""
    found: list[bool] = []
    inside, place = False, 0
    while place < len(text):
        marker = markers.end if inside else markers.begin
        size = len(marker) if text.startswith(marker, place) else 1
        found += [inside or size > 1] * len(text[place : place + size].encode())
        inside, place = inside != (size > 1), place + size
    return found


PIECES = ["<think>", "</think>", "◁in▷", "◁out▷", "a", "<", ">", "think", "/", "ü", "\U0001f600"]
pieces = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


@pytest.mark.parametrize("markers", [MARKERS, Markers(begin="◁in▷", end="◁out▷")], ids=str)
@pytest.mark.parametrize("words", [BYTES, fallback()], ids=["bytes", "fallback"])
@given(prompt=pieces, text=pieces.filter(bool))
def test_flags_equal_a_walk_character_by_character(
    words: PreTrainedTokenizerFast, markers: Markers, prompt: str, text: str
) -> None:
    before, behind = ids(words, prompt), ids(words, text)
    assert len(behind) == len(text.encode())
    assert thinking(markers, words, before, behind).tolist() == walked(prompt + text, markers)[len(before) :]


TEXT = (
    "He said: \u201cna\u00efve\u201d  \u65e5\u672c\u8a9e, \U0001f600\U0001f44d\U0001f3fd\U0001f468\u200d\U0001f469!\n\n"
    '```json\n{"a": [1, 2]}\n```\n\tdone <think>hm </think>\u0161.'
)


@pytest.fixture(scope="module", params=["SentencePiece", "bytes"])
def real(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    """Llama's tokenizer, with bytes where there is no token, and that of SmolLM2, whose tokens are bytes."""
    if request.param == "SentencePiece":
        return AutoTokenizer.from_pretrained(request.getfixturevalue("stories15m"))
    path: Path = request.getfixturevalue("demo_model")
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


characters = st.sampled_from([*TEXT, " ", "  ", "\n", "\u4e16\u754c", "\U0001f469\U0001f3fd", "<|im_end|>", "ing "])


@given(text=st.one_of(st.just(TEXT), st.lists(characters, min_size=1, max_size=30).map("".join)))
def test_offsets_are_those_of_hugging_face(real: PreTrainedTokenizerFast, text: str) -> None:
    """For each token of a text, also where a character is cut into several tokens, or several share one."""
    text = "x" + text  # of a text that begins with a space SentencePiece's own decoding drops it
    encoded = real(text, add_special_tokens=False, return_offsets_mapping=True)
    found, starts = decoded(encoded["input_ids"], real)
    assert found == text
    assert starts == [start for start, _ in encoded["offset_mapping"]]


def test_bytes_that_make_no_character_hide_no_marker() -> None:
    odd = BYTES.convert_tokens_to_ids(["\u00ff", "\u00f0"])
    text = [*odd, *ids(BYTES, "a"), *odd * 20, *ids(BYTES, "<think>b"), odd[0], *ids(BYTES, "</think>c")]
    found = thinking(MARKERS, BYTES, [], text)
    assert found.tolist() == [False] * 43 + [True] * 17 + [False]


QWEN = "{%- if reasoning_content %}{{ '<think>' }}...{{ '<tool_call>\\n' }}"
GPT_OSS = "<|start|>assistant<|channel|>analysis<|message|> ... <|call|>"
ANALYSIS, FINAL = "<|channel|>analysis<|message|>a<|end|>", "<|start|>assistant<|channel|>final<|message|>"
CALL = "<|start|>assistant<|channel|>commentary to=functions.f json<|message|>{}<|call|>"
BY_TEMPLATE = [
    # chat template, prompt, continuation, names of spans with their texts
    (QWEN, "p<think>", "a```b``` </think>c", [("thinking", "a```b``` </think>"), ("answer", "c")]),
    (QWEN, "p", "a```b```c", [("answer", "a"), ("code", "```b```"), ("answer", "c")]),
    (QWEN, "a ```", "b", [("answer", "b")]),  # a fence of the prompt is not the model's
    (QWEN, "a <tool_call>", "b", [("answer", "b")]),  # which describes its tools
    (QWEN, "p", '```json {"a": 1}```', [("json", '```json {"a": 1}```')]),
    (QWEN, "p", "```js a", [("code", "```js a")]),
    (
        QWEN,
        "p",
        "b<tool_call>{}</tool_call>\n",
        [("answer", "b"), ("tool call", "<tool_call>{}</tool_call>"), ("answer", "\n")],
    ),
    (QWEN, "p", '<think>a</think>\n{"a": ["', [("thinking", "<think>a</think>"), ("json", '\n{"a": ["')]),
    (QWEN, "p", ' [{"a": 1}, ', [("json", ' [{"a": 1}, ')]),
    (QWEN, "p", "[1] as Ada said", [("answer", "[1] as Ada said")]),
    (QWEN, "p", "{name}: ", [("answer", "{name}: ")]),
    (QWEN, "p", "[" * 5000, [("json", "[" * 5000)]),
    (QWEN, "p", "[" * 50_000, [("json", "[" * 50_000)]),
    (QWEN, "p", f"[{'1' * 5000}]", [("answer", f"[{'1' * 5000}]")]),
    (None, "p", "<think>a</think>```b", [("answer", "<think>a</think>"), ("code", "```b")]),
    ({"default": "", "tool_use": QWEN}, "p", "<think>", [("thinking", "<think>")]),
    ("[TOOL_CALLS]", "[TOOL_CALLS]", "a[TOOL_CALLS]f{}", [("answer", "a"), ("tool call", "[TOOL_CALLS]f{}")]),
    (GPT_OSS, "p", f"{ANALYSIS}{FINAL}b", [("thinking", ANALYSIS), ("answer", f"{FINAL}b")]),
    (GPT_OSS, "p", f"{ANALYSIS}{FINAL}[]", [("thinking", ANALYSIS), ("json", f"{FINAL}[]")]),
    (GPT_OSS, "p", CALL, [("answer", CALL[: CALL.index("<|ch")]), ("tool call", CALL[CALL.index("<|ch") :])]),
]


def options(**changes: Any) -> Any:
    data = [{"domain": "code", "path": "data.jsonl", "prompt": "{text}"}]
    return validate({"target": "m", "drafts": {"ngram": {"kind": "prompt_lookup"}}, "data": data} | changes, "profile.yaml")


def told_apart(text: str, found: Any) -> list[tuple[str, str]]:
    """Runs of tokens of one span, one token a byte."""
    begins = np.flatnonzero([True, *(found[1:] != found[:-1])])
    return [(found[begin], text[begin:end]) for begin, end in zip(begins, [*begins[1:], len(text)], strict=True)]


@each(("template", "prompt", "text", "expected"), BY_TEMPLATE)
def test_spans_are_found_by_the_markers_of_the_targets_chat_template(
    template: Any, prompt: str, text: str, expected: list[tuple[str, str]]
) -> None:
    words = tokenizer()
    words.chat_template = template
    kinds = kinds_of(options(spans="auto"), words)
    assert kinds is not None
    assert told_apart(text, spans(kinds, words, ids(words, prompt), ids(words, text))) == expected


def test_the_end_of_a_text_is_no_part_of_its_json() -> None:
    text = ids(BYTES, "{}")
    assert spans(FENCES, BYTES, [], [*text, *ids(BYTES, "!")]).tolist() == ["answer"] * 3
    assert spans(FENCES, BYTES, [], [*text, *ids(BYTES, "!")], ended=True).tolist() == ["json"] * 3


def test_markers_of_the_profile_come_before_those_of_the_template() -> None:
    words = tokenizer()
    words.chat_template = QWEN
    own = Kind("thinking", "<a>", "</a>")
    tools = Kind("tool call", "<tool_call>", "</tool_call>")
    markers = {"begin": "<a>", "end": "</a>"}
    assert kinds_of(options(), words) is None
    assert kinds_of(options(thinking=markers), words) == (own,)
    assert kinds_of(options(spans={"thinking": markers}), words) == (own, tools, *FENCES)
    assert kinds_of(options(spans="auto", thinking=markers), words) == (own, tools, *FENCES)
    named = kinds_of(options(spans={"plan": {}}), words)
    assert named is not None
    assert spans(named, words, [], ids(words, "<think>")).tolist() == ["plan"] * 7
    assert kinds_of(options(spans={"sql": {"begin": "```sql", "end": "```"}}), words) == (
        Kind("sql", "```sql", "```"),
        *(kind for kind in TEMPLATED if kind.begin in ("<think>", "<tool_call>")),
        *FENCES,
    )
