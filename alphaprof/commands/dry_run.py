"""`alphaprof profile --dry-run`: a profile in small, in a folder that is removed, and what the first documents hold."""

from __future__ import annotations

import datetime
import itertools
import resource
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, get_args

import numpy as np
import torch

from alphaprof.config.options import MeasuredCosts
from alphaprof.config.profile import ProfileOptions
from alphaprof.errors import DiskFull
from alphaprof.profiling.models.hub import expected_documents
from alphaprof.profiling.profile import First, profile_with_models, time_steps_of
from alphaprof.profiling.shard import Plan, Progress
from alphaprof.profiling.texts.chat import writes_the_date
from alphaprof.profiling.texts.corpus import BAD, Corpus, Document
from alphaprof.render.blocks import Block, Small, Verdict
from alphaprof.render.format import count, data_size, duration, many, percent, short
from alphaprof.report.wording import wiring_lines
from alphaprof.run.manifest import DraftFacts, left_out_remedy
from alphaprof.run.notes import check_of
from alphaprof.run.storage import LocalStorage, storage_of
from alphaprof.run.writer import RunWriter

FIRST = 200  # documents that are looked at
TRIED, NEW_TOKENS = 8, 32  # documents of the profile in small, at least one of every source, and their new tokens at most
ORDER = ("dtype", "vocabulary", "wiring", "chat template", "bos", "context", "data", "costs", "time", "disk", "memory")
FATAL = {"disk": DiskFull}  # checks whose problem ends the run, and by which error
Level = Literal["problem", "note", "ok"]
Needs = tuple[int, int, float, int]  # documents, positions, seconds and bytes of the log, at most


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str  # of the check (docs/troubleshooting.md)
    subject: str  # model, source or domain that it is about; run: all of it
    level: Level  # problem: the run would fail, or its numbers would not be those of your traffic
    cause: str  # what was found
    remedy: str | None = None  # what to do about it; None: nothing

    @classmethod
    def of(cls, name: str, subject: str, cause: str, remedy: str | None = None) -> Finding:
        """Return a note, or ok if there is nothing to do."""
        return cls(name, subject, "ok" if remedy is None else "note", cause, remedy)

    @property
    def fatal(self) -> bool:
        """Whether the run would end by it."""
        return self.level == "problem" and self.name in FATAL


@dataclass(frozen=True)
class DryRun:
    """All checks, and what follows from them."""

    format: ClassVar[str] = "alphaprof-preflight"
    version: ClassVar[str] = "2.0"

    checks: tuple[Finding, ...]  # by name, in the order of the docs
    conclusion: str  # what follows, in words

    @classmethod
    def of(cls, checks: tuple[Finding, ...]) -> DryRun:
        """Return the answer that some checks lead to."""
        problems, notes = (sum(check.level == level for check in checks) for level in ("problem", "note"))
        found = f"{many(problems, 'problem')} and {many(notes, 'note')}"
        fatal = ", ".join(check.name for check in checks if check.fatal)
        ends = f"would fail: {fatal}" if fatal else "can start"
        return cls(checks, f"{found}; the run {ends}. Nothing was written.")

    def require_runnable(self) -> None:
        """Raise the error that would end the run, if a check found one."""
        for check in self.checks:
            if check.fatal:
                problem = f"the run would fail: {check.name}: {check.cause}"
                raise FATAL[check.name](problem, check.remedy or "see the check above")

    def blocks(self) -> Iterator[Block]:
        """Yield what follows from the checks, and every check, problems first: of what is ok the beginning, in one line."""
        yield self.conclusion
        yield ""
        for check in sorted(self.checks, key=lambda check: get_args(Level).index(check.level)):
            brief = "" if check.remedy else f": {check.cause.split('; ')[0].split('. ')[0]}"
            yield Verdict(check.level, f"{'':{9 - len(check.level)}}{check.name}, {check.subject}{brief}")
            yield from (f"{'':9}{text}" for text in (check.cause, f"-> {check.remedy}") if check.remedy)
        yield ""
        yield Small("all that was found: --format json")


def dry_run(options: ProfileOptions, out: str | None, progress: Progress) -> DryRun:
    """Profile the first documents with few new tokens, and look at more of them. `out`: the planned run's storage, if known.
    Raises the errors of `errors.py` that would stop the run; what would stop it later, `DryRun.require_runnable` raises.
    """
    trial = First(max(TRIED, len(options.data)), NEW_TOKENS)
    with tempfile.TemporaryDirectory(prefix="alphaprof-") as folder, RunWriter.opened(Path(folder, "run")) as run:
        plan = profile_with_models(options, run, progress, trial)
        # Whether steps can be timed, at the first batch size and context. An engine would need the memory of these models.
        costs = plan.options.costs
        if isinstance(costs, MeasuredCosts) and costs.source == "measured":
            first = {"concurrency": costs.concurrency[:1], "context": costs.context[:1], "repeats": 3}
            time_steps_of(plan, costs.model_copy(update=first), progress)
        progress.say("looking at data")
        corpus = Corpus(options, plan.tokenizer, plan.target.context, plan.target.vocabulary, plan.target.served)
        seen = list(itertools.islice(corpus, FIRST))
        checks = (
            *_model_checks(plan, seen),
            *(
                Finding.of(check_of(each["code"]), "run", each["message"], each["remedy"])
                for each in plan.run.manifest.warnings
            ),
            *_prompt_checks(plan, seen),
            *_data_checks(corpus, seen),
            *_need_checks(plan, _needs(options, plan, seen, corpus.skipped.total()), out),
        )
    order = {name: place for place, name in enumerate(ORDER)}
    return DryRun.of(tuple(sorted(checks, key=lambda check: order.get(check.name, len(ORDER)))))


def _model_checks(plan: Plan, seen: Sequence[Document]) -> Iterator[Finding]:
    """Yield the checks of target and drafts."""
    target, width = plan.run.manifest.target, plan.scorer.width
    if plan.target.choice is not None and all(warning["code"] != "other_dtype" for warning in plan.run.manifest.warnings):
        yield Finding.of("dtype", "target", plan.target.choice.reason)
    for name, facts in plan.run.manifest.models.items():
        logits = facts.vocabulary or 0
        if isinstance(facts, DraftFacts) and facts.reduced_vocabulary:
            cause = f"can propose {count(logits)} of the target's {count(width)} ids ({percent(logits / width)})"
            yield Finding.of("vocabulary", name, cause, "the run measures the share of the text they cover")
        elif logits:
            padding = f", the last {count(logits - width)} of them padding, left out" if logits > width else ""
            yield Finding.of("vocabulary", name, f"{count(logits)} logits{padding}")
        if isinstance(facts, DraftFacts) and facts.depths is not None:
            drafted = f"{facts.architecture} in {facts.dtype}, {many(facts.depths, 'draft')} a round"
            yield Finding.of("wiring", name, ". ".join([drafted, *wiring_lines(facts)]))
        own = facts.parameters
        if facts is not target and own and target.parameters and own > target.parameters:
            cause = (
                f"has {count(own)} parameters, the target {count(target.parameters)}: a step costs more than the target's"
            )
            yield Finding.of("costs", name, cause, "use a smaller draft, or swap the two if they are mixed up")
        longest = max(len(document.prompt) + document.limit for document in seen)
        limit = "no limit" if facts.context is None else f"{count(facts.context)} tokens"
        reach = f"{limit}; the longest document seen has {count(longest)} with its new tokens"
        beyond = [len(document.prompt) + document.limit - 1 > (facts.context or longest) for document in seen]
        if facts is target or not any(beyond):
            yield Finding.of("context", name, reach)
            continue
        silent = sum(len(document.prompt) > (facts.context or 0) for document in seen)
        cause = f"{reach}; {sum(beyond)} of {many(len(seen), 'document')} go beyond it, {silent} with the prompt alone"
        remedy = "use a draft with a longer context, or lower max_new_tokens: engines stop drafting there, or refuse"
        yield Finding("context", name, "problem" if silent == len(seen) else "note", cause, remedy)


def _prompt_checks(plan: Plan, seen: Sequence[Document]) -> Iterator[Finding]:
    """Yield the checks of how prompts are encoded."""
    template = plan.tokenizer.chat_template is not None
    used = sum(bool(source.chat or source.messages is not None) for source in plan.options.data)
    there = f"used for {used} of {many(len(plan.options.data), 'source')}" if template else "the target has none"
    yield Finding.of("chat template", "target", there)
    chats = [source for source in plan.options.data if source.chat or source.messages is not None]
    if any(writes_the_date(plan.tokenizer, source.chat_options) for source in chats):
        remedy = f'set chat_options: {{date_string: "{datetime.date.today():%d %b %Y}"}} in each source with chats'
        cause = "it writes today's date into prompts: a run of another day has no prompt in common with this one"
        yield Finding.of("chat template", "target", cause, remedy)
    begin = plan.tokenizer.bos_token_id
    if begin is None:
        yield Finding.of("bos", "target", "the tokenizer has no BOS token")
        return
    once, twice = (sum(document.prompt[:times].tolist() == [begin] * times for document in seen) for times in (1, 2))
    cause = f"{count(once)} of {many(len(seen), 'prompt')} begin with BOS ({short(str(plan.tokenizer.bos_token))})"
    if twice:
        remedy = "remove it from the data, or give token ids as prompt_ids"
        yield Finding("bos", "run", "problem", f"{cause}, {count(twice)} of them twice: the data already has BOS", remedy)
    elif once < len(seen) and plan.tokenizer("a")["input_ids"][:1] == [begin]:
        remedy = (
            "keep this if your server sends the same prompts (many do: they add no BOS); else give token ids as prompt_ids"
        )
        yield Finding.of("bos", "run", f"{cause}, which the tokenizer adds to plain text", remedy)
    else:
        yield Finding.of("bos", "run", cause)


def _data_checks(corpus: Corpus, seen: Sequence[Document]) -> Iterator[Finding]:
    """Yield the checks of the first documents."""
    for domain in dict.fromkeys(document.domain for document in seen):
        lengths = [len(document.prompt) for document in seen if document.domain == domain]
        cause = f"prompts of {min(lengths)} to {max(lengths)} tokens, median {int(np.median(lengths))}"
        yield Finding.of("data", short(domain), f"{cause}, in {many(len(lengths), 'document')} seen")
    for bad in corpus.bad_rows():
        yield Finding.of("data", "run", bad, "mend these rows, or leave them out of the data")
    for reason, number in Counter({**corpus.skipped, **corpus.truncated}).items():
        if reason == BAD:
            continue
        left_out = f"{many(number, 'row')} left out {reason}" if reason in corpus.skipped else f"{count(number)} {reason}"
        yield Finding.of("data", "run", left_out, left_out_remedy(reason))
    if repeated := len(seen) - len({document.prompt_hash for document in seen}):
        cause = f"{count(repeated)} of {many(len(seen), 'prompt')} seen are repeats: equal prompts count once"
        yield Finding.of("data", "run", cause, "remove duplicates: they only cost time")


def _needs(options: ProfileOptions, plan: Plan, seen: Sequence[Document], skipped: int) -> Needs | None:
    """Return what the run takes if its documents are like the first, at the speed and size of the profile in small, whose
    batches are smaller. None: the number of documents is not known before all are read.
    """
    documents: int | None = len(seen)
    if len(seen) == FIRST:
        expected = expected_documents(options)
        documents = None if expected is None else max(FIRST, round(expected * FIRST / (FIRST + skipped)))
    if documents is None:
        return None
    tried = sum(document.limit for document in plan.documents)  # new tokens at most, as `positions` are
    positions = round(documents * sum(document.limit for document in seen) / len(seen))
    seconds = sum(one.seconds for step in ("texts", "rows") for one in plan.run.journal[step].values()) / tried
    rows = sum(shard.positions for shard in plan.run.manifest.shards)
    size = sum(file.size for name, file in plan.run.manifest.files.items() if not name.startswith("prompts")) / rows
    return documents, positions, seconds * positions, round(size * positions)


def _need_checks(plan: Plan, needs: Needs | None, out: str | None) -> Iterator[Finding]:
    """Yield the checks of what the run takes."""
    costs, timed = plan.options.costs, plan.run.latency() is not None
    if costs.source == "vllm":
        takes = "what its first rounds say" if costs.budget is None else f"up to {costs.budget:g} s"
        words = f"vLLM is there, and has a method for each draft; timing its steps takes {takes}"
        yield Finding.of("costs", "run", f"{words}, and the starts of its engines")
    if timed and isinstance(costs, MeasuredCosts):
        yield Finding.of("costs", "run", f"steps can be timed; in a run this takes up to {costs.seconds:g} s (costs.budget)")
    if needs is None:
        unknown = "the number of documents is not known before all are read"
        yield Finding.of("time", "run", unknown, "give the source a limit, or use --limit")
    else:
        documents, positions, seconds, size = needs
        text = f"{many(documents, 'document')} (at most {many(positions, 'position')})"
        yield Finding.of("time", "run", f"at most about {duration(seconds)} for {text}, with the trial's small batches")
        free = None
        if out is not None and isinstance(storage_of(out), LocalStorage):
            there = next(place for place in (Path(out), *Path(out).absolute().parents) if place.exists())
            free = shutil.disk_usage(there).free
        cause = f"at most about {data_size(size)}" + ("" if free is None else f"; {data_size(free)} are free")
        full = free is not None and free < size
        remedy = "free some disk space, or choose another --out" if full else None
        yield Finding("disk", "run", "problem" if full else "ok", cause, remedy)
    if plan.target.device.type == "cuda":
        peak, whole = torch.cuda.max_memory_allocated(), torch.cuda.get_device_properties(plan.target.device).total_memory
        took = f"{data_size(peak)} of the GPU's {data_size(whole)}"
    else:
        unit = 1 if sys.platform == "darwin" else 1024
        took = data_size(unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    yield Finding.of("memory", "run", f"the trial used {took}; the run halves batches that do not fit")
