"""A run, top to bottom: prompts, checks, texts, step times, rows, totals. Each step does what is not recorded yet, so that a
run which goes on is the same walk.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar

import numpy as np
import pyarrow as pa
import torch

from alphaprof.config.hardware import ACCELERATORS, DEVICES
from alphaprof.config.options import (
    MeasuredCosts,
    RooflineCosts,
    SampledContinuation,
    TextContinuation,
)
from alphaprof.config.part import WHOLE, Part
from alphaprof.config.profile import AUTO, ProfileOptions
from alphaprof.costs.cost_model import shape_of
from alphaprof.costs.engine_table import kept_table
from alphaprof.costs.steps import TARGET
from alphaprof.costs.timing import is_busy
from alphaprof.errors import OutOfMemory, ProfileInvalid, RunMismatch, without_secrets
from alphaprof.profiling.checks import as_measured, check_costs, require_same_profile, reusable
from alphaprof.profiling.engine.client import TRIED, check_engine, engine_environment, vllm_version
from alphaprof.profiling.engine.server import VllmServer
from alphaprof.profiling.engine.steps import time_engines
from alphaprof.profiling.engine.texts import TextWriter, require_tokenizer
from alphaprof.profiling.heads.wiring import check_wiring
from alphaprof.profiling.models.hub import check_kinds, context_in
from alphaprof.profiling.models.identity import eos_of, special_ids, token_count, tokenizer_fingerprint
from alphaprof.profiling.models.kinds import check_tokenizers, load_drafts
from alphaprof.profiling.models.load import is_out_of_memory, load_model, load_tokenizer, require_shape, target_device
from alphaprof.profiling.models.processing import not_modelled
from alphaprof.profiling.models.teacher_forced import TeacherForced
from alphaprof.profiling.scoring import dispatch
from alphaprof.profiling.scoring.batch_tokens import batch_tokens_of
from alphaprof.profiling.scoring.scorer import Extras, Scorer
from alphaprof.profiling.shard import Advance, Loaded, Plan, Progress, ShardRows, ShardTexts, score_shard, write_shard
from alphaprof.profiling.texts.continuations import Continuation, continuation_table, continuations_of, digest
from alphaprof.profiling.texts.corpus import (
    UNUSED,
    Corpus,
    Reused,
    Staged,
    StagedRun,
    documents_of,
    policy,
    prompt_table,
)
from alphaprof.profiling.timing import latency
from alphaprof.profiling.timing.steppers import NotTimed
from alphaprof.rules import parse_rule
from alphaprof.run.manifest import (
    DOCUMENTS,
    ENGINES,
    LATENCY,
    Environment,
    Manifest,
    differences,
    differing,
    now,
)
from alphaprof.run.notes import note
from alphaprof.run.reader import Run
from alphaprof.run.schema import ENGINE_COLUMNS, LATENCY_COLUMNS
from alphaprof.run.split import Ids
from alphaprof.run.storage import address_of, storage_of
from alphaprof.run.writer import FREE, RunWriter
from alphaprof.totals.documents import require_weights
from alphaprof.totals.files import write_totals
from alphaprof.version import __version__

Result = TypeVar("Result", ShardTexts, ShardRows)
LOOKED_AT = 1_000  # rows of each source, before models are loaded
OF_TIMES = ("out_of_time", "not_timed", "not_timed_there", "busy", "cpu_seconds")  # notes of earlier ones
LABELS = {"texts": "writing texts", "rows": "scoring"}
TEXTS_WRITTEN = "all texts of {} are written; score them with --resume"


def profile(
    options: ProfileOptions,
    out: Path | str,
    progress: Progress,
    resume: bool = False,
    reuse: Path | None = None,
    part: Part = WHOLE,
    units: frozenset[str] | None = None,
    texts_only: bool = False,
    take_over: bool = False,
    retime: bool = False,
) -> Run:
    """Profile into the directory `out`, or with `resume` go on with the run there. Raises the errors of `errors.py`.

    `reuse`: directory of a complete run whose continuations are measured again, with this profile's drafts; `units`: only
    these independent units (a cluster, or a document that has none). `part`: which blocks of the documents; the same call
    goes on with a part. `texts_only`: end when all texts are written; `take_over`: as of `RunWriter.opened`; `retime`: time
    the steps of a complete run again, and nothing else.
    """
    set_threads(options.execution.threads, alone=part == WHOLE)
    with in_memory(), RunWriter.opened(out, resume or retime or part != WHOLE, take_over=take_over) as run:
        if run.begun:
            models = resumed(options, run, progress, part, retime)
        else:
            models = begun(options, run, progress, reuse, part, units)
        if models is not None:
            if not retime:
                write_texts(models, run, progress)
            if texts_only:
                progress.say(TEXTS_WRITTEN.format(run.path))
                return run
            costs = models.options.costs
            if isinstance(costs, MeasuredCosts) and part.index == 0 and not is_timed(run):
                text = first_prompts(run) if costs.source != "vllm" else np.empty(0, np.int32)
                known = [] if retime else run.engine_rounds(), partial(keep_rounds, run)
                write_times(run, time_models(models, run.manifest, text, costs, progress, *known))
            if retime:
                return run
            write_rows(models, run, progress)
            progress.say("counting totals")
            run.finish(write_totals)
    return run


class Models:
    """The models of a profile with these documents, loaded when they are needed. They leave the memory before an engine
    needs the GPU, and are loaded again afterwards.
    """

    def __init__(self, options: ProfileOptions, documents: Staged, progress: Progress, loaded: Loaded | None = None) -> None:
        self.options, self._documents, self._progress, self._loaded = options, documents, progress, loaded

    def loaded(self, engine: bool = False) -> Loaded:
        """Return them, loaded. `engine`: as of `load`."""
        if self._loaded is None:
            self._loaded = load(self.options, self._progress, staged=self._documents, engine=engine)
        return self._loaded

    def release(self) -> None:
        """Give their memory back."""
        self._loaded = None
        release_memory()


def release_memory() -> None:
    """Give back the memory of models that nothing refers to any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Background:
    """Writes a shard while the next one is worked out: a context manager. What was handed over is written even if the block
    ends with an error: it is measured already.
    """

    def __init__(self) -> None:
        self._threads, self._last = ThreadPoolExecutor(1), Future[None]()
        self._last.set_result(None)

    def __enter__(self) -> Background:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._threads.shutdown()
        failed = self._last.exception()
        if error is None:
            self._last.result()
        elif failed is not None and failed is not error:
            error.add_note(f"earlier measurements could not be written: {failed}")

    def check(self) -> None:
        """Raise what ended the last piece of work, if something did."""
        if self._last.done():
            self._last.result()

    def put(self, work: Callable[[], None]) -> None:
        """Hand over a piece of work, when the one before it is done."""
        self._last.result()
        self._last = self._threads.submit(work)


@contextlib.contextmanager
def in_memory() -> Iterator[None]:
    """Raise `OutOfMemory` if what it encloses does not fit into memory."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(
            "the models do not fit into memory", "use a smaller dtype, another device, or a device_map"
        ) from None


def set_threads(threads: int | str, alone: bool = True) -> None:
    """Have torch compute with as many threads as a run does; `auto`: as it chooses, or one if several processes share a
    machine.
    """
    if threads != "auto" or not alone:
        torch.set_num_threads(1 if threads == "auto" else int(threads))


# Prompts and checks.


@dataclass(frozen=True)
class First:
    """A small copy of a profile: its first documents, in one shard, with `max_new_tokens` capped."""

    documents: int
    new_tokens: int

    def of(self, options: ProfileOptions) -> ProfileOptions:
        """Return the options of the profile in small."""
        data = []
        for index, source in enumerate(options.data):
            continuation = options.continuation_of(index)
            if limit := continuation.max_new_tokens:
                continuation = continuation.model_copy(update={"max_new_tokens": min(self.new_tokens, limit)})
            data.append(source.model_copy(update={"continuation": continuation}))
        return options.model_copy(update={"data": data, "shard_documents": self.documents})


class NewRun(StagedRun, Protocol):
    """What takes the beginning of a run: its `RunWriter`, or what brings it there."""

    def stage(self, prompts: pa.Table, digest: str) -> None:
        """Take the documents of the next shard."""

    def begin(self, manifest: Manifest) -> None:
        """Take the manifest of a run whose prompts are staged."""


def begun(
    options: ProfileOptions,
    run: NewRun,
    progress: Progress,
    reuse: Path | None = None,
    part: Part = WHOLE,
    units: frozenset[str] | None = None,
    first: First | None = None,
) -> Models:
    """Load the models, stage the prompts of a new run, check what can fail later, and write the manifest. `first`: of the
    profile in small, once its own documents were looked at; default: all. Raises the errors of `errors.py`.
    """
    options = with_costs(options, progress.say)
    check_costs(options)
    require_shapes(options)
    loaded = load(options, progress, reuse, units=units)
    if first is not None and isinstance(loaded.documents, Corpus):
        small = first.of(loaded.options)
        corpus = dataclasses.replace(loaded.documents, options=small, limit=first.documents)
        loaded = dataclasses.replace(loaded, options=small, documents=corpus)
    options, documents = loaded.options, loaded.documents
    texts = address_of(storage_of(reuse)) if reuse else None
    manifest = dataclasses.replace(manifest_of(loaded), reused=texts, part=str(part), table=kept_table(loaded.options.costs))
    if isinstance(options.costs, RooflineCosts):  # of heads, and of .gguf files
        for name, facts in manifest.models.items():
            if facts is manifest.target or manifest.drafts[name].has_steps:
                shape_of(name, facts)
    if isinstance(documents, Reused):
        documents.by_target = _is_writer(documents.run, manifest)
        if not documents.by_target:
            progress.say(f"{texts} was written by another target: acceptance is measured, and has no rounds")
    staged = _stage(loaded, run, part, progress)
    if staged:  # logits that are not finite show before any text is written
        document = next(documents_of(run.prompts(0)))
        loaded.scorer.score([Continuation(document, document.prompt[-1:], "length")])
    prompts = (document for index in range(staged) for document in documents_of(run.prompts(index)))
    trials, doubts = check_wiring(loaded.drafts, options, prompts, loaded.scorer.width, progress.say) if staged else ({}, ())
    drafts = {name: dataclasses.replace(manifest.drafts[name], trials=found) for name, found in trials.items()}
    warnings = (*early_warnings(options, loaded, manifest.environment), *doubts)
    for warning in warnings:
        progress.warn(**warning)
    manifest = dataclasses.replace(manifest, skipped=dict(documents.skipped), truncated=dict(documents.truncated))
    run.begin(dataclasses.replace(manifest, drafts=manifest.drafts | drafts, warnings=warnings))
    return Models(options, Staged(run), progress, dataclasses.replace(loaded, documents=Staged(run)))


def _stage(loaded: Loaded, run: NewRun, part: Part, progress: Progress) -> int:
    """Write the prompts of a run by shards, and return how many these are."""
    progress.start("reading prompts", None, "documents")  # to count them, each source would be read once more
    stream, staged = iter(loaded.documents), 0
    for block in itertools.count():
        documents = list(itertools.islice(stream, loaded.options.shard_documents))
        if not documents:
            break
        require_weights(loaded.options.decision.weights, (document.domain for document in documents))
        if part.has(block):
            run.stage(prompt_table(documents), digest(documents))
            staged += 1
        progress.advance(len(documents))
    if isinstance(loaded.documents, Corpus):
        unused = (f"{count} {reason}" for reason, count in loaded.documents.truncated.items() if reason.startswith(UNUSED))
        for said in (*loaded.documents.bad_rows(), *unused):
            progress.say(said)
    return staged


def load(
    options: ProfileOptions,
    progress: Progress,
    reuse: Path | None = None,
    staged: Staged | None = None,
    units: frozenset[str] | None = None,
    engine: bool = True,
) -> Loaded:
    """Load models and find the data. Raises the errors of `errors.py`. `staged`: documents of a run that has begun, so that
    neither data nor hub are read for them. `reuse`, `units`: as of `profile`; `engine`: whether the profile's engine has
    still something to do, and is asked whether it can.
    """
    reused = Reused(reusable(reuse, options), units) if reuse else None
    if reused is not None:  # its text is that of the target in its dtype
        options = options.with_dtype(reused.run.manifest.profile.target.dtype)
    progress.say(f"loading {options.target.model}")
    check_kinds(options)
    tokenizer = load_tokenizer(options.target)
    staged = staged or reused
    check_tokenizers(options, tokenizer)  # wrong ones, a wrong engine and wrong data are found before weights are loaded
    if options.vllm is not None and options.uses_engine and engine:
        writes = reused is None and bool(options.written_by_engine())
        check_engine(options, options.vllm, writes)
        if writes and options.vllm.url is not None:
            require_tokenizer(VllmServer(options.vllm, options.vllm.url), tokenizer)
    corpus = Corpus(options, tokenizer, context_in(options.target))
    if staged is None:
        corpus.look(LOOKED_AT)
    target = load_model("target", options.target, options.target.dtype, extra_eos=eos_of(tokenizer))
    if target.choice is not None:
        options = options.with_dtype(target.choice.chosen)
        progress.say(target.choice.reason)
    drafts = load_drafts(options, target, tokenizer)
    dispatch.warm_up(target.device, progress.say)
    read = dataclasses.replace(corpus, context=target.context, vocabulary=target.vocabulary, served=target.served)
    documents = staged or read
    extras = Extras.of(options.rules, options.certificates)
    scorer = Scorer(target, drafts, token_count(tokenizer), options.draft_processing, extras)
    if options.batch_tokens == AUTO:
        options = options.model_copy(update={"batch_tokens": batch_tokens_of(options, scorer)})
        if target.device.type == "cuda":
            progress.say(f"batch_tokens: {options.batch_tokens}, by the memory of the GPU")
    return Loaded(options, tokenizer, target, drafts, documents, scorer)


def manifest_of(loaded: Loaded, engine: bool = True) -> Manifest:
    """Return what a run begins with. `engine`: as of `load`."""
    rules = loaded.scorer.extras.log_rules(loaded.options.rules)
    target = loaded.target.facts()
    return Manifest(
        status="running",
        alphaprof=__version__,
        created=now(),
        config=loaded.options.model_dump(mode="json"),
        target=dataclasses.replace(target, special=special_ids(loaded.tokenizer)),
        drafts={draft.name: draft.facts() for draft in loaded.drafts},
        tokenizer=tokenizer_fingerprint(loaded.tokenizer),
        environment=_environment(target.device, loaded.target.device, loaded.options if engine else None),
        certified=rules.certified,
    )


def _environment(name: str, device: torch.device, options: ProfileOptions | None) -> Environment:
    packages = {name: version(name) for name in ("torch", "transformers", "datasets", "numpy", "pyarrow", "numba")}
    engine: Environment = {}
    if options is not None and options.vllm is not None and options.uses_engine:
        packages["vllm"] = vllm_version(options.vllm)
        engine = {"engine": engine_environment(options.vllm)}
    with contextlib.suppress(PackageNotFoundError):  # not there on every system
        packages["triton"] = version("triton")
    return {
        "device": name,
        "device_memory": torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "packages": packages,
        "statistics": dispatch.checksum(device),
        **engine,
    }


def with_costs(options: ProfileOptions, say: Callable[[str], None]) -> ProfileOptions:
    """Return the options with what `costs.source: auto` means on the target's device; `say`: why on a GPU. Raises
    `ProfileInvalid` for a GPU whose figures are not known.
    """
    if options.costs.source != "auto":
        return options
    device = target_device(options.target)
    if device.type != "cuda":
        return options.with_costs(None)
    name = torch.cuda.get_device_name(device)
    if name not in DEVICES:
        known = ", ".join(ACCELERATORS)
        raise ProfileInvalid(
            f"on a GPU step times are computed by default, but the figures of {name} are not known",
            f"write costs: {{source: vllm}} to measure them, {{source: roofline, accelerator: NAME}} ({known}), "
            "or {source: none} (docs/costs.md)",
        )
    count = torch.cuda.device_count() if options.target.device_map else 1
    say(
        f"step times are computed for {f'{count} x ' if count > 1 else ''}{DEVICES[name]} (costs: roofline): on a GPU "
        "transformers launches every kernel by itself, which engines do not; costs: {source: vllm} measures theirs"
    )
    return options.with_costs(DEVICES[name], count)


def require_shapes(options: ProfileOptions) -> None:
    """Raise `CostsUnreadable` for a model whose step times cannot be computed, which shows before its weights are loaded."""
    if isinstance(options.costs, RooflineCosts):
        own = {name: draft.own_model for name, draft in options.drafts.items() if draft.has_steps and not draft.by_depth}
        for name, model in {TARGET: options.target, **own}.items():
            if model is not None and not model.is_gguf:
                require_shape(name, model)


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
    if options.vllm is None and options.costs.source == "measured" and target.device.type == "cpu":
        padded = [draft.name for draft in loaded.drafts if draft.facts().settings.get("match") == "rightmost"]
        if unasked := [name for name in padded if "match" not in options.drafts[name].model_fields_set]:
            yield note("padded_here", drafts=", ".join(unasked))
    settings = [policy(kind, target.served)["processing"] for kind in kinds]
    cut = any(each is not None and each.for_draft(options.draft_processing) != each for each in settings)
    if cut and scorer.drafts and (drawn := [name for name in options.rules if parse_rule(name).rule.drawn]):
        yield note("draft_processing", rules=", ".join(drawn))
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


# A run that goes on.


def resumed(
    options: ProfileOptions, run: RunWriter, progress: Progress, part: Part = WHOLE, retime: bool = False
) -> Models | None:
    """Find what is missing of a run, damaged shards included, and load its models; None: it is complete. `retime`: as of
    `profile`. Raises `RunMismatch` if it was made by another profile, with other models, or computes otherwise.
    """
    if retime:
        run.require_complete()
    models = Models(as_measured(options, run.manifest), Staged(run), progress)

    def described(engine: bool) -> Manifest:
        set_threads(threads_of(run, options))
        return manifest_of(models.loaded(engine), engine)

    return models if goes_on(models.options, run, progress, described, part, retime) else None


def threads_of(run: RunWriter, options: ProfileOptions) -> int | str:
    """Return the threads of a run that goes on: those of the step that has something already, else as the options say."""
    begun = run.journal["rows"] or run.writes_texts
    return run.manifest.environment["torch_threads"] if begun else options.execution.threads


def goes_on(
    options: ProfileOptions,
    run: RunWriter,
    progress: Progress,
    described: Callable[[bool], Manifest],
    part: Part = WHOLE,
    retime: bool = False,
) -> bool:
    """Find what is missing of a run, and return whether anything but totals is. `options`: `as_measured`; `described`: loads
    the models that go on with the run, with an engine that has still something to do, and returns what such a run would
    begin with. Raises as `resumed` does.
    """
    require_same_profile(run, options, part)
    if not retime and (damaged := run.forget_damaged()):
        progress.say(f"measuring {len(damaged)} damaged shards again: {', '.join(map(str, damaged[:8]))}")
    changed = {name: value for name, value in without_secrets(options.model_dump(mode="json")).items() if name in FREE}
    others = {name for name, value in changed.items() if run.manifest.config.get(name) != value}
    costs, measures = options.costs.model_dump(mode="json"), isinstance(options.costs, MeasuredCosts) and part.index == 0
    again = measures and (retime or run.manifest.config["costs"] != costs)
    timed = not measures or (is_timed(run) and not again)
    scored = run.manifest.status == "complete"
    done = scored and timed
    # Nothing is changed for a process that cannot go on with it; one that has only an engine to time needs no model.
    if not done and not (scored and options.costs.source == "vllm"):
        writes = run.manifest.reused is None and options.written_by_engine() and run.lacking("texts")
        engine = bool(writes) or (options.costs.source == "vllm" and not timed)
        require_same_models(run, described(engine), moved=not run.journal["rows"])
    if others:
        run.update(config=run.manifest.config | changed)
    if again:  # noted until new times are there
        waiting = note("out_of_time", reason="they are to be timed again")
        run.update(config=run.manifest.config | {"costs": costs}, warnings=(*run.manifest.warnings, waiting))
    if others - {"execution"}:
        progress.say(f"the decision settings changed: reports of {run.path} now follow them")
    if not done:
        progress.say(f"resuming after {len(run.journal['rows'])} complete shards")
    elif any(run.failure(name) for name in run.manifest.files if name.startswith((DOCUMENTS, "totals/"))):
        progress.say(f"writing the totals of {run.path} again")
        run.finish(write_totals)
    else:
        progress.say(f"{run.path} is complete already")
    return not done


def is_timed(run: RunWriter) -> bool:
    """Return whether steps were timed, or cannot be: a budget that was spent is not the end. Damaged ones are lost."""
    codes = {warning["code"] for warning in run.manifest.warnings}
    if "out_of_time" in codes:
        return False
    return "not_timed" in codes or (LATENCY in run.manifest.files and not run.failure(LATENCY))


def require_same_models(run: RunWriter, mine: Manifest, moved: bool) -> None:
    """Raise `RunMismatch` unless models and tokenizer are those of a run that goes on, and a process computes like the one
    that wrote what a step has so far; the profile may allow that it does not. `mine`: what a run of that process would begin
    with; `moved`: nothing is scored yet, and may be elsewhere than the run began.
    """
    before, mixed = run.manifest, mine.profile.execution.mixed_devices
    texts = before.texts_environment or before.environment
    known = ([] if moved else [before.environment]) + ([texts] if run.writes_texts else [])
    if not mixed and (found := [word for each in known for word in differences(each, mine.environment)]):
        raise RunMismatch(
            f"this process computes differently from the one that began the run ({'; '.join(found)}): rows could differ",
            "match the run's setup, profile into a new directory, or allow it: --set execution.mixed_devices=true",
        )
    pairs = ((name, before.models[name], facts) for name, facts in mine.models.items())
    fields = [f"{name} {field}" for name, earlier, facts in pairs for field in differing(earlier, facts)]
    odd = [field for field in fields if not ((mixed or moved) and field.endswith(" device"))]
    odd += ["tokenizer"] if before.tokenizer != mine.tokenizer else []
    if odd:
        raise RunMismatch(
            f"models are not those of the run (other {', '.join(odd)})",
            "put the same models back, or profile into a new directory",
        )
    if moved:
        drafts = {name: dataclasses.replace(before.drafts[name], device=facts.device) for name, facts in mine.drafts.items()}
        target = dataclasses.replace(before.target, device=mine.target.device)
        written = texts if differences(texts, mine.environment) else None
        here = dict(mine.environment) | {"packages": before.environment["packages"] | mine.environment["packages"]}
        run.update(environment=before.environment | here, texts_environment=written, target=target, drafts=drafts)
    elif odd := list(dict.fromkeys(differences(before.environment, mine.environment))):
        kept = tuple(warning for warning in before.warnings if warning["code"] != "mixed_devices")
        run.update(warnings=(*kept, note("mixed_devices", where="; ".join(odd))))


def _is_writer(earlier: Run, mine: Manifest) -> bool:
    """Return whether this target wrote the continuations of a run. Raises `RunMismatch` for another tokenizer, and for the
    same target elsewhere.
    """
    before = earlier.manifest
    changed = differing(before.target, mine.target)
    if before.tokenizer != mine.tokenizer or (changed and "fingerprint" not in changed):
        raise RunMismatch(
            f"{earlier.path} was made with another tokenizer or device",
            "profile without --reuse-continuations: another tokenizer or device makes other text",
        )
    return not changed


# Texts, step times, rows.


def write_texts(models: Models, run: RunWriter, progress: Progress) -> None:
    """Write the continuations that are not recorded: by the engine of the profile, by the target, or as they are given."""
    lacking = run.lacking("texts")
    if not lacking:
        return
    writer, here = writers(models.options, run.manifest)
    if writer is not None and writer.options.url is None:
        models.release()

    texts = {item.document.document: item for item in continuations_of(run.kept_texts())}

    def results(advance: Advance) -> Iterator[ShardTexts]:
        for index in lacking:
            documents, loaded = list(documents_of(run.prompts(index))), models.loaded() if here else None
            yield write_shard(loaded, index, documents, advance, writer, run.manifest.target.eos, texts)

    try:
        with contextlib.closing(writer) if writer else contextlib.nullcontext():
            record("texts", results, run, progress)
    except BaseException as error:
        with contextlib.suppress(Exception):  # nothing may hide what ended the run
            if texts:
                run.keep_texts(continuation_table(list(texts.values())))
            count = len(texts) + sum(each.shard.documents for each in run.journal["texts"].values())
            error.add_note(f"{count} texts are written and kept")
        raise


def writers(options: ProfileOptions, manifest: Manifest) -> tuple[TextWriter | None, bool]:
    """Return the engine that writes texts of a run, and whether the target is loaded for others."""
    if manifest.reused is not None:
        return None, False
    written = options.written_by_engine()
    engine = options.vllm if written else None
    writer = TextWriter(options, engine, manifest.target) if engine is not None else None
    return writer, len(written) < len(options.data)


def write_rows(models: Models, run: RunWriter, progress: Progress) -> None:
    """Score the texts of the shards that are not recorded."""
    if not (lacking := run.lacking("rows")):
        return
    loaded = models.loaded()

    def results(advance: Advance) -> Iterator[ShardRows]:
        for index in lacking:
            texts = run.journal["texts"][index].shard
            yield score_shard(loaded, run.manifest.drafts, texts, run.continuations(index), advance)

    record("rows", results, run, progress)


def record(step: str, results: Callable[[Advance], Iterator[Result]], run: RunWriter, progress: Progress) -> None:
    """Write what a step makes of shards, each while the next one is worked out."""
    progress.start(LABELS[step], sum(one.shard.documents for one in run.journal["prompts"].values()), "documents")
    progress.advance(sum(one.shard.documents for one in run.journal[step].values()))
    background = Background()

    def advance(steps: float, positions: int) -> None:
        background.check()  # a full disk ends the run at the next batch, and so does the loss of the directory
        run.storage.require_there()
        progress.advance(steps, positions)

    with background:
        for result in results(advance):
            background.put(partial(_write, run, result))


def _write(run: RunWriter, result: ShardTexts | ShardRows) -> None:
    try:
        if isinstance(result, ShardTexts):
            run.write_texts(result.shard, result.texts, result.seconds)
        else:
            run.write_rows(result.shard, result.positions, result.seconds)
    except MemoryError as error:  # pyarrow's, too
        raise OutOfMemory(
            f"out of memory while writing results: {error}",
            "free memory, then --resume; or profile again with a lower shard_documents",
        ) from None


@dataclass(frozen=True)
class StepTimes:
    """What came of timing: the latency table (None: steps cannot be timed), notes, and the share of waiting in its times."""

    table: pa.Table | None
    warnings: tuple[dict[str, str], ...]
    waiting: float | None = None
    engines: pa.Table | None = None  # all rounds of engines, of which the table is made


def first_prompts(run: StagedRun) -> Ids:
    """Return the token ids of a run's first prompts, of which steps are timed."""
    return np.concatenate([document.prompt for document in itertools.islice(Staged(run), 8)])


def keep_rounds(run: RunWriter, engines: pa.Table) -> None:
    """Write the rounds of engines that were timed so far into a run."""
    run.write_table(ENGINES, engines, ENGINE_COLUMNS)
    run.update()


def time_models(
    models: Models,
    manifest: Manifest,
    text: Ids,
    costs: MeasuredCosts,
    progress: Progress,
    known: Sequence[dict[str, Any]] = (),
    keep: Callable[[pa.Table], None] = lambda _: None,
) -> StepTimes:
    """Time the steps of the models on a text, or of the engine. `known`, `keep`: as of `time_engines`."""

    def tick(share: float) -> None:
        progress.advance(100 * share)

    def measure() -> latency.Timed:
        options = models.options
        if costs.source == "vllm" and options.vllm is not None:
            models.release()
            progress.start("timing steps", 100, "parts")
            subjects = options, options.vllm, manifest.target, manifest.drafts
            return time_engines(*subjects, costs, progress.say, tick, known, keep)
        loaded = models.loaded()
        here = latency.Subjects(loaded.target, loaded.drafts, text, max(options.gammas))
        progress.start("timing steps", 100, "parts")
        return latency.measure(here, costs, tick, progress.say, options.decision.concurrency)

    return step_times_of(measure, progress)


def step_times_of(measure: Callable[[], latency.Timed], progress: Progress) -> StepTimes:
    """Return what comes of timing, with a note on what it lacks."""
    warnings = list[dict[str, str]]()

    def noted(warning: dict[str, str]) -> None:
        progress.warn(**warning)
        warnings.append(warning)

    try:
        timed = measure()
    except NotTimed as error:
        spent = isinstance(error, latency.BudgetSpent)
        noted(note("out_of_time", reason=error) if spent else note("not_timed", reason=error, remedy=error.remedy))
        return StepTimes(None, tuple(warnings))
    for reason in timed.left_out:
        noted(note("not_timed_there", reason=reason, remedy="lower costs.concurrency or costs.context"))
    for reason in timed.late:
        noted(note("out_of_time", reason=reason))
    if timed.waiting is not None and is_busy(timed.waiting):
        noted(note("cpu_seconds", waiting=timed.waiting) if timed.computed else note("busy", waiting=timed.waiting))
    return StepTimes(timed.table, tuple(warnings), 0.0 if timed.computed else timed.waiting, timed.engines)


def write_times(run: RunWriter, times: StepTimes) -> None:
    """Write step times into a run."""
    kept = [warning for warning in run.manifest.warnings if warning["code"] not in OF_TIMES]
    environment = run.manifest.environment
    if times.engines is not None:
        keep_rounds(run, times.engines)
    if times.table is not None:
        run.write_table(LATENCY, times.table, LATENCY_COLUMNS)
        environment = environment | Environment(timing_waiting=times.waiting)
    run.update(warnings=(*kept, *times.warnings), environment=environment)


# Runs of other commands: documents without step times, and step times without documents.


def profile_with_models(options: ProfileOptions, run: RunWriter, progress: Progress, first: First | None = None) -> Plan:
    """Profile into a new run without timing any step; the complete run with its loaded models. `first`: as of `begun`.
    Raises the errors of `errors.py`.
    """
    with in_memory():
        models = begun(options, run, progress, first=first)
        write_texts(models, run, progress)
        write_rows(models, run, progress)
        run.finish(write_totals)
    return Plan(**vars(models.loaded()), run=run)


def time_steps_of(plan: Plan, costs: MeasuredCosts, progress: Progress) -> None:
    """Time the steps for a run that has no step times yet, by `costs` instead of its profile's, and note these in it. Raises
    `OutOfMemory`.
    """
    with in_memory():
        plan.run.update(config=plan.run.manifest.config | {"costs": costs.model_dump(mode="json")})
        text = first_prompts(plan.run)
        models = Models(plan.options, Staged(plan.run), progress, plan)
        write_times(plan.run, time_models(models, plan.run.manifest, text, costs, progress))
