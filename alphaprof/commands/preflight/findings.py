"""Findings of a dry run: models, templates, contexts and numerics; data, step times, and what the run takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from alphaprof.commands.preflight.facts import ModelSeen, PreflightFacts, SourceSeen
from alphaprof.report.format import count, data_size, duration, many, number, percent, share, short

OK, NOTE, PROBLEM = "ok", "note", "problem"
# Where the run's own early warnings belong; a code that is not here is a check of its own.
PLACES = {"raw_prompts": "chat template", "json_array": "data", "full_logits": "memory", "not_modelled": "sampling"}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str  # of the check (docs/preflight.md)
    subject: str  # model or source that it is about; run: all of it
    level: str  # ok, note or problem
    cause: str  # what was found
    remedy: str | None = None  # what to do about it; None: nothing
    stops: bool = False  # whether the run would end with this


def model_checks(seen: PreflightFacts) -> Iterator[Finding]:
    """What concerns models and tokenizers."""
    for part in (_vocabulary, _template, _bos, _lost_bos, _context, _self_draft, _noise):
        yield from part(seen)


def _vocabulary(seen: PreflightFacts) -> Iterator[Finding]:
    yield Finding("vocabulary", "target", OK, _sizes(seen.target) + _cut(seen, seen.target))
    for draft in seen.drafts:
        if draft.tokens is None or draft.shared is None:
            yield Finding("vocabulary", draft.name, OK, "shares the target's")
            continue
        text = f"{_sizes(draft)}{_cut(seen, draft)}; {count(draft.shared)} ids in common, which all mean the same"
        if draft.logits == seen.target.logits:
            yield Finding("vocabulary", draft.name, OK, text)
        else:
            yield Finding(
                "vocabulary",
                draft.name,
                NOTE,
                f"{text}; the target has {count(seen.target.logits)} logits",
                "no harm here; an engine that compares vocab_size refuses the pair until both heads are padded to one width",
            )
        yield from _specials(seen, draft)


def _sizes(model: ModelSeen) -> str:
    logits = count(model.logits)
    return f"{logits} logits" if model.tokens is None else f"{logits} logits for {count(model.tokens)} token ids"


def _cut(seen: PreflightFacts, model: ModelSeen) -> str:
    """What becomes of the columns that no token stands behind."""
    cut = model.logits - seen.scored_ids
    if cut > 0:
        return f", the last {count(cut)} of them padding that is left out"
    missing = (seen.target.tokens or 0) - model.logits
    return f", {count(missing)} tokens of the target have none and are never proposed" if missing > 0 else ""


def _specials(seen: PreflightFacts, draft: ModelSeen) -> Iterator[Finding]:
    if draft.special:
        pairs = ", ".join(f"{item.name} {short(str(item.target))} / {short(str(item.draft))}" for item in draft.special)
        yield Finding(
            "vocabulary",
            draft.name,
            NOTE,
            f"special tokens differ (target / draft): {pairs}",
            "texts end where the target's end; a draft that ends them with another token is wrong at every end",
        )


def _template(seen: PreflightFacts) -> Iterator[Finding]:
    raw = list(warned(seen, "chat template"))
    used = [source for source in seen.sources if source.prompts in ("chat", "messages")]
    if raw:
        yield from raw
    elif not seen.template:
        if not any(refusal.check == "chat template" for refusal in seen.refusals):
            yield Finding("chat template", "target", OK, "the target has no chat template, and no source asks for one")
    elif used:
        yield Finding("chat template", "target", OK, f"used for {len(used)} of {many(len(seen.sources), 'source')}")
    else:
        yield Finding("chat template", "target", OK, "there is one, and no source is encoded here without it")


def _bos(seen: PreflightFacts) -> Iterator[Finding]:
    bos = seen.bos
    if bos.token is None:
        yield Finding("bos", "target", OK, "the tokenizer has no BOS token")
    else:
        template = {True: "; the chat template writes it", False: "; the chat template does not", None: ""}[bos.in_template]
        added = "adds it" if bos.added else "does not add it"
        yield Finding("bos", "target", OK, f"BOS is {short(bos.token)}; the tokenizer {added} to plain text{template}")
    for source in seen.sources:
        if source.double_bos:
            yield Finding(
                "bos",
                source.path,
                PROBLEM,
                f"{_part(source.double_bos, source)} begin with BOS twice: the data contain it, and it is added again",
                "remove it from the data, or give rendered prompts as prompt_ids",
            )
        if source.without_bos:
            yield Finding(
                "bos",
                source.path,
                NOTE,
                f"{_part(source.without_bos, source)} begin without BOS, which this tokenizer adds to plain text",
                "right if your server sends them like this (many use a template as it is); else give its token ids as "
                "prompt_ids",
            )


def _lost_bos(seen: PreflightFacts) -> Iterator[Finding]:
    for source in seen.sources:
        if source.lost_bos:
            yield Finding(
                "bos",
                source.path,
                PROBLEM,
                f"{_part(source.lost_bos, source)} lost BOS: too_long: truncate drops the beginning of their prompts",
                "leave long documents out (too_long: skip), or cut prompts as your server does and give prompt_ids",
            )


def _context(seen: PreflightFacts) -> Iterator[Finding]:
    longest = max((source.longest for source in seen.sources), default=None)
    reach = "" if longest is None else f"; the longest document seen has {count(longest)} with its new tokens"
    yield Finding("context", "target", OK, _limit(seen.target) + reach)
    documents = sum(source.documents for source in seen.sources)
    for draft in seen.drafts:
        if not draft.beyond:
            yield Finding("context", draft.name, OK, _limit(draft))
            continue
        part = f"{count(draft.beyond)} of {many(documents, 'document')} ({percent(draft.beyond / documents)})"
        silent = f", in {count(draft.silent)} of them from the start" if draft.silent else ""
        yield Finding(
            "context",
            draft.name,
            PROBLEM if draft.silent == documents else NOTE,
            f"{_limit(draft)}; {part} go beyond it: there it proposes nothing{silent}",
            "engines stop drafting there too, or refuse: take a draft with a longer context, or lower max_new_tokens",
        )


def _limit(model: ModelSeen) -> str:
    return "no limit" if model.facts.context is None else f"{count(model.facts.context)} tokens"


def _self_draft(seen: PreflightFacts) -> Iterator[Finding]:
    found = seen.self_draft
    if found is None:
        return
    way = "through layer skip without a dropped layer" if found.layer_skip else "as its own draft"
    where = f"{many(found.positions, 'position')} in {seen.target.facts.dtype}"
    others = found.positions - found.accepted
    if found.agreeing < found.positions:
        yield Finding(
            "self-draft",
            "target",
            PROBLEM,
            f"the target {way} has another top token than itself at {count(found.positions - found.agreeing)} of {where}",
            "alpha of any draft is wrong by as much: try dtype float32 or another device, and please report the model",
        )
    elif others == 0:
        yield Finding("self-draft", "target", OK, f"the target {way} has alpha 1 at {where}")
    else:
        clear, alpha = others - found.near_ties, share(found.accepted / found.positions)
        yield Finding(
            "self-draft",
            "target",
            NOTE,
            f"the target {way} has its own top token at all of {where}; alpha on the generated text is {alpha}: "
            f"{many(others, 'token')} no longer top when scored ({clear} beyond a near-tie)",
            "no draft can be sure of such tokens; float32 shows whether it is the dtype",
        )


def _noise(seen: PreflightFacts) -> Iterator[Finding]:
    found = seen.noise
    if found is None:
        return
    ties = f"near-ties (top logits within {found.noise:g}) {percent(found.near_ties / found.positions)}"
    text = (
        f"the same texts alone and in a batch of {found.documents}: {count(found.flips)} of "
        f"{many(found.positions, 'top token')} flip ({percent(found.flips / found.positions)}), {ties}; differences up to "
        f"{found.logit_difference:.2g} of a logit, {found.probability_difference:.2g} of a probability"
    )
    if found.flips == 0:
        yield Finding("noise floor", "target", OK, text)
    else:
        yield Finding(
            "noise floor",
            "target",
            NOTE,
            text,
            "strict acceptance is not known more precisely than that; an engine that verifies in batches flips as many",
        )


def warned(seen: PreflightFacts, name: str) -> Iterator[Finding]:
    """What the run itself would warn of that belongs to a check."""
    for warning in seen.warnings:
        if place_of(warning) == name:
            yield Finding(name, "run", NOTE, warning["message"], warning["remedy"])


def place_of(warning: Mapping[str, str]) -> str:
    """The name of the check that a warning of the run belongs to."""
    return PLACES.get(warning["code"], warning["code"].replace("_", " "))


def _part(documents: int, source: SourceSeen) -> str:
    return f"{count(documents)} of {many(source.documents, 'document')}"


def work_checks(seen: PreflightFacts) -> Iterator[Finding]:
    """What concerns data and resources."""
    yield from _data(seen)
    yield from _costs(seen)
    for part in (_time, _disk, _memory):
        yield from (_rough(seen, check) for check in part(seen))
    yield from _unknown(seen)
    yield from warned(seen, "memory")


def _data(seen: PreflightFacts) -> Iterator[Finding]:
    for source in seen.sources:
        yield from _source(source)
    documents = sum(source.documents for source in seen.sources)
    if seen.repeated:
        yield Finding(
            "data",
            "run",
            NOTE,
            f"{count(seen.repeated)} of {many(documents, 'prompt')} seen occur before: equal prompts count once",
            "remove duplicates: they cost time and add no information",
        )
    yield from warned(seen, "data")


def _source(source: SourceSeen) -> Iterator[Finding]:
    domains = ", ".join(short(name) for name in source.domains[:3]) + (", ..." if len(source.domains) > 3 else "")
    if source.planned is None:
        planned = f"more than {count(source.documents)}, the number is not known without reading all"
    else:
        planned = f"{'about ' if source.planned > source.documents else ''}{many(source.planned, 'document')}"
    lengths = count(source.median_prompt)
    if source.shortest_prompt < source.longest_prompt:
        lengths = f"{count(source.shortest_prompt)} to {count(source.longest_prompt)}, median {lengths}"
    text = f"{domains}: {planned}; prompts of {lengths} tokens"
    if source.planned == 1:
        yield Finding("data", source.path, NOTE, text, "a single document has no interval, and no verdict: add more")
    else:
        yield Finding("data", source.path, OK, text)
    for reason, rows in source.skipped.items():
        yield Finding(
            "data",
            source.path,
            NOTE,
            f"{many(rows, 'row')} left out {reason}",
            "see too_long, max_new_tokens and min_prompt_tokens, or fill the column",
        )
    for reason, texts in source.truncated.items():
        yield Finding(
            "data",
            source.path,
            NOTE,
            f"{count(texts)} {reason}",
            "their acceptance may differ from that of the whole text",
        )


def _without(seen: PreflightFacts, name: str) -> str:
    """The drafts and sources that could not be loaded: what a run takes is worked out without them."""
    kinds = {"vocabulary": "draft"} | ({} if name == "memory" else {"data": "source", "chat template": "source"})
    parts = [f"{kinds[item.check]} {short(item.subject)}" for item in seen.refusals if item.check in kinds]
    return ", ".join(dict.fromkeys(parts))


def _rough(seen: PreflightFacts, check: Finding) -> Finding:
    """An estimate, or a note where it leaves something out."""
    if not (without := _without(seen, check.name)):
        return check
    remedy = check.remedy or "correct what was refused first: the run takes more than this"
    level = NOTE if check.level == OK else check.level
    return dataclasses.replace(check, level=level, cause=f"without {without}: {check.cause}", remedy=remedy)


def _unknown(seen: PreflightFacts) -> Iterator[Finding]:
    """What a run takes where no draft could be loaded."""
    if not seen.drafts and seen.sources:
        for name in ("time", "disk"):
            cause = "not known: no draft could be loaded"
            yield Finding(name, "run", NOTE, cause, "correct what was refused, and repeat the dry run")


def _costs(seen: PreflightFacts) -> Iterator[Finding]:
    speed = seen.speed
    if speed is None:
        return
    if speed.untimed is not None:
        remedy = "the report has no speedup then; give step times of your engine: costs.source=table"
        yield Finding("costs", "run", NOTE, f"no step times: {speed.untimed}", remedy)
    elif speed.timing_s is not None:
        cause = f"steps can be timed here; that takes about {duration(speed.timing_s)}"
        if speed.budget_s is None or speed.timing_s <= speed.budget_s:
            yield Finding("costs", "run", OK, cause)
            return
        rounds = "each batch size and context needs some rounds of all steps, or its times would have no bounds"
        remedy = "fewer of costs.concurrency or costs.context, or an idle machine"
        yield Finding("costs", "run", NOTE, f"{cause}, more than costs.budget ({speed.budget_s:g} s): {rounds}", remedy)
    elif not any(refusal.check == "costs" for refusal in seen.refusals):
        yield Finding("costs", "run", OK, "step times come from another source")


def _time(seen: PreflightFacts) -> Iterator[Finding]:
    speed, estimate = seen.speed, seen.estimate
    if speed is None or estimate is None:
        return
    generation = f"generation ({count(speed.batch)} at a time)"
    rates = (("prompts", speed.prompts), (generation, speed.generated), ("scoring", speed.scored))
    parts = ", ".join(f"{name} {number(rate, 0)}" for name, rate in rates if rate is not None)
    text = f"tokens a second on {many(speed.positions, 'position')} of {many(speed.documents, 'document')}: {parts}"
    if estimate.document_seconds is None:
        unknown = "the target's generation speed is not known, since its steps cannot be timed"
        remedy = "profile a few documents with --limit first, and note how long that takes"
        yield Finding("time", "run", NOTE, f"{unknown}; {text}", remedy)
    elif estimate.seconds is None:
        each = f"roughly {duration(estimate.document_seconds)} a document; how many there are is not known"
        yield Finding("time", "run", NOTE, f"{each}; {text}", "give a source on the hub a limit, or use --limit")
    else:
        total = f"roughly {duration(estimate.seconds)} for {many(estimate.documents or 0, 'document')}"
        yield Finding("time", "run", OK, f"{total}, less where texts end early; {text}")


def _disk(seen: PreflightFacts) -> Iterator[Finding]:
    storage, estimate = seen.storage, seen.estimate
    if storage is None or estimate is None:
        return
    per = f"{number(storage.position_bytes, 0)} bytes a position over all drafts, {storage.columns} columns"
    free = "" if storage.free is None else f"; {data_size(storage.free)} are free"
    if estimate.disk is None:
        yield Finding("disk", "run", OK, f"about {data_size(estimate.document_bytes)} a document ({per}){free}")
        return
    text = f"about {data_size(estimate.disk)} for at most {many(estimate.positions or 0, 'position')} ({per}){free}"
    if storage.free is not None and storage.free < estimate.disk:
        yield Finding("disk", "run", PROBLEM, text, "free space or choose another --out: a run ends where the disk is full")
    else:
        yield Finding("disk", "run", OK, text)


def _memory(seen: PreflightFacts) -> Iterator[Finding]:
    memory = seen.memory
    free = "" if memory.free is None else f"; {data_size(memory.free)} are free beside the weights"
    weights = f"weights {data_size(memory.weights)}"
    if memory.peak is None or memory.least is None or not seen.sources:
        yield Finding("memory", "run", OK, f"{weights}; what is needed beside them is not known{free}")
        return
    phases = {"generating": memory.generation, "scoring": memory.scoring, "timing steps": memory.timing}
    parts = ", ".join(f"{data_size(size)} while {name}" for name, size in phases.items() if size)
    text = f"at most {data_size(memory.peak)}: {weights}, and beside them {parts}{free}"
    room = memory.weights + (memory.peak if memory.free is None else memory.free)
    if memory.least > room:
        remedy = "lower batch_tokens and max_new_tokens, or use a smaller dtype or another device: memory would run out"
        yield Finding("memory", "run", PROBLEM, text, remedy)
    elif memory.weights + max(memory.generation or 0, memory.scoring or 0) > room:
        yield Finding("memory", "run", NOTE, text, "lower batch_tokens; else batches are halved when memory runs out")
    elif memory.peak > room:
        remedy = "fewer of costs.concurrency or costs.context; else the largest are left out"
        yield Finding("memory", "run", NOTE, text, remedy)
    else:
        yield Finding("memory", "run", OK, text)
