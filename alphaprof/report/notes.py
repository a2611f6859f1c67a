"""The notes of a report: those of the profiling run, and those that its numbers call for. Each is a function of facts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from alphaprof.costs.cost_model import MEASURED, NONE, ROOFLINE, TIMED, Cost
from alphaprof.render.format import count, many, percent, short, text_kind
from alphaprof.report.answer import Answer, Note, RunFacts, Traffic
from alphaprof.report.asked import DraftPool
from alphaprof.report.result import SELF_CHECK_FLOOR, self_check
from alphaprof.report.verdict import SLOW_BASELINE
from alphaprof.rules import GREEDY, SAMPLED
from alphaprof.run.manifest import CHAIN, Manifest, left_out_remedy
from alphaprof.run.notes import NOTES, concerns_of, note
from alphaprof.run.reader import Run
from alphaprof.stats.estimate import unseen
from alphaprof.stats.grouping import grouped
from alphaprof.totals.pool import DocumentTotals

TIES, MISMATCHES, IMPOSSIBLE = 0.01, 0.01, 0.005  # shares of positions from which on they are worth saying
CUT_WORTH_SAYING = 0.2
MOSTLY_CUT = 0.5  # share of cut texts from which on the domains' shares of tokens are those of the limit
UNSEEN_SHARE = 0.25  # of the tokens: what unseen documents of the full length could be, from which on they decide
CONTEXT_FACTOR = 2.0  # step times at a context that differs by more say so
Found = Iterator[dict[str, str]]


def report_notes(
    run: Run,
    facts: RunFacts,
    pools: Sequence[DraftPool],
    answer: Answer,
    traffic: Traffic,
    cost: Cost | None,
    source: str,
) -> tuple[Note, ...]:
    """Return the notes of a report. `pools`: of the rules that the verdict concerns; `source`: where step times were to come
    from.
    """
    own = source in TIMED  # else the run's own timing is nobody's business
    found = (
        *(each for each in run.manifest.warnings if own or concerns_of(each["code"]) != "own times"),
        *_run_notes(facts, run),
        *_length_notes(facts, answer, traffic),
        *text_notes((item.domain, item.pool) for item in pools),
        *_near_ties(pools, facts.dtype),
        *_sample_notes(pools),
        *(_cost_notes(cost, facts) if cost else _untimed_notes(facts, run.manifest, source)),
    )
    return tuple(Note(**each) for each in found if each["code"] in NOTES)


def _run_notes(facts: RunFacts, run: Run) -> Found:
    """Yield what is missing of the run, of its files, and of the documents that were measured."""
    manifest, documents = run.manifest, facts.documents
    if not facts.complete:
        yield note("partial", documents=documents)
    if facts.complete and not all(map(run.has_totals, manifest.drafts)):
        yield note("recounted")
    if not run.has_log and run.scored and manifest.shards:
        yield note("no_log")

    for code, left_out in (("skipped", manifest.skipped), ("truncated", manifest.truncated)):
        for reason, number in left_out.items():
            yield note(code, count=number, reason=reason, remedy=left_out_remedy(reason))


def _length_notes(facts: RunFacts, answer: Answer, traffic: Traffic) -> Found:
    """Return what the lengths of the texts leave open: texts that were cut, and lengths of which the sample has too few."""
    if facts.cut is not None and facts.cut > CUT_WORTH_SAYING:
        direction = "whether longer texts would be faster or slower is not known (see report --show context)"
        remedy = "raise max_new_tokens if answers in your traffic are longer"
        if facts.cut > MOSTLY_CUT and traffic.weights_observed and len(traffic.weights) > 1:
            direction += "; shares of the domains are those of cut texts"
            remedy += ", and set decision.weights to your traffic's shares of output tokens"
        yield note("cut_by_length", share=percent(facts.cut), direction=direction, remedy=remedy)
    lengths, direction, correlation = "", "off either way", traffic.length_correlation
    known = answer.held_out and facts.mean_length and facts.longest
    share = unseen_share(answer.held_out, facts.mean_length or 0.0, facts.longest or 0) if known else 0.0
    if share > UNSEEN_SHARE:
        lengths = f"a few documents of {count(facts.longest or 0)} tokens that {answer.held_out} miss could be "
        lengths += f"{percent(share)} of all tokens"
    if correlation is not None:
        slower, high = ("slower", "high") if correlation > 0 else ("faster", "low")
        also = f"long documents are {slower} with the draft (rank correlation {correlation:+.2f})"
        lengths = f"{lengths}; {also}" if lengths else also
        direction = f"too {high} if longer ones are missing here"
    if lengths:
        yield note("long_tail", lengths=lengths, direction=direction)


def unseen_share(documents: int, mean: float, longest: int) -> float:
    """Return the share of all tokens that documents of the full length `longest` would have if as many of them were missing
    as a sample of `documents` documents, of `mean` tokens, allows (`estimate.unseen`).
    """
    rest = unseen(documents) * longest
    return rest / (rest + mean)


def text_notes(pools: Iterable[tuple[str, DocumentTotals]]) -> Found:
    """Yield what texts say against themselves, from pools, each with its domain: greedy text that is not, and sampled text
    that its own sampling could not have drawn. Every draft's pool of a text repeats these facts of the target.
    """
    texts = {(domain, pool.continuation, str(pool.sampling)): pool for domain, pool in pools if pool.scored}
    impossible = positions = 0.0
    for (domain, *_), pool in texts.items():
        here = float(pool["positions"].sum())
        if pool.policy == GREEDY and (share := float(pool["clear_mismatches"].sum()) / max(here, 1.0)) > MISMATCHES:
            yield note("not_greedy", domain=short(domain), share=share)
        if pool.policy == SAMPLED:
            positions, impossible = positions + here, impossible + float(pool["impossible"].sum())
    if impossible > IMPOSSIBLE * positions:
        yield note("outside_support", share=impossible / positions)


def _near_ties(pools: Sequence[DraftPool], dtype: str) -> Found:
    """Yield what numerical noise costs: it caps what any draft can reach."""
    greedy = [item.pool for item in pools if item.pool.scored and item.pool.policy == GREEDY]
    positions, mismatches = (sum(float(pool[name].sum()) for pool in greedy) for name in ("positions", "mismatches"))
    ties = sum(float(pool["near_ties"].sum()) for pool in greedy if pool.sampling is None)
    if ties > TIES * positions:
        yield note("near_ties", ties=ties / positions, dtype=dtype, changed=mismatches / positions)


def _sample_notes(pools: Sequence[DraftPool]) -> Found:
    """Yield which rules' expected acceptance the sampled text does not bear out."""
    off: dict[str, float] = {}
    for item in pools:
        check = self_check(item.pool) if item.pool.scored and item.pool.policy == SAMPLED and item.pool.defined else None
        if check is not None and (check.low > SELF_CHECK_FLOOR or check.high < -SELF_CHECK_FLOOR):
            text = text_kind(item.pool.continuation, item.pool.sampling)
            off.setdefault(f"{short(item.domain)} ({text}; {item.draft}, {item.rule.id})", check.value)
    if off:
        yield note("off_policy_sample", where=", ".join(f"{name} {value:+.3f}" for name, value in off.items()))


def _untimed_notes(facts: RunFacts, manifest: Manifest, source: str) -> Found:
    """Return why a report has no step times; of rounds whose drafts are not known they would say nothing."""
    if manifest.drafting != CHAIN:
        return
    reason, remedy = "no step times were measured", "see the warnings of the profiling run"
    if source == NONE or facts.imported is not None:
        remedy = (
            "give your engine's times: "
            "alphaprof report RUN --set costs.source=table --set costs.path=TIMES.csv (docs/costs.md)"
        )
        reason = "an engine's metrics hold no step times, so no speedup"
    if source == NONE:
        reason = "no step times were asked for (costs.source: none), so no speedup and no verdict"
    elif any(each["code"] in ("not_timed", "out_of_time") for each in manifest.warnings):
        return  # that says why
    yield note("no_step_times", reason=reason, remedy=remedy)


def _cost_notes(cost: Cost, facts: RunFacts) -> Found:
    typical, timed = facts.mean_context, cost.context
    if typical is not None and not timed / CONTEXT_FACTOR <= typical <= timed * CONTEXT_FACTOR:
        yield note("other_context", timed=timed, typical=typical)
    if cost.lacking:
        yield note("not_covered", covered=cost.covered, rows="; ".join(cost.lacking))
    if cost.source == ROOFLINE:
        yield note("not_measured", accuracy=cost.accuracy)
    if cost.source == MEASURED and cost.threads is None:
        yield note("eager")
    decode = cost.target_ms.get(1, 0.0)
    if faster := [tokens for tokens, ms in cost.target_ms.items() if ms < SLOW_BASELINE * decode]:
        yield note("slow_baseline", tokens=faster[0])


def once_a_code(notes: Iterable[Note]) -> Iterator[tuple[str, Note]]:
    """Yield the first note of each code, with how many others of the code there are in its message."""
    for first, *same in grouped((each.code, each) for each in notes).values():
        yield first.message + (f" (and {many(len(same), 'more note')} like it)" if same else ""), first
