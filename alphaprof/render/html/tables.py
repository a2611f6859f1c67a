"""The tables of the page, by section, from a `Report`: headings and cells as text, which the page escapes. They compute
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from alphaprof.render import wording
from alphaprof.report import format as fmt
from alphaprof.report.build import Report
from alphaprof.report.model import GammaResult, Result, Traffic
from alphaprof.report.sections.attribution import CAUSES, Attribution, Cause
from alphaprof.report.sections.certificates import Certificate, LosslessBounds
from alphaprof.report.sections.difficulty import Decile, DocumentResult
from alphaprof.report.sections.predictability import Budget, CertainRun, Predictability
from alphaprof.report.sections.vocabulary import VocabularyCoverage
from alphaprof.stats.estimate import Interval

FEW_MARK = "'"
MARKS = {
    "*": "* off-policy: the rule's own decoding would not emit this text",
    "~": "~ lossy: one step at a time along the target's own text; what it emits itself is not measured",
}
Item = TypeVar("Item", Attribution, LosslessBounds, Predictability, Result, VocabularyCoverage)
Columns = Mapping[str, Callable[[Item], str]]
Row = tuple[str, Mapping[str, str]]  # its name, and its cells by heading


@dataclass(frozen=True)
class PageTable:
    """A table of the page. Each row begins with its name, which the first heading says the kind of."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    draft: str | None = None  # that it is about: hidden with it
    footer: Sequence[Sequence[str]] = ()
    notes: Sequence[str] = ()  # below it
    words: Sequence[str] = ()  # headings of columns that hold words, not numbers
    folded: bool = False  # whether it is shown on request: a figure has its numbers


def _by_item(
    title: str,
    items: Sequence[Item],
    columns: Columns[Item],
    among: Sequence[wording.OfText] | None = None,
    *,
    draft: str | None = None,
    notes: Sequence[str] = (),
    words: Sequence[str] = (),
) -> Iterator[PageTable]:
    """Yields a table with a row for each item, nothing without items. Items are named by their text `among` others."""
    if items:
        texts = items if among is None else among
        rows: list[list[str]] = []
        for item in items:
            cells: list[str] = [cell(item) for cell in columns.values()]
            rows.append([wording.text_name(item, texts, not item.on_policy), *cells])
        yield PageTable(title, ("domain", *columns), rows, draft, notes=notes, words=words)


def _crossed(
    title: str,
    rows: Sequence[Row],
    *,
    named: str = "domain",
    draft: str | None = None,
    footer: Sequence[Row] = (),
    notes: Sequence[str] = (),
    folded: bool = False,
) -> Iterator[PageTable]:
    """Yields a table of rows whose cells are known by their headings, nothing without rows."""
    heads = list(dict.fromkeys(head for _, cells in rows for head in cells))
    if heads:
        body, foot = ([[name, *(cells.get(head, "") for head in heads)] for name, cells in part] for part in (rows, footer))
        yield PageTable(title, (named, *heads), body, draft, foot, notes, folded=folded)


def _judged(report: Report) -> Iterator[tuple[str, str, list[Result]]]:
    """Yields each draft, each rule that a verdict concerns, and their results."""
    for draft in report.run.drafts:
        mine = [item for item in report.results if item.draft == draft and item.verdict is not None]
        for rule in dict.fromkeys(item.rule for item in mine):
            yield draft, rule, [item for item in mine if item.rule == rule]


def _others(report: Report) -> Iterator[tuple[str, list[Result]]]:
    """Yields each draft with its results under the rules that no verdict concerns."""
    for draft in report.run.drafts:
        yield draft, [item for item in report.results if item.draft == draft and item.verdict is None]


def _alpha(report: Report, draft: str) -> str:
    """Heads the column of acceptance: a head's is that of a first draft alone."""
    return "accept@1" if report.run.draft_models[draft].by_depth else "α"


def _of_best(cell: Callable[[GammaResult], str]) -> Callable[[Result], str]:
    """Returns how a result is written by its best gamma, from how that is."""
    return lambda result: cell(best) if (best := wording.at_best(result)) else fmt.NOTHING


def _formula(value: str, error: float | None) -> str:
    """What the textbook formula would have said, and by how much it is too high."""
    return value if error is None else f"{value} ({fmt.signed_percent(error)})"


def drafts(report: Report) -> Iterator[PageTable]:
    """Yields the results of each draft by domain, and how much of each text it can propose."""
    for draft, rule, results in _judged(report):
        every = [item for item in report.results if item.draft == draft]
        names = [wording.text_name(item, every, not item.on_policy) for item in results]
        reasons: dict[str, list[str]] = {}
        for name, item in zip(names, results, strict=True):
            if item.verdict == "UNDECIDED":
                reasons.setdefault(item.reason, []).append(name)
        every_one = "every domain" if len(results) > 1 else names[0]
        notes = [f"{every_one if same == names else ', '.join(same)}: {reason}." for reason, same in reasons.items()]
        columns = _columns_of_domains(_alpha(report, draft), results)
        title = f"draft {draft}, rule {rule}: by domain"
        yield from _by_item(title, results, columns, every, draft=draft, notes=notes, words=["verdict"])
    for draft in report.run.drafts:
        yield from _vocabulary(draft, [item for item in report.vocabulary if item.draft == draft])


def _columns_of_domains(alpha: str, results: Sequence[Result]) -> Columns[Result]:
    """Returns the columns that say something of these results. `alpha`: what acceptance is called."""
    columns: dict[str, Callable[[Result], str]] = {
        "verdict": lambda item: str(item.verdict),
        "docs": lambda item: fmt.documents(item.documents, item.clusters),
        "coverage": lambda item: fmt.share(item.coverage),
        alpha: lambda item: fmt.share_with_interval(item.alpha),
        "γ": lambda item: str(item.best_gamma or fmt.NOTHING),
        "tokens/round": _of_best(lambda best: fmt.interval(best.tokens_per_round)),
        "iid formula": _of_best(
            lambda best: (
                fmt.NOTHING if best.iid_error is None else _formula(fmt.number(best.iid_tokens_per_round), best.iid_error)
            )
        ),
        "break-even": _of_best(lambda best: fmt.number(best.break_even_length)),
        "speedup": lambda item: fmt.interval(item.speedup, "x"),
        "of all": wording.of_all,
    }
    covered = all(item.coverage == 1 for item in results)
    if covered:
        del columns["coverage"]
    if not any(map(wording.of_all, results)):
        del columns["of all"]
    if not covered or alpha != "α":  # the formula takes acceptance for the same at every depth and place
        del columns["iid formula"]
    return columns


def _vocabulary(draft: str, items: Sequence[VocabularyCoverage]) -> Iterator[PageTable]:
    columns: Columns[VocabularyCoverage] = {
        "docs": lambda item: str(item.documents),
        "positions": lambda item: fmt.count(item.positions),
        "can propose": lambda item: fmt.share_with_interval(item.proposable),
    }
    note = "Share of the tokens that the draft has in its vocabulary: no rule that keeps the text accepts more."
    yield from _by_item(f"draft {draft}: coverage of its vocabulary", items, columns, draft=draft, notes=[note])


def gammas(report: Report) -> Iterator[PageTable]:
    """Yields rounds by gamma and by depth, under the rules of the verdict."""
    for draft, rule, results in _judged(report):
        yield from _lengths(draft, rule, results)
        if report.run.draft_models[draft].by_depth or report.run.imported is not None:
            yield from _depths(draft, rule, results)


def _lengths(draft: str, rule: str, results: Sequence[Result]) -> Iterator[PageTable]:
    """Yields tokens per round and speedup for every gamma."""
    shown = [item for item in results if item.gammas]
    rows = [
        (wording.text_name(item, results, not item.on_policy), {str(each.gamma): _length(each) for each in item.gammas})
        for item in shown
    ]
    first = shown[0].gammas if shown else ()
    timed = bool(first) and first[0].break_even_length is not None
    costs = [
        ("full round costs", {str(item.gamma): fmt.number(item.full_round_cost) for item in first}),
        ("v = T(γ+1)/T(1)", {str(item.gamma): fmt.number(item.verify_cost) for item in first}),
    ]
    what = "tokens per round / speedup" if timed else "tokens per round"
    title = f"draft {draft}, rule {rule}: {what} by γ"
    yield from _crossed(title, rows, draft=draft, footer=costs if timed else ())


def _length(item: GammaResult) -> str:
    tokens = fmt.number(item.tokens_per_round.value if item.tokens_per_round else None)
    return tokens if item.speedup is None else f"{tokens} / {fmt.number(item.speedup.value)}"


def _depths(draft: str, rule: str, results: Sequence[Result]) -> Iterator[PageTable]:
    """Yields acceptance by depth at the largest gamma."""
    rows: list[Row] = []
    for result in results:
        if not result.gammas or None in result.gammas[-1].reached:
            continue
        last, cells = max(result.gammas, key=lambda item: item.gamma), {}
        for depth, (one, first, reached) in enumerate(zip(last.conditional, last.marginal, last.reached, strict=True), 1):
            mark = FEW_MARK if one is not None and (reached or 0) < wording.FEW else ""
            cells[str(depth)] = f"{fmt.share(one)}{mark} / {fmt.share(first)}"
        rows.append((wording.text_name(result, results, not result.on_policy), cells))
    few = any(FEW_MARK in cell for _, cells in rows for cell in cells.values())
    largest = max((len(cells) for _, cells in rows), default=0)
    what = f"accepted by depth at γ {largest}: of drafts that were reached / first d drafts of a round"
    notes = [f"{FEW_MARK} of fewer than {wording.FEW} drafts"] if few else []
    yield from _crossed(f"draft {draft}, rule {rule}, {what}", rows, draft=draft, notes=notes)


def rules(report: Report) -> Iterator[PageTable]:
    """Yields acceptance under the rules that the verdict does not concern, their rounds, and acceptance by phase."""
    for draft, others in _others(report):
        alpha = _alpha(report, draft)
        rows = [
            (name, {item.rule: fmt.share_with_interval(item.alpha) + _mark(item) for item in same})
            for name, same in wording.by_text(others).items()
        ]
        marks = {_mark(item) for item in others}
        notes = [note for mark, note in MARKS.items() if mark in marks]
        yield from _crossed(f"draft {draft}: {alpha} under other rules", rows, draft=draft, notes=notes)
        mine = [item for item in report.results if item.draft == draft]
        shown = {item.gammas for item in mine if item.verdict is not None}  # rules can coincide (prompt lookup)
        for rule in dict.fromkeys(item.rule for item in others if item.gammas and item.gammas not in shown):
            same = [item for item in others if item.rule == rule]
            yield from _lengths(draft, rule, same)
            if report.run.draft_models[draft].by_depth or report.run.imported is not None:
                yield from _depths(draft, rule, same)
        phases: Columns[Result] = {
            "rule": lambda item: item.rule + _mark(item),
            "thinking": lambda item: fmt.share_with_interval(item.phases["thinking"].alpha),
            "answer": lambda item: fmt.share_with_interval(item.phases["answer"].alpha),
            "share of thinking": lambda item: fmt.percent(item.phases["thinking"].positions / item.positions),
        }
        phased = [item for item in mine if item.phases]
        yield from _by_item(f"draft {draft}: {alpha} by phase", phased, phases, (), draft=draft, words=["rule"])


def _mark(result: Result) -> str:
    return fmt.mark(result.on_policy, result.lossy)


def causes(report: Report) -> Iterator[PageTable]:
    """Yields what each draft loses, a column a cause, and what removing a cause could bring."""
    groups: dict[tuple[str, str], list[Attribution]] = {}
    for item in report.causes:
        groups.setdefault((item.draft, item.rule), []).append(item)
    for (draft, rule), items in groups.items():
        names = [name for name in CAUSES if any(cause.name == name for item in items for cause in item.causes)]
        losses: dict[str, Callable[[Attribution], str]] = {"lost": lambda item: fmt.percent(item.lost.value)}
        losses |= {name: partial(_share_of, name=name) for name in names}
        gains: Columns[Attribution] = {
            "most to gain": lambda item: item.best or fmt.NOTHING,
            "γ": lambda item: str(item.gamma or fmt.NOTHING),
            "now": lambda item: wording.reached(item.tokens_per_round, item.speedup),
            "with it": lambda item: (
                wording.reached(best.tokens_per_round, best.speedup) if (best := _best(item)) else fmt.NOTHING
            ),
            "nothing lost": lambda item: wording.reached(None, item.perfect_speedup),
        }
        remedies = {best.name: best.remedy for item in items if (best := _best(item))}
        notes = [f"{name}: {remedies[name]}" for name in names if name in remedies]
        title, words = f"draft {draft}, rule {rule}", ["most to gain"]
        yield from _by_item(f"{title}: what is lost, by cause", items, losses, draft=draft)
        what = "what removing a cause could bring (x: speedup; t: tokens per round, without step times)"
        yield from _by_item(f"{title}: {what}", items, gains, draft=draft, notes=notes, words=words)


def _best(item: Attribution) -> Cause | None:
    return next((cause for cause in item.causes if cause.name == item.best), None)


def _share_of(item: Attribution, name: str) -> str:
    return next((fmt.percent(cause.share.value) for cause in item.causes if cause.name == name), "")


def load(report: Report) -> Iterator[PageTable]:
    """Yields the best speedup at every concurrency, and up to which of them the draft pays."""
    traffic = report.traffic
    if traffic.load:
        yield from _by_load(f"all traffic, draft {traffic.draft}, rule {traffic.rule}", None, [("all traffic", traffic)])
    for draft, rule, results in _judged(report):
        items = [(wording.text_name(item, results, not item.on_policy), item) for item in results if item.load]
        yield from _by_load(f"draft {draft}, rule {rule}", draft, items)


def _by_load(title: str, draft: str | None, items: Sequence[tuple[str, Result | Traffic]]) -> Iterator[PageTable]:
    known = list(dict.fromkeys(each.concurrency for _, item in items for each in item.load))
    rows = [
        (
            name,
            dict.fromkeys(map(str, known), fmt.NOTHING)
            | {str(each.concurrency): wording.best_at(each) for each in item.load}
            | {"pays up to": wording.pays(item.pays_up_to, known)},
        )
        for name, item in items
    ]
    yield from _crossed(f"{title}: best speedup (γ) of all documents, by sequences decoded at a time", rows, draft=draft)


def requests(report: Report) -> Iterator[PageTable]:
    """Yields what requests and single documents see of a speedup, at the gamma that was chosen."""
    for draft, rule, results in _judged(report):
        columns: dict[str, Callable[[GammaResult], str]] = {
            "γ": lambda best: str(best.gamma),
            "speedup": lambda best: fmt.number(best.speedup.value if best.speedup else None, unit="x"),
            "whole requests": lambda best: fmt.number(
                best.request_speedup.value if best.request_speedup else None, unit="x"
            ),
            "documents p10 / p50 / p90": _spread_of_documents,
            "slower": lambda best: fmt.percent(best.of_documents.slower) if best.of_documents else fmt.NOTHING,
            "iid would have said": lambda best: _formula(fmt.number(best.iid_speedup, unit="x"), best.iid_speedup_error),
        }
        if report.run.draft_models[draft].by_depth:
            del columns["iid would have said"]
        shown = [item for item in results if (best := wording.at_best(item)) and best.of_documents]
        cells = {name: _of_best(cell) for name, cell in columns.items()}
        title = f"draft {draft}, rule {rule}: requests and single documents"
        yield from _by_item(title, shown, cells, results, draft=draft)


def _spread_of_documents(best: GammaResult) -> str:
    of = best.of_documents
    return " / ".join(map(fmt.number, (of.p10, of.p50, of.p90))) if of else fmt.NOTHING


def certificates(report: Report) -> Iterator[PageTable]:
    """Yields what thresholds say about each draft."""
    found = report.certificates
    if found is None:
        return
    infinite, nothing = wording.without_mean_divergence(report), wording.uncertified(report)
    for draft in dict.fromkeys(item.draft for item in found.certificates):
        if draft not in nothing:
            mine = [item for item in found.certificates if item.draft == draft]
            yield from _certified(draft, mine, draft not in infinite)
            rules = {item.rule for item in mine}
            tenths = [item for item in report.difficulty if item.draft == draft and item.rule in rules]
            yield from _tenths(draft, "certified of accepted", tenths, _certain)
        yield from _lossless(draft, [item for item in found.lossless if item.draft == draft], draft in infinite)


def _certified(draft: str, mine: Sequence[Certificate], averaged: bool) -> Iterator[PageTable]:
    """Yields what is certain of a draft. `averaged`: whether its divergence has a mean."""
    texts: dict[tuple[str, str, str, bool], list[Certificate]] = {}
    for item in mine:
        texts.setdefault((item.domain, item.continuation, str(item.sampling), item.on_policy), []).append(item)
    named = [(wording.text_name(same[0], mine, not same[0].on_policy), same) for same in texts.values()]
    certain = sum(round(item.certified.value * item.positions) for item in mine)
    wrong = sum(item.contradicted for item in mine)
    counted = f"{fmt.count(wrong)} of {fmt.count(certain)} certified positions, all rules together"
    title = f"draft {draft}: certified of accepted, by domain"
    rows = [(name, {item.rule: _certain(item) for item in same}) for name, same in named]
    yield from _crossed(title, rows, draft=draft, notes=[f"Certified and yet rejected: {counted}."])
    if averaged:
        rows = [(name, {item.rule: _rejected(item) for item in same}) for name, same in named]
        yield from _crossed(f"draft {draft}: share rejected, and at most at this mean KL(p‖q)", rows, draft=draft)


def _certain(item: Certificate | Decile) -> str:
    if item.certified is None or item.accepted is None:
        return fmt.NOTHING
    bounds = f"[{fmt.share(item.certified.low, 2)}, {fmt.share(item.certified.high, 2)}]"
    return f"{fmt.share(item.certified.value)} of {fmt.share(item.accepted.value)} {bounds}"


def _rejected(item: Certificate) -> str:
    return f"{fmt.share(1 - item.accepted.value)} ≤ {fmt.share(item.rejected_at_most)}"


def _lossless(draft: str, bounds: Sequence[LosslessBounds], cut: bool) -> Iterator[PageTable]:
    """Yields beta and its bounds; of a draft whose vocabulary is `cut` no infinite means."""
    columns: dict[str, Callable[[LosslessBounds], str]] = {
        "β": lambda item: fmt.share_with_interval(item.beta),
        "bound": lambda item: fmt.share_with_interval(item.sharp),
        "mean of the smaller KL": lambda item: fmt.number(item.mean_divergence),
        "bound from the mean": lambda item: fmt.share(item.from_mean),
    }
    if cut and all(math.isinf(item.mean_divergence) for item in bounds):
        columns = dict(list(columns.items())[:2])
    title = f"draft {draft}: lossless acceptance, and what the smaller KL of each position guarantees"
    note = "Of text that was not sampled: β at temperature 1 along it; lossless sampling would not write it."
    below = [note] if any(item.sampling is None for item in bounds) else []
    yield from _by_item(title, bounds, columns, draft=draft, notes=below)


def predictability(report: Report) -> Iterator[PageTable]:
    """Yields what the target alone says."""
    texts = report.predictability
    columns: dict[str, Callable[[Predictability], str]] = {
        "docs": lambda item: str(item.documents),
        "entropy, nats": lambda item: _spread(item.entropy),
        "margin": lambda item: _spread(item.margin),
        "mean top probability": lambda item: fmt.share_with_interval(item.top_prob),
    }
    if any(item.free for item in texts):
        columns |= {
            "free draft: α": lambda item: fmt.share_with_interval(item.free[0].alpha if item.free else None),
            "coverage": lambda item: fmt.share(item.free[0].coverage if item.free else None),
            "tokens/round": lambda item: fmt.interval(item.free[0].tokens_per_round if item.free else None),
        }
    title = "the target alone: how predictable is it? Median, and from the tenth to the ninetieth percentile"
    yield from _by_item(title, texts, columns)
    if not texts:
        return
    names = [wording.text_name(item, texts, not item.on_policy) for item in texts]
    budgets = [(name, {each.rule: _budget(each) for each in item.budgets}) for name, item in zip(names, texts, strict=True)]
    yield from _crossed("KL budget, nats: where half / 90 % / 99 % of the positions are still certain", budgets)
    runs = [
        (name, {f"KL ≤ {run.epsilon:g}": _run(run) for run in item.runs if run.rule == "strict"})
        for name, item in zip(names, texts, strict=True)
    ]
    title = f"rule strict, γ {texts[0].runs[0].gamma}: what is certain of any draft whose KL(p‖q) is nowhere larger"
    note = "Share of positions; mean run of certain tokens from a position on; least tokens per round."
    yield from _crossed(title, runs, notes=[note])


def _spread(values: Sequence[Interval]) -> str:
    low, middle, high = values
    return f"{fmt.interval(middle)}; {fmt.number(low.value)} to {fmt.number(high.value)}"


def _budget(item: Budget) -> str:
    return " / ".join(fmt.interval(value, digits=3) for value in (item.half, item.ninety, item.ninety_nine))


def _run(run: CertainRun) -> str:
    """What is certain under a rule, for any draft with a bounded divergence."""
    parts = [fmt.share_with_interval(run.certain), f"run {fmt.interval(run.mean_run)}"]
    return "; ".join(parts + ([f"≥ {fmt.interval(run.tokens_per_round)}"] if run.tokens_per_round else []))


def difficulty(report: Report) -> Iterator[PageTable]:
    """Yields what is accepted, by tenths of the target's margin and entropy."""
    for draft in dict.fromkeys(item.draft for item in report.difficulty):
        mine = [item for item in report.difficulty if item.draft == draft]
        yield from _tenths(draft, "accepted", mine, lambda item: fmt.share_with_interval(item.accepted))


def _tenths(draft: str, what: str, items: Sequence[Decile], cell: Callable[[Decile], str]) -> Iterator[PageTable]:
    """Yields a table for each axis and kind of text: a row a tenth, a column a rule."""
    for axis in dict.fromkeys(item.axis for item in items):
        for kind, same in wording.by_kind([item for item in items if item.axis == axis]).items():
            rows: dict[tuple[float | None, float | None], tuple[str, dict[str, str]]] = {}
            for item in same:
                rows.setdefault((item.low, item.high), (_range(item), {}))[1][item.rule] = cell(item)
            unit = ", nats" if axis == "entropy" else ""
            title = f"draft {draft}: {what}, by tenths of the target's {axis}{unit}{kind}"
            yield from _crossed(title, list(rows.values()), named=axis, draft=draft, folded=True)


def _range(item: Decile) -> str:
    """A tenth by where it begins: the next one begins where it ends."""
    edge = item.high if item.low is None else item.low
    if edge is None:
        return "all"
    value = fmt.share(edge) if item.axis == "margin" else fmt.number(edge, 3)
    return f"{'below' if item.low is None else 'from'} {value}"


def documents(report: Report) -> Iterator[PageTable]:
    """Yields the documents that each draft serves worst and best."""
    data = report.run.profile.get("data", [])
    sources = {place: str(source["path"]).rstrip("/").rsplit("/", 1)[-1] for place, source in enumerate(data)}
    for draft in report.run.drafts:
        columns: dict[str, Callable[[DocumentResult], str]] = {
            "document": lambda item: str(item.document),
            "source": lambda item: fmt.short(str(sources.get(item.source, item.source))),
            "row": lambda item: str(item.source_row),
            "tokens": lambda item: fmt.count(item.tokens),
            _alpha(report, draft): lambda item: fmt.share(item.alpha),
            "γ": lambda item: str(item.gamma),
            "tokens/round": lambda item: fmt.number(item.tokens_per_round),
            "speedup": lambda item: fmt.number(item.speedup, unit="x"),
        }
        mine = [item for item in report.documents if item.draft == draft]
        rows = [[fmt.short(item.domain), *(cell(item) for cell in columns.values())] for item in mine]
        if rows:
            yield PageTable(f"draft {draft}: worst and best documents", ("domain", *columns), rows, draft, words=["source"])


# By name of the section.
TABLES: Mapping[str, Callable[[Report], Iterator[PageTable]]] = {
    "drafts": drafts,
    "gammas": gammas,
    "rules": rules,
    "causes": causes,
    "load": load,
    "requests": requests,
    "certificates": certificates,
    "predictability": predictability,
    "difficulty": difficulty,
    "documents": documents,
}
