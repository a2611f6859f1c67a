"""Step times of a run: measured with it, from a table of the user's engine, or by a roofline; as rows, and as a report
shows them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from alphaprof.config.hardware import ACCELERATORS, ELSEWHERE, preset_of
from alphaprof.config.options import CostOptions, MeasuredCosts, RooflineCosts, TableCosts
from alphaprof.config.paths import KEPT
from alphaprof.costs.roofline import cache_slots, step_ms
from alphaprof.costs.rounds import MORE_ROUNDS, StepTimes, Timing
from alphaprof.costs.shapes import ModelShape
from alphaprof.costs.steps import TARGET, StepRow, StepTable, Unmeasured, with_path
from alphaprof.errors import CostsUnreadable
from alphaprof.run.manifest import CHAIN, DraftFacts, Manifest, ModelFacts
from alphaprof.run.reader import Run
from alphaprof.stats.estimate import Array

MEASURED, VLLM, TABLE, ROOFLINE, NONE = "measured", "vllm", "table", "roofline", "none"
TIMED = (MEASURED, VLLM)  # with the run
SURER = {  # by source: how to get more precise step times
    MEASURED: MORE_ROUNDS,
    VLLM: MORE_ROUNDS,
    TABLE: "use a table of more timing rounds (its columns rounds, or a smaller relative_error)",
    ROOFLINE: "use step times measured in your engine",
}
Z90 = 1.6448536269514722  # standard errors that hold 90% of a normal distribution on both sides
FITTED_WITH = ("overhead_ms", "weight_bytes", "draft_weight_bytes", "kv_bytes")  # at their defaults: constants of engines
CAPTURED = 512  # tokens of the largest step that vLLM records as a CUDA graph by default
PREFILL_SHARE = 0.66  # of the peak
PROMPTS = (16, 256, 1024, 4096)  # tokens of the prompts whose prefill a roofline works out


def roofline_ms(
    costs: RooflineCosts,
    shape: ModelShape,
    is_target: bool,
    tokens: int,
    batch: int,
    context: int,
    prefill: bool = False,
) -> float:
    """Return a step's time by a roofline with the engine's efficiencies, without overhead."""
    tp = costs.tp if is_target or costs.draft_tp is None else costs.draft_tp
    accelerator, efficiency = ACCELERATORS[costs.accelerator], preset_of(costs.preset).efficiency
    if prefill:  # a prompt's rows fill matrix units better than a verification's few
        efficiency = dataclasses.replace(efficiency, compute=max(PREFILL_SHARE, accelerator.compute_share or 0.0))
    return step_ms(shape, accelerator, efficiency, tokens, batch, context, tp)


def accuracy(
    costs: RooflineCosts, batch: int, context: float, target: ModelShape | None = None, gamma: int = 0, by_step: bool = True
) -> tuple[float, str]:
    """Return the factor within which 90% of published speedups lie of computed ones, and what the times are made of, in
    words. Where the engine's ground ends, or with other sizes or overheads, the error is that of elsewhere. A regime for
    which nothing is computed is named, with what to measure. `by_step`: the draft is a head that drafts token by token.
    """
    engine = preset_of(costs.preset)
    if not engine.batch:
        return engine.factor, f"{engine.about}; 90% of published speedups on H200 lie within factor {engine.factor:.2f}"
    mixture = target is not None and bool(target.experts)
    factor = engine.factor_at(costs.accelerator, batch, context, mixture, costs.tp)
    ground = f"overheads of {engine.about}, batch up to {engine.batch}, context up to {engine.context:,}"
    words = f"90% of published speedups lie within factor {factor:.2f} (outside: {ELSEWHERE:.2f})"
    why = _unlike_published(costs, target, context, by_step) or ("this is outside that range" if factor >= ELSEWHERE else "")
    if why:
        factor, words = ELSEWHERE, f"{why}, so the error is that of elsewhere: factor {ELSEWHERE:.2f}"
    elif engine.accelerator is None and factor > engine.factor:
        words = f"the compute share of {costs.accelerator} was not measured: factor {factor:.2f} (outside: {ELSEWHERE:.2f})"
    return factor, "; ".join([ground, words, *_regimes(costs, batch, target, gamma)])


def _unlike_published(costs: RooflineCosts, target: ModelShape | None, context: float, by_step: bool) -> str:
    """Return how rounds differ from those that were published; empty if they do not."""
    usual = RooflineCosts.model_fields
    if own := [name for name in FITTED_WITH if getattr(costs, name) != usual[name].default]:
        return f"you set {' and '.join(own)}"
    if not by_step:
        return "published rounds are of heads that draft token by token"
    if target is None:
        return ""
    if min(target.weight_bytes, target.kv_bytes, target.expert_bytes or 2.0) < 2:
        return "published rounds are of 16-bit models, and this one is quantized"
    if target.state_bytes or 0 < target.window < context:
        return "published rounds are of models that attend to all of the context, and this one does not"
    return ""


def _regimes(costs: RooflineCosts, batch: int, target: ModelShape | None, gamma: int) -> Iterator[str]:
    """Yield where an engine leaves its CUDA graphs, which no share or overhead describes."""
    if preset_of(costs.preset).accelerator is not None:
        return
    kv_bytes = costs.kv_bytes or (target.kv_bytes if target is not None else 2.0)
    if kv_bytes < 2 and ACCELERATORS[costs.accelerator].ampere:
        yield "an fp8 cache with a draft on Ampere takes about 8 ms more a round: measure a round, or take a 16-bit cache"
    if batch * (gamma + 1) > CAPTURED:
        beyond = f"verifications of {batch * (gamma + 1)} tokens are beyond the CUDA graphs that vLLM records by default"
        yield f"{beyond} ({CAPTURED}): measure one, or raise max_cudagraph_capture_size"


def fits(costs: RooflineCosts, target: ModelShape, batch: int, context: float) -> bool:
    """Return whether the target's weights and the caches of a batch fit in the memory of the devices."""
    copies = costs.tp / min(costs.tp, target.kv_heads)  # of the cache, on devices beyond the number of KV heads
    needed = target.total_weight_bytes + batch * copies * target.stored_bytes(context)
    return needed <= costs.tp * ACCELERATORS[costs.accelerator].memory


def roofline_rows(
    target: ModelShape,
    drafts: Mapping[str, ModelShape | None],
    costs: RooflineCosts,
    gamma_max: int,
    batches: Sequence[int],
    contexts: Sequence[int],
    prompt_lengths: Sequence[int],
    heads: Sequence[str] = (),
    mean_context: float = 0.0,
) -> tuple[StepRow, ...]:
    """Decode and verify steps up to gamma_max + 1 tokens, drafts' steps over 1 and 2 tokens, and prefill at batch 1. Of
    `heads`, the first step of a round over 1 to gamma_max + 1 tokens, and a later one, which costs nothing where the first
    drafts all gamma_max tokens.

    A draft without a shape has no steps: a search that costs nothing. All steps but decode share one standard error, from
    the factor that holds 90% of published speedups at `mean_context`.
    """
    rows: list[StepRow] = []
    added = preset_of(costs.preset)
    for batch, context in product(batches, contexts):
        error = _standard_error(accuracy(costs, batch, mean_context, target)[0])
        more = added.target_ms(target.layers, bool(target.experts), batch) + costs.overhead_ms
        for tokens in range(1, gamma_max + 2):
            ms = roofline_ms(costs, target, True, tokens, batch, context) + more
            step, shared = ("decode", 0.0) if tokens == 1 else ("verify", error)
            rows.append(StepRow(TARGET, step, tokens, batch, context, ms, shared_error=shared))
        for name, shape in drafts.items():
            if added.round_ms:
                rows.append(StepRow(name, "bookkeeping", 1, batch, context, added.round_ms, shared_error=error))
            if shape is None:
                rows.append(StepRow(name, "lookup", 1, batch, context, 0.0))
                continue
            by_step = name in heads and not shape.one_pass
            once = added.draft_ms + (0.0 if by_step else added.layers_ms(shape.layers, bool(shape.experts)))
            # Published rounds are those of heads: the steps of another draft are off by as much as those elsewhere.
            own = error if by_step else max(error, _standard_error(ELSEWHERE) if added.batch else 0.0)
            run, firsts = partial(roofline_ms, costs, is_target=False, batch=batch, context=context), range(1, gamma_max + 2)
            if name not in heads:
                steps = [("draft", tokens, run(shape, tokens=tokens) + once) for tokens in (1, 2)]
            elif by_step:
                steps = [("draft", 1, run(shape.later, tokens=1) + once)]
                steps += [("draft_first", tokens, run(shape, tokens=tokens)) for tokens in firsts]
            else:  # over the rows that are drafted, beside those that were verified
                steps = [("draft", 1, 0.0)]
                steps += [("draft_first", tokens, run(shape, tokens=tokens + gamma_max - 1) + once) for tokens in firsts]
            rows += [StepRow(name, step, tokens, batch, context, ms, shared_error=own) for step, tokens, ms in steps]
    for name, shape in {TARGET: target, **drafts}.items():
        if shape is not None:
            layers = 0.0 if name in heads else added.layers_ms(shape.layers, bool(shape.experts))
            for tokens in prompt_lengths:
                ms = roofline_ms(costs, shape.of_prompt, name == TARGET, tokens, 1, 0, prefill=True)
                rows.append(StepRow(name, "prefill", tokens, 1, 0, ms + layers))
    return tuple(rows)


def _standard_error(factor: float) -> float:
    """Return the relative standard error that keeps 90% within a factor."""
    return math.log(factor) / Z90


def shape_of(name: str, facts: ModelFacts) -> ModelShape:
    """Return the shape of a model of a run. Raises `CostsUnreadable` if it is not known."""
    if facts.shape is None:
        raise no_shape(name, facts.architecture)
    return ModelShape(**facts.shape)  # type: ignore[arg-type]


def no_shape(name: str, architecture: str) -> CostsUnreadable:
    """Return the error of a model whose step times a roofline cannot compute."""
    hint = "give step times: costs: {source: table, path: FILE} or {source: vllm}; {source: none} for acceptance alone"
    return CostsUnreadable(f"a roofline needs the shape of {name}, but {architecture} has no known shape", hint)


@dataclass(frozen=True)
class DraftMemoryShare:
    """What a draft takes of the memory that the target leaves for its KV cache."""

    draft: str
    weight_bytes: float  # 0 for layers of the target
    kv_bytes_per_token: float  # of its cache
    kv_share: float  # of the bytes that a token of context takes in both caches
    slots: float | None  # tokens of context that the cache has room for without the draft; None: the memory is not known
    slots_with_draft: float | None  # with its weights and its own cache


@dataclass(frozen=True)
class StepSpread:
    """What single timing rounds took for one kind of step, in ms."""

    model: str  # target, or the draft
    step: str  # decode, verify, draft, draft_first, lookup or bookkeeping
    tokens: int  # new ones per sequence
    mean_ms: float  # a few slow rounds move it, and not the median, by which speedups are computed
    p10_ms: float  # tenth percentile
    p90_ms: float  # ninetieth percentile


@dataclass(frozen=True)
class Cost:
    """Where step times come from, and what they are at `concurrency` and `context`; `concurrencies`: all that there are."""

    source: str  # measured, table or roofline
    engine: str
    device: str
    dtype: str
    concurrency: int  # sequences decoded at a time
    concurrencies: tuple[int, ...]
    context: float  # the documents' mean, or the nearest that there is a time for
    contexts: tuple[int, ...]  # those that times were taken at
    threads: int | None  # of torch, where the device is a CPU
    overhead_ms: float | None  # added to every target step of a table or roofline
    factor: float | None  # 90% of published speedups lie within it of a roofline's; None: measured or a table
    accuracy: str | None  # of a roofline: what it is made of, and how far off it may be; None: measured or a table
    target_ms: dict[int, float]  # by number of tokens
    draft_ms: dict[str, float]  # by draft with a model
    draft_after_full_ms: dict[str, float]  # its step over two tokens, after a round accepted in full
    draft_first_ms: dict[str, dict[int, float]]  # of a head: the first step of a round, by number of verified tokens
    lookup_ms: dict[str, float]  # by draft without steps (prompt lookup), once a round
    bookkeeping_ms: dict[str, float]  # once a round that drafts
    covered: int  # the largest gamma that there are times for
    lacking: tuple[str, ...]  # rows that larger gamma of the run need, in words
    others: tuple[str, ...]  # models of a table that the run does not have, whose rows are not used
    path_overhead: dict[str, float]  # by draft whose engine decodes plainly on another path: what a step takes longer there
    rounds: int | None  # of timing; None: not known, or the times were not taken in rounds
    spread: tuple[StepSpread, ...]  # of steps that were timed in rounds
    memory: tuple[DraftMemoryShare, ...]  # one a draft
    beyond_prefill: float | None  # share of prompts longer than any whose prefill was timed; None: no prefill was


@dataclass(frozen=True)
class CostModel:
    """All step times that a report may use, for rounds of up to `gamma` drafts at the documents' mean `context`.

    A step is charged by all tokens of its batch. `others`: models of a table that the run does not have, whose rows are not
    used. `contexts`: the mean context of each domain.
    """

    table: StepTable
    options: CostOptions
    manifest: Manifest
    gamma: int
    context: float
    others: tuple[str, ...] = ()
    contexts: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def of_domain(self, domain: str) -> CostModel:
        """Return the times of batches that hold sequences of one domain alone: at its own mean context, where times depend
        on it.
        """
        context = self.contexts.get(domain, self.context)
        timed = {row.context for row in self.table.rows if row.step != "prefill"}
        return self if context == self.context or len(timed) == 1 else self.at(context)

    def at(self, context: float) -> CostModel:
        """Return the same times for another mean context: only those of a roofline are worked out for one."""
        if not isinstance(self.options, RooflineCosts):
            return dataclasses.replace(self, context=context)
        rows = _roofline(self.manifest, self.options, self.gamma, context)
        return dataclasses.replace(self, context=context, table=StepTable(rows))

    def fits(self, concurrency: int, context: float) -> bool:
        """Whether a batch fits in memory, which is asked of a roofline alone."""
        options = self.options
        return not isinstance(options, RooflineCosts) or fits(
            options, _shape(TARGET, self.manifest.target, options), concurrency, context
        )

    @property
    def device(self) -> str:
        """What ran the steps, or would: a device, accelerators, or what a table says."""
        options = self.options
        if isinstance(options, RooflineCosts):
            return f"{options.tp} x {options.accelerator}" if options.tp > 1 else options.accelerator
        return Path(options.path).name if isinstance(options, TableCosts) else self.manifest.target.device

    @property
    def concurrencies(self) -> tuple[int, ...]:
        """Batch sizes that there are times for."""
        return self.table.batches

    def times(self, concurrency: int) -> dict[str, StepTimes]:
        """Step times by draft, of drafts that have any at a concurrency."""
        return dict(self.timing(concurrency).times)

    def _times(self, table: StepTable, concurrency: int) -> tuple[dict[str, StepTimes], dict[str, str]]:
        """Step times by draft, and of the other drafts why they have none."""
        times, missing = {}, {}
        for draft, facts in self.manifest.drafts.items():
            parts = (facts.hybrid.then, facts.hybrid.first) if facts.hybrid else (draft,)
            try:
                found = [table.times(part, self.gamma, concurrency, self.context) for part in parts]
                times[draft] = found[0]
                if facts.hybrid:
                    times[draft] = dataclasses.replace(found[0], lookup=found[1].lookup, optional=True)
            except Unmeasured as reason:
                missing[draft] = str(reason)
        return times, missing

    def timing(self, concurrency: int) -> Timing:
        """Return the same for a verdict, with the reasons of drafts that have none; worked out once."""
        if concurrency not in self._known:
            times, missing = self._times(self.table, concurrency)
            first, second = (  # without rounds both are of the same steps, whose errors are the same: not independent
                {
                    draft: dataclasses.replace(each, half=place) if each.rounds else times[draft]
                    for draft, each in self._times(half, concurrency)[0].items()
                }
                for place, half in enumerate(self.table.halves)
            )
            self._known[concurrency] = Timing(times, self.basis, missing, (first, second), SURER[self.options.source])
        return self._known[concurrency]

    @cached_property
    def _known(self) -> dict[int, Timing]:
        return {}

    @property
    def basis(self) -> str:
        """How a verdict that rests on these times begins."""
        options = self.options
        if options.source == MEASURED:
            return f"by {'' if self.device == 'cpu' else 'eager '}step times measured here with transformers"
        if options.source == VLLM:
            return f"by step times of {timed_with(self.manifest)} measured here"
        if isinstance(options, TableCosts):
            return f"by the step times in {Path(options.path).name}"
        return f"by step times computed for {self.device}, not measured"


def open_costs(
    run: Run, options: CostOptions, context: float | None, contexts: Mapping[str, float] | None = None
) -> CostModel | None:
    """Return the step times that `costs` options name; None if they ask for none, or were to be measured and were not.

    `context`: tokens before a position, on average over the documents; `contexts`: the same of each domain. Raises
    `CostsUnreadable`, also for rounds of which it is not known what they drafted.
    """
    manifest = run.manifest
    gamma, others = max(run.gammas), tuple[str, ...]()
    if options.source == NONE:
        return None
    if manifest.drafting != CHAIN and not isinstance(options, MeasuredCosts):
        raise CostsUnreadable(
            f"step times cannot be used for {run.path}: it was served with {manifest.drafting} drafting, so drafts of its "
            "rounds are not known",
            "leave costs out: tokens per round need none",
        )
    if isinstance(options, MeasuredCosts):
        latency = run.latency()
        measured = latency.to_pylist() if latency is not None else []
        if not any(row["step"] == "decode" for row in measured):
            return None
        rows: Sequence[StepRow] = measured_rows(measured, manifest.environment.get("timing_waiting") or 0.0)
    elif isinstance(options, TableCosts):
        from alphaprof.costs.engine_table import read_engine_table  # which most reports do without

        own = {name: facts for name, facts in manifest.drafts.items() if facts.hybrid is None}
        models = [name for name, facts in own.items() if facts.has_steps]
        lookups = [name for name in own if name not in models]
        path = (manifest.table or ()) if options.path.startswith(KEPT) else Path(options.path)
        rows, others = read_engine_table(path, models, lookups, options.overhead_ms, _heads(manifest))
        rows = with_path(rows, list(own), options.path_overhead)
    elif isinstance(options, RooflineCosts):
        rows = _roofline(manifest, options, gamma, context)
    return CostModel(StepTable(rows), options, manifest, gamma, context or 0.0, others=others, contexts=contexts or {})


def measured_rows(latency: Sequence[Mapping[str, Any]], waiting: float = 0.0) -> list[StepRow]:
    """Return rows of the latency table as step times; `waiting`: see `StepRow`."""
    keys = ("model", "step", "tokens", "batch", "context", "relative_error")
    return [
        StepRow(
            **{key: row[key] for key in keys},
            ms=row["median_ms"],
            rounds=tuple(row["rounds_ms"] or ()),
            waiting=waiting,
            redrawn=True,
        )
        for row in latency
    ]


def _roofline(manifest: Manifest, options: RooflineCosts, gamma: int, context: float | None) -> tuple[StepRow, ...]:
    models = [(name, facts) for name, facts in manifest.drafts.items() if facts.hybrid is None]
    drafts = {name: _shape(name, facts, options) if facts.has_steps else None for name, facts in models}
    target = _shape(TARGET, manifest.target, options)
    # Times are linear in the context but for sliding windows and attention on Ampere: the mean has places of its own.
    mean = context or 0.0
    contexts = sorted({0, math.floor(mean), math.ceil(mean), round(2 * mean) + 1})
    return roofline_rows(target, drafts, options, gamma, options.concurrency, contexts, PROMPTS, _heads(manifest), mean)


def _heads(manifest: Manifest) -> list[str]:
    """Return the drafts whose first step of a round is one of its own."""
    return [name for name, facts in manifest.drafts.items() if facts.by_depth and facts.has_steps]


def _shape(name: str, facts: ModelFacts, options: CostOptions) -> ModelShape:
    """Return the shape of a model, with the bytes that the options of a roofline name."""
    shape = shape_of(name, facts)
    if not isinstance(options, RooflineCosts):
        return shape
    # Layers of the target have the target's weights, quantised or not.
    of_target = name == TARGET or (isinstance(facts, DraftFacts) and facts.shares_target_weights)
    shape = dataclasses.replace(shape, kv_bytes=options.kv_bytes or shape.kv_bytes)
    weight_bytes = options.weight_bytes if of_target else options.draft_weight_bytes
    return dataclasses.replace(shape, weight_bytes=weight_bytes, head_bytes=0.0, expert_bytes=0.0) if weight_bytes else shape


def timed_with(manifest: Manifest) -> str:
    """Return what ran the steps that were timed with a run, and its version."""
    packages = manifest.environment.get("packages", {})  # of an imported run there are none
    name, words = ("vllm", "vLLM") if manifest.profile.costs.source == VLLM else ("transformers", "transformers")
    return f"{words} {packages.get(name, 'unknown')}"


def cost_of(costs: CostModel, concurrency: int, prompt_tokens: Array) -> Cost:
    """Return what a report says of its step times; `prompt_tokens` [documents]."""
    manifest, options, every = costs.manifest, costs.options, costs.times(concurrency)
    times = {draft: time for draft, time in every.items() if not time.optional}  # steps of hybrids are those of their parts
    environment, target = manifest.environment, manifest.target
    contexts = costs.table.contexts(concurrency) or costs.table.contexts(costs.concurrencies[0])
    first = next(iter(times.values()), None)
    factor, words = (None, None)
    if isinstance(options, RooflineCosts):
        factor, words = accuracy(options, concurrency, costs.context, _shape(TARGET, target, options), costs.gamma)
    prefill = costs.table.prefill_ms(TARGET, prompt_tokens) if options.source != ROOFLINE else None
    return Cost(
        source=options.source,
        engine=timed_with(manifest) if options.source in TIMED else "roofline" if options.source == ROOFLINE else "yours",
        device=costs.device,
        dtype=target.precision,
        concurrency=concurrency,
        concurrencies=costs.concurrencies,
        context=min(max(costs.context, contexts[0]), contexts[-1]),
        contexts=contexts if options.source != ROOFLINE else (),
        threads=environment["torch_threads"] if options.source == MEASURED and target.device == "cpu" else None,
        overhead_ms=options.overhead_ms if isinstance(options, TableCosts | RooflineCosts) else None,
        factor=factor,
        accuracy=words,
        target_ms={tokens: time.ms for tokens, time in first.target.items()} if first else {},
        draft_ms={draft: time.draft.ms for draft, time in times.items() if time.draft.ms},
        draft_after_full_ms={name: time.draft_after_full.ms for name, time in times.items() if time.draft_after_full},
        draft_first_ms={
            name: {n: first.ms for n, first in time.draft_first.items()} for name, time in times.items() if time.draft_first
        },
        lookup_ms={draft: time.lookup.ms for draft, time in times.items() if not manifest.drafts[draft].has_steps},
        bookkeeping_ms={draft: time.bookkeeping.ms for draft, time in times.items()},
        covered=min((max(time.target) - 1 for time in every.values()), default=0),
        others=costs.others,
        path_overhead={
            draft: more for draft in times if (more := costs.table.path_overhead(draft, concurrency, costs.context))
        },
        lacking=tuple(_lacking(costs, times, concurrency)),
        rounds=first.rounds or None if first else None,
        spread=tuple(_spreads(times)),
        memory=tuple(_memory_shares(manifest, options)),
        beyond_prefill=prefill[1] if prefill else None,
    )


def _lacking(costs: CostModel, times: Mapping[str, StepTimes], concurrency: int) -> Iterator[str]:
    """Yield the rows without which there are no times of the run's largest gamma."""
    needed = costs.gamma + 1
    short = [draft for draft, time in times.items() if not time.covers(costs.gamma)]
    steps = [(TARGET, "verify")] if short else []
    steps += [(draft, "draft_first") for draft in short if times[draft].draft_first]
    for model, step in steps:
        if not costs.table.reaches(model, step, needed, concurrency):
            yield f"{model}, {step}, {needed} tokens, batch {concurrency}"


def _spreads(times: Mapping[str, StepTimes]) -> Iterator[StepSpread]:
    """Yield what single rounds took, of every step of a report; those of the target once."""
    first = next(iter(times.values()), None)
    steps = [(TARGET, "decode" if n == 1 else "verify", n, each) for n, each in first.target.items()] if first else []
    for draft, own in times.items():
        after_full = {} if own.draft_after_full is None else {2: own.draft_after_full}
        of_draft = {"draft": {1: own.draft, **after_full}, "draft_first": own.draft_first}
        of_draft |= {"lookup": {1: own.lookup}, "bookkeeping": {1: own.bookkeeping}}
        steps += [(draft, step, tokens, each) for step, by_tokens in of_draft.items() for tokens, each in by_tokens.items()]
    for model, step, tokens, each in steps:
        if each.rounds:
            low, high = np.percentile(each.rounds, [10, 90])
            yield StepSpread(model, step, tokens, float(np.mean(each.rounds)), float(low), float(high))


def _memory_shares(manifest: Manifest, options: CostOptions) -> Iterator[DraftMemoryShare]:
    """Yield what each draft model takes, where its shape and the target's are known. The memory is that of a roofline's
    accelerators or of the GPU of a measurement; else it is not known.
    """
    memory, tp = None, 1
    if isinstance(options, RooflineCosts):
        memory, tp = ACCELERATORS[options.accelerator].memory, options.tp
    elif options.source in TIMED:
        memory = manifest.environment.get("device_memory")
    for name, facts in manifest.drafts.items():
        if facts.shape is None or manifest.target.shape is None:
            continue
        target = _shape(TARGET, manifest.target, options)
        draft, shared = _shape(name, facts, options), facts.shares_target_weights
        slots = cache_slots(target, draft, memory, tp, shared) if memory else None
        each, own = target.kv_bytes_per_token, draft.kv_bytes_per_token
        weights = 0.0 if shared else draft.total_weight_bytes
        yield DraftMemoryShare(name, weights, own, own / (each + own), *(slots or (None, None)))
