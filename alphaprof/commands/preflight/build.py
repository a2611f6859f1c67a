"""A dry run's report: findings, each ok, note or problem with its cause and a remedy; and its text (rich)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.console import Console
from rich.text import Text

from alphaprof import errors
from alphaprof.commands.preflight.facts import ModelSeen, PreflightFacts, SourceSeen
from alphaprof.log.manifest import DraftFacts, left_out_remedy
from alphaprof.render.tables import empty_table, plain
from alphaprof.render.wording import wiring_lines
from alphaprof.report.format import count, data_size, duration, many, number, percent, share, short
from alphaprof.report.notes import kind

ORDER = (
    *("dtype", "vocabulary", "wiring", "chat template", "bos", "context", "trial", "self-draft", "noise floor"),
    *("data", "costs", "time", "disk", "memory"),
)
OK, NOTE, PROBLEM = "ok", "note", "problem"
STYLES = {OK: "green", NOTE: "yellow", PROBLEM: "bold red"}
# Where the run's own early warnings belong; a code that is not here is a check of its own.


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str  # of the check (docs/preflight.md)
    subject: str  # model or source that it is about; run: all of it
    level: str  # ok, note or problem
    cause: str  # what was found
    remedy: str | None = None  # what to do about it; None: nothing
    stops: bool = False  # whether the run would end with this


@dataclass(frozen=True)
class Preflight:
    """All checks, and the facts that they are about."""

    format: ClassVar[str] = "alphaprof-preflight"
    version: ClassVar[str] = "1.0"

    checks: tuple[Finding, ...]  # by name, in the order of the docs
    stops: bool  # whether the run would stop
    conclusion: str  # what follows, in words
    seen: PreflightFacts  # the facts

    def terminal(self, console: Console) -> None:
        """Prints what follows from the checks, and every check with its cause and remedy."""
        console.print(self.conclusion, highlight=False, markup=False, style="bold")
        facts = self.seen.target.facts
        drafts = many(len(self.seen.drafts), "draft")
        console.print(plain(f"{facts.architecture} in {facts.precision} on {facts.device}, {drafts}"))
        table = empty_table()
        for name, width in (("check", 14), ("of", 20), ("result", 7)):
            table.add_column(name, overflow="fold", max_width=width)
        table.add_column("what was found, and what to do", overflow="fold", ratio=1)
        last = None
        for check in self.checks:
            cause = plain(check.cause)
            if check.remedy is not None:
                cause.append("\n").append_text(Text("-> ", "dim")).append_text(plain(check.remedy))
            name = "" if check.name == last else check.name
            table.add_row(name, plain(check.subject), Text(check.level, STYLES[check.level]), cause)
            last = check.name
        console.print(table)


def build_preflight(facts: PreflightFacts) -> Preflight:
    """Returns the checks of what a dry run has found."""
    findings = [finding for check in CHECKS for finding in check(facts)]
    shown = {check.name for check in findings}
    others = dict.fromkeys(_place(warning) for warning in facts.warnings if _place(warning) not in shown)
    findings += [check for name in others for check in _warned(facts, name)]
    findings += [Finding(item.check, item.subject, PROBLEM, item.message, item.hint, stops=True) for item in facts.refusals]
    findings.sort(key=lambda check: ORDER.index(check.name) if check.name in ORDER else len(ORDER))
    return Preflight(tuple(findings), bool(facts.refusals), _conclusion(findings), facts)


def _conclusion(checks: Sequence[Finding]) -> str:
    stopping = sum(check.stops for check in checks)
    problems, notes = (sum(check.level == level for check in checks) for level in (PROBLEM, NOTE))
    counts = f"{many(problems, 'problem')} and {many(notes, 'note')}"
    run = f"of which {stopping} would stop the run" if stopping else "none of which stops the run"
    return f"{counts}, {run}. Nothing was written."


def require_clear(preflight: Preflight) -> None:
    """Raise the first error that would stop the run, as the run would."""
    if refusals := preflight.seen.refusals:
        first = refusals[0]
        raise getattr(errors, first.kind)(first.message, first.hint)


def _finding(name: str, subject: str, cause: str, remedy: str | None = None, *, problem: bool = False) -> Finding:
    """A finding: ok where there is nothing to do about it."""
    return Finding(name, subject, PROBLEM if problem else OK if remedy is None else NOTE, cause, remedy)


def _place(warning: Mapping[str, str]) -> str:
    """The name of the check that a warning of the run belongs to."""
    return kind(warning["code"]).check or warning["code"].replace("_", " ")


def _warned(facts: PreflightFacts, name: str) -> Iterator[Finding]:
    """What the run itself would warn of that belongs to a check."""
    for warning in facts.warnings:
        if _place(warning) == name:
            yield _finding(name, "run", warning["message"], warning["remedy"])


def _vocabulary(facts: PreflightFacts) -> Iterator[Finding]:
    yield _finding("vocabulary", "target", _sizes(facts, facts.target))
    for draft in facts.drafts:
        if draft.tokens is None or draft.shared is None:
            yield _finding("vocabulary", draft.name, *_own_ids(facts, draft))
            continue
        text, remedy = f"{_sizes(facts, draft)}; {count(draft.shared)} ids in common, which all mean the same", None
        if draft.logits != facts.target.logits:
            text += f"; the target has {count(facts.target.logits)} logits"
            remedy = (
                "no harm here; an engine that compares vocab_size refuses the pair until both heads are padded to one width"
            )
        yield _finding("vocabulary", draft.name, text, remedy)
        if draft.special:
            pairs = ", ".join(f"{item.name} {short(str(item.target))} / {short(str(item.draft))}" for item in draft.special)
            remedy = "texts end where the target's end; a draft that ends them with another token is wrong at every end"
            yield _finding("vocabulary", draft.name, f"special tokens differ (target / draft): {pairs}", remedy)


def _own_ids(facts: PreflightFacts, draft: ModelSeen) -> tuple[str, str | None]:
    """Which of the target's ids a draft without a tokenizer of its own can propose, and what to know about it."""
    if not (isinstance(draft.facts, DraftFacts) and draft.facts.reduced_vocabulary):
        return "shares the target's", None
    part = percent(draft.logits / facts.scored_ids)
    return (
        f"can propose {count(draft.logits)} of the target's {count(facts.scored_ids)} ids ({part}), and reads all of them",
        "the run measures how much of the text these are: no acceptance is above that",
    )


def _dtype(facts: PreflightFacts) -> Iterator[Finding]:
    if warned := list(_warned(facts, "dtype")):
        yield from warned
    elif facts.dtype is not None:
        yield _finding("dtype", "target", facts.dtype)


def _heads(facts: PreflightFacts) -> Iterator[Finding]:
    for draft in facts.drafts:
        known = draft.facts
        if isinstance(known, DraftFacts) and known.depths is not None:
            dtype = (
                known.dtype if known.dtype == facts.target.facts.dtype else f"{known.dtype} beside the target's own dtype"
            )
            first, *others = [
                f"{known.architecture} in {dtype}, {many(known.depths, 'draft')} a round",
                *wiring_lines(known),
            ]
            yield _finding("wiring", draft.name, ". ".join([first, *others]))
    yield from _warned(facts, "wiring")


def _sizes(facts: PreflightFacts, model: ModelSeen) -> str:
    """Logits and token ids of a model, and what becomes of the logits that have no token, or tokens without a logit."""
    sizes = f"{count(model.logits)} logits" + ("" if model.tokens is None else f" for {count(model.tokens)} token ids")
    padding, missing = model.logits - facts.scored_ids, (facts.target.tokens or 0) - model.logits
    if padding > 0:
        return f"{sizes}, the last {count(padding)} of them padding that is left out"
    return sizes + (f", {count(missing)} tokens of the target have none and are never proposed" if missing > 0 else "")


def _template(facts: PreflightFacts) -> Iterator[Finding]:
    name = "chat template"
    used = [source for source in facts.sources if source.prompts in ("chat", "messages")]
    if raw := list(_warned(facts, name)):
        yield from raw
    elif not facts.template:
        if not any(refusal.check == name for refusal in facts.refusals):
            yield _finding(name, "target", "the target has no chat template, and no source asks for one")
    elif used:
        yield _finding(name, "target", f"used for {len(used)} of {many(len(facts.sources), 'source')}")
    else:
        yield _finding(name, "target", "there is one, and no source is encoded here without it")


def _bos(facts: PreflightFacts) -> Iterator[Finding]:
    bos, text = facts.bos, "the tokenizer has no BOS token"
    if bos.token is not None:
        template = {True: "; the chat template writes it", False: "; the chat template does not", None: ""}[bos.in_template]
        added = "adds it" if bos.added else "does not add it"
        text = f"BOS is {short(bos.token)}; the tokenizer {added} to plain text{template}"
    yield _finding("bos", "target", text)
    for source in facts.sources:
        of = f"of {many(source.documents, 'document')}"
        if source.double_bos:
            cause = f"{count(source.double_bos)} {of} begin with BOS twice: the data contain it, and it is added again"
            remedy = "remove it from the data, or give rendered prompts as prompt_ids"
            yield _finding("bos", source.path, cause, remedy, problem=True)
        if source.without_bos:
            cause = f"{count(source.without_bos)} {of} begin without BOS, which this tokenizer adds to plain text"
            remedy = "right if your server sends them like this (many use a template as it is); else give its token ids as "
            yield _finding("bos", source.path, cause, f"{remedy}prompt_ids")
        if source.lost_bos:
            cause = f"{count(source.lost_bos)} {of} lost BOS: too_long: truncate drops the beginning of their prompts"
            yield _finding("bos", source.path, cause, left_out_remedy("cut prompts lost"), problem=True)


def _context(facts: PreflightFacts) -> Iterator[Finding]:
    longest = max((source.longest for source in facts.sources), default=None)
    reach = "" if longest is None else f"; the longest document seen has {count(longest)} with its new tokens"
    yield _finding("context", "target", _limit(facts.target) + reach)
    documents = sum(source.documents for source in facts.sources)
    for draft in facts.drafts:
        if not draft.beyond:
            yield _finding("context", draft.name, _limit(draft))
            continue
        part = f"{count(draft.beyond)} of {many(documents, 'document')} ({percent(draft.beyond / documents)})"
        silent = f", in {count(draft.silent)} of them from the start" if draft.silent else ""
        cause = f"{_limit(draft)}; {part} go beyond it: there it proposes nothing{silent}"
        remedy = "engines stop drafting there too, or refuse: take a draft with a longer context, or lower max_new_tokens"
        yield _finding("context", draft.name, cause, remedy, problem=draft.silent == documents)


def _limit(model: ModelSeen) -> str:
    return "no limit" if model.facts.context is None else f"{count(model.facts.context)} tokens"


def _self_draft(facts: PreflightFacts) -> Iterator[Finding]:
    if (twin := facts.self_draft) is None:
        return
    target = "the target " + ("through layer skip without a dropped layer" if twin.layer_skip else "as its own draft")
    where = f"{many(twin.positions, 'position')} in {facts.target.facts.dtype}"
    others, remedy = twin.positions - twin.accepted, None
    if twin.agreeing < twin.positions:
        cause = f"{target} has another top token than itself at {count(twin.positions - twin.agreeing)} of {where}"
        remedy = "alpha of any draft is wrong by as much: try dtype float32 or another device, and please report the model"
    elif others == 0:
        cause = f"{target} has alpha 1 at {where}"
    else:
        cause = (
            f"{target} has its own top token at all of {where}; alpha on the generated text is "
            f"{share(twin.accepted / twin.positions)}: {many(others, 'token')} no longer top when scored "
            f"({others - twin.near_ties} beyond a near-tie)"
        )
        remedy = "no draft can be sure of such tokens; float32 shows whether it is the dtype"
    yield _finding("self-draft", "target", cause, remedy, problem=twin.agreeing < twin.positions)


def _noise(facts: PreflightFacts) -> Iterator[Finding]:
    if (noise := facts.noise) is None:
        return
    ties = f"near-ties (top logits within {noise.noise:g}) {percent(noise.near_ties / noise.positions)}"
    cause = (
        f"the same texts alone and in a batch of {noise.documents}: {count(noise.flips)} of "
        f"{many(noise.positions, 'top token')} flip ({percent(noise.flips / noise.positions)}), {ties}; differences up to "
        f"{noise.logit_difference:.2g} of a logit, {noise.probability_difference:.2g} of a probability"
    )
    remedy = "strict acceptance is not known more precisely than that; an engine that verifies in batches flips as many"
    yield _finding("noise floor", "target", cause, remedy if noise.flips else None)


def _data(facts: PreflightFacts) -> Iterator[Finding]:
    for source in facts.sources:
        yield from _source(source)
    if facts.repeated:
        prompts = many(sum(source.documents for source in facts.sources), "prompt")
        cause = f"{count(facts.repeated)} of {prompts} seen occur before: equal prompts count once"
        yield _finding("data", "run", cause, "remove duplicates: they cost time and add no information")
    yield from _warned(facts, "data")


def _source(source: SourceSeen) -> Iterator[Finding]:
    domains = ", ".join(short(name) for name in source.domains[:3]) + (", ..." if len(source.domains) > 3 else "")
    if source.planned is None:
        planned = f"more than {count(source.documents)}, the number is not known without reading all"
    else:
        planned = f"{'about ' if source.planned > source.documents else ''}{many(source.planned, 'document')}"
    lengths = count(source.median_prompt)
    if source.shortest_prompt < source.longest_prompt:
        lengths = f"{count(source.shortest_prompt)} to {count(source.longest_prompt)}, median {lengths}"
    single = "a single document has no interval, and no verdict: add more" if source.planned == 1 else None
    yield _finding("data", source.path, f"{domains}: {planned}; prompts of {lengths} tokens", single)
    for reason, rows in source.skipped.items():
        yield _finding("data", source.path, f"{many(rows, 'row')} left out {reason}", left_out_remedy(reason))
    for reason, texts in source.truncated.items():
        yield _finding("data", source.path, f"{count(texts)} {reason}", left_out_remedy(reason))


def _costs(facts: PreflightFacts) -> Iterator[Finding]:
    target = facts.target.facts.parameters
    for draft in facts.drafts:
        if target and (own := draft.facts.parameters) and own > target:
            cause = (
                f"has {count(own)} parameters, the target {count(target)}: a step of it costs more than one of the target"
            )
            yield _finding("costs", draft.name, cause, "take a smaller draft, or swap the two if they were mixed up")
    if (speed := facts.speed) is None:
        return
    remedy = None
    if speed.untimed is not None:
        cause = f"no step times: {speed.untimed}"
        remedy = "the report has no speedup then; give step times of your engine: costs.source=table"
    elif speed.timing_s is not None:
        cause = f"steps can be timed here; that takes about {duration(speed.timing_s)}"
        if speed.budget_s is not None and speed.timing_s > speed.budget_s:
            cause = (
                f"the fewest rounds of all steps that give times a bound take about {duration(speed.timing_s)}, more than "
                f"costs.budget ({speed.budget_s:g} s): larger batch sizes and contexts will have no step times, or none will"
            )
            remedy = "raise costs.budget, fewer of costs.concurrency or costs.context, or an idle machine"
    elif any(refusal.check == "costs" for refusal in facts.refusals):
        return
    else:
        cause = "step times come from another source"
    yield _finding("costs", "run", cause, remedy)


def _needs(facts: PreflightFacts) -> Iterator[Finding]:
    """What the run takes; an estimate that leaves out what could not be loaded is a note."""
    refused = [(item.check, short(item.subject)) for item in facts.refusals]
    drafts = [f"draft {subject}" for check, subject in refused if check == "vocabulary"]
    sources = [f"source {subject}" for check, subject in refused if check in ("data", "chat template")]
    for check in (*_time(facts), *_disk(facts), *_memory(facts)):
        omitted = drafts if check.name == "memory" else drafts + sources
        if not omitted:
            yield check
            continue
        without = ", ".join(dict.fromkeys(omitted))
        remedy = check.remedy or "correct what was refused first: the run takes more than this"
        level = NOTE if check.level == OK else check.level
        yield dataclasses.replace(check, level=level, cause=f"without {without}: {check.cause}", remedy=remedy)
    if not facts.drafts and facts.sources:
        for name in ("time", "disk"):
            remedy = "correct what was refused, and repeat the dry run"
            yield _finding(name, "run", "not known: no draft could be loaded", remedy)
    yield from _warned(facts, "memory")


def _time(facts: PreflightFacts) -> Iterator[Finding]:
    speed, estimate = facts.speed, facts.estimate
    if speed is None or estimate is None:
        return
    generation = f"generation ({count(speed.batch)} at a time)"
    rates = {"prompts": speed.prompts, generation: speed.generated, "scoring": speed.scored}
    parts = ", ".join(f"{name} {number(rate, 0)}" for name, rate in rates.items() if rate is not None)
    text = f"tokens a second on {many(speed.positions, 'position')} of {many(speed.documents, 'document')}: {parts}"
    if estimate.document_seconds is None:
        time = "the target's generation speed is not known, since its steps cannot be timed"
        remedy: str | None = "profile a few documents with --limit first, and note how long that takes"
    elif estimate.seconds is None:
        time = f"roughly {duration(estimate.document_seconds)} a document; how many there are is not known"
        remedy = "give a source on the hub a limit, or use --limit"
    else:
        documents = many(estimate.documents or 0, "document")
        time, remedy = f"roughly {duration(estimate.seconds)} for {documents}, less where texts end early", None
    yield _finding("time", "run", f"{time}; {text}", remedy)


def _disk(facts: PreflightFacts) -> Iterator[Finding]:
    storage, estimate = facts.storage, facts.estimate
    if storage is None or estimate is None:
        return
    size, full = f"{data_size(estimate.document_bytes)} a document", False
    if estimate.disk is not None:
        size = f"{data_size(estimate.disk)} for at most {many(estimate.positions or 0, 'position')}"
        full = storage.free is not None and storage.free < estimate.disk
    per = f"{number(storage.position_bytes, 0)} bytes a position over all drafts, {storage.columns} columns"
    free = "" if storage.free is None else f"; {data_size(storage.free)} are free"
    remedy = "free space or choose another --out: a run ends where the disk is full" if full else None
    yield _finding("disk", "run", f"about {size} ({per}){free}", remedy, problem=full)


def _memory(facts: PreflightFacts) -> Iterator[Finding]:
    memory = facts.memory
    parts = [f"weights {data_size(memory.weights)}"]
    if memory.trial is not None:
        parts.append(f"the run in small took {data_size(memory.trial)} beside them")
    if memory.free is not None:
        parts.append(f"{data_size(memory.free)} are free beside the weights")
    yield _finding("memory", "run", f"{'; '.join(parts)}; batches that do not fit are halved")


CHECKS = (_dtype, _vocabulary, _heads, _template, _bos, _context, _self_draft, _noise, _data, _costs, _needs)
