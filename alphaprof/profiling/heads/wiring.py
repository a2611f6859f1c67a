"""Which reading of a head's files the target's states speak for: the measured one against others, on a few texts.

The same key of a config means two things to two engines, and a head that gets the wrong states still drafts, only worse.
What each reading would get accepted is measured in the pass of a profile: a user learns of it before anything is deployed.
The log keeps the reading that its files mean, whatever comes out here.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from alphaprof.config.options import HeadOptions
from alphaprof.errors import LogitsNotFinite
from alphaprof.profiling.heads.draft import Alternative, HeadDraft
from alphaprof.profiling.models.draft import Draft
from alphaprof.profiling.models.load import Model
from alphaprof.profiling.scoring.scorer import Scorer
from alphaprof.profiling.texts.continuations import Continuation, generate, generation_batches, given, scoring_batches
from alphaprof.profiling.texts.corpus import Document
from alphaprof.run.manifest import Trial
from alphaprof.run.notes import note

if TYPE_CHECKING:
    from alphaprof.config.profile import ProfileOptions

DOCUMENTS, TOKENS = 8, 64  # how many documents, and how much of each
SURE = 3.0  # standard errors by which another reading is ahead
POOR = 0.2  # an acceptance of the first draft below which no reading of a trained head should be
FEW = 50  # positions of which nothing is said
Warnings = tuple[dict[str, str], ...]
Trials = tuple[Trial, ...]
Batches = Sequence[Sequence[Continuation]]


def check_wiring(
    drafts: Sequence[Draft], options: ProfileOptions, documents: Iterable[Document], width: int, say: Callable[[str], None]
) -> tuple[dict[str, Trials], Warnings]:
    """Measure each head on the first of some documents, in other readings if its files have any, unless its options forbid
    that. `width`: ids from this one on stand for no token of the run. Returns what came out, by the name of the draft, and
    what a user should know of it and of what the files leave open.
    """
    wanted = {name for name, draft in options.drafts.items() if isinstance(draft, HeadOptions) and draft.check_wiring}
    heads = [draft for draft in drafts if isinstance(draft, HeadDraft)]
    warnings = [doubt for head in heads for doubt in head.doubts]
    trials: dict[str, Trials] = {}
    if not (tried := [head for head in heads if head.name in wanted]):
        return trials, tuple(warnings)
    say("checking how head files are read (set check_wiring: false to skip)")
    texts = sample(tried[0].target, documents, width, options.padded_tokens)
    batches = list(scoring_batches(texts, options.padded_tokens))
    for head in tried:
        trials[head.name], of_readings = checked(head, batches, width)
        warnings += of_readings
    return trials, tuple(warnings)


def sample(target: Model, documents: Iterable[Document], width: int, budget: int) -> list[Continuation]:
    """Return the beginnings of the first documents' continuations, written by the target unless they are given."""
    first = list(itertools.islice(documents, DOCUMENTS))
    texts = given(first, target.eos)
    texts = [dataclasses.replace(text, ids=text.ids[:TOKENS]) for text in texts]
    short = [
        dataclasses.replace(document, max_new_tokens=min(TOKENS, document.max_new_tokens or TOKENS))
        for document in first
        if document.given is None
    ]
    for batch in generation_batches(short, budget):
        texts += generate(target, batch, width)
    return texts


def checked(draft: HeadDraft, batches: Batches, width: int) -> tuple[Trials, Warnings]:
    """Return what a head's readings get accepted, the measured one first, and warnings if another is better or none good."""
    depths = range(1, min(2, draft.network.most or 2) + 1)
    measured = _agreements(draft, [Alternative("", "", draft.network, depth) for depth in depths], batches, width)
    if not any(map(len, measured[0])):
        return (), ()  # a head that is not finite, or texts without a position: the run says so

    every = np.concatenate(measured[0])
    trials, warnings = [Trial("", 1, float(every.mean()), 0.0, 0.0, len(every), draft.engines)], []
    known = [way for way in draft.alternatives if way.depth <= len(depths) and any(map(len, measured[way.depth - 1]))]
    for way, rows in zip(known, _agreements(draft, known, batches, width) if known else [], strict=True):
        if not any(map(len, rows)):
            continue
        trial = _trial(way, rows, measured[way.depth - 1])
        trials.append(trial)
        if trial.positions >= FEW and trial.ahead > SURE * trial.error:
            message = (
                f"draft {draft.name} may be read wrongly: with {trial.changed} it gets {trial.acceptance:.3f} of "
                f"{trial.positions} tokens right at depth {trial.depth}, against {trial.acceptance - trial.ahead:.3f} now"
            )
            warnings.append(note("wiring", doubt=message, remedy=f"if trained that way, {way.setting}"))
    if max(trial.acceptance for trial in trials if trial.depth == 1) < POOR and len(every) >= FEW:
        message = f"no reading of draft {draft.name} works: the current one gets {every.mean():.3f} of "
        message += f"{len(every)} tokens right at depth 1"
        remedy = "check that this head was trained on this target, with these layers, and on text like this"
        warnings.append(note("wiring", doubt=message, remedy=remedy))
    return tuple(trials), tuple(warnings)


def _agreements(draft: HeadDraft, ways: Sequence[Alternative], batches: Batches, width: int) -> list[list[np.ndarray]]:
    """Return for each reading whether its draft at its depth is the token, [proposed positions] of each text; no texts for
    one whose logits are not finite.
    """
    try:
        return _together(draft, ways, batches, width)
    except LogitsNotFinite:
        if len(ways) == 1:
            return [[]]
        return [rows for way in ways for rows in _agreements(draft, [way], batches, width)]


def _together(draft: HeadDraft, ways: Sequence[Alternative], batches: Batches, width: int) -> list[list[np.ndarray]]:
    """As `_agreements`, by one pass of the target. Raises `LogitsNotFinite` if one of them has such logits."""
    twins = [
        dataclasses.replace(draft, name=str(number), network=way.network, depths=way.depth)
        for number, way in enumerate(ways)
    ]
    scorer = Scorer(draft.target, twins, width, own_path=False)  # every position is one of its depth
    found: list[list[np.ndarray]] = [[] for _ in ways]
    for batch in batches:
        scored = scorer.score(batch)
        stops = np.cumsum([len(item.ids) for item in batch])[:-1]
        for twin, rows in zip(twins, found, strict=True):
            columns = scored[twin.name]
            first = np.where(columns["proposed"] > 0, columns["draft_top"] == columns["token"], -1)
            agrees = columns[f"agrees_{twin.depths}"] if twin.depths > 1 else first  # -1 where a round has no such draft
            rows += [row[row >= 0] for row in np.split(agrees, stops)]
    return found


def _trial(way: Alternative, rows: list[np.ndarray], measured: list[np.ndarray]) -> Trial:
    """Return what a reading got, beside the measured one. Its standard error is the larger one of positions and of texts as
    units, and at least that of a single position.
    """
    ahead = [theirs.astype(float) - ours for theirs, ours in zip(rows, measured, strict=True)]
    every = np.concatenate(ahead)
    gain, size = float(every.mean()), len(every)
    by_text = np.array([each.sum() - gain * len(each) for each in ahead])
    of_texts = float((by_text**2).sum() * len(ahead) / max(len(ahead) - 1, 1)) ** 0.5 / size
    error = max(float(every.std()) / size**0.5, of_texts, 1 / size)
    return Trial(way.changed, way.depth, float(np.concatenate(rows).mean()), gain, error, size, way.engines)
