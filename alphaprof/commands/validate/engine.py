"""Real decoding by the user's vLLM, with and without drafts, timed step by step in the engine itself."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from alphaprof.commands.validate.measure import DecodableText, collected, decodable_texts
from alphaprof.commands.validate.measure import validate as validate_here
from alphaprof.commands.validate.validation import DecodingTimes, contexts_of
from alphaprof.config.options import MeasuredCosts
from alphaprof.config.profile import ProfileOptions
from alphaprof.errors import EngineFailed, OptionInvalid, StepsNotTimed
from alphaprof.profiling.decoding.speculative import Decoded, chosen_gammas, require_own_text
from alphaprof.profiling.engine.client import VllmEngine
from alphaprof.profiling.engine.steps import PLAIN, Name, time_engines
from alphaprof.profiling.engine.texts import prompt_of
from alphaprof.profiling.profile import profile_with_models, release_memory, step_times_of, write_times
from alphaprof.profiling.shard import Progress
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
TURN = 5  # documents that are decoded one by one before the other engine's turn: its first steps take longer
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
        raise OptionInvalid(
            "vLLM decodes by decision.rule, but --rule names others",
            "leave out --rule, or leave out --engine to decode here",
        )
    if engine == "vllm":
        return _validate_in_vllm(options, out, gammas, repeats, concurrency, progress)
    if concurrency > 1:
        raise OptionInvalid(
            "alphaprof's own loop decodes one text at a time", "add --engine vllm, or leave out --concurrency"
        )
    return validate_here(options, out, gammas, repeats, progress, more_rules)


def _validate_in_vllm(
    options: ProfileOptions, out: Path, gammas: Sequence[int] | None, repeats: int, concurrency: int, progress: Progress
) -> tuple[Run, DecodingTimes]:
    """Profile into the new directory `out`, then have vLLM time its steps and decode the same documents, `concurrency` at a
    time. Raises the errors of `errors.py`.
    """
    engine = options.vllm
    if engine is None or engine.python is None:
        raise OptionInvalid(
            "--engine vllm needs vllm.python in the profile", "set it to the Python that has vLLM (docs/vllm.md)"
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
        texts, short, foreign = decodable_texts(plan)
        options = plan.options
        del plan  # its models, before an engine needs the GPU
        release_memory()
        lengths = (run.documents()[name].to_numpy() for name in ("prompt_tokens", "continuation_tokens"))
        costs = costs.model_copy(update={"context": contexts_of(*lengths)})
        run.update(config=run.manifest.config | {"costs": costs.model_dump(mode="json")})
        drawn = {name: value for rule in rules for name, value in RULES[rule].items()}
        decoding = Decoding(run, texts, repeats, concurrency, progress)
        known = (options, engine, run.manifest.target, run.manifest.drafts, costs, progress.say)
        timing = partial(time_engines, *known, tick=lambda _: None, decoded=chosen, drawn=drawn, use=decoding.decode)
        write_times(run, step_times_of(timing, progress))
        if run.latency() is None:
            warning = run.manifest.warnings[-1]
            raise StepsNotTimed(warning["message"], warning["remedy"])
        return run, decoding.times(options.decision.rule, rules, short, foreign)


class Decoding:
    """Decodes every document by every engine, `repeats` times, while it runs, and plainly in turn with it where a plain
    engine waits beside it, TURN documents or all that are decoded together: a machine whose speed drifts slows both down.
    Half of the other plain repeats come at the end.
    """

    def __init__(self, run: Run, texts: Sequence[DecodableText], repeats: int, concurrency: int, progress: Progress) -> None:
        self._drafts, self._texts, self._progress = run.manifest.drafts, texts, progress
        self._prompts = [prompt_of(text.document, run.manifest.target.eos) for text in texts]
        self._repeats, self._concurrency = repeats, concurrency
        self._found: dict[Name, list[dict[int, Decoded]]] = {}  # [repeats], by text
        self._beside: dict[Name, list[dict[int, Decoded]]] = {}  # plainly, in turn with each of these

    def decode(self, name: Name, engine: VllmEngine, beside: VllmEngine | None = None) -> None:
        """Decode by an engine that runs: one document after another, or all together."""
        if name != PLAIN and name[0] not in self._drafts:
            return
        found = self._found.setdefault(name, [])
        left = self._repeats - len(found)
        repeats = left if name != PLAIN or found else left - left // 2
        if not repeats:
            return
        count, together = len(self._texts), self._concurrency
        turns = [(found, engine, beside)]
        if beside is not None:
            turns.append((self._beside.setdefault(name, []), beside, engine))
        self._progress.start(f"decoding by {name[0]}", repeats * count * len(turns), "texts")
        for _, running, other in turns:
            self._written(range(together), running, other)  # warms up
        most = TURN if together == 1 else count
        groups = [range(count)[row : row + most] for row in range(0, count, most)]
        for _ in range(repeats):
            for texts, _, _ in turns:
                texts.append({})
            for group, (texts, running, other) in itertools.product(groups, turns):
                texts[-1] |= {row: _decoded(answer) for row, answer in self._written(group, running, other)}
                self._progress.advance(len(group), positions=sum(len(texts[-1][row].ids) for row in group))

    def _written(self, rows: Sequence[int], engine: VllmEngine, other: VllmEngine | None) -> list[tuple[int, Answer]]:
        """Return what an engine answers to the prompts of some texts, while the `other` one is stopped."""
        if other is not None:
            other.pause()
            engine.pause(False)
        answers = engine.write([self._prompts[row] for row in rows], self._concurrency)
        return [(rows[answer["place"]], answer) for answer in answers]

    def times(self, rule: str, rules: Sequence[str], short: int, foreign: int) -> DecodingTimes:
        """Return the times of all texts: plainly, and with each draft by each of the rules on the texts that it is for."""
        of_texts = [decoded_rule(rule, text.policy) for text in self._texts]
        decodings = []
        drafted = [name for name in self._found if name != PLAIN]
        for name, by in ((PLAIN, None), *itertools.product(drafted, dict.fromkeys(rules))):
            if rows := [row for row, own in enumerate(of_texts) if by in (None, own)]:
                of, beside = (
                    [[decoded[row] for row in rows] for decoded in found.get(name, ())]
                    for found in (self._found, self._beside)
                )
                decodings.append(collected((name[0] if by else None, by, name[1]), rows, of, self._texts, plainly=beside))
        numbers = np.array([text.document.document for text in self._texts])
        return DecodingTimes(numbers, decodings[0], tuple(decodings[1:]), short, foreign)


def _decoded(answer: Answer) -> Decoded:
    """Return a text that an engine decoded. Its time is that of steps with all sequences; how it divides is not known."""
    if not answer["emitted"]:
        raise EngineFailed(
            "a text ended before --concurrency sequences were decoded together",
            "use a lower --concurrency, more --documents, or longer texts",
        )
    seconds = answer["wall_ms"] / 1e3 * (len(answer["ids"]) - 1) / answer["emitted"]
    return Decoded(np.array(answer["ids"]), *rounds_of(answer), 0.0, seconds, math.nan, math.nan, None)


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
