"""`alphaprof predict`: what the formulas say of numbers that a user gives. No run, no model."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from alphaprof.config.hardware import ACCELERATORS
from alphaprof.config.heads import MODEL, DraftForm, as_held, draft_form, layer_of, longest_block
from alphaprof.config.model_files import CONFIG, ModelFiles, quantization_beside
from alphaprof.costs.layers import decoder_of, first_of
from alphaprof.costs.quantization import quantization_of
from alphaprof.costs.shapes import ModelShape
from alphaprof.errors import CostsUnreadable, OptionInvalid, shown
from alphaprof.render import format as fmt
from alphaprof.render.blocks import Block, Small, table_by_columns
from alphaprof.report.loads import CONTEXTS, AtLoad, load_table, throughput
from alphaprof.stats import formulas
from alphaprof.stats.estimate import Interval
from alphaprof.stats.formulas import RoundCost

if TYPE_CHECKING:
    from alphaprof.config.options import RooflineCosts

GAMMAS = tuple(range(1, 9))
LONGEST = 64  # drafts in a round
OUTPUT = 256  # tokens of an output
LEAST_COST = 1e-3  # of a verification, which always takes time
LEAST_BYTES, MOST_BYTES = 0.1, 8  # of a weight


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
    draft_kind: str  # model, or eagle3, eagle, mtp, p-eagle, pard, dflash, dflash2, dspark or gemma4 assistant
    one_pass: bool  # all tokens of a round are drafted at once
    read: tuple[str, ...]  # what the two configs say, in words
    accelerator: str  # the device
    preset: str  # of the serving engine whose overheads count
    tp: int  # devices in tensor parallelism
    batch: int  # sequences decoded at a time
    context: int  # tokens in the cache of each
    decode_ms: float  # a decode step of the target
    verify_ms: tuple[float, ...]  # over 2, 3, ... tokens
    draft_ms: float  # a later step of a head, any of a draft model; 0 for what drafts in one pass
    draft_first_ms: tuple[float, ...]  # of a head or in one pass, after 1, 2, ... verified tokens; empty for a draft model
    round_ms: float  # the engine's overhead of a round
    costs: tuple[float, ...]  # of a round of 1, 2, ... drafts, in decode steps
    factor: float
    accuracy: str  # what the times are made of, in words
    fits: bool  # the target's weights and the caches of the batch fit in the devices' memory
    slots: tuple[float, float] | None  # tokens that the KV cache has room for, without and with the draft; None: none
    output: int  # tokens of an output; its prompt fills the rest of the context
    prefill_ms: float  # of that prompt by the target
    draft_prefill_ms: float  # and by the draft
    path_overhead: float = 0.0  # in decode steps: what the path that speculation forces costs any round

    @property
    def devices(self) -> str:
        """What the times are computed for, in words."""
        return f"{self.tp} x {self.accelerator}" if self.tp > 1 else self.accelerator

    def verification(self, gamma: int) -> float:
        """Return one target step over gamma + 1 tokens, in decode steps."""
        return self.verify_ms[gamma - 1] / self.decode_ms

    def of_round(self, gamma: int) -> float:
        """Return a round of gamma drafts, in decode steps."""
        return self.costs[gamma - 1] + self.path_overhead


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
    version: ClassVar[str] = "3.2"

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
            yield load_table(self.loads, f"{self.computed.draft_kind} by a roofline of {self.computed.devices}")
            yield Small(f"throughput: prefills of all sequences included, outputs of {self.computed.output} tokens.")
            yield Small("acceptance is taken to be the same at every load.")
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
        yield from map(
            Small,
            (
                "accepted/drafted: the acceptance rate of engines; depends on gamma and is not alpha.",
                "tokens/round: emitted by a round, the target's own included (engines: mean acceptance length).",
                "break-even: tokens/round at a speedup of 1 (the cost of a round in decode steps), and its alpha.",
            ),
        )


def build_prediction(
    acceptance: Acceptance,
    cost: RoundCost | ComputedCost,
    gammas: Iterable[int] | None = None,
    coverage: float = 1.0,
    elsewhere: Iterable[ComputedCost] = (),
) -> Prediction:
    """Return predictions for an alpha, for the one that gives an engine's rate, or for rates by depth. `gammas`: by default
    those of `gammas_of`; `coverage`: the share of positions with a proposal, beside an alpha; `elsewhere`: a computed cost
    at other loads. Raises `OptionInvalid` for impossible values, and for a gamma above that of a rate or of the last depth.
    """
    longest = longest_of(acceptance)
    gammas = gammas_of(acceptance) if gammas is None else tuple(gammas)
    if isinstance(cost, RoundCost):
        given = (("--cost", cost.draft), ("--overhead", cost.overhead), ("--path-overhead", cost.path_overhead))
        for option, value in given:
            _require_between(option, value, 0, math.inf)
        _require_between("--verify", cost.verify, LEAST_COST, math.inf)
    _require_between("--coverage", coverage, 0, 1)
    if coverage != 1 and isinstance(acceptance, EngineRate | tuple):
        raise OptionInvalid(
            "--coverage is given without --alpha, and an engine's length and rates may or may not count all rounds",
            "give --alpha and --coverage as a report of the draft shows them",
        )
    for gamma in gammas:
        _require_between("--gamma", gamma, 1, LONGEST)
        if longest is not None and gamma > longest:
            known = f"the {longest} rates given" if isinstance(acceptance, tuple) else f"--at-gamma {longest}"
            raise OptionInvalid(
                f"--gamma {gamma} is beyond {known}",
                "give acceptance at that gamma: heads accept less at each further depth",
            )
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
        tokens, length = float(formulas.over_all_rounds(proposed, coverage)), _mean_round(cost, gamma, coverage)
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
    by_hand, computed = (cost, None) if isinstance(cost, RoundCost) else (None, cost)
    loads = () if computed is None else tuple(_by_load([computed, *elsewhere], predictions, coverage))
    return Prediction(alpha, coverage, rate, rates, by_hand, computed, tuple(predictions), best.gamma, loads)


def _mean_round(cost: RoundCost | ComputedCost, gamma: int, coverage: float) -> float:
    """Return the mean cost of all rounds, in decode steps: one without a draft takes the same path."""
    return float(formulas.over_all_rounds(cost.of_round(gamma), coverage)) + (1 - coverage) * cost.path_overhead


def _by_load(costs: Sequence[ComputedCost], predictions: Sequence[GammaPrediction], coverage: float) -> Iterator[AtLoad]:
    """Yield the fastest gamma at every load, as reports choose it."""
    for each in sorted(costs, key=lambda cost: (cost.batch, cost.context)):
        place = each.batch, each.context
        values = {item.gamma: item.tokens_per_round / _mean_round(each, item.gamma, coverage) for item in predictions}
        gamma = max(values, key=values.__getitem__)
        value = values[gamma]
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
        raise OptionInvalid(
            "exactly one acceptance is needed: alpha, rates by depth, or an engine's rate or length with gamma",
            "give --alpha 0.75, --rates 0.8,0.6,0.5, or --acceptance-length 2.8 --at-gamma 3",
        )
    if alpha is not None:
        return alpha
    if rates is None:
        return EngineRate(rate if length is None else (length - 1) / at_gamma, at_gamma)  # type: ignore[arg-type,operator]
    return formulas.shares_by_depth("--rates", rates)


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
    path_overhead: float = 0.0,
) -> Prediction:
    """Return the prediction that the options of `alphaprof predict` ask for: by the given cost of a round, or by that
    computed from the configs of target and draft on some `hardware` (fields of `RooflineCosts`) at `place`: batch size,
    tokens of context and tokens of an output. `path_overhead`: see `RoundCost`. Raises `OptionInvalid` if both costs or none
    are given or a block holds fewer drafts, and what `build_prediction`, `read_pair` and `computed_cost` raise.
    """
    from alphaprof.config.options import RooflineCosts  # pydantic, which formulas do without

    target, draft = configs
    gammas = gammas_of(acceptance, gamma)
    found: RoundCost | ComputedCost | None = cost
    elsewhere = list[ComputedCost]()
    if cost is None and target is not None and draft is not None:
        asked = RooflineCosts.model_construct(source="roofline", **hardware)
        batch, context, output = place
        given = {"--tp": asked.tp, "--batch": batch, "--context": context, "--output-tokens": output}
        for option, number in given.items():
            _require_between(option, number, 0 if option == "--context" else 1, math.inf)
        if asked.weight_bytes is not None:
            _require_between("--weight-bytes", asked.weight_bytes, LEAST_BYTES, MOST_BYTES)
        pair = read_pair(target, draft, asked.weight_bytes)
        if pair.longest is not None and max(gammas) > pair.longest:
            if gamma is not None or longest_of(acceptance) is not None:
                raise OptionInvalid(
                    f"{draft} drafts at most {pair.longest} tokens in a block", f"give --gamma {pair.longest} or less"
                )
            gammas = tuple(each for each in gammas if each <= pair.longest)
        most = min(max(*gammas, 1), LONGEST)
        _require_between("--path-overhead", path_overhead, 0, math.inf)
        found = computed_cost(pair, asked, batch, context, most, output, path_overhead)
        for load in itertools.product({batch, *RooflineCosts.model_fields["concurrency"].default}, {context, *CONTEXTS}):
            there = found if load == (batch, context) else computed_cost(pair, asked, *load, most, output, path_overhead)
            elsewhere += [there] if there is not found and there.fits else []
    elif cost is None or not target is draft is None:
        raise OptionInvalid(
            "a round's cost must be either given or computed", "give --cost, or --target-config and --draft-config"
        )
    assert found is not None  # noqa: S101
    return build_prediction(acceptance, found, gammas, coverage, elsewhere)


@dataclass(frozen=True)
class Pair:
    """What the config.json files of target and draft say, `read`: in words. `longest`: drafts in a block, if that ends."""

    target_path: Path
    draft_path: Path
    form: DraftForm
    target: ModelShape
    draft: ModelShape
    longest: int | None
    read: tuple[str, str]


def read_pair(target: Path, draft: Path, weight_bytes: float | None = None) -> Pair:
    """Return what two config.json files say. `weight_bytes`: of the target, by default those that it declares. Raises
    `OptionInvalid` for a target that is a head, and `CostsUnreadable` for configs that cannot be read or counted or do not
    fit.
    """
    config, draft_config = _read_config(target), _read_config(draft)
    decoder, tensors = decoder_of(config), ModelFiles.of(draft.parent).tensors if draft.name == CONFIG else ()
    form = _counted(draft, lambda: draft_form(draft_config, decoder_of(draft_config), decoder, tensors))
    if not _counted(target, lambda: draft_form(config, decoder, {})).whole:
        raise OptionInvalid(f"{target} is a draft head", "give it as --draft-config, and the model's as --target-config")
    shape = _counted(target, lambda: ModelShape.from_config(config, weight_bytes))
    whole = decoder if weight_bytes is None else {**decoder, "quantization_config": None}
    used = _counted(draft, lambda: _draft_shape(draft, draft_config, tensors, form, shape, whole))
    longest = _counted(draft, lambda: longest_block(draft_config, form))
    of_target = _read_of(target, config, shape, MODEL, weight_bytes is None)
    read = of_target, _read_of(draft, draft_config, used, form, weight_bytes is None or not form.module)
    return Pair(target, draft, form, shape, used, longest, read)


def computed_cost(
    pair: Pair, asked: RooflineCosts, batch: int, context: int, gamma: int, output: int = OUTPUT, path_overhead: float = 0.0
) -> ComputedCost:
    """Return what rounds of up to `gamma` drafts cost. Raises `OptionInvalid` for an unknown accelerator or preset."""
    from alphaprof.costs.cost_model import accuracy, fits, roofline_rows  # the readers of runs, which formulas do without
    from alphaprof.costs.roofline import cache_slots
    from alphaprof.costs.rounds import full_round_costs
    from alphaprof.costs.steps import TARGET, StepTable

    if asked.accelerator not in ACCELERATORS:
        raise OptionInvalid(
            f"--accelerator: {shown(asked.accelerator)} is not known", f"choose one of {', '.join(sorted(ACCELERATORS))}"
        )
    form, shapes, prompt = pair.form, (pair.target, {"draft": pair.draft}), max(round(context - output / 2), 1)
    heads = [] if form == MODEL else ["draft"]
    # The rows of a draft in one pass are as many as it drafts.
    lengths = range(1, gamma + 1) if form.one_pass else [gamma]
    rows = [roofline_rows(*shapes, asked, each, [batch], [context], [prompt], heads, context) for each in lengths]
    every = [StepTable(each).times("draft", most, batch, context) for each, most in zip(rows, lengths, strict=True)]
    prefill, times = {row.model: row.ms for row in rows[-1] if row.step == "prefill"}, every[-1]
    if form.one_pass:
        costs = [full_round_costs(each, drafts)[drafts] for drafts, each in enumerate(every, 1)]
    else:
        costs = list(full_round_costs(times, gamma)[1:])
    factor, words = accuracy(asked, batch, context, pair.target, gamma, not (form.whole or form.one_pass))
    return ComputedCost(
        target=str(pair.target_path),
        draft=str(pair.draft_path),
        draft_kind=form.name,
        one_pass=form.one_pass,
        read=pair.read,
        accelerator=asked.accelerator,
        preset=asked.preset,
        tp=asked.tp,
        batch=batch,
        context=context,
        decode_ms=times.decode.ms,
        verify_ms=tuple(times.target[tokens].ms for tokens in range(2, gamma + 2)),
        draft_ms=times.draft.ms,
        draft_first_ms=tuple(times.draft_first[tokens].ms for tokens in range(1, gamma + 2)) if heads else (),
        round_ms=times.bookkeeping.ms,
        costs=tuple(map(float, costs)),
        factor=factor,
        accuracy=words,
        fits=fits(asked, pair.target, batch, context),
        slots=cache_slots(pair.target, pair.draft, ACCELERATORS[asked.accelerator].memory, asked.tp, form.module),
        output=output,
        prefill_ms=prefill[TARGET],
        draft_prefill_ms=prefill["draft"],
        path_overhead=path_overhead,
    )


def _read_config(path: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CostsUnreadable(f"cannot read {path}: {error.strerror}", "name a config.json of the model") from None
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise CostsUnreadable(f"{path} is not a JSON object", "name the model's config.json")
    beside, declared = quantization_beside(path), config.get("quantization_config")
    if beside is None or not isinstance(declared, dict | None):
        return config
    return config | {"quantization_config": beside | (declared or {})}


def _draft_shape(
    path: Path,
    config: Mapping[str, Any],
    tensors: Collection[str],
    form: DraftForm,
    target: ModelShape,
    decoder: Mapping[str, Any],
) -> ModelShape:
    """Return the shape of a draft. Raises `CostsUnreadable` for a head whose hidden size or vocabulary is not the target's,
    and what `_counted` turns into it.
    """
    if form.whole:
        shape = ModelShape.from_config(config)
        return shape.at_once() if form.one_pass else shape
    layer = decoder_of(layer_of(config))
    hidden = first_of(config, "target_hidden_size", "backbone_hidden_size") or layer.get("hidden_size")
    ids = layer.get("vocab_size") or target.vocabulary
    # Padding makes vocabularies of one tokenizer differ a little.
    if (hidden or target.hidden) != target.hidden or abs(ids - target.vocabulary) > 0.01 * target.vocabulary:
        problem = f"a head for hidden size {hidden} and {ids} ids; the target has {target.hidden} and {target.vocabulary}"
        raise CostsUnreadable(f"{path} is {problem}", "give the head that was trained for this target")
    if form.module:
        return ModelShape.of_mtp(decoder, target)
    return ModelShape.of_head(as_held(config, tensors), target, form)


def _read_of(path: Path, config: Mapping[str, Any], shape: ModelShape, form: DraftForm, declared: bool) -> str:
    """Return what a config says, in words. `declared`: the bytes of its weights are those that it declares."""
    size = f"{fmt.number(shape.parameters / 1e9)}B parameters"
    size += f", {fmt.number(shape.active_parameters / 1e9)}B of them for a token" if shape.experts else ""
    sizes = {"weights": shape.weight_bytes, "experts": shape.expert_bytes, "head": shape.head_bytes}
    each = ", ".join(f"{name} {value:.3g} B" for name, value in sizes.items() if value)
    found = quantization_of(decoder_of(config)) if declared and (form.whole or form.module) else None
    method = found.name if found else "16-bit" if declared else "as given"
    cache = f"{fmt.number(shape.kv_bytes_per_token / 1000)} kB of cache a token"
    return f"{form.name} of {path}: {size}; {method} ({each}); {cache}"


def _counted(path: Path, read: Callable[[], Any]) -> Any:
    """Return what is read of a config. Raises `CostsUnreadable` for one that cannot be counted or has impossible numbers."""
    problem, hint = "its numbers do not describe a model", "check the file: step times are computed from its values"
    try:
        found = read()
        if not isinstance(found, ModelShape):
            return found
        positive = ("parameters", "layers", "hidden", "heads", "kv_heads", "head_dim")
        numbers = all(0 <= value < math.inf for value in vars(found).values())
        if numbers and all(getattr(found, name) > 0 for name in positive) and found.experts_per_token <= found.experts:
            return found
    except LookupError as error:
        reason = str(error.args[0])
        problem = reason if " " in reason else f"it has no {reason}"
        hint = "use step times of your engine instead: costs: {source: table} (docs/costs.md)"
    except (TypeError, ValueError, ArithmeticError, AttributeError):
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
    whose = "" if computed is None else f" by a roofline of {computed.devices}"
    yield f"{gamma}: {_speedup_cell(best)}{whose}, decoding {change} if these inputs hold"
    if computed is not None and not computed.fits:
        caches = f"caches of {fmt.many(computed.batch, 'sequence')}"
        yield f"target and {caches} do not fit in the memory of {computed.devices}: raise --tp"
    elif computed is not None and computed.batch > 1:
        place = (computed.batch, computed.context)
        (asked,) = (each for each in prediction.loads if (each.concurrency, each.context) == place)
        yield from () if asked.throughput is None else (f"throughput: {fmt.interval(asked.throughput, 'x')}",)
    emitted, cost = fmt.number(best.tokens_per_round), fmt.number(best.break_even_length)
    least = f"even a perfect draft loses at that cost: a round emits {best.gamma + 1} tokens at most"
    if best.break_even_alpha is not None:
        here = "" if prediction.alpha is None else f" (here {fmt.share(prediction.alpha)})"
        least = f"it breaks even at alpha {fmt.share(best.break_even_alpha)}{here}"
    yield f"a round emits {emitted} tokens and costs {cost} decode steps; {least}"
    rate, rates = prediction.engine_rate, prediction.rates
    if rate is not None or rates:
        longest = rate.gamma if rate is not None else len(rates)
        yield f"no gamma above {longest}: acceptance is given up to there, and heads accept less at each further depth"
    elif prediction.computed is not None and prediction.computed.draft_first_ms and prediction.best_gamma > 1:
        yield "one alpha for all depths: heads accept less at each further one, so give a length and its gamma, or --rates"
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
        steps += f", of the path {cost.path_overhead:g}" if cost.path_overhead else ""
        yield f"in plain decode steps: {steps}"
    if computed is not None:
        yield from computed.read
        place = f"{computed.devices}, batch {computed.batch}, context {fmt.count(computed.context)}"
        yield f"computed for {place}: {computed.accuracy}"
        draft, first = f"a draft step {fmt.number(computed.draft_ms)} ms", ""
        if computed.draft_first_ms:
            first = f", a head's first step {fmt.number(computed.draft_first_ms[-1])} ms"
        if computed.one_pass:
            draft, first = f"drafting all of a round in one pass {fmt.number(computed.draft_first_ms[-1])} ms", ""
        yield (
            f"a decode step takes {fmt.number(computed.decode_ms)} ms, verifying {len(computed.verify_ms) + 1} tokens "
            f"{fmt.number(computed.verify_ms[-1])} ms, {draft}{first}, the engine "
            f"{fmt.number(computed.round_ms)} ms a round"
        )
        if computed.slots is not None:
            yield fmt.slots(*computed.slots)
