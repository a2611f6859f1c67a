"""Checks of a dry run that concern models: vocabularies, templates, contexts, numerics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from alphaprof.commands.preflight.facts import ModelSeen, Seen, SourceSeen
from alphaprof.report.format import count, many, percent, share, short

OK, NOTE, PROBLEM = "ok", "note", "problem"
# Where the run's own early warnings belong; a code that is not here is a check of its own.
PLACES = {"raw_prompts": "chat template", "json_array": "data", "full_logits": "memory", "not_modelled": "sampling"}


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str  # of the check (docs/preflight.md)
    subject: str  # model or source that it is about; run: all of it
    level: str  # ok, note or problem
    cause: str  # what was found
    remedy: str | None = None  # what to do about it; None: nothing
    stops: bool = False  # whether the run would end with this


def model_checks(seen: Seen) -> Iterator[Check]:
    """What concerns models and tokenizers."""
    for part in (_vocabulary, _template, _bos, _lost_bos, _context, _self_draft, _noise):
        yield from part(seen)


def _vocabulary(seen: Seen) -> Iterator[Check]:
    yield Check("vocabulary", "target", OK, _sizes(seen.target) + _cut(seen, seen.target))
    for draft in seen.drafts:
        if draft.tokens is None or draft.shared is None:
            own = "looks up the target's tokens" if draft.facts.kind == "prompt_lookup" else "shares the target's"
            yield Check("vocabulary", draft.name, OK, own)
            continue
        text = f"{_sizes(draft)}{_cut(seen, draft)}; {count(draft.shared)} ids in common, which all mean the same"
        if draft.logits == seen.target.logits:
            yield Check("vocabulary", draft.name, OK, text)
        else:
            yield Check(
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


def _cut(seen: Seen, model: ModelSeen) -> str:
    """What becomes of the columns that no token stands behind."""
    cut = model.logits - seen.scored_ids
    if cut > 0:
        return f", the last {count(cut)} of them padding that is left out"
    missing = (seen.target.tokens or 0) - model.logits
    return f", {count(missing)} tokens of the target have none: never proposed" if missing > 0 else ""


def _specials(seen: Seen, draft: ModelSeen) -> Iterator[Check]:
    if draft.special:
        pairs = ", ".join(f"{item.name} {short(str(item.target))} / {short(str(item.draft))}" for item in draft.special)
        yield Check(
            "vocabulary",
            draft.name,
            NOTE,
            f"special tokens differ (target / draft): {pairs}",
            "texts end where the target's end; a draft that ends them with another token is wrong at every end",
        )


def _template(seen: Seen) -> Iterator[Check]:
    raw = list(warned(seen, "chat template"))
    used = [source for source in seen.sources if source.prompts in ("chat", "messages")]
    if raw:
        yield from raw
    elif not seen.template:
        if not any(refusal.check == "chat template" for refusal in seen.refusals):
            yield Check("chat template", "target", OK, "the target has none, and none is asked for")
    elif used:
        yield Check("chat template", "target", OK, f"used for {len(used)} of {many(len(seen.sources), 'source')}")
    else:
        yield Check("chat template", "target", OK, "there is one, and no source is encoded here without it")


def _bos(seen: Seen) -> Iterator[Check]:
    bos = seen.bos
    if bos.token is None:
        yield Check("bos", "target", OK, "the tokenizer has no BOS token")
    else:
        template = {True: "; the chat template writes it", False: "; the chat template does not", None: ""}[bos.in_template]
        added = "adds it" if bos.added else "does not add it"
        yield Check("bos", "target", OK, f"BOS is {short(bos.token)}; the tokenizer {added} to plain text{template}")
    for source in seen.sources:
        if source.double_bos:
            yield Check(
                "bos",
                source.path,
                PROBLEM,
                f"{_part(source.double_bos, source)} begin with BOS twice: the data hold it, and it is added again",
                "take it out of the data, or give rendered prompts as prompt_ids",
            )
        if source.without_bos:
            yield Check(
                "bos",
                source.path,
                NOTE,
                f"{_part(source.without_bos, source)} begin without BOS, which this tokenizer adds to plain text",
                "right if your server sends them so (many take a template as it is); else give its token ids as prompt_ids",
            )


def _lost_bos(seen: Seen) -> Iterator[Check]:
    for source in seen.sources:
        if source.lost_bos:
            yield Check(
                "bos",
                source.path,
                PROBLEM,
                f"{_part(source.lost_bos, source)} lost BOS: too_long: truncate drops the beginning of their prompts",
                "leave long documents out (too_long: skip), or cut prompts as your server does and give prompt_ids",
            )


def _context(seen: Seen) -> Iterator[Check]:
    longest = max((source.longest for source in seen.sources), default=None)
    reach = "" if longest is None else f"; the longest document seen has {count(longest)} with its new tokens"
    yield Check("context", "target", OK, _limit(seen.target) + reach)
    documents = sum(source.documents for source in seen.sources)
    for draft in seen.drafts:
        if not draft.beyond:
            yield Check("context", draft.name, OK, _limit(draft))
            continue
        part = f"{count(draft.beyond)} of {many(documents, 'document')} ({percent(draft.beyond / documents)})"
        silent = f", in {count(draft.silent)} of them from the start" if draft.silent else ""
        yield Check(
            "context",
            draft.name,
            PROBLEM if draft.silent == documents else NOTE,
            f"{_limit(draft)}; {part} go beyond it: there it proposes nothing{silent}",
            "engines stop drafting there too, or refuse: take a draft with a longer context, or lower max_new_tokens",
        )


def _limit(model: ModelSeen) -> str:
    return "no limit" if model.facts.context is None else f"{count(model.facts.context)} tokens"


def _self_draft(seen: Seen) -> Iterator[Check]:
    found = seen.self_draft
    if found is None:
        return
    way = "through layer skip without a dropped layer" if found.draft == "layer_skip" else "as its own draft"
    where = f"{many(found.positions, 'position')} in {seen.target.facts.dtype}"
    others = found.positions - found.accepted
    if found.agreeing < found.positions:
        yield Check(
            "self-draft",
            "target",
            PROBLEM,
            f"the target {way} has another top token than itself at {count(found.positions - found.agreeing)} of {where}",
            "alpha of any draft is wrong by as much: try dtype float32 or another device, and please report the model",
        )
    elif others == 0:
        yield Check("self-draft", "target", OK, f"the target {way} has alpha 1 at {where}")
    else:
        clear, alpha = others - found.near_ties, share(found.accepted / found.positions)
        yield Check(
            "self-draft",
            "target",
            NOTE,
            f"the target {way} has its own top token at all of {where}; alpha on the generated text is {alpha}: "
            f"{many(others, 'token')} no longer top when scored ({clear} beyond a near-tie)",
            "no draft can be sure of such tokens; float32 shows whether it is the dtype",
        )


def _noise(seen: Seen) -> Iterator[Check]:
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
        yield Check("noise floor", "target", OK, text)
    else:
        yield Check(
            "noise floor",
            "target",
            NOTE,
            text,
            "strict acceptance is not known better than that, and an engine flips as many when it verifies in batches",
        )


def warned(seen: Seen, name: str) -> Iterator[Check]:
    """What the run itself would warn of that belongs to a check."""
    for warning in seen.warnings:
        if place_of(warning) == name:
            yield Check(name, "run", NOTE, warning["message"], warning["remedy"])


def place_of(warning: Mapping[str, str]) -> str:
    """The name of the check that a warning of the run belongs to."""
    return PLACES.get(warning["code"], warning["code"].replace("_", " "))


def _part(documents: int, source: SourceSeen) -> str:
    return f"{count(documents)} of {many(source.documents, 'document')}"
