"""What divergences promise of acceptance, and acceptance by how hard a position is for the target."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from alphaprof.render import wording
from alphaprof.render.blocks import Block, Table, table_by_columns, table_of, text_names
from alphaprof.report import format as fmt
from alphaprof.report.build import Report
from alphaprof.report.sections.certificates import Certificate, LosslessBounds
from alphaprof.report.sections.difficulty import Decile


def certificates(report: Report) -> Iterator[Block]:
    """Yields what thresholds say about each draft."""
    if report.certificates is None:
        return
    infinite, nothing = wording.without_mean_divergence(report), wording.uncertified(report)
    for draft in dict.fromkeys(item.draft for item in report.certificates.certificates):
        if draft in infinite:
            yield f"draft {infinite[draft]}"
            yield ""
        if draft not in nothing:
            mine = [item for item in report.certificates.certificates if item.draft == draft]
            yield from _certified_positions(draft, mine, averaged=draft not in infinite)
        yield from _lossless(
            draft, [item for item in report.certificates.lossless if item.draft == draft], draft in infinite
        )
    if report.certificates.certificates:  # else no draft has a distribution
        yield "certified: KL(p||q) is below the threshold at which the rule can reject: acceptance was certain beforehand."
        yield (
            "What is accepted beyond that was right, but not certain to be. Position by position: threshold_RULE in the log."
        )
    if report.certificates.inexact:
        part = fmt.percent(report.certificates.inexact)
        yield f"At {part} of the positions some rule accepts more tokens than were looked at: a lower bound there."
    if report.certificates.unknown:
        yield f"No certificate is known for {', '.join(report.certificates.unknown)}: no threshold, whatever the draft."


def _certified_positions(draft: str, mine: Sequence[Certificate], averaged: bool) -> Iterator[Block]:
    """Yields what is certain of a draft. `averaged`: whether its divergence has a mean."""
    texts: dict[tuple[str, str, str, bool], list[Certificate]] = {}
    for item in mine:
        texts.setdefault((item.domain, item.continuation, str(item.sampling), item.on_policy), []).append(item)
    names = text_names([same[0] for same in texts.values()], mine)
    certified, rejected = (
        [(name, {item.rule: cell(item) for item in same}) for name, same in zip(names, texts.values(), strict=True)]
        for cell in (_certified, _rejected)
    )
    yield table_by_columns(f"draft {draft}: certified of accepted, by domain", certified, draft=draft)
    if averaged:
        title = f"draft {draft}: share rejected, and at most at this mean KL(p||q)"
        yield table_by_columns(title, rejected, draft=draft)
    certain = sum(round(item.certified.value * item.positions) for item in mine)
    wrong = sum(item.contradicted for item in mine)
    yield f"  certified and yet rejected: {fmt.count(wrong)} of {fmt.count(certain)} certified positions, all rules together"
    yield ""


def _certified(item: Certificate | Decile) -> str:
    if item.certified is None or item.accepted is None:
        return fmt.NOTHING
    value = f"{fmt.share(item.certified.value)} of {fmt.share(item.accepted.value)}"
    return f"{value}\n[{fmt.share(item.certified.low, 2)}, {fmt.share(item.certified.high, 2)}]"


def _rejected(item: Certificate) -> str:
    return f"{fmt.share(1 - item.accepted.value)} <= {fmt.share(item.rejected_at_most)}"


def _lossless(draft: str, bounds: Sequence[LosslessBounds], cut: bool) -> Iterator[Table]:
    """Yields beta and its bounds, by domain; of a draft whose vocabulary is `cut` no infinite means."""
    columns: dict[str, Callable[[LosslessBounds], str]] = {
        "beta": lambda item: fmt.share_with_interval(item.beta),
        "bound": lambda item: fmt.share_with_interval(item.sharp),
        "mean of the\nsmaller KL": lambda item: fmt.number(item.mean_divergence),
        "bound from\nthe mean": lambda item: fmt.share(item.from_mean),
    }
    if cut and all(math.isinf(item.mean_divergence) for item in bounds):
        columns = dict(list(columns.items())[:2])
    title = f"draft {draft}: lossless acceptance, and what the smaller KL of each position guarantees"
    note = "  of text that was not sampled: beta at temperature 1 along it; lossless sampling would not write it"
    yield from table_of(title, bounds, columns, below=[note] if any(item.sampling is None for item in bounds) else [])


def difficulty(report: Report) -> Iterator[Block]:
    """Yields acceptance by tenths of the target's margin, then of its entropy: of rules with certificates that say something
    what was certified of it, of the verdict's other rules the acceptance alone.
    """
    nothing = wording.uncertified(report)
    known = report.certificates.certificates if report.certificates else ()
    certain = {(item.draft, item.rule) for item in known if item.draft not in nothing}
    decisive = {(result.draft, result.rule) for result in report.results if result.verdict is not None}
    for draft in report.run.drafts:
        mine = [item for item in report.difficulty if item.draft == draft]
        both = [item for item in mine if (draft, item.rule) in certain]
        yield from _tenths(f"draft {draft}: certified of accepted", both, _certified)
        rest = [item for item in mine if (draft, item.rule) in decisive - certain]
        yield from _tenths(f"draft {draft}: accepted", rest, lambda item: fmt.share_with_interval(item.accepted))


def _tenths(what: str, items: Sequence[Decile], cell: Callable[[Decile], str]) -> Iterator[Table]:
    """Yields a table for each axis and kind of text."""
    for axis in dict.fromkeys(item.axis for item in items):
        for kind, same in wording.by_kind([item for item in items if item.axis == axis]).items():
            rows: dict[tuple[float | None, float | None], tuple[str, dict[str, str]]] = {}
            for item in same:
                rows.setdefault((item.low, item.high), (_range(item), {}))[1][item.rule] = cell(item)
            unit = ", nats" if axis == "entropy" else ""
            title = f"{what}, by tenths of the target's {axis}{unit}{kind}"
            yield table_by_columns(title, list(rows.values()), named=axis, draft=same[0].draft)


def _range(item: Decile) -> str:
    """A tenth by where it begins: the next one begins where it ends."""
    edge = item.high if item.low is None else item.low
    if edge is None:
        return "all"
    value = fmt.share(edge) if item.axis == "margin" else fmt.number(edge, 3)
    return f"{'below' if item.low is None else 'from'} {value}"
