"""What the first documents and a tokenizer look like; a run in small: its speed, the size of its log, numerical noise."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from alphaprof.commands.preflight.facts import Bos, NoiseFloor, SelfDraft, SourceSeen, Special, Speed, Storage
from alphaprof.errors import AlphaprofError
from alphaprof.log.schema import LogRules
from alphaprof.log.tables import table_content
from alphaprof.profiling.models.drafts import Arrays, as_draft, layer_skip, token_count
from alphaprof.profiling.models.hub import row_count
from alphaprof.profiling.models.load import NOISE, Model
from alphaprof.profiling.models.teacher_forced import TeacherForced
from alphaprof.profiling.run.shards import Loaded
from alphaprof.profiling.scoring.scorer import Layout, Scorer, by_document, position_table
from alphaprof.profiling.texts import continuations
from alphaprof.profiling.texts.continuations import Continuation, generation_batches, halving
from alphaprof.profiling.texts.corpus import LOST_BOS, Corpus, Document, Ids, render_chat
from alphaprof.profiling.timing import latency
from alphaprof.profiling.timing.steppers import NotTimed, Stepper, seconds, stepper
from alphaprof.rules import GREEDY, SAMPLED

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from alphaprof.config.profile import ProfileOptions, SourceOptions

FIRST = 200  # documents of a source that are looked at
SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")
DOCUMENTS, NEW_TOKENS = 32, 32  # at most
CONTEXT, STEPS = 16, 3  # of the steps that say how fast text is generated
PADDED = {"cpu": 4096, "cuda": 16384}  # padded tokens of these documents together, unless two are longer
PARAMETER_TOKENS = 5 * 10**11  # parameters x tokens that a CPU reads in some seconds
SELF = "self"
NUMBER = attrgetter("document.document")  # of a continuation


def first_documents(
    options: ProfileOptions, index: int, tokenizer: PreTrainedTokenizerBase, target: Model, bos: Bos
) -> tuple[SourceSeen, list[Document]]:
    """The first documents of one source, and what they look like. Raises the errors of `Corpus`."""
    source = options.data[index]
    alone = source.model_copy(update={"continuation": options.continuation_of(index)})
    corpus = Corpus(
        options.model_copy(update={"data": [alone]}), tokenizer, target.context, target.vocabulary, target.served
    )
    first = list(itertools.islice(corpus, FIRST))
    prompts = [len(document.prompt) for document in first]
    begin, lost = tokenizer.bos_token_id, corpus.truncated[LOST_BOS]
    seen = SourceSeen(
        source=index,
        path=Path(source.path).name,
        domains=tuple(dict.fromkeys(document.domain for document in first)),
        prompts=_prompts(options, index),
        generated=options.continuation_of(index).kind in (GREEDY, SAMPLED),
        documents=len(first),
        planned=_planned(source, len(first), len(first) + corpus.skipped.total()),
        shortest_prompt=min(prompts),
        median_prompt=int(statistics.median(prompts)),
        longest_prompt=max(prompts),
        prompt_tokens=sum(prompts),
        new_tokens=sum(map(new_tokens, first)),
        longest=max(map(length, first)),
        skipped=dict(corpus.skipped),
        truncated={reason: texts for reason, texts in corpus.truncated.items() if reason != LOST_BOS},
        double_bos=sum(_begins(document.prompt, begin, 2) for document in first),
        without_bos=sum(not _begins(document.prompt, begin, 1) for document in first) - lost if bos.added else 0,
        lost_bos=lost,
    )
    return seen, first


def new_tokens(document: Document) -> int:
    """How many tokens the continuation of a document has at most."""
    return len(document.given) if document.given is not None else document.max_new_tokens or 0


def length(document: Document) -> int:
    """How many tokens a document has at most, prompt and continuation."""
    return len(document.prompt) + new_tokens(document)


def outside(documents: Sequence[Document], context: int | None) -> tuple[int, int]:
    """How many documents have positions at which a draft with this context proposes nothing, and how many none else."""
    if context is None:
        return 0, 0
    beyond = sum(length(document) - 1 > context for document in documents)  # the last token is not read
    return beyond, sum(len(document.prompt) > context for document in documents)


def bos_of(tokenizer: PreTrainedTokenizerBase) -> Bos:
    """What becomes of the token that begins texts."""
    begin = tokenizer.bos_token_id
    if begin is None:
        return Bos(None, added=False, in_template=None)
    in_template = None
    if tokenizer.chat_template:
        with contextlib.suppress(AlphaprofError):  # some templates want more than one turn
            text = render_chat(tokenizer, [{"role": "user", "content": "a"}], {}, "one turn")
            in_template = bool(tokenizer(text, add_special_tokens=False)["input_ids"][:1] == [begin])
    return Bos(str(tokenizer.bos_token), bool(tokenizer("a")["input_ids"][:1] == [begin]), in_template)


def differing_specials(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> tuple[Special, ...]:
    """The special tokens that two tokenizers name differently."""
    pairs = [(name.removesuffix("_token"), getattr(target, name), getattr(draft, name)) for name in SPECIAL]
    return tuple(Special(name, ours, theirs) for name, ours, theirs in pairs if ours != theirs)


def _begins(prompt: Ids, begin: int | None, times: int) -> bool:
    return bool(prompt[:times].tolist() == [begin] * times)


def _prompts(options: ProfileOptions, index: int) -> str:
    if options.continuation_of(index).kind == "text":
        return "text"
    names = ("chat", "messages", "prompt_ids", "prompt")
    return next(name for name in names if getattr(options.data[index], name) not in (None, False))


def _planned(source: SourceOptions, seen: int, rows: int) -> int | None:
    """How many documents a run will take from a source, if what follows is left out as often as in its first `rows`."""
    if seen < FIRST:
        return seen
    if source.limit and not isinstance(source.domain, str):
        return None  # so many of each domain
    count = row_count(Path(source.path))
    if count is None:
        return source.limit
    return min(max(seen, round(count * seen / rows)), source.limit or count)


def try_out(
    loaded: Loaded, sources: Sequence[Sequence[Document]], free: int | None
) -> tuple[SelfDraft, NoiseFloor | None, Speed, Storage]:
    """Generate and score the beginnings of some documents as the run would; `free`: bytes on its disk, if that is known.
    There is no noise floor where there is but one document.

    Raises `LogitsNotFinite` and `OutOfMemory`.
    """
    every = in_turns(sources)
    documents = chosen(every, loaded.target, loaded.options.batch_tokens)
    short = [_shortened(document, min(NEW_TOKENS, new_tokens(document))) for document in documents]
    written = [document for document in short if document.given is None]
    texts, prompts = _written(loaded, written)
    size, generated = _writing(loaded, every)
    if not all(document.greedy for document in written) or len(written) < len(short):
        greedy = _generated(loaded, [_greedy(document, loaded.target.context) for document in short])
    else:
        greedy = texts
    logged = [continuations.given(item, loaded.target.eos) for item in short if item.given is not None]
    texts = sorted([*texts, *logged], key=NUMBER)
    # First one text alone: a GPU's kernels are compiled when they are needed.
    _scored(loaded.scorer, texts[:1], loaded.options.batch_tokens)
    start = time.perf_counter()
    scored = _scored(loaded.scorer, texts, loaded.options.batch_tokens)
    rate = sum(item.tokens for item in texts) / (time.perf_counter() - start)
    positions = sum(len(item.ids) for item in texts)
    timing, untimed = _timing(loaded, documents)
    costs = loaded.options.costs
    budget = costs.budget if costs.source == "measured" else None
    speed = Speed(len(short), positions, prompts, generated, size, rate, timing, untimed, budget)
    noise = noise_floor(loaded.scorer.target, greedy, loaded.scorer.width) if len(greedy) > 1 else None
    return self_draft(loaded, greedy), noise, speed, _storage(loaded, texts, scored, free)


def free_memory(device: torch.device) -> int | None:
    """Bytes that are free on a device, what torch holds for later included; None: not known."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            kilobytes = next(line.split()[1] for line in file if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
    return 1024 * int(kilobytes)


@contextlib.contextmanager
def peak_of(device: torch.device) -> Iterator[list[int | None]]:
    """In its one element, at the end of the block, the most bytes of a GPU that were allocated in it; None on a CPU."""
    most: list[int | None] = [None]
    if device.type != "cuda":
        yield most
        return
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    yield most
    most[0] = torch.cuda.max_memory_allocated(device) - before


def in_turns(sources: Sequence[Sequence[Document]]) -> list[Document]:
    """Documents round robin over their sources, as the run takes them, numbered anew."""
    turns = [document for turn in itertools.zip_longest(*sources) for document in turn if document is not None]
    return [dataclasses.replace(document, document=number) for number, document in enumerate(turns)]


def chosen(documents: Sequence[Document], target: Model, batch_tokens: int) -> list[Document]:
    """The first documents that are tried out: as many as the limits of this module allow."""
    device = target.device.type
    most = min(batch_tokens, PADDED.get(device, PADDED["cuda"]))
    if device == "cpu":
        most = min(most, PARAMETER_TOKENS // (target.parameters or 1))
    longest, count = 0, 0
    for document in documents[:DOCUMENTS]:
        longest = max(longest, len(document.prompt) + NEW_TOKENS)
        if count >= 2 and longest * (count + 1) > most:
            break
        count += 1
    return list(documents[:count])


def self_draft(loaded: Loaded, texts: Sequence[Continuation]) -> SelfDraft:
    """The target as its own draft, scored and logged like any other; through layer skip where drafts share its layers."""
    target = loaded.target
    shared = any(draft.facts().shares_target_weights for draft in loaded.drafts)
    twin = layer_skip(SELF, target, []) if shared else as_draft(target, SELF)
    scorer = Scorer(target, [twin], token_count(loaded.tokenizer))
    arrays = _scored(scorer, texts, loaded.options.batch_tokens)[SELF]
    log = position_table(texts, arrays, LogRules(("strict",)), SELF)
    column = {name: log[name].to_numpy() for name in ("accept_strict", "draft_top", "target_top", "target_top_prob")}
    accepted = column["accept_strict"] == 1.0
    # A token of probability 0 is no near-tie of anything.
    token = np.maximum(log["target_token_prob"].to_numpy(), np.finfo(np.float32).tiny)
    near = ~accepted & (np.log(column["target_top_prob"] / token) <= NOISE[target.dtype])
    agreeing = column["draft_top"] == column["target_top"]
    return SelfDraft(shared, len(log), int(agreeing.sum()), int(accepted.sum()), int(near.sum()))


def noise_floor(head: TeacherForced, texts: Sequence[Continuation], width: int) -> NoiseFloor:
    """The target's logits over `width` ids for texts one by one, and for all of them padded in one batch."""
    layout = Layout.of(texts)
    together = head.rows(layout.ids, layout.row, layout.column)
    flips = near = 0
    logit = probability = 0.0
    noise = NOISE[head.model.dtype]
    for index, text in enumerate(texts):
        single = Layout.of([text])
        one = head.logits(head.rows(single.ids, single.row, single.column))[:, :width].float()
        other = head.logits(together[(layout.row == index).to(together.device)])[:, :width].float()
        first, second = one.topk(2, dim=1).values.unbind(1)
        flips += int((one.argmax(1) != other.argmax(1)).sum())
        near += int((first - second <= noise).sum())
        logit = max(logit, float((one - other).abs().max()))
        probability = max(probability, float((one.softmax(1) - other.softmax(1)).abs().max()))
    return NoiseFloor(len(texts), len(layout.token), flips, near, noise, logit, probability)


def _written(loaded: Loaded, documents: Sequence[Document]) -> tuple[list[Continuation], float | None]:
    """Texts that the target writes, and prompt tokens read a second (None: it writes none)."""
    if not documents:
        return [], None
    texts = _generated(loaded, documents)  # first: what a model does for the first time takes longer
    first = [dataclasses.replace(document, max_new_tokens=1) for document in documents]
    reading = seconds(loaded.target.device, lambda: _generated(loaded, first))
    return texts, sum(len(document.prompt) for document in documents) / reading


def _writing(loaded: Loaded, documents: Sequence[Document]) -> tuple[int, float | None]:
    """Documents that the run will generate at a time, and tokens a second (None: not known), both at short contexts."""
    batches = list(generation_batches(documents[: loaded.options.shard_documents], loaded.options.batch_tokens))
    if not batches:
        return 0, None
    size = max(1, round(sum(map(len, batches)) / len(batches)))
    try:
        steps = stepper(loaded.target, np.resize(documents[0].prompt, CONTEXT), size, 2, Stepper.mode)
    except NotTimed:
        return size, None
    return size, size / statistics.median(steps.step(1) for _ in range(STEPS))


def _generated(loaded: Loaded, documents: Sequence[Document]) -> list[Continuation]:
    texts: list[Continuation] = []
    target, width = loaded.target, loaded.scorer.width
    for batch in generation_batches(documents, loaded.options.batch_tokens):
        written, _ = halving(lambda items: continuations.generate(target, items, width), batch, _described)
        texts += written
    return sorted(texts, key=NUMBER)


def _scored(scorer: Scorer, texts: Sequence[Continuation], batch_tokens: int) -> dict[str, dict[int, Arrays]]:
    """Arrays of every draft by document number."""
    scored: dict[str, dict[int, Arrays]] = {}
    for batch in continuations.scoring_batches(texts, batch_tokens):
        pieces, _ = halving(lambda items: [(items, scorer.score(items))], batch, lambda item: _described(item.document))
        for items, arrays in pieces:
            for draft, columns in arrays.items():
                scored.setdefault(draft, {}).update(by_document(items, columns))
    return scored


def _storage(
    loaded: Loaded, texts: Sequence[Continuation], scored: dict[str, dict[int, Arrays]], free: int | None
) -> Storage:
    """The log of these texts as Parquet: what half of its rows take less tells rows from what every file has."""
    held = loaded.scorer.extras.log_rules(loaded.options.rules)
    rows = sum(len(text.ids) for text in texts)
    whole = half = 0.0
    names: set[str] = set()
    for draft in loaded.drafts:
        facts = draft.facts()
        rules, flags = held.of(facts), {"has_distribution": facts.has_distribution, "starts_matter": facts.starts_matter}
        table = position_table(texts, scored[draft.name], rules, draft.name, None, **flags)
        whole += table_content(table, rules.columns).size
        half += table_content(table.slice(0, rows // 2), rules.columns).size
        names.update(table.column_names)
    position = max(0, whole - half) / (rows - rows // 2)
    return Storage(position, max(0.0, whole - position * rows), len(names), free)


def _timing(loaded: Loaded, documents: Sequence[Document]) -> tuple[float | None, str | None]:
    """What timing the steps takes, or why there will be no step times."""
    costs = loaded.options.costs
    if costs.source != "measured":
        return None, "costs.source is none" if costs.source == "none" else None
    text = np.concatenate([document.prompt for document in documents])
    subjects = latency.Subjects(loaded.target, loaded.drafts, text, max(loaded.options.gammas))
    try:
        return latency.rehearsed(subjects, costs), None
    except NotTimed as error:
        return None, str(error)


def _shortened(document: Document, count: int) -> Document:
    if document.given is None:
        return dataclasses.replace(document, max_new_tokens=count)
    return dataclasses.replace(document, given=document.given[:count], cut=len(document.given) > count or document.cut)


def _greedy(document: Document, context: int | None) -> Document:
    """The same prompt with greedy text of the target's own: as long as its own would be, or NEW_TOKENS for a logged response
    where they fit, so that responses of all lengths are written in one batch.
    """
    wanted = new_tokens(document)
    if document.given is not None:
        wanted = NEW_TOKENS if context is None else max(wanted, min(NEW_TOKENS, context - len(document.prompt)))
    own = dataclasses.replace(document, given=None, cut=False, max_new_tokens=wanted)
    return dataclasses.replace(own, kind="greedy", on_policy=True, processing=None, seed=None)


def _described(document: Document) -> str:
    return f"document {document.document} ({document.domain}, {len(document.prompt)} of {length(document)} tokens prompt)"
