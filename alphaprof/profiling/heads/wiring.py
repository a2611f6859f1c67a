"""Which reading of a head's files the target's states speak for: the measured one against others, on a few texts.

The same key of a config means two things to two engines, and a head that is fed the wrong states still drafts, only worse.
What each reading would get accepted is measured in the pass of a profile, so that it is told before anything is deployed.
The log keeps the reading that was asked for, whatever comes out here.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from alphaprof.log.manifest import Trial
from alphaprof.profiling.heads.draft import Alternative, HeadDraft
from alphaprof.profiling.models.drafts import Draft
from alphaprof.profiling.run.shards import Loaded, Progress
from alphaprof.profiling.scoring.scorer import Scorer
from alphaprof.profiling.texts.continuations import Continuation, generate, generation_batches, given, scoring_batches

DOCUMENTS, TOKENS = 8, 64  # how many documents, and how much of each
SURE = 3.0  # standard errors by which another reading is ahead
POOR = 0.2  # an acceptance of the first draft below which no reading of a trained head should be
AT_ONCE = 8  # readings in one pass
WARNING = "wiring"
Warnings = tuple[dict[str, str], ...]


def check_wiring(loaded: Loaded, progress: Progress) -> tuple[Loaded, Warnings]:
    """Measures other readings of each head that has any. Returns the drafts with what came out, and what a user should
    know of it.
    """
    if not any(isinstance(draft, HeadDraft) and draft.alternatives for draft in loaded.drafts):
        return loaded, _doubts(loaded.drafts)
    progress.say("checking how the heads' files are read")
    texts = sample(loaded)
    drafts: list[Draft] = []
    warnings: list[dict[str, str]] = []
    for draft in loaded.drafts:
        if isinstance(draft, HeadDraft) and draft.alternatives:
            draft, told = checked(draft, texts, loaded)
            warnings += told
        drafts.append(draft)
    return dataclasses.replace(loaded, drafts=drafts), (*_doubts(loaded.drafts), *warnings)


def _doubts(drafts: Sequence[Draft]) -> Warnings:
    """What the files of heads leave open, whatever their texts say."""
    return tuple(doubt for draft in drafts if isinstance(draft, HeadDraft) for doubt in draft.doubts)


def sample(loaded: Loaded) -> list[Continuation]:
    """The beginnings of the first documents' continuations, written by the target where they are not given."""
    first = list(itertools.islice(loaded.documents, DOCUMENTS))
    texts = [given(document, loaded.target.eos) for document in first if document.given is not None]
    texts = [dataclasses.replace(text, ids=text.ids[:TOKENS]) for text in texts]
    short = [
        dataclasses.replace(document, max_new_tokens=min(TOKENS, document.max_new_tokens or TOKENS))
        for document in first
        if document.given is None
    ]
    for batch in generation_batches(short, loaded.options.batch_tokens):
        texts += generate(loaded.target, batch, loaded.scorer.width)
    return texts


def checked(draft: HeadDraft, texts: Sequence[Continuation], loaded: Loaded) -> tuple[HeadDraft, Warnings]:
    """A head with its trials, and warnings where another reading is better, or where none is any good."""
    measured = _Readings(loaded, texts)
    own = list(measured.agreements(draft, [Alternative("", "", draft.network, 1), Alternative("", "", draft.network, 2)]))
    base = Trial("", 1, _mean(own[0]), 0.0, 0.0, _size(own[0]), draft.engines)
    trials = [base, *_trials(own, draft.alternatives, measured.agreements(draft, draft.alternatives))]
    warnings = [
        _better(draft, trial, way) for trial, way in zip(trials[1:], draft.alternatives, strict=True) if _wins(trial)
    ]
    if base.acceptance < POOR and draft.fallbacks:
        searched = list(_trials(own, draft.fallbacks, measured.agreements(draft, draft.fallbacks)))
        best = max(range(len(searched)), key=lambda place: searched[place].acceptance)
        trials.append(searched[best])
        if _wins(searched[best]) and searched[best].acceptance >= POOR:
            warnings.append(_better(draft, searched[best], draft.fallbacks[best]))
        elif max(trial.acceptance for trial in trials) < POOR:
            warnings.append(_hopeless(draft, base, len(draft.fallbacks), searched[best]))
    return dataclasses.replace(draft, trials=tuple(trials)), tuple(warnings)


class _Readings:
    """Readings of a head on some texts."""

    def __init__(self, loaded: Loaded, texts: Sequence[Continuation]) -> None:
        self._loaded, self._texts = loaded, texts

    def agreements(self, draft: HeadDraft, ways: Sequence[Alternative]) -> Iterator[list[np.ndarray]]:
        """Yields for each way whether its draft at the way's depth is the token, [proposed positions] of each text."""
        for start in range(0, len(ways), AT_ONCE):
            some = ways[start : start + AT_ONCE]
            twins = [
                dataclasses.replace(draft, name=str(place), network=way.network, depths=way.depth, ranks_by_depth=False)
                for place, way in enumerate(some)
            ]
            scorer = Scorer(self._loaded.target, twins, self._loaded.scorer.width)
            agrees: list[list[np.ndarray]] = [[] for _ in some]
            for batch in scoring_batches(self._texts, self._loaded.options.batch_tokens):
                columns = scorer.score(batch)
                stops = np.cumsum([len(item.ids) for item in batch])[:-1]
                for place, way in enumerate(some):
                    agrees[place] += np.split(_agrees(columns[str(place)], way.depth), stops)
            yield from ([row[row >= 0] for row in rows] for rows in agrees)


def _agrees(columns: dict[str, np.ndarray], depth: int) -> np.ndarray:
    """1, 0, or -1 where no round has a draft at the depth, [positions]."""
    if depth > 1:
        return columns[f"agrees_{depth}"]
    return np.where(columns["proposed"] > 0, columns["draft_top"] == columns["token"], -1)


def _trials(
    own: Sequence[list[np.ndarray]], ways: Sequence[Alternative], agreements: Iterator[list[np.ndarray]]
) -> Iterator[Trial]:
    """Yields what each way got. Its standard error is the larger one of positions and of texts as units."""
    for way, rows in zip(ways, agreements, strict=True):
        ahead = [theirs.astype(float) - ours for theirs, ours in zip(rows, own[way.depth - 1], strict=True)]
        every = np.concatenate(ahead)
        gain, size = float(every.mean()), len(every)
        by_text = np.array([each.sum() - gain * len(each) for each in ahead])
        texts = max(len(ahead) - 1, 1)
        error = max(float(every.std()) / size**0.5, float((by_text**2).sum() * len(ahead) / texts) ** 0.5 / size)
        yield Trial(way.changed, way.depth, _mean(rows), gain, error, size, way.engines)


def _size(rows: list[np.ndarray]) -> int:
    return sum(map(len, rows))


def _mean(rows: list[np.ndarray]) -> float:
    return float(np.concatenate(rows).mean())


def _wins(trial: Trial) -> bool:
    return trial.ahead > SURE * trial.error and trial.ahead > 0


def _better(draft: HeadDraft, trial: Trial, way: Alternative) -> dict[str, str]:
    before = trial.acceptance - trial.ahead
    message = (
        f"draft {draft.name} may be read wrongly: with {trial.changed} it drafts {trial.acceptance:.3f} of "
        f"{trial.positions} tokens right at depth {trial.depth}, and {before:.3f} as it is read"
    )
    return {"code": WARNING, "message": message, "remedy": f"if its training agrees, set {way.setting} in its config.json"}


def _hopeless(draft: HeadDraft, base: Trial, count: int, best: Trial) -> dict[str, str]:
    message = (
        f"no reading of the files of draft {draft.name} works: it drafts {base.acceptance:.3f} of {base.positions} tokens "
        f"right at depth 1, and with the best of {count} other sets of layers {best.acceptance:.3f}"
    )
    remedy = "check that this head was trained on this target, with these layers, and on text like this"
    return {"code": WARNING, "message": message, "remedy": remedy}
