"""Name and sentences that several renderings of a report share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from alphaprof.log.manifest import DraftFacts
from alphaprof.report import format as fmt
from alphaprof.report.build import Report
from alphaprof.report.model import AtConcurrency, GammaResult, Result, RunFacts
from alphaprof.report.sections.difficulty import Decile

FEW = 20  # drafts: a share of fewer says little


def reached(tokens: float | None, faster: float | None) -> str:
    """A speedup, or where that is not known tokens per round, marked t."""
    if faster is not None:
        return fmt.number(faster, unit="x")
    return fmt.number(tokens, unit="t") if tokens is not None else fmt.NOTHING


def timed(report: Report) -> bool:
    """Whether some result has a speedup: without step times none has."""
    return any(item.speedup is not None for result in report.results for item in result.gammas)


def any_engine(report: Report) -> str:
    """Where tokens per round hold: of a target in another dtype than the served one, not there."""
    served = report.traffic.served_dtype
    where = "" if served is None else f" that serves the target in {report.run.dtype}, not in {served}"
    return f"on any engine{where}"


def alpha_name(run: RunFacts, draft: str) -> str:
    """What alpha of a draft is called: a head's is that of depth 1 alone."""
    return "accept@1" if run.draft_models[draft].by_depth else "alpha"


def without_mean_divergence(report: Report) -> dict[str, str]:
    """Say of drafts whose mean KL(p||q) is infinite throughout what stands in its place."""
    said: dict[str, str] = {}
    if report.certificates is None:
        return said
    for draft, facts in report.run.draft_models.items():
        mine = [item for item in report.certificates.certificates if item.draft == draft]
        if facts.reduced_vocabulary and mine and all(math.isinf(item.mean_divergence) for item in mine):
            bounds = [item for item in report.certificates.lossless if item.draft == draft]
            each = (f"{text_name(item, bounds, not item.on_policy)} {fmt.share(1 - item.beta.value)}" for item in bounds)
            said[draft] = (
                f"{draft} cannot propose some tokens that the target can emit: KL(p||q) is infinite at such positions and "
                f"on average. Mean total variation, 1 - overlap: {', '.join(each)}"
            )
    return said


def uncertified(report: Report) -> set[str]:
    """Name drafts with a reduced vocabulary that no rule is certain of at any position."""
    certificates = report.certificates.certificates if report.certificates else ()
    some = {item.draft for item in certificates if item.certified.value > 0}
    return {item.draft for item in certificates if report.run.draft_models[item.draft].reduced_vocabulary} - some


def wiring_lines(facts: DraftFacts) -> Iterator[str]:
    """How a head's files were read, and what other readings would get accepted, in words."""
    if facts.reading:
        yield "read as " + "; ".join(f"{name}: {value}" for name, value in facts.reading.items())
    for trial in facts.trials:
        name = trial.changed or "as measured"
        engines = f" ({', '.join(trial.engines)})" if trial.engines else ""
        ahead = f", {trial.ahead:+.3f} (standard error {trial.error:.3f})" if trial.changed else ""
        yield (
            f"{name}{engines}: {fmt.share(trial.acceptance)} accepted at depth {trial.depth}{ahead}, "
            f"{fmt.many(trial.positions, 'position')}"
        )


class OfText(Protocol):
    """What concerns one kind of text of a domain."""

    @property
    def domain(self) -> str:
        """Its name."""

    @property
    def continuation(self) -> str:
        """How the text came about."""

    @property
    def sampling(self) -> dict[str, float] | None:
        """What it was drawn with, if anything."""


def text_name(item: OfText, items: Iterable[OfText], off_policy: bool = False) -> str:
    """Name the text of one of several items: the domain, with the kind of text where the domain has several among them, and
    where it is to be marked as off-policy. Of sampling settings the temperature is named, and what else differs there.
    """
    same = [other for other in items if other.domain == item.domain]
    several = len({(other.continuation, str(other.sampling)) for other in same}) > 1
    if not several and not off_policy:
        return fmt.short(item.domain)
    kind = item.continuation
    if several and item.sampling is not None:
        settings = [other.sampling for other in same if other.sampling is not None]
        differing = [name for name in item.sampling if len({each[name] for each in settings}) > 1 and name != "temperature"]
        kind += f" at {item.sampling['temperature']:g}"
        kind += "".join(f", {name} {item.sampling[name]:g}" for name in differing)
    return f"{fmt.short(item.domain)} ({kind}{', off-policy' if off_policy else ''})"


def by_text(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Group results of any rules by the name of their text. Text that the target did not write is marked as off-policy
    where the domain has text of that kind that it wrote.
    """
    texts: dict[tuple[str, str, str, bool], list[Result]] = {}
    for result in results:
        texts.setdefault((result.domain, result.continuation, str(result.sampling), result.own), []).append(result)
    names: dict[str, list[Result]] = {}
    for (*kind, own), same in texts.items():
        name = text_name(same[0], results, off_policy=not own and (*kind, True) in texts)
        while name in names:  # two long names that begin alike
            name += "\N{PRIME}"
        names[name] = same
    return names


def by_kind(deciles: Sequence[Decile]) -> dict[str, list[Decile]]:
    """Group tenths by kind of text, under what a title adds for each kind: nothing where there is one."""
    kinds: dict[str, list[Decile]] = {}
    for item in deciles:
        off = "" if item.on_policy else ", off-policy"
        kinds.setdefault(f" ({fmt.text_kind(item.continuation, item.sampling)}{off})", []).append(item)
    return kinds if len(kinds) > 1 else {"": list(deciles)}


def at_best(result: Result) -> GammaResult | None:
    """A result at its chosen gamma."""
    return next((item for item in result.gammas if item.gamma == result.best_gamma), None)


def best_at(item: AtConcurrency) -> str:
    """The best gamma's speedup, and that gamma."""
    return fmt.NOTHING if item.speedup is None else f"{fmt.number(item.speedup.value, unit='x')} ({item.best_gamma})"


def pays(last: int | None, known: Sequence[int]) -> str:
    """Up to which concurrency it pays; where that is the largest that there are times for, no limit was seen."""
    if last is None:
        return "none"
    return "all" if last == known[-1] else str(last)
