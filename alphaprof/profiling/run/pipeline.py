"""profile(): the run, top to bottom. Documents in, shards of the position log out."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import os
import platform
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import torch

from alphaprof.config.options import MeasuredCosts, NoCosts
from alphaprof.config.profile import ProfileOptions
from alphaprof.costs.timing import is_busy
from alphaprof.errors import OutOfMemory, ProfileInvalid, RunMismatch, RunUnreadable, StepsNotTimed
from alphaprof.log.claim import Claim, claimed
from alphaprof.log.manifest import Environment, Manifest, RandomOrder
from alphaprof.log.store import Run, begin
from alphaprof.profiling.heads.wiring import check_wiring
from alphaprof.profiling.models import hub
from alphaprof.profiling.models.drafts import load_drafts, special_ids, token_count
from alphaprof.profiling.models.dtype import settled
from alphaprof.profiling.models.load import eos_of, is_out_of_memory, load_model, load_tokenizer, tokenizer_fingerprint
from alphaprof.profiling.run.resume import (
    Reused,
    as_measured,
    early_warnings,
    require_costs,
    require_same_data,
    require_same_models,
    require_same_profile,
)
from alphaprof.profiling.run.shards import Loaded, Plan, Progress, Writer, in_shards, measure_shard, padding_summary
from alphaprof.profiling.scoring import dispatch
from alphaprof.profiling.scoring.extras import Extras
from alphaprof.profiling.scoring.scorer import Scorer
from alphaprof.profiling.texts.corpus import Corpus, InRandomOrder
from alphaprof.profiling.timing import latency
from alphaprof.profiling.timing.steppers import NotTimed
from alphaprof.totals.files import write_totals
from alphaprof.version import __version__

# What a run so far says: why no more documents are needed, or None.
Settled = Callable[[Run], str | None]


def profile(
    options: ProfileOptions,
    out: Path,
    progress: Progress,
    resume: bool = False,
    reuse: Path | None = None,
    settled: Settled | None = None,
) -> Run:
    """Profile into the directory `out`, or with `resume` finish the interrupted run there, and add up its totals. Raises the
    errors of `errors.py`, `RunExists` where another process writes there.

    `reuse`: directory of a complete run whose continuations are measured again, with this profile's drafts. `settled`: see
    `profile_until`.
    """
    with in_memory(), claimed(out, options.model_dump(mode="json"), resume, progress.say) as claim:
        run = _measured(options, claim, progress, resume, reuse, settled)
        progress.say("adding up totals")
        write_totals(run)
    return run


def profile_until(options: ProfileOptions, out: Path, progress: Progress, settled: Settled, resume: bool = False) -> Run:
    """Profile documents in random order into `out`, until `settled` says of the run so far that no more are needed. Such a
    run is complete then. Finished with `profile` it goes on to its last document. Raises the errors of `profile`.
    """
    if isinstance(options.costs, NoCosts):
        raise ProfileInvalid(
            "--until-decided stops when the verdict is sure, and without step times (costs.source: none) there is no "
            "verdict",
            "profile without --until-decided, or name a source of step times: --set costs.source=measured",
        )
    return profile(options, out, progress, resume, settled=settled)


def profile_with_models(options: ProfileOptions, claim: Claim, progress: Progress) -> Plan:
    """Profile into a new directory without timing any step; the complete run with its loaded models. Raises the errors of
    `errors.py`.
    """
    with in_memory():
        plan = _open(options, claim, progress)
        _fill(plan, progress)
    return plan


def time_steps_of(plan: Plan, costs: MeasuredCosts, progress: Progress) -> None:
    """Time the steps for a run that has no step times yet, by `costs` instead of those of its profile, and note these in it.
    Raises `OutOfMemory`.
    """
    config = plan.run.manifest.config | {"costs": costs.model_dump(mode="json")}
    with in_memory():
        plan.run.write_manifest(dataclasses.replace(plan.run.manifest, config=config))
        _measure_latency(plan, costs, progress)


def time_steps(options: ProfileOptions, out: Path, progress: Progress) -> Run:
    """A run in the new directory `out` with step times and nothing else. Raises the errors of `errors.py`, among them
    `StepsNotTimed` where a model's steps cannot be timed.
    """
    costs = options.costs
    if not isinstance(costs, MeasuredCosts):
        raise ProfileInvalid(f"costs.source is {costs.source}: there is nothing to time", "add --set costs.source=measured")
    with in_memory(), claimed(out, options.model_dump(mode="json")) as claim:
        begin(claim)
        plan = _open(options, claim, progress)
        _measure_latency(plan, costs, progress)
    if plan.run.latency() is None:
        warning = plan.run.manifest.warnings[-1]
        raise StepsNotTimed(warning["message"], warning["remedy"])
    return plan.run


@contextlib.contextmanager
def in_memory() -> Iterator[None]:
    """Raises `OutOfMemory` where what it encloses does not fit into memory."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        hint = "use a smaller dtype, another device, or a device_map"
        raise OutOfMemory("the models do not fit into memory", hint) from None


def _measured(
    options: ProfileOptions, claim: Claim, progress: Progress, resume: bool, reuse: Path | None, settled: Settled | None
) -> Run:
    """The run with everything but its totals: the one that is there already, finished, or a new one."""
    earlier = _earlier(claim, resume)
    costs = options.costs if isinstance(options.costs, MeasuredCosts) else None
    in_random_order = settled is not None
    if earlier is not None:
        options = as_measured(options, earlier.manifest)  # in the same dtype, whatever this machine would choose
        require_same_profile(earlier, options)
        _adopt_decision(earlier, options, progress)
        if earlier.manifest.status == "complete" and (costs is None or _timed(earlier)):
            progress.say(f"{earlier.path} is complete already")
            earlier.mend_documents()
            return earlier
        reuse = Path(earlier.manifest.reused) if earlier.manifest.reused is not None else reuse
        in_random_order = earlier.manifest.sequential is not None
        if settled is not None and not in_random_order:
            hint = "finish it without, or choose another --out"
            raise RunMismatch(f"{earlier.path} was begun without --until-decided, in the order of the data", hint)
    plan = _open(options, claim, progress, earlier, reuse, in_random_order)
    if costs is not None and not _timed(plan.run):
        _measure_latency(plan, costs, progress)
    if plan.run.manifest.status == "complete":  # its step times alone were lost
        plan.run.mend_documents()
    else:
        _fill(plan, progress, settled)
    return plan.run


def _fill(plan: Plan, progress: Progress, settled: Settled | None = None) -> None:
    """Write the shards that the run lacks, as long as it is not settled."""
    options, order = plan.options, plan.run.manifest.sequential
    progress.start("profiling", order["available"] if order else hub.expected_documents(options), "documents")
    size = order["shard_documents"] if order else options.shard_documents
    done = len(plan.run.shards)
    seen = 0
    with Writer() as writer:

        def advance(steps: float, positions: int) -> None:
            writer.check()  # a full disk ends the run at the next batch, and so does the loss of the directory
            plan.run.require_claim()
            progress.advance(steps, positions)

        for index, documents in enumerate(in_shards(plan.documents, size)):
            if index < done:
                require_same_data(plan.run.shards[index], documents)
                progress.advance(len(documents))
            else:
                writer.put(measure_shard(plan, index, documents, advance))
            seen += 1
            if settled is not None and seen >= done:
                writer.wait()  # what is asked next reads every shard so far
                if reason := settled(plan.run):
                    progress.say(reason)
                    break
    if seen < done:
        hint = "put the data back, or profile into a new directory"
        raise RunMismatch(f"the data end before shard {seen}, which {plan.run.path} holds", hint)
    _finish(plan, progress)


def _finish(plan: Plan, progress: Progress) -> None:
    """Collect documents.parquet and mark the run complete."""
    plan.run.write_documents()
    skipped, truncated = dict(plan.documents.skipped), dict(plan.documents.truncated)
    plan.run.write_manifest(dataclasses.replace(plan.run.manifest, status="complete", skipped=skipped, truncated=truncated))
    if summary := padding_summary(plan.run.shards):
        progress.say(summary)


def _earlier(claim: Claim, resume: bool) -> Run | None:
    """The run to resume in a directory, or None for a new one. Raises `RunExists` rather than overwrite anything."""
    if resume and (claim.folder / "manifest.json").exists():
        run = Run.open(claim.folder, claim)
        run.remove_leftovers()
        if run.manifest.status == "running":
            run.require_log()
        return run
    begin(claim)
    return None


def _adopt_decision(earlier: Run, options: ProfileOptions, progress: Progress) -> None:
    """A changed decision needs no new measurement: the run takes it over, and reports ask it from then on."""
    config = options.model_dump(mode="json")
    if earlier.manifest.config["decision"] != config["decision"]:
        earlier.write_manifest(dataclasses.replace(earlier.manifest, config=config))
        progress.say(f"the decision has changed: reports of {earlier.path} follow the profile as it is now")


def load(options: ProfileOptions, progress: Progress, reuse: Path | None = None) -> Loaded:
    """Load models and find the data; no run is made of them. Raises the errors of `errors.py`."""
    reused = Reused.open(reuse, options) if reuse else None
    if reused is not None:  # its text is that of the target in its dtype
        options = as_measured(options, reused.run.manifest)
    progress.say(f"loading {options.target.model}")
    tokenizer = load_tokenizer(options.target)
    target = load_model("target", options.target, options.target.dtype, extra_eos=eos_of(tokenizer))
    if target.choice is not None:
        options = settled(options, target.choice.chosen)
        progress.say(target.choice.reason)
    drafts = load_drafts(options, target, tokenizer)
    dispatch.warm_up(target.device, progress.say)
    corpus = Corpus(options, tokenizer, target.context, target.vocabulary, target.served)
    documents = reused or corpus
    for _ in itertools.islice(documents, len(options.data)):  # one of every source
        pass  # a missing file or column is found before any work
    extras = Extras.of(options.rules, options.certificates)
    scorer = Scorer(target, drafts, token_count(tokenizer), options.draft_processing, extras)
    return Loaded(options, tokenizer, target, drafts, documents, scorer)


def _open(
    options: ProfileOptions,
    claim: Claim,
    progress: Progress,
    earlier: Run | None = None,
    reuse: Path | None = None,
    in_random_order: bool = False,
) -> Plan:
    """Load everything and open the run directory; what can fail early fails here."""
    loaded = load(options, progress, reuse)
    order: RandomOrder | None = None
    if in_random_order and isinstance(loaded.documents, Corpus):
        drawn = InRandomOrder.of(loaded.documents, options)
        loaded, order = dataclasses.replace(loaded, documents=drawn), drawn.facts(options)
    rules = loaded.scorer.extras.log_rules(options.rules)
    manifest = Manifest(
        status="running",
        alphaprof=__version__,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        config=loaded.options.model_dump(mode="json"),
        target=dataclasses.replace(loaded.target.facts(), special=special_ids(loaded.tokenizer)),
        drafts={draft.name: draft.facts() for draft in loaded.drafts},
        tokenizer=tokenizer_fingerprint(loaded.tokenizer),
        environment=_environment(loaded.target.device),
        reused=str(reuse.resolve()) if reuse else None,
        emitted=rules.emitted,
        certified=rules.certified,
        sequential=order,
    )
    require_costs(options, manifest.target, manifest.drafts)
    if isinstance(loaded.documents, Reused):
        loaded.documents.require_same_target(manifest)
    run = Run(claim.folder, manifest, claim)
    if earlier is not None:
        require_same_models(earlier.manifest, manifest)
        run = earlier
        progress.say(f"resuming after {len(run.shards)} complete shards")
    else:
        trials, told = check_wiring(loaded, progress)
        tried = {name: dataclasses.replace(manifest.drafts[name], trials=found) for name, found in trials.items()}
        manifest = dataclasses.replace(manifest, drafts=manifest.drafts | tried)
        warnings = (*early_warnings(options, loaded.scorer, loaded.tokenizer.chat_template is not None), *told)
        for warning in warnings:
            progress.warn(**warning)
        run.write_manifest(dataclasses.replace(manifest, warnings=warnings))
    return Plan(**vars(loaded), run=run)


def _environment(device: torch.device) -> Environment:
    packages = {name: version(name) for name in ("torch", "transformers", "datasets", "numpy", "pyarrow", "numba")}
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


def _timed(run: Run) -> bool:
    """Whether steps were timed, or cannot be. Step times that are damaged are lost."""
    try:
        return any(warning["code"] == "not_timed" for warning in run.manifest.warnings) or run.latency() is not None
    except RunUnreadable:
        return False


def _measure_latency(plan: Plan, costs: MeasuredCosts, progress: Progress) -> None:
    """Time the steps on the first prompts' tokens, before profiling: an interrupted run has its step times too."""
    progress.start("timing steps", 100, "parts")
    text = np.concatenate([document.prompt for document in itertools.islice(plan.documents, 8)])
    try:
        subjects = latency.Subjects(plan.target, plan.drafts, text, max(plan.options.gammas))
        first = plan.options.decision.concurrency
        timed = latency.measure(subjects, costs, lambda share: progress.advance(100 * share), progress.say, first)
    except NotTimed as error:
        _note(plan, progress, "not_timed", f"no step times, so no speedup: {error}", error.remedy)
        return
    plan.run.write_latency(timed.table)
    # Of earlier times, that were damaged, nothing is true any more.
    kept = tuple(warning for warning in plan.run.manifest.warnings if warning["code"] not in ("not_timed_there", "busy"))
    plan.run.write_manifest(dataclasses.replace(plan.run.manifest, warnings=kept))
    smaller = "lower costs.concurrency or costs.context"
    left_out = [(reason, smaller) for reason in timed.left_out]
    for reason, remedy in (*left_out, *((reason, latency.BudgetSpent.remedy) for reason in timed.late)):
        _note(plan, progress, "not_timed_there", f"no step times there: {reason}", remedy)
    if timed.waiting is not None and is_busy(timed.waiting):
        had = f"timing waited for a processor for {timed.waiting:.0%} of its time"
        remedy = "measure again when it is idle, or use your engine's (docs/costs.md)"
        _note(plan, progress, "busy", f"this machine is busy: step times are uncertain; {had}", remedy)


def _note(plan: Plan, progress: Progress, code: str, message: str, remedy: str) -> None:
    """Tell whoever watches, and every report of the run."""
    warning = {"code": code, "message": message, "remedy": remedy}
    progress.warn(**warning)
    warnings = (*plan.run.manifest.warnings, warning)
    plan.run.write_manifest(dataclasses.replace(plan.run.manifest, warnings=warnings))
