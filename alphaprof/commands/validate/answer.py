"""A prediction beside what was measured: the value that `alphaprof validate` answers with, its tables (rich), verdict."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from alphaprof.errors import CheckUndecided, OutsideTolerance, StepsNotTimed
from alphaprof.render.blocks import text_name
from alphaprof.render.tables import NAME_WIDTH, named_table, plain, show
from alphaprof.report import format as fmt
from alphaprof.rules import parse_rule
from alphaprof.stats.estimate import Interval

Outcome = Literal["within", "outside", "too_noisy"]
WORDS = {
    "within": ("WITHIN", "bold green"),
    "outside": ("OUTSIDE", "bold red"),
    "too_noisy": ("TOO NOISY TO TELL", "bold yellow"),
}


@dataclass(frozen=True)
class PredictedMeasured:
    """A number as it was predicted and as it was measured."""

    predicted: float | None  # None: no step times
    measured: float | None  # None: nothing was decoded


@dataclass(frozen=True)
class RoundTime:
    """Where the mean round goes, in ms. Predicted, `other` is what taking tokens out of the caches was timed to take."""

    draft: float  # all draft steps of a round
    verify: float  # verification by the target
    other: float  # the rest of a round


@dataclass(frozen=True)
class RelativeError:
    """Predicted / measured - 1 of a speedup with its interval. `low` is -1 or above; `high` may be infinite."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Cell:
    """One draft on one kind of text at one gamma. Speedups are of decoding, prefill excluded.

    `timing_error`: relative standard error that the step times give the predicted speedup. `error`, `cpu_error`: predicted /
    measured - 1, with the interval that documents, repeats and step times give it, at 97.5 %. `decode_ms`: a plain decode
    step. `same_text`, `same_rounds`: documents whose text is the profiled one, and whose rounds are those of the replay;
    None where both are a matter of chance. `predicted_tokens`: tokens per round with the interval that documents give it,
    at 95 %. A lossy rule writes its own text, so nothing is predicted of it.
    `excess_regret`: mean log p(top) - log p(token) of its text, p the target's plain softmax, less that of the target's own
    text, in nats per token, paired by document, at 95 %.
    """

    draft: str
    domain: str
    continuation: str
    sampling: dict[str, float] | None
    rule: str
    gamma: int
    documents: int
    tokens_per_round: PredictedMeasured  # tokens emitted per round, over all rounds
    predicted_tokens: Interval | None
    predicted_speedup: float | None  # from the rounds of the replay and the step times of the run
    timing_error: float | None
    wall_speedup: float | None  # measured by the wall clock
    cpu_speedup: float | None  # measured in CPU time of the process; None on a GPU, of which that says nothing
    error: RelativeError | None
    cpu_error: RelativeError | None
    same_text: int | None
    same_rounds: int | None
    decode_ms: PredictedMeasured
    predicted_round_ms: RoundTime | None  # None: no step times
    measured_round_ms: RoundTime | None  # None: no rounds
    excess_regret: Interval | None  # None: the rule keeps the target's distribution

    @property
    def lossy(self) -> bool:
        """Whether its rule writes another text than the target."""
        return parse_rule(self.rule).rule.lossy


@dataclass(frozen=True)
class ClockError:
    """Absolute error of predicted speedups by one clock: the median over rows with its 95 % interval, and the largest."""

    median: float  # over rows
    low: float
    high: float
    worst: float  # the largest of all rows
    outcome: Outcome  # by this clock alone


@dataclass(frozen=True)
class Validation:
    """The whole comparison. `plain_same_text`: of all `documents`, those whose plain decoding is the profiled text.

    `exact`: all models run in float32, so every text and every round should be equal. `contexts`: tokens in the cache while
    steps were timed, between which times are interpolated; `mean_context`: of the documents. `outcome`: whether the median
    absolute error of the speedup is within the tolerance, outside of it, or too noisy to tell; on a CPU by the wall clock
    and by CPU time together: outside where both say so, within where one does and the other does not say outside. None
    where no speedup was predicted.
    """

    format: ClassVar[str] = "alphaprof-validate"
    version: ClassVar[str] = "1.0"

    run: str | None
    target: str
    device: str
    dtype: str
    exact: bool
    repeats: int  # how often every text was decoded in every way
    documents: int
    short: int  # documents left out: fewer than two tokens
    foreign: int  # documents left out: the target did not write their text
    plain_same_text: int
    contexts: tuple[int, ...]
    mean_context: float
    tolerance: float  # the largest median error that passes
    outcome: Outcome | None
    wall: ClockError | None  # by the wall clock; None: no speedup was predicted
    cpu: ClockError | None  # by the CPU time of the process; None: on a GPU too
    cells: tuple[Cell, ...]  # one for each draft, domain, kind of text and gamma

    def terminal(self, console: Console) -> None:
        """Prints how far off the prediction is, what was predicted and measured, and where the time of a round went."""
        console.print(_summary(self), highlight=False)
        console.print(plain(f"{self.target} in {self.dtype} on {self.device}, batch 1"))
        facts = f"{fmt.many(self.documents, 'document')}, {fmt.many(self.repeats, 'repeat')}"
        facts += f"; left out: {fmt.count(self.short)} with fewer than two tokens" if self.short else ""
        facts += f"; left out: {fmt.count(self.foreign)} with text that the target did not write" if self.foreign else ""
        if self.contexts:
            facts += f"\nsteps were timed at {' and '.join(map(fmt.count, self.contexts))} tokens of context"
            facts += f"; these documents have {self.mean_context:.0f} on average"
        if self.run is not None:
            facts += f"\nthe prediction is that of the run {self.run}"
        console.print(f"{facts}\n", highlight=False)
        exact = tuple(cell for cell in self.cells if not cell.lossy)
        show(_speedups(exact, self.cpu is not None), "predicted | measured", console)
        if lossy := tuple(cell for cell in self.cells if cell.lossy):
            show(_lossy(lossy), "lossy rules, measured: what their text gains and gives up", console)
        show(_rounds(self.cells), "where the time goes, in ms: predicted | measured", console)
        for line in _checks(self):
            console.print(plain(line))
        for line in _legend(self):
            console.print(line, style="dim", highlight=False, markup=False)


def require_within(validation: Validation, undecided_fails: bool) -> None:
    """Raise `OutsideTolerance`, `StepsNotTimed` where nothing was predicted, or `CheckUndecided` where that is asked for."""
    if validation.outcome is None:
        raise StepsNotTimed("nothing to judge: no steps were timed, or nothing was decoded", "the lines above say why")
    if validation.outcome == "outside":
        problem = f"the predicted speedup is outside the tolerance: {verdict_reason(validation)}"
        raise OutsideTolerance(problem, next_step(validation))
    if validation.outcome == "too_noisy" and undecided_fails:
        raise CheckUndecided(f"too noisy to tell: {verdict_reason(validation)}", next_step(validation))


def verdict_reason(validation: Validation) -> str:
    """Why the outcome is what it is, in words."""
    medians = []
    for clock, by in ((validation.wall, "by the wall clock"), (validation.cpu, "by CPU time")):
        if clock is not None:
            high = f"{100 * clock.high:.1f}%" if math.isfinite(clock.high) else "inf"
            medians.append(f"{100 * clock.median:.1f}% [{100 * clock.low:.1f}%, {high}] {by}")
    return f"median error {', '.join(medians)} (95 % intervals); tolerance {100 * validation.tolerance:.4g}%"


def _legend(validation: Validation) -> Iterator[str]:
    yield "speedup: decode time without / with a draft, no prefill, in alphaprof's own loop (transformers' forward passes)."
    yield "error: predicted / measured - 1 [97.5 % interval over documents, repeats and step times]."
    if validation.cpu is not None:
        yield "CPU: time of this process on all cores, which a busy machine disturbs less than the wall clock."
    yield "other: predicted, taking rejected tokens out of the caches; measured, all that this loop does between steps."
    if any(cell.lossy for cell in validation.cells):
        yield "excess regret: nats per token that the target would not have given up; whether the text is good enough is not"
        yield "measured here: judge it by your own task."


def _table(*columns: str) -> Table:
    """An empty table of cells: draft, domain, and other columns."""
    table = named_table("draft", "domain", *columns, left=("domain", "rule"), wrapped=("domain",))
    table.columns[1].overflow, table.columns[1].max_width = "fold", NAME_WIDTH
    return table


def _speedups(cells: tuple[Cell, ...], by_cpu: bool) -> Table:
    table = _table("rule", "gamma", "tokens/round", "speedup", "wall", "error", *(("CPU", "error") if by_cpu else ()))
    for cell in cells:
        cpu = (fmt.number(cell.cpu_speedup, unit="x"), _error(cell.cpu_error))
        table.add_row(
            plain(cell.draft),
            plain(text_name(cell, cells)),
            cell.rule,
            str(cell.gamma),
            _both(cell.tokens_per_round),
            fmt.number(cell.predicted_speedup, unit="x"),
            fmt.number(cell.wall_speedup, unit="x"),
            _error(cell.error),
            *(cpu if by_cpu else ()),
        )
    return table


def _lossy(cells: tuple[Cell, ...]) -> Table:
    table = _table("rule", "gamma", "tokens/round", "wall", "excess regret", "same text")
    for cell in cells:
        same = fmt.NOTHING if cell.same_text is None else f"{cell.same_text} of {cell.documents}"
        table.add_row(
            plain(cell.draft),
            plain(text_name(cell, cells)),
            cell.rule,
            str(cell.gamma),
            fmt.number(cell.tokens_per_round.measured),
            fmt.number(cell.wall_speedup, unit="x"),
            fmt.difference(cell.excess_regret, 3),
            same,
        )
    return table


def _rounds(cells: tuple[Cell, ...]) -> Table:
    table = _table("gamma", "plain step", "drafting", "verification", "other", "round")
    for cell in cells:
        sides = [_parts(cell.predicted_round_ms), _parts(cell.measured_round_ms)]
        parts = [_both(PredictedMeasured(*part)) for part in zip(*sides, strict=True)]
        table.add_row(plain(cell.draft), plain(text_name(cell, cells)), str(cell.gamma), _both(cell.decode_ms), *parts)
    return table


def _parts(time: RoundTime | None) -> list[float | None]:
    """The parts of a round, and all of it."""
    return [None] * 4 if time is None else [time.draft, time.verify, time.other, time.draft + time.verify + time.other]


def _both(both: PredictedMeasured) -> str:
    return f"{fmt.number(both.predicted)} | {fmt.number(both.measured)}"


def _error(error: RelativeError | None) -> str:
    if error is None:
        return fmt.NOTHING
    high = fmt.signed_percent(error.high) if math.isfinite(error.high) else "inf"
    return f"{fmt.signed_percent(error.value)} [{fmt.signed_percent(error.low)}, {high}]"


def _checks(validation: Validation) -> Iterator[str]:
    """Yields what was equal, text by text: in float32 everything should be."""
    exact = [cell for cell in validation.cells if not cell.lossy]
    fixed = [cell for cell in exact if cell.same_text is not None]
    texts = sum(cell.documents for cell in fixed)
    same = sum(cell.same_text or 0 for cell in fixed)
    rounds = sum(cell.same_rounds or 0 for cell in fixed)
    yield (
        f"plain texts equal to the profiled ones: {validation.plain_same_text} of {validation.documents}; "
        f"with a draft: {same} of {texts}; rounds equal to the replay: {rounds} of {texts}"
    )
    if fixed and not validation.exact:
        yield f"in {validation.dtype} near-ties fall either way; tokens per round are of the text that was decoded"
    elif fixed and (same < texts or rounds < texts):
        yield "in float32 all of them should be equal: near-ties, or a draft that proposes less than expected"
    if by_chance := [cell for cell in exact if cell.same_text is None]:
        pairs = [(cell.predicted_tokens, cell.tokens_per_round.measured) for cell in by_chance]
        within = sum(
            bool(expected and measured and expected.low <= measured <= expected.high) for expected, measured in pairs
        )
        yield (
            "lossless draws other texts than the run did, so tokens per round also differ by chance: measured within the "
            f"predicted 95 % interval in {within} of {len(by_chance)} rows"
        )


def _summary(validation: Validation) -> Text:
    if validation.outcome is None:
        return Text("NOT PREDICTED: no steps were timed, so there is no speedup to compare with the clock\n", "bold red")
    text = Text.assemble(WORDS[validation.outcome], f": {verdict_reason(validation)}\n")
    known = [cell for cell in validation.cells if cell.error is not None]
    if known:
        worst = max(known, key=lambda cell: abs(cell.error.value) if cell.error is not None else 0.0)
        where = f"{fmt.short(worst.draft)} in {text_name(worst, validation.cells)} at gamma {worst.gamma}"
        speeds = f"{fmt.number(worst.predicted_speedup, unit='x')}, measured {fmt.number(worst.wall_speedup, unit='x')}"
        text.append_text(plain(f"largest error by the wall clock: {where}, predicted {speeds}, {_error(worst.error)}"))
        text.append("\n")
    return text.append(f"next: {next_step(validation)}\n")


def next_step(validation: Validation) -> str:
    """What to do about an outcome."""
    if validation.outcome == "within":
        return "alphaprof profile and report: their speedups hold for this loop here, not for an engine"
    if validation.outcome == "outside":
        return "the table of round times shows where the time goes; alphaprof latency times the steps again"
    if validation.repeats < 2:
        return "one repeat does not show how repeats differ: --repeats 3"
    if 2 * sum(cell.documents < 2 for cell in validation.cells) >= len(validation.cells):
        return "one document of a domain does not show how documents differ: --documents 4"
    return "use an idle machine, more --documents and --repeats, or a higher costs.budget"
