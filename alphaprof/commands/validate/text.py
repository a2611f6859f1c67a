"""A prediction beside what was measured as text: the terminal's tables (rich), or JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from alphaprof.commands.validate.build import (
    AgainstGenerate,
    Cell,
    PredictedMeasured,
    RoundTime,
    Validation,
    narrowing,
    verdict_reason,
    within_interval,
)
from alphaprof.commands.validate.timings import RelativeError
from alphaprof.render.json import plain_values
from alphaprof.render.tables import named_table, plain, show
from alphaprof.render.wording import text_name
from alphaprof.report import format as fmt

FORMAT = "alphaprof-validate"
VERSION = 1


def validation_json(validation: Validation) -> str:
    """The comparison as JSON. Unknown values are null."""
    content = {"format": FORMAT, "version": VERSION}
    return json.dumps(content | plain_values(dataclasses.asdict(validation)), indent=2, allow_nan=False)


def validation_terminal(validation: Validation, console: Console) -> None:
    """Print what was predicted beside what was measured, where the time of a round went, and how far off that is."""
    console.print(plain(f"{validation.target} in {validation.dtype} on {validation.device}, batch 1"))
    for line in _facts(validation):
        console.print(line, highlight=False)
    console.print()
    show(_speedups(validation), "predicted | measured", console)
    show(_rounds(validation.cells), "where the time goes, in ms: predicted | measured", console)
    if validation.generate:
        show(_calls(validation.generate), "whole calls, prefill included: our loop and transformers' generate", console)
    for line in (*validation.not_generated, *_checks(validation)):
        console.print(plain(line))
    for line in _legend(validation):
        console.print(line, style="dim", highlight=False, markup=False)
    console.print(_summary(validation), highlight=False)


def _legend(validation: Validation) -> Iterator[str]:
    yield "speedup: decode time without / with a draft, no prefill, in alphaprof's own loop (transformers' forward passes)."
    yield "error: predicted / measured - 1 [97.5 % interval over documents, repeats and step times]."
    if validation.cpu is not None:
        yield "CPU: time of this process on all cores, which a busy machine disturbs less than the wall clock."
    yield "other: predicted, taking rejected tokens out of the caches; measured, all that this loop does between steps."
    if validation.generate:
        yield (
            "added: what generate takes longer than our loop, in a round with the draft (a model is called through its own "
            "generate there) and for a token without."
        )


def _facts(validation: Validation) -> Iterator[str]:
    left = [
        (validation.short, "with fewer than two tokens"),
        (validation.foreign, "with text that the target did not write"),
    ]
    without = "".join(f"; left out: {fmt.count(count)} {why}" for count, why in left if count)
    yield f"{fmt.many(validation.documents, 'document')}, {fmt.many(validation.repeats, 'repeat')}{without}"
    if validation.contexts:
        timed = f"steps were timed at {' and '.join(map(fmt.count, validation.contexts))} tokens of context"
        yield f"{timed}; these documents have {validation.mean_context:.0f} on average"
    if validation.run is not None:
        yield f"the prediction is that of the run {validation.run}"


def _speedups(validation: Validation) -> Table:
    cells = validation.cells
    table = named_table("draft")
    table.add_column("domain", overflow="fold", max_width=22)
    cpu = ("CPU", "error") if validation.cpu is not None else ()
    for name in ("rule", "gamma", "tokens/round", "speedup", "wall", "error", *cpu):
        table.add_column(name, justify="left" if name == "rule" else "right", no_wrap=True)
    for cell in cells:
        by_cpu = (fmt.number(cell.cpu_speedup, unit="x"), _error(cell.cpu_error)) if cpu else ()
        table.add_row(
            plain(cell.draft),
            plain(text_name(cell, cells)),
            cell.rule,
            str(cell.gamma),
            _both(cell.tokens_per_round),
            fmt.number(cell.predicted_speedup, unit="x"),
            fmt.number(cell.wall_speedup, unit="x"),
            _error(cell.error),
            *by_cpu,
        )
    return table


def _calls(calls: tuple[AgainstGenerate, ...]) -> Table:
    table = named_table(
        "draft", "gamma", "documents", "same text", "our loop", "generate", "added a round", "added a plain token"
    )
    for call in calls:
        added = (f"{call.added_ms:+.2f} ms", f"{call.plain_added_ms:+.2f} ms")
        speedups = (fmt.number(call.loop_speedup, 3, "x"), fmt.number(call.generate_speedup, 3, "x"))
        table.add_row(plain(call.draft), str(call.gamma), str(call.documents), str(call.same_text), *speedups, *added)
    return table


def _rounds(cells: tuple[Cell, ...]) -> Table:
    table = named_table("draft")
    table.add_column("domain", overflow="fold", max_width=22)
    for name in ("gamma", "plain step", "drafting", "verification", "other", "round"):
        table.add_column(name, justify="right", no_wrap=True)
    for cell in cells:
        sides = (cell.predicted_round_ms, cell.measured_round_ms)
        parts = [
            _both(PredictedMeasured(*(_part(side, name) for side in sides)), 2)
            for name in ("draft", "verify", "other", "total")
        ]
        table.add_row(plain(cell.draft), plain(text_name(cell, cells)), str(cell.gamma), _both(cell.decode_ms, 2), *parts)
    return table


def _part(time: RoundTime | None, name: str) -> float | None:
    if time is None:
        return None
    return time.draft + time.verify + time.other if name == "total" else float(getattr(time, name))


def _both(both: PredictedMeasured, digits: int = 2) -> str:
    return f"{fmt.number(both.predicted, digits)} | {fmt.number(both.measured, digits)}"


def _error(error: RelativeError | None) -> str:
    if error is None:
        return fmt.NOTHING
    high = fmt.signed_percent(error.high) if math.isfinite(error.high) else "inf"
    return f"{fmt.signed_percent(error.value)} [{fmt.signed_percent(error.low)}, {high}]"


def _checks(validation: Validation) -> Iterator[str]:
    """What was equal, text by text: in float32 everything should be."""
    known = [cell for cell in validation.cells if cell.same_text is not None]
    texts = sum(cell.documents for cell in known)
    same = sum(cell.same_text or 0 for cell in known)
    rounds = sum(cell.same_rounds or 0 for cell in known)
    yield (
        f"plain texts equal to the profiled ones: {validation.plain_same_text} of {validation.documents}; "
        f"with a draft: {same} of {texts}; rounds equal to the replay: {rounds} of {texts}"
    )
    if known and not validation.exact:
        yield f"in {validation.dtype} near-ties fall either way; tokens per round are of the text that was decoded"
    elif known and (same < texts or rounds < texts):
        yield "in float32 all of them should be equal: near-ties, or a draft that proposes less than expected"
    by_chance = [cell for cell in validation.cells if cell.same_text is None]
    if by_chance:
        held = sum(within_interval(cell) is True for cell in by_chance)
        yield (
            "lossless draws other texts than the run did, so tokens per round also differ by chance: measured within the "
            f"predicted 95 % interval in {held} of {len(by_chance)} rows"
        )


def _summary(validation: Validation) -> Text:
    """What was decided, and why."""
    if validation.outcome is None:
        return Text("NOT PREDICTED: no steps were timed, so there is no speedup to compare with the clock\n", "bold red")
    words = {
        "within": ("WITHIN", "bold green"),
        "outside": ("OUTSIDE", "bold red"),
        "too_noisy": ("TOO NOISY TO TELL", "bold yellow"),
    }
    word, colour = words[validation.outcome]
    text = Text.assemble((word, colour), f": {verdict_reason(validation)}")
    if validation.outcome == "too_noisy":
        text.append(f"\nto narrow the intervals: {narrowing(validation)}")
    return text.append("\n")
