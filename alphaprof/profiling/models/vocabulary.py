"""Do target and draft mean the same by a token id? Checked before any work, because a mismatch makes every number wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from alphaprof.errors import VocabularyMismatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_vocabulary(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, name: str) -> None:
    """Raise `VocabularyMismatch` unless every id that both tokenizers have stands for the same token string.

    Tokens that only one of them has, and padding rows of an embedding, are no mismatch. Equal vocabularies do not
    imply equal encodings, which is why the target's tokenizer encodes the text for both.
    """
    shared, odd = shared_ids(target, draft)
    if not odd and shared:
        return
    examples = "; ".join(f"id {index}: {ours!r} / {theirs!r}" for index, ours, theirs in odd[:3])
    raise VocabularyMismatch(
        f"draft {name} has another vocabulary: {len(odd)} of {shared} shared ids differ (target / draft {examples})",
        "choose a draft with the target's tokenizer: speculative decoding compares token ids",
    )


def shared_ids(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> tuple[int, list[tuple[int, str, str]]]:
    """How many ids both tokenizers have, and which of these stand for different tokens: id, target's and draft's token."""
    strings = [{index: token for token, index in tokenizer.get_vocab().items()} for tokenizer in (target, draft)]
    shared = sorted(strings[0].keys() & strings[1].keys())
    pairs = ((index, strings[0][index], strings[1][index]) for index in shared)
    return len(shared), [pair for pair in pairs if pair[1] != pair[2]]


def scored_width(widths: Sequence[int], tokens: int) -> int:
    """How many ids carry probability when the models of a run have `widths` logits and the tokenizer `tokens` ids.

    Rows beyond the tokenizer that only some models have are padding of their embedding matrices: no text contains them,
    and leaving them in would make KL(p || q) infinite at every position. They are cut from all models. Where ids beyond
    the narrowest model are real tokens, all are kept, and the narrower model gives them probability 0.
    """
    return min(widths) if tokens <= min(widths) else max(widths)


def token_count(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the largest id that stands for a token."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def special_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids that stand for no text: BOS, EOS, ends of turn, markers of chat templates."""
    added = (index for index, token in tokenizer.added_tokens_decoder.items() if token.special)
    return tuple(sorted({*map(int, tokenizer.all_special_ids), *map(int, added)}))
