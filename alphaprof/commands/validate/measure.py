"""Real speculative decoding of a run's documents against plain decoding, by the clock."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from alphaprof.commands.validate.validation import Decodings, DecodingTimes, by_depth, contexts_of
from alphaprof.config.options import MeasuredCosts
from alphaprof.config.profile import ProfileOptions
from alphaprof.errors import DataEmpty
from alphaprof.profiling.decoding.speculative import (
    Decoded,
    DecodingSetup,
    chosen_gammas,
    decode,
    own_documents,
    require_decodable,
    require_own_text,
)
from alphaprof.profiling.profile import in_memory, profile_with_models, time_steps_of
from alphaprof.profiling.shard import Plan, Progress
from alphaprof.profiling.texts.corpus import Document
from alphaprof.rules import GREEDY, SAMPLED, BoundRule, decoded_rule, parse_rule
from alphaprof.run.reader import Run
from alphaprof.run.split import Ids
from alphaprof.run.writer import RunWriter


@dataclass(frozen=True)
class DecodableText:
    """A document with the continuation that the run holds."""

    document: Document
    ids: Ids

    @property
    def policy(self) -> str:
        """How the target chooses the tokens."""
        return GREEDY if self.document.greedy else SAMPLED


def validate(
    options: ProfileOptions,
    out: Path,
    gammas: Sequence[int] | None,
    repeats: int,
    progress: Progress,
    rules: Sequence[str] = (),
) -> tuple[Run, DecodingTimes]:
    """Profile into the new directory `out`, then decode the same documents for real, at batch 1.

    `gammas`: default: those of `USUAL_GAMMAS` that the profile has. `rules`: decode by these too, beside the rule of the
    verdict. Raises the errors of `errors.py`.
    """
    policies, more = require_own_text(options), [parse_rule(rule) for rule in rules]
    for rule in more:  # each needs some text that it belongs to
        require_decodable(rule, min(policies & set(rule.rule.policies) or policies))
    chosen = chosen_gammas(options.gammas, gammas)
    options = options.model_copy(update={"gammas": sorted({*options.gammas, *chosen}), "costs": as_decoded(options)})
    with RunWriter.opened(out, hint="choose another --out") as run:
        plan = profile_with_models(options, run, progress)
        lengths = (plan.run.documents()[name].to_numpy() for name in ("prompt_tokens", "continuation_tokens"))
        time_steps_of(plan, as_decoded(options).model_copy(update={"context": contexts_of(*lengths)}), progress)
    with in_memory():
        return plan.run, _decode_in_turn(plan, chosen, more, repeats, progress)


def as_decoded(options: ProfileOptions) -> MeasuredCosts:
    """Return how steps are timed that shall predict this decoder's: here, one text at a time, eagerly on a GPU as well."""
    given = options.costs if isinstance(options.costs, MeasuredCosts) else MeasuredCosts()
    return given.model_copy(update={"source": "measured", "concurrency": [1]})


def _decode_in_turn(
    plan: Plan, gammas: Sequence[int], more: Sequence[BoundRule], repeats: int, progress: Progress
) -> DecodingTimes:
    """Return every document in every way, all ways in turn, `repeats` times; the order rotates, so that none is always
    first.
    """
    texts, short, foreign = decodable_texts(plan)
    usual = [decoded_rule(plan.options.decision.rule, policy) for policy in sorted({text.policy for text in texts})]
    rules = {rule.id: rule for rule in (*map(parse_rule, usual), *more)}.values()
    drafted = itertools.product(plan.drafts, rules, gammas)
    known = {name: facts.lengths(gammas) for name, facts in plan.run.manifest.drafts.items()}
    ways = [None, *(DecodingSetup(draft, rule, gamma) for draft, rule, gamma in drafted if gamma in known[draft.name])]
    numbers = np.array([text.document.document for text in texts])
    policies = [(GREEDY, SAMPLED) if way is None else way.rule.rule.policies for way in ways]
    rows = [[row for row, text in enumerate(texts) if text.policy in those] for those in policies]
    regrets = _warm_up(plan, ways, rows, texts, progress)
    progress.start("decoding", repeats * sum(map(len, rows)), "texts")
    decoded: dict[tuple[int, int, int], Decoded] = {}
    for repeat, row in itertools.product(range(repeats), range(len(texts))):
        for step in range(len(ways)):
            index = (step + repeat + row) % len(ways)
            if row in rows[index]:
                decoded[index, repeat, row] = decode(plan, texts[row].document, ways[index])
                progress.advance(1, positions=len(decoded[index, repeat, row].ids))
    decodings = []
    for index, (way, of, regret) in enumerate(zip(ways, rows, regrets, strict=True)):
        table = [[decoded[index, repeat, row] for row in of] for repeat in range(repeats)]
        named = (way.draft.name, way.rule.id, way.gamma) if way else (None, None, 0)
        decodings.append(collected(named, of, table, texts, regret))
    return DecodingTimes(numbers, decodings[0], tuple(decodings[1:]), short, foreign)


def _warm_up(
    plan: Plan,
    ways: Sequence[DecodingSetup | None],
    rows: Sequence[Sequence[int]],
    texts: Sequence[DecodableText],
    progress: Progress,
) -> list[np.ndarray[Any, Any] | None]:
    """Decode in every way once, untimed: the first text, or all for the regret of lossy rules and of plain decoding beside
    them; that regret for each way [its texts], in nats.
    """
    lossy = any(way.rule.rule.lossy for way in ways if way)
    progress.start("warming up", len(ways), "ways to decode")
    found: list[np.ndarray[Any, Any] | None] = []
    for way, of in zip(ways, rows, strict=True):
        if lossy and (way is None or way.rule.rule.lossy):
            lost = [decode(plan, texts[row].document, way, regret=True).regret for row in of]
            found.append(np.array([0.0 if each is None else each.sum() for each in lost]))
        else:
            decode(plan, texts[of[0]].document, way)
            found.append(None)
        progress.advance(1)
    return found


def decodable_texts(plan: Plan) -> tuple[list[DecodableText], int, int]:
    """Return the texts to decode, how many documents are too short, and how many have text the target did not write here."""
    stored: dict[int, Ids] = {}
    for shard in plan.run.shards:
        table = plan.run.continuations(shard.index, ["document", "continuation_ids"])
        stored |= zip(table["document"].to_pylist(), map(np.array, table["continuation_ids"].to_pylist()), strict=True)
    own, foreign = own_documents(plan)
    texts = [DecodableText(document, ids) for document in own if len(ids := stored[document.document]) >= 2]
    if not texts:
        raise DataEmpty("no text has a second token, so there is nothing to time", "raise max_new_tokens, or --documents")
    return texts, len(own) - len(texts), foreign


def collected(
    way: tuple[str | None, str | None, int],
    rows: Sequence[int],
    table: list[list[Decoded]],
    texts: Sequence[DecodableText],
    regret: np.ndarray[Any, Any] | None = None,
    plainly: list[list[Decoded]] | None = None,
) -> Decodings:
    """Return the decodings [repeats][documents] of one way (draft, rule and gamma), which decoded `rows` of the texts;
    `plainly`: those of plain decoding in turn with it.
    """
    draft, rule, gamma = way

    def taken(name: str, table: list[list[Decoded]] = table) -> np.ndarray[Any, Any]:
        return np.array([[getattr(decoded, name) for decoded in row] for row in table])

    first = table[0]
    return Decodings(
        draft=draft,
        rule=rule,
        gamma=gamma,
        rows=np.array(rows),
        wall_s=taken("decode_s"),
        draft_s=taken("draft_s"),
        verify_s=taken("verify_s"),
        tokens=np.array([len(decoded.ids) - 1 for decoded in first]),
        rounds=np.array([len(decoded.drafted) for decoded in first]),
        drafted=np.array([by_depth(decoded.drafted, gamma) for decoded in first]),
        accepted=np.array([by_depth(decoded.accepted, gamma) for decoded in first]),
        same_text=np.array([np.array_equal(one.ids, texts[row].ids) for one, row in zip(first, rows, strict=True)]),
        regret=regret,
        plain_s=taken("decode_s", plainly) if plainly else None,
    )
