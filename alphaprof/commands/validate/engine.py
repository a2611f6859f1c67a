"""Real decoding by the user's vLLM, with and without drafts, timed step by step in the engine itself."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from alphaprof.commands.validate.measure import collected, decodable_texts
from alphaprof.commands.validate.measure import validate as validate_here
from alphaprof.commands.validate.validation import DecodingTimes, contexts_of, say_how_long
from alphaprof.config.options import MeasuredCosts
from alphaprof.config.profile import ProfileOptions
from alphaprof.errors import EngineFailed, OptionInvalid
from alphaprof.profiling.decoding.speculative import Decoded, chosen_gammas, require_own_text
from alphaprof.profiling.engine.steps import PLAIN, EngineSteps, Name
from alphaprof.profiling.engine.texts import prompt_of
from alphaprof.profiling.profile import in_memory, profile_with_models, time_steps_of
from alphaprof.profiling.shard import Plan, Progress
from alphaprof.rules import decoded_rule
from alphaprof.run.reader import Run
from alphaprof.run.writer import RunWriter
from alphaprof.stats.estimate import Array

RULES: dict[str, dict[str, str]] = {  # that vLLM decodes by, with its settings
    "strict": {},
    "one_hot": {},
    "lossless": {"draft_sample_method": "probabilistic"},
    "block": {"draft_sample_method": "probabilistic", "rejection_sample_method": "block"},
}
Answer = Mapping[str, Any]  # of `vllm_worker.SteppedEngine.write`


def validate_by(
    engine: str,
    options: ProfileOptions,
    out: Path,
    gammas: Sequence[int] | None,
    repeats: int,
    progress: Progress,
    more_rules: Sequence[str],
    concurrency: int,
) -> tuple[Run, DecodingTimes]:
    """Profile into the new directory `out` and decode for real, by transformers here or by vLLM. Raises the errors of
    `errors.py`.
    """
    for name, hybrid in options.hybrids.items():
        progress.say(f"{name} is a hybrid, which is not decoded: {hybrid.first} and {hybrid.then} are, by themselves")
    if engine == "vllm" and more_rules:
        hint = "leave out --rule, or leave out --engine to decode here"
        raise OptionInvalid("vLLM decodes by decision.rule, but --rule names others", hint)
    if engine == "vllm":
        return _validate_in_vllm(options, out, gammas, repeats, concurrency, progress)
    if concurrency > 1:
        hint = "add --engine vllm, or leave out --concurrency"
        raise OptionInvalid("alphaprof's own loop decodes one text at a time", hint)
    return validate_here(options, out, gammas, repeats, progress, more_rules)


def _validate_in_vllm(
    options: ProfileOptions, out: Path, gammas: Sequence[int] | None, repeats: int, concurrency: int, progress: Progress
) -> tuple[Run, DecodingTimes]:
    """Profile into the new directory `out`, then have vLLM time its steps and decode the same documents, `concurrency` at a
    time. Raises the errors of `errors.py`.
    """
    engine = options.engine
    if engine is None or engine.python is None:
        raise OptionInvalid(
            "--engine vllm needs engine.python in the profile", "set it to the Python that has vLLM (docs/vllm.md)"
        )
    rules = [decoded_rule(options.decision.rule, policy) for policy in sorted(require_own_text(options))]
    if odd := [rule for rule in rules if rule not in RULES]:
        raise OptionInvalid(f"vLLM does not decode by {odd[0]}", f"set decision.rule to one of {', '.join(RULES)}")
    chosen = chosen_gammas(options.gammas, gammas)
    given = options.costs if isinstance(options.costs, MeasuredCosts) else MeasuredCosts()
    costs = given.model_copy(update={"source": "vllm", "concurrency": [concurrency]})
    options = options.model_copy(update={"gammas": chosen, "costs": costs})
    with RunWriter.opened(out, hint="choose another --out") as run:
        plan = profile_with_models(options, run, progress)
        lengths = (plan.run.documents()[name].to_numpy() for name in ("prompt_tokens", "continuation_tokens"))
        costs = costs.model_copy(update={"context": contexts_of(*lengths)})
        drawn = {name: value for rule in rules for name, value in RULES[rule].items()}
        known = (plan.options, engine, plan.run.manifest.target, plan.run.manifest.drafts, max(chosen), progress.say)
        with in_memory(), EngineSteps.opened(*known, decoded=chosen, drawn=drawn) as engines:
            time_steps_of(plan, costs, progress, engines)
            return plan.run, _decode_in_turn(plan, engines, rules, repeats, concurrency, progress)


def _decode_in_turn(
    plan: Plan, engines: EngineSteps, rules: Sequence[str], repeats: int, concurrency: int, progress: Progress
) -> DecodingTimes:
    """Return every document by every engine, all engines in turn, `repeats` times; the order rotates, so that none is always
    first. One sequence at a time, all engines decode a document before the next; else each decodes all of them.
    """
    texts, short, foreign = decodable_texts(plan)
    numbers = np.array([text.document.document for text in texts])
    gammas = sorted({gamma for draft, gamma in engines.engines if draft in plan.run.manifest.drafts})
    say_how_long(plan.run, numbers, gammas, repeats, progress.say, concurrency=concurrency)
    names = [PLAIN, *(name for name in engines.engines if name[0] in plan.run.manifest.drafts)]
    prompts = [prompt_of(text.document, plan.target.eos) for text in texts]
    groups = [[row] for row in range(len(texts))] if concurrency == 1 else [list(range(len(texts)))]
    progress.start("decoding", (repeats + 1) * len(names) * len(texts), "texts")
    found: dict[tuple[Name, int, int], Decoded] = {}
    for name in names:  # warms up
        for _ in engines.engines[name].write(prompts[:concurrency], concurrency):
            progress.advance(len(texts) / min(concurrency, len(texts)))
    for repeat, (place, group) in itertools.product(range(repeats), enumerate(groups)):
        turn = (repeat + place) % len(names)
        for name in names[turn:] + names[:turn]:
            for answer in engines.engines[name].write([prompts[row] for row in group], concurrency):
                found[name, repeat, group[answer["place"]]] = _decoded(answer)
                progress.advance(1, positions=len(answer["ids"]))
    decodings = []
    for (draft, gamma), rule in ((PLAIN, None), *itertools.product(names[1:], dict.fromkeys(rules))):
        of_texts = [decoded_rule(plan.options.decision.rule, text.policy) for text in texts]
        if rows := [row for row, own in enumerate(of_texts) if rule in (None, own)]:
            table = [[found[(draft, gamma), repeat, row] for row in rows] for repeat in range(repeats)]
            decodings.append(collected((draft if rule else None, rule, gamma), rows, table, texts))
    return DecodingTimes(numbers, decodings[0], tuple(decodings[1:]), short, foreign)


def _decoded(answer: Answer) -> Decoded:
    """Return a text that an engine decoded. Its time is that of steps with all sequences; how it divides is not known."""
    if not answer["emitted"]:
        problem = "a text ended before --concurrency sequences were decoded together"
        raise EngineFailed(problem, "use a lower --concurrency, more --documents, or longer texts")
    wall, cpu = (answer[clock] / 1e3 * (len(answer["ids"]) - 1) / answer["emitted"] for clock in ("wall_ms", "cpu_ms"))
    return Decoded(np.array(answer["ids"]), *rounds_of(answer), 0.0, wall, cpu, math.nan, math.nan, None)


def rounds_of(answer: Answer) -> tuple[Array, Array]:
    """Return what each round of a text drafted and accepted, [rounds] each; those without a proposal, of which vLLM does not
    tell when they were, stand last. Of drafts behind the end of the text, which vLLM counts, none is accepted here.
    """
    drafted, accepted = (np.array(answer[name], dtype=np.int64) for name in ("drafted", "accepted"))
    written = len(answer["ids"]) - 1 - answer["rounds"]  # by rounds, beside the target's own tokens
    if (beyond := int(accepted.sum()) - written) > 0:  # the last round accepted all that the text still had
        accepted[-1] -= beyond - 1
    plain = np.zeros(answer["rounds"] - len(drafted), dtype=np.int64)
    return np.concatenate([drafted, plain]), np.concatenate([accepted, plain])
