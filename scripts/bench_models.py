"""What a profile's measurement costs: against its bare forward passes, and against what one would do without it.

Everything runs in this process on the same prompts, on as many threads as torch is given. On one thread seconds are process
CPU time, else time by the clock.

`scoring`: a scoring pass over batches as a run makes them. `bare`: each model's own forward over the same batches with
logits at the scored positions, and nothing made of them. A draft that skips layers runs whole in both; what it saves where
it goes on from the target's hidden states is `sharing`.

`run`: writing the texts, scoring them, the log's tables, and totals of all default rules at every gamma. `assisted`: Hugging
Face assisted generation of the same prompts with the first draft model, one run a gamma, which gives the rounds of one rule.
`alone`: one prompt at a time, writing the target's greedy text and reading it with the draft for its top token.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.utils import logging

from alphaprof.analysis.totals import Request, shard_totals
from alphaprof.config import ProfileOptions
from alphaprof.profiling.continuations import Continuation, continuation_table, generate, generation_batches, scoring_batches
from alphaprof.profiling.corpus import Document
from alphaprof.profiling.models import Model
from alphaprof.profiling.pipeline import load
from alphaprof.profiling.record import by_document, position_table
from alphaprof.profiling.scoring import Layout, Scorer
from alphaprof.profiling.shards import Loaded, Progress
from alphaprof.profiling.statistics import columns

Figures = dict[str, Any]


@dataclass(frozen=True)
class Bench:
    """A loaded profile, its first documents, and how often passes over them are repeated."""

    loaded: Loaded
    documents: list[Document]
    repeats: int

    @classmethod
    def of(cls, options: ProfileOptions, count: int, repeats: int, progress: Progress) -> Bench:
        """The profile's documents are taken evenly from all of them."""
        logging.set_verbosity_error()  # what generate() advises its callers would stand in the middle of the figures
        loaded = load(options, progress)
        every = list(loaded.documents)
        chosen = [every[index] for index in np.linspace(0, len(every) - 1, min(count, len(every))).astype(int)]
        return cls(loaded, chosen, repeats)

    def texts(self) -> list[Continuation]:
        """The documents' texts, written in batches as a run does it, in document order."""
        found: list[Continuation] = []
        for batch in generation_batches(self.documents, self.loaded.options.batch_tokens):
            found += generate(self.loaded.target, batch, self.loaded.scorer.width)
        return sorted(found, key=lambda item: item.document.document)

    def batches(self, texts: Sequence[Continuation]) -> list[list[Continuation]]:
        """Texts in the batches that they are scored in."""
        return list(scoring_batches(texts, self.loaded.options.batch_tokens))


def seconds(work: Callable[[], object]) -> float:
    """What some work takes; see the head of this file."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    work()
    return clock() - start


@torch.inference_mode()
def bare(scorer: Scorer, batch: Sequence[Continuation]) -> None:
    """Logits of each model at the scored positions of a batch."""
    layout = Layout.of(batch)
    for head in (scorer.target, *scorer.drafts):
        rows = head.rows(layout.ids, layout.row, layout.column)
        for start in range(0, len(rows), scorer.head_rows):
            head.logits(rows[start : start + scorer.head_rows])


def scoring_figures(bench: Bench, texts: Sequence[Continuation]) -> Figures:
    """Milliseconds a position, and ratios within one repeat: medians, least and largest."""
    scorer, batches = bench.loaded.scorer, bench.batches(texts)
    positions = sum(len(item.ids) for item in texts)
    rests = [head.rest for head in scorer.drafts]

    def score(shared: bool) -> None:
        for head, rest in zip(scorer.drafts, rests, strict=True):
            head.rest = rest if shared else None
        for batch in batches:
            scorer.score(batch)

    ways = {"bare": lambda: [bare(scorer, batch) for batch in batches], "scoring": lambda: score(shared=False)}
    if any(rests):
        ways["sharing"] = lambda: score(shared=True)
    for work in ways.values():
        work()  # libraries and loops are loaded at their first use
    taken = {name: [] for name in ways}
    for repeat in range(bench.repeats):
        for name in list(ways)[:: 1 if repeat % 2 else -1]:
            taken[name].append(seconds(ways[name]))
    found: Figures = {f"{name}_ms": 1000 * float(np.median(values)) / positions for name, values in taken.items()}
    for name in list(ways)[1:]:
        ratios = np.array(taken[name]) / np.array(taken["bare"])
        found[name] = [float(np.median(ratios)), float(ratios.min()), float(ratios.max())]
    return found | {"positions": positions, "statistics_ms": statistics_ms(bench, texts)}


def statistics_ms(bench: Bench, texts: Sequence[Continuation]) -> float:
    """Milliseconds a position that torch would take for the same columns, 16 rows at a time."""
    scorer, layout = bench.loaded.scorer, Layout.of(texts[:4])
    heads = (scorer.target, *scorer.drafts)
    rows = [head.rows(layout.ids, layout.row, layout.column)[:128] for head in heads]
    from alphaprof.profiling.statistics import Side

    with torch.inference_mode():
        sides = [Side(head.logits(found)[:, : scorer.width]) for head, found in zip(heads, rows, strict=True)]
        token = layout.token[:128]

        def work() -> None:
            for start in range(0, len(token), 16):
                part = slice(start, start + 16)
                columns(Side(sides[0].logits[part]), [Side(item.logits[part]) for item in sides[1:]], token[part], [])

        work()
        return 1000 * float(np.median([seconds(work) for _ in range(bench.repeats)])) / len(token)


def run_figures(bench: Bench) -> Figures:
    """Seconds of each stage, and positions a second of all of them."""
    loaded = bench.loaded
    texts: list[Continuation] = []
    scored: dict[str, dict[int, Any]] = {draft.name: {} for draft in loaded.drafts}

    def score() -> None:
        for batch in bench.batches(texts):
            for draft, arrays in loaded.scorer.score(batch).items():
                scored[draft].update(by_document(batch, arrays))

    def count() -> None:
        options, documents = loaded.options, continuation_table(texts)
        request = Request(options.rules, options.gammas)
        for draft in loaded.drafts:
            table = position_table(texts, scored[draft.name], loaded.scorer.extras.log_rules(options.rules), draft.name)
            shard_totals(table, documents, loaded.target.facts(), draft.facts(), request)

    stages = {"writing": lambda: texts.extend(bench.texts()), "scoring": score, "tables and totals": count}
    spent = {name: seconds(work) for name, work in stages.items()}
    tokens = sum(len(item.ids) for item in texts)
    return {"tokens": tokens, "seconds": spent, "tokens_per_second": tokens / sum(spent.values())}


def assisted_figures(bench: Bench, prompts: int, gammas: Sequence[int]) -> Figures:
    """Seconds a token of assisted generation, by gamma, over some of the documents."""
    target, draft = bench.loaded.target, _first_model(bench.loaded)
    config = draft.network.generation_config
    config.num_assistant_tokens_schedule, config.assistant_confidence_threshold = "constant", 0.0
    found = {}
    for gamma in gammas:
        config.num_assistant_tokens = gamma
        tokens = 0
        spent = 0.0
        for document in _some(bench.documents, prompts):
            ids = torch.from_numpy(document.prompt.astype(np.int64))[None]
            start = time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()
            output = _written(target, ids, document, assistant_model=draft.network)
            end = time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()
            spent += end - start
            tokens += output.shape[1] - ids.shape[1]
        found[gamma] = spent / tokens
    return {"seconds_per_token": found, "prompts": prompts, "tokens_per_second": 1 / sum(found.values())}


def alone_figures(bench: Bench, prompts: int) -> Figures:
    """Tokens a second of one prompt at a time: written greedily, then read by the draft for its top tokens."""
    target, draft = bench.loaded.target, _first_model(bench.loaded)
    tokens = agreed = 0

    @torch.inference_mode()
    def work() -> None:
        nonlocal tokens, agreed
        for document in _some(bench.documents, prompts):
            ids = torch.from_numpy(document.prompt.astype(np.int64))[None]
            output = _written(target, ids, document)[:, : draft.context]
            logits = draft.network(input_ids=output, use_cache=False).logits[0, ids.shape[1] - 1 : -1]
            tokens += len(logits)
            agreed += int((logits.argmax(-1) == output[0, ids.shape[1] :]).sum())

    spent = seconds(work)
    return {"tokens_per_second": tokens / spent, "prompts": prompts, "alpha": agreed / tokens}


def _written(target: Model, ids: torch.Tensor, document: Document, **how: Any) -> torch.Tensor:
    mask, limit = torch.ones_like(ids), document.max_new_tokens
    found: torch.Tensor = target.network.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=limit, **how)
    return found


def _first_model(loaded: Loaded) -> Model:
    return next(draft for draft in loaded.drafts if isinstance(draft, Model))


def _some(documents: Sequence[Document], count: int) -> list[Document]:
    """So many of the documents, evenly spread."""
    return [documents[index] for index in np.linspace(0, len(documents) - 1, min(count, len(documents))).astype(int)]


def peak_memory() -> float:
    """Largest resident set of this process so far, GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
