"""Names, sentences and cells that several sections of a report share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from alphaprof.render import format as fmt
from alphaprof.render.blocks import text_name
from alphaprof.report.answer import GammaResult, Result, RunFacts
from alphaprof.report.build import Report, RunReport
from alphaprof.report.loads import AtLoad
from alphaprof.rules import parse_rule
from alphaprof.run.manifest import DraftFacts
from alphaprof.stats.estimate import Interval
from alphaprof.stats.grouping import grouped

FEW = 20  # drafts: a share of fewer says little
FEW_MARK = "'"
MARKS = {
    "*": "* off-policy: the rule's own decoding would not emit this text",
    "~": "~ lossy: measured per step on the target's text; the rule's own text is not measured",
    FEW_MARK: f"{FEW_MARK} fewer than {FEW} drafts",
}


def judged(report: RunReport) -> Iterator[tuple[str, list[Result]]]:
    """Yield the results of each draft and rule that the verdict concerns, with the title that they share."""
    for draft in report.run.drafts:
        mine = [result for result in report.results if result.draft == draft and result.verdict is not None]
        for rule in dict.fromkeys(result.rule for result in mine):
            yield f"draft {draft}, rule {rule}", [result for result in mine if result.rule == rule]


def how_drafted(report: RunReport, results: Sequence[Result]) -> Iterator[str]:
    """Yield how q was processed, if a rule draws from it on text that was sampled without the less probable tokens."""
    drawn = any(parse_rule(result.rule).rule.drawn and fmt.is_cut(result.sampling) for result in results)
    if drawn and report.run.imported is None:
        setting = report.asked.run.manifest.profile.draft_processing
        how = "is cut like p" if setting == "same" else "has temperature only, p is also cut by top_k, top_p and min_p"
        yield f"q {how} (draft_processing: {setting})"


def of_best(cell: Callable[[GammaResult], str]) -> Callable[[Result], str]:
    """Return how a result is written by its best gamma, from how that is."""
    return lambda result: cell(best) if (best := at_best(result)) else fmt.NOTHING


def at_best(result: Result) -> GammaResult | None:
    """Return a result at its chosen gamma."""
    return next((item for item in result.gammas if item.gamma == result.gamma), None)


def formula(value: str, error: float | None) -> str:
    """Return what the textbook formula would have said, and by how much it is too high."""
    return value if error is None else f"{value} ({fmt.signed_percent(error)})"


def on_for(report: Report) -> Iterator[str]:
    """Yield the domains on which alone the draft is surely faster than everywhere, if there are such."""
    if (only := report.traffic.only) is not None:
        domains = ", ".join(fmt.short(name) for item in report.domains if (name := str(item.answer.domain)) in only.domains)
        yield f"on for {domains} only: {fmt.interval(only.speedup, 'x')}"


def throughput_of(report: Report, loads: Sequence[AtLoad], value: Interval | None = None) -> str:
    """Return what a speedup of throughput is of, behind its value if that is given, or why none is known."""
    if not any(load.throughput for load in loads):
        return "throughput is not known: no prefill was timed"
    shown = "" if value is None else f" {fmt.interval(value, 'x')}"
    return f"throughput{shown}: prefills of all sequences included, outputs of {report.run.mean_length or 0:.0f} tokens"


def timed(report: Report) -> bool:
    """Return whether some draft has a speedup."""
    return any(item.speedup is not None for answer in report.drafts for item in answer.by_gamma)


def alpha_name(run: RunFacts, draft: str) -> str:
    """Return what alpha of a draft is called: a head's is that of depth 1 alone."""
    return "accept@1" if run.draft_models[draft].by_depth else "alpha"


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
    texts = grouped(((each.domain, each.continuation, str(each.sampling), each.own), each) for each in results)
    names: dict[str, list[Result]] = {}
    for (*kind, own), same in texts.items():
        name = text_name(same[0], results, off_policy=not own and (*kind, True) in texts)
        while name in names:  # two long names that begin alike
            name += "\N{PRIME}"
        names[name] = same
    return names
