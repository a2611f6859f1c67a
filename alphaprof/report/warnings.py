"""The notes of a report: those of the profiling run, and those that its numbers call for. Each is a function of facts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from alphaprof.costs.cost_model import NONE, ROOFLINE, TIMED, Cost
from alphaprof.costs.rounds import Timing, halves_disagree, slow_tail
from alphaprof.report.format import count, percent, short, text_kind
from alphaprof.report.model import Note, Result, RunFacts, Traffic
from alphaprof.report.result import SELF_CHECK_FLOOR
from alphaprof.report.sections.certificates import Certificate, Certificates
from alphaprof.report.verdict import SLOW_BASELINE
from alphaprof.rules import parse_rule
from alphaprof.run.manifest import CHAIN, Manifest, left_out_remedy
from alphaprof.run.notes import concerns_of, note
from alphaprof.run.reader import Run
from alphaprof.stats.estimate import Interval, unseen

TIES_WORTH_SAYING = 0.01
MISMATCHES_WORTH_SAYING = 0.01
IMPOSSIBLE_WORTH_SAYING = 0.005
CUT_WORTH_SAYING = 0.2
MOSTLY_CUT = 0.5  # share of cut texts from which on the domains' shares of tokens are those of the limit
UNSEEN_SHARE = 0.25  # of the tokens: what unseen documents of the full length could be, from which on they decide
CONTEXT_FACTOR = 2.0  # step times at a context that differs by more say so
Found = Iterator[dict[str, str]]


def report_warnings(
    run: Run,
    facts: RunFacts,
    results: Sequence[Result],
    traffic: Traffic,
    certificates: Certificates | None,
    cost: Cost | None,
    source: str,
    more: Sequence[dict[str, str]] = (),
    drift: Interval | None = None,
) -> tuple[Note, ...]:
    """Return the notes of a report. `source`: where step times were to come from; `more`: notes that sections found;
    `drift`: see `ContextAxis`, of the draft of the verdict.
    """
    own = source in TIMED  # else the run's own timing is nobody's business
    found = (
        *(warning for warning in run.manifest.warnings if own or concerns_of(warning["code"]) != "own times"),
        *_file_notes(facts, run),
        *_document_notes(facts, run.manifest),
        *_length_notes(facts, traffic, drift),
        *_numeric_notes(results, facts.dtype),
        *_contradiction_notes(results, certificates.certificates if certificates else ()),
        *_head_notes(results, run.manifest),
        *more,
        *(_cost_notes(cost, facts) if cost else _untimed_notes(facts, run.manifest, source)),
    )
    return tuple(Note(**each) for each in found)


def _file_notes(facts: RunFacts, run: Run) -> Found:
    """Return what is missing of the run or its files."""
    manifest, documents, logged = run.manifest, facts.documents, facts.log_documents
    if not facts.complete:
        yield note("partial", documents=documents)
    if facts.complete and not all(map(run.has_totals, manifest.drafts)):
        yield note("recounted")
    if not run.has_log and manifest.imported is None and manifest.shards:
        yield note("no_log")
    if logged is not None and logged < documents:  # verdicts and results rest on totals, which are always read whole
        yield note("part_of_log", read=logged, documents=documents)


def _document_notes(facts: RunFacts, manifest: Manifest) -> Found:
    """Return what is to know about the documents that were measured."""
    for code, left_out in (("skipped", manifest.skipped), ("truncated", manifest.truncated)):
        for reason, number in left_out.items():
            yield note(code, count=number, reason=reason, remedy=left_out_remedy(reason))
    if halved := sum(shard.halved_batches for shard in manifest.shards):
        yield note("halved_batches", count=halved)


def _length_notes(facts: RunFacts, traffic: Traffic, drift: Interval | None) -> Found:
    """Return what the lengths of the texts leave open: texts that were cut, and lengths of which the sample has too few."""
    if facts.cut is not None and facts.cut > CUT_WORTH_SAYING:
        direction = "whether longer texts would be faster or slower is not known"
        if drift is not None and not drift.low <= 0 <= drift.high:
            ends = ("decays", "high") if drift.value > 0 else ("grows", "low")
            direction = f"acceptance {ends[0]} within texts, so that the speedup is probably too {ends[1]} for longer ones"
        remedy = "raise max_new_tokens if answers in your traffic are longer"
        if facts.cut > MOSTLY_CUT and traffic.weights_observed and len(traffic.weights) > 1:
            direction += "; shares of the domains are those of cut texts"
            remedy += ", and set decision.weights to your traffic's shares of output tokens"
        yield note("cut_by_length", share=percent(facts.cut), direction=direction, remedy=remedy)
    lengths, direction, correlation = "", "off either way", traffic.length_correlation
    known = traffic.documents and facts.mean_length and facts.longest
    share = unseen_share(traffic.documents, facts.mean_length or 0.0, facts.longest or 0) if known else 0.0
    if share > UNSEEN_SHARE:
        lengths = f"a few documents of {count(facts.longest or 0)} tokens that {traffic.documents} miss could be "
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


def _numeric_notes(results: Sequence[Result], dtype: str) -> Found:
    """Return what numerical noise costs: it caps what any draft can reach."""
    on_policy = [result for result in results if result.mismatches is not None]
    # These facts are the target's: every draft's result of a text repeats them.
    for result in {(result.domain, result.continuation): result for result in on_policy}.values():
        if (result.clear_mismatches or 0) > MISMATCHES_WORTH_SAYING:
            yield note("not_greedy", domain=short(result.domain), share=result.clear_mismatches)
    positions = sum(result.positions for result in on_policy)
    mismatches = sum((result.mismatches or 0) * result.positions for result in on_policy)
    ties = sum((result.near_ties or 0) * result.positions for result in on_policy)
    if ties > TIES_WORTH_SAYING * positions:
        yield note("near_ties", ties=ties / positions, dtype=dtype, changed=mismatches / positions)


def _contradiction_notes(results: Sequence[Result], certificates: Sequence[Certificate]) -> Found:
    """Yield notes about contradictions: rejections against a theorem, and sampled text that differs from expectation."""
    if wrong := [item for item in certificates if item.contradicted]:
        where = ", ".join(dict.fromkeys(f"{short(item.domain)} ({item.draft}, {item.rule})" for item in wrong))
        yield note("contradicted", count=sum(item.contradicted for item in wrong), where=where)
    off: dict[str, float] = {}
    for result in results:
        check = result.self_check
        if check is not None and (check.low > SELF_CHECK_FLOOR or check.high < -SELF_CHECK_FLOOR):
            text = text_kind(result.continuation, result.sampling)
            off.setdefault(f"{short(result.domain)} ({text}; {result.draft}, {result.rule})", check.value)
    if off:
        yield note("off_policy_sample", where=", ".join(f"{name} {value:+.3f}" for name, value in off.items()))
    texts = {
        (result.domain, result.continuation, str(result.sampling)): result
        for result in results
        if result.impossible is not None
    }
    positions = sum(result.positions for result in texts.values())
    impossible = sum((result.impossible or 0) * result.positions for result in texts.values())
    if impossible > IMPOSSIBLE_WORTH_SAYING * positions:
        yield note("outside_support", share=impossible / positions)


def _head_notes(results: Sequence[Result], manifest: Manifest) -> Found:
    """Return what rounds of draft heads leave out that engines do with them."""
    heads = [name for name, facts in manifest.drafts.items() if facts.by_depth and manifest.imported is None]
    if heads:
        yield note("chain", heads=", ".join(heads))
    drawn = [parse_rule(each.rule).rule for each in results if each.draft in heads and each.estimator == "expected"]
    if drawn and not any(rule.blocks for rule in drawn):
        yield note("token_by_token", heads=", ".join(heads))


def _untimed_notes(facts: RunFacts, manifest: Manifest, source: str) -> Found:
    """Return why a report has no step times; of rounds whose drafts are not known they would say nothing."""
    if manifest.drafting != CHAIN:
        return
    reason, remedy = "no step times were measured", "see the warnings of the profiling run"
    if source == NONE or facts.imported is not None:
        remedy = (
            "give your engine's: alphaprof report RUN --set costs.source=table --set costs.path=TIMES.csv (docs/costs.md)"
        )
        reason = "an engine's metrics hold no step times, so no speedup"
    if source == NONE:
        reason = "no step times were asked for (costs.source: none), so no speedup and no verdict"
    yield note("no_step_times", reason=reason, remedy=remedy)


def timing_notes(timing: Timing, draft: str | None, gamma: int | None) -> Found:
    """Return what timing rounds say against the step times of a verdict on `draft` and `gamma`."""
    if draft is None or gamma is None:
        return
    if apart := halves_disagree(timing, draft, gamma):
        first, second = apart.costs
        yield note("halves_disagree", rounds=apart.rounds, draft=draft, gamma=gamma, first=first, second=second)
    times = timing.times.get(draft)
    if times is not None and times.covers(gamma) and (tail := slow_tail(times, gamma)):
        mean, median = tail.mean_ms, tail.median_ms
        yield note("slow_tail", step=tail.step, draft=draft, mean=mean, median=median, more=tail.more)


def _cost_notes(cost: Cost, facts: RunFacts) -> Found:
    typical, timed = facts.mean_context, cost.context
    if typical is not None and not timed / CONTEXT_FACTOR <= typical <= timed * CONTEXT_FACTOR:
        yield note("other_context", timed=timed, typical=typical)
    if cost.others:
        yield note("other_rows", models=", ".join(map(short, cost.others)))
    if cost.lacking:
        yield note("not_covered", covered=cost.covered, rows="; ".join(cost.lacking))
    if cost.beyond_prefill:
        yield note("beyond_prefill", share=percent(cost.beyond_prefill))
    if cost.source == ROOFLINE:
        yield note("not_measured", accuracy=cost.accuracy)
    decode = cost.target_ms.get(1, 0.0)
    if faster := [tokens for tokens, ms in cost.target_ms.items() if ms < SLOW_BASELINE * decode]:
        yield note("slow_baseline", tokens=faster[0])
