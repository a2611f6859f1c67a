"""A head as a draft, whatever its network: its columns by depth are those of the definition, real rounds those of replay."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import GenerationConfig

from alphaprof.errors import LogitsNotFinite
from alphaprof.profiling.decoding import speculative
from alphaprof.profiling.decoding.drafters import Choice, Proposal
from alphaprof.profiling.decoding.speculative import Speculation
from alphaprof.profiling.heads.draft import HeadDraft
from alphaprof.profiling.heads.network import HeadNetwork
from alphaprof.profiling.models.kinds import DraftModel
from alphaprof.profiling.models.load import Model
from alphaprof.profiling.models.processing import Processing
from alphaprof.profiling.models.teacher_forced import FINAL, States
from alphaprof.profiling.scoring.scorer import Extras, Scorer, by_document, position_table
from alphaprof.profiling.texts.continuations import Continuation, generate
from alphaprof.profiling.texts.corpus import Document
from alphaprof.rules import parse_rule
from alphaprof.run.manifest import PARTIAL
from alphaprof.run.schema import LogRules, violations
from alphaprof.totals.replay import Trace, listed_rounds
from tests import reference
from tests.conftest import slow
from tests.profiling.test_scoring import crossing
from tests.tiny import llama

pytestmark = [pytest.mark.models, pytest.mark.usefixtures("one_thread")]
TOKENS, HIDDEN, DEPTHS, CONTEXT = 9, 32, 4, 40
DRAWN = Processing(1.3, 0, 0.97)
RULES = ("strict", "one_hot", "lossless", "block")


class Chain(HeadNetwork):
    """A head without attention: state k = tanh(A [embedding of x_(i+k), state k - 1]), state 0 = B features."""

    vocabulary = TOKENS

    def __init__(self, embedding: nn.Module, layers: tuple[int, ...], ids: list[int] | None) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.layers, self.ids = layers, None if ids is None else torch.tensor(ids)
        self.embed = [embedding]  # the target's
        self.first = nn.Linear(len(layers) * HIDDEN, HIDDEN)
        self.next = nn.Linear(2 * HIDDEN, HIDDEN)
        self.last = nn.Linear(HIDDEN, TOKENS if ids is None else len(ids))
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)
        self.requires_grad_(False)

    def step(self, token: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.next(torch.cat([self.embed[0](token), state], -1)))

    def states(self, ids: torch.Tensor, features: torch.Tensor, depths: int, first: int) -> States:
        state, drafted = self.first(features)[:, first:], None
        for depth in range(1, depths + 1):
            following = torch.cat([ids, ids.new_zeros(len(ids), depth)], 1)[:, first + depth : depth + ids.shape[1]]
            state = self.step(following if drafted is None else drafted, state)
            drafted = yield state

    def logits(self, states: torch.Tensor, depth: int) -> torch.Tensor:
        return self.last(states) * (1 + 0.1 * depth)

    def shape(self) -> None:
        return None

    def cache(self, first: torch.Tensor | None = None) -> Any:
        return Working(self)


class Working:
    """The chain in a text that grows: it has nothing to remember."""

    def __init__(self, network: Chain) -> None:
        self.network = network

    def extend(self, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        return self.network.step(tokens[:, -1], self.network.first(features[:, -1]))

    def deepen(self, token: torch.Tensor, state: torch.Tensor, depth: int) -> torch.Tensor:
        return self.network.step(token, state)


@cache
def target() -> Model:
    network = llama(seed=5, vocabulary=TOKENS, eos_token_id=None, pad_token_id=None, layers=3)
    network.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=0)
    return DraftModel("target", network, "model", "t")


def head(ids: list[int] | None = None, layers: tuple[int, ...] = (1, 2), **changes: Any) -> HeadDraft:
    network = Chain(target().network.get_input_embeddings(), layers, ids)
    fields = {"kind": "chain", "reference": "c", "depths": DEPTHS, "context": CONTEXT} | changes
    return HeadDraft("head", network, target(), **fields)


REDUCED = [1, 2, 4, 5, 8]
HEADS = {"all ids": None, "some ids": REDUCED}


@cache
def texts(processing: Processing | None = None) -> list[Continuation]:
    """Texts of the target itself, after prompts of one token and more; some go beyond the head's context."""
    sizes = [(1, 30), (2, 30), (9, 33), (20, 24)]
    documents, kind = [], "greedy" if processing is None else "sampled"
    for number, (prompt, length) in enumerate(sizes):
        ids = np.random.default_rng(number).integers(0, TOKENS, prompt).astype(np.int32)
        documents.append(Document(number, "a", None, 0, number, ids, None, False, length, kind, True, processing, 7))
    return generate(target(), documents, TOKENS)


def scored(draft: HeadDraft, batch: list[Continuation], rules: tuple[str, ...] = RULES) -> dict[int, dict[str, Any]]:
    scorer = Scorer(target(), [draft], TOKENS, extras=Extras.of(rules, certificates=False))
    scorer.head_rows, scorer.statistics_rows = 7, 3
    return by_document(batch, scorer.score(batch)[draft.name])


By = dict[tuple[int, int], np.ndarray]


@torch.inference_mode()
def defined(draft: HeadDraft, item: Continuation, own: bool) -> tuple[np.ndarray, By, By]:
    """Logits of the target [positions, V], and of the head at (position, depth) and at (start of the round, depth), one
    round at a time from its definition. `own`: it reads what it drafted, and not the text.
    """
    network, text = draft.network, [*item.document.prompt.tolist(), *item.ids.tolist()]
    prompt = len(item.document.prompt)
    output = target().network(torch.tensor([text[:-1]]), output_hidden_states=True)
    by_layer = dict(enumerate(output.hidden_states)) | {FINAL: output.hidden_states[-1]}
    rows: By = {}
    begun: By = {}
    for start in range(prompt, len(text)):  # a round that proposes x_start first: the last token read is x_(start - 2)
        if start < 2:
            continue
        state = network.first(torch.cat([by_layer[layer][0, start - 2] for layer in network.layers]))
        for depth in range(1, draft.depths + 1):
            position = start + depth - 1
            if (position >= len(text) and not own) or start - 2 + depth - 1 >= CONTEXT:
                break
            follows_itself = own and depth > 1
            token = np.argmax(whole(begun[start - prompt, depth - 1], network.ids)) if follows_itself else text[position - 1]
            state = network.step(torch.tensor(int(token)), state)
            row = begun[start - prompt, depth] = network.logits(state[None], depth)[0].double().numpy()
            if position < len(text):
                rows[position - prompt, depth] = row
    return output.logits[0, prompt - 1 :].double().numpy(), rows, begun


def odds(row: np.ndarray) -> float:
    """log(q / (1 - q)) of the largest of some logits."""
    return float(row.max() - np.logaddexp.reduce(np.delete(row, row.argmax())))


def whole(row: np.ndarray, ids: Any) -> np.ndarray:
    """Logits over all ids of the target."""
    if ids is None:
        return row
    every = np.full(TOKENS, -np.inf)
    every[ids] = row
    return every


@pytest.mark.parametrize("processing", [None, Processing(), DRAWN, Processing(0.8, 3)], ids=str)
@pytest.mark.parametrize("ids", HEADS.values(), ids=HEADS)
def test_columns_are_those_of_the_definition(ids: list[int] | None, processing: Processing | None) -> None:
    draft, batch = head(ids), texts(processing)
    found = scored(draft, batch)
    checked = 0
    for item in batch:
        columns = found[item.document.document]
        ours, theirs, begun = defined(draft, item, own=processing is None)
        for place, token in enumerate(item.ids.tolist()):
            proposed = [depth for depth in range(1, DEPTHS + 1) if (place + depth - 1, depth) in theirs]
            beyond = len(item.ids) - place  # the log does not see the end of the text
            assert columns["proposed"][place] == len(proposed) or columns["proposed"][place] > beyond >= len(proposed)
            tops = [int(np.argmax(whole(theirs[place + d - 1, d], ids))) == item.ids[place + d - 1] for d in proposed]
            assert columns["accepted_run"][place] == (tops.index(False) if False in tops else len(tops))
            found_odds = [columns[f"draft_log_odds_{depth}"][place] for depth in range(2, DEPTHS + 1)]
            known = [odds(row) for depth in range(2, DEPTHS + 1) if (row := begun.get((place, depth))) is not None]
            expected_odds = (
                [*known, *[np.nan] * (DEPTHS - 1 - len(known))] if processing is None else [np.nan] * (DEPTHS - 1)
            )
            assert found_odds == pytest.approx(expected_odds, rel=1e-3, abs=1e-4, nan_ok=True)
            for depth in range(1, DEPTHS + 1):
                if (place, depth) not in theirs:
                    assert depth == 1 or columns[f"agrees_{depth}"][place] == -1
                    continue
                expected = reference.columns(ours[place], whole(theirs[place, depth], ids), token, processing, processing)
                checked += 1
                if depth == 1:
                    got = {name: float(columns[name][place]) for name in expected}
                    assert got == pytest.approx(expected, abs=1e-4, rel=1e-4)
                    continue
                assert columns[f"agrees_{depth}"][place] == (expected["draft_top"] == token)
                chances = [columns[f"{name}_lossless_{depth}"][place] for name in ("accept", "emitted")]
                kept = min(1.0, expected["draft_token_prob"] / expected["target_token_prob"])
                assert chances == pytest.approx([expected["overlap"], kept] if processing else [-1, -1], abs=1e-4)
        if ids is not None:
            assert columns["in_draft_vocabulary"].tolist() == [token in ids for token in item.ids]
    assert checked > 300


@pytest.mark.parametrize("ids", HEADS.values(), ids=HEADS)
def test_its_log_has_the_declared_columns_and_nulls_where_no_round_has_a_draft(ids: list[int] | None) -> None:
    for processing in (None, DRAWN):
        draft, batch = head(ids), texts(processing)
        rules = LogRules(RULES).of(draft.facts())
        table = position_table(batch, scored(draft, batch), rules, "head", starts_matter=True)
        assert violations(table, rules.columns) == []
        frame = table.to_pandas()
        assert ("in_draft_vocabulary" in frame) == (ids is not None)
        first = frame[frame["document"] == 0]  # its prompt has one token: nothing is known before the second
        assert first["proposed"].tolist()[:2] == [0, DEPTHS]
        assert first["draft_top"].isna().tolist()[:2] == [True, False]
        assert first["accepted_run"].isna().tolist()[:2] == [True, False]
        assert first["agrees_2"].isna().tolist()[:3] == [True, True, False]
        assert frame[frame["document"] == 1]["agrees_3"].isna().tolist()[:3] == [True, True, False]
        assert frame["emitted_lossless_2"].isna().all() == (processing is None)


def test_a_head_of_one_depth_has_the_columns_of_its_log() -> None:
    draft, batch = head(depths=1), texts()
    rules = LogRules(RULES).of(draft.facts())
    frame = position_table(batch, scored(draft, batch), rules, "head", starts_matter=True).to_pandas()
    expected = ((frame["draft_top"] == frame["token"]) & (frame["proposed"] > 0)).astype(int)
    assert frame["accepted_run"].fillna(0).tolist() == expected.tolist()
    assert "agrees_2" not in frame


@pytest.mark.parametrize(
    ("ids", "rule", "layers"),
    [(None, "strict", (1, 2)), (REDUCED, "one_hot", (0, 2)), (None, "one_hot", (3, FINAL)), (REDUCED, "strict", (1, 2))],
    ids=str,
)
def test_real_rounds_are_those_of_replay(ids: list[int] | None, rule: str, layers: tuple[int, ...]) -> None:
    processing = None if rule == "strict" else DRAWN
    draft, batch = head(ids, layers), texts(processing)
    found = scored(draft, batch)
    counted = accepted = 0
    for item in batch:
        columns, size = found[item.document.document], len(item.ids)
        trace = Trace(columns["accepted_run"], columns["proposed"].astype(np.int64), np.array([0]), np.array([size]))
        for gamma in range(1, DEPTHS + 1):
            engine = Speculation(target(), draft, parse_rule(rule), gamma, Choice(processing, 7, width=TOKENS))
            decoded = engine.decode(item.document.prompt, size, source_row=item.document.source_row)
            assert decoded.ids.tolist() == item.ids.tolist()
            replayed = listed_rounds(trace, gamma)
            assert decoded.drafted.tolist() == replayed.drafted.tolist()
            assert decoded.accepted.tolist() == replayed.accepted.tolist()
            counted, accepted = counted + len(decoded.drafted), accepted + int(decoded.accepted.sum())
    assert counted > 250
    assert accepted > 20


@pytest.mark.parametrize("ids", [REDUCED, *slow([(None,)])], ids=str)
def test_drafts_that_are_drawn_come_from_the_distribution_of_the_log(
    ids: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a round's drafts were kept, the log of its text says with which chance: min(1, q/p) by depth."""

    draft = head(ids)
    seen: list[tuple[int, int, float, bool]] = []  # place, depth, q/p by its own law, whether it was kept
    original = speculative.sampled

    def spy(rule: Any, chooser: Any, rows: torch.Tensor, proposal: Proposal, at: int) -> list[int]:
        emitted = original(rule, chooser, rows, proposal, at)
        if proposal.laws is not None:
            p = torch.from_numpy(np.stack([reference.processed(row.double().numpy(), DRAWN) for row in rows]))
            for depth, token in enumerate(emitted[: len(proposal.ids)], 1):
                law = proposal.laws[depth - 1].double()
                assert law.shape == (TOKENS,)
                assert float(law.sum()) == pytest.approx(1, abs=1e-5)
                seen.append((at + depth - 1, depth, float(law[token] / p[depth - 1, token]), depth < len(emitted)))
        return emitted

    monkeypatch.setattr(speculative, "sampled", spy)
    kept, expected, variance = 0, 0.0, 0.0
    for number, item in enumerate(texts(DRAWN) * 6):
        seen.clear()
        engine = Speculation(target(), draft, parse_rule("lossless"), 3, Choice(DRAWN, number, width=TOKENS))
        decoded = engine.decode(item.document.prompt, len(item.ids), source_row=number)
        columns = scored(draft, [Continuation(item.document, decoded.ids, "length")])[item.document.document]
        for place, depth, ratio, accepted in [one for one in seen if one[0] < len(decoded.ids)]:
            chance = min(1.0, ratio)
            if depth > 1:
                assert columns[f"emitted_block_{depth}"][place] == pytest.approx(ratio, rel=1e-3, abs=1e-4)
                assert columns[f"emitted_lossless_{depth}"][place] == pytest.approx(chance, abs=1e-4)
            kept, expected, variance = kept + accepted, expected + chance, variance + chance * (1 - chance)
    assert kept > 60
    assert abs(kept - expected) < 4 * variance**0.5


@pytest.mark.parametrize("settings", [None, DRAWN], ids=str)
def test_on_a_gpu_nothing_waits_before_the_columns_cross(
    settings: Processing | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft, batch = head(REDUCED), texts(settings)
    known = draft._known  # what a run knows before it scores
    there = DraftModel("target", copy.deepcopy(target().network).to("meta"), "model", "t")
    network = draft.network.to("meta")  # type: ignore[attr-defined]
    network.embed = [there.network.get_input_embeddings()]
    network.ids = torch.tensor(REDUCED)

    def made() -> Scorer:
        scorer = Scorer(there, [draft], TOKENS, extras=Extras.of(RULES, certificates=False))
        scorer.ids = [torch.empty(len(known), dtype=torch.long, device="meta")]
        return scorer

    crossing(monkeypatch, made, batch)


def test_logits_that_are_not_finite_stop_a_run_at_any_depth() -> None:
    draft = head()
    logits = draft.network.logits

    def poisoned(states: torch.Tensor, depth: int) -> torch.Tensor:
        return logits(states, depth) * (torch.nan if depth == 3 else 1)

    draft.network.logits = poisoned  # type: ignore[method-assign]
    with pytest.raises(LogitsNotFinite, match=r"logits of head .* document 0, position 1$"):
        scored(draft, texts())


def test_its_facts_say_what_it_is() -> None:
    facts, whole_vocabulary = head(REDUCED, reading={"layers": "1, 2"}).facts(), head().facts()
    assert (facts.vocabulary, facts.reduced_vocabulary, facts.depths) == (len(REDUCED), True, DEPTHS)
    assert (whole_vocabulary.vocabulary, whole_vocabulary.reduced_vocabulary) == (TOKENS, False)
    assert facts.parameters == sum(parameter.numel() for parameter in head(REDUCED).network.parameters())
    assert facts.fingerprint == head(REDUCED, reading={"layers": "1, 2"}).facts().fingerprint
    assert facts.fingerprint != head(REDUCED).facts().fingerprint
    assert facts.fingerprint.startswith(PARTIAL)  # it was made here: no file says what its weights are
