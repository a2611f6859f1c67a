"""Names and sentences that several renderings of a report share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from alphaprof.render.blocks import text_name
from alphaprof.report import format as fmt
from alphaprof.report.build import Report
from alphaprof.report.model import Result, RunFacts
from alphaprof.report.sections.difficulty import Decile
from alphaprof.run.manifest import DraftFacts

FEW = 20  # drafts: a share of fewer says little


def timed(report: Report) -> bool:
    """Return whether some result has a speedup: without step times none has."""
    return any(item.speedup is not None for result in report.results for item in result.gammas)


def alpha_name(run: RunFacts, draft: str) -> str:
    """Return what alpha of a draft is called: a head's is that of depth 1 alone."""
    return "accept@1" if run.draft_models[draft].by_depth else "alpha"


def uncertified(report: Report) -> set[str]:
    """Name drafts with a reduced vocabulary that no rule is certain of at any position."""
    certificates = report.certificates.certificates if report.certificates else ()
    some = {item.draft for item in certificates if item.certified.value > 0}
    return {item.draft for item in certificates if report.run.draft_models[item.draft].reduced_vocabulary} - some


def wiring_lines(facts: DraftFacts) -> Iterator[str]:
    """Yield how a head's files were read, and what other readings would get accepted, in words."""
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


def by_text(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Group results of any rules by the name of their text. Text that the target did not write is marked as off-policy
    if the domain has text of that kind that it wrote.
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
    """Group tenths by kind of text, under what a title adds for each kind: nothing if there is one."""
    kinds: dict[str, list[Decile]] = {}
    for item in deciles:
        off = "" if item.on_policy else ", off-policy"
        kinds.setdefault(f" ({fmt.text_kind(item.continuation, item.sampling)}{off})", []).append(item)
    return kinds if len(kinds) > 1 else {"": list(deciles)}
