"""Rules at work: whole texts follow the target's law, rounds their exact expectation, and lossy rules their own formula."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, LlamaConfig
from transformers.generation.utils import _speculative_sampling

from alphaprof.profiling.decoding.drafters import GREEDILY, OWN, Choice
from alphaprof.profiling.decoding.speculative import Decoded, Plain, Speculation
from alphaprof.profiling.models.kinds import DraftModel, PromptLookup
from alphaprof.profiling.models.load import Model
from alphaprof.profiling.models.private import CACHE
from alphaprof.profiling.models.processing import PLAIN, Processing, uniforms
from alphaprof.rules import parse_rule
from alphaprof.totals.replay import Trace, replays
from tests import reference
from tests.conftest import slow
from tests.loops import each
from tests.profiling.test_sampling import assert_follows
from tests.tiny import ending, llama, noisy

pytestmark = [pytest.mark.models, pytest.mark.usefixtures("one_thread")]
Array = np.ndarray[Any, Any]
NO_DRAFT = {"target_prob_of_draft_top": np.array([np.nan])}
PROMPT = np.array([1, 0, 2], dtype=np.int32)
EOS = 3
LENGTH = 3
RUNS, FEW = 2000, 400  # texts of a law, and by default
CONTEXTS = 61  # rows of a table


class Table(torch.nn.Module):
    """A language model that looks its logits up by the whole text so far, which it knows from its cache alone."""

    def __init__(self, rows: Array) -> None:
        super().__init__()
        self.rows = torch.from_numpy(rows.astype(np.float32))
        self.config = LlamaConfig(vocab_size=rows.shape[1], num_hidden_layers=1, max_position_embeddings=64)
        self.generation_config = GenerationConfig(eos_token_id=EOS)
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.factors = torch.from_numpy(np.random.default_rng(1).integers(1, CONTEXTS, 64))

    def get_output_embeddings(self) -> None:
        """None: the config says how many ids there are."""

    def row(self, text: torch.Tensor) -> torch.Tensor:
        """Which row of the table stands behind each token of a text."""
        return ((text + 1) * self.factors[: len(text)]).cumsum(0) % CONTEXTS

    def forward(self, input_ids: torch.Tensor, use_cache: bool, logits_to_keep: int = 0, **cache: Any) -> Any:
        keys = input_ids[:, None, :, None].double()
        text = cache[CACHE].update(keys, keys, 0)[0][0, 0, :, 0].long()

        return SimpleNamespace(logits=self.rows[self.row(text)[-(logits_to_keep or input_ids.shape[1]) :]][None])


def tables(wide: int = 5, draft_width: int = 5) -> tuple[Model, Model]:
    """A target, and a draft that agrees with it roughly; their vocabularies may differ in size."""
    generator = np.random.default_rng(5)
    rows = generator.normal(0, 1.2, (CONTEXTS, 8))
    rows[:, EOS] -= 0.7
    drafts = rows + generator.normal(0, 0.8, rows.shape)
    named = (("target", rows[:, :wide]), ("draft", drafts[:, :draft_width]))
    first, second = (DraftModel(name, Table(found), "model", name) for name, found in named)
    return first, second


@dataclass(frozen=True)
class Expected:
    """Every continuation of the target with its probability, and what rounds are expected in the mean over them."""

    law: dict[tuple[int, ...], float]
    rounds: float
    drafted: float
    accepted: float


def exactly(target: Model, draft: Model, choice: Choice, gamma: int, blocks: bool = False) -> Expected:
    """By enumeration of texts."""
    found: dict[tuple[int, ...], float] = {}
    sums = np.zeros(3)
    for text, probability, kept in _texts(target, draft, choice, (), 1.0, ()):
        found[text] = probability
        start, stop = np.array([0]), np.array([len(text)])
        size = len(text)
        # Behind a token that the draft does not have it proposes nothing.
        known = np.cumsum([0, *(token >= draft.vocabulary for token in text[:-1])]) == 0
        trace = Trace(np.zeros(size), np.where(known, 256, 0), start, stop)
        chances = np.array(kept) if blocks else np.minimum(kept, 1)
        counted = replays(trace, [gamma], (chances, chances), blocks=blocks)[gamma]
        sums += probability * np.array([counted.rounds[0], counted.drafted.sum(), counted.accepted.sum()])
    return Expected(found, *map(float, sums))


def _texts(target: Model, draft: Model, choice: Choice, text: tuple[int, ...], probability: float, kept: tuple) -> Any:
    """Texts that begin like this one, with their probability and their q/p."""
    if len(text) == LENGTH or (text and text[-1] == EOS):
        yield text, probability, kept
        return
    p, q = (law(model, text, choice, model is draft) for model in (target, draft))
    for token in np.flatnonzero(p):
        accepted = q[token] / p[token] if token < len(q) else 0.0
        yield from _texts(target, draft, choice, (*text, int(token)), probability * p[token], (*kept, accepted))


def law(model: Model, text: tuple[int, ...], choice: Choice, is_draft: bool = False) -> Array:
    """The processed distribution behind prompt and text, in float64."""
    network: Any = model.network
    whole = torch.tensor([*PROMPT.tolist(), *text])
    settings = choice.processing
    if is_draft and settings is not None:
        settings = settings.for_draft(choice.draft_processing)
    return reference.processed(network.rows[network.row(whole)[-1]].numpy(), settings)


def point_mass(draft: Model) -> Model:
    """A draft with all weight on its top token: what one_hot takes its draft for."""
    network: Any = draft.network
    rows = network.rows.numpy()
    return DraftModel("draft", Table(np.where(rows == rows.max(1, keepdims=True), 100.0, -100.0)), "model", "d")


CUT = Processing(1.3, 0, 0.8)
LAWS = [
    # rule, gamma, processing, how the draft is processed, sizes of both vocabularies
    ("lossless", 2, CUT, "temperature", (5, 5)),
    ("block", 4, PLAIN, "same", (5, 5)),
    ("one_hot", 4, PLAIN, "same", (6, 5)),
]
MORE_LAWS = [
    ("lossless", 1, PLAIN, "same", (5, 5)),
    ("lossless", 4, PLAIN, "same", (5, 5)),
    ("lossless", 2, CUT, "same", (5, 5)),
    ("lossless", 3, Processing(0.7, 3), "same", (5, 5)),
    ("lossless", 2, PLAIN, "same", (5, 4)),
    ("lossless", 2, PLAIN, "same", (5, 7)),  # the draft may draw what the target does not have
    ("one_hot", 2, CUT, "same", (5, 5)),
    ("block", 3, CUT, "temperature", (5, 7)),
    ("block", 2, Processing(0.7, 3), "same", (5, 4)),
]


@pytest.mark.parametrize(
    ("rule", "gamma", "settings", "draft_processing", "sizes", "runs"),
    [*((*law, FEW) for law in LAWS), *slow((*law, RUNS) for law in [*LAWS, *MORE_LAWS])],
    ids=str,
)
def test_texts_follow_the_law_of_the_target_and_rounds_their_expectation(
    rule: str, gamma: int, settings: Processing, draft_processing: str, sizes: tuple[int, int], runs: int
) -> None:
    target, draft = tables(*sizes)
    choice = Choice(settings, 11, draft_processing, width=max(sizes))
    engine = Speculation(target, draft, parse_rule(rule), gamma, choice)
    decoded = [engine.decode(PROMPT, LENGTH, source_row=row) for row in range(runs)]
    compared = point_mass(draft) if rule == "one_hot" else draft
    expected = exactly(target, compared, choice, gamma, blocks=rule == "block")
    assert sum(expected.law.values()) == pytest.approx(1)
    assert_law([found.ids for found in decoded], expected.law)
    counts = np.array([[len(found.drafted), found.drafted.sum(), found.accepted.sum()] for found in decoded])
    wanted = np.array([expected.rounds, expected.drafted, expected.accepted])
    error = counts.std(0, ddof=1) / np.sqrt(runs)
    assert np.all(np.abs(counts.mean(0) - wanted) <= 4 * error)
    assert 0 < expected.accepted < expected.drafted


def assert_law(texts: list[Array], expected: dict[tuple[int, ...], float]) -> None:
    """A G-test of whole continuations against their probabilities."""
    counted = Counter(tuple(text.tolist()) for text in texts)
    assert set(counted) <= set(expected)
    assert_follows(np.array([counted[text] for text in expected]), np.array(list(expected.values())))


BY_CHANCE = ["sglang_0p9_0p8", "ensemble_0p4"]


@pytest.mark.parametrize(("rule", "runs"), [*((rule, FEW) for rule in BY_CHANCE), *slow((rule, RUNS) for rule in BY_CHANCE)])
def test_a_lossy_rule_that_keeps_drafts_by_chance_writes_its_own_law(rule: str, runs: int) -> None:
    """All tokens but the first are drafted: d is kept with probability a, else another is drawn from what q leaves of p."""
    target, draft = tables(5, 6)  # the draft may draw what the target does not have
    choice = Choice(CUT, 11, "temperature", width=6)
    drafts = draft if rule.startswith("ensemble") else point_mass(draft)

    def written(text: tuple[int, ...]) -> Array:
        p, q = law(target, text, choice), law(drafts, text, choice, is_draft=True)
        if not text:
            return p
        own = np.append(p, 0.0)
        if rule.startswith("ensemble"):
            chances = np.minimum(1.0, 0.6 + 0.4 * np.divide(own, q, out=np.ones_like(q), where=q > 0))
        else:
            chances = np.where(own >= 0.9, 1.0, np.minimum(1.0, own / 0.8))
        chances[5] = 0.0  # is not there
        left = np.maximum(own - q, 0.0)
        return (q * chances + (1 - q @ chances) * (left / left.sum() if left.any() else own))[:5]

    expected = {(token,): chance for token, chance in enumerate(written(())) if chance}
    for size in range(1, LENGTH):
        for text in [text for text in expected if len(text) == size and text[-1] != EOS]:
            chance = expected.pop(text)
            expected |= {(*text, token): chance * each for token, each in enumerate(written(text)) if each}
    engine = Speculation(target, draft, parse_rule(rule), LENGTH, choice)
    assert_law([engine.decode(PROMPT, LENGTH, source_row=row).ids for row in range(runs)], expected)


@each("weight", [0.2, 0.5, 0.9])
def test_an_ensemble_keeps_what_transformers_keeps(weight: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own function, given the same draft at 4,096 places and numbers that rise, accepts as many as are small enough."""
    logits = torch.from_numpy(np.random.default_rng(9).normal(0, 1.5, (2, 6)).astype(np.float32))
    p, q = logits.double().softmax(1).numpy()
    places = 4096
    monkeypatch.setattr(torch, "rand_like", lambda ratios: (torch.arange(ratios.numel()) + 0.5) / ratios.numel())
    kept = [
        _speculative_sampling(
            torch.full((1, places), token),
            logits[1].expand(1, places, 6),
            places,
            logits[0].expand(1, places + 1, 6),
            assistant_ensemble_weight=weight,
        )[1].item()
        / places
        for token in range(6)
    ]
    found = parse_rule({"ensemble": weight}).accept({"overlap": np.array([np.minimum(p, q).sum()])} | NO_DRAFT)
    assert found == pytest.approx([q @ kept], abs=1 / places)
    assert max(kept) == 1
    assert min(kept) < 0.95


@pytest.mark.parametrize(("settings", "runs"), [(CUT, FEW), *slow([(CUT, RUNS), (PLAIN, RUNS)])], ids=str)
def test_plain_decoding_follows_the_law_of_the_target(settings: Processing, runs: int) -> None:
    target, draft = tables()
    choice = Choice(settings, 11)
    texts = [Plain(target, choice).decode(PROMPT, LENGTH, source_row=row).ids for row in range(runs)]
    assert_law(texts, exactly(target, draft, choice, 1).law)


def fresh(network: Any, prompt: Array, text: Array) -> Array:
    """Logits [tokens, V] that predict each token of a text, from one pass without a cache."""
    ids = torch.from_numpy(np.concatenate([prompt, text]).astype(np.int64))[None]
    with torch.inference_mode():
        return network(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].numpy().astype(np.float64)


def test_a_draft_without_a_distribution_is_kept_losslessly_by_its_probability() -> None:
    """Prompt lookup is a point mass: lossless and one_hot are one rule, and the text is that of plain decoding."""
    target, _ = tables()
    prompt = np.array([0, 1, 2, 0, 1, 4, 0, 1, 2, 0, 1], dtype=np.int32)
    lookup = PromptLookup("ngram", 2, (EOS,), 5, "float32")
    drafted = 0
    for row in range(30):
        choice = Choice(CUT, 1)
        plain = Plain(target, choice).decode(prompt, 12, source_row=row)
        for rule in ("lossless", "block", "one_hot"):
            found = Speculation(target, lookup, parse_rule(rule), 3, choice).decode(prompt, 12, source_row=row)
            assert found.ids.tolist() == plain.ids.tolist()
            drafted += found.accepted.sum()
    assert drafted > 20


# Lossy rules, on networks with attention.
NEW_TOKENS = 36
LOSSY = ["additive_0p1", "multiplicative_0p3", "top_m_3", "typical_0p09_0p3", "trtllm_10_0p6"]
CHOICES = [GREEDILY, Choice(Processing(1.4), 5), Choice(Processing(1.2, 0, 0.9), 6)]


def prompt(number: int) -> Array:
    return np.random.default_rng(100 + number).integers(0, 250, 6 + number).astype(np.int32)


@pytest.fixture(scope="module")
def pair() -> tuple[Model, Model]:
    """A target and a draft that agree on about half of the tokens, both ready to end a text."""
    target = ending(llama(seed=7), 1.5)
    return DraftModel("target", target, "model", "t"), DraftModel("draft", noisy(target, 0.04), "model", "d")


def policy(pair: tuple[Model, Model], rule: str, gamma: int, choice: Choice, prompt: Array, found: Decoded) -> Any:
    """The tokens and rounds (drafted, accepted) that a rule's policy has along a text, from passes without a cache."""
    ours, theirs = (fresh(model.network, prompt, found.ids) for model in pair)
    numbers = uniforms(choice.seed, prompt, 0, len(found.ids), OWN)
    tokens, rounds, left, accepted = [], [], 0, 0
    for place, (target, draft) in enumerate(zip(ours, theirs, strict=True)):
        p, q = (reference.processed(row, choice.processing) for row in (target, draft))
        top, proposal = int(target.argmax()), int(draft.argmax())
        own = top if choice.processing is None else int(np.searchsorted(p.cumsum(), numbers[place], side="right"))
        better = reference.rank(target, proposal) - 1
        kept = left > 0 and reference.accepted(p, q, top, proposal, better)[rule] == 1
        tokens.append(proposal if kept else own)
        accepted += kept
        left -= 1
        if not kept or place == len(found.ids) - 1:
            rounds += [(gamma, accepted)] if place else []
            left, accepted = gamma, 0
    return tokens, rounds


@each("choice", CHOICES)
@each("rule", LOSSY)
def test_a_lossy_text_is_what_its_rule_writes_token_by_token(pair: tuple[Model, Model], rule: str, choice: Choice) -> None:
    departed = 0
    for number, gamma in enumerate([1, 2, 5]):
        found = Speculation(*pair, parse_rule(rule), gamma, choice).decode(prompt(number), NEW_TOKENS)
        tokens, rounds = policy(pair, rule, gamma, choice, prompt(number), found)
        assert found.ids.tolist() == tokens
        assert list(zip(found.drafted.tolist(), found.accepted.tolist(), strict=True)) == rounds
        departed += found.ids.tolist() != Plain(pair[0], choice).decode(prompt(number), NEW_TOKENS).ids.tolist()
    assert departed > 0


@each("choice", CHOICES)
@each("rule", LOSSY)
def test_regret_is_the_gap_to_the_top_token(pair: tuple[Model, Model], rule: str, choice: Choice) -> None:
    engine = Speculation(*pair, parse_rule(rule), 4, choice)
    found, plain = (engine.decode(prompt(0), NEW_TOKENS, regret=regret) for regret in (True, False))
    assert found.regret is not None
    rows = fresh(pair[0].network, prompt(0), found.ids)
    gaps = rows.max(1) - rows[np.arange(len(rows)), found.ids]
    assert found.regret == pytest.approx(gaps, abs=1e-4)
    assert (found.regret >= 0).all()
    assert found.regret.max() > 0
    assert plain.regret is None
    assert plain.ids.tolist() == found.ids.tolist()


@each("number", range(3))
def test_a_lossy_rule_at_its_strictest_is_strict(pair: tuple[Model, Model], number: int) -> None:
    rules = ("strict", "additive_0", "multiplicative_1", "top_m_1", "trtllm_1_1")
    strict, *others = (Speculation(*pair, parse_rule(rule), 3).decode(prompt(number), NEW_TOKENS) for rule in rules)
    for rule, found in zip(rules[1:], others, strict=True):
        for field in ("ids", "drafted", "accepted"):
            assert getattr(found, field).tolist() == getattr(strict, field).tolist(), rule


def test_no_rule_keeps_a_token_that_the_target_does_not_have(pair: tuple[Model, Model]) -> None:
    """A draft with more ids, some of them its favourites, under rules that keep tokens of probability 0."""
    target, _ = pair
    network = llama(seed=7, vocabulary=280)
    with torch.no_grad():
        network.lm_head.weight[260:] = network.lm_head.weight[:20] * 3
    draft = DraftModel("draft", network, "model", "d")
    for rule in ("additive_1", "multiplicative_0", "top_m_280", "typical_0_0", "strict"):
        found = Speculation(target, draft, parse_rule(rule), 4, Choice(width=280)).decode(prompt(1), NEW_TOKENS)
        assert found.ids.max() < 260
        assert found.accepted.min() < 4
