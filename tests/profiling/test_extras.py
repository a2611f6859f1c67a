"""What a scoring pass measures on request: thresholds against whole distributions, and what they certify."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from alphaprof.profiling.models.draft import Arrays
from alphaprof.profiling.models.load import Model
from alphaprof.profiling.models.processing import Processing
from alphaprof.profiling.scoring import statistics
from alphaprof.profiling.scoring.scorer import TOP, Extras, Scorer, by_document, position_table
from alphaprof.profiling.scoring.statistics import ProcessedLogits, top_probs
from alphaprof.profiling.texts.continuations import Continuation, generate
from alphaprof.profiling.texts.corpus import Document
from alphaprof.rules import BoundRule, parse_rule
from alphaprof.run.schema import LogRules
from alphaprof.theory.certificates import ACCEPTED, Divergence, Target, certify, draft_width
from tests import reference
from tests.profiling.test_scoring import continuation, logits_alone, model
from tests.reference import DIVERGENCES, LOGGED_RULES, threshold
from tests.tiny import llama, noisy

models = pytest.mark.models
Array = np.ndarray[Any, Any]
TOKENS = 260
RULES = (
    "strict",
    "additive_0",
    "additive_0p1",
    "multiplicative_0p3",
    "top_m_3",
    "typical_0p09_0p3",
    "trtllm_10_0p6",
    "tree_1",
    "tree_4",
)


class EveryDivergence(Extras):
    """Thresholds for total variation beside those that a log has."""

    def thresholds(self, top: Array, entropy: Array, vocabulary: int) -> Arrays:
        columns = super().thresholds(top, entropy, vocabulary)
        known = Target(top, vocabulary, entropy)
        return columns | {column(rule.id, "tv"): certify(rule, known, "tv").value for rule in self.certified}


def every(kind: type[Extras] = Extras) -> Extras:
    """Thresholds of all rules above."""
    return kind(tuple(parse_rule(rule) for rule in RULES))


def column(rule: str, divergence: Divergence = "kl") -> str:
    """Where a threshold stands."""
    return f"threshold_{rule}" if divergence == "kl" else f"threshold_{rule}_{divergence}"


# What a profile asks for.


def test_certificates_are_measured_where_asked_for_the_rules_that_have_an_accepted_set() -> None:
    assert {parse_rule(rule).name for rule in RULES} == set(ACCEPTED)
    assert Extras.of(LOGGED_RULES, certificates=False) == Extras(drawn=("lossless",))
    rules = ["lossless", "strict", "one_hot", "additive_0p1", "tree_2"]
    held = Extras.of(rules, certificates=True).log_rules(rules)
    assert held == LogRules(tuple(rules), ("strict", "additive_0p1", "tree_2"))


def test_thresholds_by_hand() -> None:
    """In the cheapest rejection the draft gives the tokens that change places what they have on average."""
    top = np.array([[0.5, 0.25, 0.125, 0.125], [1.0, 0.0, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]], dtype=np.float32)
    entropy = np.array([1.75 * math.log(2), 0.0, math.log(4)], dtype=np.float32)
    rules = ("strict", "top_m_2", "top_m_4", "additive_0p3", "tree_2")
    found = Extras(tuple(parse_rule(rule) for rule in rules)).thresholds(top, entropy, 4)
    first_two = 0.5 * math.log(0.5 / 0.375) + 0.25 * math.log(0.25 / 0.375)
    first_and_third = 0.5 * math.log(0.5 / 0.3125) + 0.125 * math.log(0.125 / 0.3125)
    all_three = 0.5 * math.log(12 / 7) + 0.25 * math.log(6 / 7) + 0.125 * math.log(3 / 7)  # 7/24 each
    expected = {
        "threshold_strict": [first_two, math.log(2), 0.0],
        "threshold_top_m_2": [first_and_third, math.log(2), 0.0],
        "threshold_top_m_4": [math.inf, math.inf, math.inf],
        "threshold_additive_0p3": [first_and_third, math.log(2), math.inf],  # 1/2 and 1/4; the first; all
        "threshold_tree_2": [all_three, math.log(3), 0.0],
        "target_top_10_prob": [1.0, 1.0, 1.0],
        "thresholds_exact": [True, True, True],
    }
    assert list(found) == ["target_top_10_prob", *(f"threshold_{rule}" for rule in rules), "thresholds_exact"]
    for name, values in expected.items():
        assert found[name].tolist() == pytest.approx(values, abs=1e-6), name
        assert found[name].dtype == (bool if name == "thresholds_exact" else np.float32)


# Against whole distributions.

COUNTS: dict[str, Callable[..., int]] = {  # how many tokens of p a rule accepts
    "strict": lambda p: 1,
    "tree": lambda p, width: 1,
    "additive": lambda p, epsilon: int((p >= p.max() - epsilon).sum()),
    "multiplicative": lambda p, factor: int((p >= factor * p.max()).sum()),
    "top_m": lambda p, m: min(m, len(p)),
    "typical": lambda p, epsilon, delta: int((p >= typical_floor(p, epsilon, delta)).sum()),
    "trtllm": lambda p, k, delta: min(k, int((p >= p.max() - delta).sum())),
}
FLOORS: dict[str, Callable[..., float]] = {  # from which probability on
    "additive": lambda p, epsilon: p.max() - epsilon,
    "multiplicative": lambda p, factor: factor * p.max(),
    "typical": lambda p, epsilon, delta: typical_floor(p, epsilon, delta),
    "trtllm": lambda p, k, delta: p.max() - delta,
}


def typical_floor(p: Array, epsilon: float, delta: float) -> float:
    """The least probability that typical acceptance keeps."""
    entropy = -sum(float(value) * math.log(value) for value in p if value > 0)
    return min(epsilon, delta * math.exp(-entropy), float(p.max()))


def clear(rule: BoundRule, p: Array) -> bool:
    """Whether float32 cannot mistake which tokens of p the rule accepts: none but the top one is near its floor."""
    if rule.name not in FLOORS:
        return True
    floor = FLOORS[rule.name](p, **rule.arguments)
    return bool(np.abs(np.delete(p, p.argmax()) - floor).min() > 1e-7 + 1e-5 * abs(floor))


def laws(target: Model, item: Continuation) -> Array:
    """The target's distributions [positions, V] in float64, from the full forward of the document alone."""
    return np.stack([reference.processed(row, item.document.processing) for row in logits_alone(target.network, item)])


def batch_of(settings: Processing | None, ids: int = 250) -> list[Continuation]:
    """Documents of random tokens; nobody claims that the target wrote them greedily."""
    found = []
    for number, (prompt, length) in enumerate(((5, 20), (1, 12), (30, 9))):
        item = continuation(number, prompt, length, processing=settings)
        item.document.prompt[:], item.ids[:] = item.document.prompt % ids, item.ids % ids
        found.append(item)
    return found


@pytest.fixture(scope="module")
def target() -> Model:
    return model("target", llama())


@pytest.fixture(scope="module")
def small() -> Model:
    """A target with fewer tokens than thresholds look at."""
    return model("target", llama(vocabulary=50, eos_token_id=48, pad_token_id=49))


def told(rule: BoundRule, p: Array) -> bool:
    """Whether the TOP largest probabilities hold all accepted tokens and those that are cheapest to get ahead of them."""
    if len(p) <= TOP or (rule.name in FLOORS and FLOORS[rule.name](p, **rule.arguments) <= 0):
        return True
    return COUNTS[rule.name](p, **rule.arguments) + draft_width(rule) <= TOP or np.sort(p)[-TOP] == 0


def scored(target: Model, batch: Sequence[Continuation], extras: Extras, *drafts: Any) -> dict[str, Arrays]:
    """Columns by draft, taken together from several chunks."""
    scorer = Scorer(target, drafts, target.vocabulary, extras=extras)
    scorer.head_rows, scorer.statistics_rows = 7, 3
    return scorer.score(batch)


FLAT = Processing(1.4)
SETTINGS = [None, Processing(0.4), Processing(1.8, 0, 0.9), Processing(1.0, 5), Processing(1.5, 30, 0.8, 0.1), FLAT]


@models
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("name", ["target", "small"])
def test_thresholds_are_those_of_whole_distributions(
    name: str, settings: Processing | None, request: pytest.FixtureRequest
) -> None:
    """Of every rule and divergence, whether the vocabulary is larger than what is looked at or not; lower bounds else."""
    chosen: Model = request.getfixturevalue(name)
    batch = batch_of(settings, min(250, chosen.vocabulary))
    found = scored(chosen, batch, every(EveryDivergence), model("draft", noisy(chosen.network, 0.05)))["draft"]
    whole = np.concatenate([laws(chosen, item) for item in batch])
    assert found["target_top_10_prob"] == pytest.approx(-np.sort(-whole)[:, :10].sum(1), abs=2e-5)
    rules = [parse_rule(rule) for rule in RULES]
    rows = [row for row, p in enumerate(whole) if all(clear(rule, p) for rule in rules)]
    assert len(rows) > 0.9 * len(whole)
    for rule in rules:
        sure = np.array([told(rule, whole[row]) for row in rows])
        counts = [COUNTS[rule.name](whole[row], **rule.arguments) for row in rows]
        for divergence in DIVERGENCES:
            values = found[column(rule.id, divergence)][rows]
            pairs = zip(rows, counts, strict=True)
            expected = np.array([threshold(whole[row], count, draft_width(rule), divergence) for row, count in pairs])
            assert values[sure] == pytest.approx(expected[sure], abs=2e-5, rel=2e-5), (rule.id, divergence)
            assert (values <= expected * (1 + 2e-5) + 2e-5).all(), (rule.id, divergence)
    assert found["thresholds_exact"][rows].tolist() == [all(told(rule, whole[row]) for rule in rules) for row in rows]


@models
def test_without_a_request_nothing_is_measured_beyond_the_columns_of_every_log(target: Model) -> None:
    draft = model("draft", noisy(target.network, 0.05))
    plain = scored(target, batch_of(None), Extras(), draft)["draft"]
    more = scored(target, batch_of(None), Extras.of(RULES, certificates=True), draft)["draft"]
    assert set(more) - set(plain) == {"target_top_10_prob", "thresholds_exact", *map(column, RULES)}
    assert all(np.array_equal(more[name], values) for name, values in plain.items())


# What thresholds promise.


def own_texts(target: Model, length: int) -> list[Continuation]:
    """What the target writes greedily."""
    documents = [
        Document(number, "a", None, 0, number, ids, None, False, length, "greedy", True)
        for number, ids in enumerate(np.random.default_rng(0).integers(0, 250, (6, 8)).astype(np.int32))
    ]
    return generate(target, documents, TOKENS)


def distances(table: pd.DataFrame) -> dict[Divergence, Any]:
    """How far the draft is from the target, by divergence."""
    return {"kl": table["kl_target_draft"], "tv": 1 - table["overlap"]}


@models
@pytest.mark.parametrize("settings", [None, Processing(1.0, 20), Processing(0.6, 0, 0.95)], ids=str)
def test_no_draft_is_rejected_within_its_threshold(target: Model, settings: Processing | None) -> None:
    """Drafts from nearly the target to independent of it, every rule, every divergence; trees on the target's own text,
    whose tokens are its top ones. And many positions are certified, and many rejected.
    """
    own = own_texts(target, 60)
    batch = own if settings is None else [continuation(number, 6, 60, processing=settings) for number in range(6)]
    noise = {"nearest": 1e-4, "near": 1e-3, "close": 3e-3, "apart": 0.01, "far": 0.03, "farther": 0.1}
    drafts = [model(name, noisy(target.network, scale)) for name, scale in noise.items()]
    drafts += [model("other", llama(seed=11)), model("flat", noisy(llama(seed=12), 0.5))]
    found = scored(target, batch, every(EveryDivergence), *drafts)
    certified = {(rule, divergence): 0 for rule in RULES for divergence in DIVERGENCES}
    rejected = dict.fromkeys(RULES, 0)
    for draft, columns in found.items():
        table = position_table(batch, by_document(batch, columns), LogRules(RULES), draft).to_pandas()
        for rule in RULES:
            if rule.startswith("tree") and settings is not None:
                continue
            refused = (table[f"accept_{rule}"] < 1).to_numpy()
            rejected[rule] += int(refused.sum())
            for divergence, distance in distances(table).items():
                within = distance.to_numpy() + 1e-5 < columns[column(rule, divergence)]
                assert not (within & refused).any(), (draft, rule, divergence)
                certified[rule, divergence] += int(within.sum())
    assert settings is not None or np.array_equal(found["near"]["target_top"], found["near"]["token"])
    for (rule, divergence), count in certified.items():
        if settings is None or not rule.startswith("tree"):
            assert count > 300, (rule, divergence)
            assert rejected[rule] > 50, rule


def columns_of(target: torch.Tensor, draft: torch.Tensor, extras: Extras) -> dict[str, Array]:
    """All columns that rules read, and thresholds, from logits."""
    top = target.argmax(1)
    ours, theirs = statistics.columns(ProcessedLogits(target), [ProcessedLogits(draft)], top, [])
    both = ours | theirs | {"top_probs": top_probs(ProcessedLogits(target), ours, TOP)}
    arrays = {name: values.numpy() for name, values in both.items()} | {"token": top.numpy()}
    arrays["greedy"] = np.ones(len(target), dtype=bool)
    return arrays | extras.thresholds(arrays.pop("top_probs"), arrays["target_entropy"], target.shape[1])


def cheapest(p: Array, accepted: int) -> Array:
    """A draft that is rejected at next to no more than the threshold: the first rejected token a little above the level
    that it shares with the top tokens, as many as make that level highest.
    """
    order = np.argsort(-p)
    first = p[order[accepted]]
    levels = [(first + p[order[:count]].sum()) / (count + 1) for count in range(1, accepted + 1)]
    q = p.copy()
    q[order[: int(np.argmax(levels)) + 1]] = max(levels)
    q[order[accepted]] = max(levels) * (1 + 1e-3)
    return np.asarray(q / q.sum())


@pytest.mark.parametrize("rule", [rule for rule in RULES if not rule.startswith("tree_4")])
def test_no_larger_threshold_would_hold(rule: str) -> None:
    """A draft just beyond it is rejected."""
    rng, bound = np.random.default_rng(3), parse_rule(rule)
    laws = [p for p in rng.dirichlet(np.full(12, 0.6), 300) if p.min() > 1e-6]
    laws = [p for p in laws if clear(bound, p) and COUNTS[bound.name](p, **bound.arguments) < 12]
    drafts = [cheapest(p, COUNTS[bound.name](p, **bound.arguments)) for p in laws]
    found = columns_of(*(torch.tensor(np.log(values)).float() for values in (np.array(laws), np.array(drafts))), every())
    assert len(laws) > 100
    assert not bound.accept(found).any()
    beyond = found["kl_target_draft"] - found[column(rule)]
    assert beyond.min() > -1e-5
    assert beyond.max() < 2e-3
