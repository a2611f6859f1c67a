"""`alphaprof predict`: what the formulas say of numbers that a user gives. No run, no model."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from alphaprof.config.hardware import ACCELERATORS, ENGINES
from alphaprof.costs.shapes import HEAD, ModelShape
from alphaprof.errors import CostsUnreadable, OptionInvalid, shown
from alphaprof.render import format as fmt
from alphaprof.render.blocks import Block, Small, table_by_columns
from alphaprof.report.loads import CONTEXTS, AtLoad, Place, load_table, over_loads, throughput
from alphaprof.stats import formulas
from alphaprof.stats.estimate import Interval
from alphaprof.stats.formulas import RoundCost

if TYPE_CHECKING:
    from alphaprof.config.options import RooflineCosts

GAMMAS = tuple(range(1, 9))
LONGEST = 64  # drafts in a round
OUTPUT = 256  # tokens of an output
LEAST_COST = 1e-3  # of a verification, which always takes time


@dataclass(frozen=True)
class EngineRate:
    """An acceptance rate as engines show it: accepted / drafted tokens, in rounds of `gamma` drafts."""

    accepted_per_drafted: float  # accepted / drafted tokens
    gamma: int


Acceptance = float | EngineRate | tuple[float, ...]  # alpha, or shares of rounds that accepted at least 1, 2, ... drafts


@dataclass(frozen=True)
class ComputedCost:
    """What a round costs by a roofline, in decode steps, from the shapes of a target and a draft. The draft's first step
    runs over all rows of the verification before. `factor`: 90% of published speedups lie within it (`accuracy`).
    """

    target: str  # file of its config
    draft: str  # file of its config
    accelerator: str  # the device
    preset: str  # of the serving engine whose overheads count
    tp: int  # devices in tensor parallelism
    batch: int  # sequences decoded at a time
    context: int  # tokens in the cache of each
    decode_ms: float  # a decode step of the target
    verify_ms: tuple[float, ...]  # over 2, 3, ... tokens
    draft_ms: float  # a later step of a head, any of a draft model
    draft_first_ms: tuple[float, ...]  # of a head, over 1, 2, ... tokens; empty for a draft model
    round_ms: float  # the engine's overhead of a round
    costs: tuple[float, ...]  # of a round of 1, 2, ... drafts, in decode steps
    factor: float
    accuracy: str  # what the times are made of, in words
    fits: bool  # the target's weights and the caches of the batch fit in the devices' memory
    output: int  # tokens of an output; its prompt fills the rest of the context
    prefill_ms: float  # of that prompt by the target
    draft_prefill_ms: float  # and by the draft

    def verification(self, gamma: int) -> float:
        """Return one target step over gamma + 1 tokens, in decode steps."""
        return self.verify_ms[gamma - 1] / self.decode_ms

    def of_round(self, gamma: int) -> float:
        """Return a round of gamma drafts, in decode steps."""
        return self.costs[gamma - 1]


@dataclass(frozen=True)
class GammaPrediction:
    """One gamma. `break_even_length`: tokens per round at which the speedup is 1, the cost of a round in decode steps;
    `break_even_alpha`: the alpha that gives them (None: no alpha does). `low`, `high`: 90% interval of the speedup by the
    error of computed step times (None: costs were given).
    """

    gamma: int
    tokens_per_round: float  # tokens emitted per round, the target's own included; rounds without a proposal count
    accepted_per_drafted: float  # accepted / drafted tokens: what engines call acceptance rate
    verify_cost: float  # v = T(gamma + 1) / T(1)
    break_even_length: float
    break_even_alpha: float | None
    speedup: float  # of decoding
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Prediction:
    """What was assumed, and what follows for each gamma. `engine_rate`: what alpha was worked out from (None: given)."""

    format: ClassVar[str] = "alphaprof-predict"
    version: ClassVar[str] = "3.1"

    alpha: float | None  # share of positions with a proposal where it is kept; None: rates by depth were given
    coverage: float  # share of positions with a proposal
    engine_rate: EngineRate | None
    rates: tuple[float, ...]  # share of rounds that accepted at least 1, 2, ... drafts; empty: not given
    cost: RoundCost | None  # what a round is taken to cost; None: it was computed
    computed: ComputedCost | None  # from shapes; None: the cost was given
    gammas: tuple[GammaPrediction, ...]  # one a gamma
    best_gamma: int  # of the largest speedup
    loads: tuple[AtLoad, ...]  # the gamma at this load and others, with 90% intervals; empty: the cost was given

    def blocks(self) -> Iterator[Block]:
        """Yield the best gamma by load, that of the given one and its speedup, what was assumed, a row for each gamma, and
        which number is which.
        """
        if self.computed is not None and len(self.loads) > 1:
            yield load_table(self.loads, f"{Path(self.computed.draft).name} by a roofline of {self.computed.accelerator}")
            yield Small(f"throughput: prefills of all sequences included, outputs of {self.computed.output} tokens.")
            yield Small("acceptance is taken to be the same at every load.")
            yield ""
        yield from (*_outcome_lines(self), "", *_assumed_lines(self), "")
        columns: dict[str, Callable[[GammaPrediction], str]] = {
            "tokens/round": lambda item: fmt.number(item.tokens_per_round),
            "accepted/drafted": lambda item: fmt.share(item.accepted_per_drafted),
            "break-even": lambda item: fmt.number(item.break_even_length),
            "break-even alpha": lambda item: "none" if item.break_even_alpha is None else fmt.share(item.break_even_alpha),
            "speedup" if self.computed is None else "speedup [90%]": _speedup_cell,
        }
        rows = [(str(item.gamma), {name: cell(item) for name, cell in columns.items()}) for item in self.gammas]
        yield table_by_columns("by gamma", rows, named="gamma", marked=[str(self.best_gamma)])
        yield Small("alpha: share of positions with a proposal where it is kept; does not depend on gamma.")
        if self.coverage < 1:
            yield Small("coverage: share of positions with a proposal; without one a round is a decode step of one token.")
        yield Small("accepted/drafted: the acceptance rate of engines; depends on gamma and is not alpha.")
        yield Small("tokens/round: emitted by a round, the target's own included (engines: mean acceptance length).")
        yield Small("break-even: tokens/round at a speedup of 1 (the cost of a round in decode steps), and its alpha.")


def build_prediction(
    acceptance: Acceptance,
    cost: RoundCost | ComputedCost,
    gammas: Iterable[int] | None = None,
    coverage: float = 1.0,
    elsewhere: Iterable[ComputedCost] = (),
) -> Prediction:
    """Return predictions for an alpha, for the one that gives an engine's rate, or for rates by depth. `gammas`: by default
    those of `gammas_of`; `coverage`: the share of positions with a proposal, beside an alpha; `elsewhere`: a computed cost
    at other loads. Raises `OptionInvalid` for
    impossible values, and for a gamma above that of a rate or of the last depth.
    """
    longest = longest_of(acceptance)
    gammas = gammas_of(acceptance) if gammas is None else tuple(gammas)
    if isinstance(cost, RoundCost):
        for option, value in (("--cost", cost.draft), ("--overhead", cost.overhead)):
            _require_between(option, value, 0, math.inf)
        _require_between("--verify", cost.verify, LEAST_COST, math.inf)
    _require_between("--coverage", coverage, 0, 1)
    if coverage != 1 and isinstance(acceptance, EngineRate | tuple):
        problem = "--coverage is given without --alpha, and an engine's length and rates may or may not count all rounds"
        raise OptionInvalid(problem, "give --alpha and --coverage as a report of the draft shows them")
    for gamma in gammas:
        _require_between("--gamma", gamma, 1, LONGEST)
        if longest is not None and gamma > longest:
            known = f"the {longest} rates given" if isinstance(acceptance, tuple) else f"--at-gamma {longest}"
            hint = "give acceptance at that gamma: heads accept less at each further depth"
            raise OptionInvalid(f"--gamma {gamma} is beyond {known}", hint)
    rates = acceptance if isinstance(acceptance, tuple) else ()
    rate = acceptance if isinstance(acceptance, EngineRate) else None
    alpha = acceptance if isinstance(acceptance, int | float) else None
    if rate is not None:
        _require_between("accepted / drafted tokens", rate.accepted_per_drafted, 0, 1)
        alpha = formulas.alpha_of_rate(rate.accepted_per_drafted, rate.gamma)
    elif alpha is not None:
        _require_between("--alpha", alpha, 0, 1)
    predictions = []
    for gamma in gammas:
        # Of a round with a proposal, then over all rounds.
        proposed = 1 + sum(rates[:gamma]) if alpha is None else float(formulas.tokens_per_round(alpha, gamma))
        tokens, length = (float(formulas.over_all_rounds(each, coverage)) for each in (proposed, cost.of_round(gamma)))
        factor = cost.factor if isinstance(cost, ComputedCost) else None
        prediction = GammaPrediction(
            gamma=gamma,
            tokens_per_round=tokens,
            accepted_per_drafted=float(formulas.accepted_per_drafted(proposed, gamma)),
            verify_cost=cost.verification(gamma),
            break_even_length=length,
            break_even_alpha=formulas.break_even_alpha(gamma, cost),  # at any coverage: it adds plain decode steps
            speedup=tokens / length,
            low=tokens / length / factor if factor else None,
            high=tokens / length * factor if factor else None,
        )
        predictions.append(prediction)
    best = max(predictions, key=lambda item: item.speedup)
    given, computed = (cost, None) if isinstance(cost, RoundCost) else (None, cost)
    loads = () if computed is None else tuple(_by_load([computed, *elsewhere], predictions, best.gamma, coverage))
    return Prediction(alpha, coverage, rate, rates, given, computed, tuple(predictions), best.gamma, loads)


def _by_load(
    costs: Sequence[ComputedCost], predictions: Sequence[GammaPrediction], best: int, coverage: float
) -> Iterator[AtLoad]:
    """Yield the gamma at every load, from the first one outward, as reports choose it: the neighbor's, unless another is
    surely faster or that one is slower than decoding without a draft. Sure is what lies beyond the errors that the computed
    steps of a draft do not share.
    """
    from alphaprof.costs.speedup import OWN_ERROR  # which formulas do without

    known = {(each.batch, each.context): each for each in costs}
    values = {
        place: {
            item.gamma: item.tokens_per_round / float(formulas.over_all_rounds(each.of_round(item.gamma), coverage))
            for item in predictions
        }
        for place, each in known.items()
    }

    def choose(place: Place, present: int) -> int:
        if place not in values:
            return present
        here, sure = values[place], known[place].factor ** OWN_ERROR
        fastest = max(here, key=here.__getitem__)
        return fastest if here[present] < 1 or here[fastest] > sure * here[present] else present

    batches, contexts = (sorted(set(side)) for side in zip(*known, strict=True))
    for place, gamma in sorted(over_loads(batches, contexts, next(iter(known)), best, choose).items()):
        if place not in known:
            continue
        value, each = values[place][gamma], known[place]
        if value < 1:
            yield AtLoad(*place, 0, None, None, beyond=False)
        else:
            speedup, decoding = Interval(value, value / each.factor, value * each.factor), each.output * each.decode_ms
            read = (each.batch * ms / decoding for ms in (each.prefill_ms, each.draft_prefill_ms))
            yield AtLoad(*place, gamma, speedup, throughput(speedup, *read), beyond=False)


def acceptance_of(
    alpha: float | None = None,
    rate: float | None = None,
    length: float | None = None,
    rates: str | None = None,
    at_gamma: int | None = None,
) -> Acceptance:
    """Return what the user says about acceptance, in one of four ways. Raises `OptionInvalid` for none of them or
    several, and for rates that are no shares or rise with depth.
    """
    given = [value for value in (alpha, rate, length, rates) if value is not None]
    if len(given) != 1 or (alpha is None and rates is None and at_gamma is None):
        problem = "exactly one acceptance is needed: alpha, rates by depth, or an engine's rate or length with gamma"
        raise OptionInvalid(problem, "give --alpha 0.75, --rates 0.8,0.6,0.5, or --acceptance-length 2.8 --at-gamma 3")
    if alpha is not None:
        return alpha
    if rates is None:
        return EngineRate(rate if length is None else (length - 1) / at_gamma, at_gamma)  # type: ignore[arg-type,operator]
    try:
        by_depth = tuple(map(float, rates.split(",")))
    except ValueError:
        hint = "give shares separated by commas: --rates 0.8,0.6,0.5"
        raise OptionInvalid(f"--rates is {shown(rates)}", hint) from None
    for share in by_depth:
        _require_between("--rates", share, 0, 1)
    if any(later > earlier for earlier, later in itertools.pairwise(by_depth)):
        hint = "give the share of rounds that accepted at least 1, 2, ... drafts: it cannot rise"
        raise OptionInvalid("--rates rise with depth", hint)
    return by_depth


def gammas_of(acceptance: Acceptance, gamma: int | None = None) -> tuple[int, ...]:
    """Return the gammas to predict for: the given one, else up to that of a rate or of the last depth, else 1 to 8."""
    if gamma is not None:
        return (gamma,)
    longest = longest_of(acceptance)
    return GAMMAS if longest is None else tuple(range(1, longest + 1))


def longest_of(acceptance: Acceptance) -> int | None:
    """Return the largest gamma whose acceptance is given; None: one alpha stands for all depths. Raises `OptionInvalid` for
    an impossible one.
    """
    if isinstance(acceptance, EngineRate):
        _require_between("--at-gamma", acceptance.gamma, 1, LONGEST)
        return acceptance.gamma
    return len(acceptance) if isinstance(acceptance, tuple) else None


def predict(
    acceptance: Acceptance,
    gamma: int | None,
    cost: RoundCost | None,
    configs: tuple[Path | None, Path | None],
    hardware: Mapping[str, Any],
    place: tuple[int, int, int],
    coverage: float,
) -> Prediction:
    """Return the prediction that the options of `alphaprof predict` ask for: by the given cost of a round, or by that
    computed from the configs of target and draft on some `hardware` (fields of `RooflineCosts`) at a batch and context, for
    outputs of so many tokens. Raises `OptionInvalid` for both or neither, and what `build_prediction` and `computed_cost`
    raise.
    """
    from alphaprof.config.options import RooflineCosts  # pydantic, which formulas do without

    target, draft = configs
    gammas = gammas_of(acceptance, gamma)
    found: RoundCost | ComputedCost | None = cost
    elsewhere = list[ComputedCost]()
    if cost is None and target is not None and draft is not None:
        asked = RooflineCosts.model_construct(source="roofline", **hardware)
        compute = partial(computed_cost, target, draft, asked, gamma=max(*gammas, 1), output=place[2])
        found = compute(*place[:2])
        batches = {place[0], *RooflineCosts.model_fields["concurrency"].default}
        for load in itertools.product(batches, {place[1], *CONTEXTS}):
            elsewhere += [each] if load != place[:2] and (each := compute(*load)).fits else []
    elif cost is None or not target is draft is None:
        problem = "a round's cost must be either given or computed"
        raise OptionInvalid(problem, "give --cost, or --target-config and --draft-config")
    assert found is not None  # noqa: S101
    return build_prediction(acceptance, found, gammas, coverage, elsewhere)


def computed_cost(
    target: Path, draft: Path, asked: RooflineCosts, batch: int, context: int, gamma: int, output: int = OUTPUT
) -> ComputedCost:
    """Return what rounds of up to `gamma` drafts cost on an accelerator, from two config.json files. Raises `OptionInvalid`
    for an unknown accelerator or engine, and `CostsUnreadable` for a config that cannot be read or counted.
    """
    from alphaprof.costs.cost_model import accuracy, fits, roofline_rows  # the readers of runs, which formulas do without
    from alphaprof.costs.rounds import full_round_costs
    from alphaprof.costs.steps import TARGET, StepTable

    for option, value, known in (
        ("--accelerator", asked.accelerator, ACCELERATORS),
        ("--preset", asked.preset, ENGINES),
    ):
        if value not in known:
            raise OptionInvalid(f"{option}: {shown(value)} is not known", f"choose one of {', '.join(sorted(known))}")
    for option, number in (("--tp", asked.tp), ("--batch", batch), ("--context", context), ("--output-tokens", output)):
        _require_between(option, number, 0 if option == "--context" else 1, math.inf)
    config, draft_config = _read_config(target), _read_config(draft)
    if HEAD in config:
        raise OptionInvalid(f"{target} is a draft head", "give it as --draft-config, and the model's as --target-config")
    shape = _shape_of_config(target, config, ModelShape.from_config, asked.weight_bytes)
    is_head = HEAD in draft_config
    read = partial(ModelShape.of_head, target=shape) if is_head else ModelShape.from_config
    used = _shape_of_config(draft, draft_config, read, None if is_head else asked.draft_weight_bytes)
    heads, prompt = ["draft"] if is_head else [], max(round(context - output / 2), 1)
    rows = roofline_rows(shape, {"draft": used}, asked, gamma, [batch], [context], [prompt], heads, context)
    prefill = {row.model: row.ms for row in rows if row.step == "prefill"}
    times = StepTable(rows).times("draft", gamma, batch, context)
    factor, words = accuracy(asked, batch, context)
    return ComputedCost(
        target=str(target),
        draft=str(draft),
        accelerator=asked.accelerator,
        preset=asked.preset,
        tp=asked.tp,
        batch=batch,
        context=context,
        decode_ms=times.decode.ms,
        verify_ms=tuple(times.target[tokens].ms for tokens in range(2, gamma + 2)),
        draft_ms=times.draft.ms,
        draft_first_ms=tuple(times.draft_first[tokens].ms for tokens in range(1, gamma + 2)) if is_head else (),
        round_ms=times.bookkeeping.ms,
        costs=tuple(full_round_costs(times, gamma)[1:].tolist()),
        factor=factor,
        accuracy=words,
        fits=fits(asked, shape, batch, context),
        output=output,
        prefill_ms=prefill[TARGET],
        draft_prefill_ms=prefill["draft"],
    )


def _read_config(path: Path) -> Mapping[str, Any]:
    from alphaprof.profiling.models.hub import CONFIG, quantization_beside  # pyarrow, which formulas do without

    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CostsUnreadable(f"cannot read {path}: {error.strerror}", "name a config.json of the model") from None
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise CostsUnreadable(f"{path} is not a JSON object", "name the model's config.json")
    if path.name == CONFIG and config.get("quantization_config") is None:
        return config | {"quantization_config": quantization_beside(path.parent)}
    return config


def _shape_of_config(
    path: Path, config: Mapping[str, Any], read: Callable[[Mapping[str, Any]], ModelShape], weight_bytes: float | None
) -> ModelShape:
    """Return the shape that a config says. Raises `CostsUnreadable` for one that cannot be counted."""
    problem, hint = "its numbers do not describe a model", "check the file: step times are computed from its values"
    if config.get("quantization_config") and weight_bytes is None:
        raise CostsUnreadable(f"{path} has quantized weights", "give their size: --weight-bytes 1 for fp8, 0.5 for 4 bits")
    try:
        shape = read(config)
        sizes = (shape.parameters, shape.layers, shape.hidden, shape.heads, shape.head_dim)
        if all(0 < float(value) < math.inf for value in sizes):
            return shape if weight_bytes is None else dataclasses.replace(shape, weight_bytes=weight_bytes)
    except KeyError as error:
        reason = str(error.args[0])
        problem = reason if " " in reason else f"it has no {reason}"
        hint = "use step times of your engine instead: costs: {source: table} (docs/costs.md)"
    except (TypeError, ValueError, ArithmeticError):
        pass
    raise CostsUnreadable(f"the shape of {path} is not known: {problem}", hint)


def _require_between(option: str, value: float, low: float, high: float) -> None:
    if not (low <= value <= high and math.isfinite(value)):
        limits = f"between {low:g} and {high:g}" if math.isfinite(high) else f"{low:g} or above, and finite"
        raise OptionInvalid(f"{option} is {value:g}; it must be {limits}", "correct the value; see --help")


def _outcome_lines(prediction: Prediction) -> Iterator[str]:
    """Yield the speedup at the best gamma, where it would end, and what the numbers are not."""
    best = next(item for item in prediction.gammas if item.gamma == prediction.best_gamma)
    gamma = f"{'best ' if len(prediction.gammas) > 1 else ''}gamma {best.gamma}"
    low, high = (best.speedup if bound is None else bound for bound in (best.low, best.high))
    change = "may be faster or slower" if low <= 1 < high else "is faster" if low > 1 else "is not faster"
    computed = prediction.computed
    whose = "" if computed is None else f" by a roofline of {computed.accelerator}"
    yield f"{gamma}: {_speedup_cell(best)}{whose}, decoding {change} if these inputs hold"
    if computed is not None and computed.batch > 1:
        place = (computed.batch, computed.context)
        (asked,) = (each for each in prediction.loads if (each.concurrency, each.context) == place)
        yield from () if asked.throughput is None else (f"throughput: {fmt.interval(asked.throughput, 'x')}",)
    emitted, cost = fmt.number(best.tokens_per_round), fmt.number(best.break_even_length)
    least = "no alpha makes it faster"
    if best.break_even_alpha is not None:
        here = "" if prediction.alpha is None else f" (here {fmt.share(prediction.alpha)})"
        least = f"it breaks even at alpha {fmt.share(best.break_even_alpha)}{here}"
    yield f"a round emits {emitted} tokens and costs {cost} decode steps; {least}"
    rate, rates = prediction.engine_rate, prediction.rates
    if rate is not None or rates:
        longest = rate.gamma if rate is not None else len(rates)
        yield f"no gamma above {longest}: acceptance is given up to there, and heads accept less at each further depth"
    if prediction.computed is None:
        yield "Computed from formulas, not measured on text: there is no interval. next: run alphaprof profile"
    else:
        yield "No text was measured: the interval covers computed step times only. next: run alphaprof profile"


def _speedup_cell(item: GammaPrediction) -> fmt.Number:
    """Return a speedup with its interval, if it has one."""
    if item.low is None or item.high is None:
        return fmt.number(item.speedup, unit="x")
    return fmt.interval(Interval(item.speedup, item.low, item.high), "x")


def _assumed_lines(prediction: Prediction) -> Iterator[str]:
    """Yield what was given, or computed from shapes."""
    rate, cost, computed = prediction.engine_rate, prediction.cost, prediction.computed
    if prediction.alpha is None:
        yield f"acceptance by depth {', '.join(map(fmt.share, prediction.rates))}"
    else:
        yield f"alpha {fmt.share(prediction.alpha)}, acceptance independent from position to position"
        if prediction.coverage < 1:
            kept = fmt.share(prediction.alpha * prediction.coverage)
            yield f"coverage {fmt.share(prediction.coverage)}: kept at {kept} of all positions"
            yield "probably too high: rounds begin after misses, where prompt lookup finds less than elsewhere"
    if rate is not None:
        says = f"an engine's {rate.accepted_per_drafted:g} accepted/drafted at gamma {rate.gamma}"
        yield f"this alpha is computed from {says}, assuming independence: bursts would raise it"
    if cost is not None:
        steps = f"draft step {cost.draft:g}, verification {cost.verify:g}, overhead of a round {cost.overhead:g}"
        yield f"in plain decode steps: {steps}"
    if computed is not None:
        devices = f"{computed.tp} x {computed.accelerator}" if computed.tp > 1 else computed.accelerator
        yield f"computed for {devices}, batch {computed.batch}, context {fmt.count(computed.context)}: {computed.accuracy}"
        first = f", a head's first step {fmt.number(computed.draft_first_ms[-1])} ms" if computed.draft_first_ms else ""
        yield (
            f"a decode step takes {fmt.number(computed.decode_ms)} ms, verifying {len(computed.verify_ms) + 1} tokens "
            f"{fmt.number(computed.verify_ms[-1])} ms, a draft step {fmt.number(computed.draft_ms)} ms{first}, the engine "
            f"{fmt.number(computed.round_ms)} ms a round"
        )
