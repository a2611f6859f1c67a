"""From a run to the files of engines and simulators: counts pooled over domains, and what they assume, in words."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np

from alphaprof.commands.export.formats import ALL, EXPORTS, PROPOSING, Acceptance, Depths, Export, Over
from alphaprof.costs.cost_model import CostModel
from alphaprof.costs.rounds import UNTIMED, StepTimes, free_draft, full_round_costs, without_draft
from alphaprof.costs.speedup import Decoded, Mix, speedup
from alphaprof.errors import OptionInvalid
from alphaprof.report.format import count, interval, many, number, percent, short, text_kind, visible
from alphaprof.report.inputs import ReportInputs, draft_pools, evidence_of
from alphaprof.report.result import counted
from alphaprof.report.sections.stopping import answered_p_min
from alphaprof.report.serving import PASTED, VLLM, why_not_served
from alphaprof.report.speeds import speedup_interval, tokens_interval
from alphaprof.report.traffic import why_undecidable
from alphaprof.report.verdict import Decision, Evidence, Question, judge, pooled_speedup
from alphaprof.rules import parse_rule
from alphaprof.run.manifest import CHAIN, Manifest
from alphaprof.run.reader import RunDraft
from alphaprof.stats.estimate import distinct
from alphaprof.totals.count import by_chance
from alphaprof.totals.pool import DocumentTotals

AUTO = "auto"
SOME = 0.005  # share of rounds that is worth a word
ROUNDS = {ALL: "all rounds", PROPOSING: "rounds with a proposal"}


@dataclass(frozen=True)
class Artefact:
    """A file's text, and what it assumes; `warnings`: where it may not be what a reader takes it for."""

    text: str
    notes: tuple[str, ...]
    warnings: tuple[str, ...]


def export(
    side: RunDraft, to: str, *, rule: str | None = None, gamma: int | None = None, domain: str | None = None
) -> Artefact:
    """Return one draft of a run in the format of EXPORTS; `rule`, `gamma` and `domain`: None for what the run's own decision
    says. Raises `OptionInvalid` if it is not defined, and `RunUnreadable`.
    """
    form, manifest = EXPORTS[to], side.run.manifest
    if manifest.documents == 0:
        raise OptionInvalid(f"no document of {side.run.path} is complete yet", "finish the run, or give another one")
    scope = scope_of(side, to, rule, gamma, domain)
    if form.serves:
        _require_serving(side, to, scope)
    schedule = _gamma_schedule(scope, form)
    if form.serves and schedule is not None:
        scope = dataclasses.replace(scope, gamma=max(gamma for _, _, gamma in schedule) or scope.gamma)
    acceptance = Acceptance(
        target=manifest.target.reference,
        draft=manifest.drafts[side.draft],
        model=_own_model(manifest, side.draft),
        revision=manifest.profile.revisions[side.draft],
        served=manifest.imported is not None,
        drawn=not scope.exact,
        blocks=any(parse_rule(rule).rule.blocks for rule in scope.rules.split(" and ")),
        gamma=scope.gamma,
        depths=pooled_depths(scope),
        schedule=schedule,
        p_min=float(scope.question.p_min),
    )
    chain_notes, doubts = _assumptions(scope, acceptance, form), _warnings(scope, acceptance, form)
    return Artefact(form.write(acceptance), (form.convention, *chain_notes), tuple(doubts))


@dataclass(frozen=True)
class ExportScope:
    """What is exported: pools of one draft by domain, all kinds of text as one, with their weights (shares of output tokens;
    `given`: by the profile, and not as observed) and how these put domains together (`mix`), under `rules`, at one gamma.
    `label`: which traffic, in words. `texts`: kinds of text. `exact`: rounds are facts, and not expectations. `truncated`:
    some of the text was sampled without the less probable tokens. `decision`: the verdict on this draft at that gamma.
    """

    side: RunDraft
    question: Question
    costs: CostModel | None
    pools: Mapping[str, DocumentTotals]
    weights: Mapping[str, float]
    given: bool
    mix: Mix
    label: str
    rules: str
    texts: tuple[str, ...]
    exact: bool
    truncated: bool
    gamma: int
    decision: Decision

    def scaled(self) -> dict[str, float]:
        """By domain, what its counts are multiplied with: 1 as observed; else what gives it its share of the tokens."""
        if not self.given:
            return dict.fromkeys(self.pools, 1.0)
        tokens = {domain: float(pool["tokens"].sum()) for domain, pool in self.pools.items()}
        return {domain: self.weights[domain] * sum(tokens.values()) / tokens[domain] for domain in self.pools}

    def times(self, concurrency: int) -> StepTimes | None:
        """Step times of the draft; None if there are none."""
        return self.costs.times(concurrency).get(self.side.draft) if self.costs else None

    @property
    def documents(self) -> int:
        """How many documents there are."""
        return sum(len(pool.cluster) for pool in self.pools.values())


def named(domain: str) -> str:
    """Return a domain in words that a person reads: data may call it anything."""
    return f"'{short(visible(domain))}'"


def scope_of(
    side: RunDraft, to: str, rule: str | None = None, gamma: int | None = None, domain: str | None = None
) -> ExportScope:
    """Return what to export, at the gamma of the decision, or at the one that it would choose for this draft. Raises
    `OptionInvalid`.
    """
    gammas, inputs = _allowed_gammas(side, to, gamma), _report_inputs(side, to, rule, gamma)
    decisive, question = list(draft_pools(inputs, inputs.deciding, [side.draft])), inputs.question
    evidence = evidence_of(inputs, decisive)
    weights = {domain: 1.0} if domain is not None else question.weights or dict(evidence.observed)
    pools, weights = _pools_to_export(side, evidence, weights, domain), _positive_shares(weights)
    given = domain is None and question.weights is not None
    mix = Mix.of(weights) if given or domain is not None else Mix(tuple(pools), None, inputs.strata)
    costs = inputs.costs.of_domain(domain) if inputs.costs and domain is not None else inputs.costs
    timing = costs.timing(question.concurrency) if costs else UNTIMED
    best, decision = judge({side.draft: pools}, timing, mix, question, gammas)
    if best is None:
        problem = f"the best gamma for {side.label} is not known: {decision.reason}"
        raise OptionInvalid(problem, f"name one: --gamma {' or '.join(map(str, gammas))}")
    used = [item for item in decisive if item.domain in pools and question.rule_for(item.pool.policy) == item.rule.id]
    traffic = f"whole traffic ({many(len(pools), 'domain')} {'by decision.weights' if given else 'as observed'})"
    return ExportScope(
        side=side,
        question=question,
        costs=costs,
        pools=pools,
        weights=weights,
        given=given,
        mix=mix,
        label=traffic if domain is None else f"domain {named(domain)}",
        rules=" and ".join(dict.fromkeys(item.rule.id for item in used)),
        texts=tuple(dict.fromkeys(text_kind(item.pool.continuation, item.pool.sampling) for item in used)),
        exact=not any(by_chance(item.rule, side.run.manifest.drafts[side.draft]) for item in used),
        truncated=any(item.pool.sampling and _truncates(item.pool.sampling) for item in used),
        gamma=best[1],
        decision=decision,
    )


def _report_inputs(side: RunDraft, to: str, rule: str | None, gamma: int | None) -> ReportInputs:
    """Return what a report on this draft would read. Raises `OptionInvalid` for drafting or a rule without chains."""
    run = side.run
    if (drafting := run.manifest.drafting) != CHAIN:
        problem = f"{run.path} was served with {drafting} drafting, but {to} needs rates by depth"
        raise OptionInvalid(problem, "import requests with chain drafting: --speculative-eagle-topk 1")
    inputs = answered_p_min(ReportInputs.of(run, run.manifest.profile.deciding(side.draft, rule, gamma)))
    for bound in map(parse_rule, inputs.deciding):
        if bound.rule.lossy or not bound.rule.timed:
            hint = "export strict, one_hot, lossless or block; for lossy rules use validate --rule, for trees use trees"
            raise OptionInvalid(f"{bound.id} has no rounds of draft chains, which {to} needs", hint)
    return inputs


def _truncates(sampling: Mapping[str, float]) -> bool:
    return sampling["top_k"] > 0 or sampling["top_p"] < 1 or sampling["min_p"] > 0


def _allowed_gammas(side: RunDraft, to: str, named: int | None) -> list[int]:
    """Gammas that the run has and the reader takes. Raises `OptionInvalid` for another one that is asked for."""
    run, most = side.run, EXPORTS[to].most
    gamma = named or run.manifest.profile.decision.gamma
    gammas = [known for known in side.gammas if most is None or known <= most]
    if not gammas or gamma not in (AUTO, *gammas):
        limit = "" if most is None else f" ({to} takes at most {most} drafts a round)"
        hint = f"--gamma {' or '.join(map(str, gammas))}" if gammas else "profile with smaller gammas"
        raise OptionInvalid(f"gamma {gamma} of {run.path} cannot be exported{limit}", hint)
    return gammas


def _pools_to_export(
    side: RunDraft, evidence: Evidence, weights: Mapping[str, float], domain: str | None
) -> dict[str, DocumentTotals]:
    """Return the pools to export by domain, in the order of their weights. Raises `OptionInvalid` if they have no rounds."""
    pools = evidence.candidates[side.draft]
    if domain is not None and domain not in evidence.observed:
        known = ", ".join(map(named, evidence.observed))
        raise OptionInvalid(f"{side.run.path} has no domain {named(domain)}", f"it has: {known}")
    whole = domain is None
    reason = why_undecidable(weights, evidence, pools) if whole else evidence.undefined.get(str(domain), "")
    empty = [name for name, pool in pools.items() if not pool["tokens"].sum()]
    if brief := [name for name in _positive_shares(weights) if name in empty and not reason]:
        reason = f"no text of {', '.join(map(named, brief))} goes beyond its first token (prefill)"
    if reason:
        hint = "export one --domain, or choose a --rule that has rounds on this text (alphaprof report lists them)"
        raise OptionInvalid(f"nothing to export from {side.label}: {reason}", hint)
    return {name: pools[name] for name in _positive_shares(weights)}


def _positive_shares(weights: Mapping[str, float]) -> dict[str, float]:
    return {domain: share for domain, share in weights.items() if share > 0}


def pooled_depths(scope: ExportScope) -> Depths:
    """Return rounds of all domains together: counts are added up, and divided last. Raises `OptionInvalid` without a
    proposal.
    """
    gamma = scope.gamma
    rounds, drafted, tested, accepted = 0.0, np.zeros(gamma), np.zeros(gamma), np.zeros(gamma)
    for domain, scale in scope.scaled().items():
        pool = scope.pools[domain]
        every, started, reached, passed = counted(pool, gamma, speedup([pool.counts(gamma)], [1.0], free_draft(gamma)))
        rounds, drafted = rounds + scale * every, drafted + scale * started
        tested, accepted = tested + scale * reached, accepted + scale * passed
    if not drafted[0]:
        problem = f"draft {scope.side.draft} proposes nothing in {scope.label}"
        raise OptionInvalid(problem, "export another draft or domain of this run")
    nested = np.minimum.accumulate(np.minimum(accepted, drafted[0]))  # sums of scaled counts may be off by rounding
    return Depths(rounds, float(drafted[0]), float(drafted[-1]), tuple(tested.tolist()), tuple(nested.tolist()))


def _require_serving(side: RunDraft, to: str, scope: ExportScope) -> None:
    """Raise `OptionInvalid` if an engine cannot serve the draft as it was measured."""
    manifest, engine = side.run.manifest, PASTED[to]
    if manifest.imported:
        raise OptionInvalid(
            f"{side.run.path} was imported from {manifest.imported.engine}, whose log does not name the draft",
            "serve with the start options of this engine, or profile the draft itself",
        )
    facts, p_min = manifest.drafts[side.draft], float(scope.question.p_min)
    if why := why_not_served(engine, facts, scope.rules, p_min):
        other = "" if p_min or why_not_served(engine, facts, AUTO) else ", or --rule one_hot"
        name = engine.name.lower().replace(".", "")
        hint = f"export another draft{other}, or simulate this one: --to {name}-synthetic"
        raise OptionInvalid(f"{side.label} cannot be served: {why}", hint)


def _gamma_schedule(scope: ExportScope, form: Export) -> tuple[tuple[int, int, int], ...] | None:
    """Return the gamma by concurrency, 0 to draft nothing: that of the decision, and others from where they clearly differ
    from it. None if none does, or a gamma was named. Up to the exported one; a server drafts as many as the largest asks
    for. If two differ, bisection with interpolated step times finds the place of the change.
    """
    facts = scope.side.run.manifest.drafts[scope.side.draft]
    if scope.question.gamma != AUTO or not (form.engine and form.engine.schedules(facts)):
        return None
    most = max(scope.side.gammas) if form.serves else scope.gamma
    known = [size for size in (scope.costs.concurrencies if scope.costs else ()) if scope.times(size) is not None]
    if len(known) < 2:
        return None
    start, stack = scope.question.concurrency, list[tuple[int, int]]()
    best = {start: _told_apart(scope, start, scope.gamma, most)}
    for side in ([size for size in known if size > start], [size for size in reversed(known) if size < start]):
        for near, far in pairwise([start, *side]):
            best[far] = _told_apart(scope, far, best[near], most)
            stack.append((near, far))
    while stack:
        near, far = stack.pop()
        if abs(far - near) > 1 and best[near] != best[far]:
            middle = (near + far) // 2
            best[middle] = _told_apart(scope, middle, best[near], most)
            stack += [(near, middle), (middle, far)]
    if set(best.values()) == {scope.gamma}:
        return None
    groups = [(list(sizes), gamma) for gamma, sizes in groupby(sorted(best), key=best.__getitem__)]
    return tuple((sizes[0] if number else 1, sizes[-1], gamma) for number, (sizes, gamma) in enumerate(groups))


def _told_apart(scope: ExportScope, concurrency: int, present: int, most: int) -> int:
    """Return the fastest gamma up to `most` at a concurrency, 0 for no drafts, of those that are faster than the `present`
    one by the lower bound of their gain, each at its share of what may be wrong; else the present one.
    """
    if (times := scope.times(concurrency)) is None:
        return present
    others = [gamma for gamma in (0, *scope.side.gammas) if gamma <= most and gamma != present]
    tail, gains = (1 - scope.question.confidence) / len(others), {}
    for gamma in others:
        gain = scope.mix.gain(*(_decoded_at(scope, each, times) for each in (present, gamma)))
        if gain is not None and gain.deciding(tail)[0] > 1:
            gains[gamma] = gain.value
    return max(gains, key=gains.__getitem__, default=present)


def _decoded_at(scope: ExportScope, gamma: int, times: StepTimes) -> list[Decoded]:
    pools = scope.pools.values()
    if gamma == 0:
        return [without_draft(pool.counts(scope.gamma), times) for pool in pools]
    return scope.mix.decoded([pool.counts(gamma) for pool in pools], times)


def _own_model(manifest: Manifest, name: str) -> str | None:
    """Return the checkpoint of a draft; None: it has none of its own. A head may lie in the target's."""
    draft = manifest.drafts[name]
    return None if draft.by_depth and draft.reference == manifest.target.reference else draft.own_model


def _assumptions(scope: ExportScope, acceptance: Acceptance, form: Export) -> Iterator[str]:
    pools = scope.pools.values()
    clusters = distinct(np.concatenate([pool.cluster for pool in pools]))
    yield (
        f"{scope.side.label}, rule {scope.rules}, gamma {scope.gamma}, {scope.label}, "
        f"{many(scope.documents, 'document')} ({count(clusters)} independent), text: {', '.join(scope.texts)}"
    )
    free = scope.mix.speedup([pool.counts(scope.gamma) for pool in pools], free_draft(scope.gamma))
    chosen, over = acceptance.depths, form.over
    emitted = interval(tokens_interval(free, scope.gamma, scope.question.confidence))
    yield (
        f"acceptance length {chosen.length(over):.3f} = 1 + accepted / {ROUNDS[over]}; "
        f"emitted {emitted} tokens a round (over all rounds; the last of a text emits fewer)"
    )
    if beside := form.beside(acceptance):
        yield beside
    if acceptance.schedule is not None and scope.costs is not None:
        known = ", ".join(map(str, scope.costs.concurrencies))
        yield f"gamma by concurrency, {scope.costs.basis}, at {known}, interpolated in between; 0: no gamma is faster"


def _warnings(scope: ExportScope, acceptance: Acceptance, form: Export) -> Iterator[str]:
    manifest, chosen = scope.side.run.manifest, acceptance.depths
    for trial in acceptance.draft.trials:
        if trial.changed and form.engine and form.engine.name in trial.engines:
            here = trial.acceptance - trial.ahead
            yield (
                f"{form.engine.name} reads the files of {scope.side.label} differently ({trial.changed}): on a few texts "
                f"this alone accepts {trial.acceptance:.3f} of the drafts at depth {trial.depth}, the run {here:.3f}; "
                "give it a config.json that it reads as the run does: docs/heads.md"
            )
    if manifest.status != "complete":
        yield f"{scope.side.run.path} is not complete: {many(manifest.documents, 'document')} so far"
    same = scope.truncated and manifest.profile.draft_processing == "same"
    if form.serves and form.engine == VLLM and acceptance.drawn and same:
        yield (
            "drafts were sampled with the target's top_k, top_p and min_p, but vLLM uses temperature only: "
            "profile with draft_processing: temperature"
        )
    if acceptance.p_min and not form.serves:
        yield f"drafts stopped at p_min {acceptance.p_min:g}, but this format drafts {scope.gamma} tokens in every round"
    if not form.serves:
        yield from _of_rates(scope, chosen, form.over)
    times = scope.times(scope.question.concurrency)
    if form.serves and scope.decision.verdict != "GO":
        yield f"{scope.decision.verdict}: {scope.decision.reason}"
    elif times is not None:
        gamma = _scheduled_gamma(acceptance.schedule, scope.question.concurrency) or scope.gamma
        chosen_pair = (scope.side.draft, gamma)
        faster = pooled_speedup({scope.side.draft: scope.pools}, chosen_pair, {scope.side.draft: times}, scope.mix)
        if faster is not None and faster.value < 1:
            shown = interval(speedup_interval(faster, scope.question.confidence), "x")
            yield f"with this run's step times, the draft makes decoding slower at gamma {gamma}: speedup {shown}"
    if form.layers_of_target and acceptance.draft.own_model is not None:
        yield from _priced_as_layers(scope, times)
    if acceptance.schedule is not None and (last := acceptance.schedule[-1])[2]:
        yield f"vLLM also uses gamma {last[2]} beyond {last[1]} sequences, which were not timed"


def _priced_as_layers(scope: ExportScope, times: StepTimes | None) -> Iterator[str]:
    """Say what a reader that takes each draft for a layer of the target makes of a round, beside this run's step times."""
    gamma, shape = scope.gamma, scope.side.run.manifest.target.shape
    if times is None or not times.covers(gamma) or shape is None:
        yield f"AIConfigurator charges a round {gamma} extra target layers, not this draft's steps"
        return
    layers = float(shape["layers"])
    theirs = times.v(gamma) * (layers + gamma) / layers
    ours = float(full_round_costs(times, gamma)[-1])
    yield (
        f"AIConfigurator charges a round {gamma} extra target layers, about {number(theirs)} decode steps; by this "
        f"run's step times it costs {number(ours)}: do not rescale acceptance to compensate"
    )


def _scheduled_gamma(schedule: tuple[tuple[int, int, int], ...] | None, size: int) -> int:
    """Return the gamma that vLLM takes for a batch: the last one that begins at its size or below; 0 without a schedule."""
    return next((gamma for first, _, gamma in reversed(schedule or ()) if first <= size), 0)


def _of_rates(scope: ExportScope, chosen: Depths, over: Over) -> Iterator[str]:
    """Yield where rates are not what they seem."""
    if not scope.exact:
        yield "rounds are exact expectations for the texts, not counts of real rounds"
    if (silent := 1 - chosen.ready / chosen.rounds) > SOME:
        counted_as = "left out" if over == PROPOSING else "counted, and accept nothing"
        yield f"{percent(silent)} of the rounds have no proposal: they are {counted_as}"
    if (brief := 1 - chosen.full / chosen.ready) > SOME:
        lacking = "are left out: the engine must skip them too" if over == PROPOSING else "count as not accepted"
        yield f"{percent(brief)} of the proposals are shorter than {scope.gamma}: missing drafts {lacking}"
