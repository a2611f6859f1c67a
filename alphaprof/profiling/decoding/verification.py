"""What becomes of drafted tokens: each rule's acceptance, from the target's logits at the verified places.

A round drafts n tokens and verifies n + 1 places; the accepted ones are followed by one token of the target's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from alphaprof.profiling.decoding.drafters import KEPT, OWN, Chooser, Proposal
from alphaprof.profiling.models.processing import draw, weights_of
from alphaprof.profiling.scoring.statistics import distribution, proposal_columns
from alphaprof.rules import BoundRule

# From the target's logits [n + 1, V], what was drafted, and the place of the first of them to what a round emits: the
# accepted drafts, and after them one token of the target's own.
Verify = Callable[[torch.Tensor, Proposal, int], list[int]]


def verifier(rule: BoundRule, chooser: Chooser) -> Verify:
    """How a rule verifies."""
    if rule.rule.lossy:
        return partial(relaxed, rule, chooser)
    return partial(lossless if rule.rule.drawn else agreement, chooser)


def agreement(chooser: Chooser, rows: torch.Tensor, proposal: Proposal, at: int) -> list[int]:
    """The target chooses its own token everywhere, and keeps drafts while they are the same.

    On greedy text that is `strict`. Where the target draws from p, a draft d that was not drawn is kept with probability
    p(d), and what stands in place of a rejected one is distributed as p without d: `one_hot`, with plain decoding's texts.
    """
    own, count = chooser.own(rows, at), len(proposal.ids)
    crossed = torch.cat([proposal.ids, own]).tolist() if count else own.tolist()  # at once from the device
    chosen = crossed[count:]
    return chosen[: _leading([left == right for left, right in zip(crossed[:count], chosen, strict=False)]) + 1]


def relaxed(rule: BoundRule, chooser: Chooser, rows: torch.Tensor, proposal: Proposal, at: int) -> list[int]:
    """A lossy rule: drafts are kept while its formula keeps them. In place of the first other one stands the target's own
    token: its top token, or one drawn from all of p, which may be the rejected draft itself.
    """
    count = len(proposal.ids)
    if count == 0:
        return agreement(chooser, rows, proposal, at)
    target = distribution(rows[:count], chooser.processing)
    measured = proposal_columns(target, proposal.ids) | {
        "target_top_prob": target.top_prob,
        "target_entropy": target.entropy,
    }
    own = chooser.own(rows, at)
    # Everything crosses from the device at once, as in scoring; float64 holds ids, ranks and float32 exactly.
    host = torch.cat([part.double() for part in (proposal.ids, *measured.values(), own)]).cpu().numpy()
    ids, *values = host[: -count - 1].reshape(-1, count)
    columns: dict[str, np.ndarray[Any, Any]] = {
        name: column.astype(np.float32 if measured[name].is_floating_point() else np.int64)
        for name, column in zip(measured, values, strict=True)
    }
    known = ids < rows.shape[1]  # a formula may keep a token of probability 0, but not one that the target does not have
    accepted = _leading(((rule.accept(columns) > 0) & known).tolist())
    return [*map(int, ids[:accepted]), int(host[accepted - count - 1])]


def lossless(chooser: Chooser, rows: torch.Tensor, proposal: Proposal, at: int) -> list[int]:
    """A draft d that was drawn from q is kept with probability min(1, p(d) / q(d)); in place of the first other one stands a
    token drawn from (p - q)+, normalised (Leviathan et al. 2023). A draft that was not drawn: see `agreement`.
    """
    count = len(proposal.ids)
    if proposal.laws is None:
        return agreement(chooser, rows, proposal, at)
    weights = weights_of(rows, chooser.processing)
    p = weights / weights.sum(1, keepdim=True)
    q = torch.nn.functional.pad(proposal.laws, (0, max(0, p.shape[1] - proposal.laws.shape[1])))
    of_draft = [_prob(law, proposal.ids) for law in (p[:count], q)]
    kept = chooser.numbers(KEPT, at, count) * of_draft[1].double() < of_draft[0].double()
    crossed = torch.cat([proposal.ids, kept]).tolist()
    accepted = _leading(crossed[count:])
    left = p[accepted : accepted + 1]
    if accepted < count:
        residual = (left - q[accepted : accepted + 1, : p.shape[1]]).clamp(min=0.0)
        left = torch.where(residual.sum(1, keepdim=True) > 0, residual, left)  # rounding may leave nothing of it
    own = draw(left, chooser.numbers(OWN, at + accepted, 1))
    return [*crossed[:accepted], int(own)]


def _prob(law: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Probabilities [n] of one id a row of law [n, V]; 0 for ids beyond it."""
    width = law.shape[1]
    return torch.where(ids < width, law.gather(1, ids.clamp(max=width - 1)[:, None])[:, 0], 0.0)


def _leading(flags: Sequence[object]) -> int:
    """How many flags are set before the first that is not."""
    return next((number for number, flag in enumerate(flags) if not flag), len(flags))
