"""Real speculative decoding with KV caches at batch 1, its verification, and the documents of a profile that it decodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from alphaprof.config.profile import ProfileOptions
from alphaprof.errors import OptionInvalid, ProfileInvalid, RuleNotDecodable
from alphaprof.profiling.decoding.drafters import GREEDILY, KEPT, OWN, Cached, Choice, Chooser, Drafter, Proposal, drafter_of
from alphaprof.profiling.models.draft import Draft
from alphaprof.profiling.models.load import Model
from alphaprof.profiling.models.processing import draw, weights_of
from alphaprof.profiling.scoring.statistics import distribution, proposal_columns
from alphaprof.profiling.shard import Loaded
from alphaprof.profiling.texts.corpus import Document
from alphaprof.rules import GREEDY, SAMPLED, BoundRule
from alphaprof.run.split import Ids
from alphaprof.totals.replay import Ints

Floats = np.ndarray[Any, np.dtype[np.float64]]
USUAL_GAMMAS = (1, 2, 3, 5)


@dataclass(frozen=True)
class Decoded:
    """A continuation and what it took.

    `ids` [tokens], EOS included; `drafted`, `accepted` [rounds] (plain decoding: rounds that draft nothing). Seconds by the
    wall clock of the prefill, up to the first token and with the draft's share of it, and of everything after it; `draft_s`
    and `verify_s` are parts of `decode_s`, the rest is bookkeeping. `regret` [tokens] where asked for:
    log p_(1) - log p(y) of each token y under the target's plain softmax, in nats.
    """

    ids: Ids
    drafted: Ints
    accepted: Ints
    prefill_s: float
    decode_s: float
    draft_s: float
    verify_s: float
    regret: Floats | None


@dataclass(frozen=True)
class Plain:
    """Token by token, without a draft: the baseline of a speedup, through the same code."""

    target: Model
    choice: Choice = GREEDILY

    def decode(self, prompt: Ids, max_new_tokens: int, source_row: int = 0, regret: bool = False) -> Decoded:
        """Return the text that `continuations.generate` writes for a prompt. Arguments as of `Speculation.decode`."""
        return _decode(self, _Text(self.target, prompt, max_new_tokens), source_row, regret)


@dataclass(frozen=True)
class Speculation:
    """Speculative decoding of one target with one draft, by one rule, with at most `gamma` drafted tokens a round. Raises
    `RuleNotDecodable` for rules of trees, and where the rule does not belong to text that is chosen as `choice` says.
    """

    target: Model
    draft: Draft
    rule: BoundRule
    gamma: int
    choice: Choice = GREEDILY

    def __post_init__(self) -> None:
        require_decodable(self.rule, GREEDY if self.choice.processing is None else SAMPLED)

    def decode(self, prompt: Ids, max_new_tokens: int, source_row: int = 0, regret: bool = False) -> Decoded:
        """Continue one prompt [tokens] up to EOS or `max_new_tokens`.

        What is drawn depends on the seed, the prompt and `source_row`. `regret` takes time and belongs in no timed run.
        Raises `ModelUnloadable` for a model whose cache cannot be cut back. Prompt and continuation must fit the target's
        context.
        """
        return _decode(self, _Text(self.target, prompt, max_new_tokens), source_row, regret)


def require_decodable(rule: BoundRule, policy: str) -> None:
    """Raise `RuleNotDecodable` for rules of trees, and where the rule does not belong to text of this policy."""
    problem = ""
    if not rule.rule.timed:
        problem = "drafts trees, and only chains of tokens can be decoded here"
    elif policy not in rule.rule.policies:
        problem = f"applies to {' or '.join(rule.rule.policies)} text, but this is {policy}"
    if problem:
        raise RuleNotDecodable(
            f"the rule {rule.id} {problem}",
            "choose strict on greedy text; one_hot, lossless or block on sampled text; or a lossy rule (docs/rules.md)",
        )


class _Text:
    """A text that is being written: `ids` are prompt and continuation."""

    def __init__(self, target: Model, prompt: Ids, limit: int) -> None:
        if target.context is not None and len(prompt) + limit > target.context:
            raise ValueError(f"{len(prompt)} + {limit} tokens do not fit the target's context of {target.context}")
        self.prompt = prompt
        self.ids: list[int] = prompt.tolist()
        self.stop = len(prompt) + limit
        self.eos = frozenset(target.eos)
        self.ended = False

    def add(self, tokens: list[int]) -> list[int]:
        """Add tokens up to the end of the text; those that were added."""
        tokens = tokens[: self.stop - len(self.ids)]
        end = next((place for place, token in enumerate(tokens) if token in self.eos), None)
        tokens = tokens if end is None else tokens[: end + 1]
        self.ids += tokens
        self.ended = end is not None or len(self.ids) == self.stop
        return tokens


@torch.inference_mode()
def _decode(how: Plain | Speculation, text: _Text, source_row: int, regret: bool) -> Decoded:
    """Return the prefill, and rounds until the text ends."""
    width, device = how.choice.width or how.target.vocabulary, how.target.device
    gamma = how.gamma if isinstance(how, Speculation) else 0
    chooser = Chooser(how.choice, text.prompt, source_row, text.stop - len(text.prompt) + gamma, device)
    drafter: Drafter | None = None
    verify: Verify = partial(agreement, chooser)
    if isinstance(how, Speculation):
        drafter = drafter_of(how.draft, chooser, width, device, drawn=how.rule.rule.drawn)
        verify = verifier(how.rule, chooser)
    target = Cached(how.target, width, () if drafter is None else drafter.reads)
    clock = _DecodingClock(device)
    start = clock.read()
    if drafter is not None:
        drafter.start(text.ids)
    rows = target.prefill(text.ids, rewinds=drafter is not None)
    if drafter is not None:
        drafter.observe(target.states)
    tokens = agreement(chooser, rows, _nothing(rows.device), 0)
    text.add(tokens)
    ready = clock.read()
    lost = [_regret(rows, tokens)] if regret else []
    rounds = []
    while not text.ended:
        drafted, accepted, tokens, rows = _round(target, drafter, verify, gamma, text, clock)
        rounds.append((drafted, accepted))
        if regret:
            lost.append(_regret(rows, tokens))
    end = clock.read()
    draft_s, verify_s = clock.phases()
    counts = np.array(rounds, dtype=np.int64).reshape(-1, 2)
    return Decoded(
        ids=np.array(text.ids[len(text.prompt) :], dtype=np.int32),
        drafted=counts[:, 0],
        accepted=counts[:, 1],
        prefill_s=ready - start,
        decode_s=end - ready,
        draft_s=draft_s,
        verify_s=verify_s,
        regret=np.concatenate(lost) if regret else None,
    )


def _round(
    target: Cached, drafter: Drafter | None, verify: Verify, gamma: int, text: _Text, clock: _DecodingClock
) -> tuple[int, int, list[int], torch.Tensor]:
    """Draft, verify, and put caches and text in order: tokens drafted, accepted and emitted, and the target's logits [n,
    V].
    """
    last = target.tensor(text.ids[-1:])  # while a GPU has nothing to do: the copy waits for it
    clock.mark()
    # The target's context holds what is verified; drafts beyond it would lie after the end of the text.
    most = min(gamma, target.context - len(text.ids))
    proposal = _nothing(target.device) if drafter is None else drafter.propose(text.ids, most)
    clock.mark()
    count = len(proposal.ids)
    rows = target.each(torch.cat([last, proposal.ids]) if count else last)
    emitted = verify(rows, proposal, len(text.ids) - len(text.prompt))
    clock.mark()
    accepted = len(emitted) - 1
    target.rewind(count - accepted)
    if drafter is not None:
        drafter.settle(accepted)
        drafter.observe({count: states[: accepted + 1] for count, states in target.states.items()})
    tokens = text.add(emitted)
    return count, min(accepted, len(tokens)), tokens, rows


def _nothing(device: torch.device) -> Proposal:
    return Proposal(torch.empty(0, dtype=torch.long, device=device))


def _regret(rows: torch.Tensor, tokens: list[int]) -> Floats:
    """Top logit minus that of the token [tokens], from logits [n, V] of which the first rows are theirs."""
    logits = rows[: len(tokens)].double()
    chosen = logits.gather(1, torch.tensor(tokens, device=rows.device)[:, None])[:, 0]
    return np.asarray((logits.amax(1) - chosen).cpu().numpy())


class _DecodingClock:
    """Times a decoding. A GPU is waited for at its ends alone: marks in between are events on its own time line."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []

    def read(self) -> float:
        """Return seconds by the wall clock, when the device has done all that it was given."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def mark(self) -> None:
        """One of three marks a round: before drafting, before verification and after it."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def phases(self) -> tuple[float, float]:
        """Return seconds in all rounds of drafting and of verification."""
        before, between, after = (self._marks[start::3] for start in range(3))
        return self._sum(before, between), self._sum(between, after)

    def _sum(self, starts: list[Any], stops: list[Any]) -> float:
        pairs = zip(starts, stops, strict=True)
        if self._device.type == "cuda":
            return float(sum(start.elapsed_time(stop) for start, stop in pairs)) / 1e3
        return float(sum(stop - start for start, stop in pairs))


@dataclass(frozen=True)
class DecodingSetup:
    """Who drafts, by which rule drafts are kept, and how many tokens a round drafts."""

    draft: Draft
    rule: BoundRule
    gamma: int


def require_own_text(options: ProfileOptions) -> set[str]:
    """Return how the target chooses the text that it writes itself: greedy, sampled or both. Raises `ProfileInvalid` if
    it writes none: no decoding would repeat that.
    """
    written = {GREEDY, SAMPLED} & {options.continuation_of(index).kind for index in range(len(options.data))}
    if not written:
        raise ProfileInvalid(
            "none of this text is the target's own, so decoding would not reproduce it",
            "decode continuations of kind greedy or sampled, for example --set continuation.kind=greedy",
        )
    return written


def chosen_gammas(known: Sequence[int], wanted: Sequence[int] | None) -> list[int]:
    """Return the lengths to decode with, ascending. Raises `OptionInvalid` if the profile has none of the usual ones."""
    if wanted:
        return sorted(set(wanted))
    if not (usual := [gamma for gamma in USUAL_GAMMAS if gamma in known]):
        raise OptionInvalid(f"the profile has none of the gammas {USUAL_GAMMAS}", f"name one: --gamma {known[0]}")
    return usual


def own_documents(loaded: Loaded) -> tuple[list[Document], int]:
    """Return the documents whose text the target writes here, and how many have a text from elsewhere."""
    documents = list(loaded.documents)
    own = [document for document in documents if document.given is None]
    return own, len(documents) - len(own)


def decode(loaded: Loaded, document: Document, drafting: DecodingSetup | None, regret: bool = False) -> Decoded:
    """Write a document's text with a draft, or plainly. `regret`: see `Decoded`."""
    width = min(loaded.scorer.width, loaded.target.vocabulary)
    choice = Choice(document.processing, document.seed or 0, loaded.options.draft_processing, width)
    how = Speculation(loaded.target, **vars(drafting), choice=choice) if drafting else Plain(loaded.target, choice)
    return how.decode(document.prompt, document.max_new_tokens or 0, document.source_row, regret)


# From the target's logits [n + 1, V], what was drafted, and the place of the first of them to what a round emits: the
# accepted drafts, and after them one token of the target's own.
Verify = Callable[[torch.Tensor, Proposal, int], list[int]]


def verifier(rule: BoundRule, chooser: Chooser) -> Verify:
    """Return how a rule verifies."""
    if rule.rule.lossy and GREEDY in rule.rule.policies:
        return partial(relaxed, rule, chooser)
    if rule.rule.blocks:
        return partial(blocks, chooser)
    return partial(sampled, rule, chooser) if rule.rule.drawn or rule.rule.lossy else partial(agreement, chooser)


def agreement(chooser: Chooser, rows: torch.Tensor, proposal: Proposal, at: int) -> list[int]:
    """Return the target chooses its own token everywhere, and keeps drafts while they are the same.

    On greedy text that is `strict`. Where the target draws from p, a draft d that was not drawn is kept with probability
    p(d), and what stands in place of a rejected one is distributed as p without d: `one_hot`, with plain decoding's texts.
    """
    own, count = chooser.own(rows, at), len(proposal.ids)
    crossed = torch.cat([proposal.ids, own]).tolist() if count else own.tolist()  # at once from the device
    chosen = crossed[count:]
    return chosen[: _leading([left == right for left, right in zip(crossed[:count], chosen, strict=False)]) + 1]


def relaxed(rule: BoundRule, chooser: Chooser, rows: torch.Tensor, proposal: Proposal, at: int) -> list[int]:
    """Return a lossy rule: drafts are kept while its formula keeps them. In place of the first other one stands the target's
    own token: its top token, or one drawn from all of p, which may be the rejected draft itself.
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


def sampled(rule: BoundRule, chooser: Chooser, rows: torch.Tensor, proposal: Proposal, at: int) -> list[int]:
    """Keep each draft with the probability that the rule gives it, min(1, p(d) / q(d)) under `lossless`; in place of the
    first other one stands a token drawn from (p - q)+, normalised (Leviathan et al. 2023). A draft that was not drawn has
    q = 1 at its token; under an exact rule see `agreement`.
    """
    count, laws = len(proposal.ids), proposal.laws
    if laws is None:
        if count == 0 or not rule.rule.lossy:
            return agreement(chooser, rows, proposal, at)
        laws = torch.nn.functional.one_hot(proposal.ids, max(rows.shape[1], int(proposal.ids.max()) + 1)).to(rows)
    p, q = _both_laws(chooser, rows, laws)
    of_p, of_q = (_prob(law, proposal.ids).double() for law in (p[:count], q))
    # Of a token that was drawn, min(1, p / q) stands for its mean over q.
    host = torch.stack([proposal.ids.double(), of_p, (of_p / of_q).clamp(max=1.0), chooser.numbers(KEPT, at, count)])
    ids, *chances, lots = host.cpu().numpy()
    kept = lots < rule.accept(dict(zip(("target_prob_of_draft_top", "overlap"), chances, strict=True)))
    accepted = _leading((kept & (ids < rows.shape[1])).tolist())
    own = _instead(chooser, p[accepted], q[accepted] if accepted < count else None, at + accepted)
    return [*map(int, ids[:accepted]), own]


def blocks(chooser: Chooser, rows: torch.Tensor, proposal: Proposal, at: int) -> list[int]:
    """Verify the drafts of a round together (block verification, Sun et al. 2024, algorithm 2). w_i, the
    product of p/q over the first i drafts cut at 1 after each, is the weight of what is kept; of all i at which the i-th
    number lies below h_i, the largest is the length that is kept, and a token drawn from (w_i p - q)+, normalised, follows.
    """
    count = len(proposal.ids)
    if proposal.laws is None:
        return agreement(chooser, rows, proposal, at)
    p, q = (law.double() for law in _both_laws(chooser, rows, proposal.laws))
    ratios = (_prob(p[:count], proposal.ids) / _prob(q, proposal.ids)).tolist()
    numbers = chooser.numbers(KEPT, at, count).tolist()
    weights, accepted = [1.0], 0
    for i, ratio in enumerate(ratios, 1):
        weights.append(min(1.0, weights[-1] * ratio))
        chance = weights[i]
        if i < count:
            left = float((weights[i] * p[i] - q[i, : p.shape[1]]).clamp(min=0.0).sum())
            chance = left / (left + 1.0 - weights[i]) if left > 0 else float(weights[i] == 1.0)
        accepted = i if numbers[i - 1] < chance else accepted
    law = p[accepted] if accepted == count else weights[accepted] * p[accepted]
    own = _instead(chooser, law, q[accepted] if accepted < count else None, at + accepted)
    return [*proposal.ids[:accepted].tolist(), own]


def _both_laws(chooser: Chooser, rows: torch.Tensor, drafted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the target's law [n + 1, V] and the draft's [n, V or more]."""
    weights = weights_of(rows, chooser.processing)
    p = weights / weights.sum(1, keepdim=True)
    return p, torch.nn.functional.pad(drafted, (0, max(0, p.shape[1] - drafted.shape[1])))


def _instead(chooser: Chooser, law: torch.Tensor, drafted: torch.Tensor | None, at: int) -> int:
    """Return the token behind the last draft that was kept, drawn from what the draft's law leaves of a law [V]."""
    if drafted is not None:
        residual = (law - drafted[: len(law)]).clamp(min=0.0)
        law = torch.where(residual.sum() > 0, residual, law)  # rounding may leave nothing of it
    return int(draw(law[None], chooser.numbers(OWN, at, 1)))


def _prob(law: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return probabilities [n] of one id a row of law [n, V]; 0 for ids beyond it."""
    width = law.shape[1]
    return torch.where(ids < width, law.gather(1, ids.clamp(max=width - 1)[:, None])[:, 0], 0.0)


def _leading(flags: Sequence[object]) -> int:
    """Return how many flags are set before the first that is not."""
    return next((number for number, flag in enumerate(flags) if not flag), len(flags))
