"""Decoding by lossy rules: what they write, in how many rounds, and what the target would have given for it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from alphaprof.commands.rollout.build import Rolled, Rollouts, departure, depth_counts
from alphaprof.config.profile import ProfileOptions
from alphaprof.errors import VALUE, OptionInvalid, cut
from alphaprof.log.schema import DOCUMENT_COLUMNS
from alphaprof.profiling.decoding.speculative import (
    Decoded,
    DecodingSetup,
    chosen_gammas,
    decode,
    own_documents,
    require_decodable,
    require_own_text,
)
from alphaprof.profiling.run.pipeline import in_memory, load
from alphaprof.profiling.run.shards import Loaded, Progress
from alphaprof.profiling.texts.continuations import Continuation, continuation_table
from alphaprof.rules import GREEDY, SAMPLED, BoundRule, rules_of

RolloutRequest = tuple[list[str], list[BoundRule], list[int]]  # every draft is decoded by every rule at every gamma


def rollout_request(
    options: ProfileOptions, drafts: Sequence[str] | None, rules: list[str] | None, gammas: Sequence[int] | None
) -> RolloutRequest:
    """A request, where need be filled from a profile: all drafts, its lossy rules, the gamma of its decision or usual ones.

    Raises `ProfileInvalid`, `OptionInvalid` or `RuleNotDecodable` for what cannot be decoded; no model is loaded.
    """
    policies = require_own_text(options)
    if unknown := [name for name in drafts or [] if name not in options.drafts]:
        raise OptionInvalid(f"the profile has no draft {cut(unknown[0], VALUE)}", f"it has: {', '.join(options.drafts)}")
    chosen = rules_of(rules or options.rules)
    if not rules and not (chosen := [rule for rule in chosen if rule.rule.lossy]):
        raise OptionInvalid("the profile has no lossy rule", "name one: --rule additive:0.1")
    for rule in chosen:  # each needs some text that it belongs to
        require_decodable(rule, min(policies & set(rule.rule.policies) or policies))
    fixed = options.decision.gamma
    lengths = chosen_gammas(options.gammas, gammas or ([fixed] if isinstance(fixed, int) else None))
    return [name for name in options.drafts if name in (drafts or options.drafts)], chosen, lengths


def roll(options: ProfileOptions, request: RolloutRequest, progress: Progress) -> Rollouts:
    """Decode all documents plainly and in every way that is asked for. Raises the errors of `errors.py`."""
    drafts, rules, gammas = request
    chosen = {name: options.drafts[name] for name in drafts}
    with in_memory():
        return _roll(load(options.model_copy(update={"drafts": chosen}), progress), rules, gammas, progress)


def _roll(loaded: Loaded, rules: Sequence[BoundRule], gammas: Sequence[int], progress: Progress) -> Rollouts:
    documents, foreign = own_documents(loaded)
    policies = [GREEDY if document.greedy else SAMPLED for document in documents]
    ways = [DecodingSetup(*way) for way in itertools.product(loaded.drafts, rules, gammas)]
    rows = [[row for row, policy in enumerate(policies) if policy in way.rule.rule.policies] for way in ways]
    progress.start("decoding", len(documents) + sum(map(len, rows)), "texts")

    def decoded(row: int, way: DecodingSetup | None) -> Decoded:
        text = decode(loaded, documents[row], way, regret=True)
        progress.advance(1, positions=len(text.ids))
        return text

    every = range(len(documents))
    plain = [decoded(row, None) for row in every]
    rolled = [
        _collected(loaded, way, chosen, [decoded(row, way) for row in chosen], plain)
        for way, chosen in zip(ways, rows, strict=True)
    ]
    texts = [
        Continuation(document, text.ids, "eos" if text.ids[-1] in loaded.target.eos else "length")
        for document, text in zip(documents, plain, strict=True)
    ]
    table = continuation_table(texts).select([column.name for column in DOCUMENT_COLUMNS])
    return Rollouts(loaded.target.facts(), table, _collected(loaded, None, every, plain, plain), tuple(rolled), foreign)


def _collected(
    loaded: Loaded, way: DecodingSetup | None, rows: Sequence[int], texts: Sequence[Decoded], plain: Sequence[Decoded]
) -> Rolled:
    """The texts of one way; `plain` holds those of all documents."""
    gamma = way.gamma if way is not None else 0
    counts = [depth_counts(len(text.ids), text.drafted, text.accepted, gamma) for text in texts]
    drafted, tested, accepted = np.array(counts, dtype=np.int64).reshape(len(texts), 3, gamma).transpose(1, 0, 2)
    departs = [departure(text.ids, plain[row].ids) for text, row in zip(texts, rows, strict=True)]
    return Rolled(
        draft=way.draft.name if way is not None else "",
        rule=way.rule.id if way is not None else "",
        gamma=gamma,
        rows=np.array(rows, dtype=np.int64),
        tokens=np.array([len(text.ids) for text in texts]),
        rounds=np.array([len(text.drafted) for text in texts]),
        drafted=drafted,
        tested=tested,
        accepted=accepted,
        regret=np.array([0.0 if text.regret is None else text.regret.sum() for text in texts]),
        ended=np.array([text.ids[-1] in loaded.target.eos for text in texts], dtype=bool),
        departs=np.array(departs, dtype=np.int64),
    )
