"""preflight(): what a run would load, looked at before it runs. Nothing is written."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from alphaprof.commands.preflight.facts import (
    Bos,
    Memory,
    ModelSeen,
    NoiseFloor,
    PreflightFacts,
    Refusal,
    SelfDraft,
    SourceSeen,
    Speed,
    Storage,
    estimated,
)
from alphaprof.commands.preflight.trial import (
    bos_of,
    differing_specials,
    first_documents,
    free_memory,
    outside,
    peak_of,
    try_out,
)
from alphaprof.config.profile import ProfileOptions
from alphaprof.errors import AlphaprofError
from alphaprof.log.place import LocalPlace, place_of
from alphaprof.log.store import require_new
from alphaprof.profiling.heads.wiring import Trials, Warnings, check_wiring
from alphaprof.profiling.models.drafts import Draft, load_draft, shared_ids, special_ids, token_count
from alphaprof.profiling.models.hub import require_model
from alphaprof.profiling.models.load import Model, eos_of, load_model, load_tokenizer
from alphaprof.profiling.run.pipeline import in_memory
from alphaprof.profiling.run.resume import early_warnings, require_costs
from alphaprof.profiling.run.shards import Loaded, Progress
from alphaprof.profiling.scoring import dispatch
from alphaprof.profiling.scoring.extras import Extras
from alphaprof.profiling.scoring.scorer import Scorer
from alphaprof.profiling.texts.corpus import Corpus, Document

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class _Refusals(list[Refusal]):
    """Errors that would stop the run, kept until everything else was looked at."""

    @contextlib.contextmanager
    def kept(self, check: str, subject: str) -> Iterator[None]:
        """Keeps an error of the block, which is what `check` says of `subject`."""
        try:
            yield
        except AlphaprofError as error:
            self.append(Refusal(check, subject, type(error).__name__, error.message, error.hint, error.exit_code))


def preflight(options: ProfileOptions, out: str | None, progress: Progress) -> PreflightFacts:
    """Load what a run into `out` (None: not said where) would load, look at its data, and run it in small.

    Errors that would stop the run are kept in `PreflightFacts.refusals`. Raises those that leave nothing to look at: a
    target that cannot be loaded, or memory that the models alone fill.
    """
    with in_memory():
        return _preflight(options, out, progress)


def _preflight(options: ProfileOptions, out: str | None, progress: Progress) -> PreflightFacts:
    refusals = _Refusals()
    if out is not None:
        with refusals.kept("disk", out):
            require_new(place_of(out))
    require_model(options.target, "target")
    progress.say(f"loading {options.target.model}")
    tokenizer = load_tokenizer(options.target)
    target = load_model("target", options.target, options.target.dtype, extra_eos=eos_of(tokenizer))
    dispatch.warm_up(target.device, progress.say)
    drafts, views = _drafts(options, tokenizer, target, refusals)
    with refusals.kept("costs", options.costs.source):
        require_costs(options, target.facts(), {draft.name: draft.facts() for draft in drafts})
    bos = bos_of(tokenizer)
    sources, documents = _data(options, tokenizer, target, bos, refusals, progress)
    extras = Extras.of(options.rules, options.certificates)
    scorer = Scorer(target, drafts, token_count(tokenizer), options.draft_processing, extras)
    corpus = Corpus(options, tokenizer, target.context, target.vocabulary, target.served)
    loaded = Loaded(options, tokenizer, target, drafts, corpus, scorer)
    free = free_memory(target.device)
    with peak_of(target.device) as most:
        trials, told, trial = _tried(loaded, documents, _free(out), refusals, progress) if any(documents) else ({}, (), None)
    self_draft, noise, speed, storage = trial or (None, None, None, None)
    if not drafts:  # speed and size are of target and drafts together
        speed = storage = None
    every = list(itertools.chain.from_iterable(documents))
    seen = {draft.name: dataclasses.replace(draft.facts(), trials=trials.get(draft.name, ())) for draft in drafts}
    reached = [(view, *outside(every, view.facts.context)) for view in views]
    facts = dataclasses.replace(target.facts(), special=special_ids(tokenizer))
    return PreflightFacts(
        target=ModelSeen("target", facts, token_count(tokenizer)),
        drafts=tuple(
            dataclasses.replace(view, facts=seen[view.name], beyond=beyond, silent=silent)
            for view, beyond, silent in reached
        ),
        dtype=target.choice.reason if target.choice is not None else None,
        scored_ids=scorer.width,
        template=bool(tokenizer.chat_template),
        bos=bos,
        sources=tuple(sources),
        repeated=len(every) - len({document.prompt.tobytes() for document in every}),
        warnings=(*early_warnings(options, scorer, bool(tokenizer.chat_template)), *told),
        self_draft=self_draft,
        noise=noise,
        speed=speed,
        storage=storage,
        memory=Memory(_weights([target, *drafts]), most[0], free),
        estimate=estimated(sources, speed, storage, options.shard_documents) if speed and storage else None,
        refusals=tuple(refusals),
    )


Trial = tuple[SelfDraft, NoiseFloor | None, Speed, Storage]


def _tried(
    loaded: Loaded, documents: Sequence[Sequence[Document]], free: int | None, refusals: _Refusals, progress: Progress
) -> tuple[dict[str, Trials], Warnings, Trial | None]:
    """What readings of heads get by draft, the warnings of that, and a run in small; None: it was refused."""
    trials: dict[str, Trials] = {}
    told: Warnings = ()
    with refusals.kept("wiring", "run"), in_memory():
        trials, told = check_wiring(loaded, progress)
    trial: Trial | None = None
    progress.say("a run in small")
    with refusals.kept("trial", "target"), in_memory():
        trial = try_out(loaded, documents, free)
    return trials, told, trial


def _weights(loaded: Sequence[Model | Draft]) -> int:
    """Bytes of the weights of target and drafts; some share theirs, and some have none."""
    networks = [each.network for each in loaded if hasattr(each, "network")]
    parameters = {id(item): item for network in networks for item in network.parameters()}.values()
    return sum(item.numel() * item.element_size() for item in parameters)


def _drafts(
    options: ProfileOptions, tokenizer: PreTrainedTokenizerBase, target: Model, refusals: _Refusals
) -> tuple[list[Draft], list[ModelSeen]]:
    drafts: list[Draft] = []
    views = []
    for name, given in options.drafts.items():
        with refusals.kept("vocabulary", name):
            if given.own_model is not None:
                require_model(given.own_model, f"draft {name}")
            draft = load_draft(name, given, options, target, tokenizer)
            view = ModelSeen(name, draft.facts(), None)
            if given.own_model is not None and draft.models:  # a head has none of its own
                own = load_tokenizer(given.own_model)
                shared, _ = shared_ids(tokenizer, own)
                view = dataclasses.replace(
                    view, tokens=token_count(own), shared=shared, special=differing_specials(tokenizer, own)
                )
            drafts.append(draft)
            views.append(view)
    return drafts, views


def _data(
    options: ProfileOptions,
    tokenizer: PreTrainedTokenizerBase,
    target: Model,
    bos: Bos,
    refusals: _Refusals,
    progress: Progress,
) -> tuple[list[SourceSeen], list[list[Document]]]:
    """The first documents of every source that can be read, and what they look like."""
    progress.start("looking at data", len(options.data), "sources")
    sources, documents = [], []
    for index, source in enumerate(options.data):
        untemplated = (source.chat or source.messages is not None) and not tokenizer.chat_template
        with refusals.kept("chat template" if untemplated else "data", Path(source.path).name):
            seen, first = first_documents(options, index, tokenizer, target, bos)
            sources.append(seen)
            documents.append(first)
        progress.advance(1)
    return sources, documents


def _free(out: str | None) -> int | None:
    """Bytes free where the run will be written; None: no place was named."""
    if out is None or not isinstance(place_of(out), LocalPlace):
        return None
    return shutil.disk_usage(next(place for place in (Path(out), *Path(out).absolute().parents) if place.exists())).free
