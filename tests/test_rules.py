"""Acceptance rules: each against its formula on whole distributions, by property, and as users spell them."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaprof.rules import (
    GREEDY,
    NOT_MODELLED,
    RULES,
    SAMPLED,
    BoundRule,
    Parameter,
    parse_rule,
)
from tests.loops import each

Array = np.ndarray[Any, Any]
LOSSY = [name for name, rule in RULES.items() if rule.lossy and GREEDY in rule.policies]  # those without chance


@dataclasses.dataclass(frozen=True)
class Position:
    """One position in full: `raw` distributions of both models, p and q after truncation, the emitted token."""

    raw_p: Array
    raw_q: Array
    p: Array
    q: Array
    token: int
    greedy: bool

    @property
    def proposal(self) -> int:
        """The draft's top token, the first where several are."""
        return int(np.argmax(self.q))


def ranking(values: Array) -> list[int]:
    """Token ids from the most to the least probable; of equal ones the lower id first."""
    return sorted(range(len(values)), key=lambda token: (-values[token], token))


def entropy(p: Array) -> float:
    """H(p) in nats, 0 log 0 = 0."""
    return -sum(float(value) * float(np.log(value)) for value in p if value > 0)


def columns(positions: list[Position]) -> dict[str, Array]:
    """What the log would hold of these positions, in float64."""
    rows = [
        {
            "token": one.token,
            "greedy": one.greedy,
            "target_top": int(np.argmax(one.p)),
            "draft_top": one.proposal,
            "target_top_prob": one.p.max(),
            "target_entropy": entropy(one.p),
            "target_token_prob": one.p[one.token],
            "draft_token_prob": one.q[one.token],
            "target_prob_of_draft_top": one.p[one.proposal],
            "target_rank_of_draft_top": 1 + ranking(one.raw_p).index(one.proposal),
            "draft_rank_of_token": 1 + ranking(one.raw_q).index(one.token),
            "overlap": sum(min(a, b) for a, b in zip(one.p, one.q, strict=True)),
        }
        for one in positions
    ]
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


# The formula of each rule on one whole position.
DIRECT: dict[str, Callable[..., float]] = {
    "strict": lambda one: one.proposal == (one.token if one.greedy else int(np.argmax(one.p))),
    "lossless": lambda one: 1 - 0.5 * float(np.abs(one.p - one.q).sum()),
    "block": lambda one: 1 - 0.5 * float(np.abs(one.p - one.q).sum()),
    "one_hot": lambda one: one.p[one.proposal],
    "additive": lambda one, epsilon: one.p[one.proposal] >= max(one.p) - epsilon,
    "multiplicative": lambda one, factor: one.p[one.proposal] >= factor * max(one.p),
    "top_m": lambda one, m: one.proposal in ranking(one.raw_p)[:m],
    "typical": lambda one, epsilon, delta: (
        one.p[one.proposal] == max(one.p) or one.p[one.proposal] >= min(epsilon, delta * float(np.exp(-entropy(one.p))))
    ),
    "trtllm": lambda one, k, delta: one.proposal in ranking(one.raw_p)[:k] and one.p[one.proposal] >= max(one.p) - delta,
    "sglang": lambda one, single, acc: (  # of d, by the branches of SGLang's kernel
        0.0
        if not one.p[one.proposal]
        else 1.0
        if one.p[one.proposal] >= single
        else min(1.0, one.p[one.proposal] / max(acc, 1e-9))
    ),
    "ensemble": lambda one, weight: sum(  # over all d that the draft may draw
        q * min(1.0, 1 - weight + weight * p / q) for p, q in zip(one.p, one.q, strict=True) if q
    ),
    "tree": lambda one, width: one.token in ranking(one.raw_q)[:width],
}


def truncated(values: Array, most: int) -> Array:
    """The `most` most probable tokens, renormalised; the others have probability 0."""
    kept = np.where(np.isin(np.arange(len(values)), ranking(values)[:most]), values, 0.0)
    return kept / kept.sum()


def drawn_positions(count: int = 400, seed: int = 0) -> list[Position]:
    """Positions over 2 to 6 tokens: flat and peaked distributions, ties, a draft near the target, truncation, any token."""
    rng = np.random.default_rng(seed)
    found = []
    for number in range(count):
        size = int(rng.integers(2, 7))
        raw_p, raw_q = rng.dirichlet(np.full(size, (1.0, 0.2, 20.0)[number % 3]), 2)
        if number % 4 == 1:  # ties: multiples of 1/8 are exact, so thresholds are met with equality
            raw_p, raw_q = rng.multinomial(8, np.full(size, 1 / size), 2) / 8
        if number % 5 == 2:
            raw_q = 0.9 * raw_p + 0.1 * raw_q
        p, q = (truncated(raw, int(rng.integers(1, size + 1))) if number % 7 >= 5 else raw for raw in (raw_p, raw_q))
        greedy = bool(rng.random() < 0.3)
        token = int(np.argmax(p)) if greedy else int(rng.integers(size))
        found.append(Position(raw_p, raw_q, p, q, token, greedy))
    return found


EDGES = [  # exact binary fractions, in which d is token 1 and the emitted token is 0, then 1
    Position(np.array(p), np.array(q), np.array(p), np.array(q), token, False)
    for p, q in (
        ([0.5, 0.25, 0.25], [0.25, 0.5, 0.25]),  # 0.25 below the top, half of it, and rank 2 of two equal ones
        ([0.25, 0.25, 0.5], [0.0, 1.0, 0.0]),  # the same, and rank 3
        ([0.25, 0.25, 0.25, 0.25], [0.0, 1.0, 0.0, 0.0]),  # as probable as the top, and as exp(-H)
        ([1.0, 0.0], [0.0, 1.0]),  # impossible
        ([0.0, 1.0], [0.25, 0.75]),  # certain
    )
    for token in (0, 1)
]
POSITIONS = [*drawn_positions(), *EDGES]


def values_of(parameter: Parameter) -> list[float]:
    """Both ends of a parameter, and values between them."""
    if parameter.whole:
        return [int(parameter.low), 2, 3, int(parameter.high)]
    return [parameter.low, 0.09, 0.25, 0.5, parameter.high]


def every_rule() -> Iterator[BoundRule]:
    """Every rule with several values of its parameters."""
    for name, rule in RULES.items():
        for values in itertools.product(*map(values_of, rule.parameters)):
            yield parse_rule({name: list(values)})


ALL = list(every_rule())
by_id = each("rule", ALL, ids=lambda rule: rule.id)


@by_id
def test_acceptance_from_columns_is_that_of_the_whole_distributions(rule: BoundRule) -> None:
    found = rule.accept(columns(POSITIONS))
    direct = [float(DIRECT[rule.name](one, **rule.arguments)) for one in POSITIONS]
    assert found == pytest.approx(np.array(direct), abs=1e-12)


@by_id
def test_float32_columns_of_a_log_do_not_change_what_is_exact_in_them(rule: BoundRule) -> None:
    data = columns(EDGES)
    stored = {name: column.astype(np.float32) if column.dtype == np.float64 else column for name, column in data.items()}
    assert rule.accept(stored).tolist() == rule.accept(data).tolist()


@each(
    ("specification", "accepts"),
    [
        ("strict", [0, 0, 0, 0, 1]),
        ("lossless", [0.75, 0.25, 0.25, 0, 0.75]),
        ("one_hot", [0.25, 0.25, 0.25, 0, 1]),
        ("additive:0.25", [1, 1, 1, 0, 1]),
        ("additive:0.24999999999", [0, 0, 1, 0, 1]),
        ("multiplicative:0.5", [1, 1, 1, 0, 1]),
        ("multiplicative:0.50000000001", [0, 0, 1, 0, 1]),
        ("multiplicative:0", [1, 1, 1, 1, 1]),
        ("top_m:1", [0, 0, 0, 0, 1]),
        ("top_m:2", [1, 0, 1, 1, 1]),
        ("typical:0.25,1", [1, 1, 1, 0, 1]),
        ("typical:1,1", [0, 0, 1, 0, 1]),
        ("trtllm:2,0.25", [1, 0, 1, 0, 1]),
        ("trtllm:3,0.25", [1, 1, 1, 0, 1]),
        ("sglang:1,1", [0.25, 0.25, 0.25, 0, 1]),
        ("sglang:0.25,1", [1, 1, 1, 0, 1]),
        ("sglang:0,1", [1, 1, 1, 0, 1]),
        ("sglang:1,0.5", [0.5, 0.5, 0.5, 0, 1]),
        ("sglang:1,0", [1, 1, 1, 0, 1]),
        ("ensemble:1", [0.75, 0.25, 0.25, 0, 0.75]),
        ("ensemble:0.5", [0.875, 0.625, 0.625, 0.5, 0.875]),
    ],
)
def test_acceptance_by_hand(specification: str, accepts: list[float]) -> None:
    """It does not depend on the emitted token."""
    assert parse_rule(specification).accept(columns(EDGES)).tolist() == np.repeat(accepts, 2).tolist()


@each(
    ("single", "acc", "p", "kept"),
    [
        (1, 1, 0.298, 0.298),
        (0.3, 1, 0.117, 0.117),
        (1, 0.4, 0.307, 0.7675),
        (1, 0.4, 0.044, 0.11),
        (0.5, 0.25, 0.266, 1),
        (0.5, 0.25, 0.068, 0.272),
        (0.9, 0.6, 0.347, 0.57834),
        (0, 1, 0.07, 1),
        (0, 1, 0, 0),
        (1, 0, 0.24, 1),
        (1, 0, 0, 0),
    ],
)
def test_thresholds_of_sglang_keep_what_its_own_kernel_keeps(single: float, acc: float, p: float, kept: float) -> None:
    """`kept`: share of 200,000 coins with which TreeSpeculativeSamplingTargetOnly (0.5.23, compiled for a CPU) accepted."""
    log = {"target_prob_of_draft_top": np.array([p], dtype=np.float32)}
    assert parse_rule({"sglang": [single, acc]}).accept(log) == pytest.approx([kept], abs=1e-5)


def test_a_tree_is_judged_by_the_emitted_token() -> None:
    assert parse_rule("tree:1").accept(columns(EDGES)).tolist() == [0, 1] * 5
    assert parse_rule("tree:2").accept(columns(EDGES)).tolist() == [1] * 10


def test_strict_compares_with_the_emitted_token_on_greedy_text_and_with_the_top_token_elsewhere() -> None:
    """They differ where rounding made the target choose another token than the scoring pass finds on top."""
    p, q = np.array([0.5, 0.5]), np.array([0.25, 0.75])
    both = columns([Position(p, q, p, q, 1, greedy) for greedy in (True, False)])
    assert parse_rule("strict").accept(both).tolist() == [1, 0]


@each("size", range(2, 12))
def test_typical_never_rejects_a_top_token_for_rounding(size: int) -> None:
    """On a flat distribution every token is exactly at the threshold exp(-H) = 1 / V."""
    p = np.full(size, 1 / size)
    q = (np.arange(size) == size - 1).astype(float)
    data = columns([Position(p, q, p, q, 0, False)])
    stored = {name: column.astype(np.float32) if column.dtype == np.float64 else column for name, column in data.items()}
    for one in (data, stored):
        assert parse_rule("typical:1,1").accept(one).tolist() == [1]


@st.composite
def positions(draw: st.DrawFn) -> Position:
    """One position of few tokens with ties, zeros and truncation."""
    size = draw(st.integers(1, 6))
    weights = st.lists(st.integers(0, 8), min_size=size, max_size=size).filter(any)
    raw_p, raw_q = (np.array(draw(weights), dtype=float) for _ in range(2))
    raw_p, raw_q = raw_p / raw_p.sum(), raw_q / raw_q.sum()
    p, q = (truncated(raw, draw(st.integers(1, size))) for raw in (raw_p, raw_q))
    greedy = draw(st.booleans())
    token = int(np.argmax(p)) if greedy else draw(st.integers(0, size - 1))
    return Position(raw_p, raw_q, p, q, token, greedy)


def a_value(parameter: Parameter) -> st.SearchStrategy[float]:
    if parameter.whole:
        return st.integers(int(parameter.low), 8) | st.just(int(parameter.high))
    return st.floats(parameter.low, parameter.high) | st.integers(0, 8).map(lambda eighths: eighths / 8)


@pytest.mark.parametrize(
    ("name", "index"), [(name, index) for name, rule in RULES.items() for index in range(len(rule.parameters))]
)
@given(st.data())
def test_a_relaxed_parameter_never_accepts_less(name: str, index: int, data: Any) -> None:
    parameters = RULES[name].parameters
    values = [data.draw(a_value(parameter)) for parameter in parameters]
    ordered = sorted([values[index], data.draw(a_value(parameters[index]))])
    tight, loose = ordered if parameters[index].relaxes > 0 else reversed(ordered)
    log = columns(data.draw(st.lists(positions(), min_size=1, max_size=6)))
    less, more = (parse_rule({name: [*values[:index], value, *values[index + 1 :]]}).accept(log) for value in (tight, loose))
    assert (less <= more).all()


@pytest.mark.parametrize("name", LOSSY)
@given(st.data())
def test_a_lossy_rule_accepts_wherever_strict_does(name: str, data: Any) -> None:
    rule = parse_rule({name: [data.draw(a_value(parameter)) for parameter in RULES[name].parameters]})
    log = columns(data.draw(st.lists(positions(), min_size=1, max_size=6)))
    assert (rule.accept(log) >= parse_rule("strict").accept(log)).all()


DRAWN = [rule for rule in ALL if not rule.rule.lossy and rule.rule.policies == (SAMPLED,)]


@each("rule", DRAWN, ids=lambda rule: rule.id)
def test_what_happens_to_drawn_tokens_is_on_average_the_acceptance(rule: BoundRule) -> None:
    """E[a_t] = beta_t, x_t drawn from p: summed over the whole vocabulary."""
    for one in POSITIONS:
        log = columns([dataclasses.replace(one, token=token, greedy=False) for token in range(len(one.p))])
        emitted = rule.emitted(log)
        assert float(one.p @ emitted) == pytest.approx(rule.accept(log)[0], abs=1e-12)


def test_what_happens_to_greedy_tokens_is_their_acceptance() -> None:
    rule = parse_rule("strict")
    log = columns([dataclasses.replace(one, token=int(np.argmax(one.p)), greedy=True) for one in POSITIONS])
    assert np.array_equal(rule.accept(log), rule.emitted(log))


def test_emitted_by_hand() -> None:
    """min(1, q(x_t) / p(x_t)): the edges, tokens 0 and 1 each; 0 for a token that p cannot emit."""
    log = columns(EDGES)
    assert parse_rule("lossless").emitted(log).tolist() == [0.5, 1, 0, 1, 0, 1, 0, 0, 0, 0.75]
    for name in ("one_hot", "strict"):
        assert parse_rule(name).emitted(log).tolist() == [0, 1] * 5


def without_distribution(log: dict[str, Array]) -> dict[str, Array]:
    """Columns of a draft that only names a token, as they come from a log."""
    nothing = np.full(len(log["token"]), np.nan)
    return log | dict.fromkeys(["overlap", "draft_token_prob"], nothing) | {"draft_rank_of_token": np.full(len(nothing), -1)}


@each("rule", [rule for rule in ALL if rule.name != "tree"], ids=lambda rule: rule.id)
def test_a_draft_without_a_distribution_is_a_point_mass(rule: BoundRule) -> None:
    """On text that p can emit, it is treated as a draft whose distribution is written out: 1 at its proposal."""
    possible = [one for one in POSITIONS if one.p[one.token] > 0]
    masses = [(np.arange(len(one.q)) == one.proposal).astype(float) for one in possible]
    written = columns([dataclasses.replace(one, raw_q=mass, q=mass) for one, mass in zip(possible, masses, strict=True)])
    silent = without_distribution(columns(possible))
    assert rule.accept(silent) == pytest.approx(rule.accept(written), abs=1e-12)
    if not rule.rule.lossy:
        assert np.array_equal(rule.emitted(silent), rule.emitted(written))


@each(
    "rule",
    [rule for rule in ALL if rule.rule.policies != (SAMPLED,)],
    ids=lambda rule: rule.id,
)
def test_without_a_proposal_nothing_is_accepted(rule: BoundRule) -> None:
    """Nulls of a log: no token, no rank, no probability. (What is drawn by lot has no probability then.)"""
    log = without_distribution(columns(POSITIONS))
    nothing = log["overlap"]
    missing = {name: np.full(len(nothing), -1) for name in ("draft_top", "target_rank_of_draft_top")}
    log |= missing | {"target_prob_of_draft_top": nothing}
    assert not rule.accept(log).any()
    assert rule.rule.lossy or not np.any(rule.emitted(log))


@by_id
def test_an_id_is_read_back_and_safe_in_sql(rule: BoundRule) -> None:
    assert parse_rule(rule.id) == rule
    assert re.fullmatch(r"[a-z][a-z0-9_]*", rule.id)
    assert parse_rule(rule) is rule


@each(
    ("specification", "expected"),
    [
        ("strict", "strict"),
        ("additive:0.1", "additive_0p1"),
        ({"additive": 0.1}, "additive_0p1"),
        ({"additive": {"epsilon": 0.1}}, "additive_0p1"),
        ("additive:-0.0", "additive_0"),
        ("typical: 0.09, 0.3", "typical_0p09_0p3"),
        ({"typical": {"delta": 0.3, "epsilon": 0.09}}, "typical_0p09_0p3"),
        ("top_m_1000000", "top_m_1000000"),
    ],
)
def test_every_spelling_of_a_rule(specification: object, expected: str) -> None:
    assert parse_rule(specification).id == expected


NO_RULE = ["medusa", "", "Strict", "additive:x", 3, {"strict": {}, "lossless": {}}, *NOT_MODELLED]


@each("specification", NO_RULE)
def test_what_is_no_rule_is_told_what_is(specification: object) -> None:
    with pytest.raises(ValueError, match=r"known: .*typical:epsilon,delta") as caught:
        parse_rule(specification)
    assert all(name in str(caught.value) for name in RULES)
    assert ("is not supported" in str(caught.value)) == (specification in [*NOT_MODELLED])


@each(
    ("specification", "says"),
    [
        ("additive", "write additive:epsilon"),
        ("typical:0.1,0.2,0.3", "not 3: write typical:epsilon,delta"),
        ({"typical": {"epsilon": 0.1, "delta": 0.1, "gamma": 1}}, "has the parameters epsilon, delta"),
    ],
    ids=str,
)
def test_missing_and_extra_parameters_are_named(specification: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_rule(specification)


def test_values_that_a_parameter_cannot_have_are_refused() -> None:
    for name, rule in RULES.items():
        highest = {item.name: item.high for item in rule.parameters}
        for one in rule.parameters:
            for wrong in ["x", float("nan"), one.low - 1, one.high + 1, *([1.5] if one.whole else [])]:
                with pytest.raises(ValueError, match=f"{name}: {one.name} must be|is not a number; known"):
                    parse_rule({name: highest | {one.name: wrong}})
            for end in (one.low, one.high):
                assert parse_rule({name: highest | {one.name: end}}).arguments[one.name] == end
