"""The wiring check: a head that was trained on other states of the target than it is given is told from one that was not."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from alphaprof.config.options import MtpDraft
from alphaprof.profiling.heads import wiring
from alphaprof.profiling.heads.draft import Alternative, HeadDraft
from alphaprof.profiling.models.kinds import PromptLookup
from alphaprof.profiling.models.teacher_forced import recorded
from alphaprof.profiling.scoring.scorer import Scorer
from tests.profiling.test_heads import HIDDEN, TOKENS, Chain, head, target, texts

pytestmark = [pytest.mark.models, pytest.mark.usefixtures("one_thread")]
RIGHT, WRONG = (1, 2), (0, 1)


class Fitted(Chain):
    """A head that reads states as they are, with an LM head fitted to the texts by least squares: a training in small."""

    def __init__(self, layers: tuple[int, ...]) -> None:
        super().__init__(target().network.get_input_embeddings(), layers, None)
        self.last = torch.nn.Linear((len(layers) + 1) * HIDDEN, TOKENS).requires_grad_(False)

    def step(self, token: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.embed[0](token), state[..., -2 * HIDDEN :]], -1)

    first = staticmethod(lambda features: features)  # type: ignore[assignment]

    @torch.inference_mode()
    def fit(self) -> Fitted:
        inputs, wanted = [], []
        for item in texts():
            text = torch.tensor([*item.document.prompt.tolist(), *item.ids.tolist()])
            with recorded(target().network.base_model, self.layers) as known:
                target().network(text[None])
            features = torch.cat([known[layer][0] for layer in self.layers], -1)
            inputs.append(self.step(text[1:-1], features[:-2]))
            wanted.append(torch.nn.functional.one_hot(text[2:], TOKENS).float())
        every, labels = torch.cat(inputs), torch.cat(wanted)
        ridge = every.T @ every + 0.1 * torch.eye(every.shape[1])
        self.last.weight.copy_(torch.linalg.solve(ridge, every.T @ labels).T)
        self.last.bias.zero_()
        return self

    def reading(self, layers: tuple[int, ...]) -> Fitted:
        twin = Fitted(layers)
        twin.load_state_dict(self.state_dict())
        return twin


def loaded(*drafts: Any, check: bool = True, tokens: int = 99) -> Any:
    """A profile with these drafts on the texts of the head's tests."""
    documents = [dataclasses.replace(item.document, max_new_tokens=min(tokens, len(item.ids))) for item in texts()]
    asked = {draft.name: MtpDraft(kind="mtp", check_wiring=check) for draft in drafts}  # of any head
    options = SimpleNamespace(padded_tokens=200, drafts=asked)
    return SimpleNamespace(drafts=drafts, documents=documents, options=options)


def fitted(measured: tuple[int, ...], *others: tuple[int, ...]) -> HeadDraft:
    network = Fitted(RIGHT).fit()

    def way(layers: tuple[int, ...]) -> Alternative:
        return Alternative(f"layers {layers}", f"ids: {list(layers)}", network.reading(layers), engines=("some",))

    changed = {"network": network.reading(measured), "alternatives": [way(layers) for layers in others]}
    return dataclasses.replace(head(), context=None, engines=("measured",), **changed)


def check(given: Any, say: Any = lambda _: None) -> tuple[dict[str, wiring.Trials], wiring.Warnings]:
    return wiring.check_wiring(given.drafts, given.options, given.documents, TOKENS, say)


def test_a_head_that_is_read_as_it_was_trained_has_no_warning() -> None:
    trials, warnings = check(loaded(fitted(RIGHT, WRONG)))
    base, other = trials["head"]
    assert warnings == ()
    assert (base.changed, base.depth, base.engines) == ("", 1, ("measured",))
    assert other.ahead < -3 * other.error
    assert base.acceptance > 0.5 > other.acceptance
    assert base.positions == other.positions == sum(len(item.ids) for item in texts()) - 1  # a prompt of one token


def test_acceptance_is_that_of_the_log() -> None:
    draft = fitted(WRONG, RIGHT)
    trials, _ = check(loaded(draft))
    columns = Scorer(target(), [draft], TOKENS).score(texts())["head"]
    right = (columns["draft_top"] == columns["token"])[columns["proposed"] > 0]
    assert trials["head"][0].acceptance == pytest.approx(float(np.mean(right)))


def test_another_reading_that_is_better_is_named_with_its_setting() -> None:
    trials, (warning,) = check(loaded(fitted(WRONG, RIGHT, (2, 3))))
    _, best, _ = trials["head"]
    assert warning["code"] == "wiring"
    assert f"with layers {RIGHT} it gets {best.acceptance:.3f}" in warning["message"]
    assert "ids: [1, 2]" in warning["remedy"]
    assert best.ahead == pytest.approx(best.acceptance - trials["head"][0].acceptance)
    assert best.engines == ("some",)


def test_a_head_that_drafts_hardly_anything_right_in_any_reading_is_doubted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wiring, "POOR", 0.45)
    _, warnings = check(loaded(fitted(WRONG, (2, 3), RIGHT)))
    assert not any("no reading" in warning["message"] for warning in warnings)
    _, warnings = check(loaded(fitted(WRONG, (2, 3))))
    assert "no reading of draft head works" in warnings[-1]["message"]


def test_what_the_files_leave_open_is_told_and_other_drafts_are_left_alone() -> None:
    doubt = {"code": "wiring", "message": "no layer ids", "remedy": "write them"}
    lookup = PromptLookup("ngram", 2, (), TOKENS, "float32")
    doubtful, said = dataclasses.replace(fitted(RIGHT), doubts=(doubt,)), list[str]()
    trials, warnings = check(loaded(doubtful, lookup), said.append)
    assert warnings == (doubt,)
    assert {name: len(found) for name, found in trials.items()} == {"head": 1}
    given = loaded(doubtful, lookup, check=False)  # nothing is tried then, and the files leave open what they did
    assert check(given, said.append) == ({}, (doubt,))
    assert len(said) == 1


def test_of_few_positions_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is anything divided by none, where no round has a second draft."""
    monkeypatch.setattr(wiring, "POOR", 0.99)
    deeper = dataclasses.replace(fitted(WRONG, RIGHT).alternatives[0], depth=2)
    draft = dataclasses.replace(fitted(WRONG, RIGHT), alternatives=[*fitted(WRONG, RIGHT).alternatives, deeper])
    for tokens, tried in ((1, 2), (3, 3)):
        trials, warnings = check(loaded(draft, tokens=tokens))
        assert len(trials["head"]) == tried
        assert warnings == ()


def test_a_reading_that_is_not_finite_is_left_out_alone() -> None:
    draft = fitted(WRONG, RIGHT, (2, 3))
    draft.alternatives[1].network.last.weight.fill_(torch.inf)
    trials, warnings = check(loaded(draft))
    assert [trial.changed for trial in trials["head"]] == ["", f"layers {RIGHT}"]
    assert len(warnings) == 1
