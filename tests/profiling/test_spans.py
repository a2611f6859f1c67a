"""Thinking and answer: which tokens lie between the markers, however a tokenizer cuts them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from alphaprof.config.profile import Markers
from alphaprof.profiling.texts.continuations import spans, thinking
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


def test_every_token_has_the_name_of_its_span() -> None:
    found = spans(MARKERS, BYTES, ids(BYTES, "p"), ids(BYTES, "x<think>a</think>b"))
    assert found.tolist() == ["answer", *["thinking"] * 16, "answer"]


def test_markers_are_what_the_profile_says() -> None:
    odd = Markers(begin="[[", end="]]")
    assert marked("", "a[[b]]<think>", odd) == ".[[b]]......."
    same = Markers(begin="##", end="##")
    assert marked("", "a##b##c##d", same) == ".##b##.##d"


def test_a_token_that_holds_part_of_a_marker_belongs_to_thinking() -> None:
    words = words_of(".<", "think", ">a", "</", ">b")
    text = ids(words, "x.<think>ab</think>bc")
    assert words.convert_ids_to_tokens(text) == ["x", ".<", "think", ">a", "b", "</", "think", ">b", "c"]
    assert thinking(MARKERS, words, [], text).tolist() == [False, True, True, True, True, True, True, True, False]


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
@settings(max_examples=150, deadline=None)
def test_flags_equal_a_walk_character_by_character(
    words: PreTrainedTokenizerFast, markers: Markers, prompt: str, text: str
) -> None:
    before, behind = ids(words, prompt), ids(words, text)
    assert len(behind) == len(text.encode())
    assert thinking(markers, words, before, behind).tolist() == walked(prompt + text, markers)[len(before) :]
