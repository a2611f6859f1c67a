"""Step times of heads: the timed step is a real one, over a cache that is as it was before."""

from __future__ import annotations

import copy
import dataclasses
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import GenerationConfig, LlamaConfig, Qwen3Config

from alphaprof.config.options import MeasuredCosts
from alphaprof.costs.cost_model import measured_rows
from alphaprof.costs.roofline import Load, cache_moved, matrix_flops, weights_moved
from alphaprof.costs.shapes import ModelShape
from alphaprof.costs.steps import StepTable
from alphaprof.profiling.heads.attention import Reach
from alphaprof.profiling.heads.dflash import DFlash, Walked
from alphaprof.profiling.heads.dflash2 import DFlash2
from alphaprof.profiling.heads.draft import HeadDraft
from alphaprof.profiling.heads.dspark import DSpark
from alphaprof.profiling.heads.eagle import EMBEDDING, LM_HEAD, Eagle3, Wiring
from alphaprof.profiling.heads.mtp import ChainedModules, ReusedModule
from alphaprof.profiling.heads.network import HeadNetwork, MaskRows
from alphaprof.profiling.heads.p_eagle import PEagle
from alphaprof.profiling.heads.pard import Pard
from alphaprof.profiling.models.kinds import DraftModel
from alphaprof.profiling.models.load import Model
from alphaprof.profiling.scoring.statistics import ABSENT
from alphaprof.profiling.timing.latency import Subjects, measure
from alphaprof.profiling.timing.steppers import HeadStepper, read
from scripts.gpu.setting import random_head
from tests.profiling import modules
from tests.tiny import llama

pytestmark = [pytest.mark.models, pytest.mark.usefixtures("one_thread")]
VOCABULARY, LAYERS, LONGEST = 40, (1, 2), 4
TEXT = np.random.default_rng(0).integers(0, VOCABULARY, 30).astype(np.int32)


def target() -> Model:
    network = llama(seed=5, vocabulary=VOCABULARY, eos_token_id=None, pad_token_id=None, layers=3)
    network.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=0)
    return DraftModel("target", network.requires_grad_(False), "model", "t")


@torch.inference_mode()
def expected(network: HeadNetwork, ids: torch.Tensor, features: torch.Tensor, base: int) -> list[torch.Tensor]:
    """Logits of depths 1 and 2 of the round that begins at a base, of one pass over a text."""
    states = network.states(ids[None], torch.cat([features, features[-1:]])[None], 2, 0)
    return [network.logits(each[0, base : base + 1], depth)[0] for depth, each in enumerate(states, start=1)]


@torch.inference_mode()
def test_steps_are_those_of_a_round_and_leave_the_cache_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """First over n tokens after the context: depth 1 of the last of them, for each text. The step after one over one token:
    depth 2, if the text goes on with what was drafted. Again and again, in any order.
    """
    model = target()
    network = random_head(model, LAYERS, 20).network
    assert network.ids is not None
    ids, features = read(model, network, TEXT)
    context = len(features) - LONGEST
    drafted: list[torch.Tensor] = []
    logits = Eagle3.logits

    def spy(self: Eagle3, states: torch.Tensor, depth: int) -> torch.Tensor:
        drafted.append(logits(self, states, depth))
        return drafted[-1]

    steps = HeadStepper(network, ids, features, 3, LONGEST)
    assert steps.context == context == 25
    for tokens in (2, 1, 4, 2):
        whole = expected(network, ids, features, context + tokens - 1)[0]
        with monkeypatch.context() as patch:
            patch.setattr(Eagle3, "logits", spy)
            assert steps.first(tokens) > 0
        assert len(drafted) == 1
        torch.testing.assert_close(drafted.pop(), whole.expand(3, -1), atol=1e-4, rtol=1e-4)
    going_on = ids.clone()
    going_on[context + 1 + 1] = network.ids[expected(network, ids, features, context)[0].argmax()]
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(Eagle3, "logits", spy)
            assert steps.later() > 0
        second = expected(network, going_on, features, context)[1]
        torch.testing.assert_close(drafted[1], second.expand(3, -1), atol=1e-4, rtol=1e-4)
        drafted.clear()


MTP = {"ReusedModule": ReusedModule, "ChainedModules": ChainedModules}
MASKS = MaskRows(3, 3)


def at_work(name: str) -> tuple[Model, HeadNetwork]:
    """A random head of a kind that has a cache of its own, and its target. A chain has two modules."""
    if name in MTP:
        network = modules.target("glm4_moe", num_nextn_predict_layers=2, **modules.GLM)
        parts = modules.modules_of(network, 1 + (name == "ChainedModules"))
        return DraftModel("target", network, "model", "t"), MTP[name](parts, modules.VOCABULARY)
    model = target()
    config = LlamaConfig(**model.network.config.to_dict() | {"num_hidden_layers": 2})
    of_qwen = Qwen3Config(**config.to_dict() | {"model_type": "qwen3"})
    shared = {EMBEDDING: model.network.get_input_embeddings(), LM_HEAD: model.network.lm_head}
    block: dict[str, Any] = {
        "config": of_qwen,
        "layers": LAYERS,
        "masks": MASKS,
        "reach": (Reach(False),) * 2,
        "target": shared,
    }
    head: HeadNetwork = {
        "Eagle3": partial(Eagle3, config, Wiring(LAYERS), width=32, target=shared),
        "PEagle": partial(PEagle, config, Wiring(LAYERS), width=32, target=shared, masks=MASKS),
        "Pard": partial(Pard, config, MASKS),
        "DFlash": partial(DFlash, **block),
        "DFlash2": partial(DFlash2, **block, taps=3, group=8, rank=4, top=5, multiplier=0.9, cap=3.0),
        **{
            kind: partial(DSpark, **block | {"anchored": 1}, markov=kind, rank=4, confident="both")
            for kind in ("vanilla", "gated", "rnn")
        },
    }[name]()
    torch.manual_seed(4)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model, head.eval().requires_grad_(False)


WALKED = ["DFlash2", "vanilla", "gated", "rnn"]
CACHES = ["Eagle3", "PEagle", "Pard", "DFlash", *WALKED, *(pytest.param(name, marks=modules.NEEDS_MTP) for name in MTP)]


@torch.inference_mode()
@pytest.mark.parametrize("name", CACHES)
def test_steps_share_one_cache_and_compute_what_they_do_in_copies_of_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last bit, in any order; and nothing of 2 to 4 GB is copied before each step."""
    model, network = at_work(name)
    ids, features = read(model, network, TEXT % model.vocabulary)
    steps = HeadStepper(network, ids, features, 3, LONGEST)
    filled = copy.deepcopy(steps._cache, {id(network): network})

    def states(cache: Any, tokens: int) -> list[torch.Tensor]:
        state, token = steps.extended(cache, tokens)
        return [state, cache.deepen(token, state, 2)]

    for tokens in (2, 1, 4, 1, 3, 2):
        expected = states(copy.deepcopy(filled, {id(network): network}), tokens)
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "__deepcopy__", pytest.fail)
            assert min(steps.first(tokens), steps.later()) > 0
            found = states(steps.cache(), tokens)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def scores(head: Any, rows: torch.Tensor, path: list[int]) -> torch.Tensor:
    """Logits of the draft behind some tokens of a round, one number after the other: rows [depths, hidden] up to it."""
    row, token = rows[len(path) - 1], path[-1]
    if isinstance(head, DFlash2):
        logits = torch.tanh(head.head(row) * 0.9 / 3.0) * 3.0
        selector, best = head.candidate_selector, logits.argsort(descending=True)[:5].tolist()
        wanted = selector.predecessor_codebook[token] * selector.hidden_projection(row)
        found = torch.full_like(logits, ABSENT)
        for candidate in best:
            found[candidate] = logits[candidate] + selector.successor_codebook[candidate] @ wanted
        return found
    markov, memory = head.markov_head, torch.zeros(4)
    before = markov.markov_w1.weight[token]
    if markov.gate_proj is not None:
        before = torch.sigmoid(markov.gate_proj(torch.cat([row, before]))) * before
    for depth, each in enumerate(path if markov.joint_proj is not None else ()):
        out = markov.joint_proj(torch.cat([memory, markov.markov_w1.weight[each], rows[depth]]))
        memory = torch.sigmoid(out[:4]) * memory + (1 - torch.sigmoid(out[:4])) * torch.tanh(out[4:8])
        before = torch.tanh(out[8:])
    return head.head(row) + markov.markov_w2.weight @ before


@torch.inference_mode()
@pytest.mark.parametrize("name", WALKED)
def test_a_walk_reads_the_tokens_before_it_in_one_pass_and_at_work(name: str) -> None:
    """The text's tokens, or those that a round drafts; step by step, and as the formulas say."""
    model, head = at_work(name)
    assert isinstance(head, Walked)
    ids, features = read(model, head, TEXT)
    passes = {own: head.states(ids[None, :-1], features[None], 3, 0) for own in (False, True)}
    rows = torch.stack(list(DFlash.states(head, ids[None, :-1], features[None], 3, 0)), 2)[0]
    drafts: list[torch.Tensor] = []
    for depth in range(1, 4):
        texts, owns = next(passes[False])[0], (passes[True].send(drafts[-1][None]) if drafts else next(passes[True]))[0]
        for base in range(len(ids) - 4):
            one = head.logits(texts[base : base + 1], depth)[0]
            torch.testing.assert_close(one, scores(head, rows[base], ids[base + 1 : base + 1 + depth].tolist()))
        drafts.append(head.logits(owns, depth).argmax(1))
    for base in range(len(ids) - 4):
        cache, made = head.cache(), list[int]()
        state = cache.extend(ids[None, 1 : base + 2], features[None, : base + 1])
        every = head.at_once(cache)
        assert every is not None
        for depth in range(1, 4):
            state = cache.deepen(torch.tensor(made[-1:]), state, depth) if made else state
            logits = head.after(head.row_logits(every[:, depth - 1]), state)
            assert torch.equal(logits, head.logits(state, depth))
            made.append(int(logits.argmax()))
        assert made == [int(each[base]) for each in drafts]


@torch.inference_mode()
@modules.NEEDS_MTP
def test_a_later_step_of_a_chain_is_that_of_a_round_and_reads_no_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second module reads the base that was verified since its last step, and the new one."""
    model, chain = at_work("ChainedModules")
    ids, features = read(model, chain, TEXT % model.vocabulary)
    steps, seen = HeadStepper(chain, ids, features, 3, LONGEST), list[tuple[int, int]]()
    run = ChainedModules.run

    def spy(self: ChainedModules, module: int, tokens: torch.Tensor, *others: Any, **keys: Any) -> torch.Tensor:
        seen.append((module, tokens.shape[1]))
        return run(self, module, tokens, *others, **keys)

    monkeypatch.setattr(ChainedModules, "run", spy)
    steps.later()
    steps.later()
    assert seen == [(0, 1), (1, 2)] * 2


def measured(head: HeadDraft, **costs: Any) -> list[dict[str, Any]]:
    subjects = Subjects(head.target, [head], TEXT, LONGEST - 1)
    return measure(subjects, MeasuredCosts(repeats=3, **costs), lambda _: None).table.to_pylist()


def head(**changes: Any) -> HeadDraft:
    return dataclasses.replace(random_head(target(), LAYERS, depths=LONGEST - 1), **changes)


def test_every_step_of_a_round_is_timed_and_a_report_finds_it() -> None:
    rows = measured(head(), context=24, concurrency=[1, 2])
    mine = [(row["step"], row["tokens"], row["batch"], row["context"]) for row in rows if row["model"] == "head"]
    steps = [*(("draft_first", tokens) for tokens in range(1, LONGEST + 1)), ("draft", 1)]
    cells = [(*step, batch, 24) for batch in (1, 2) for step in steps]
    assert mine == [*cells, ("prefill", 16, 1, 0), ("prefill", 24, 1, 0)]
    times = StepTable(measured_rows(rows)).times("head", LONGEST - 1, 2, 24)
    assert times is not None
    assert list(times.draft_first) == [1, 2, 3, 4]
    assert min(first.ms for first in times.draft_first.values()) > 0
    assert times.draft.ms > 0


def test_a_head_of_a_short_context_is_timed_at_what_fits() -> None:
    rows = measured(head(context=20), context=24)
    mine = {(row["step"], row["context"]) for row in rows if row["model"] == "head" and row["step"] != "prefill"}
    assert mine == {("draft_first", 16), ("draft", 16)}
    prefills = [row["tokens"] for row in rows if (row["model"], row["step"]) == ("head", "prefill")]
    assert prefills == [16, 19]
    short = dataclasses.replace(head(), target=target())
    short.target.network.config.max_position_embeddings = 22
    rows = measured(short, context=24)
    assert {row["context"] for row in rows if row["step"] in ("draft_first", "decode")} == {18}


def single_head(model: Model) -> HeadNetwork:
    return random_head(model, LAYERS, None).network.changed(most=1)


def single_module(model: Model) -> HeadNetwork:
    return ChainedModules(modules.modules_of(model.network, 1), modules.VOCABULARY)


@pytest.mark.parametrize("made", [single_head, pytest.param(single_module, marks=modules.NEEDS_MTP)])
def test_a_head_of_a_single_depth_has_no_second_step_to_time(made: Any) -> None:
    """Its costs are found all the same: the step after the first, which no round runs, is given the first one's time."""
    network = modules.target("glm4_moe", num_nextn_predict_layers=1, **modules.GLM) if made is single_module else None
    model = target() if network is None else DraftModel("target", network, "model", "t")
    draft = HeadDraft("head", made(model), model, "mtp", "h", 1)
    options = MeasuredCosts(repeats=3, context=24, concurrency=[1])
    rows = measure(Subjects(model, [draft], TEXT % modules.VOCABULARY, 1), options, lambda _: None).table.to_pylist()
    steps = [(row["step"], row["tokens"]) for row in rows if row["model"] == "head" and row["step"] != "prefill"]
    assert steps == [("draft_first", 1), ("draft_first", 2), ("draft", 1)]
    times = StepTable(measured_rows(rows)).times("head", 1, 1, 24)
    assert times is not None
    assert min(times.draft.ms, *(first.ms for first in times.draft_first.values())) > 0


SHAPES: dict[str, tuple[int | None, dict[str, Any]]] = {
    "all ids": (None, {}),
    "the target's logits": (None, {}),
    "some ids": (20, {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24, "intermediate_size": 48}),
    "two layers": (12, {"num_hidden_layers": 2}),
}


def counted(work: Any) -> tuple[int, int]:
    """FLOPs of the matrix products of some work, and how many numbers of matrices it uses, by what torch runs."""
    used: dict[int, int] = {}

    class Watched(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.nn.functional.linear:
                used[id(args[1])] = args[1].numel()
            return function(*args, **kwargs or {})

    with Watched(), FlopCounterMode(display=False) as counter:
        work()
    products = counter.get_flop_counts()["Global"]
    return sum(count for name, count in products.items() if "mm" in str(name)), sum(used.values())


@torch.inference_mode()
@pytest.mark.parametrize("name", SHAPES)
def test_a_roofline_moves_and_computes_what_the_steps_do(name: str) -> None:
    """Matrix products of first steps over 1 and 3 tokens and of a later one, counted as torch runs them; the matrices that
    these use; and the keys and values that stay.
    """
    count, changes = SHAPES[name]
    model = target()
    network: Any = random_head(model, LAYERS, count, **changes).network
    if name == "the target's logits":
        network.lm_head = None
        network._target = {**network._target, LM_HEAD: model.network.lm_head}
    ids, features = read(model, network, TEXT)
    steps = HeadStepper(network, ids, features, 3, LONGEST)
    shape = network.shape()
    assert shape is not None
    for tokens in (1, 3):
        cache = steps.cache()
        products, parameters = counted(partial(steps.extended, cache, tokens))
        assert products == matrix_flops(shape, Load(tokens, 3))
        assert weights_moved(shape, Load(tokens, 3)) == 4 * parameters
    state, token = steps.extended(cache, 1)
    products, parameters = counted(lambda: network.logits(cache.deepen(token, state, 2), 2))
    assert products == matrix_flops(shape.later, Load(1, 3))
    assert weights_moved(shape.later, Load(1, 3)) == 4 * parameters
    kept = sum(full[:1, :, :7].numel() for pair in cache.keys.layers.values() for full in pair)
    assert cache_moved(shape, Load(1, 1, 7)) == 4 * kept
    assert shape.total_weight_bytes == 4 * sum(each.numel() for each in network.parameters())
    assert shape == ModelShape(**known_shape(head(network=network)))


def known_shape(draft: HeadDraft) -> dict[str, Any]:
    shape = draft.facts().shape
    assert shape is not None
    return shape


def reused() -> tuple[Model, HeadNetwork]:
    """A module with experts that is reused, and its target."""
    network = modules.target("glm4_moe", 0, num_nextn_predict_layers=1, **modules.GLM)
    network.config._experts_implementation = "eager"  # whose matrix products torch counts
    return DraftModel("target", network, "model", "t"), ReusedModule(modules.modules_of(network, 1, 0), modules.VOCABULARY)


@torch.inference_mode()
@modules.NEEDS_MTP
def test_the_shape_of_a_reused_module_is_that_of_its_matrix_products() -> None:
    """As torch runs them."""
    model, network = reused()
    ids, features = read(model, network, TEXT % 7)
    steps = HeadStepper(network, ids, features, 3, LONGEST)
    shape = network.shape()
    assert shape is not None
    cache = steps.cache()
    state, token = steps.extended(cache, 1)
    products, _ = counted(lambda: network.logits(cache.deepen(token, state, 2), 2))
    assert products == matrix_flops(shape.later, Load(1, 3))
    draft = HeadDraft("head", network, model, "mtp", "h", 3)
    assert known_shape(draft)["stored_parameters"] == sum(each.numel() for each in network.parameters())
