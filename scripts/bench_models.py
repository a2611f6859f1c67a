"""What a profile's measurement costs: against its bare forward passes, and against what one would do without it.

Everything runs in this process on the same prompts, on as many threads as torch is given. On one thread seconds are process
CPU time, else, and where there is a GPU, time by the clock.

`scoring`: a scoring pass over batches as a run makes them. `bare`: each model's own forward over the same batches with
logits at the scored positions, BARE_ROWS at a time, and nothing made of them; of a head the pass of each depth. A draft that
skips layers runs whole in both; what it saves where it goes on from the target's hidden states is `sharing`. `own_path`:
heads that read their own drafts against the same ones on the text's tokens, which is `of_text`.

`run`: all that `alphaprof profile` does once models are loaded, but for step times: prompts on disk; texts, scoring, the log
on disk, and totals of all rules at every gamma. `assisted`: Hugging Face assisted generation with the first draft model, one
run a gamma, which gives the rounds of one rule. `alone`: one prompt at a time, writing the target's greedy text and reading
it with the draft for its top token. Each of the last three once, after a short text to warm up.
"""

from __future__ import annotations

import dataclasses
import platform
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.utils import logging

from alphaprof.config.profile import ProfileOptions
from alphaprof.profiling import profile as profiling
from alphaprof.profiling.models.load import Model
from alphaprof.profiling.models.teacher_forced import TeacherForced
from alphaprof.profiling.scoring.scorer import Layout, Scorer
from alphaprof.profiling.scoring.statistics import ProcessedLogits, columns
from alphaprof.profiling.shard import Loaded, Progress
from alphaprof.profiling.texts.continuations import Continuation, generate, generation_batches, scoring_batches
from alphaprof.profiling.texts.corpus import Document
from alphaprof.run.storage import storage_of
from scripts.gpu.setting import random_head
from scripts.gpu.speed import bare, in_turn, ratios

Figures = dict[str, Any]
BARE_ROWS = 512


@dataclass(frozen=True)
class Bench:
    """A loaded profile with all of its documents, and how often passes over them are repeated."""

    loaded: Loaded
    documents: list[Document]
    repeats: int

    @classmethod
    def of(cls, options: ProfileOptions, repeats: int, progress: Progress, head_ids: int | None = None) -> Bench:
        """With `head_ids` a random EAGLE-3 head of one layer that can propose as many ids, at 8 depths, is the only draft.
        Raises `SystemExit` unless all text is the target's own greedy text: the others write no other.
        """
        logging.set_verbosity_error()  # what generate() advises its callers would stand in the middle of the figures
        loaded = profiling.load(options, progress)
        if head_ids is not None:
            target = loaded.target
            layers = len(target.network.base_model.layers)
            head = random_head(target, (2, layers // 2, layers - 3), head_ids)
            loaded = dataclasses.replace(loaded, drafts=[head], scorer=Scorer(target, [head], loaded.scorer.width))
        documents = list(loaded.documents)
        if not all(item.greedy and item.given is None for item in documents):
            raise SystemExit("bench a profile whose continuations are all greedy")
        return cls(loaded, documents, repeats)

    def texts(self) -> list[Continuation]:
        """The documents' texts, written in batches as a run does it, in document order."""
        found: list[Continuation] = []
        for batch in generation_batches(self.documents, self.loaded.options.padded_tokens):
            found += generate(self.loaded.target, batch, self.loaded.scorer.width)
        return sorted(found, key=lambda item: item.document.document)

    def batches(self, texts: Sequence[Continuation]) -> list[list[Continuation]]:
        """Texts in the batches that they are scored in."""
        return list(scoring_batches(texts, self.loaded.options.padded_tokens))


def processor() -> str:
    """The processor's name, and whether it computes in bfloat16: where it does not, forward passes in it are slow."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    told = dict(line.split(":", 1) for line in lines if ":" in line)
    facts = {key.strip(): value.strip() for key, value in told.items()}
    able = [flag for flag in ("avx512_bf16", "amx_bf16") if flag in facts.get("flags", "").split()]
    return f"{facts.get('model name', platform.processor())} ({', '.join(able) or 'no bfloat16 arithmetic'})"


def seconds(work: Callable[[], object]) -> float:
    """What some work takes; see the head of this file."""
    with_gpu = torch.cuda.is_available()
    clock = time.process_time if torch.get_num_threads() == 1 and not with_gpu else time.perf_counter
    if with_gpu:
        torch.cuda.synchronize()
    start = clock()
    work()
    if with_gpu:
        torch.cuda.synchronize()
    return clock() - start


def scoring_figures(bench: Bench, texts: Sequence[Continuation]) -> Figures:
    """Milliseconds a position, and ratios within one repeat: medians, least and largest."""
    scorer, batches = bench.loaded.scorer, bench.batches(texts)
    positions = sum(len(item.ids) for item in texts)
    sharing = [(each, each.rest) for each in scorer.drafts if isinstance(each, TeacherForced) and each.rest]

    def score(shared: bool, own_path: bool = True) -> None:
        scorer.own_path = own_path
        for each, rest in sharing:
            each.rest = rest if shared else None
        for batch in batches:
            scorer.score(batch)

    ways = {"bare": lambda: [bare(scorer, batch, BARE_ROWS) for batch in batches], "scoring": lambda: score(shared=False)}
    if sharing:
        ways["sharing"] = lambda: score(shared=True)
    if by_depth := any(each.by_depth for each in scorer.drafts):
        ways["of_text"] = lambda: score(shared=False, own_path=False)
    taken = in_turn(ways, bench.repeats, seconds)
    for each, rest in sharing:
        each.rest = rest
    found: Figures = {f"{name}_ms": 1000 * float(np.median(values)) / positions for name, values in taken.items()}
    found |= {name: list(ratios(taken, name, "bare")) for name in list(ways)[1:]}
    if by_depth:
        found["own_path"] = list(ratios(taken, "scoring", "of_text"))
    return found | {"positions": positions, "statistics_ms": statistics_ms(bench, texts)}


def statistics_ms(bench: Bench, texts: Sequence[Continuation]) -> float:
    """Milliseconds a position that torch would take for the same columns, 16 rows at a time."""
    scorer, layout = bench.loaded.scorer, Layout.of(texts[:4])
    heads = [each for each in (scorer.target, *scorer.drafts) if isinstance(each, TeacherForced)]
    rows = [head.rows(layout.ids, layout.row, layout.column)[:128] for head in heads]
    with torch.inference_mode():
        sides = [ProcessedLogits(head.logits(found)[:, : scorer.width]) for head, found in zip(heads, rows, strict=True)]
        token = layout.token[:128].to(sides[0].logits.device)

        def work() -> None:
            for start in range(0, len(token), 16):
                part = slice(start, start + 16)
                columns(
                    ProcessedLogits(sides[0].logits[part]),
                    [ProcessedLogits(item.logits[part]) for item in sides[1:]],
                    token[part],
                    [],
                )

        work()
        return 1000 * float(np.median([seconds(work) for _ in range(bench.repeats)])) / len(token)


def run_figures(bench: Bench, progress: Progress) -> Figures:
    """Seconds and tokens a second of a run on disk, its totals included."""
    with tempfile.TemporaryDirectory() as folder:
        plan = profiling._begun(bench.loaded.options, storage_of(folder), progress)

        def work() -> None:
            plan.run.begin()
            profiling._work(plan, progress)

        spent = {"prompts": seconds(lambda: profiling.stage(plan, progress)), "run": seconds(work)}
        tokens = plan.run.manifest.positions
    return {"tokens": tokens, "seconds": spent, "tokens_per_second": tokens / sum(spent.values())}


def assisted_figures(bench: Bench, gammas: Sequence[int]) -> Figures:
    """Seconds of assisted generation over all documents, by gamma, and tokens a second of all gammas together."""
    target, draft = bench.loaded.target, _first_model(bench.loaded)
    config = draft.network.generation_config
    config.num_assistant_tokens_schedule, config.assistant_confidence_threshold = "constant", 0.0
    _written(target, bench.documents[0], 8, assistant_model=draft.network)
    spent: dict[int, float] = {}
    tokens = 0

    def write() -> int:
        every = [_written(target, item, item.max_new_tokens, assistant_model=draft.network) for item in bench.documents]
        return sum(len(text) for text in every)

    for gamma in gammas:
        config.num_assistant_tokens = gamma
        counted: list[int] = []
        spent[gamma] = seconds(lambda counted=counted: counted.append(write()))
        tokens = counted[0]
    return {"seconds": spent, "tokens_per_second": tokens / sum(spent.values())}


def alone_figures(bench: Bench) -> Figures:
    """Tokens a second of one prompt at a time: written greedily, then read by the draft for its top tokens."""
    target, draft = bench.loaded.target, _first_model(bench.loaded)
    _written(target, bench.documents[0], 8)
    tokens = agreed = 0

    @torch.inference_mode()
    def work() -> None:
        nonlocal tokens, agreed
        for document in bench.documents:
            prompt = torch.from_numpy(document.prompt.astype(np.int64))
            text = torch.cat([prompt, _written(target, document, document.max_new_tokens)])[: draft.context]
            logits = draft.network(input_ids=text[None].to(draft.device), use_cache=False).logits[0, len(prompt) - 1 : -1]
            tokens += len(logits)
            agreed += int((logits.argmax(-1).cpu() == text[len(prompt) :]).sum())

    spent = seconds(work)
    return {"tokens_per_second": tokens / spent, "alpha": agreed / tokens}


def _written(target: Model, document: Document, limit: int | None, **how: Any) -> torch.Tensor:
    """The target's greedy text of one document, [tokens], on the CPU."""
    ids = torch.from_numpy(document.prompt.astype(np.int64))[None].to(target.device)
    found: torch.Tensor = target.network.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=limit, **how
    )
    return found[0, ids.shape[1] :].cpu()


def _first_model(loaded: Loaded) -> Model:
    return next(draft for draft in loaded.drafts if isinstance(draft, Model))


def peak_memory() -> float:
    """Largest resident set of this process so far, GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
