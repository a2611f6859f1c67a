"""One teacher-forced pass per model and batch: hidden states, logits, statistics, and rows of the position log."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pyarrow as pa
import torch
from torch.nn.utils.rnn import pad_sequence

from alphaprof.errors import LogitsNotFinite
from alphaprof.profiling.models.draft import Arrays, Draft, DraftPass
from alphaprof.profiling.models.load import Model
from alphaprof.profiling.models.processing import PLAIN, Processing
from alphaprof.profiling.models.teacher_forced import States, TeacherForced, recorded
from alphaprof.profiling.scoring.dispatch import joined, measured
from alphaprof.profiling.scoring.statistics import (
    Columns,
    chunks,
    probabilities,
    processed_logits,
    rows_at_once,
    spread,
    top_odds,
    top_probs,
)
from alphaprof.profiling.texts.continuations import Continuation
from alphaprof.rules import BoundRule, parse_rule, rules_of
from alphaprof.run.schema import DEPTHS, DISTRIBUTION, OWN_PATH, SPANS, STARTS, LogRules, arrow_schema
from alphaprof.theory.certificates import ACCEPTED, Target, certify
from alphaprof.totals.replay import runs_by_depth

LARGEST = float(np.finfo(np.float16).max)
HEAD_ROWS = {"cpu": 128, "cuda": 1024}
TOP = 64  # target probabilities that thresholds look at: enough for every rule but where the target has hardly an opinion


@dataclass(frozen=True)
class Extras:
    """What a scoring pass measures on request. `certified`: rules whose thresholds are wanted; `drawn`: ids of rules that
    draw drafts from q.
    """

    certified: tuple[BoundRule, ...] = ()
    drawn: tuple[str, ...] = ()

    @classmethod
    def of(cls, rules: Iterable[str], certificates: bool) -> Extras:
        """Return what a profile with these ids of rules asks for."""
        rules = tuple(rules)
        certified = tuple(rule for rule in rules_of(rules) if certificates and rule.name in ACCEPTED)
        return cls(certified, LogRules(rules).drawn)

    def log_rules(self, rules: Iterable[str]) -> LogRules:
        """Return what a log with these extras holds of which rules."""
        return LogRules(tuple(rules), tuple(rule.id for rule in self.certified))

    def thresholds(self, top: np.ndarray[Any, Any], entropy: np.ndarray[Any, Any], vocabulary: int) -> Arrays:
        """Return columns [positions] from the target's TOP probabilities [positions, TOP], largest first, and its
        entropy.
        """
        target = Target(top, vocabulary, entropy)
        columns = {"target_top_10_prob": np.minimum(1.0, target.top[:, :10].sum(1)).astype(np.float32)}
        exact = np.ones(len(top), dtype=bool)
        for rule in self.certified:
            threshold = certify(rule, target)
            columns[f"threshold_{rule.id}"] = threshold.value.astype(np.float32)
            exact &= threshold.exact
        return columns | {"thresholds_exact": exact}


NO_EXTRAS = Extras()


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
        """Return the layout of a batch of continuations."""
        texts = [torch.from_numpy(np.concatenate([item.document.prompt, item.ids]).astype(np.int64)) for item in batch]
        prompts = [len(item.document.prompt) for item in batch]
        row = torch.arange(len(batch)).repeat_interleave(torch.tensor([len(item.ids) for item in batch]))
        column = [torch.arange(prompt - 1, len(text) - 1) for prompt, text in zip(prompts, texts, strict=True)]
        token = [text[prompt:] for prompt, text in zip(prompts, texts, strict=True)]
        return cls(pad_sequence([text[:-1] for text in texts], batch_first=True), row, torch.cat(column), torch.cat(token))


def scored_width(widths: Sequence[int], tokens: int) -> int:
    """Return how many ids carry probability when the models of a run have `widths` logits and the tokenizer `tokens` ids.

    Rows beyond the tokenizer that only some models have are padding of their embedding matrices: no text contains them,
    and leaving them in would make KL(p || q) infinite at every position. They are cut from all models. Where ids beyond
    the narrowest model are real tokens, all are kept, and the narrower model gives them probability 0.
    """
    return min(widths) if tokens <= min(widths) else max(widths)


@dataclass(frozen=True)
class _Reached:
    """A target's p at the tokens that a head can propose: `shared` [n, ids] at the ids that the head has, `of_token` [n] at
    the tokens of the text, whose places among these ids are `place` [n], where it has them (`proposable` [n]).
    """

    shared: torch.Tensor
    of_token: torch.Tensor
    place: torch.Tensor
    proposable: torch.Tensor

    @classmethod
    def of(
        cls, logits: torch.Tensor, known: torch.Tensor | None, token: torch.Tensor, settings: Processing, size: int
    ) -> Self:
        """From logits [n, V], `size` rows at a time; `known`: the ids that the head has (None: all)."""
        width = logits.shape[1]
        inside, place = token.clamp(max=width - 1), token.clamp(max=width - 1)
        proposable = token < width
        if known is not None:
            place = torch.searchsorted(known, token).clamp(max=len(known) - 1)
            proposable = known[place] == token
        shared = torch.empty((len(token), width if known is None else len(known)), device=logits.device)
        of_token = torch.empty(len(token), device=logits.device)
        for rows in chunks(len(token), size):
            p = probabilities(processed_logits(logits[rows], settings))
            shared[rows] = p if known is None else p[:, known]
            of_token[rows] = p.gather(1, inside[rows, None])[:, 0]
        return cls(shared, of_token.where(token < width, 0.0), place, proposable)

    def chances(self, logits: torch.Tensor, settings: Processing, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return sum min(p, q) and q(x) / p(x) [n] of drafts that are drawn from q, from the head's logits [n, ids]."""
        accept, of_token = [], []
        for rows in chunks(len(logits), size):
            q = probabilities(processed_logits(logits[rows], settings))
            accept.append(self.shared[rows].minimum(q).sum(1).clamp(max=1.0))
            of_token.append(q.gather(1, self.place[rows, None])[:, 0])
        ratio = torch.cat(of_token).where(self.proposable, 0.0) / self.of_token.where(self.of_token > 0, 1.0)
        return torch.cat(accept), ratio.where(self.of_token > 0, 0.0)


class Scorer:
    """Scores batches of continuations with a target and its drafts; `tokens` is the tokenizer's number of ids. `drafts`: the
    passes of those that have a distribution; `without`: the others.

    `draft_processing`: what the logits of drafts go through on sampled text (see `Processing.for_draft`); `extras`: what is
    measured beyond the columns of every log; `own_path`: heads that can read their own drafts on text that was not sampled,
    as engines have it, and else the text's tokens.
    """

    def __init__(
        self,
        target: Model,
        drafts: Sequence[Draft],
        tokens: int,
        draft_processing: str = "same",
        extras: Extras = NO_EXTRAS,
        own_path: bool = True,
    ) -> None:
        self.extras, self.own_path = extras, own_path
        self.target = TeacherForced(target)
        forced = [(draft, draft.teacher_forced(self.target)) for draft in drafts]
        self.drafts = [each for _, each in forced if each is not None]
        self.without = [draft for draft, each in forced if each is None]
        self._ordered = [draft for draft, each in forced if each is not None] + self.without  # as columns of a chunk are
        self.draft_processing = draft_processing
        self.width = scored_width([each.vocabulary for each in (self.target, *self.drafts)], tokens)
        # The target's ids of those logits of each draft that carry probability; None: all, in order.
        self.ids = [None if each.ids is None else each.ids[each.ids < self.width].to(target.device) for each in self.drafts]
        self.head_rows = HEAD_ROWS.get(target.device.type, HEAD_ROWS["cuda"])
        self.statistics_rows = rows_at_once(target.device)

    @torch.inference_mode()
    def score(self, batch: Sequence[Continuation]) -> dict[str, Arrays]:
        """Return columns [positions] by draft name: the target's, the draft's, `token` and `proposed`.

        All texts of the batch have the same processing. Where `proposed` is 0 the draft proposes nothing, and its columns
        mean nothing. Raises `LogitsNotFinite`.
        """
        layout = Layout.of(batch)
        device = self.target.model.device
        # Before any model runs: such a copy to a GPU waits for all that it was given.
        ids, row, column, token = (part.to(device) for part in (layout.ids, layout.row, layout.column, layout.token))
        depths = sorted({depth for draft in self.drafts for depth in draft.reads})
        with recorded(self.target.model.decoder, depths) as known:
            rows = [self.target.rows(ids, row, column)]
        first, settings = int(layout.column.min()), batch[0].document.processing
        given = (ids, row, column, known, first)
        own = {
            place: draft.rounds(*given)
            for place, draft in enumerate(self.drafts)
            if draft.rounds is not None and self.own_path and settings is None
        }
        rows += [next(own[place]) if place in own else draft.rows(*given) for place, draft in enumerate(self.drafts)]
        known.clear()
        # Worked out while a GPU is still busy with the forward passes.
        proposals = [_joined_columns(draft, batch) for draft in self._ordered]
        chosen = [token, *(_sent(own["draft_top"], device) for own in proposals[len(self.drafts) :])]
        parts = [
            self._chunk([states[chunk] for states in rows], [some[chunk] for some in chosen], settings)
            for chunk in chunks(len(token), self.head_rows)
        ]
        columns = [joined(pieces) for pieces in zip(*parts, strict=True)]
        for place, rounds in own.items():
            columns[1 + place] |= self._drafted(place, rounds, columns[1 + place]["draft_top"])
        return self._by_draft(_to_host(columns), proposals, batch, layout)

    def _drafted(self, place: int, rounds: States, top: torch.Tensor) -> Columns:
        """Return what the rounds of a head draft beyond `top` [n], their first drafts: by depth the token, its logit, the
        log-odds of its probability, and the head's confidence if it has one.
        """
        draft, known, columns = self.drafts[place], self.ids[place], Columns()
        for depth in range(2, draft.depths + 1):
            states = rounds.send(top)
            logits = (draft.logits(some, depth) for some in torch.split(states, self.head_rows))
            parts = [top_odds(some[:, : self.width if known is None else len(known)]) for some in logits]
            largest, top, odds = (torch.cat(each) for each in zip(*parts, strict=True))
            top = top if known is None else known.to(top.device)[top]
            columns |= {f"drafted_{depth}": top, f"top_logit_{depth}": largest, f"draft_log_odds_{depth}": odds}
            if draft.confidence is not None:
                columns[f"draft_confidence_{depth}"] = draft.confidence(states)
        return columns

    def _chunk(
        self, rows: Sequence[torch.Tensor], ids: Sequence[torch.Tensor], settings: Processing | None
    ) -> list[Columns]:
        """Return columns of some rows of each model, the target's first. Their logits are freed before the next ones are
        made. `settings`: of a text that was sampled.
        """
        logits = self.target.logits(rows[0])
        ids = [some.to(logits.device) for some in ids]
        draft_logits = [draft.logits(some).to(logits.device) for draft, some in zip(self.drafts, rows[1:], strict=True)]
        columns = self._statistics(logits, draft_logits, ids, settings or PLAIN)
        del draft_logits
        for place, (draft, some) in enumerate(zip(self.drafts, rows[1:], strict=True)):
            if draft.confidence is not None:
                begun = some if some.dim() == 2 else some[:, 0]
                columns[1 + place]["draft_confidence_1"] = draft.confidence(begun).to(logits.device)
            if draft.depths > 1 and some.dim() > 2:
                columns[1 + place] |= self._deeper(logits[:, : self.width], place, some, ids[0], settings)
        return columns

    def _deeper(
        self, target: torch.Tensor, place: int, rows: torch.Tensor, token: torch.Tensor, settings: Processing | None
    ) -> Columns:
        """Return columns of a head at the depths beyond the first. `target`: logits [n, V]."""
        draft, known = self.drafts[place], self.ids[place]
        known = None if known is None else known.to(target.device)  # where the target's last layer lies, if it is split
        drawn = settings if self.extras.drawn else None
        reached = None if drawn is None else _Reached.of(target, known, token, drawn, self.statistics_rows)
        columns: Columns = {}
        for depth in range(2, draft.depths + 1):
            own = draft.logits(rows, depth).to(target.device)
            own = own[:, : self.width if known is None else len(known)]
            largest, top = own.max(1)  # the first index of the maximum
            columns[f"agrees_{depth}"] = ((top if known is None else known[top]) == token).long()
            columns[f"top_logit_{depth}"] = largest.float()
            accept = ratio = torch.full((len(token),), -1.0, device=token.device)
            if reached is not None and settings is not None:
                accept, ratio = reached.chances(own, settings.for_draft(self.draft_processing), self.statistics_rows)
            for rule in self.extras.drawn:
                kept = ratio if parse_rule(rule).rule.blocks else ratio.clamp(max=1.0)
                columns |= {f"accept_{rule}_{depth}": accept, f"emitted_{rule}_{depth}": kept}
        return columns

    def _statistics(
        self, logits: torch.Tensor, draft_logits: Sequence[torch.Tensor], ids: Sequence[torch.Tensor], settings: Processing
    ) -> list[Columns]:
        """Return columns of a chunk: of the target, each draft with a distribution, each without. `ids`: the tokens of the
        text, then the proposals of each draft without a distribution.
        """
        token, *proposals = ids
        shared = [
            each[:, : self.width] if known is None else spread(each[:, : len(known)], known.to(each.device), self.width)
            for each, known in zip((logits, *draft_logits), (None, *self.ids), strict=True)
        ]
        chosen = [settings, *[settings.for_draft(self.draft_processing)] * len(draft_logits)]
        columns = measured(shared, chosen, token, proposals, [False, *(draft.reduced for draft in self.drafts)])
        if self.extras.certified:
            columns[0]["top_probs"] = top_probs(processed_logits(shared[0], settings), columns[0], TOP)
        return columns

    def _by_draft(
        self, columns: Sequence[Arrays], proposals: Sequence[Arrays], batch: Sequence[Continuation], layout: Layout
    ) -> dict[str, Arrays]:
        """Return all columns of each draft; those of the target are the same for all. Raises `LogitsNotFinite`."""
        ours = columns[0] | {"token": layout.token.numpy()}
        _require_finite(ours["target_entropy"], "target", batch, layout)
        if self.extras.certified:
            ours |= self.extras.thresholds(ours.pop("top_probs"), ours["target_entropy"], self.width)
        by_draft: dict[str, Arrays] = {}
        passes = [*self.drafts, *[None] * len(self.without)]
        for draft, theirs, proposal, each in zip(self._ordered, columns[1:], proposals, passes, strict=True):
            if "draft_entropy" in theirs:
                _require_finite(theirs["draft_entropy"], draft.name, batch, layout)
            by_draft[draft.name] = ours | theirs | proposal
            if each is not None and each.by_depth:
                by_draft[draft.name] |= self._rounds(by_draft[draft.name], each, draft.name, batch, layout)
        return by_draft

    def _rounds(self, columns: Arrays, draft: DraftPass, name: str, batch: Sequence[Continuation], layout: Layout) -> Arrays:
        """Return columns by depth of a head, -1 where no round of these texts has a draft at that depth, and what rounds get
        accepted. Log-odds and confidences are of rounds that begin at a position, NaN and -1 where nothing is drafted or
        the text's tokens were read. Raises `LogitsNotFinite`.
        """
        lengths = np.array([len(item.ids) for item in batch])
        stop = np.cumsum(lengths)
        place, proposed = np.arange(stop[-1]) - np.repeat(stop - lengths, lengths), columns["proposed"]
        agrees, by_depth = [columns["draft_top"] == columns["token"]], {}
        drawn = [f"{kind}_{rule}" for rule in self.extras.drawn for kind in ("accept", "emitted")]
        for depth in range(2, draft.depths + 1):
            begun = np.maximum(np.arange(len(place)) - depth + 1, 0)
            drafted = counted = (place >= depth - 1) & (proposed[begun] >= depth)
            odds = f"draft_log_odds_{depth}"
            if draft.rounds is not None:
                by_depth[odds] = np.full(len(place), np.nan, np.float16)
            if odds in columns:  # of rounds that begin here, like the logits and tokens beside them
                counted = proposed >= depth
                by_depth[odds][counted] = np.clip(columns.pop(odds)[counted], -LARGEST, LARGEST)
                columns[f"agrees_{depth}"] = columns.pop(f"drafted_{depth}")[begun] == columns["token"]
            if draft.confidence is not None:
                confidence = columns.get(f"draft_confidence_{depth}", np.float32(-1))
                by_depth[f"draft_confidence_{depth}"] = np.where(proposed >= depth, confidence, -1)
            _require_finite(np.where(counted, columns.pop(f"top_logit_{depth}"), 0), name, batch, layout)
            agrees.append(columns[f"agrees_{depth}"] == 1)
            for column in (f"{each}_{depth}" for each in ("agrees", *drawn)):  # what draws reads sampled text alone
                by_depth[column] = np.where(drafted, columns.get(column, np.float32(-1)), -1)
        return by_depth | {"accepted_run": runs_by_depth(np.stack(agrees, 1), proposed, stop - lengths, stop)}


def _joined_columns(draft: Draft, batch: Sequence[Continuation]) -> Arrays:
    """Return columns [positions] of what a draft proposes in the texts of a batch."""
    parts = [draft.columns(np.concatenate([item.document.prompt, item.ids]), len(item.document.prompt)) for item in batch]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _sent(values: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """Return values on a device. On their way to a GPU from pinned memory, whose copies the host need not wait for."""
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def _to_host(groups: Sequence[Columns]) -> list[Arrays]:
    """Return groups of columns [positions] or [positions, some] as arrays. They cross from the device in one piece: every
    copy would wait for it. As float64, which holds token ids, ranks and float32 exactly.
    """
    columns = [(number, name, column) for number, group in enumerate(groups) for name, column in group.items()]
    together = torch.cat([column.double().reshape(len(column), -1) for _, _, column in columns], dim=1).cpu().numpy()
    stops = np.cumsum([column[:1].numel() for _, _, column in columns])
    arrays: list[Arrays] = [{} for _ in groups]
    for values, (number, name, column) in zip(np.split(together, stops[:-1], axis=1), columns, strict=True):
        arrays[number][name] = values.reshape(column.shape).astype(np.float32 if column.is_floating_point() else np.int64)
    return arrays


def _require_finite(values: np.ndarray[Any, Any], name: str, batch: Sequence[Continuation], layout: Layout) -> None:
    """Raise `LogitsNotFinite` at the first position whose value is not finite, as of an entropy (`statistics.softmax`)."""
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size:
        document = batch[int(layout.row[bad[0]])].document
        position = int(layout.column[bad[0]]) - len(document.prompt) + 1
        raise LogitsNotFinite(
            f"the logits of {name} hold NaN or infinity at document {document.document}, position {position}",
            "check the weights, or use another dtype (float16 overflows in models made for bfloat16)",
        )


def by_document(batch: Sequence[Continuation], arrays: Arrays) -> dict[int, Arrays]:
    """Return the arrays of a batch cut into those of its documents, by document number."""
    stops = np.cumsum([len(item.ids) for item in batch])
    pieces = {name: np.split(values, stops[:-1]) for name, values in arrays.items()}
    return {item.document.document: {name: pieces[name][index] for name in arrays} for index, item in enumerate(batch)}


def position_table(
    continuations: Sequence[Continuation],
    scored: dict[int, Arrays],
    rules: LogRules,
    draft: str,
    spans: Sequence[np.ndarray[Any, Any]] | None = None,
    *,
    has_distribution: bool = True,
    starts_matter: bool = False,
) -> pa.Table:
    """Return rows of one draft's position log for documents in order; `scored` holds their arrays by document number.

    `spans`: for each document the names of its positions' spans; None: there are none. A draft that does not have a
    distribution, or for which the start of a round does not matter, leaves the columns that need it null. Raises `KeyError`
    where any other declared column is missing.
    """
    lengths = [len(item.ids) for item in continuations]
    parts = [scored[item.document.document] for item in continuations]
    data: dict[str, Any] = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    domains = pa.array([item.document.domain for item in continuations], pa.string()).dictionary_encode()
    data["domain"] = domains.take(np.repeat(np.arange(len(lengths)), lengths))
    data["document"] = np.repeat([item.document.document for item in continuations], lengths)
    data["position"] = np.concatenate([np.arange(length) for length in lengths])
    if spans is not None:
        data["span"] = np.concatenate(spans)
    lacking = {DISTRIBUTION: not has_distribution, STARTS: not starts_matter, SPANS: spans is None}
    absent = {column.name for column in rules.columns if lacking.get(column.needs or "")}
    bound = rules_of(list(rules.accepted))
    columns = data | dict.fromkeys(absent, np.full(sum(lengths), np.nan))
    columns["greedy"] = np.repeat([item.document.greedy for item in continuations], lengths)
    data |= {f"accept_{rule.id}": rule.accept(columns) for rule in bound}
    without_proposal = data["proposed"] == 0
    masks = [
        None
        if not column.nullable or column.needs == SPANS or column.name in absent
        else np.isnan(data[column.name])
        if column.needs == OWN_PATH
        else without_proposal | (data[column.name] < 0)
        if column.needs in (STARTS, DEPTHS)
        else without_proposal
        for column in rules.columns
    ]
    arrays = [
        pa.nulls(sum(lengths), column.type)
        if column.name in absent
        else pa.array(data[column.name], mask=mask).cast(column.type)
        for column, mask in zip(rules.columns, masks, strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=arrow_schema(rules.columns, draft=draft, rules=list(rules.accepted)))
