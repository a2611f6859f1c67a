"""Notes: what a reader of a run has to know. One table by code, the most important first, with message and remedy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

# The texts of a run, any step times, or those that were measured on the run's own machine.
Concerns = Literal["texts", "times", "own times"]


class NoteKind(NamedTuple):
    """`message`: what is so and why it matters, `remedy`: what to do about it, both with the names of facts in braces;
    `concerns`: what else depends on it; `check`: the check of a dry run that shows it (None: named like the note).
    """

    message: str
    remedy: str
    concerns: Concerns | None = None
    check: str | None = None


NOTES: Mapping[str, NoteKind] = {
    # What can make the answer wrong,
    "contradicted": NoteKind(
        "{count} certified positions were rejected, which should be impossible: {where}",
        "the logged divergences cannot be trusted here: please report it, with the profile",
        "texts",
    ),
    "not_greedy": NoteKind(
        "{domain}: {share:.1%} of tokens are clearly not the target's top token",
        "given text: check that this target produced it greedily, or drop on_policy; text of this run: profile in float32 "
        "to see whether it is the dtype",
        "texts",
    ),
    "off_policy_sample": NoteKind(
        "acceptance is not what the distributions predict, so this text was not drawn from them: {where}",
        "given text: check temperature, top_k, top_p and min_p against how it was sampled; text of this run: profile in "
        "float32 to see whether it is the dtype",
        "texts",
    ),
    "outside_support": NoteKind(
        "{share:.2%} of sampled tokens have probability 0 in the scoring pass and count as rejected",
        "a few are rounding at the cut of top_k and top_p; many: the text was sampled with other settings",
        "texts",
    ),
    "long_tail": NoteKind(
        "{lengths}: the speedup errs {direction}",
        "raise limit until the longest documents of the traffic are among these, or give decision.weights",
        "times",
    ),
    "wiring": NoteKind("{doubt}", "{remedy}", "texts"),
    "damaged": NoteKind(
        "{file} is damaged: its content was computed again from the position log, and no number has changed",
        "alphaprof profile with --resume writes it again; report --verify checks every file",
        "texts",
    ),
    "busy": NoteKind(
        "this machine is busy: step times are uncertain; timing waited for a processor for {waiting:.0%} of its time",
        "measure again when it is idle, or use your engine's (docs/costs.md)",
        "own times",
    ),
    "slow_baseline": NoteKind(
        "verifying {tokens} tokens took less time than decoding one (v < 1): the baseline is slow here; that does not make "
        "the draft good",
        "measure again, and compare the times of 1 and {tokens} tokens with those of the engine that will serve",
        "times",
    ),
    # then what makes it another one,
    "no_step_times": NoteKind("{reason}", "{remedy}"),
    "partial": NoteKind(
        "the run was interrupted: this report covers its first {documents} documents",
        "finish it with alphaprof profile --resume",
        "texts",
    ),
    "other_context": NoteKind(
        "step times are for {timed:.0f} tokens in the cache, and these documents decode at about {typical:.0f}",
        "time steps at about {typical:.0f} (costs.context, or the table's context): they get slower as the cache grows",
        "times",
    ),
    "decay": NoteKind(
        "acceptance of {draft} decays as texts grow: with each doubling of the context a token takes {share:.1%} "
        "[{low:.1%}, {high:.1%}] more rounds",
        "measure contexts as long as those that you serve: report --show context",
        "texts",
    ),
    "not_measured": NoteKind(
        "step times were computed, not measured: {accuracy}",
        "measure or time your engine before you deploy",
        "times",
    ),
    "near_ties": NoteKind(
        "{ties:.1%} of positions are near-ties in {dtype}, and {changed:.2%} of greedy tokens change with the batch shape: "
        "no draft can be sure of them",
        "expected in 16-bit dtypes; profile in the dtype that is served",
        "texts",
    ),
    "no_verdict": NoteKind(
        "decision.rule {rule} has no timed rounds on this text: there will be no verdict",
        "leave decision.rule out, or measure text of its kind (alphaprof rules)",
    ),
    "cut_by_length": NoteKind(
        "{share} of the texts were cut at max_new_tokens: how such texts go on was not measured",
        "raise max_new_tokens if the traffic writes longer answers",
    ),
    "skipped": NoteKind("{count} documents left out: {reason}", "{remedy}"),
    "truncated": NoteKind("{count} {reason}", "{remedy}"),
    # then the rest.
    "not_timed": NoteKind("no step times, so no speedup: {reason}", "{remedy}", "own times"),
    "not_timed_there": NoteKind("no step times there: {reason}", "{remedy}", "own times"),
    "other_vllm": NoteKind(
        "vLLM {version} was never tried with this version of alphaprof; {tried} was",
        "compare a few results with your server, or use vLLM {tried}",
    ),
    "other_dtype": NoteKind(
        "the target is measured in {reason}",
        "near-ties fall otherwise in the dtype that is served: set target.dtype to measure in that one, however slow",
        check="dtype",
    ),
    "mixed_devices": NoteKind(
        "shards were measured by processes that compute otherwise than the one that began the run: {where}",
        "rows may differ in the last digits: measure on equal devices where near-ties matter",
    ),
    "raw_prompts": NoteKind(
        "the target has a chat template, and prompts are profiled without it ({files})",
        "set chat: true or use messages if the traffic goes through the template",
        check="chat template",
    ),
    "halved_batches": NoteKind(
        "memory ran out and {count} batches were halved; values may differ by up to 1e-3 from a run with enough memory",
        "lower batch_tokens",
    ),
    "p_min": NoteKind(
        "{draft} at gamma {gamma} that stops below a top probability of {p_min} is faster than at gamma {plain} without, by "
        "{gain} [{low}, {high}]",
        "llama.cpp and Hugging Face can stop it (p_min): decision.p_min: auto judges with it; see report --show gammas",
    ),
    "stopped": NoteKind(
        "documents were taken in random order, {done} of {available}. Verdicts hold at any time; intervals are for a fixed "
        "number of documents, and slightly too optimistic",
        "take the verdict from this run, and the size of a speedup from a run that measures all documents",
    ),
    "no_log": NoteKind(
        "the run's directory has no position log: sections that read it are left out, such as why tokens are rejected "
        "and where drafts are right",
        "copy positions/ there too",
    ),
    "part_of_log": NoteKind(
        "sections from the position log read {read} of {documents} documents, in shards spread over the run, such as "
        "why tokens are rejected and where drafts are right; verdicts and results use all documents",
        "alphaprof report --whole-log reads the whole position log",
    ),
    "never_full": NoteKind(
        "no round accepted more than {deepest} of {gamma} drafts",
        "a shorter chain would accept as much; of SGLang with --speculative-eagle-topk above 1, import with --drafting tree",
    ),
    "imported": NoteKind(
        "rounds are those that the engine counted. Alpha is not known: drafts after a rejection are never tested, and "
        "accepted / drafted is not alpha. Coverage, near-ties and other gammas are not known either",
        "alphaprof profile measures them, for drafts that it can load",
    ),
    "plain_steps": NoteKind(
        "{rounds} rounds without a draft, in {plain} of {requests} requests, follow from completion_tokens alone: up to "
        "gamma more a request may hide where its last round reaches beyond the end",
        "tokens per round counts them, acceptance length does not; a draft that always proposes has none",
    ),
    "no_steps": NoteKind(
        "{idle} of {requests} requests have no round with a draft; they are kept as plain decoding",
        "answers of one token have none; else see whether drafting was switched off under load",
    ),
    "prompts_unknown": NoteKind(
        "prompts are identified by {known_by} ({lacking} of {requests} requests hold no prompt_token_ids): "
        "compare and check --baseline pair {pairs}, and equal prompts count as independent, which makes intervals too "
        "narrow",
        "{remedy}, or the prompt's text",
    ),
    "rounds_only": NoteKind(
        "drafting was {drafting}: tokens per round are known, and not what rounds drafted; gamma {gamma} is the "
        "most drafts that a round can accept",
        "acceptance by depth, exports and speedups need chains of one length",
    ),
    "beyond_prefill": NoteKind(
        "{share} of the prompts are longer than any whose prefill was timed: their time is extrapolated from the last two "
        "times",
        "request speedups depend on it: add the prompts' length to costs.context, or to the table of step times",
    ),
    "token_by_token": NoteKind(
        "lossless rounds of {heads} verify token by token: where an engine verifies by block, a round emits at least as "
        "many tokens on average",
        "name the rule block in rules and profile again: --reuse-continuations keeps the text",
    ),
    "chain": NoteKind(
        "rounds of {heads} draft a chain; where an engine drafts a tree, a tree accepts more",
        "SGLang drafts chains with --speculative-eagle-topk 1; import the metrics of an engine that drafts trees",
    ),
    "full_logits": NoteKind(
        "{model}: logits need the full forward of a whole document at once",
        "expect more memory per document; lower max_new_tokens if it runs out",
        check="memory",
    ),
    "not_modelled": NoteKind(
        "the target's generation config sets {setting}, which is not modelled: texts are drawn without it",
        "a server that applies it will see a different acceptance",
        check="sampling",
    ),
    "no_thresholds": NoteKind(
        "certificates: true, and no rule has thresholds ({rules})",
        "add a rule that compares with the target, like strict; the others keep drafts by chance",
    ),
    "slow_statistics": NoteKind(
        "statistics run in torch, since Triton's kernels cannot run here: {reason}",
        "install triton and a C compiler; the numbers are the same",
    ),
}
RANKS = {code: rank for rank, code in enumerate(NOTES)}


def note(code: str, **facts: object) -> dict[str, str]:
    """Return a note as code, message and remedy, with its facts in their places."""
    kind = NOTES[code]
    return {"code": code, "message": kind.message.format(**facts), "remedy": kind.remedy.format(**facts)}


def concerns_of(code: str) -> Concerns | None:
    """Return what a note concerns; None also for a code that an older run holds and nothing writes any more."""
    return NOTES[code].concerns if code in NOTES else None


def check_of(code: str) -> str:
    """Return the check of a dry run that shows a note."""
    return (NOTES[code].check if code in NOTES else None) or code.replace("_", " ")
