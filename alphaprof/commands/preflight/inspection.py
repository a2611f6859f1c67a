"""What the first documents of a source, and a tokenizer, look like: no model runs."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from alphaprof.commands.preflight.facts import Bos, SourceSeen, Special
from alphaprof.errors import AlphaprofError
from alphaprof.profiling.models.hub import row_count
from alphaprof.profiling.models.load import Model
from alphaprof.profiling.texts.corpus import LOST_BOS, Corpus, Document, Ids
from alphaprof.profiling.texts.templates import render_chat
from alphaprof.rules import GREEDY, SAMPLED

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from alphaprof.config.profile import ProfileOptions, SourceOptions

FIRST = 200  # documents of a source that are looked at
SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


def first_documents(
    options: ProfileOptions, index: int, tokenizer: PreTrainedTokenizerBase, target: Model, bos: Bos
) -> tuple[SourceSeen, list[Document]]:
    """The first documents of one source, and what they look like. Raises the errors of `Corpus`."""
    source = options.data[index]
    alone = source.model_copy(update={"continuation": options.continuation_of(index)})
    corpus = Corpus(
        options.model_copy(update={"data": [alone]}), tokenizer, target.context, target.vocabulary, target.served
    )
    found = list(itertools.islice(corpus, FIRST))
    prompts = [len(document.prompt) for document in found]
    begin, lost = tokenizer.bos_token_id, corpus.truncated[LOST_BOS]
    seen = SourceSeen(
        source=index,
        path=Path(source.path).name,
        domains=tuple(dict.fromkeys(document.domain for document in found)),
        prompts=_prompts(options, index),
        generated=options.continuation_of(index).kind in (GREEDY, SAMPLED),
        documents=len(found),
        planned=_planned(source, len(found), len(found) + corpus.skipped.total()),
        shortest_prompt=min(prompts),
        median_prompt=int(statistics.median(prompts)),
        longest_prompt=max(prompts),
        prompt_tokens=sum(prompts),
        new_tokens=sum(map(new_tokens, found)),
        longest=max(map(length, found)),
        skipped=dict(corpus.skipped),
        truncated={reason: texts for reason, texts in corpus.truncated.items() if reason != LOST_BOS},
        double_bos=sum(_begins(document.prompt, begin, 2) for document in found),
        without_bos=sum(not _begins(document.prompt, begin, 1) for document in found) - lost if bos.added else 0,
        lost_bos=lost,
    )
    return seen, found


def new_tokens(document: Document) -> int:
    """How many tokens the continuation of a document has at most."""
    return len(document.given) if document.given is not None else document.max_new_tokens or 0


def length(document: Document) -> int:
    """How many tokens a document has at most, prompt and continuation."""
    return len(document.prompt) + new_tokens(document)


def outside(documents: Sequence[Document], context: int | None) -> tuple[int, int]:
    """How many documents have positions at which a draft with this context proposes nothing, and how many none else."""
    if context is None:
        return 0, 0
    beyond = sum(length(document) - 1 > context for document in documents)  # the last token is not read
    return beyond, sum(len(document.prompt) > context for document in documents)


def repeated(documents: Sequence[Document]) -> int:
    """How many documents have a prompt that occurs before."""
    return len(documents) - len({document.prompt.tobytes() for document in documents})


def bos_of(tokenizer: PreTrainedTokenizerBase) -> Bos:
    """What becomes of the token that begins texts."""
    begin = tokenizer.bos_token_id
    if begin is None:
        return Bos(None, added=False, in_template=None)
    added = bool(tokenizer("a")["input_ids"][:1] == [begin])
    return Bos(str(tokenizer.bos_token), added, _template_begins(tokenizer, begin))


def differing_specials(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> tuple[Special, ...]:
    """The special tokens that two tokenizers name differently."""
    pairs = [(name.removesuffix("_token"), getattr(target, name), getattr(draft, name)) for name in SPECIAL]
    return tuple(Special(name, ours, theirs) for name, ours, theirs in pairs if ours != theirs)


def _template_begins(tokenizer: PreTrainedTokenizerBase, begin: int) -> bool | None:
    if not tokenizer.chat_template:
        return None
    turn = [{"role": "user", "content": "a"}]
    try:
        text = render_chat(tokenizer, turn, {}, "one turn")
    except AlphaprofError:  # some templates want more than one turn
        return None
    return bool(tokenizer(text, add_special_tokens=False)["input_ids"][:1] == [begin])


def _begins(prompt: Ids, begin: int | None, times: int) -> bool:
    return bool(prompt[:times].tolist() == [begin] * times)


def _prompts(options: ProfileOptions, index: int) -> str:
    """Where the prompts of a source come from."""
    source = options.data[index]
    if options.continuation_of(index).kind == "text":
        return "text"
    if source.chat:
        return "chat"
    return next(name for name in ("messages", "prompt_ids", "prompt") if getattr(source, name) is not None)


def _planned(source: SourceOptions, found: int, rows: int) -> int | None:
    """How many documents a run will take from a source, if what follows is left out as often as in its first `rows`."""
    if found < FIRST:
        return found
    count = row_count(Path(source.path))
    if count is None:
        return source.limit
    return min(max(found, round(count * found / rows)), source.limit or count)
