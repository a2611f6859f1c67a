"""How fast a GPU is at what the product does: its scoring, its kernels and its runs.

Seconds are those between two events on the GPU's own time line (on a CPU by the wall clock), medians of several after one to
warm up; versions that are compared take turns. Aims are judged on a GPU with real shapes only. Tiny shapes on a CPU show
that the parts run: their figures mean nothing.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median

import numpy as np
import torch

from alphaprof.profiling.models.draft import Arrays, DraftPass
from alphaprof.profiling.models.kinds import PromptLookup, layer_skip
from alphaprof.profiling.models.load import Model
from alphaprof.profiling.models.processing import PLAIN
from alphaprof.profiling.models.teacher_forced import recorded
from alphaprof.profiling.scoring import dispatch
from alphaprof.profiling.scoring.scorer import Layout, Scorer, by_document, position_table
from alphaprof.profiling.scoring.statistics import ProcessedLogits
from alphaprof.profiling.texts.continuations import Continuation, generate, generation_batches, scoring_batches
from alphaprof.profiling.texts.corpus import Document
from alphaprof.profiling.timing.steppers import seconds
from alphaprof.rules import DEFAULT_RULES
from alphaprof.run.parquet import table_content
from scripts.gpu.setting import Line, Setting, documents, random_texts

TARGET, DRAFT = "llama-3.1-8b", "llama-3.2-1b"
MOST_STATISTICS, MOST_SCORING = 0.10, 1.05


def within(setting: Setting, most: float) -> Setting:
    """The same setting, which ends after `most` seconds at the latest: what is left is for the parts that follow."""
    return dataclasses.replace(setting, stop=min(setting.stop, time.monotonic() + most))


def judged(setting: Setting, good: bool) -> bool | None:
    """Whether an aim is reached; None where figures mean nothing."""
    return good if setting.on_gpu and not setting.tiny else None


def timed(setting: Setting, work: Callable[[], object], repeats: int = 5) -> float:
    """Median seconds of some work, once it has warmed up."""
    work()
    return median(seconds(setting.device, work) for _ in range(1 if setting.tiny else repeats))


def in_turn(
    ways: Mapping[str, Callable[[], object]], repeats: int, measure: Callable[[Callable[[], object]], float]
) -> dict[str, list[float]]:
    """What several ways of the same work take, by `measure`, in turn and each second time in the other order."""
    for work in ways.values():
        work()  # libraries and loops are loaded at their first use
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats):
        for name in list(ways)[:: 1 if repeat % 2 else -1]:
            taken[name].append(measure(ways[name]))
    return taken


def ratios(taken: Mapping[str, Sequence[float]], name: str, base: str) -> tuple[float, float, float]:
    """Median, least and largest ratio of two ways within one turn."""
    found = np.array(taken[name]) / np.array(taken[base])
    return float(np.median(found)), float(found.min()), float(found.max())


@torch.inference_mode()
def bare(scorer: Scorer, batch: Sequence[Continuation], rows_at_once: int, drafts: bool = True) -> None:
    """Logits of each model (without `drafts`: of the target) at the scored positions of a batch, of a head at every depth;
    nothing is made of them. Each model runs whole, whatever layers it shares with the target.
    """
    layout, others = Layout.of(batch), scorer.drafts if drafts else []
    first = int(layout.column.min())
    reads = {count for each in others if each.depths > 1 for count in each.reads}
    with recorded(scorer.target.model.network.base_model, sorted(reads)) as known:
        _logits(scorer.target, scorer.target.rows(layout.ids, layout.row, layout.column), rows_at_once)
    for draft in others:
        states = {count: known[count] for count in draft.reads} if draft.depths > 1 else None
        _logits(draft, draft.rows(layout.ids, layout.row, layout.column, states, first), rows_at_once)


def _logits(one: DraftPass, rows: torch.Tensor, rows_at_once: int) -> None:
    for depth in range(1, one.depths + 1):
        for start in range(0, len(rows), rows_at_once):
            one.logits(rows[start : start + rows_at_once], depth)


def scoring(setting: Setting) -> Iterator[Line]:
    """Scoring as a run does it against the models' bare forward passes over the same batches."""
    setting = within(setting, 45)
    target = setting.loaded(TARGET, setting.dtypes[0])
    draft = setting.loaded(DRAFT, setting.dtypes[0], "draft", seed=1)
    batches = scored_batches(setting, target)
    scorer = Scorer(target, [draft], target.vocabulary)
    rows = sum(len(item.ids) for batch in batches for item in batch)
    size = f"{rows} positions in {len(batches)} batches"
    found = against_bare(setting, scorer, batches, 5)
    ok = judged(setting, found[0] <= MOST_SCORING)
    yield Line(f"scoring / bare forwards, {TARGET} with {DRAFT}, {size}: {spread(found)}", {"ratio": found}, ok)
    yield statistics_share(setting, scorer, batches[0])


def scored_batches(setting: Setting, target: Model) -> list[list[Continuation]]:
    """Two batches of about 16,000 tokens."""
    count, prompts, new, tokens = (4, (8, 24), 8, 64) if setting.tiny else (36, (256, 1024), 256, 16_384)
    texts = random_texts(documents(count, prompts, new, ids=target.vocabulary), target.vocabulary)
    return list(scoring_batches(texts, tokens))[:2]


def against_bare(
    setting: Setting, scorer: Scorer, batches: Sequence[Sequence[Continuation]], repeats: int
) -> tuple[float, float, float]:
    """Median, least and largest ratio of scoring to bare forward passes."""
    ways = {
        "bare": lambda: [bare(scorer, batch, scorer.head_rows) for batch in batches],
        "scoring": lambda: [scorer.score(batch) for batch in batches],
    }
    taken = in_turn(ways, 1 if setting.tiny else repeats, lambda work: seconds(setting.device, work))
    return ratios(taken, "scoring", "bare")


def spread(found: tuple[float, float, float]) -> str:
    """A ratio with the least and the largest of its turns."""
    return f"{found[0]:.3f} ({found[1]:.3f} to {found[2]:.3f})"


@torch.inference_mode()
def statistics_share(setting: Setting, scorer: Scorer, batch: Sequence[Continuation]) -> Line:
    """What a batch's statistics take alone, as a share of the target's forward passes over it."""
    layout = Layout.of(batch)
    count = min(scorer.head_rows, len(layout.token))
    logits = [
        head.logits(head.rows(layout.ids, layout.row, layout.column)[:count]) for head in (scorer.target, *scorer.drafts)
    ]
    token = layout.token[:count].to(setting.device)
    forward = timed(setting, lambda: bare(scorer, batch, scorer.head_rows, drafts=False))
    chunk = timed(setting, lambda: scorer._statistics(logits[0], logits[1:], [token], PLAIN))
    share = chunk * len(layout.token) / count / forward
    reason = dispatch.why_unavailable(setting.device)
    words = f"; torch's, for no kernel runs: {reason}" if reason else ""
    ok = judged(setting, share <= MOST_STATISTICS and reason is None)
    figures = {"share": share, "ms_of_chunk": 1000 * chunk, "rows_of_chunk": count, "forward_ms": 1000 * forward}
    text = (
        f"statistics take {100 * share:.1f} % of the target's forward passes ({1000 * chunk:.2f} ms for {count} rows{words})"
    )
    return Line(text, figures, ok)


def kernels(setting: Setting) -> Iterator[Line]:
    """Statistics kernels alone, as a share of what the memory's bandwidth allows."""
    from alphaprof.profiling.scoring import gpu_statistics as triton_statistics

    setting = within(setting, 50)
    copied = bandwidth(setting)
    widths = (320, 257) if setting.tiny else (128_256, 32_000, 50_257, 151_936, 262_144)
    rows = 1 if setting.tiny else 1024
    for width in widths:
        if setting.left() <= 0:
            yield Line(f"kernels, V {width:,}: no time left")
            continue
        taken = {
            count: kernel_seconds(setting, triton_statistics.measured, width, count)
            for count in (rows, 4 * rows)[: 1 if setting.tiny else 2]
        }
        read = 4 * width * 2  # bytes a row: the target's twice, the draft's twice
        shares = {count: read * count / took / copied for count, took in taken.items()}
        words = ", ".join(f"{100 * share:.0f} % in calls of {count} rows" for count, share in shares.items())
        text = f"kernels, V {width:,}: {words} of the bandwidth of a copy ({copied / 1e12:.2f} TB/s)"
        figures = {"width": width, "share": shares, "seconds": taken, "bytes_a_row": read, "copy": copied}
        yield Line(text, figures)
        setting.clean()


def compiled(setting: Setting) -> Iterator[Line]:
    """The reference statistics by `torch.compile` against the kernels, which are worth their lines beyond 1.5 times."""
    from alphaprof.profiling.scoring import gpu_statistics as triton_statistics
    from alphaprof.profiling.scoring import statistics

    setting = within(setting, 60)
    by_torch = torch.compile(statistics.columns, dynamic=False, backend="eager" if setting.tiny else "inductor")
    rows = 2 if setting.tiny else 1024
    for width in (320,) if setting.tiny else (128_256, 32_000):
        ways = {
            name: lambda work=work, width=width: kernel_seconds(setting, work, width, rows)
            for name, work in (("kernels", triton_statistics.measured), ("compiled", by_torch))
        }
        taken = in_turn(ways, 1 if setting.tiny else 3, lambda work: work())
        found = ratios(taken, "compiled", "kernels")
        text = f"statistics, V {width:,}, {rows} rows: compiled torch takes {spread(found)} times as long as the kernels"
        yield Line(text, {"width": width, "ratio": found, "seconds": taken})
        setting.clean()


def bandwidth(setting: Setting) -> float:
    """Bytes a second that a large copy on the device reads and writes."""
    size = 2**32 if setting.on_gpu else 2**22
    source = torch.ones(size, dtype=torch.uint8, device=setting.device)
    target = torch.empty_like(source)
    return 2 * size / timed(setting, lambda: target.copy_(source))


@torch.inference_mode()
def kernel_seconds(setting: Setting, work: Callable[..., object], width: int, rows: int) -> float:
    """Median seconds of a call for a target and a draft with logits of `rows` rows. Several pairs take turns, so that none
    of them is in the device's cache when it is read.
    """
    pairs = max(1, (2**30 if setting.on_gpu else 1) // (4 * width * rows))
    how = {"device": setting.device, "dtype": torch.bfloat16}
    logits = [(4 * torch.randn(rows, width, **how), 4 * torch.randn(rows, width, **how)) for _ in range(pairs)]
    token = torch.randint(0, width, (rows,), device=setting.device)

    def calls() -> None:
        for ours, theirs in logits:
            work(ProcessedLogits(ours), [ProcessedLogits(theirs)], token, [])

    return timed(setting, calls, 7) / pairs


def run(setting: Setting) -> Iterator[Line]:
    """Positions a second of a run, and what it spends them on. Generation, scoring, tables and files as in `profile`, one
    after the other; without loading, step times and totals.
    """
    setting = within(setting, 45)
    target = setting.loaded(TARGET, setting.dtypes[0])
    draft = setting.loaded(DRAFT, setting.dtypes[0], "draft", seed=1)
    layers = len(target.network.base_model.layers)
    skip = layer_skip("skip", target, list(range(layers // 2, layers - 1, 2)))
    lookup = PromptLookup("lookup", 3, target.eos, target.vocabulary, "bfloat16")
    count, prompts, new = (4, (8, 24), 8) if setting.tiny else (64, (256, 768), 128)
    asked = documents(count, prompts, new, ids=target.vocabulary)
    profiled(setting, Scorer(target, [draft, skip, lookup], target.vocabulary), asked[:2], 65_536)
    for drafts, some, tokens in (
        ([draft, skip, lookup], asked, 65_536),
        ([draft], asked, 65_536),
        ([draft], asked[::4], 8192),
    ):
        if setting.left() <= 0:
            yield Line(f"a run with {len(drafts)} drafts, batches of {tokens:,} tokens: no time left")
            continue
        spent, positions = profiled(setting, Scorer(target, drafts, target.vocabulary), some, tokens)
        total = sum(spent.values())
        shares = ", ".join(f"{name} {100 * took / total:.0f} %" for name, took in spent.items())
        names = " + ".join(item.name for item in drafts)
        text = (
            f"a run with {len(drafts)} drafts ({names}), batches of {tokens:,} tokens: {positions / total:,.0f} positions/s"
        )
        figures = {"drafts": len(drafts), "batch_tokens": tokens, "positions": positions, "seconds": spent}
        yield Line(f"{text}: {shares}", figures)


def profiled(setting: Setting, scorer: Scorer, asked: Sequence[Document], batch_tokens: int) -> tuple[dict[str, float], int]:
    """Seconds of what a run does by phase, and how many positions it has."""
    scored: dict[str, dict[int, Arrays]] = {}
    texts: list[Continuation] = []

    def generating() -> None:
        for batch in generation_batches(asked, batch_tokens):
            texts.extend(generate(scorer.target.model, batch, scorer.width))
        texts.sort(key=lambda item: item.document.document)

    def scoring_them() -> None:
        for batch in scoring_batches(texts, batch_tokens):
            for draft, arrays in scorer.score(batch).items():
                scored.setdefault(draft, {}).update(by_document(batch, arrays))

    def writing() -> None:
        rules = scorer.extras.log_rules(DEFAULT_RULES)
        for draft, arrays in scored.items():
            lookup = draft in {each.name for each in scorer.without}
            table = position_table(texts, arrays, rules, draft, has_distribution=not lookup, starts_matter=lookup)
            (setting.folder / f"{draft}.parquet").write_bytes(table_content(table, rules.columns))

    phases = {"generation": generating, "scoring": scoring_them, "writing": writing}
    spent = {name: seconds(setting.device, work) for name, work in phases.items()}
    return spent, sum(len(item.ids) for item in texts)
