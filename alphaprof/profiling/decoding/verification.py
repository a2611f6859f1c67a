"""What becomes of drafted tokens: each rule's acceptance, from the target's logits at the verified places.

A round drafts n tokens and verifies n + 1 places; the accepted ones are followed by one token of the target's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from alphaprof.profiling.decoding.drafters import KEPT, OWN, Chooser, Proposal
from alphaprof.profiling.models.processing import draw, weights_of
from alphaprof.profiling.scoring.statistics import distribution, proposal_columns
from alphaprof.rules import BoundRule


@dataclass(frozen=True)
class Verdict:
    """What a round emits: `accepted` of the drafts, and behind them one token of the target's own."""

    emitted: list[int]
    accepted: int


# From the target's logits [n + 1, V], what was drafted, and the place of the first of them.
Verify = Callable[[torch.Tensor, Proposal, int], Verdict]


def verifier(rule: BoundRule, chooser: Chooser) -> Verify:
    """How a rule verifies."""
    if rule.rule.lossy:
        return partial(relaxed, rule, chooser)
    return partial(lossless if rule.rule.drawn else agreement, chooser)


def agreement(chooser: Chooser, rows: torch.Tensor, proposal: Proposal, at: int) -> Verdict:
    """The target chooses its own token everywhere, and keeps drafts while they are the same.

    On greedy text that is `strict`. Where the target draws from p, a draft d that was not drawn is kept with probability
    p(d), and what stands in place of a rejected one is distributed as p without d: `one_hot`, with plain decoding's texts.
    """
    own = chooser.own(rows, at)
    if len(proposal.ids) == 0:
        return Verdict(own.tolist(), 0)
    drafted, chosen = _split(torch.cat([proposal.ids, own]).tolist(), len(proposal.ids))
    accepted = _leading([left == right for left, right in zip(drafted, chosen, strict=False)])
    return Verdict(chosen[: accepted + 1], accepted)


def relaxed(rule: BoundRule, chooser: Chooser, rows: torch.Tensor, proposal: Proposal, at: int) -> Verdict:
    """A lossy rule: drafts are kept while its formula keeps them. In place of the first other one stands the target's own
    token: its top token, or one drawn from all of p, which may be the rejected draft itself.
    """
    count = len(proposal.ids)
    if count == 0:
        return agreement(chooser, rows, proposal, at)
    target = distribution(rows[:count], chooser.processing)
    found = proposal_columns(target, proposal.ids)
    values = [found["target_prob_of_draft_top"], target.top_prob, target.entropy, found["target_rank_of_draft_top"]]
    own = chooser.own(rows, at)
    # Everything crosses from the device at once, as in scoring; float64 holds ids, ranks and float32 exactly.
    crossed = torch.cat([torch.stack([item.double() for item in (proposal.ids, *values)]).flatten(), own.double()])
    host = crossed.cpu().numpy()
    ids, prob, top, entropy, rank = host[: -count - 1].reshape(5, count)
    columns: dict[str, np.ndarray[Any, Any]] = {
        "target_prob_of_draft_top": prob.astype(np.float32),
        "target_top_prob": top.astype(np.float32),
        "target_entropy": entropy.astype(np.float32),
        "target_rank_of_draft_top": rank.astype(np.int64),
    }
    known = ids < rows.shape[1]  # a formula may keep a token of probability 0, but not one that the target does not have
    accepted = _leading(((rule.accept(columns) > 0) & known).tolist())
    return Verdict([*map(int, ids[:accepted]), int(host[accepted - count - 1])], accepted)


def lossless(chooser: Chooser, rows: torch.Tensor, proposal: Proposal, at: int) -> Verdict:
    """A draft d that was drawn from q is kept with probability min(1, p(d) / q(d)); in place of the first other one stands a
    token drawn from (p - q)+, normalised (Leviathan et al. 2023). A draft that was not drawn: see `agreement`.
    """
    count = len(proposal.ids)
    if proposal.laws is None:
        return agreement(chooser, rows, proposal, at)
    weights = weights_of(rows, chooser.processing)
    p = weights / weights.sum(1, keepdim=True)
    q = _widened(proposal.laws, p.shape[1])
    of_draft = [_prob(law, proposal.ids) for law in (p[:count], q)]
    kept = chooser.numbers(KEPT, at, count) * of_draft[1].double() < of_draft[0].double()
    drafted, flags = _split(torch.cat([proposal.ids, kept]).tolist(), count)
    accepted = _leading(flags)
    left = p[accepted : accepted + 1]
    if accepted < count:
        left = _residual(left, q[accepted : accepted + 1, : p.shape[1]])
    own = draw(left, chooser.numbers(OWN, at + accepted, 1))
    return Verdict([*drafted[:accepted], int(own)], accepted)


def _residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """(p - q)+ [1, V] up to a factor; p itself where rounding leaves nothing."""
    left = (p - q).clamp(min=0.0)
    return torch.where(left.sum(1, keepdim=True) > 0, left, p)


def _prob(law: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Probabilities [n] of one id a row of law [n, V]; 0 for ids beyond it."""
    width = law.shape[1]
    return torch.where(ids < width, law.gather(1, ids.clamp(max=width - 1)[:, None])[:, 0], 0.0)


def _widened(law: torch.Tensor, width: int) -> torch.Tensor:
    """A law padded with zeros to at least `width` ids."""
    return torch.nn.functional.pad(law, (0, max(0, width - law.shape[1])))


def _split(values: list[int], count: int) -> tuple[list[int], list[int]]:
    return values[:count], values[count:]


def _leading(flags: Sequence[object]) -> int:
    """How many flags are set before the first that is not."""
    return next((number for number, flag in enumerate(flags) if not flag), len(flags))
