"""How a head does on texts that it was not trained on: its rounds by replay, by the code that scores any draft."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from alphaprof.log.split import STOP, TEST, RunText
from alphaprof.log.training import HeadTests, TrainingRun
from alphaprof.profiling.heads.draft import HeadDraft
from alphaprof.profiling.models.drafts import Arrays, load_draft, token_count
from alphaprof.profiling.models.load import Model
from alphaprof.profiling.models.processing import Processing
from alphaprof.profiling.scoring.extras import Extras
from alphaprof.profiling.scoring.scorer import Scorer, by_document
from alphaprof.profiling.texts.continuations import Continuation, scoring_batches
from alphaprof.profiling.texts.corpus import Document
from alphaprof.profiling.training.vocabulary import outside
from alphaprof.rules import GREEDY, SAMPLED, decoded_rule, parse_rule
from alphaprof.totals.replay import Trace, expected_replays, replays

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from alphaprof.config.profile import ProfileOptions


@dataclass(frozen=True)
class TestBench:
    """What heads are tested with: a target, its tokenizer and the options of a profile, on texts of its stop and test part;
    `run`: whose texts they are. Several heads may be tested on one bench.
    """

    __test__ = False  # no test of pytest

    options: ProfileOptions
    target: Model
    tokenizer: PreTrainedTokenizerBase
    run: TrainingRun
    texts: Mapping[str, Sequence[RunText]]

    def loaded(self, folder: Path, depths: int) -> Any:
        """The head in a folder, a `HeadDraft`. Raises `ModelUnloadable`."""
        from alphaprof.config.options import Eagle3Draft

        options = self.options.model_copy(update={"gammas": list(range(1, depths + 1))})
        head = Eagle3Draft(kind="eagle3", model=str(folder.absolute()))  # heads/mine might be a name on the hub
        return load_draft("head", head, options, self.target, self.tokenizer)

    def tested(self, folder: Path, head: str, advance: Callable[[float, int], None]) -> tuple[HeadTests, float | None]:
        """The tests of the head in a folder up to the profile's largest gamma; `head`: what identifies its files (see
        `HeadTests`). And the target's own uncertainty on sampled test text: 1 - the mean of its largest probability.

        Raises `ModelUnloadable`, `LogitsNotFinite`.
        """
        draft = self.loaded(folder, max(self.options.gammas))
        rules = sorted({self._rule(text) for texts in self.texts.values() for text in texts})
        scorer = Scorer(
            self.target,
            [draft],
            token_count(self.tokenizer),
            self.options.draft_processing,
            Extras.of(rules, certificates=False),
        )
        rows: list[dict[str, Any]] = []
        tops: list[Any] = []
        for part in (STOP, TEST):
            texts = list(self.texts[part])
            known = dict(enumerate(texts))
            items = [_continuation(number, text) for number, text in known.items()]
            for batch in scoring_batches(items, self.options.batch_tokens):
                for number, columns in by_document(batch, scorer.score(batch)[draft.name]).items():
                    text = known[number]
                    rows.append(self._row(part, text, columns, draft))
                    if part == TEST and text.drawn is not None:
                        tops.append(columns["target_top_prob"])
                advance(len(batch), sum(len(item.ids) for item in batch))
        every = {name: np.array([row[name] for row in rows]) for name in rows[0]}
        for name in ("unit", "part", "domain", "text", "rule"):
            every[name] = every[name].astype(object)
        tests = HeadTests(self.target.digest, self.run.digest, head, **every)
        return tests, float(1 - np.concatenate(tops).mean()) if tops else None

    def _rule(self, text: RunText) -> str:
        return decoded_rule(self.options.decision.rule, GREEDY if text.drawn is None else SAMPLED)

    def _row(self, part: str, text: RunText, columns: Arrays, draft: HeadDraft) -> dict[str, Any]:
        """One row of test.parquet."""
        gammas, size, rule = range(1, draft.depths + 1), len(text.ids), self._rule(text)
        proposed = columns["proposed"].astype(np.int64)
        start, stop, run = np.array([0]), np.array([size]), columns["accepted_run"].astype(np.int64)
        trace = Trace(run, proposed, start, stop, stop, np.zeros(size, dtype=bool))
        drawn = parse_rule(rule).rule.drawn
        if drawn:
            kept, accept = (_chances(columns, name, rule, draft.depths) for name in ("emitted", "accept"))
            found, right = expected_replays(trace, (kept, accept), list(gammas)), kept
        else:
            found, right = replays(trace, list(gammas)), _agrees(columns, draft.depths).astype(np.float64)
        has = _agrees(columns, draft.depths) >= 0
        ids = None if draft.network.ids is None else draft.network.ids.cpu().numpy()
        return {
            "unit": text.unit,
            "part": part,
            "domain": text.domain,
            "text": text.group,
            "rule": rule,
            "tokens": max(0, size - 1),
            "agree": np.where(has, right, 0.0).sum(0),
            "starts": has.sum(0).astype(np.float64),
            "rounds": np.array([found[gamma].rounds[0] for gamma in gammas], dtype=np.float64),
            "accepted": np.asarray(found[draft.depths].accepted[0], dtype=np.float64),
            "outside": outside(ids, text),
        }


def _agrees(columns: Arrays, depths: int) -> Any:
    """[positions, depths]: 1 where the draft is the token, 0 where not, -1 where there is none."""
    first = np.where(columns["proposed"] > 0, columns["draft_top"] == columns["token"], -1)
    return np.stack([first, *(columns[f"agrees_{depth}"] for depth in range(2, depths + 1))], 1)


def _chances(columns: Arrays, name: str, rule: str, depths: int) -> Any:
    """[positions, depths]: acceptance or a_t of a rule whose drafts are drawn; 0 where there is no draft."""
    bound = parse_rule(rule)
    first: Any = bound.emitted(columns) if name == "emitted" else bound.accept(columns)
    deeper = (columns[f"{name}_{rule}_{depth}"] for depth in range(2, depths + 1))
    values = np.stack([np.where(columns["proposed"] > 0, first, 0.0), *deeper], 1).astype(np.float64)
    return np.maximum(values, 0.0)


def _continuation(number: int, text: RunText) -> Continuation:
    """A text as the scorer takes it."""
    processing = None if text.drawn is None else Processing(*text.drawn)
    document = Document(
        document=number,
        domain=text.domain,
        cluster=None,
        source=0,
        source_row=number,
        prompt=text.prompt,
        given=text.ids,
        cut=False,
        max_new_tokens=None,
        kind=text.group,
        on_policy=text.on_policy,
        processing=processing,
    )
    return Continuation(document, text.ids, "length")
