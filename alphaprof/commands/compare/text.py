"""A comparison as text: the terminal's tables (rich), or JSON."""

from __future__ import annotations

import dataclasses
import json

from rich.console import Console
from rich.table import Table
from rich.text import Text

from alphaprof.commands.compare.build import Comparison, Difference
from alphaprof.render.json import plain_values
from alphaprof.render.tables import named_table, plain, show
from alphaprof.render.wording import text_name
from alphaprof.report import format as fmt

FORMAT = "alphaprof-compare"
VERSION = 1
TEXTS = {
    True: "the same text",
    False: "texts of their own for the same prompts",
    None: "texts that imported runs do not hold: alpha is not known, rounds are",
}


def comparison_json(comparison: Comparison) -> str:
    """The comparison as JSON. Unknown values are null."""
    content = {"format": FORMAT, "version": VERSION} | plain_values(dataclasses.asdict(comparison))
    return json.dumps(content, indent=2, allow_nan=False)


def comparison_terminal(comparison: Comparison, console: Console) -> None:
    """Print the comparison: a table of acceptance, and one of tokens per round where rules have rounds."""
    console.print(plain(f"first   {comparison.first}"))
    console.print(plain(f"second  {comparison.second}"))
    text = TEXTS[comparison.same_text]
    left = ", ".join(
        f"{fmt.count(count)} of {name}" for count, name in zip(comparison.unpaired, ("first", "second"), strict=True)
    )
    console.print(
        f"{fmt.many(comparison.documents, 'document')} paired by prompt, on {text}; without a partner: {left}\n",
        highlight=False,
    )
    if comparison.same_text is not None:
        show(_acceptance(comparison), "alpha", console)
    for side in comparison.interrupted:
        console.print(
            Text("note: ", "yellow").append_text(plain(f"{side} is of an interrupted run: its first documents only"))
        )
    if rounds := [item for item in comparison.differences if item.tokens_per_round]:
        show(_rounds(rounds), "tokens per round", console)
    for line in (
        f"difference: second minus first, with a {fmt.level(comparison.confidence)} interval over documents; what "
        "both share",
        "cancels out.",
        "alpha is over positions with a proposal: where coverage differs, compare tokens per round.",
        "Tokens per round say nothing about what a draft costs: alphaprof report turns them into speedups.",
        "* off-policy: the rule's own decoding would not emit this text   ~ lossy: one step along the target's own text",
    ):
        console.print(line, style="dim", highlight=False)


def _acceptance(comparison: Comparison) -> Table:
    table = named_table("domain", "rule", "docs", "coverage", "first", "second", "difference", left=("rule",))
    for item in comparison.differences:
        coverage = f"{fmt.share(item.first_coverage, 2)} / {fmt.share(item.second_coverage, 2)}"
        alphas = (fmt.share(item.first), fmt.share(item.second))
        table.add_row(
            plain(text_name(item, comparison.differences)),
            item.rule + fmt.mark(item.on_policy, item.lossy),
            fmt.documents(item.documents, item.clusters),
            coverage,
            *alphas,
            fmt.difference(item.difference, 3),
        )
    return table


def _rounds(differences: list[Difference]) -> Table:
    table = named_table("domain", "rule", "gamma", "first", "second", "difference", left=("rule",))
    for item in differences:
        for found in item.tokens_per_round:
            numbers = (fmt.number(found.first), fmt.number(found.second), fmt.difference(found.difference, 2))
            table.add_row(plain(text_name(item, differences)), item.rule, str(found.gamma), *numbers)
    return table
