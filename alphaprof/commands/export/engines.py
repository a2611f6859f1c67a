"""A run's draft as vLLM, SGLang and llama.cpp start it: one pure function an engine, and what the options assume."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from alphaprof.commands.export.formats import RATES
from alphaprof.commands.export.rates import rates_at
from alphaprof.commands.export.scope import AUTO, Artefact, ExportScope, scope_of
from alphaprof.costs.rounds import UNTIMED, free_draft
from alphaprof.errors import OptionInvalid
from alphaprof.render.format import interval
from alphaprof.report.schedule import GammaByLoad, Schedule
from alphaprof.report.serving import LLAMACPP, PASTED, SGLANG, VLLM, why_not_served
from alphaprof.report.speeds import tokens_interval
from alphaprof.report.verdict import judge
from alphaprof.rules import parse_rule
from alphaprof.run.reader import RunDraft

if TYPE_CHECKING:
    from alphaprof.run.manifest import DraftFacts

TOP_TEN = "llama.cpp compares p_min with probabilities among the draft's top ten tokens, so it stops slightly later"


@dataclass(frozen=True)
class ServedDraft:
    """What start options are written from: one draft of a run, served for a target (its reference).

    `model`: its own checkpoint, with `revision` on the hub (None: it has none, or it is a part of the target's). `drawn`:
    drafts are drawn from q; `blocks`: they are verified together. `schedule`: None if one gamma is for all concurrencies.
    `p_min`: the top probability below which the draft stops.
    """

    target: str
    draft: DraftFacts
    model: str | None
    revision: str | None
    drawn: bool
    blocks: bool
    gamma: int
    schedule: Schedule | None = None
    p_min: float = 0.0


def vllm_config(served: ServedDraft) -> str:
    """VLLM's --speculative-config, with the schedule over batch sizes if there is one: JSON with one entry per line, in
    ASCII, so that names from data reach a terminal escaped.
    """
    config = served.draft.vllm_speculation(served.gamma, served.model, served.revision) | {
        "draft_sample_method": "probabilistic" if served.drawn else "greedy",
        "rejection_sample_method": "block" if served.blocks else "standard",
    }
    if served.schedule is not None:
        config["num_speculative_tokens_per_batch_size"] = [list(entry) for entry in served.schedule]
    return "{\n" + ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in config.items()) + "\n}\n"


def sglang_args(served: ServedDraft) -> str:
    """Return arguments of SGLang's server on one line, quoted for a shell: one branch of gamma drafts."""
    words = ["--speculative-algorithm", str(SGLANG.method(served.draft))]
    words += [] if served.model is None else ["--speculative-draft-model-path", served.model]
    words += [] if served.revision is None else ["--speculative-draft-model-revision", served.revision]
    words += ["--speculative-num-steps", str(served.gamma), "--speculative-eagle-topk", "1"]
    words += ["--speculative-num-draft-tokens", str(served.gamma + 1)]  # the root counts
    words += ["--speculative-use-rejection-sampling"] if served.drawn else []
    return f"{shlex.join(words)}\n"


def llamacpp_args(served: ServedDraft) -> str:
    """Return arguments of llama-server and llama-cli, quoted for a shell."""
    words = ["--spec-type", str(LLAMACPP.method(served.draft)), "--spec-draft-model", str(served.model)]
    words += ["--spec-draft-n-max", str(served.gamma)]
    words += ["--spec-draft-p-min", f"{served.p_min:g}"] if served.p_min else []
    return f"{shlex.join(words)}\n"


WRITERS: dict[str, Callable[[ServedDraft], str]] = {
    "vllm-config": vllm_config,
    "sglang-args": sglang_args,
    "llamacpp-args": llamacpp_args,
}


def serving_command(to: str, served: ServedDraft) -> str:
    """Return the whole command that serves, to paste into a shell."""
    if to == "vllm-config":
        config = json.dumps(json.loads(vllm_config(served)))
        return shlex.join(["vllm", "serve", served.target, "--speculative-config", config])
    start = {
        "sglang-args": ["python", "-m", "sglang.launch_server", "--model-path", served.target],
        "llamacpp-args": ["llama-server", "-m", served.target],
    }
    return f"{shlex.join(start[to])} {WRITERS[to](served)}".rstrip()


def export(
    side: RunDraft, to: str, *, rule: str | None = None, gamma: int | None = None, domain: str | None = None
) -> Artefact:
    """Return start options for one draft of a run in a format of WRITERS; `rule`, `gamma` and `domain`: None for what the
    run's own decision says; else the gamma that it would choose for this draft. Raises `OptionInvalid` if it is not defined
    or cannot be served, and `RunUnreadable`.
    """
    scope, engine, manifest = scope_of(side, to, rule, gamma, domain), PASTED[to], side.run.manifest
    question, facts, p_min = scope.question, manifest.drafts[side.draft], float(scope.question.p_min)
    timing = scope.costs.timing(question.concurrency) if scope.costs else UNTIMED
    best, decision = judge({side.draft: scope.pools}, timing, scope.mix, question, scope.gammas)
    if best is None:
        problem = f"the best gamma for {side.label} is not known: {decision.reason}"
        raise OptionInvalid(problem, f"name one: --gamma {' or '.join(map(str, scope.gammas))}")
    if manifest.imported:
        raise OptionInvalid(
            f"{side.run.path} was imported from {manifest.imported.engine}, whose log does not name the draft",
            "serve with the start options of this engine, or profile the draft itself",
        )
    if why := why_not_served(engine, facts, scope.rules, p_min):
        other = "" if p_min or why_not_served(engine, facts, AUTO) else ", or --rule one_hot"
        hint = f"export another draft{other}, or simulate this one: --to {RATES}"
        raise OptionInvalid(f"{side.label} cannot be served: {why}", hint)
    schedule = gamma_schedule(scope, best[1]) if engine.schedules(facts) else None
    served = ServedDraft(
        target=manifest.target.reference,
        draft=facts,
        # a head may lie in the target's checkpoint
        model=None if facts.by_depth and facts.reference == manifest.target.reference else facts.own_model,
        revision=own.revision if (own := manifest.profile.drafts[side.draft].own_model) else None,
        drawn=not scope.exact,
        blocks=any(parse_rule(name).rule.blocks for name in scope.rules.split(" and ")),
        gamma=max((most for _, _, most in schedule or ()), default=0) or best[1],
        schedule=schedule,
        p_min=p_min,
    )
    rates_at(scope, served.gamma)  # it must propose something
    warnings = [*_differences(scope, served, to), *scope.incomplete]
    if decision.verdict != "GO":
        warnings.append(f"{decision.verdict}: {decision.reason}")
    if schedule is not None and (last := schedule[-1])[2]:
        warnings.append(f"vLLM also uses gamma {last[2]} beyond {last[1]} sequences, which were not timed")
    return Artefact(WRITERS[to](served), tuple(_assumptions(scope, served, to)), tuple(warnings))


def gamma_schedule(scope: ExportScope, best: int) -> Schedule | None:
    """Return the gamma by concurrency as `GammaByLoad.schedule` does, `best` being the decision's; None also if a gamma was
    named, or without step times.
    """
    if scope.costs is None or scope.question.gamma != AUTO:
        return None
    pools, confidence = list(scope.pools.values()), scope.question.confidence
    load = GammaByLoad(scope.side.draft, pools, scope.mix, scope.costs, scope.gammas, confidence)
    return load.schedule(scope.question.concurrency, best)


def _assumptions(scope: ExportScope, served: ServedDraft, to: str) -> Iterator[str]:
    yield f"{scope.about}, gamma {served.gamma}"
    free = scope.mix.speedup([pool.counts(served.gamma) for pool in scope.pools.values()], free_draft(served.gamma))
    emitted = interval(tokens_interval(free, served.gamma, scope.question.confidence))
    yield f"emits {emitted} tokens a round; rates by depth: --to {RATES}"
    yield f"serve with: {serving_command(to, served)}"
    if served.p_min:
        yield TOP_TEN
    if served.schedule is not None and scope.costs is not None:
        known = ", ".join(map(str, scope.costs.concurrencies))
        yield f"gamma by concurrency, {scope.costs.basis}, at {known}, interpolated in between; 0: no gamma is faster"
    if timed := scope.side.run.manifest.timed_with:
        yield timed


def _differences(scope: ExportScope, served: ServedDraft, to: str) -> Iterator[str]:
    """Say what the engine does otherwise than the run."""
    engine, manifest = PASTED[to], scope.side.run.manifest
    for trial in served.draft.trials:
        if trial.changed and engine.name in trial.engines:
            here = trial.acceptance - trial.ahead
            yield (
                f"{engine.name} reads the files of {scope.side.label} differently ({trial.changed}): on a few texts "
                f"this alone accepts {trial.acceptance:.3f} of the drafts at depth {trial.depth}, the run {here:.3f}; "
                "give it a config.json that it reads as the run does: docs/heads.md"
            )
    if engine == VLLM and served.draft.settings.get("match") == "leftmost":
        yield (
            "looked up leftmost, as vLLM's V1 runner and CPU build do; on GPUs its V2 runner takes the rightmost match and "
            "fills every round: set VLLM_USE_V2_MODEL_RUNNER=0, or profile with match: rightmost"
        )
    # What draws from q has a drafter that uses temperature only (vLLM: `gumbel_sample` of its speculators and
    # `compute_probs_and_sample_next_token`; SGLang: `sample_draft_proposal`).
    if served.drawn and scope.truncated and manifest.profile.draft_processing == "same":
        yield (
            f"drafts were sampled with the target's top_k, top_p and min_p, but {engine.name} uses temperature only: "
            "profile with draft_processing: temperature, the default"
        )
