"""Real speculative decoding of a run's documents against plain decoding, by the clock."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
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
    require_own_text,
)
from alphaprof.profiling.models.drafts import Draft
from alphaprof.profiling.models.load import without_advice
from alphaprof.profiling.run.pipeline import in_memory, profile_with_models, time_steps_of
from alphaprof.profiling.run.shards import Plan, Progress
from alphaprof.profiling.texts.corpus import Document, Ids
from alphaprof.profiling.timing.steppers import seconds
from alphaprof.rules import GREEDY, SAMPLED, decoded_rule, parse_rule

GENERATED = 2  # documents that `generate` decodes too


@dataclass(frozen=True)
class DecodingMode:
    """One way to decode: with a draft at one gamma, or plainly (None, 0); by our loop, or by transformers' `generate`."""

    draft: Draft | None
    gamma: int
    generate: bool = False


@dataclass(frozen=True)
class DecodableText:
    """A document with the continuation that the run holds, and the id of the rule that it is decoded by."""

    document: Document
    ids: Ids
    rule: str


def validate(
    options: ProfileOptions,
    out: Path,
    gammas: Sequence[int] | None,
    repeats: int,
    progress: Progress,
    against_generate: bool = False,
) -> tuple[Run, DecodingTimes]:
    """Profile into the new directory `out`, then decode the same documents for real, at batch 1.

    `gammas`: default: those of `USUAL_GAMMAS` that the profile has. `against_generate`: decode the first greedy documents by
    transformers' `generate` too. Raises the errors of `errors.py`.
    """
    require_own_text(options)
    chosen = chosen_gammas(options.gammas, gammas)
    options = options.model_copy(update={"gammas": sorted({*options.gammas, *chosen}), "costs": as_decoded(options)})
    place = place_of(out)
    with joined(place, options.model_dump(mode="json"), hint="choose another --out"):
        plan = profile_with_models(options, place, progress)
        lengths = (plan.run.documents()[name].to_numpy() for name in ("prompt_tokens", "continuation_tokens"))
        time_steps_of(plan, as_decoded(options).model_copy(update={"context": contexts_of(*lengths)}), progress)
    with in_memory():
        return plan.run, _measure(plan, chosen, repeats, progress, against_generate)


def as_decoded(options: ProfileOptions) -> MeasuredCosts:
    """How steps are timed that shall predict this decoder's: here, one text at a time, without graphs."""
    given = options.costs if isinstance(options.costs, MeasuredCosts) else MeasuredCosts()
    return given.model_copy(update={"concurrency": [1], "mode": "eager"})


def _measure(plan: Plan, gammas: Sequence[int], repeats: int, progress: Progress, against_generate: bool) -> DecodingTimes:
    """Every document in every way, all ways in turn, `repeats` times; the order rotates, so that none is always first."""
    texts, short, foreign = _texts(plan)
    ways = [DecodingMode(None, 0), *(DecodingMode(draft, gamma) for draft in plan.drafts for gamma in gammas)]
    loop = len(ways)
    calls, places, left_out = _calls(plan, texts, gammas) if against_generate else ([], [], ())
    ways += calls
    whole = list(range(len(texts)))
    progress.start("decoding", len(ways) + repeats * (len(whole) * loop + len(places) * len(calls)), "texts")
    for way in ways:  # warm-up
        _decode(plan, way, texts[places[0] if way.generate else 0])
        progress.advance(1)
    decoded: dict[tuple[int, int, int], Decoded] = {}
    for repeat, place in itertools.product(range(repeats), whole):
        for step in range(len(ways)):
            index = (step + repeat + place) % len(ways)
            if not ways[index].generate or place in places:
                decoded[index, repeat, place] = _decode(plan, ways[index], texts[place])
                progress.advance(1, positions=len(decoded[index, repeat, place].ids))

    def table(index: int, of: Sequence[int]) -> list[list[Decoded]]:
        return [[decoded[index, repeat, place] for place in of] for repeat in range(repeats)]

    decodings = [_collected(way, table(index, whole), texts) for index, way in enumerate(ways[:loop])]
    numbers = np.array([text.document.document for text in texts])
    generated = []
    for index, way in enumerate(calls[1:], start=loop + 1):
        own = next(place for place, other in enumerate(ways) if other.draft is way.draft and other.gamma == way.gamma)
        generated.append(_generated(way, [table(each, places) for each in (own, 0, index, loop)]))
    rules = tuple(text.rule for text in texts)
    return DecodingTimes(numbers, rules, decodings[0], tuple(decodings[1:]), short, foreign, tuple(generated), left_out)


def _calls(
    plan: Plan, texts: Sequence[DecodableText], gammas: Sequence[int]
) -> tuple[list[DecodingMode], list[int], tuple[str, ...]]:
    """The ways to call `generate`, plainly first, the places of the texts that it writes, and what is left out, and why."""
    places = [place for place, text in enumerate(texts) if text.document.greedy][:GENERATED]
    if not places:
        return [], [], ("generate draws sampled text by random numbers of its own, and there is no greedy text",)
    calls, left_out = [], []
    for draft in plan.drafts:
        if draft.generate_arguments(1) is None:
            left_out.append(f"{draft.name} is left out of generate, which has no such draft")
        elif draft.vocabulary != plan.target.vocabulary:
            sizes = f"{draft.vocabulary} and {plan.target.vocabulary} logits"
            left_out.append(f"{draft.name} is left out of generate, which takes {sizes} for two vocabularies")
        else:
            calls += [DecodingMode(draft, gamma, generate=True) for gamma in gammas]
    return [DecodingMode(None, 0, generate=True), *calls] if calls else [], places, tuple(left_out)


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
    decision = plan.options.decision.rule
    own, foreign = own_documents(plan)
    texts = [
        DecodableText(document, ids, decoded_rule(decision, GREEDY if document.greedy else SAMPLED))
        for document in own
        if len(ids := stored[document.document]) >= 2
    ]
    if not texts:
        raise DataEmpty("no text has a second token, so there is nothing to time", "raise max_new_tokens, or --documents")
    return texts, len(own) - len(texts), foreign


def _decode(plan: Plan, way: DecodingMode, text: DecodableText) -> Decoded:
    if way.generate:
        return _call(plan, way, text.document)
    drafting = None if way.draft is None else DecodingSetup(way.draft, parse_rule(text.rule), way.gamma)
    return decode(plan, text.document, drafting)


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
    return Decoded(ids, nothing, nothing, 0.0, taken, 0.0, 0.0, 0.0, 0.0, None)


def _collected(way: DecodingMode, table: list[list[Decoded]], texts: Sequence[DecodableText]) -> Decodings:
    """The decodings [repeats][documents] of one way."""

    def taken(name: str) -> np.ndarray[Any, Any]:
        return np.array([[getattr(decoded, name) for decoded in row] for row in table])

    first = table[0]
    return Decodings(
        draft=way.draft.name if way.draft is not None else None,
        gamma=way.gamma,
        wall_s=taken("decode_s"),
        cpu_s=taken("decode_cpu_s"),
        prefill_s=taken("prefill_s"),
        draft_s=taken("draft_s"),
        verify_s=taken("verify_s"),
        tokens=np.array([len(decoded.ids) - 1 for decoded in first]),
        rounds=np.array([len(decoded.drafted) for decoded in first]),
        drafted=np.array([by_depth(decoded.drafted, way.gamma) for decoded in first]),
        accepted=np.array([by_depth(decoded.accepted, way.gamma) for decoded in first]),
        same_text=np.array([np.array_equal(decoded.ids, text.ids) for decoded, text in zip(first, texts, strict=True)]),
    )
