"""One teacher-forced pass per model and batch: hidden states, then logits and statistics a chunk of rows at a time.

Memory for vocabulary-sized tensors is bounded by HEAD_ROWS x V logits a model plus about six float32 tensors of
STATISTICS_ROWS x V for the target and for one draft: with V = 150,000 about 0.25 GB on a CPU, whatever the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from alphaprof.errors import LogitsNotFinite
from alphaprof.log.schema import PROPOSED_LIMIT
from alphaprof.profiling.continuations import Continuation
from alphaprof.profiling.head import Head
from alphaprof.profiling.models import Model
from alphaprof.profiling.statistics import Columns, distribution, draft_columns, target_columns
from alphaprof.profiling.vocabulary import scored_width

HEAD_ROWS = {"cpu": 128, "cuda": 1024}
STATISTICS_ROWS = {"cpu": 16, "cuda": 256}
Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Layout:
    """Where the positions of a batch lie in the models' padded input.

    `ids` [batch, length]: prompt and continuation without the last token, right-padded; `row`, `column` [positions]:
    the input token whose hidden state predicts the position; `token` [positions]: what came next. Positions are ordered
    by document, then place.
    """

    ids: torch.Tensor
    row: torch.Tensor
    column: torch.Tensor
    token: torch.Tensor

    @classmethod
    def of(cls, batch: Sequence[Continuation]) -> Layout:
        """The layout of a batch of continuations."""
        ids = torch.zeros((len(batch), max(item.tokens for item in batch) - 1), dtype=torch.long)
        rows, columns, tokens = [], [], []
        for index, item in enumerate(batch):
            text = torch.from_numpy(np.concatenate([item.document.prompt, item.ids]).astype(np.int64))
            first = len(item.document.prompt) - 1
            ids[index, : len(text) - 1] = text[:-1]
            rows.append(torch.full((len(item.ids),), index))
            columns.append(torch.arange(first, first + len(item.ids)))
            tokens.append(text[first + 1 :])
        return cls(ids, torch.cat(rows), torch.cat(columns), torch.cat(tokens))


class Scorer:
    """Scores batches of continuations with a target and its drafts; `tokens` is the tokenizer's number of ids."""

    def __init__(self, target: Model, drafts: Sequence[Model], tokens: int) -> None:
        self.target = Head(target)
        self.drafts = [Head(draft) for draft in drafts]
        self.width = scored_width([model.vocabulary for model in (target, *drafts)], tokens)
        kind = target.device.type
        self.head_rows = HEAD_ROWS.get(kind, HEAD_ROWS["cuda"])
        self.statistics_rows = STATISTICS_ROWS.get(kind, STATISTICS_ROWS["cuda"])

    @torch.inference_mode()
    def score(self, batch: Sequence[Continuation]) -> dict[str, Arrays]:
        """Columns [positions] by draft name: the target's, the draft's, `token` and `proposed`.

        Where `proposed` is 0 the position lies beyond the draft's context, and the draft's columns mean nothing.
        Raises `LogitsNotFinite`.
        """
        layout = Layout.of(batch)
        target_rows = self.target.rows(layout.ids, layout.row, layout.column)
        draft_rows = [draft.rows(layout.ids, layout.row, layout.column) for draft in self.drafts]
        parts: list[list[Columns]] = []
        for start in range(0, len(layout.token), self.head_rows):
            chunk = slice(start, start + self.head_rows)
            logits = self.target.logits(target_rows[chunk])
            draft_logits = [
                draft.logits(rows[chunk]).to(logits.device) for draft, rows in zip(self.drafts, draft_rows, strict=True)
            ]
            parts += self._statistics(logits, draft_logits, layout.token[chunk].to(logits.device))
        columns = [_joined(pieces) for pieces in zip(*parts, strict=True)]
        ours, theirs = columns[0], columns[1:]
        _require_finite(ours["target_entropy"], "target", batch, layout)
        for draft, found in zip(self.drafts, theirs, strict=True):
            _require_finite(found["draft_entropy"], draft.model.name, batch, layout)
            found["proposed"] = _proposed(draft.model, layout)
        ours["token"] = layout.token.numpy()
        return {draft.model.name: ours | found for draft, found in zip(self.drafts, theirs, strict=True)}

    def _statistics(
        self, logits: torch.Tensor, draft_logits: Sequence[torch.Tensor], token: torch.Tensor
    ) -> list[list[Columns]]:
        """Columns of a chunk, in pieces that fit the cache: for each piece the target's, then each draft's."""
        pieces = []
        for start in range(0, len(token), self.statistics_rows):
            rows = slice(start, start + self.statistics_rows)
            target = distribution(logits[rows, : self.width])
            drafts = [distribution(found[rows, : self.width]) for found in draft_logits]
            pieces.append(
                [target_columns(target, token[rows]), *(draft_columns(target, draft, token[rows]) for draft in drafts)]
            )
        return pieces


def _joined(pieces: Sequence[Columns]) -> Arrays:
    return {name: torch.cat([piece[name] for piece in pieces]).cpu().numpy() for name in pieces[0]}


def _proposed(draft: Model, layout: Layout) -> np.ndarray[Any, Any]:
    """Tokens that a round starting at each position may propose: until the draft's context is full, and none behind a
    token that the draft does not have.
    """
    unknown = layout.ids >= draft.vocabulary
    length = layout.ids.shape[1] + PROPOSED_LIMIT
    known = torch.where(unknown.any(1), unknown.int().argmax(1), length if draft.context is None else draft.context)
    limit = known if draft.context is None else known.clamp(max=draft.context)
    return np.asarray((limit[layout.row] - layout.column).clamp(0, PROPOSED_LIMIT).numpy(), dtype=np.int16)


def _require_finite(entropy: np.ndarray[Any, Any], name: str, batch: Sequence[Continuation], layout: Layout) -> None:
    """Raise `LogitsNotFinite` for the first position whose entropy is NaN (see `statistics.distribution`)."""
    bad = np.flatnonzero(~np.isfinite(entropy))
    if len(bad) == 0:
        return
    item = batch[int(layout.row[bad[0]])]
    position = int(layout.column[bad[0]]) - len(item.document.prompt) + 1
    raise LogitsNotFinite(
        f"the logits of {name} hold NaN or infinity at document {item.document.document}, position {position}",
        "check the weights, or use another dtype (float16 overflows in models made for bfloat16)",
    )
