"""Rollouts as text: the terminal's tables (rich), or JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.table import Table

from alphaprof.commands.rollout.build import Rollout, Text, Way
from alphaprof.render.json import plain_values
from alphaprof.render.tables import domain_name, named_table, plain, show
from alphaprof.report import format as fmt
from alphaprof.stats.estimate import Interval

FORMAT = "alphaprof-rollout"
VERSION = 1


def rollout_json(rollout: Rollout) -> str:
    """Rollouts as JSON. Unknown values are null, an infinite bound is the string "inf"."""
    content = {"format": FORMAT, "version": VERSION} | plain_values(dataclasses.asdict(rollout))
    return json.dumps(content, indent=2, allow_nan=False)


def rollout_terminal(rollout: Rollout, console: Console) -> None:
    """Print a table for each draft, and what its numbers are."""
    console.print(plain(f"{rollout.target} in {rollout.dtype} on {rollout.device}, batch 1"))
    foreign = f"; left out: {fmt.count(rollout.foreign)} with text that the target did not write" if rollout.foreign else ""
    console.print(f"{fmt.many(rollout.documents, 'document')}{foreign}", highlight=False)
    console.print("A lossy rule writes its own text, not the target's: what it is worth is not measured here,", style="bold")
    console.print("and no verdict follows.\n", style="bold")
    for draft in dict.fromkeys(way.draft for text in rollout.texts for way in text.ways):
        show(_table(rollout, draft), f"draft {draft}", console)
    for line in _notes(rollout):
        console.print(line, style="dim", highlight=False, markup=False)


def _table(rollout: Rollout, draft: str) -> Table:
    table = named_table()
    for name in ("docs", "rule", "gamma", "alpha", "tokens/round", "regret", "excess", "departed", "length"):
        table.add_column(name, justify="left" if name == "rule" else "right", no_wrap=name != "rule")
    for text in rollout.texts:
        for way in text.ways:
            if way.draft == draft:
                table.add_row(*_row(text, way, rollout))
    return table


def _row(text: Text, way: Way, rollout: Rollout) -> Iterator[RenderableType]:
    yield domain_name(text, rollout.texts)
    yield fmt.documents(text.documents, text.clusters)
    yield way.rule
    yield str(way.gamma)
    yield fmt.share_interval(way.alpha)
    yield fmt.interval(way.tokens_per_round)
    yield f"{fmt.number(way.regret.value, 3)} | {fmt.number(text.own.regret.value, 3)}"
    yield fmt.difference(way.excess, 3)
    yield _departed(way.departed, way.departed_at)
    yield f"{way.mean_tokens:.0f} | {text.own.mean_tokens:.0f}"


def _departed(departed: Interval | None, at: float | None) -> str:
    if departed is None:
        return fmt.NOTHING
    return fmt.percent(departed.value) + ("" if at is None else f" at {at:g}")


def _notes(rollout: Rollout) -> Iterator[str]:
    """What the columns are."""
    yield f"[a, b]: {fmt.level(rollout.confidence)} interval over documents."
    yield "alpha: accepted / tested drafts along the rule's own text. Tested: all earlier ones of the round were accepted,"
    yield "and the text had not ended; gamma matters only to which positions these are. A report's one-step alpha is over"
    yield "all positions of the target's own text."
    yield "tokens/round: a draft pays on an engine where a round costs less than that many plain decode steps."
    yield "regret: mean log p(top) - log p(token) in nats per token, plain softmax: the rule's text | the target's own;"
    yield "excess: their difference, paired."
    yield "departed: texts that are not the target's own, and the median place of their first other token."
    yield "length: mean tokens of the rule's texts | of the target's own."
    if not rollout.exact:
        yield f"In {rollout.dtype} near-ties fall either way: some texts depart by that alone; --rule strict says how many."
    if any(text.sampling is not None for text in rollout.texts):
        yield "On sampled text another draw is no departure."
