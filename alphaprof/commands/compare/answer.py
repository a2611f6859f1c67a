"""The paired comparison of two drafts: the value that `alphaprof compare` answers with, and its text (rich)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

from alphaprof.render.tables import named_table, plain, show
from alphaprof.render.wording import text_name
from alphaprof.report import format as fmt
from alphaprof.stats.estimate import Interval

MORE, LESS, SAME = "more", "less", "no difference told apart"
MOST = 3  # domains that a line of the answer names
TEXTS = {
    True: "the same text",
    False: "texts of their own for the same prompts",
    None: "texts that imported runs do not hold: alpha is not known, rounds are",
}


@dataclass(frozen=True)
class TokensDifference:
    """Tokens per round of both at one gamma, and second less first."""

    gamma: int
    first: float  # tokens per round of the first
    second: float  # tokens per round of the second
    difference: Interval  # second less first
    first_by_position: tuple[float, ...]  # share of rounds with a proposal that accepted at least 1, 2, ... drafts; or empty
    second_by_position: tuple[float, ...]  # the same of the second


@dataclass(frozen=True)
class Difference:
    """One domain, kind of text and rule. `difference` is alpha of the second less that of the first; `tokens_per_round` is
    empty where the rule has no rounds on this text.
    """

    domain: str
    continuation: str
    sampling: dict[str, float] | None  # settings that p and q were processed with; None: the plain softmax
    rule: str
    on_policy: bool
    lossy: bool
    documents: int  # paired
    clusters: int  # independent units among them
    first: float | None  # alpha of the first; None: no proposals
    second: float | None  # alpha of the second
    first_coverage: float | None  # share of positions with a proposal; None: imported runs
    second_coverage: float | None  # the same of the second
    difference: Interval | None  # alpha of the second less that of the first
    tokens_per_round: tuple[TokensDifference, ...]  # one a gamma; empty where the rule has no rounds on this text


@dataclass(frozen=True)
class OverallDifference:
    """Tokens per round of one rule on one kind of text, over all its domains together. `tokens_per_round` names no shares by
    position.
    """

    rule: str
    sampling: dict[str, float] | None  # settings that p and q were processed with; None: the plain softmax
    domains: tuple[str, ...]  # that have rounds and a share of the traffic
    weights: dict[str, float] | None  # shares of output tokens, from the first run's decision; None: as documents have them
    documents: int  # paired
    clusters: int  # independent units among them
    tokens_per_round: tuple[TokensDifference, ...]  # one a gamma


@dataclass(frozen=True)
class Comparison:
    """The paired comparison of two drafts. Documents without a partner are left out and counted. Of a run and an import from
    an engine the run is the first, whatever their order, and tokens per round alone are known of both; where their prompts
    cannot be paired, each stands for its domain with documents of its own.
    """

    format: ClassVar[str] = "alphaprof-compare"
    version: ClassVar[str] = "1.0"

    first: str  # run and draft
    second: str  # run and draft
    paired: bool  # document by document; False: independent samples of a domain
    confirms: bool  # the first, a run, predicts; the second is what an engine was seen to do
    confidence: float
    same_text: bool | None  # both measured the same tokens; None: imported runs do not hold them
    documents: int
    interrupted: tuple[str, ...]  # sides whose run is not complete
    unpaired: tuple[int, int]  # documents without a partner: of the first, of the second
    notes: tuple[str, ...]  # where alpha is that of first drafts, or the two do not draft or verify alike
    agreement: str  # whether the engine does what was predicted, in words; empty where nothing was
    gamma: int | None  # that the answer speaks of: the decision's, or the largest of both; None: they have none in common
    overall: tuple[OverallDifference, ...]  # of paired documents; empty where no rule has rounds
    differences: tuple[Difference, ...]  # one for each domain, kind of text and rule

    def terminal(self, console: Console) -> None:
        """Prints which draft gets more accepted, then a table of acceptance, and one of tokens per round."""
        for text in _answer(self):
            console.print(text, highlight=False)
        console.print()
        one, two = _side_names(self)
        console.print(plain(f"{one:<9} {self.first}"))
        console.print(plain(f"{two:<9} {self.second}"))
        paired = f"{fmt.many(self.documents, 'document')} paired by prompt, on {TEXTS[self.same_text]}"
        lone = [fmt.count(number) for number in self.unpaired]
        if self.paired:
            console.print(f"{paired}; without a partner: {lone[0]} of {one}, {lone[1]} of {two}\n", highlight=False)
        else:
            console.print(f"two samples of each domain, not paired: {lone[0]} {one}, {lone[1]} {two}\n", highlight=False)
        if self.same_text is not None:
            show(_acceptance(self), "alpha", console)
        for side in self.interrupted:
            note = plain(f"{side} is of an interrupted run: its first documents only")
            console.print(Text("note: ", "yellow").append_text(note))
        if rounds := [item for item in self.differences if item.tokens_per_round]:
            show(_rounds(self, rounds), "tokens per round", console)
            if self.confirms:
                title = "share of rounds with a proposal whose first 1, 2, ... drafts are accepted"
                show(_positions(self, rounds), title, console)
        for unlike in self.notes:
            console.print(Text("note: ", "yellow").append_text(plain(unlike)))
        for line in _footnotes(self):
            console.print(line, style="dim", highlight=False)


def _side_names(comparison: Comparison) -> tuple[str, str]:
    return ("predicted", "engine") if comparison.confirms else ("first", "second")


def _answer(comparison: Comparison) -> Iterator[Text]:
    """Yields which draft gets more accepted, by how much, where, and what to do next."""
    rules = {each.rule for each in comparison.overall[:1]}
    texts = [
        (text_name(each, comparison.differences), tokens)
        for each in comparison.differences
        for tokens in each.tokens_per_round
        if tokens.gamma == comparison.gamma and (not rules or each.rule in rules)
    ]
    if comparison.overall:
        yield from _over_domains(comparison, comparison.overall[0])
    elif texts:
        texts.sort(key=lambda pair: -abs(pair[1].difference.value))
        yield from (_headline(comparison, tokens, f" in {name}") for name, tokens in texts[:MOST])
    else:
        yield from _by_alpha(comparison)
    if comparison.agreement:
        yield plain(comparison.agreement)
    elif len(texts) > 1:
        words = _grouped((_word(tokens.difference), name) for name, tokens in texts)
        yield plain("by domain: " + "; ".join(f"{word} in {_some(names)}" for word, names in words.items()))
    yield Text(f"next: {_next(comparison, {_word(tokens.difference) for _, tokens in texts})}")


def _over_domains(comparison: Comparison, overall: OverallDifference) -> Iterator[Text]:
    """Yields the difference over all domains, what it is of, and whether other gammas say the same."""
    by_gamma = {each.gamma: each for each in overall.tokens_per_round}
    main = by_gamma.pop(comparison.gamma or 0)
    yield _headline(comparison, main, "")
    one, two = _side_names(comparison)
    domains = "in one domain"
    if len(overall.domains) > 1:
        shares = "the profile's shares" if overall.weights else "their shares"
        domains = f"over {len(overall.domains)} domains by {shares}"
    documents = f"{fmt.documents(overall.documents, overall.clusters)} paired documents"
    others = dict.fromkeys(each.rule for each in comparison.overall if each.rule != overall.rule)
    more = f" ({', '.join(others)}: in the tables)" if others else ""
    values = f"{one} {fmt.number(main.first)}, {two} {fmt.number(main.second)}"
    yield Text(f"{values} {domains}; {documents}; {fmt.level(comparison.confidence)} interval; {overall.rule}{more}")
    if by_gamma:
        words = _grouped((_word(each.difference), str(each.gamma)) for each in by_gamma.values())
        yield Text("at other gammas: " + "; ".join(f"{word} at {', '.join(names)}" for word, names in words.items()))


def _headline(comparison: Comparison, tokens: TokensDifference, where: str) -> Text:
    """The difference at one gamma as a sentence."""
    values = f"{fmt.difference(tokens.difference, 2)} tokens per round at gamma {tokens.gamma}"
    return Text.assemble((fmt.visible(_outcome(comparison, tokens.difference)), "bold"), plain(f"{where}: {values}"))


def _by_alpha(comparison: Comparison) -> Iterator[Text]:
    """Yields the differences of alpha, where no rule has rounds on the text."""
    known = [(each, each.difference) for each in comparison.differences if each.difference is not None]
    for each, difference in known[:MOST]:
        where = f" in {text_name(each, comparison.differences)}, rule {each.rule}"
        outcome = (fmt.visible(_outcome(comparison, difference)), "bold")
        yield Text.assemble(outcome, plain(f"{where}: alpha {fmt.difference(difference, 3)}"))
    yield Text("no rule has rounds on this text: tokens per round are not known" if known else "nothing can be compared")


def _outcome(comparison: Comparison, difference: Interval) -> str:
    word, (one, two) = _word(difference), _side_names(comparison)
    if word == SAME:
        return word
    if comparison.confirms:
        return f"the {two} accepts {word} than {one}"
    drafts = [fmt.short(label.rpartition(":")[2]) for label in (comparison.first, comparison.second)]
    first, second = (f" ({draft})" if drafts[0] != drafts[1] else "" for draft in drafts)
    return f"{two}{second} accepts {word} than {one}{first}"


def _word(difference: Interval) -> str:
    return MORE if difference.low > 0 else LESS if difference.high < 0 else SAME


def _grouped(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for word, name in pairs:
        groups.setdefault(word, []).append(name)
    return groups


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:MOST]) + (f" and {len(names) - MOST} more" if len(names) > MOST else "")


def _next(comparison: Comparison, words: Collection[str]) -> str:
    if comparison.confirms:
        if set(words) <= {SAME}:
            return "alphaprof report of the first turns the prediction into speedups"
        return "the notes below say in what the engine drafts or verifies otherwise"
    if SAME in words:
        return "four times as many documents halve an interval; alphaprof report weighs in what a draft costs"
    return "alphaprof report weighs in what a draft costs; tokens per round say nothing about time"


def _footnotes(comparison: Comparison) -> Iterator[str]:
    """Yields what the columns of the tables mean."""
    one, two = _side_names(comparison)
    paired = "paired, what both share cancels out" if comparison.paired else "of two samples that are not paired"
    yield f"difference: {two} minus {one}, with a {fmt.level(comparison.confidence)} interval over documents, {paired}."
    if comparison.same_text is not None:
        yield "alpha is over positions with a proposal: where coverage differs, compare tokens per round."
        yield (
            "* off-policy: the rule's own decoding would not emit this text   ~ lossy: one step along the target's own text"
        )


def _acceptance(comparison: Comparison) -> Table:
    table = named_table("domain", "rule", "docs", "coverage", "first", "second", "difference", left=("rule",))
    for item in comparison.differences:
        table.add_row(
            plain(text_name(item, comparison.differences)),
            item.rule + fmt.mark(item.on_policy, item.lossy),
            fmt.documents(item.documents, item.clusters),
            f"{fmt.share(item.first_coverage, 2)} / {fmt.share(item.second_coverage, 2)}",
            fmt.share(item.first),
            fmt.share(item.second),
            fmt.difference(item.difference, 3),
        )
    return table


def _rounds(comparison: Comparison, differences: list[Difference]) -> Table:
    table = named_table("domain", "rule", "gamma", *_side_names(comparison), "difference", left=("rule",))
    for item in differences:
        for tokens in item.tokens_per_round:
            numbers = (fmt.number(tokens.first), fmt.number(tokens.second), fmt.difference(tokens.difference, 2))
            table.add_row(plain(text_name(item, differences)), item.rule, str(tokens.gamma), *numbers)
    return table


def _positions(comparison: Comparison, differences: list[Difference]) -> Table:
    names = _side_names(comparison)
    table = named_table("domain", *names, left=names, wrapped=names)
    for item in differences:
        for tokens in item.tokens_per_round:
            sides = (tokens.first_by_position, tokens.second_by_position)
            shares = [" ".join(fmt.share(share) for share in side) or fmt.NOTHING for side in sides]
            table.add_row(plain(text_name(item, differences)), *map(Text, shares))
    return table
