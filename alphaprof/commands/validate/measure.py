"""Real speculative decoding of a run's documents against plain decoding, by the clock."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from alphaprof.commands.validate.answer import AgainstGenerate
from alphaprof.commands.validate.build import Decodings, DecodingTimes, beside_generate, by_depth, contexts_of
from alphaprof.config.options import MeasuredCosts
from alphaprof.config.profile import ProfileOptions
from alphaprof.errors import DataEmpty
from alphaprof.log.joining import joined
from alphaprof.log.place import place_of
from alphaprof.log.store import Run
from alphaprof.profiling.decoding.speculative import (
    Decoded,
    DecodingSetup,
    chosen_gammas,
    decode,
    own_documents,
    require_decodable,
    require_own_text,
)
from alphaprof.profiling.models.drafts import Draft
from alphaprof.profiling.models.load import without_advice
from alphaprof.profiling.run.pipeline import in_memory, profile_with_models, time_steps_of
from alphaprof.profiling.run.shards import Plan, Progress
from alphaprof.profiling.texts.corpus import Document, Ids
from alphaprof.profiling.timing.steppers import seconds
from alphaprof.rules import GREEDY, SAMPLED, BoundRule, decoded_rule, default_rule, parse_rule

GENERATED = 2  # documents that `generate` decodes too


@dataclass(frozen=True)
class DecodingMode:
    """One way to decode: with a draft by a rule at one gamma, or plainly (None, 0); by our loop, or by transformers'
    `generate`.
    """

    draft: Draft | None
    rule: BoundRule | None
    gamma: int
    generate: bool = False

    def decodes(self, text: DecodableText) -> bool:
        """Whether the rule belongs to the policy of a text."""
        return self.rule is None or text.policy in self.rule.rule.policies


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
    against_generate: bool = False,
    rules: Sequence[str] = (),
) -> tuple[Run, DecodingTimes]:
    """Profile into the new directory `out`, then decode the same documents for real, at batch 1.

    `gammas`: default: those of `USUAL_GAMMAS` that the profile has. `against_generate`: decode the first greedy documents by
    transformers' `generate` too. `rules`: decode by these too, beside the rule of the verdict. Raises the errors of
    `errors.py`.
    """
    policies, more = require_own_text(options), [parse_rule(rule) for rule in rules]
    for rule in more:  # each needs some text that it belongs to
        require_decodable(rule, min(policies & set(rule.rule.policies) or policies))
    chosen = chosen_gammas(options.gammas, gammas)
    options = options.model_copy(update={"gammas": sorted({*options.gammas, *chosen}), "costs": as_decoded(options)})
    place = place_of(out)
    with joined(place, options.model_dump(mode="json"), hint="choose another --out"):
        plan = profile_with_models(options, place, progress)
        lengths = (plan.run.documents()[name].to_numpy() for name in ("prompt_tokens", "continuation_tokens"))
        time_steps_of(plan, as_decoded(options).model_copy(update={"context": contexts_of(*lengths)}), progress)
    with in_memory():
        return plan.run, _measure(plan, chosen, more, repeats, progress, against_generate)


def as_decoded(options: ProfileOptions) -> MeasuredCosts:
    """How steps are timed that shall predict this decoder's: here, one text at a time, without graphs."""
    given = options.costs if isinstance(options.costs, MeasuredCosts) else MeasuredCosts()
    return given.model_copy(update={"concurrency": [1], "mode": "eager"})


def _measure(
    plan: Plan, gammas: Sequence[int], more: Sequence[BoundRule], repeats: int, progress: Progress, against_generate: bool
) -> DecodingTimes:
    """Every document in every way, all ways in turn, `repeats` times; the order rotates, so that none is always first."""
    texts, short, foreign = _texts(plan)
    usual = [decoded_rule(plan.options.decision.rule, policy) for policy in sorted({text.policy for text in texts})]
    rules = {rule.id: rule for rule in (*map(parse_rule, usual), *more)}.values()
    drafted = itertools.product(plan.drafts, rules, gammas)
    ways = [DecodingMode(None, None, 0), *(DecodingMode(draft, rule, gamma) for draft, rule, gamma in drafted)]
    loop = len(ways)
    calls, places, left_out = _calls(plan, texts, gammas) if against_generate else ([], [], ())
    ways += calls
    rows = [places if way.generate else [row for row, text in enumerate(texts) if way.decodes(text)] for way in ways]
    regrets = _warm_up(plan, ways, rows, texts, progress)
    progress.start("decoding", repeats * sum(map(len, rows)), "texts")
    decoded: dict[tuple[int, int, int], Decoded] = {}
    for repeat, row in itertools.product(range(repeats), range(len(texts))):
        for step in range(len(ways)):
            index = (step + repeat + row) % len(ways)
            if row in rows[index]:
                decoded[index, repeat, row] = _decode(plan, ways[index], texts[row])
                progress.advance(1, positions=len(decoded[index, repeat, row].ids))

    def table(index: int, of: Sequence[int]) -> list[list[Decoded]]:
        return [[decoded[index, repeat, row] for row in of] for repeat in range(repeats)]

    decodings = [
        _collected(ways[index], rows[index], table(index, rows[index]), texts, regrets[index]) for index in range(loop)
    ]
    numbers = np.array([text.document.document for text in texts])
    generated = []
    for index, way in enumerate(calls[1:], start=loop + 1):
        own = ways.index(replace(way, generate=False))
        generated.append(_generated(way, [table(each, places) for each in (own, 0, index, loop)]))
    return DecodingTimes(numbers, decodings[0], tuple(decodings[1:]), short, foreign, tuple(generated), left_out)


def _warm_up(
    plan: Plan,
    ways: Sequence[DecodingMode],
    rows: Sequence[Sequence[int]],
    texts: Sequence[DecodableText],
    progress: Progress,
) -> list[np.ndarray[Any, Any] | None]:
    """Decode in every way once, untimed: the first text, or all for the regret of lossy rules and of plain decoding beside
    them; that regret for each way [its texts], in nats.
    """
    lossy = any(way.rule is not None and way.rule.rule.lossy for way in ways)
    progress.start("warming up", len(ways), "ways to decode")
    found: list[np.ndarray[Any, Any] | None] = []
    for way, of in zip(ways, rows, strict=True):
        if lossy and not way.generate and (way.rule is None or way.rule.rule.lossy):
            lost = [_decode(plan, way, texts[row], regret=True).regret for row in of]
            found.append(np.array([0.0 if each is None else each.sum() for each in lost]))
        else:
            _decode(plan, way, texts[of[0]])
            found.append(None)
        progress.advance(1)
    return found


def _calls(
    plan: Plan, texts: Sequence[DecodableText], gammas: Sequence[int]
) -> tuple[list[DecodingMode], list[int], tuple[str, ...]]:
    """The ways to call `generate`, plainly first, the places of the texts that it writes, and what is left out, and why."""
    places = [place for place, text in enumerate(texts) if text.document.greedy][:GENERATED]
    if not places:
        return [], [], ("generate draws sampled text by random numbers of its own, and there is no greedy text",)
    calls: list[DecodingMode] = []
    left_out, strict = [], parse_rule(default_rule(GREEDY))
    for draft in plan.drafts:
        if draft.generate_arguments(1) is None:
            left_out.append(f"{draft.name} is left out of generate, which has no such draft")
        elif draft.vocabulary != plan.target.vocabulary:
            sizes = f"{draft.vocabulary} and {plan.target.vocabulary} logits"
            left_out.append(f"{draft.name} is left out of generate, which takes {sizes} for two vocabularies")
        else:
            calls += [DecodingMode(draft, strict, gamma, generate=True) for gamma in gammas]
    return [DecodingMode(None, None, 0, generate=True), *calls] if calls else [], places, tuple(left_out)


def _generated(way: DecodingMode, tables: Sequence[list[list[Decoded]]]) -> AgainstGenerate:
    """Decodings [repeats][documents] of one way, in the order of `beside_generate`."""
    loop, plain_loop, called, _ = (table[0] for table in tables)
    return beside_generate(
        way.draft.name if way.draft is not None else "",
        way.gamma,
        np.array([[[each.prefill_s + each.decode_s for each in row] for row in table] for table in tables]),
        rounds=np.array([len(each.drafted) for each in loop]),
        tokens=np.array([len(each.ids) for each in plain_loop]),
        same_text=np.array([np.array_equal(ours.ids, call.ids) for ours, call in zip(loop, called, strict=True)]),
    )


def _texts(plan: Plan) -> tuple[list[DecodableText], int, int]:
    """What is decoded; how many documents are too short, and how many have text that the target did not write here."""
    stored: dict[int, Ids] = {}
    for shard in plan.run.shards:
        table = plan.run.continuations(shard.index, ["document", "continuation_ids"])
        stored |= zip(table["document"].to_pylist(), map(np.array, table["continuation_ids"].to_pylist()), strict=True)
    own, foreign = own_documents(plan)
    texts = [DecodableText(document, ids) for document in own if len(ids := stored[document.document]) >= 2]
    if not texts:
        raise DataEmpty("no text has a second token, so there is nothing to time", "raise max_new_tokens, or --documents")
    return texts, len(own) - len(texts), foreign


def _decode(plan: Plan, way: DecodingMode, text: DecodableText, regret: bool = False) -> Decoded:
    if way.generate:
        return _call(plan, way, text.document)
    drafting = None if way.draft is None or way.rule is None else DecodingSetup(way.draft, way.rule, way.gamma)
    return decode(plan, text.document, drafting, regret)


def _call(plan: Plan, way: DecodingMode, document: Document) -> Decoded:
    """Greedy text by `generate`, with as many drafted tokens a round as our loop drafts. Its parts are not known."""
    network = plan.target.network
    how = (way.draft.generate_arguments(way.gamma) if way.draft is not None else None) or {}
    prompt = torch.from_numpy(document.prompt.astype(np.int64))[None].to(plan.target.device)
    written = []

    def write() -> None:
        mask, most = torch.ones_like(prompt), document.max_new_tokens
        written.append(network.generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=most, **how))

    with without_advice():
        taken = seconds(plan.target.device, write)
    nothing = np.zeros(0, dtype=np.int64)
    ids = written[0][0, prompt.shape[1] :].cpu().numpy()
    return Decoded(ids, nothing, nothing, 0.0, taken, 0.0, 0.0, 0.0, None)


def _collected(
    way: DecodingMode,
    rows: Sequence[int],
    table: list[list[Decoded]],
    texts: Sequence[DecodableText],
    regret: np.ndarray[Any, Any] | None,
) -> Decodings:
    """The decodings [repeats][documents] of one way, which decoded `rows` of the texts."""

    def taken(name: str) -> np.ndarray[Any, Any]:
        return np.array([[getattr(decoded, name) for decoded in row] for row in table])

    first = table[0]
    return Decodings(
        draft=way.draft.name if way.draft is not None else None,
        rule=way.rule.id if way.rule is not None else None,
        gamma=way.gamma,
        rows=np.array(rows),
        wall_s=taken("decode_s"),
        cpu_s=taken("decode_cpu_s"),
        prefill_s=taken("prefill_s"),
        draft_s=taken("draft_s"),
        verify_s=taken("verify_s"),
        tokens=np.array([len(decoded.ids) - 1 for decoded in first]),
        rounds=np.array([len(decoded.drafted) for decoded in first]),
        drafted=np.array([by_depth(decoded.drafted, way.gamma) for decoded in first]),
        accepted=np.array([by_depth(decoded.accepted, way.gamma) for decoded in first]),
        same_text=np.array([np.array_equal(one.ids, texts[row].ids) for one, row in zip(first, rows, strict=True)]),
        regret=regret,
    )
