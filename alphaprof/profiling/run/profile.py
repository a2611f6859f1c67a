"""A run, top to bottom: `profile` begins it, or goes on with it, measures the shards of its part, and concludes it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import platform
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import torch

from alphaprof.config.load import stored_profile
from alphaprof.config.options import MeasuredCosts, RooflineCosts, SampledContinuation, TableCosts, TextContinuation
from alphaprof.config.profile import ProfileOptions
from alphaprof.costs.cost_model import shape_of
from alphaprof.costs.engine_table import read_engine_table
from alphaprof.costs.steps import TARGET
from alphaprof.costs.timing import is_busy
from alphaprof.errors import OutOfMemory, ProfileInvalid, RunExists, RunMismatch, RunUnreadable, StepsNotTimed
from alphaprof.log.manifest import (
    MANIFEST,
    DraftFacts,
    Environment,
    Manifest,
    ModelFacts,
    Worker,
    now,
    read_manifest,
)
from alphaprof.log.notes import note
from alphaprof.log.run import Run
from alphaprof.log.storage import Storage, address_of, storage_of
from alphaprof.log.writer import FREE, RunWriter, alive, joined
from alphaprof.profiling.engine.client import TRIED, vllm_version
from alphaprof.profiling.engine.steps import EngineSteps
from alphaprof.profiling.engine.texts import TextWriter, check_engine
from alphaprof.profiling.heads.wiring import check_wiring
from alphaprof.profiling.models import hub
from alphaprof.profiling.models.dtype import with_dtype
from alphaprof.profiling.models.kinds import check_tokenizers, load_drafts
from alphaprof.profiling.models.load import (
    eos_of,
    is_out_of_memory,
    load_model,
    load_tokenizer,
    special_ids,
    token_count,
    tokenizer_fingerprint,
)
from alphaprof.profiling.models.processing import not_modelled
from alphaprof.profiling.models.teacher_forced import TeacherForced
from alphaprof.profiling.run.parts import WHOLE, Part, wait_until_begun
from alphaprof.profiling.run.shard import BackgroundWriter, Loaded, Plan, Progress, measure_shard
from alphaprof.profiling.scoring import dispatch
from alphaprof.profiling.scoring.scorer import Extras, Scorer
from alphaprof.profiling.texts.continuations import digest
from alphaprof.profiling.texts.corpus import (
    INT32_MAX,
    Corpus,
    Reused,
    Staged,
    documents_of,
    policy,
    prompt_table,
)
from alphaprof.profiling.timing import latency
from alphaprof.profiling.timing.steppers import NotTimed
from alphaprof.rules import parse_rule
from alphaprof.totals.documents import require_weights
from alphaprof.totals.files import join_totals
from alphaprof.version import __version__

LOOKED_AT = 1_000  # documents of each source, before models are loaded


def profile(
    options: ProfileOptions,
    out: Path | str,
    progress: Progress,
    resume: bool = False,
    reuse: Path | None = None,
    part: Part = WHOLE,
    units: frozenset[str] | None = None,
) -> Run:
    """Profile into the directory `out`, or with `resume` go on with the run there, which other processes may be doing too.
    Raises the errors of `errors.py`.

    `reuse`: directory of a complete run whose continuations are measured again, with this profile's drafts; `units`: only
    these independent units (a cluster, or a document that has none). `part`: which shards this process measures; part 0
    begins the run, and the last one finishes it.
    """
    storage, config = storage_of(out), options.model_dump(mode="json")
    if part.index:
        wait_until_begun(storage, part, progress.say)
    with in_memory(), joined(storage, config, resume or part != WHOLE, several=part != WHOLE):
        plan = begin(options, storage, progress, resume, reuse, part, units)
        if isinstance(plan, Run):
            return plan
        _work(plan, progress, part)
    return plan.run


@contextlib.contextmanager
def in_memory() -> Iterator[None]:
    """Raise `OutOfMemory` if what it encloses does not fit into memory."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        hint = "use a smaller dtype, another device, or a device_map"
        raise OutOfMemory("the models do not fit into memory", hint) from None


# Begin: load models, stage prompts, time steps; or find what is missing in the run that is there.


def begin(
    options: ProfileOptions,
    storage: Storage,
    progress: Progress,
    resume: bool = False,
    reuse: Path | None = None,
    part: Part = WHOLE,
    units: frozenset[str] | None = None,
) -> Plan | Run:
    """Begin a new run (stage prompts, time steps), or find what an existing one lacks. Return a `Plan` for measuring shards,
    or the `Run` if it is complete. Raises the errors of `errors.py`.
    """
    if storage.has(MANIFEST):
        return _resumed(options, RunWriter.open(storage), progress, part, resume)
    set_threads(options.execution.threads, alone=part == WHOLE and options.execution.engine == "local")
    with alive(storage) if part != WHOLE else contextlib.nullcontext():
        plan = _begun(options, storage, progress, reuse, units)
        with plan.run.beginning():
            stage(plan, progress)
            if isinstance(options.costs, MeasuredCosts):
                _measure_latency(plan, options.costs, progress)
            began = plan.run.begin(str(part))
    # Another process may have begun the same run meanwhile.
    return plan if began else _resumed(options, RunWriter.open(storage), progress, part, resume)


def set_threads(threads: int | str, alone: bool = True) -> None:
    """Have torch compute with as many threads as a run does; `auto`: as it chooses, or one if several processes share a
    machine.
    """
    if threads != "auto" or not alone:
        torch.set_num_threads(1 if threads == "auto" else int(threads))


def _begun(
    options: ProfileOptions,
    storage: Storage,
    progress: Progress,
    reuse: Path | None = None,
    units: frozenset[str] | None = None,
    first: int | None = None,
) -> Plan:
    """Load everything for a new run, whose manifest is not written yet; what can fail early fails here."""
    loaded = load(options, progress, reuse, units=units)
    if first is not None and isinstance(loaded.documents, Corpus):
        loaded = dataclasses.replace(loaded, documents=dataclasses.replace(loaded.documents, limit=first))
    texts = address_of(storage_of(reuse)) if reuse else None
    manifest = dataclasses.replace(_manifest(loaded), reused=texts)
    require_costs(options, manifest.target, manifest.drafts)
    if isinstance(loaded.documents, Reused):
        _require_same_target(loaded.documents.run, manifest)
    run = RunWriter(storage, manifest)
    plan = Plan(**vars(loaded), run=run)
    trials, doubts = check_wiring(loaded.drafts, options, loaded.documents, loaded.scorer.width, progress.say)
    drafts = {name: dataclasses.replace(manifest.drafts[name], trials=found) for name, found in trials.items()}
    warnings = (*early_warnings(options, loaded, manifest.environment), *doubts)
    for warning in warnings:
        progress.warn(**warning)
    run.manifest = dataclasses.replace(manifest, drafts=manifest.drafts | drafts, warnings=warnings)
    return plan


def load(
    options: ProfileOptions,
    progress: Progress,
    reuse: Path | None = None,
    run: Run | None = None,
    units: frozenset[str] | None = None,
) -> Loaded:
    """Load models and find the data. Raises the errors of `errors.py`. `run`: one that holds the documents already, so that
    neither data nor hub are read for them. `reuse`, `units`: as of `profile`.
    """
    reused = Reused.open(reuse, options, units) if reuse else None
    if reused is not None:  # its text is that of the target in its dtype
        options = as_measured(options, reused.run.manifest)
    progress.say(f"loading {options.target.model}")
    tokenizer = load_tokenizer(options.target)
    staged = Staged(run) if run is not None else reused
    check_tokenizers(options, tokenizer)  # wrong ones, a wrong engine and wrong data are found before weights are loaded
    writes = reused is None and bool(options.written_by_engine())
    if options.engine is not None and options.uses_engine:
        check_engine(options, options.engine, tokenizer, writes)
    if staged is None:
        first = Corpus(options, tokenizer, None, INT32_MAX)
        for _ in itertools.islice(first, LOOKED_AT * len(options.data)):
            pass
        first.check()
    target = load_model("target", options.target, options.target.dtype, extra_eos=eos_of(tokenizer))
    if target.choice is not None:
        options = with_dtype(options, target.choice.chosen)
        progress.say(target.choice.reason)
    drafts = load_drafts(options, target, tokenizer)
    dispatch.warm_up(target.device, progress.say)
    documents = staged or Corpus(options, tokenizer, target.context, target.vocabulary, target.served)
    extras = Extras.of(options.rules, options.certificates)
    scorer = Scorer(target, drafts, token_count(tokenizer), options.draft_processing, extras)
    writer = TextWriter(options, options.engine, target) if writes and options.engine is not None else None
    return Loaded(options, tokenizer, target, drafts, documents, scorer, writer)


def _manifest(loaded: Loaded) -> Manifest:
    """Return what a run begins with."""
    rules = loaded.scorer.extras.log_rules(loaded.options.rules)
    return Manifest(
        status="running",
        alphaprof=__version__,
        created=now(),
        config=loaded.options.model_dump(mode="json"),
        target=dataclasses.replace(loaded.target.facts(), special=special_ids(loaded.tokenizer)),
        drafts={draft.name: draft.facts() for draft in loaded.drafts},
        tokenizer=tokenizer_fingerprint(loaded.tokenizer),
        environment=_environment(loaded.target.device, loaded.options),
        certified=rules.certified,
    )


def _environment(device: torch.device, options: ProfileOptions) -> Environment:
    packages = {name: version(name) for name in ("torch", "transformers", "datasets", "numpy", "pyarrow", "numba")}
    if options.engine is not None and options.uses_engine:
        packages["vllm"] = vllm_version(options.engine)
    with contextlib.suppress(PackageNotFoundError):  # not there on every system
        packages["triton"] = version("triton")
    return {
        "device_memory": torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "packages": packages,
    }


def require_costs(options: ProfileOptions, target: ModelFacts, drafts: Mapping[str, DraftFacts]) -> None:
    """Raise `CostsUnreadable` if step times from elsewhere cannot be had: known before any work."""
    costs = options.costs
    lookups = [name for name, facts in drafts.items() if not facts.has_steps]
    if isinstance(costs, TableCosts):
        models = [name for name in options.drafts if name not in lookups]  # those that could not be loaded among them
        heads = [name for name in models if name not in drafts or drafts[name].by_depth]
        read_engine_table(Path(costs.path), models, lookups, costs.overhead_ms, heads)
    elif isinstance(costs, RooflineCosts):
        for name, facts in {TARGET: target, **drafts}.items():
            if name not in lookups:
                shape_of(name, facts)


def early_warnings(options: ProfileOptions, loaded: Loaded, environment: Environment) -> Iterator[dict[str, str]]:
    """Yield what is known to be odd before any work, as notes."""
    scorer, target = loaded.scorer, loaded.target
    kinds = [options.continuation_of(index) for index in range(len(options.data))]
    raw = [
        Path(source.path).name
        for source, kind in zip(options.data, kinds, strict=True)
        if source.prompt is not None and not source.chat and not isinstance(kind, TextContinuation)
    ]
    if raw and loaded.tokenizer.chat_template is not None:
        yield note("raw_prompts", files=", ".join(raw))
    if options.decision.rule != "auto" and not _has_verdict(options, options.decision.rule):
        yield note("no_verdict", rule=options.decision.rule)
    if (ids := token_count(loaded.tokenizer)) > target.vocabulary:
        yield note("larger_tokenizer", last=ids - 1, rows=target.vocabulary)
    choice = target.choice
    if choice is not None and choice.chosen != choice.stored:
        yield note("other_dtype", reason=choice.reason)
    if reason := dispatch.why_unavailable(target.device):
        yield note("slow_statistics", reason=reason)
    if options.certificates and not scorer.extras.certified:
        yield note("no_thresholds", rules=", ".join(options.rules))
    there = environment["packages"].get("vllm", TRIED)
    if not there.startswith(TRIED):
        yield note("other_vllm", version=there, tried=TRIED)
    if any(isinstance(kind, SampledContinuation) and kind.generation_config for kind in kinds):
        yield from (note("not_modelled", setting=setting) for setting in not_modelled(target.served))
    for forced in (scorer.target, *scorer.drafts):
        if isinstance(forced, TeacherForced) and not forced.chunked:
            yield note("full_logits", model=forced.model.name)


def _has_verdict(options: ProfileOptions, named: str) -> bool:
    """Return whether a rule has rounds on some of the text, without which no verdict can come out of the run."""
    rule = parse_rule(named).rule
    policies = [policy(options.continuation_of(index), {}) for index in range(len(options.data))]
    texts = {"sampled" if fields["processing"] else "greedy" for fields in policies if fields["on_policy"]}
    return rule.chained and bool(texts & set(rule.policies))


def stage(plan: Plan, progress: Progress) -> None:
    """Write the prompts of a run by shards. The next manifest names them, and what was left out."""
    progress.start("reading prompts", hub.expected_documents(plan.options), "documents")
    run, stream, staged, digests = plan.run, iter(plan.documents), list[int](), list[str]()
    while documents := list(itertools.islice(stream, plan.options.shard_documents)):
        require_weights(plan.options.decision.weights, (document.domain for document in documents))
        run.stage(prompt_table(documents), len(staged))
        staged.append(len(documents))
        digests.append(digest(documents))
        progress.advance(len(documents))
    if isinstance(plan.documents, Corpus):
        for bad in plan.documents.bad_rows():
            progress.say(bad)
    skipped, truncated = dict(plan.documents.skipped), dict(plan.documents.truncated)
    run.manifest = dataclasses.replace(
        run.manifest, staged=tuple(staged), prompts=tuple(digests), skipped=skipped, truncated=truncated
    )


def _measure_latency(plan: Plan, costs: MeasuredCosts, progress: Progress, given: latency.Timeable | None = None) -> None:
    """Time the steps, of the models on the first prompts' tokens, or those `given`; the next manifest names the times."""
    try:
        with contextlib.nullcontext(given) if given else _timeable(plan, costs, progress) as subjects:
            progress.start("timing steps", 100, "parts")
            first = plan.options.decision.concurrency
            timed = latency.measure(subjects, costs, lambda share: progress.advance(100 * share), progress.say, first)
    except NotTimed as error:
        _note(plan, progress, note("not_timed", reason=error, remedy=error.remedy))
        return
    plan.run.write_latency(timed.table)
    # Of earlier times, that were damaged, nothing is true any more.
    kept = tuple(warning for warning in plan.run.manifest.warnings if warning["code"] not in ("not_timed_there", "busy"))
    environment = plan.run.manifest.environment | Environment(timing_waiting=timed.waiting)
    plan.run.manifest = dataclasses.replace(plan.run.manifest, warnings=kept, environment=environment)
    smaller = "lower costs.concurrency or costs.context"
    left_out = [(reason, smaller) for reason in timed.left_out]
    for reason, remedy in (*left_out, *((reason, latency.BudgetSpent.remedy) for reason in timed.late)):
        _note(plan, progress, note("not_timed_there", reason=reason, remedy=remedy))
    if timed.waiting is not None and is_busy(timed.waiting):
        _note(plan, progress, note("busy", waiting=timed.waiting))


def _timeable(plan: Plan, costs: MeasuredCosts, progress: Progress) -> contextlib.AbstractContextManager[latency.Timeable]:
    """Return the steps to time, of the models here or of the engine."""
    gamma = max(plan.options.gammas)
    if costs.source == "vllm" and plan.options.engine is not None:
        return EngineSteps.opened(
            plan.options, plan.options.engine, plan.target, plan.run.manifest.drafts, gamma, progress.say
        )
    text = np.concatenate([document.prompt for document in itertools.islice(plan.documents, 8)])
    return contextlib.nullcontext(latency.Subjects(plan.target, plan.drafts, text, gamma, costs.mode, progress.say))


def _note(plan: Plan, progress: Progress, warning: dict[str, str]) -> None:
    """Show a warning now, and put it into the run's next manifest for its reports."""
    progress.warn(**warning)
    warnings = (*plan.run.manifest.warnings, warning)
    plan.run.manifest = dataclasses.replace(plan.run.manifest, warnings=warnings)


# Resume or join a run that has begun.


def _resumed(options: ProfileOptions, run: RunWriter, progress: Progress, part: Part, resume: bool) -> Plan | Run:
    """Return what measures the rest of a run, damaged shards included, or the run if it is complete. With `resume`, files of
    all workers are checked for damage; without it, a part checks only what it wrote itself.
    """
    costs = options.costs if isinstance(options.costs, MeasuredCosts) else None
    options = as_measured(options, run.manifest)  # in the same dtype, whatever this machine would choose
    _require_same_profile(run, options)
    earlier = {name for name, worker in run.workers().items() if worker.part == str(part)}
    damaged = run.damaged_shards(part.has, None if resume else earlier)
    if damaged:
        progress.say(f"measuring {len(damaged)} damaged shards again: {', '.join(map(str, damaged[:8]))}")
    untimed = costs is not None and part.index == 0 and not _timed(run)
    if run.manifest.status == "complete" and not untimed and not damaged:
        _adopt_decision(run, options, progress)
        progress.say(f"{run.path} is complete already")
        run.finish(join_totals)  # its totals or documents, if they were lost
        return run
    plan = join(options, run, progress, part)  # nothing is changed for a process that cannot go on with it
    _adopt_decision(run, options, progress)
    if damaged:
        run.reopen(damaged)
    progress.say(f"resuming after {len(run.committed())} complete shards")
    if costs is not None and untimed:
        _measure_latency(plan, costs, progress)
        times, warnings = run.manifest.times, run.manifest.warnings
        run.update_manifest(lambda stored: dataclasses.replace(stored.with_times(times), warnings=warnings))
    if run.manifest.status == "complete":  # its step times alone were lost
        run.finish(join_totals)
        return run
    return plan


def as_measured(options: ProfileOptions, manifest: Manifest) -> ProfileOptions:
    """Return the options with the target's dtype of a run that was made already, if they leave it to auto."""
    return with_dtype(options, manifest.profile.dtype)


def _require_same_profile(earlier: Run, options: ProfileOptions) -> None:
    """Raise `RunMismatch` unless a run was made with these options; what only the report reads may differ. A run is not
    extended by another limit: documents that are added until the verdict is good make it wrong too often.
    """
    before = stored_profile(earlier.manifest.config).model_dump(mode="json")  # with the options that came later
    asked = options.model_dump(mode="json")
    if changed := [key for key in asked if key not in FREE and before.get(key) != asked[key]]:
        hint = "resume with the profile and options of the first call, or choose another --out"
        sources = [[{**source, "limit": None} for source in each["data"]] for each in (before, asked)]
        if changed == ["data"] and sources[0] == sources[1]:
            raise RunMismatch(
                f"{earlier.path} was made with another limit, and a run is never extended",
                "resume with the first limit, or profile that many other documents (another shuffle_seed) into a new --out",
            )
        raise RunMismatch(f"{earlier.path} was made with another profile ({', '.join(changed)} changed)", hint)


def _timed(run: Run) -> bool:
    """Return whether steps were timed, or cannot be. Step times that are damaged are lost."""
    try:
        return any(warning["code"] == "not_timed" for warning in run.manifest.warnings) or run.latency() is not None
    except RunUnreadable:
        return False


def _adopt_decision(earlier: RunWriter, options: ProfileOptions, progress: Progress) -> None:
    """A changed decision needs no new measurement: the run takes it over, and reports ask it from then on."""
    changed = {name: value for name, value in options.model_dump(mode="json").items() if name in FREE}
    others = {name for name, value in changed.items() if earlier.manifest.config.get(name) != value}
    if others:
        earlier.update_manifest(lambda stored: dataclasses.replace(stored, config=stored.config | changed))
    if others - {"execution"}:
        progress.say(f"the decision settings changed: reports of {earlier.path} now follow them")


def join(options: ProfileOptions, run: RunWriter, progress: Progress, part: Part = WHOLE) -> Plan:
    """Return what a process needs that measures a part of the shards of a run which has begun, with the options of that run.
    Raises `RunMismatch` if its models are others, or it computes otherwise.
    """
    set_threads(run.manifest.environment["torch_threads"])
    loaded = load(options, progress, run=run)
    mine = _manifest(loaded)
    worker = Worker.here(mine.target.device, mine.environment, str(part))
    _require_same_models(run.manifest, mine, worker)
    run.register(worker)
    return Plan(**vars(loaded), run=run)


def _require_same_models(before: Manifest, mine: Manifest, worker: Worker) -> None:
    """Raise `RunMismatch` unless models and tokenizer are those of a run that goes on, and its processes compute alike:
    `worker` is this one. The profile may allow that they do not.
    """
    mixed = mine.profile.mixed_devices
    if not mixed and (found := worker.differs_from(before)):
        raise RunMismatch(
            f"this process computes differently from the one that began the run ({'; '.join(found)}): rows could differ",
            "match the run's setup, profile into a new directory, or allow it: --set execution.mixed_devices=true",
        )
    earlier, models = {"target": before.target, **before.drafts}, {"target": mine.target, **mine.drafts}
    fields = [f"{name} {field}" for name, facts in models.items() for field in _differing(earlier[name], facts)]
    odd = [field for field in fields if not (mixed and field.endswith(" device"))]
    odd += ["tokenizer"] if before.tokenizer != mine.tokenizer else []
    if odd:
        hint = "put the same models back, or profile into a new directory"
        raise RunMismatch(f"models are not those of the run (other {', '.join(odd)})", hint)


def _require_same_target(earlier: Run, mine: Manifest) -> None:
    """Raise `RunMismatch` unless a run whose continuations are reused was made with this target, dtype and tokenizer."""
    before = earlier.manifest
    if _differing(before.target, mine.target) or before.tokenizer != mine.tokenizer:
        hint = "profile without --reuse-continuations: another target writes other text"
        raise RunMismatch(f"{earlier.path} was made with another target, dtype or tokenizer", hint)


def _differing(old: ModelFacts, new: ModelFacts) -> list[str]:
    """In which facts two models differ; where they lie does not matter, nor what other facts say already."""
    elsewhere = ("reference", "shape", "special", "trials", "trained")  # tokenizers are compared by themselves
    return [name for name in vars(old) if name not in elsewhere and getattr(old, name) != getattr(new, name)]


# Measure the shards of a part, and conclude.


def _work(plan: Plan, progress: Progress, part: Part = WHOLE) -> None:
    """Measure the shards of a part that nobody has committed yet; the process that finds that all are committed finishes
    the run.
    """
    run, staged = plan.run, plan.run.manifest.staged
    progress.start("profiling", sum(staged), "documents")
    there = run.committed()
    progress.advance(sum(staged[index] for index in there))

    def advance(steps: float, positions: int) -> None:
        writer.check()  # a full disk ends the run at the next batch, and so does the loss of the directory
        run.storage.require_there()
        progress.advance(steps, positions)

    taken = set[int]()  # shards that this process measured; `there`: that anybody committed
    with contextlib.closing(plan.writer) if plan.writer else contextlib.nullcontext(), BackgroundWriter() as writer:
        while not run.is_finished():
            committed = run.committed()
            progress.advance(sum(staged[index] for index in committed - there - taken))  # by other processes
            there |= committed
            done = taken | there
            lacking = [index for index in range(len(staged)) if part.has(index) and index not in done]
            if not lacking:
                break
            index = lacking[-1 if run.refused else 0]  # where another process works on the same ones, from the other end
            taken.add(index)
            writer.put(measure_shard(plan, index, list(documents_of(run.prompts(index))), advance))
    if part != WHOLE and not run.is_finished() and len(run.committed()) < len(staged):
        run.refresh()
        progress.say(f"part {part} is done; other parts have {len(staged) - len(run.committed())} shards left")
        return
    conclude(run, progress)


def conclude(run: RunWriter, progress: Progress) -> None:
    """Finish a run all of whose shards are committed."""
    if run.is_finished():  # by another process
        run.manifest = read_manifest(run.storage)
    else:
        progress.say("adding up totals")
        run.finish(join_totals)


# Runs of other commands: documents without step times, and step times without documents.


def profile_with_models(options: ProfileOptions, storage: Storage, progress: Progress, first: int | None = None) -> Plan:
    """Profile into new storage without timing any step; the complete run with its loaded models. `first`: this many
    documents, default all. Raises the errors of `errors.py`.
    """
    with in_memory():
        plan = _begun(options, storage, progress, first=first)
        with plan.run.beginning():
            stage(plan, progress)
            if not plan.run.begin():
                raise RunExists(f"{storage.shown} holds a run already", "choose another --out")
        _work(plan, progress)
    return plan


def time_steps_of(plan: Plan, costs: MeasuredCosts, progress: Progress, given: latency.Timeable | None = None) -> None:
    """Time the steps, or those `given`, for a run that has no step times yet, by `costs` instead of its profile's, and note
    these in it.
    Raises `OutOfMemory`.
    """
    config = plan.run.manifest.config | {"costs": costs.model_dump(mode="json")}
    with in_memory():
        plan.run.manifest = dataclasses.replace(plan.run.manifest, config=config)
        _measure_latency(plan, costs, progress, given)
        plan.run.write_manifest(plan.run.manifest)


def time_steps(options: ProfileOptions, out: Path, progress: Progress) -> Run:
    """Return a run in the new directory `out` with step times and nothing else. Raises the errors of `errors.py`, among them
    `StepsNotTimed` if a model's steps cannot be timed.
    """
    costs = options.costs
    if not isinstance(costs, MeasuredCosts):
        raise ProfileInvalid(f"costs.source is {costs.source}: there is nothing to time", "add --set costs.source=measured")
    storage = storage_of(out)
    with in_memory(), joined(storage, options.model_dump(mode="json")):
        plan = _begun(options, storage, progress)
        with plan.run.beginning():
            _measure_latency(plan, costs, progress)
            plan.run.begin()
    if plan.run.latency() is None:
        warning = plan.run.manifest.warnings[-1]
        raise StepsNotTimed(warning["message"], warning["remedy"])
    return plan.run
