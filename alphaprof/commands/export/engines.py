"""A run's draft as vLLM, SGLang and llama.cpp start it: one pure function an engine, and what the options assume."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from alphaprof.commands.export.formats import ADAPTIVE, RATES, STEP_COSTS, Artefact
from alphaprof.config.engines import LLAMACPP, SGLANG, V1, V2, VLLM, Engine, Method, engine_of, vllm_speculation
from alphaprof.config.profile import AUTO
from alphaprof.costs.rounds import UNTIMED, free_draft, full_round_costs
from alphaprof.errors import OptionInvalid
from alphaprof.render.format import interval
from alphaprof.report.rates import rates_at
from alphaprof.report.schedule import GammaByLoad, Schedule
from alphaprof.report.scope import Scope, scope_of
from alphaprof.report.serving import why_not_served
from alphaprof.report.speeds import tokens_interval
from alphaprof.report.verdict import judge
from alphaprof.rules import parse_rule
from alphaprof.run.manifest import DraftFacts
from alphaprof.run.reader import RunDraft

TOP_TEN = "llama.cpp compares p_min with probabilities among the draft's top ten tokens, so it stops slightly later"
SCHEDULED = ("vllm-config", ADAPTIVE)  # formats that hold the gamma of each batch size


@dataclass(frozen=True)
class ServedDraft:
    """What start options are written from: one draft of a run, served for a target (its reference) by an engine's method.

    `model`: its own checkpoint, with `revision` on the hub (None: it has none, or it is a part of the target's). `rule`:
    that decides how its drafts are taken. `schedule`: None if one gamma is for all concurrencies. `p_min`: the top
    probability below which the draft stops.
    """

    target: str
    draft: DraftFacts
    engine: Engine
    method: Method
    model: str | None
    revision: str | None
    rule: str
    gamma: int
    schedule: Schedule | None = None
    p_min: float = 0.0

    @property
    def asked(self) -> Mapping[str, str]:
        """The engine's options for the rule."""
        return self.engine.rules[self.rule]


def vllm_config(served: ServedDraft) -> str:
    """VLLM's --speculative-config, with the schedule over batch sizes if there is one: JSON with one entry per line, in
    ASCII, so that names from data reach a terminal escaped.
    """
    config = vllm_speculation(served.method, served.draft.settings, served.gamma, served.model, served.revision)
    config |= served.asked
    if served.schedule is not None:
        config["num_speculative_tokens_per_batch_size"] = [list(entry) for entry in served.schedule]
    return "{\n" + ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in config.items()) + "\n}\n"


def sglang_args(served: ServedDraft) -> str:
    """Return arguments of SGLang's server on one line, quoted for a shell: one branch of gamma drafts."""
    words = ["--speculative-algorithm", served.method.name]
    words += [] if served.model is None else ["--speculative-draft-model-path", served.model]
    words += [] if served.revision is None else ["--speculative-draft-model-revision", served.revision]
    if not served.draft.in_one_step:
        words += ["--speculative-num-steps", str(served.gamma), "--speculative-eagle-topk", "1"]
    words += [served.method.sized, str(served.gamma)] if served.method.sized else []
    words += ["--speculative-num-draft-tokens", str(served.gamma + 1), *served.asked]  # the root counts
    words += [] if served.schedule is None else ["--speculative-adaptive", "--speculative-adaptive-config", "adaptive.json"]
    return f"{shlex.join(words)}\n"


def sglang_adaptive(served: ServedDraft) -> str:
    """Return SGLang's adaptive configuration: from each batch size on, one number of steps. JSON with an entry per line."""
    steps = {first: {"candidate_steps": [gamma]} for first, _, gamma in served.schedule or ()}
    return "{\n" + ",\n".join(f'  "{first}": {json.dumps(entry)}' for first, entry in steps.items()) + "\n}\n"


def trtllm_schedule(schedule: Schedule) -> dict[int, int] | None:
    """Return TensorRT-LLM's `draft_len_schedule`: gamma by the last batch size that has it, and no drafts beyond. None if
    the smallest batch has not the largest gamma, which its validator wants.
    """
    used = max((number for number, (_, _, gamma) in enumerate(schedule, 1) if gamma), default=0)
    found = {last: gamma for _, last, gamma in schedule[:used]}
    return found if found and next(iter(found.values())) == max(found.values()) else None


def llamacpp_args(served: ServedDraft) -> str:
    """Return arguments of llama-server and llama-cli, quoted for a shell."""
    words = ["--spec-type", served.method.name]
    words += [] if served.model is None else ["--spec-draft-model", served.model]
    words += ["--spec-draft-n-max", str(served.gamma)]
    words += [word for option in served.asked.items() for word in option]
    words += ["--spec-draft-p-min", f"{served.p_min:g}"] if served.p_min else []
    return f"{shlex.join(words)}\n"


WRITERS: dict[str, Callable[[ServedDraft], str]] = {
    "vllm-config": vllm_config,
    "sglang-args": sglang_args,
    "llamacpp-args": llamacpp_args,
    ADAPTIVE: sglang_adaptive,
}


def serving_command(served: ServedDraft) -> str:
    """Return the whole command that serves, to paste into a shell."""
    if served.engine.name == VLLM.name:
        config = json.dumps(json.loads(vllm_config(served)))
        return shlex.join(["vllm", "serve", served.target, "--speculative-config", config])
    if served.engine.name == SGLANG.name:
        start, written = ["python", "-m", "sglang.launch_server", "--model-path", served.target], sglang_args(served)
    else:
        start, written = ["llama-server", "-m", served.target], llamacpp_args(served)
    return f"{shlex.join(start)} {written}".rstrip()


def export(
    side: RunDraft,
    to: str,
    *,
    rule: str | None = None,
    gamma: int | None = None,
    domain: str | None = None,
    version: str | None = None,
) -> Artefact:
    """Return start options for one draft of a run in a format of WRITERS; `rule`, `gamma` and `domain`: None for what the
    run's own decision says; else the gamma that it would choose for this draft; `version`: of the engine, None for the
    newest that was read. Raises `OptionInvalid` if it is not defined or cannot be served, and `RunUnreadable`.
    """
    engine = engine_of(to, version)
    scope, manifest = scope_of(side, to, rule, gamma, domain), side.run.manifest
    question, facts, p_min = scope.question, manifest.drafts[side.draft], float(scope.question.p_min)
    timing = scope.costs.timing(question.concurrency) if scope.costs else UNTIMED
    best, decision = judge({side.draft: scope.pools}, timing, scope.mix, question, scope.gammas)
    if best is None:
        raise OptionInvalid(
            f"the best gamma for {side.label} is not known: {decision.reason}",
            f"name one: --gamma {' or '.join(map(str, scope.gammas))}",
        )
    if manifest.imported:
        raise OptionInvalid(
            f"{side.run.path} was imported from {manifest.imported.engine}, whose log does not name the draft",
            "serve with the start options of this engine, or profile the draft itself",
        )
    method, why = facts.method_in(engine), why_not_served(engine, facts, scope.rules, p_min)
    if method is None or why:
        other = "" if p_min or why_not_served(engine, facts, AUTO) else ", or --rule one_hot"
        raise OptionInvalid(
            f"{side.label} cannot be served: {why}", f"export another draft{other}, or simulate this one: --to {RATES}"
        )
    schedule = gamma_schedule(scope, best[1]) if method.schedule else None
    if schedule is None and to == ADAPTIVE:
        raise OptionInvalid(
            f"{side.label} has one gamma for all concurrencies, by step times at {_timed(scope) or 'none'}",
            "start it with --to sglang-args",
        )
    drawn = [name for name in scope.rules.split(" and ") if parse_rule(name).rule.drawn]
    held = schedule if to in SCHEDULED else None
    served = ServedDraft(
        target=manifest.target.reference,
        draft=facts,
        engine=engine,
        method=method,
        # a head may lie in the target's checkpoint
        model=None if facts.by_depth and facts.reference == manifest.target.reference else facts.own_model,
        revision=own.revision if (own := manifest.profile.drafts[side.draft].own_model) else None,
        rule=drawn[0] if drawn and facts.has_distribution else "one_hot",  # a draft without a distribution has one token
        gamma=max((most for _, _, most in held or ()), default=0) or best[1],
        schedule=held,
        p_min=p_min,
    )
    modules = int(facts.reading.get("modules", "1"))
    if method.multiples and served.gamma > modules and served.gamma % modules:
        allowed = [each for each in side.gammas if each <= modules or each % modules == 0]
        problem = (
            f"{engine} drafts up to {modules} tokens with {modules} MTP modules or a multiple of it, not {served.gamma}"
        )
        raise OptionInvalid(problem, f"name another: --gamma {' or '.join(map(str, allowed))}")
    rates_at(scope, served.gamma)  # it must propose something
    doubt = [f"{decision.verdict}: {decision.reason}"] if decision.verdict != "GO" else []
    more = [f"gamma by concurrency: --to {ADAPTIVE}"] if schedule is not None and to not in SCHEDULED else []
    warnings = (*_differences(scope, served), *scope.incomplete, *doubt)
    return Artefact(WRITERS[to](served), (*_assumptions(scope, served), *more), warnings)


def export_step_costs(
    side: RunDraft, *, rule: str | None = None, gamma: int | None = None, domain: str | None = None
) -> Artefact:
    """Return step costs by which SGLang 0.5.23 budgets the drafts of DSpark (`--speculative-dspark-sps-table-path`): a step
    of N requests in which m tokens are verified takes bias + alpha(N) + theta(m) seconds. Fitted by least squares to the
    run's step times, of rounds that draft `gamma` tokens (None: the most of the run). Raises `OptionInvalid` without step
    times, and what `scope_of` raises.
    """
    scope, drafts = scope_of(side, STEP_COSTS, rule, gamma, domain), gamma or max(side.gammas)
    cells: list[tuple[int, int, float]] = []
    for size, known in ((size, scope.costs.times(size)) for size in scope.costs.concurrencies) if scope.costs else ():
        if (times := known.get(side.draft)) and times.covers(drafts):
            drafting = full_round_costs(times, drafts)[drafts] * times.decode.ms - times.target[drafts + 1].ms
            cells += [(size, size * n, (drafting + times.target[n].ms) / 1000) for n in range(1, drafts + 2)]
    if not cells:
        raise OptionInvalid(f"{side.label} has no step times of {drafts} drafts", "name fewer with --gamma, or set costs")
    requests, tokens = sorted({size for size, _, _ in cells}), sorted({verified for _, verified, _ in cells})
    seconds = np.array([took for _, _, took in cells])
    terms = np.array(
        [[*(n == size for n in requests), *(m == verified for m in tokens)] for size, verified, _ in cells], float
    )
    fit = np.linalg.lstsq(terms, seconds)[0]
    alpha, theta = fit[: len(requests)], fit[len(requests) :]
    found = {"bias_seconds": alpha[0] + theta[0], "bs_probes": requests, "alpha_seconds": list(alpha - alpha[0])}
    found |= {"m_probes": tokens, "theta_seconds": list(theta - theta[0])}
    error = f"the sum is within {np.abs(terms @ fit / seconds - 1).max():.1%} of all step times ({_timed(scope)})"
    return Artefact(json.dumps(found) + "\n", (f"{drafts} tokens are drafted in each round; {error}",), ())


def gamma_schedule(scope: Scope, best: int) -> Schedule | None:
    """Return the gamma by concurrency as `GammaByLoad.schedule` does, `best` being the decision's; None also if a gamma was
    named, or without step times.
    """
    if scope.costs is None or scope.question.gamma != AUTO:
        return None
    pools, confidence = list(scope.pools.values()), scope.question.confidence
    load = GammaByLoad(scope.side.draft, pools, scope.mix, scope.costs, scope.gammas, confidence)
    return load.schedule(scope.question.concurrency, best)


def _timed(scope: Scope) -> str:
    """Return the concurrencies that were timed, in words."""
    return ", ".join(map(str, scope.costs.concurrencies)) if scope.costs else ""


def _assumptions(scope: Scope, served: ServedDraft) -> Iterator[str]:
    runner = f", model runner {served.method.runner}" if served.method.runner else ""
    yield f"{scope.about}, gamma {served.gamma}, {served.engine}{runner}"
    free = scope.mix.speedup([pool.counts(served.gamma) for pool in scope.pools.values()], free_draft(served.gamma))
    emitted = interval(tokens_interval(free, served.gamma, scope.question.confidence))
    yield f"emits {emitted} tokens a round; rates by depth: --to {RATES}"
    yield f"serve with: {serving_command(served)}"
    if served.p_min:
        yield TOP_TEN
    if served.schedule is not None and scope.costs is not None:
        basis = f"{scope.costs.basis}, at {_timed(scope)}, interpolated in between"
        yield f"gamma by concurrency, {basis}; 0: no gamma is faster"
        if lengths := trtllm_schedule(served.schedule):
            yield f"the same for TensorRT-LLM: max_draft_len {max(lengths.values())}, draft_len_schedule {lengths}"
    if timed := scope.side.run.manifest.timed_in:
        yield timed


def _differences(scope: Scope, served: ServedDraft) -> Iterator[str]:
    """Say what the engine does otherwise than the run."""
    engine, facts, manifest = served.engine, served.draft, scope.side.run.manifest
    for trial in facts.trials:
        if trial.changed and engine.name in trial.engines:
            here = trial.acceptance - trial.ahead
            yield (
                f"{engine.name} reads the files of {scope.side.label} differently ({trial.changed}): on a few texts "
                f"this alone accepts {trial.acceptance:.3f} of the drafts at depth {trial.depth}, the run {here:.3f}; "
                "give it a config.json that it reads as the run does: docs/heads.md"
            )
    if (match := facts.settings.get("match")) == "leftmost" and served.method.runner == V2:
        yield (
            "looked up leftmost, as vLLM's V1 runner and CPU build do; on GPUs its V2 runner takes the rightmost match and "
            "fills every round: set VLLM_USE_V2_MODEL_RUNNER=0, or profile with match: rightmost"
        )
    if match == "rightmost" and served.method.runner == V1:
        yield (
            f"looked up rightmost and filled up, but {engine} takes the leftmost match and fills no round: profile with "
            "match: leftmost"
        )
    reused = int(facts.reading.get("modules", "1")) > 1 and facts.reading["use of modules"].startswith("the first")
    if reused and served.method.runner == V2:
        yield (
            "the first MTP module drafted at every depth, as in vLLM's V1 runner; its V2 runner takes one module a depth: "
            "set VLLM_USE_V2_MODEL_RUNNER=0, or profile with reuse: false"
        )
    # What draws from q has a drafter that uses temperature only (vLLM: `gumbel_sample` of its speculators and
    # `compute_probs_and_sample_next_token`; SGLang: `sample_draft_proposal`; llama.cpp: `spec_retune`).
    drawn = parse_rule(served.rule).rule.drawn
    if drawn and scope.truncated and manifest.profile.draft_processing == "same":
        yield (
            f"drafts were sampled with the target's top_k, top_p and min_p, but {engine.name} uses temperature only: "
            "profile with draft_processing: temperature, the default"
        )
    if drawn and engine.draws:
        yield f"{engine.name} samples {engine.draws} only, so it accepts slightly fewer or more than the run"
    if served.schedule is not None:
        yield engine.limits
        if (last := served.schedule[-1])[2]:
            yield f"{engine.name} also uses gamma {last[2]} beyond {last[1]} sequences, which were not timed"
    others = [name for name in (served.target, served.model) if name and not name.lower().endswith(".gguf")]
    if engine.name == LLAMACPP.name and others:
        yield f"llama.cpp reads GGUF files: convert {' and '.join(others)} with its convert_hf_to_gguf.py"
