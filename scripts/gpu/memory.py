"""What happens when it runs out, and whether anything waits for the device."""

from __future__ import annotations

import gc
import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import autograd
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from alphaprof.errors import OutOfMemory
from alphaprof.profiling.decoding.speculative import Speculation
from alphaprof.profiling.models.kinds import PromptLookup, layer_skip
from alphaprof.profiling.models.load import Model
from alphaprof.profiling.models.processing import Processing
from alphaprof.profiling.scoring.scorer import Extras, Scorer
from alphaprof.profiling.texts import continuations as batching
from alphaprof.profiling.texts.continuations import Continuation, generate
from alphaprof.rules import DEFAULT_RULES, rules_of
from scripts.gpu.setting import Line, Setting, documents, random_texts

CERTIFIED = Extras.of(DEFAULT_RULES, certificates=True)
NUCLEUS = Processing(0.8, 0, 0.95)
GIB = 2**30
WAITS = {f"aten.{name}" for name in ("item", "_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select")}
BY_MASK = ("aten.index", "aten.index_put", "aten.index_put_")  # which look for the places of a mask


def most_allocated(device: torch.device, work: Callable[[], object]) -> int:
    """The most bytes that are allocated while `work` runs, beyond those that are before it.

    On a CPU these are torch's own, as its profiler sees every allocation; numpy's are not among them.
    """
    if device.type == "cuda":
        gc.collect()
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with autograd.profiler.profile(profile_memory=True) as recorded:  # the plain one: it sums nothing up at its end
        work()
    events, seen = list(recorded.kineto_results.experimental_event_tree()), []
    while events:
        event = events.pop()
        events += event.children
        if event.tag.name == "Allocation":
            seen.append((event.start_time_ns, event.extra_fields.alloc_size))
    return max(itertools.accumulate(size for _, size in sorted(seen, key=lambda each: each[0])), default=0)


def dtype_of(setting: Setting) -> torch.dtype:
    """bfloat16 on a GPU; a CPU's matrix products in it take copies of their own in float32."""
    return torch.bfloat16 if setting.on_gpu else torch.float32


def halving(setting: Setting) -> Iterator[Line]:
    """Batches that do not fit are halved, with the same results, and the memory comes back; one document that does not fit
    ends in `OutOfMemory`.
    """
    target = setting.loaded("llama-3.2-1b", torch.float32)
    draft = setting.loaded("qwen3-0.6b", torch.float32, "draft", vocab_size=target.vocabulary)
    asked = documents(16, *(((17, 24), 8) if setting.tiny else ((193, 200), 24)))
    alone = documents(
        1, *(((24, 24), 8) if setting.tiny else ((4000, 4000), 24))
    )  # more than what is free between the weights
    scorer = Scorer(target, [draft], target.vocabulary)
    works: dict[str, tuple[Callable[[list[Any]], list[Any]], list[Any], list[Any]]] = {
        "generation": (lambda some: generate(target, some, scorer.width), asked, alone),
        "scoring": (lambda some: [scorer.score(some)], list(random_texts(asked)), list(random_texts(alone))),
    }
    for what, (work, every, single) in works.items():
        work(every[:1])
        whole: list[Any] = []
        need = most_allocated(setting.device, lambda: whole.extend(work(every)))  # noqa: B023 (called here)
        before = _in_use(setting)
        with _limited(setting, work, 0.75 * need, len(every) // 2) as limited:
            halves, times = batching.halving(limited, every, str)
        back = _in_use(setting) - before
        text, figures, right = _equal(what, whole, halves)
        figures |= {"need": need, "halved": times, "left_behind": back}
        yield Line(f"{text}; halved {times} times, {back} bytes not given back", figures, right and times > 0 and back <= 0)
        try:
            with _limited(setting, work, 0.001 * need, 0) as limited:
                batching.halving(limited, single, lambda _: "document 0")
            yield Line(f"{what} of one document in too little memory ended without OutOfMemory", ok=False)
        except OutOfMemory as error:
            yield Line(f"{what} of one document in too little memory: {error.message}", ok="document 0" in error.message)


@contextmanager
def _limited(
    setting: Setting, work: Callable[[list[Any]], list[Any]], room: float, rows: int
) -> Iterator[Callable[[list[Any]], list[Any]]]:
    """The work with `room` bytes beside what is allocated, on a GPU; on a CPU out of memory above some rows."""
    if not setting.on_gpu:

        def raising(items: list[Any]) -> list[Any]:
            if len(items) > rows:
                raise torch.OutOfMemoryError("more rows than the imitated memory holds")
            return work(items)

        yield raising
        return
    gc.collect()
    torch.cuda.empty_cache()
    index = setting.device.index or 0  # this one function takes no device without a number
    total = torch.cuda.get_device_properties(index).total_memory
    # Gaps between the weights are free although they count as reserved: on an H200 they once held the whole batch.
    room -= torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)
    limit = torch.cuda.memory_reserved(index) + max(0.0, room)
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), index)
    try:
        yield work
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, index)


def _in_use(setting: Setting) -> int:
    """Bytes allocated on a GPU; 0 on a CPU, where nothing counts them."""
    gc.collect()
    if not setting.on_gpu:
        return 0
    torch.cuda.synchronize(setting.device)
    return torch.cuda.memory_allocated(setting.device)


def _equal(what: str, whole: list[Any], halves: list[Any]) -> tuple[str, dict[str, Any], bool]:
    """Texts that are equal, or columns that are close, in words and figures, and whether all are."""
    if what == "generation":
        equal = sum(np.array_equal(one.ids, other.ids) for one, other in zip(whole, halves, strict=True))
        return f"{equal} of {len(whole)} texts are those without a limit", {"equal": equal}, equal == len(whole)
    largest, worst = 0.0, ""
    for draft, columns in whole[0].items():
        for name, values in columns.items():
            found = np.concatenate([part[draft][name] for part in halves]).astype(float)
            # Ranks and ids of near-ties may change places; probabilities, entropies and divergences may not.
            if values.dtype == np.float32:
                with np.errstate(invalid="ignore"):
                    apart = np.where(found == values, 0.0, np.abs(found - values) / (1 + np.abs(values)))
                most = float(np.nan_to_num(apart, nan=np.inf).max())
                largest, worst = max((largest, worst), (most, f"{draft} {name}"))
    return f"columns differ by {largest:.2g} of 1 + their size at most ({worst})", {"largest": largest}, largest < 1e-3


def waiting(setting: Setting) -> Iterator[Line]:
    """Nothing waits for the device in the loop over a batch; how often everything around it and a decoded round do."""
    target = setting.loaded("llama-3.1-8b", dtype_of(setting))
    draft = setting.loaded("llama-3.2-1b", dtype_of(setting), "draft")
    lookup = PromptLookup("ngram", 3, (), target.vocabulary, str(dtype_of(setting)).removeprefix("torch."))
    drafts = [draft, layer_skip("skip", target, [1]), lookup]
    # A CPU looks at a row again where the largest 256 logits do not hold top_p.
    drawn = NUCLEUS if setting.on_gpu else Processing(0.8, 20, 1.0, 0.05)
    for settings in (None, drawn):
        asked = documents(*((8, (33, 40), 24) if setting.tiny else (32, (313, 320), 192)), settings)
        scorer = Scorer(target, drafts, target.vocabulary, extras=CERTIFIED)
        if setting.tiny:
            scorer.head_rows, scorer.statistics_rows = 64, 16
        yield _loop(setting, scorer, random_texts(asked))
    yield _decoding(setting, target, draft)


def _loop(setting: Setting, scorer: Scorer, batch: list[Continuation]) -> Line:
    """Waits in the loop over the chunks of a batch, and in all of `score`, which has at least one: that of its end."""
    scorer.score(batch)  # libraries load at the first use of a kernel, and that waits
    chunk, inside, chunks = scorer._chunk, Counter[str](), []

    def watched(*given: Any) -> Any:
        with counted(setting) as waits:
            columns = chunk(*given)
        inside.update(waits)
        chunks.append(1)
        return columns

    with counted(setting) as around:
        scorer.score(batch)
    scorer._chunk = watched  # type: ignore[method-assign]
    try:
        scorer.score(batch)
    finally:
        scorer._chunk = chunk  # type: ignore[method-assign]
    positions = sum(len(each.ids) for each in batch)
    kind = "greedy" if batch[0].document.processing is None else "drawn"
    figures = {"chunks": len(chunks), "inside": dict(inside), "around": dict(around), "positions": positions}
    text = f"{kind} text, {positions} positions in {len(chunks)} chunks: {inside.total()} waits in the loop"
    return Line(
        f"{text}, {around.total()} in all of score(){_places(around)}",
        figures,
        not inside and bool(around) and len(chunks) > 1,
    )


def _decoding(setting: Setting, target: Model, draft: Model) -> Line:
    """Waits a round of speculative decoding."""
    engine = Speculation(target, draft, rules_of(["strict"])[0], 4)
    prompt, new = documents(1, (32, 32), 1)[0].prompt, 12 if setting.tiny else 48
    engine.decode(prompt, 4)
    with counted(setting) as waits:
        decoded = engine.decode(prompt, new)
    rounds = max(1, len(decoded.drafted))
    figures = {"rounds": rounds, "waits": dict(waits), "waits_a_round": waits.total() / rounds}
    return Line(f"decoding waits {waits.total() / rounds:.1f} times a round, {rounds} rounds{_places(waits)}", figures)


def _places(waits: Counter[str]) -> str:
    return "".join(f"; {count} at {place}" for place, count in waits.most_common(2))


class _Reads(TorchDispatchMode):
    """Counts the operators by which the host reads a value, which would wait on a GPU."""

    def __init__(self, seen: Counter[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operator."""
        name = str(func).rpartition(".")[0]
        masked = name in BY_MASK and any(each is not None and each.dtype == torch.bool for each in args[1])
        if name in WAITS or masked:
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


class _Copies(TorchFunctionMode):
    """Counts the methods that copy values to the host, which are no operators on a CPU."""

    def __init__(self, seen: Counter[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the function."""
        if getattr(func, "__name__", "") in ("tolist", "cpu"):
            self.seen[func.__name__] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted(setting: Setting) -> Iterator[Counter[str]]:
    """Counts how often the host waits for the device, by place; on a CPU, by operators that would."""
    seen: Counter[str] = Counter()
    if not setting.on_gpu:
        with _Reads(seen), _Copies(seen):
            yield seen
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield seen
        finally:
            torch.cuda.set_sync_debug_mode("default")
            for warning in caught:
                if "called a synchronizing" in str(warning.message):
                    seen["/".join(warning.filename.split("/")[-2:]) + f":{warning.lineno}"] += 1
