"""Per-position statistics of next-token distributions, in torch: on any device, and to be read as what they mean.

All arithmetic is float32 with our own exponentials and sums: the CPU's fast float32 softmax is off by up to 1.5e-5.
For a chunk of n rows over V ids, at most seven float32 tensors [n, V] are alive for the target and each draft. `dispatch`
has the same statistics from loops that are made for a device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from alphaprof.profiling.models.processing import PLAIN, Processing, divided, processed

Columns = dict[str, torch.Tensor]
ABSENT = -1e15  # the logit of an id that a draft cannot propose: below all others, and finite at any temperature above 1e-23


@dataclass(frozen=True)
class Distribution:
    """Softmax of a chunk of processed logits, kept as its parts: probabilities are `weights / total`.

    `scaled` [n, V]: logits divided by the temperature; `shifted` [n, V]: those minus their row's maximum; `kept` [n, V]:
    what truncation leaves (None: everything); `weights` = exp(shifted) where kept, else 0; `total` [n]: row sums of
    `weights`; `top` [n]: first index of the maximum; `second` [n]: the second largest weight; `entropy` [n] in nats.
    """

    scaled: torch.Tensor
    shifted: torch.Tensor
    kept: torch.Tensor | None
    weights: torch.Tensor
    total: torch.Tensor
    top: torch.Tensor
    second: torch.Tensor
    entropy: torch.Tensor

    @property
    def top_prob(self) -> torch.Tensor:
        """The largest probability: the top weight is exactly 1."""
        return 1.0 / self.total

    @property
    def margin(self) -> torch.Tensor:
        """Largest minus second largest probability."""
        return (1.0 - self.second) / self.total

    def prob_of(self, ids: torch.Tensor) -> torch.Tensor:
        """Return probabilities [n] of one id a row; 0 for ids beyond the vocabulary."""
        width = self.weights.shape[1]
        chosen = self.weights.gather(1, ids.clamp(max=width - 1)[:, None])[:, 0] / self.total
        return torch.where(ids < width, chosen, 0.0)


def rank_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return ranks [n] of one id a row of logits [n, V]: 1 + number of larger + number of equal with a lower id."""
    width = logits.shape[1]
    value = logits.gather(1, ids.clamp(max=width - 1)[:, None])
    before = (logits == value) & (torch.arange(width, device=ids.device) < ids[:, None])
    rank = 1 + ((logits > value) | before).sum(1)
    return torch.where(ids < width, rank, ids + 1)  # beyond the vocabulary: after everything with a lower id


@dataclass(frozen=True)
class ProcessedLogits:
    """Logits of one model at the positions of a chunk, and how they become a distribution.

    `logits` [n, V] of any float dtype, rows without gaps; `temperature`: they are divided by it, in float32; `least` [n]
    float32: truncation keeps the scaled logits that are not below it. None: it keeps all.
    """

    logits: torch.Tensor
    temperature: float = 1.0
    least: torch.Tensor | None = None


def processed_logits(logits: torch.Tensor, settings: Processing = PLAIN, reduced: bool = False) -> ProcessedLogits:
    """Return logits [n, V] with the settings that they are processed with. Every truncation keeps the largest logits, and
    all that equal the smallest of them. `reduced`: some ids are ABSENT, and are never kept.
    """
    size = rows_at_once(logits.device)
    parts = [_least(logits[rows], settings) for rows in chunks(len(logits), size)]
    kept = [part for part in parts if part is not None]
    least = torch.cat(kept) if kept else None
    if reduced:
        present = torch.full((len(logits),), ABSENT / settings.temperature / 10, device=logits.device)
        least = present if least is None else least.maximum(present)
    return ProcessedLogits(logits, settings.temperature, least)


def spread(logits: torch.Tensor, ids: torch.Tensor, width: int) -> torch.Tensor:
    """Return logits [n, some] of `ids` [some] as logits [n, width] over all ids: those of the others are ABSENT."""
    logits = logits.float() if logits.dtype == torch.float16 else logits  # whose range is too small
    return logits.new_full((len(logits), width), ABSENT).index_copy_(1, ids, logits)


def chunks(count: int, size: int) -> Iterator[slice]:
    """Yield the slices of `count` rows that are computed together, of `size` rows each."""
    return (slice(start, start + size) for start in range(0, count, size))


def rows_at_once(device: torch.device) -> int:
    """Return rows of logits that float32 copies are made of at a time: on a CPU as many as its cache holds."""
    return 16 if device.type == "cpu" else 256


def _least(logits: torch.Tensor, settings: Processing) -> torch.Tensor | None:
    """Return the smallest scaled logit [n] that truncation keeps; None: it keeps all."""
    if settings in (PLAIN, Processing(settings.temperature)):
        return None
    scaled, kept = processed(logits, settings)
    return None if kept is None else torch.where(kept, scaled, torch.inf).amin(1)


def distribution(logits: torch.Tensor, settings: Processing = PLAIN) -> Distribution:
    """Return the softmax of processed logits [n, V]. See `softmax`."""
    return softmax(processed_logits(logits, settings))


def softmax(given: ProcessedLogits) -> Distribution:
    """Return the softmax of processed logits, in float32. H = log(total) - <weights, shifted>/total. The entropy is NaN
    exactly where a logit of the row is NaN or infinite: callers test that instead of every logit.
    """
    scaled = divided(given.logits, given.temperature)
    kept = None if given.least is None else scaled >= given.least[:, None]
    shifted = scaled - scaled.amax(1, keepdim=True)
    weights = shifted.exp() if kept is None else shifted.exp() * kept
    total = weights.sum(1)
    top = shifted.argmax(1)
    without_top = weights.scatter(1, top[:, None], -1.0)
    second = without_top.amax(1) if weights.shape[1] > 1 else torch.zeros_like(total)
    entropy = total.log() - torch.linalg.vecdot(weights, shifted) / total
    return Distribution(scaled, shifted, kept, weights, total, top, second.clamp_(min=0.0), entropy.clamp_(min=0.0))


def probabilities(given: ProcessedLogits) -> torch.Tensor:
    """Return the probabilities [n, V] of `softmax` in float32, without the rest of it."""
    scaled = divided(given.logits, given.temperature)
    weights = (scaled - scaled.amax(1, keepdim=True)).exp_()
    if given.least is not None:
        weights *= scaled >= given.least[:, None]
    return weights.div_(weights.sum(1, keepdim=True))


def top_odds(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the largest of logits [n, V], its index (the first), and the log-odds log(q / (1 - q)) of its probability, in
    float32: infinite where nothing else has any.
    """
    parts = []
    for some in torch.split(logits, rows_at_once(logits.device)):
        largest, top = some.max(1)
        others = some.float().scatter(1, top[:, None], -torch.inf)
        parts.append((largest.float(), top, largest.float() - others.logsumexp(1)))
    largest, top, odds = (torch.cat(each) for each in zip(*parts, strict=True))
    return largest, top, odds


def columns(
    target: ProcessedLogits, drafts: Sequence[ProcessedLogits], token: torch.Tensor, proposals: Sequence[torch.Tensor]
) -> list[Columns]:
    """Return columns of a target at n positions, of each draft beside it, and of proposals [n] of drafts that have no
    distribution. `token` [n]: the tokens of the text.
    """
    p = softmax(target)
    beside = (draft_columns(p, softmax(draft), token) for draft in drafts)
    return [target_columns(p, token), *beside, *(proposal_columns(p, proposal) for proposal in proposals)]


def target_columns(target: Distribution, token: torch.Tensor) -> Columns:
    """Return columns that depend on the target alone, each [n]."""
    return {
        "target_top": target.top,
        "target_top_prob": target.top_prob,
        "target_second_prob": target.second / target.total,
        "target_margin": target.margin,
        "target_entropy": target.entropy,
        "target_token_prob": target.prob_of(token),
    }


def top_probs(given: ProcessedLogits, known: Columns, most: int) -> torch.Tensor:
    """Return the `most` largest probabilities of a target [n, most], largest first; fewer where there are no more. `known`:
    its columns, so that a threshold and an acceptance that look at the same probability never disagree.
    """
    largest = divided(given.logits.topk(min(most, given.logits.shape[1])).values, given.temperature)
    probs = (largest - largest[:, :1]).exp() * known["target_top_prob"][:, None]
    if given.least is not None:
        probs *= largest >= given.least[:, None]
    probs[:, 0] = known["target_top_prob"]
    probs[:, 1:2] = second = known["target_second_prob"][:, None]
    probs[:, 2:].clamp_(max=second)  # its equals may have been rounded otherwise
    return probs


def proposal_columns(target: Distribution, proposal: torch.Tensor) -> Columns:
    """Return columns of a draft that has no distribution, each [n]; what stands where it proposes nothing (-1) means
    nothing.
    """
    known = proposal.clamp(min=0)
    return {"target_prob_of_draft_top": target.prob_of(known), "target_rank_of_draft_top": rank_of(target.scaled, known)}


def draft_columns(target: Distribution, draft: Distribution, token: torch.Tensor) -> Columns:
    """Return columns of a draft beside the target, each [n]. The distributions may differ in width (see `_aligned`)."""
    return {
        "draft_top": draft.top,
        "draft_top_prob": draft.top_prob,
        "draft_margin": draft.margin,
        "draft_entropy": draft.entropy,
        "draft_token_prob": draft.prob_of(token),
        "target_prob_of_draft_top": target.prob_of(draft.top),
        "target_rank_of_draft_top": rank_of(target.scaled, draft.top),
        "draft_rank_of_token": rank_of(draft.scaled, token),
        **divergences(target, draft),
    }


def divergences(target: Distribution, draft: Distribution) -> Columns:
    """Overlap and KL in both directions of p (target) and q (draft), each [n].

    KL(p || q) = log(total_q) - <w_p, z_q> / total_p - H(p); ids that only one side has count as probability 0 on the
    other, which makes that KL infinite if they carry weight. Rounding below 0 is cut off.
    """
    p, q = _aligned(target.weights, draft.weights)
    p = p / target.total[:, None]
    q = q / draft.total[:, None]
    kl_pq, kl_qp = _kl(target, draft), _kl(draft, target)
    return {
        "overlap": torch.minimum(p, q).sum(1).clamp_(max=1.0),
        "kl_target_draft": kl_pq.clamp_(min=0.0),
        "kl_draft_target": kl_qp.clamp_(min=0.0),
    }


def _kl(first: Distribution, second: Distribution) -> torch.Tensor:
    shared = min(first.weights.shape[1], second.weights.shape[1])
    cross = torch.linalg.vecdot(first.weights[:, :shared], second.shifted[:, :shared]) / first.total
    kl = second.total.log() - cross - first.entropy
    outside = first.weights[:, shared:].sum(1)
    if second.kept is not None:
        outside = outside + (first.weights[:, :shared] * ~second.kept[:, :shared]).sum(1)
    return torch.where(outside > 0, torch.inf, kl)


def _aligned(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two matrices padded with zero columns to the same width."""
    extra = first.shape[1] - second.shape[1]
    if extra < 0:
        return torch.nn.functional.pad(first, (0, -extra)), second
    return first, torch.nn.functional.pad(second, (0, extra)) if extra else second
