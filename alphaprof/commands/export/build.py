"""From a run to the files of engines and simulators: counts pooled over domains, and what they assume, in words."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from alphaprof.commands.export.formats import ALL, EXPORTS, PROPOSING, Acceptance, Depths, Export, Over
from alphaprof.commands.export.scope import ExportRequest, ExportScope, scope_of
from alphaprof.costs.speedup import Decoded, StepTimes, free_draft, speedup, without_draft
from alphaprof.errors import OptionInvalid
from alphaprof.log.manifest import Manifest
from alphaprof.log.run_draft import RunDraft
from alphaprof.report.format import count, interval, many, percent
from alphaprof.report.result import counted
from alphaprof.report.serving import PASTED, VLLM, paste_formats, why_not_served
from alphaprof.report.speeds import speedup_interval, tokens_interval
from alphaprof.report.verdict import pooled_speedup
from alphaprof.stats.estimate import distinct
from alphaprof.version import __version__

AUTO = "auto"
SOME = 0.005  # share of rounds that is worth a word
ROUNDS = {ALL: "all rounds", PROPOSING: "rounds with a proposal"}


@dataclass(frozen=True)
class Artefact:
    """A file's text, and what it assumes; `warnings`: where it may not be what a reader takes it for."""

    text: str
    notes: tuple[str, ...]
    warnings: tuple[str, ...]


def export(side: RunDraft, to: str, wanted: ExportRequest) -> Artefact:
    """One draft of a run in the format of EXPORTS. Raises `OptionInvalid` where it is not defined, and `RunUnreadable`."""
    form, manifest = EXPORTS[to], side.run.manifest
    if wanted.split is not None:
        raise OptionInvalid(f"--split parts texts for trainers, and {to} holds none", "leave it out")
    if manifest.documents == 0:
        raise OptionInvalid(f"no document of {side.run.path} is complete yet", "finish the run, or give another one")
    if form.serves:
        _require_served(side, to, AUTO)
    scope = scope_of(side, to, wanted)
    if form.serves:
        _require_served(side, to, scope.rules)
    schedule = _schedule(scope, form)
    if form.serves and schedule is not None:
        scope = dataclasses.replace(scope, gamma=max(gamma for _, _, gamma in schedule) or scope.gamma)
    mean, by_domain = _per_request(scope) if scope.exact else (None, None)
    acceptance = Acceptance(
        draft=manifest.drafts[side.draft],
        model=_own_model(manifest, side.draft),
        revision=manifest.config["drafts"].get(side.draft, {}).get("revision"),
        served=manifest.imported is not None,
        drawn=not scope.exact,
        gamma=scope.gamma,
        depths={gamma: _depths(scope, gamma) for gamma in side.run.gammas},
        per_request=mean,
        per_domain=by_domain,
        schedule=schedule,
        conditions=_conditions(scope),
    )
    chain_notes, doubts = _notes(scope, acceptance, form), _warnings(scope, acceptance, form)
    return Artefact(form.write(acceptance), (form.convention, *chain_notes), tuple(doubts))


def _depths(scope: ExportScope, gamma: int) -> Depths:
    """Rounds of all domains together: counts are added up, and divided last. Raises `OptionInvalid` without a proposal."""
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


def _per_request(scope: ExportScope) -> tuple[float, dict[str, float]]:
    """Acceptance length of a document, all of its rounds counted, on average over documents; and the same by domain."""
    total, weight, by_domain = 0.0, 0.0, {}
    for domain, scale in scope.scaled().items():
        pool = scope.pools[domain]
        rounds, accepted = pool[f"rounds_{scope.gamma}"], pool[f"accepted_depths_{scope.gamma}"].sum(1)
        lengths = 1 + accepted[rounds > 0] / rounds[rounds > 0]
        by_domain[domain] = float(lengths.mean())
        total, weight = total + scale * float(lengths.sum()), weight + scale * len(lengths)
    return total / weight, by_domain


def _require_served(side: RunDraft, to: str, rules: str) -> None:
    """Raise `OptionInvalid` where an engine cannot serve the draft as it was measured under `rules`."""
    manifest, engine = side.run.manifest, PASTED[to]
    if manifest.imported:
        raise OptionInvalid(
            f"{side.run.path} was imported from {manifest.imported.engine}, whose log does not say what drafted",
            "serve with the options that this engine was started with, or profile the draft itself",
        )
    if why := why_not_served(engine, manifest.drafts[side.draft], rules):
        others = [f"{side.run.path}:{name}" for name, facts in manifest.drafts.items() if to in paste_formats(facts, rules)]
        hint = f"--to {engine.name.lower()}-synthetic simulates such a draft in {engine.name}"
        if others:
            hint = f"export another draft of this run: {' or '.join(others)}"
        if not why_not_served(engine, manifest.drafts[side.draft], AUTO):
            hint = "--rule one_hot exports what this engine does instead"
        raise OptionInvalid(f"{side.label} cannot be served: {why}", hint)


def _schedule(scope: ExportScope, form: Export) -> tuple[tuple[int, int, int], ...] | None:
    """The gamma by concurrency, 0 to draft nothing: that of the decision, and another one from where on that is told apart
    from it. None where none is, or a gamma was named. Up to the exported one; a server drafts as many as the largest asks
    for. Where two differ, bisection with interpolated step times finds the place of the change.
    """
    facts = scope.side.run.manifest.drafts[scope.side.draft]
    if scope.question.gamma != AUTO or not (form.scheduled and form.engine and form.engine.schedules(facts)):
        return None
    most = max(scope.side.run.gammas) if form.serves else scope.gamma
    known = [size for size in (scope.book.concurrencies if scope.book else ()) if scope.times(size) is not None]
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
    """The fastest gamma up to `most` at a concurrency, 0 for no drafts, of those that are faster than the `present` one by
    the lower bound of their gain, each at its share of what may be wrong; else the present one.
    """
    if (times := scope.times(concurrency)) is None:
        return present
    others = [gamma for gamma in (0, *scope.side.run.gammas) if gamma <= most and gamma != present]
    tail, gains = (1 - scope.question.confidence) / len(others), {}
    for gamma in others:
        gain = scope.mix.gain(*(_decoded(scope, each, times) for each in (present, gamma)))
        if gain is not None and gain.deciding(tail)[0] > 1:
            gains[gamma] = gain.value
    return max(gains, key=gains.__getitem__, default=present)


def _decoded(scope: ExportScope, gamma: int, times: StepTimes) -> list[Decoded]:
    pools = scope.pools.values()
    if gamma == 0:
        return [without_draft(pool.counts(scope.gamma), times) for pool in pools]
    return [(pool.counts(gamma), times) for pool in pools]


def _conditions(scope: ExportScope) -> dict[str, Any]:
    """What was measured, for a reader who has the file and nothing else. Models by the last two parts of their path."""
    manifest = scope.side.run.manifest
    draft, model = manifest.drafts[scope.side.draft], _own_model(manifest, scope.side.draft)
    replayed = "rounds replayed from a teacher-forced log" + ("" if scope.exact else ", exact expectations")
    return {
        "tool": f"alphaprof {__version__}",
        "measurement": f"rounds counted by {manifest.imported.engine} for each request" if manifest.imported else replayed,
        "target": _published(manifest.target.reference),
        "draft": _published(model) if model is not None else draft.kind,
        "dtype": manifest.target.precision,
        "rule": scope.rules,
        "texts": list(scope.texts),
        "domains": {domain: round(scope.weights[domain], 6) for domain in scope.pools},
        "weights": "shares of output tokens, " + ("given" if scope.given else "as observed"),
        "documents": scope.documents,
        "complete": manifest.status == "complete",
        "created": manifest.created,
    }


def _own_model(manifest: Manifest, name: str) -> str | None:
    """The checkpoint of a draft; None: it has none of its own. A head may lie in the target's."""
    draft = manifest.drafts[name]
    return None if draft.by_depth and draft.reference == manifest.target.reference else draft.own_model


def _published(reference: str) -> str:
    """A model's name without where it lies on this machine."""
    return "/".join([part for part in reference.replace("\\", "/").split("/") if part][-2:])


def _notes(scope: ExportScope, acceptance: Acceptance, form: Export) -> Iterator[str]:
    pools = scope.pools.values()
    clusters = distinct(np.concatenate([pool.cluster for pool in pools]))
    yield (
        f"{scope.side.label}, rule {scope.rules}, gamma {scope.gamma}, {scope.label}, "
        f"{many(scope.documents, 'document')} ({count(clusters)} independent), text: {', '.join(scope.texts)}"
    )
    free = scope.mix.speedup([pool.counts(scope.gamma) for pool in pools], free_draft(scope.gamma))
    chosen, over = acceptance.chosen, form.over
    emitted = interval(tokens_interval(free, scope.gamma, scope.question.confidence))
    yield (
        f"acceptance length {chosen.length(over):.3f} = 1 + accepted / {ROUNDS[over]}; "
        f"emitted {emitted} tokens a round (over all rounds; the last of a text emits fewer)"
    )
    full = f"{1 + sum(chosen.marginal(over)):.3f}"
    if not form.serves and full != f"{chosen.length(over):.3f}":
        yield (
            f"rates are products of accepted / tested drafts: a proposal of {scope.gamma} inside a text emits {full}; "
            "short ones and ends of texts make the length above of it"
        )
    if form.most is not None and scope.question.gamma == AUTO and max(acceptance.depths) > form.most:
        yield f"the best gamma up to {form.most}, since the reader takes no more"
    if beside := form.beside(acceptance):
        yield beside
    if acceptance.schedule is not None and scope.book is not None:
        known = ", ".join(map(str, scope.book.concurrencies))
        largest = "; num_speculative_tokens is the largest" if form.serves else ""
        yield f"gamma by concurrency, {scope.book.basis}, at {known} and interpolated between; 0: none is faster{largest}"


def _warnings(scope: ExportScope, acceptance: Acceptance, form: Export) -> Iterator[str]:
    manifest, chosen = scope.side.run.manifest, acceptance.chosen
    for trial in acceptance.draft.trials:
        if trial.changed and form.engine and form.engine.name in trial.engines:
            here = trial.acceptance - trial.ahead
            yield (
                f"{form.engine.name} reads the files of {scope.side.label} otherwise ({trial.changed}): on a few texts "
                f"it accepts {trial.acceptance:.3f} of the drafts at depth {trial.depth}, and {here:.3f} are accepted as "
                f"measured; profile with serve_as: {form.engine.name.lower()}"
            )
    if manifest.status != "complete":
        yield f"{scope.side.run.path} is not complete: {many(manifest.documents, 'document')} so far"
    yield from _of_serving(scope, acceptance, form) if form.serves else _of_rates(scope, chosen, form.over)
    times = scope.times(scope.question.concurrency)
    if form.serves and scope.decision.verdict != "GO":
        yield f"{scope.decision.verdict}: {scope.decision.reason}"
    elif times is not None:
        gamma = _scheduled(acceptance.schedule, scope.question.concurrency) or scope.gamma
        chosen_pair = (scope.side.draft, gamma)
        faster = pooled_speedup({scope.side.draft: scope.pools}, chosen_pair, {scope.side.draft: times}, scope.mix)
        if faster is not None and faster.value < 1:
            shown = interval(speedup_interval(faster, scope.question.confidence), "x")
            yield f"by this run's step times the draft makes decoding slower at gamma {gamma}: speedup {shown}"
    if acceptance.schedule is not None and not any(gamma for _, _, gamma in acceptance.schedule):
        yield "with this schedule vLLM drafts nothing: at no concurrency is a gamma faster than none"
    elif acceptance.schedule is not None and (last := acceptance.schedule[-1])[2]:
        yield f"vLLM takes gamma {last[2]} beyond {last[1]} sequences as well, where nothing was timed"


def _scheduled(schedule: tuple[tuple[int, int, int], ...] | None, size: int) -> int:
    """The gamma that vLLM takes for a batch: the last one that begins at its size or below; 0 without a schedule."""
    return next((gamma for first, _, gamma in reversed(schedule or ()) if first <= size), 0)


def _of_serving(scope: ExportScope, acceptance: Acceptance, form: Export) -> Iterator[str]:
    """Where an engine does something else than what was measured."""
    if form.engine != VLLM:
        return
    if acceptance.model is not None and acceptance.model.lower().endswith(".gguf"):
        yield "vLLM reads GGUF files with a plugin only (vllm-gguf-plugin); else name a checkpoint in safetensors"
    if acceptance.drawn and scope.truncated and scope.side.run.manifest.config.get("draft_processing") == "same":
        yield (
            "drafts were drawn with the target's top_k, top_p and min_p, and vLLM draws them by temperature only: "
            "profile with draft_processing: temperature"
        )


def _of_rates(scope: ExportScope, chosen: Depths, over: Over) -> Iterator[str]:
    """Where rates are not what they seem."""
    if not scope.exact:
        yield "rounds are exact expectations given the texts, not counts of rounds that took place"
    if (silent := 1 - chosen.ready / chosen.rounds) > SOME:
        counted_as = "left out" if over == PROPOSING else "counted, and accept nothing"
        yield f"{percent(silent)} of the rounds have no proposal: they are {counted_as}"
    if (brief := 1 - chosen.full / chosen.ready) > SOME:
        lacking = "is left to the reader, who has to propose as few" if over == PROPOSING else "counts as not accepted"
        yield f"{percent(brief)} of the proposals are shorter than {scope.gamma}: what they lack {lacking}"
