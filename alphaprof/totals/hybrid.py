"""Drafts made of two others of a run: what their rounds would be, from the logs of both.

A round that prompt lookup drafts and one that the other draft drafts are both fixed by where they begin, and which of the
two it is follows from the text. So the log of a hybrid is made of the rows of one and of the other.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from alphaprof.errors import OptionInvalid
from alphaprof.run.manifest import DraftFacts, Hybrid
from alphaprof.run.reader import Run
from alphaprof.stats.estimate import Array
from alphaprof.totals.lookup import joined_texts, matches
from alphaprof.totals.replay import run_lengths

BY_LOOKUP = "by_lookup"  # a column of a hybrid's log alone: a round that begins there runs no draft step


def with_hybrids(run: Run, hybrids: Mapping[str, Hybrid]) -> Run:
    """Return the run with drafts that are made of its own. Raises `OptionInvalid` for parts that it does not have."""
    made = {name: facts_of(run, name, hybrid) for name, hybrid in hybrids.items()}
    return run.view(dataclasses.replace(run.manifest, drafts={**run.manifest.drafts, **made})) if made else run


def facts_of(run: Run, name: str, hybrid: Hybrid) -> DraftFacts:
    """Return what identifies a hybrid: it proposes tokens, as prompt lookup does, and its steps are those of its second
    draft.
    """
    drafts = run.manifest.drafts
    if hybrid.first not in drafts or hybrid.then not in drafts or "max_ngram" not in drafts[hybrid.first].settings:
        raise OptionInvalid(
            f"hybrids.{name} needs a prompt_lookup draft {hybrid.first} and another draft {hybrid.then} in {run.path}",
            f"name two of the run's drafts: {', '.join(drafts)}",
        )
    first, then = drafts[hybrid.first], drafts[hybrid.then]
    identity = f"hybrid {first.fingerprint} {hybrid.min_match} {then.fingerprint}"
    return DraftFacts(
        reference=f"{hybrid.first} if {hybrid.min_match} or more tokens match, else {hybrid.then}",
        kind="hybrid",
        architecture="none",
        fingerprint=hashlib.sha256(identity.encode()).hexdigest(),
        dtype=then.dtype,
        device=then.device,
        parameters=0,
        context=None,
        vocabulary=first.vocabulary,
        eos=first.eos,
        noise=0.0,
        has_distribution=False,
        has_steps=then.has_steps,
        starts_matter=True,
        hybrid=hybrid,
    )


def hybrid_positions(run: Run, hybrid: Hybrid, index: int, columns: Sequence[str]) -> pa.Table:
    """Return one shard of a hybrid's log: columns of logs, and BY_LOOKUP."""
    own = [name for name in columns if name != BY_LOOKUP]
    needed = list(dict.fromkeys([*own, "document", "token", "draft_top", "proposed", "accepted_run"]))
    first, then = (run.positions(name, index, needed) for name in (hybrid.first, hybrid.then))
    texts = run.continuations(index, ["prompt_ids", "prompt_tokens", "continuation_tokens"])
    lengths = texts["continuation_tokens"].to_numpy()
    prompts, emitted = texts["prompt_ids"].combine_chunks(), first["token"].to_numpy()
    tokens, start, continued = joined_texts(prompts, texts["prompt_tokens"].to_numpy(), emitted, lengths)
    settings = run.manifest.drafts[hybrid.first].settings
    matched = matches(tokens, start, int(settings["max_ngram"]), int(settings.get("min_ngram", 1)))[1][continued]
    by_lookup = matched >= hybrid.min_match  # and not wherever it proposes: rounds may be filled up
    if not run.manifest.drafts[hybrid.then].starts_matter:
        then = _with_runs(then, lengths)
    mask = pa.array(by_lookup)
    table = pa.table({name: pc.if_else(mask, first[name], then[name].cast(first[name].type)) for name in own})
    return table.append_column(BY_LOOKUP, mask) if BY_LOOKUP in columns else table


def _with_runs(table: pa.Table, lengths: Array) -> pa.Table:
    """Return the log of a draft that proposes the same wherever a round starts, with `accepted_run`."""
    stop = np.cumsum(lengths)
    proposed = table["proposed"].to_numpy()
    agrees = pc.fill_null(pc.equal(table["draft_top"], table["token"]), False).to_numpy() & (proposed > 0)
    run = np.minimum(run_lengths(agrees, stop - lengths, stop), proposed)
    place = table.column_names.index("accepted_run")
    return table.set_column(place, "accepted_run", pa.array(run, type=table["accepted_run"].type))
