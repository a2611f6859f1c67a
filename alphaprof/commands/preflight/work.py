"""Checks of a dry run that concern the work: data, step times, and what a run takes in time, disk and memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from alphaprof.commands.preflight.facts import Seen, SourceSeen
from alphaprof.commands.preflight.findings import NOTE, OK, PROBLEM, Check, warned
from alphaprof.report.format import count, data_size, duration, many, number, short


def work_checks(seen: Seen) -> Iterator[Check]:
    """What concerns data and resources."""
    yield from _data(seen)
    yield from _costs(seen)
    for part in (_time, _disk, _memory):
        yield from (_rough(seen, check) for check in part(seen))
    yield from _unknown(seen)
    yield from warned(seen, "memory")


def _data(seen: Seen) -> Iterator[Check]:
    for source in seen.sources:
        yield from _source(source)
    documents = sum(source.documents for source in seen.sources)
    if seen.repeated:
        yield Check(
            "data",
            "run",
            NOTE,
            f"{count(seen.repeated)} of {many(documents, 'prompt')} seen occur before: equal prompts count once",
            "remove duplicates: they cost time and say nothing new",
        )
    yield from warned(seen, "data")


def _source(source: SourceSeen) -> Iterator[Check]:
    domains = ", ".join(short(name) for name in source.domains[:3]) + (", ..." if len(source.domains) > 3 else "")
    if source.planned is None:
        planned = f"more than {count(source.documents)}, how many is not known without reading all"
    else:
        planned = f"{'about ' if source.planned > source.documents else ''}{many(source.planned, 'document')}"
    lengths = count(source.median_prompt)
    if source.shortest_prompt < source.longest_prompt:
        lengths = f"{count(source.shortest_prompt)} to {count(source.longest_prompt)}, median {lengths}"
    text = f"{domains}: {planned}; prompts of {lengths} tokens"
    if source.planned == 1:
        yield Check("data", source.path, NOTE, text, "a single document has no interval, and no verdict: add more")
    else:
        yield Check("data", source.path, OK, text)
    for reason, rows in source.skipped.items():
        yield Check(
            "data",
            source.path,
            NOTE,
            f"{many(rows, 'row')} left out {reason}",
            "see too_long, max_new_tokens and min_prompt_tokens, or fill the column",
        )
    for reason, texts in source.truncated.items():
        yield Check(
            "data",
            source.path,
            NOTE,
            f"{count(texts)} {reason}",
            "their acceptance may differ from that of the whole text",
        )


def _without(seen: Seen, name: str) -> str:
    """The drafts and sources that could not be loaded: what a run takes is worked out without them."""
    kinds = {"vocabulary": "draft"} | ({} if name == "memory" else {"data": "source", "chat template": "source"})
    parts = [f"{kinds[item.check]} {short(item.subject)}" for item in seen.refusals if item.check in kinds]
    return ", ".join(dict.fromkeys(parts))


def _rough(seen: Seen, check: Check) -> Check:
    """An estimate, or a note where it leaves something out."""
    if not (without := _without(seen, check.name)):
        return check
    remedy = check.remedy or "mend what was refused first: the run takes more than this"
    level = NOTE if check.level == OK else check.level
    return dataclasses.replace(check, level=level, cause=f"without {without}: {check.cause}", remedy=remedy)


def _unknown(seen: Seen) -> Iterator[Check]:
    """What a run takes where no draft could be loaded."""
    if not seen.drafts and seen.sources:
        for name in ("time", "disk"):
            cause = "not known: no draft could be loaded"
            yield Check(name, "run", NOTE, cause, "mend what was refused first, and look again")


def _costs(seen: Seen) -> Iterator[Check]:
    speed = seen.speed
    if speed is None:
        return
    if speed.untimed is not None:
        remedy = "the report has no speedup then; give step times of your engine: costs.source=table"
        yield Check("costs", "run", NOTE, f"no step times: {speed.untimed}", remedy)
    elif speed.timing_s is not None:
        cause = f"steps can be timed here; that takes about {duration(speed.timing_s)}"
        if speed.budget_s is None or speed.timing_s <= speed.budget_s:
            yield Check("costs", "run", OK, cause)
            return
        rounds = "each batch size and context has some rounds of all steps, or their times would have no bounds"
        remedy = "fewer of costs.concurrency or costs.context, or an idle machine"
        yield Check("costs", "run", NOTE, f"{cause}, more than costs.budget ({speed.budget_s:g} s): {rounds}", remedy)
    elif not any(refusal.check == "costs" for refusal in seen.refusals):
        yield Check("costs", "run", OK, "step times from elsewhere are at hand")


def _time(seen: Seen) -> Iterator[Check]:
    speed, estimate = seen.speed, seen.estimate
    if speed is None or estimate is None:
        return
    generation = f"generation ({count(speed.batch)} at a time)"
    rates = (("prompts", speed.prompts), (generation, speed.generated), ("scoring", speed.scored))
    parts = ", ".join(f"{name} {number(rate, 0)}" for name, rate in rates if rate is not None)
    text = f"tokens a second on {many(speed.positions, 'position')} of {many(speed.documents, 'document')}: {parts}"
    if estimate.document_seconds is None:
        unknown = "not known how fast the target generates, since its steps cannot be timed"
        remedy = "profile a few documents with --limit first, and look at the clock"
        yield Check("time", "run", NOTE, f"{unknown}; {text}", remedy)
    elif estimate.seconds is None:
        each = f"roughly {duration(estimate.document_seconds)} a document; how many there are is not known"
        yield Check("time", "run", NOTE, f"{each}; {text}", "give a source on the hub a limit, or use --limit")
    else:
        total = f"roughly {duration(estimate.seconds)} for {many(estimate.documents or 0, 'document')}"
        yield Check("time", "run", OK, f"{total}, less where texts end early; {text}")


def _disk(seen: Seen) -> Iterator[Check]:
    storage, estimate = seen.storage, seen.estimate
    if storage is None or estimate is None:
        return
    per = f"{number(storage.position_bytes, 0)} bytes a position over all drafts, {storage.columns} columns"
    free = "" if storage.free is None else f"; {data_size(storage.free)} are free"
    if estimate.disk is None:
        yield Check("disk", "run", OK, f"about {data_size(estimate.document_bytes)} a document ({per}){free}")
        return
    text = f"about {data_size(estimate.disk)} for at most {many(estimate.positions or 0, 'position')} ({per}){free}"
    if storage.free is not None and storage.free < estimate.disk:
        yield Check("disk", "run", PROBLEM, text, "free space or choose another --out: a run ends where the disk is full")
    else:
        yield Check("disk", "run", OK, text)


def _memory(seen: Seen) -> Iterator[Check]:
    memory = seen.memory
    free = "" if memory.free is None else f"; {data_size(memory.free)} are free beside the weights"
    weights = f"weights {data_size(memory.weights)}"
    if memory.peak is None or memory.least is None or not seen.sources:
        yield Check("memory", "run", OK, f"{weights}; what is needed beside them is not known{free}")
        return
    phases = {"generating": memory.generation, "scoring": memory.scoring, "timing steps": memory.timing}
    parts = ", ".join(f"{data_size(size)} while {name}" for name, size in phases.items() if size)
    text = f"at most {data_size(memory.peak)}: {weights}, and beside them {parts}{free}"
    room = memory.weights + (memory.peak if memory.free is None else memory.free)
    if memory.least > room:
        remedy = "lower batch_tokens and max_new_tokens, or use a smaller dtype or another device: memory would run out"
        yield Check("memory", "run", PROBLEM, text, remedy)
    elif memory.weights + max(memory.generation or 0, memory.scoring or 0) > room:
        yield Check("memory", "run", NOTE, text, "lower batch_tokens; else batches are halved when memory runs out")
    elif memory.peak > room:
        remedy = "fewer of costs.concurrency or costs.context; else the largest are left out"
        yield Check("memory", "run", NOTE, text, remedy)
    else:
        yield Check("memory", "run", OK, text)
