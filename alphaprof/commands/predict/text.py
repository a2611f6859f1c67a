"""A prediction as text: the terminal's table (rich), or JSON."""

from __future__ import annotations

import dataclasses
import json

from rich import box
from rich.console import Console
from rich.table import Table

from alphaprof.commands.predict.build import Prediction
from alphaprof.render.json import plain_values
from alphaprof.report import format as fmt

FORMAT = "alphaprof-predict"
VERSION = 1


def prediction_json(prediction: Prediction) -> str:
    """The prediction as JSON. Unknown values are null."""
    content = {"format": FORMAT, "version": VERSION} | plain_values(dataclasses.asdict(prediction))
    return json.dumps(content, indent=2, allow_nan=False)


def prediction_terminal(prediction: Prediction, console: Console) -> None:
    """Print what was assumed, a row for each gamma, and which number is which."""
    for line in (*_assumed(prediction), ""):
        console.print(line, highlight=False)
    console.print(_table(prediction))
    best = prediction.best
    word = "pays" if best.speedup > 1 else "does not pay"
    which = f"best gamma {best.gamma}" if len(prediction.gammas) > 1 else f"gamma {best.gamma}"
    console.print(f"{which}: {fmt.number(best.speedup, unit='x')}, the draft {word} if all of this holds\n", highlight=False)
    for line in (
        "alpha: share of all positions where the draft's proposal is kept; does not depend on gamma.",
        "accepted/drafted: what engines call acceptance rate; depends on gamma, and is not alpha.",
        "tokens/round: emitted by a round, the target's own token included (engines: mean acceptance length).",
        "break-even: tokens/round where the speedup is 1 (what a round costs in plain decode steps), and the alpha for it.",
        "These are formulas: no text was measured, so there is no interval. alphaprof profile measures.",
    ):
        console.print(line, style="dim", highlight=False)


def _assumed(prediction: Prediction) -> tuple[str, ...]:
    burst, rate, cost = prediction.burstiness, prediction.engine_rate, prediction.cost
    kind = "independent from position to position" if burst == 0 else f"with burstiness (lag-1 autocorrelation) {burst:g}"
    lines = [f"alpha {fmt.share(prediction.alpha)}, acceptance {kind}"]
    if rate is not None:
        says = f"an engine's {rate.accepted_per_drafted:g} accepted/drafted at gamma {rate.gamma}"
        assumes = "assuming independence: bursts would mean a higher one" if burst == 0 else "assuming that burstiness"
        lines.append(f"this alpha is worked out from {says}, {assumes}")
    slope = f" + {cost.verify_slope:g} a drafted token" if cost.verify_slope else ""
    steps = f"draft step {cost.draft:g}, verification {cost.verify:g}{slope}, overhead of a round {cost.overhead:g}"
    return (*lines, f"in plain decode steps: {steps}")


def _table(prediction: Prediction) -> Table:
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("gamma", "tokens/round", "accepted/drafted", "break-even", "break-even alpha", "speedup"):
        table.add_column(name, justify="right", no_wrap=True)
    for item in prediction.gammas:
        table.add_row(
            str(item.gamma),
            fmt.number(item.tokens_per_round),
            fmt.share(item.accepted_per_drafted),
            fmt.number(item.break_even_length),
            "none" if item.break_even_alpha is None else fmt.share(item.break_even_alpha),
            fmt.number(item.speedup, unit="x"),
            style="bold" if item.gamma == prediction.best_gamma else "",
        )
    return table
