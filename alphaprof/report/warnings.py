"""The closed list of warnings: what to know about a report, why, and what to do. Each is a function of facts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from alphaprof.costs.cost_model import MEASURED, NONE, ROOFLINE, Cost
from alphaprof.log.manifest import CHAIN, Manifest, left_out_remedy
from alphaprof.log.store import Run
from alphaprof.report.format import percent, short, text_kind
from alphaprof.report.model import Note, Result, RunFacts, Traffic
from alphaprof.report.notes import kind
from alphaprof.report.result import SELF_CHECK_FLOOR
from alphaprof.report.sections.certificates import Certificate, Certificates
from alphaprof.report.verdict import SLOW_BASELINE

TIES_WORTH_SAYING = 0.01
MISMATCHES_WORTH_SAYING = 0.01
IMPOSSIBLE_WORTH_SAYING = 0.005
CUT_WORTH_SAYING = 0.2
FEW_EFFECTIVE = 8  # documents of one length: with fewer, a long tail of lengths decides the answer
CONTEXT_FACTOR = 2.0  # step times at a context that differs by more say so


def report_warnings(
    run: Run,
    facts: RunFacts,
    results: Sequence[Result],
    traffic: Traffic,
    certificates: Certificates | None,
    cost: Cost | None,
    costs: str,
) -> tuple[Note, ...]:
    """The warnings of a report: those of the profiling run, and those that its numbers call for.

    `costs`: where step times were to come from.
    """
    of_run = (*_files(facts, run), *_documents(facts, run.manifest))
    of_numbers = (
        *_numerics(results, facts.dtype),
        *_contradicted(results, certificates.certificates if certificates else ()),
    )
    of_costs = _cost(cost, facts) if cost else _untimed(facts, run.manifest, costs)
    own = costs == MEASURED  # else the run's own timing is nobody's business
    kept = (warning for warning in run.manifest.warnings if own or kind(warning["code"]).concerns != "own times")
    profiled = (Note(**warning) for warning in kept)
    return (*profiled, *of_run, *_lengths(traffic), *of_numbers, *_heads(results, run.manifest), *of_costs)


def _files(facts: RunFacts, run: Run) -> Iterator[Note]:
    """What is missing of the run or its files."""
    manifest, documents, logged = run.manifest, facts.documents, facts.log_documents
    if not facts.complete:
        yield Note(
            "partial",
            f"the run was interrupted: this report covers its first {documents} documents",
            "finish it with alphaprof profile --resume",
        )
    for name in sorted(run.damaged):
        yield Note(
            "damaged",
            f"{name} is damaged: its content was computed again from the position log, and no number has changed",
            "alphaprof profile with --resume writes it again; report --verify checks every file",
        )
    if not run.has_log and manifest.imported is None and manifest.shards:
        yield Note(
            "no_log",
            "the run's directory has no position log: sections that read it are left out, such as why tokens are rejected "
            "and where drafts are right",
            "copy positions/ there too",
        )
    if logged is not None and logged < documents:  # verdicts and results rest on totals, which are always read whole
        yield Note(
            "part_of_log",
            f"sections from the position log read {logged} of {documents} documents, in shards spread over the run, such as "
            "why tokens are rejected and where drafts are right; verdicts and results use all documents",
            "alphaprof report --whole-log reads the whole position log",
        )


def _documents(facts: RunFacts, manifest: Manifest) -> Iterator[Note]:
    """What is to know about the documents that were measured."""
    available = manifest.sequential["available"] if manifest.sequential else 0
    if manifest.documents < available:  # intervals, unlike verdicts, are not made for a look after every shard
        yield Note(
            "stopped",
            f"documents were taken in random order, {manifest.documents} of {available}. Verdicts hold at any time; "
            "intervals are for a fixed number of documents, and slightly too optimistic",
            "take the verdict from this run, and the size of a speedup from a run that measures all documents",
        )
    for reason, count in manifest.skipped.items():
        yield Note("skipped", f"{count} documents left out: {reason}", left_out_remedy(reason))
    for reason, count in manifest.truncated.items():
        yield Note("truncated", f"{count} {reason}", left_out_remedy(reason))
    if halved := sum(shard.halved_batches for shard in manifest.shards):
        yield Note(
            "halved_batches",
            f"memory ran out and {halved} batches were halved; values may differ by up to 1e-3 from a run with enough "
            "memory",
            "lower batch_tokens",
        )
    if facts.cut is not None and facts.cut > CUT_WORTH_SAYING:
        yield Note(
            "cut_by_length",
            f"{percent(facts.cut)} of the texts were cut at max_new_tokens: how such texts go on was not measured",
            "raise max_new_tokens if the traffic writes longer answers",
        )


def _lengths(traffic: Traffic) -> Iterator[Note]:
    """Lengths whose tail decides the answer: no sample knows of what it has not seen."""
    effective, correlation = traffic.effective_documents, traffic.length_correlation
    if effective is None or (effective >= FEW_EFFECTIVE and correlation is None):
        return
    few = f"the longest documents weigh as much as all others: {effective:.0f} of one length would say as much"
    direction = "either way"
    if correlation is not None:
        slower, high = ("slower", "high") if correlation > 0 else ("faster", "low")
        few = f"long documents are {slower} with the draft (rank correlation {correlation:+.2f})"
        direction = f"too {high} if longer ones are missing here"
    yield Note(
        "long_tail",
        f"{few}: the speedup errs {direction}",
        "raise limit until the longest documents of the traffic are among these, or give decision.weights",
    )


def _numerics(results: Sequence[Result], dtype: str) -> Iterator[Note]:
    """What numerical noise costs: it caps what any draft can reach."""
    on_policy = [result for result in results if result.mismatches is not None]
    # These facts are the target's: every draft's result of a text repeats them.
    for result in {(result.domain, result.continuation): result for result in on_policy}.values():
        if (result.clear_mismatches or 0) > MISMATCHES_WORTH_SAYING:
            yield Note(
                "not_greedy",
                f"{short(result.domain)}: {result.clear_mismatches:.1%} of tokens are clearly not the target's top token",
                "check that these responses were produced greedily by this target, or drop on_policy"
                if result.continuation == "given"
                else "generation and scoring disagree beyond rounding: profile in float32 to see whether it is the dtype",
            )
    positions = sum(result.positions for result in on_policy)
    mismatches = sum((result.mismatches or 0) * result.positions for result in on_policy)
    ties = sum((result.near_ties or 0) * result.positions for result in on_policy)
    if ties > TIES_WORTH_SAYING * positions:
        yield Note(
            "near_ties",
            f"{ties / positions:.1%} of positions are near-ties in {dtype}, and {mismatches / positions:.2%} of "
            "greedy tokens change with the batch shape: no draft can be sure of them",
            "expected in 16-bit dtypes; profile in the dtype that is served",
        )


def _contradicted(results: Sequence[Result], certificates: Sequence[Certificate]) -> Iterator[Note]:
    """What cannot be: rejections against a theorem, and sampled text on which what happened is not what was expected."""
    if wrong := [item for item in certificates if item.contradicted]:
        where = ", ".join(dict.fromkeys(f"{short(item.domain)} ({item.draft}, {item.rule})" for item in wrong))
        count = sum(item.contradicted for item in wrong)
        yield Note(
            "contradicted",
            f"{count} certified positions were rejected, which should be impossible: {where}",
            "the logged divergences cannot be trusted here: please report it, with the profile",
        )
    off: dict[str, float] = {}
    for result in results:
        check = result.self_check
        if check is not None and (check.low > SELF_CHECK_FLOOR or check.high < -SELF_CHECK_FLOOR):
            text = text_kind(result.continuation, result.sampling)
            off.setdefault(f"{short(result.domain)} ({text}; {result.draft}, {result.rule})", check.value)
    if off:
        where = ", ".join(f"{name} {value:+.3f}" for name, value in off.items())
        yield Note(
            "off_policy_sample",
            f"acceptance is not what the distributions predict, so this text was not drawn from them: {where}",
            "given text: check temperature, top_k, top_p and min_p against how it was sampled; text of this run: profile in "
            "float32 to see whether it is the dtype",
        )
    texts = {
        (result.domain, result.continuation, str(result.sampling)): result
        for result in results
        if result.impossible is not None
    }
    positions = sum(result.positions for result in texts.values())
    impossible = sum((result.impossible or 0) * result.positions for result in texts.values())
    if impossible > IMPOSSIBLE_WORTH_SAYING * positions:
        yield Note(
            "outside_support",
            f"{impossible / positions:.2%} of sampled tokens have probability 0 in the scoring pass and count as rejected",
            "a few are rounding at the cut of top_k and top_p; many: the text was sampled with other settings",
        )


def _heads(results: Sequence[Result], manifest: Manifest) -> Iterator[Note]:
    """What rounds of draft heads leave out that engines do with them."""
    heads = [name for name, facts in manifest.drafts.items() if facts.by_depth and manifest.imported is None]
    if not heads:
        return
    yield Note(
        "chain",
        f"rounds of {', '.join(heads)} draft a chain; where an engine drafts a tree, a tree accepts more",
        "SGLang drafts chains with --speculative-eagle-topk 1; import the metrics of an engine that drafts trees",
    )
    if any(result.draft in heads and result.estimator == "expected" for result in results):
        yield Note(
            "token_by_token",
            f"lossless rounds of {', '.join(heads)} verify token by token: where an engine verifies by block, a round emits "
            "at least as many tokens on average",
            "take tokens per round as at least these there, or import the engine's metrics",
        )


def _untimed(facts: RunFacts, manifest: Manifest, source: str) -> Iterator[Note]:
    """Why a report has no step times; of rounds whose drafts are not known they would say nothing."""
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
    yield Note("no_step_times", reason, remedy)


def _cost(cost: Cost, facts: RunFacts) -> Iterator[Note]:
    typical, timed = facts.mean_context, cost.context
    if typical is not None and not timed / CONTEXT_FACTOR <= typical <= timed * CONTEXT_FACTOR:
        yield Note(
            "other_context",
            f"step times are for {timed:.0f} tokens in the cache, and these documents decode at about {typical:.0f}",
            f"time steps at about {typical:.0f} (costs.context, or the table's context): they get slower as the cache grows",
        )
    if cost.beyond_prefill:
        yield Note(
            "beyond_prefill",
            f"{percent(cost.beyond_prefill)} of the prompts are longer than any whose prefill was timed: their time "
            "is extrapolated from the last two times",
            "request speedups depend on it: add the prompts' length to costs.context, or to the table of step times",
        )
    if cost.source == ROOFLINE:
        yield Note(
            "not_measured",
            "step times were computed from bytes and FLOPs: intervals include the sampling of documents only, not how wrong "
            "these times may be",
            "give costs.overhead_ms and costs.draft_overhead_ms, and measure or time your engine before you deploy",
        )
    decode = cost.target_ms.get(1, 0.0)
    if faster := [tokens for tokens, ms in cost.target_ms.items() if ms < SLOW_BASELINE * decode]:
        yield Note(
            "slow_baseline",
            f"verifying {faster[0]} tokens took less time than decoding one (v < 1): the baseline is slow here; "
            "that does not make the draft good",
            "repeat on an idle machine or with a larger costs.budget, and compare with the engine that will serve"
            if cost.source == MEASURED
            else f"compare the times of 1 and {faster[0]} tokens with those of the engine that will serve",
        )
