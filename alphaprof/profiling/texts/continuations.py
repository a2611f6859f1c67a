"""The text that positions are measured on: generated or given, in batches that a resumed run makes again."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import LogitsProcessorList

from alphaprof.errors import OutOfMemory
from alphaprof.profiling.models.load import Model, is_out_of_memory
from alphaprof.profiling.models.processing import Sampler, uniforms
from alphaprof.profiling.texts.corpus import Document, document_of, stored
from alphaprof.run.schema import CONTINUATION_COLUMNS, arrow_schema
from alphaprof.run.split import Ids
from alphaprof.stats.grouping import grouped

Item = TypeVar("Item")
Result = TypeVar("Result")
LEAST = 1 / 16
PADDING = 0.07  # of a scoring batch, at most, while it is not too small


def batches(lengths: Sequence[int], budget: int, padding: float = 1.0) -> Iterator[list[int]]:
    """Indices in batches of similar length, longest first: the padded size of a batch stays within `budget` tokens.

    A text longer than the budget makes a batch of its own. `padding`: the largest share of a batch that may be padding,
    where it has `LEAST` of the budget without the next text; a smaller one costs more than padding does.
    """
    batch: list[int] = []
    tokens = 0
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        if batch:
            longest = max(1, lengths[batch[0]])
            size = (len(batch) + 1) * longest
            loose = size - tokens - lengths[index] > padding * size and len(batch) * longest >= LEAST * budget
            if size > budget or loose:
                yield batch
                batch, tokens = [], 0
        batch.append(index)
        tokens += lengths[index]
    if batch:
        yield batch


def fed(lengths: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return how many tokens texts of one batch have that goes through a model, and the padding to the longest of them,
    [2].
    """
    return np.array([sum(lengths), len(lengths) * max(lengths) - sum(lengths)])


def halving(
    run: Callable[[list[Item]], list[Result]],
    items: list[Item],
    describe: Callable[[Item], str],
    models: Sequence[Model] = (),
) -> tuple[list[Result], int]:
    """`run(items)`, in halves when memory runs out, and how many times a batch was halved. Raises `OutOfMemory` when a
    single item does not fit; `models`: those that run.
    """
    try:
        return run(items), 0
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    # Outside the except block, where the traceback no longer keeps the tensors of the failed attempt alive.
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if len(items) == 1:
        hint = "lower max_new_tokens, use a smaller dtype, or set a device_map"
        if eager := [model.name for model in models if model.attn_implementation == "eager"]:
            other = f"set attn_implementation of {', '.join(eager)} to flex_attention, sdpa or flash_attention_3, because "
            hint = f"{other}eager attention makes scores of all pairs of tokens at once; or {hint}"
        raise OutOfMemory(f"out of memory on {describe(items[0])} alone", hint)
    middle = len(items) // 2
    first, halved_first = halving(run, items[:middle], describe, models)
    second, halved_second = halving(run, items[middle:], describe, models)
    return first + second, 1 + halved_first + halved_second


@dataclass(frozen=True)
class Continuation:
    """A document with its continuation; `ids` ends with EOS where the text ended by itself."""

    document: Document
    ids: Ids
    finish: str  # eos | length

    @property
    def tokens(self) -> int:
        """Length of prompt and continuation."""
        return len(self.document.prompt) + len(self.ids)


def generation_batches(documents: Sequence[Document], budget: int) -> Iterator[list[Document]]:
    """Yield documents whose continuation the target generates, in batches of one limit, one processing and similar length.
    As large as the budget allows: a batch more costs a step for each of its tokens, padding only a part of the first.
    """
    written = [document for document in documents if document.given is None]
    for group in grouped(((each.max_new_tokens, each.processing), each) for each in written).values():
        for indices in batches([len(item.prompt) + (item.max_new_tokens or 0) for item in group], budget):
            yield [group[index] for index in indices]


def scoring_batches(continuations: Sequence[Continuation], budget: int) -> Iterator[list[Continuation]]:
    """Yield continuations in batches of one processing and of so similar length that little of them is padding."""
    for group in grouped((item.document.processing, item) for item in continuations).values():
        for indices in batches([item.tokens for item in group], budget, PADDING):
            yield [group[index] for index in indices]


@torch.inference_mode()
def generate(target: Model, documents: Sequence[Document], ids_drawn: int) -> list[Continuation]:
    """Return continuations by the target of documents that share `max_new_tokens` and processing, in one left-padded batch.
    Greedy where the processing is None; else drawn from the first `ids_drawn` ids.
    """
    width = max(len(document.prompt) for document in documents)
    pad = target.eos[0] if target.eos else 0
    prompts = [torch.from_numpy(document.prompt.astype(np.int64)) for document in documents]
    ids = pad_sequence(prompts, batch_first=True, padding_value=pad, padding_side="left")
    mask = pad_sequence([*map(torch.ones_like, prompts)], batch_first=True, padding_side="left")
    settings, limit = documents[0].processing, documents[0].max_new_tokens
    samplers = LogitsProcessorList()
    if settings is not None:
        numbers = np.stack([uniforms(item.seed or 0, item.prompt, item.source_row, limit or 0) for item in documents])
        drawn = min(ids_drawn, target.vocabulary)
        samplers.append(Sampler(settings, torch.from_numpy(numbers).to(target.device), width, drawn))
    output = target.network.generate(
        input_ids=ids.to(target.device),
        attention_mask=mask.to(target.device),
        do_sample=False,  # a sampler leaves one token to choose
        logits_processor=samplers,
        num_beams=1,
        max_new_tokens=limit,
    )
    if hasattr(target.network.base_model, "rope_deltas"):  # of this batch, but the next one over a cache would read them
        target.network.base_model.rope_deltas = None
    new = np.asarray(output[:, width:].cpu().numpy(), dtype=np.int32)
    return [finished(document, row, target.eos) for document, row in zip(documents, new, strict=True)]


def finished(document: Document, ids: Ids, eos: Sequence[int]) -> Continuation:
    """Return the continuation up to its first EOS, which is a position of its own."""
    ends = np.flatnonzero(np.isin(ids, eos))
    return Continuation(document, ids[: ends[0] + 1], "eos") if len(ends) else Continuation(document, ids, "length")


def given(documents: Iterable[Document], eos: Sequence[int]) -> list[Continuation]:
    """Return the logged responses of documents that have one, as they are."""
    return [
        Continuation(item, item.given, "eos" if not item.cut and int(item.given[-1]) in eos else "length")
        for item in documents
        if item.given is not None
    ]


def digest(documents: Sequence[Document]) -> str:
    """SHA-256 over domains, clusters, prompts and given responses, the first 128 bits."""
    total = hashlib.sha256()
    for document in documents:
        total.update(f"{document.document} {document.domain} {document.cluster} {len(document.prompt)}".encode())
        total.update(document.prompt.tobytes())
        total.update(f"{document.processing} {document.seed}".encode())
        total.update(b"" if document.given is None else document.given.tobytes())
    return total.hexdigest()[:32]


def continuation_table(continuations: Sequence[Continuation]) -> pa.Table:
    """Return rows of the continuations table, one a document."""
    rows = [
        {
            **stored(item.document),
            "prompt_hash": item.document.prompt_hash,
            "prompt_tokens": len(item.document.prompt),
            "continuation_tokens": len(item.ids),
            "finish": item.finish,
            "continuation_ids": item.ids,
        }
        for item in continuations
    ]
    return pa.Table.from_pylist(rows, schema=arrow_schema(CONTINUATION_COLUMNS))


def continuations_of(table: pa.Table) -> list[Continuation]:
    """Return the continuations of rows of their table."""
    return [
        Continuation(document_of(row, None, False), np.array(row["continuation_ids"], dtype=np.int32), row["finish"])
        for row in table.to_pylist()
    ]
