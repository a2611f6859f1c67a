"""Notes: what a reader of a run must know. Tables by code, with message and remedy, the most important first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

# The texts of a run, any step times, or only step times that were measured on the run's own machine.
Concerns = Literal["texts", "times", "own times"]


class NoteKind(NamedTuple):
    """`message`: what happened and why it matters, `remedy`: what to do about it, both with the names of facts in braces;
    `concerns`: what else depends on it; `check`: the check of a dry run that shows it (None: named like the note).
    """

    message: str
    remedy: str
    concerns: Concerns | None = None
    check: str | None = None


NOTES: Mapping[str, NoteKind] = {
    # First what can make the answer wrong,
    "not_greedy": NoteKind(
        "{domain}: {share:.1%} of tokens are clearly not the target's top token",
        "given text: check that this target generated it greedily, or drop on_policy; text of this run: profile in float32 "
        "to see whether the dtype is the cause",
        "texts",
    ),
    "off_policy_sample": NoteKind(
        "acceptance differs from what the distributions predict, so this text was not sampled from them: {where}",
        "given text: check that temperature, top_k, top_p and min_p match how it was sampled; text of this run: profile in "
        "float32 to see whether the dtype is the cause",
        "texts",
    ),
    "outside_support": NoteKind(
        "{share:.2%} of sampled tokens have probability 0 in the scoring pass and count as rejected",
        "a few are due to rounding at the top_k and top_p cutoff; if many, check which settings the text was sampled with",
        "texts",
    ),
    "long_tail": NoteKind(
        "{lengths}: the speedup may be {direction}",
        "raise limit until the sample includes the longest documents of the traffic, or set decision.weights",
        "times",
    ),
    "wiring": NoteKind("{doubt}", "{remedy}", "texts"),
    "recounted": NoteKind(
        "totals are missing: they were counted again from the position log, and no number has changed",
        "write them again with alphaprof profile --resume",
        "texts",
    ),
    "busy": NoteKind(
        "this machine is busy, so step times are uncertain: the timed steps waited for a CPU {waiting:.0%} of the time",
        "measure again when the machine is idle, or use your engine's step times (docs/costs.md)",
        "own times",
    ),
    "cpu_seconds": NoteKind(
        "this machine is busy: step times are CPU seconds of the one thread that computes, without the {waiting:.0%} of the "
        "time that it waited for a core",
        "measure again when the machine is idle if other work on it also shares its caches and memory (docs/costs.md)",
        "own times",
    ),
    "slow_baseline": NoteKind(
        "verifying {tokens} tokens took less time than decoding one (v < 1): the baseline is slow here, so the draft "
        "may look better than it is",
        "measure again, and compare the times of 1 and {tokens} tokens with those of your serving engine",
        "times",
    ),
    # what changes the answer,
    "no_step_times": NoteKind("{reason}", "{remedy}"),
    "out_of_time": NoteKind(
        "step times missing: {reason}",
        "time them with alphaprof profile --resume, with a larger costs.budget or on an idle machine",
        "own times",
    ),
    "partial": NoteKind(
        "the run was interrupted: this report covers its first {documents} documents",
        "resume it with alphaprof profile --resume",
        "texts",
    ),
    "not_covered": NoteKind(
        "step times do not reach the largest gamma of the run: above gamma {covered} there is no speedup, and the verdict "
        "does not choose from there",
        "give the times that are missing ({rows}), see docs/costs.md",
        "times",
    ),
    "other_context": NoteKind(
        "step times were taken with {timed:.0f} tokens in the KV cache, these documents have about {typical:.0f} on average",
        "time steps at about {typical:.0f} (costs.context, or the table's context): they get slower as the cache grows",
        "times",
    ),
    "not_measured": NoteKind(
        "step times were computed, not measured: {accuracy}",
        "time the steps in your vLLM before you deploy: costs: {{source: vllm}} (docs/vllm.md), or give a table. On a GPU "
        "this is the default: transformers launches every kernel by itself there, which engines do not",
        "times",
    ),
    "eager": NoteKind(
        "steps were timed on a GPU with transformers, which launches every kernel by itself, for target and drafts alike: "
        "engines do not, so a draft may cost more or less there",
        "time the steps in your vLLM before you deploy: costs: {{source: vllm}} (docs/vllm.md), or give a table",
        "own times",
    ),
    "cut_by_length": NoteKind(
        "{share} of the texts were cut at max_new_tokens: {direction}",
        "{remedy}",
    ),
    "near_ties": NoteKind(
        "{ties:.1%} of positions are near-ties in {dtype}, and {changed:.2%} of greedy tokens change with the batch shape: "
        "no draft can predict those reliably",
        "this is expected in 16-bit dtypes; profile in the dtype that you serve",
        "texts",
    ),
    "skipped": NoteKind("{count} documents left out: {reason}", "{remedy}"),
    "truncated": NoteKind("{count} {reason}", "{remedy}"),
    # and the rest.
    "not_timed": NoteKind("no step times, so no speedup: {reason}", "{remedy}", "own times"),
    "not_timed_there": NoteKind("step times missing: {reason}", "{remedy}", "own times"),
    "other_vllm": NoteKind(
        "vLLM {version} is untested with this version of alphaprof; {tried} is tested",
        "compare a few results with your server, or use vLLM {tried}",
    ),
    "padded_here": NoteKind(
        "{drafts}: rightmost match, and every round filled up to gamma, as vLLM on GPUs; steps are timed on a CPU",
        "to serve it by vLLM on a CPU or by transformers, set match: leftmost",
    ),
    "other_dtype": NoteKind(
        "the target is measured in {reason}",
        "near-ties resolve differently in the dtype that you serve: set target.dtype to it, even if it is slow here",
        check="dtype",
    ),
    "mixed_devices": NoteKind(
        "some shards were measured on a different device or version than the start of the run: {where}",
        "rows may differ in the last digits: use identical devices if near-ties matter",
    ),
    "raw_prompts": NoteKind(
        "the target has a chat template, but prompts are profiled without it ({files})",
        "set chat: true or use messages if your traffic uses the template",
        check="chat template",
    ),
    "imported": NoteKind(
        "rounds are as counted by the engine. Alpha, coverage, near-ties and other gammas are unknown: drafts after a "
        "rejection are never tested, and accepted / drafted is not alpha",
        "measure them with alphaprof profile, if it can load the draft",
    ),
    "no_log": NoteKind(
        "the run directory has no position log: sections that read it (causes, context, target) are empty",
        "copy positions/ into the run too",
    ),
    "prompts_unknown": NoteKind(
        "prompts are identified by {known_by} ({lacking} of {requests} requests have no prompt_token_ids): "
        "comparisons pair {pairs}, and repeated prompts count as independent, which makes intervals too "
        "narrow",
        "{remedy}, or the prompt's text",
    ),
    "rounds_only": NoteKind(
        "drafting was {drafting}: tokens per round are known, but not the number of drafted tokens; gamma {gamma} is the "
        "most that a round can accept",
        "for acceptance by depth, exports and speedups, use chains of a fixed length",
    ),
    "not_modelled": NoteKind(
        "the target's generation config sets {setting}, which is not supported: texts are sampled without it",
        "expect a different acceptance on a server that applies it",
        check="sampling",
    ),
}
# What is said once, on standard error, while a run is made; its manifest keeps it, and reports do not repeat it.
REMARKS: Mapping[str, NoteKind] = {
    "no_verdict": NoteKind(
        "decision.rule {rule} has no timed rounds on this text, so there will be no verdict",
        "remove decision.rule, or measure the kind of text that the rule applies to (alphaprof rules)",
    ),
    "never_full": NoteKind(
        "no round accepted more than {deepest} of {gamma} drafted tokens",
        "use a smaller gamma, which would accept as many; if SGLang ran with --speculative-eagle-topk above 1, import with "
        "--drafting tree",
    ),
    "plain_steps": NoteKind(
        "{rounds} rounds without a draft, in {plain} of {requests} requests, were derived from completion_tokens alone: "
        "a request may have up to gamma more if its last round passes the end of the text",
        "tokens per round counts them, acceptance length does not; a draft that always proposes has no such rounds",
    ),
    "no_steps": NoteKind(
        "{idle} of {requests} requests have no round with a draft; they are kept as plain decoding",
        "expected for answers of one token; otherwise check whether drafting was switched off under load",
    ),
    "larger_tokenizer": NoteKind(
        "the target's tokenizer has ids up to {last}, but the target has embeddings for {rows} ids only: it cannot read "
        "text with ids from {rows} on",
        "use the tokenizer of this checkpoint, or the checkpoint whose embeddings were resized for the added tokens",
        check="vocabulary",
    ),
    "full_logits": NoteKind(
        "{model}: logits of a whole document are computed in one forward pass, which takes more memory",
        "lower max_new_tokens if memory runs out",
        check="memory",
    ),
    "no_thresholds": NoteKind(
        "certificates: true has no effect, because none of the rules has a threshold ({rules})",
        "add a rule with a threshold, like strict; the others accept drafts by chance",
    ),
    "draft_processing": NoteKind(
        "{rules}: drafts are drawn with temperature only, as in vLLM and SGLang, on text that is also cut by top_k, top_p "
        "or min_p",
        "for an engine whose drafter cuts like the target, as Hugging Face does: draft_processing: same",
        check="sampling",
    ),
    "slow_statistics": NoteKind(
        "statistics run in torch (slower, same numbers), because Triton's kernels cannot run here: {reason}",
        "install triton and a C compiler",
    ),
}
RANKS = {code: rank for rank, code in enumerate(NOTES)}


def note(code: str, **facts: object) -> dict[str, str]:
    """Return a note as code, message and remedy, with its facts in their places."""
    kind = NOTES.get(code) or REMARKS[code]
    return {"code": code, "message": kind.message.format(**facts), "remedy": kind.remedy.format(**facts)}


def concerns_of(code: str) -> Concerns | None:
    """Return what a note concerns; None also for a code of an older run that is no longer in use."""
    return NOTES[code].concerns if code in NOTES else None


def check_of(code: str) -> str:
    """Return the check of a dry run that shows a note."""
    kind = NOTES.get(code) or REMARKS.get(code)
    return (kind.check if kind else None) or code.replace("_", " ")
