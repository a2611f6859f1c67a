"""profile(): the run, top to bottom. Documents in, shards of the position log out."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import os
import platform
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from alphaprof import __version__
from alphaprof.config import ProfileOptions
from alphaprof.errors import OutOfMemory, RunExists, RunMismatch
from alphaprof.log.manifest import Manifest
from alphaprof.log.store import Run, require_writable
from alphaprof.profiling import hub, latency
from alphaprof.profiling.batching import is_out_of_memory
from alphaprof.profiling.checks import early_warnings, require_same_data, require_same_models, require_same_profile
from alphaprof.profiling.corpus import Corpus, Document
from alphaprof.profiling.drafts import load_drafts
from alphaprof.profiling.extras import Extras
from alphaprof.profiling.models import Model, load_model, load_tokenizer, tokenizer_fingerprint
from alphaprof.profiling.reuse import Reused
from alphaprof.profiling.scoring import Scorer
from alphaprof.profiling.shards import Loaded, Plan, Progress, update, write_shard
from alphaprof.profiling.vocabulary import token_count

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def profile(options: ProfileOptions, out: Path, progress: Progress, resume: bool = False, reuse: Path | None = None) -> Run:
    """Profile into the directory `out`, or finish the interrupted run there. Raises the errors of `errors.py`.

    `reuse`: directory of a complete run whose continuations are measured again, with this profile's drafts.
    """
    with in_memory():
        return _profile(options, out, progress, resume, reuse)


def profile_with_models(options: ProfileOptions, out: Path, progress: Progress) -> Plan:
    """Profile into the new directory `out`, likewise; the complete run with its models, which are still loaded."""
    with in_memory():
        _earlier(out, resume=False)
        plan = _open(options, out, None, None, progress)
        _fill(plan, progress)
    return plan


@contextlib.contextmanager
def in_memory() -> Iterator[None]:
    """Raises `OutOfMemory` where what it encloses does not fit into memory."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(
            "the models do not fit into memory", "use a smaller dtype, another device, or a device_map"
        ) from None


def _profile(options: ProfileOptions, out: Path, progress: Progress, resume: bool, reuse: Path | None) -> Run:
    earlier = _earlier(out, resume)
    if earlier is not None:
        require_same_profile(earlier, options)
        _adopt_decision(earlier, options, progress)
    if earlier is not None and earlier.manifest.status == "complete":
        progress.say(f"{out} is complete already")
        return earlier
    if earlier is not None and earlier.manifest.reused is not None:
        reuse = Path(earlier.manifest.reused)
    plan = _open(options, out, earlier, reuse, progress)
    _fill(plan, progress)
    return plan.run


def _fill(plan: Plan, progress: Progress) -> None:
    """Time the steps and write the shards that the run lacks."""
    options = plan.options
    if plan.run.latency() is None and not any(found["code"] == "not_timed" for found in plan.run.manifest.warnings):
        _measure_latency(plan, progress)
    progress.start("profiling", hub.expected_documents(options), "documents")
    done = len(plan.run.shards)
    seen = 0
    for index, documents in enumerate(_shards(plan.documents, options.shard_documents)):
        if index < done:
            require_same_data(plan.run.shards[index], documents)
            progress.advance(len(documents))
        else:
            write_shard(plan, index, documents, progress)
        seen += 1
    if seen < done:
        raise RunMismatch(
            f"the data end before shard {seen}, which {plan.run.path} holds", "put the data back, or profile anew"
        )
    _finish(plan)


def _earlier(out: Path, resume: bool) -> Run | None:
    """The run to resume in `out`, or None for a new one. Raises `RunExists` rather than overwrite anything."""
    if resume:
        run = Run.open(out)
        run.remove_leftovers()
        return run
    if (out / "manifest.json").exists():
        raise RunExists(f"{out} holds a run already", "add --resume to finish it, or choose another --out")
    # A process that is killed at once may leave a directory with a half-written manifest: a hidden file.
    if out.exists() and not (out.is_dir() and all(item.name.startswith(".") for item in out.iterdir())):
        raise RunExists(f"{out} exists and is not empty", "choose a new directory for --out")
    require_writable(out)
    return None


def _adopt_decision(earlier: Run, options: ProfileOptions, progress: Progress) -> None:
    """A changed decision needs no new measurement: the run takes it over, and reports ask it from then on."""
    config = options.model_dump(mode="json")
    if earlier.manifest.config["decision"] != config["decision"]:
        earlier.write_manifest(dataclasses.replace(earlier.manifest, config=config))
        progress.say(f"the decision has changed: reports of {earlier.path} follow the profile as it is now")


def load(options: ProfileOptions, progress: Progress, reuse: Path | None = None) -> Loaded:
    """Load models and find the data; no run is made of them. Raises the errors of `errors.py`."""
    progress.say(f"loading {options.target.model}")
    tokenizer = load_tokenizer(options.target)
    target = load_model("target", options.target, options.target.dtype, extra_eos=_eos(tokenizer))
    drafts = load_drafts(options, target, tokenizer)
    documents = Reused.open(reuse, options) if reuse else _corpus(options, tokenizer, target)
    for _ in itertools.islice(documents, len(options.data)):  # one of every source
        pass  # a missing file or column is found before any work
    extras = Extras.of(options.rules, options.certificates)
    scorer = Scorer(target, drafts, token_count(tokenizer), options.draft_processing, extras)
    return Loaded(options, tokenizer, target, drafts, documents, scorer)


def _open(options: ProfileOptions, out: Path, earlier: Run | None, reuse: Path | None, progress: Progress) -> Plan:
    """Load everything and open the run directory; what can fail early fails here."""
    loaded = load(options, progress, reuse)
    held = loaded.scorer.extras.log_rules(options.rules)
    manifest = Manifest(
        status="running",
        alphaprof=__version__,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        config=options.model_dump(mode="json"),
        target=loaded.target.facts(),
        drafts={draft.name: draft.facts() for draft in loaded.drafts},
        tokenizer=tokenizer_fingerprint(loaded.tokenizer),
        environment=_environment(),
        reused=str(reuse.resolve()) if reuse else None,
        emitted=held.emitted,
        certified=held.certified,
    )
    if isinstance(loaded.documents, Reused):
        loaded.documents.require_same_target(manifest)
    run = Run(out, manifest)
    if earlier is not None:
        require_same_models(earlier.manifest, manifest)
        run = earlier
        progress.say(f"resuming after {len(run.shards)} complete shards")
    else:
        warnings = tuple(early_warnings(options, loaded.scorer, loaded.tokenizer.chat_template is not None))
        for warning in warnings:
            progress.warn(**warning)
        run.write_manifest(dataclasses.replace(manifest, warnings=warnings))
    return Plan(**vars(loaded), run=run)


def _corpus(options: ProfileOptions, tokenizer: PreTrainedTokenizerBase, target: Model) -> Corpus:
    return Corpus(options, tokenizer, target.context, target.vocabulary, target.served)


def _eos(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    return () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)


def _environment() -> dict[str, object]:
    packages = ("torch", "transformers", "datasets", "numpy", "pyarrow")
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "packages": {name: version(name) for name in packages},
    }


def _measure_latency(plan: Plan, progress: Progress) -> None:
    """Time the steps on the first prompts' tokens, before profiling: an interrupted run has its step times too."""
    costs = plan.options.costs
    progress.start("timing steps", latency.timed_repeats(costs), "repeats")
    prompts = [document.prompt for document in itertools.islice(plan.documents, 8)]
    text = torch.cat([torch.from_numpy(prompt) for prompt in prompts]).numpy()
    try:
        table = latency.measure(plan.target, plan.drafts, text, plan.options.gammas, costs, lambda: progress.advance(1))
    except latency.NotTimed as error:
        warning = {"code": "not_timed", "message": f"no step times: {error}", "remedy": "the report has no speedup then"}
        progress.warn(**warning)
        update(plan, warnings=(*plan.run.manifest.warnings, warning))
        return
    plan.run.write_latency(table)


def _shards(documents: Iterable[Document], size: int) -> Iterator[list[Document]]:
    stream = iter(documents)
    while shard := list(itertools.islice(stream, size)):
        yield shard


def _finish(plan: Plan) -> None:
    """Collect documents.parquet and mark the run complete."""
    plan.run.write_documents()
    update(plan, status="complete")
