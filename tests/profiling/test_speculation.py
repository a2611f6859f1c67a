"""Speculative decoding with caches: greedy texts are plain ones, rounds are those of replay, and nothing is paid twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import GenerationConfig

from alphaprof.errors import ModelUnloadable, RuleNotDecodable
from alphaprof.profiling.decoding import speculative
from alphaprof.profiling.decoding.drafters import Cached, Choice, Chooser, ModelDrafter
from alphaprof.profiling.decoding.speculative import Decoded, Plain, Speculation
from alphaprof.profiling.models.draft import Draft
from alphaprof.profiling.models.kinds import DraftModel, PromptLookup, layer_skip
from alphaprof.profiling.models.load import Model
from alphaprof.profiling.models.processing import Processing
from alphaprof.profiling.scoring.scorer import Scorer, by_document
from alphaprof.profiling.texts.continuations import Continuation, generate, generation_batches
from alphaprof.profiling.texts.corpus import Document
from alphaprof.rules import parse_rule
from alphaprof.totals.replay import Trace, listed_rounds, run_lengths
from tests.conftest import slow
from tests.generators import before_eos
from tests.profiling.test_architectures import CONFIGS, OTHERS, SOME, network
from tests.profiling.test_scoring import PretendedGpu
from tests.tiny import document, ending, llama, looping, noisy

pytestmark = [pytest.mark.models, pytest.mark.usefixtures("one_thread")]
EOS, IDS = 256, 260
NEW_TOKENS = 36
GAMMAS = (1, 2, 6)
STRICT = parse_rule("strict")
SAMPLED = Processing(1.2, 0, 0.95)


def documents(processing: Processing | None = None, largest: int = 250) -> list[Document]:
    shapes = [(3, 35), (17, 36), (8, 21), (30, 36), (12, 9)]
    return [document(number, *shape, processing, largest) for number, shape in enumerate(shapes)]


@cache
def target() -> Model:
    """A target that is ready to end a text."""
    return DraftModel("target", ending(llama(seed=7), 2.0), "model", "t")


def close(**changes: Any) -> Model:
    """A draft that agrees with the target on about half of the tokens, and proposes EOS more often."""
    found = ending(noisy(target().network, 0.04), 1.2)
    for name, value in changes.items():
        setattr(found.config, name, value)
    return DraftModel("draft", found, "model", "d")


def shuffled() -> Model:
    found = noisy(target().network, 0.0)
    with torch.no_grad():
        found.lm_head.weight.copy_(found.lm_head.weight[torch.randperm(IDS, generator=torch.Generator().manual_seed(3))])
    return DraftModel("draft", found, "model", "s")


def resized(size: int) -> Model:
    """The close draft with so many ids."""
    found = llama(vocabulary=size, eos_token_id=None, pad_token_id=None)
    state = close().network.state_dict()
    for name, tensor in found.state_dict().items():
        shared = min(len(tensor), len(state[name]))
        tensor[:shared] = state[name][:shared]
    return DraftModel("draft", found, "model", "r")


DRAFTS: dict[str, Callable[[], Draft]] = {
    "model": close,
    "layer_skip": lambda: layer_skip("draft", target(), [2]),
    "lookup": lambda: PromptLookup("draft", 2, (38,), 40, "float32"),
    "itself": lambda: DraftModel("draft", target().network, "model", "t"),
    "shuffled": shuffled,
    "short context": lambda: close(max_position_embeddings=24),
    "padded": lambda: resized(320),
}


def pair(kind: str) -> tuple[Model, Draft]:
    """A target with a draft of some kind."""
    return (looping(6) if kind == "lookup" else target()), DRAFTS[kind]()


def scored(ours: Model, draft: Draft, given: list[Document]) -> list[tuple[Continuation, dict[str, Any]]]:
    """Continuations and columns of documents, as a run makes them: in padded batches."""
    written = [item for batch in generation_batches(given, 200) for item in generate(ours, batch, IDS)]
    columns = by_document(written, Scorer(ours, [draft], IDS).score(written)[draft.name])
    return [(item, columns[item.document.document]) for item in written]


@cache
def profiled(kind: str, processing: Processing | None = None) -> list[tuple[Continuation, dict[str, Any]]]:
    """What a run says of a kind of draft."""
    return scored(*pair(kind), documents(processing, 12 if kind == "lookup" else 250))


def replayed(item: Continuation, columns: dict[str, Any], gamma: int) -> list[tuple[int, int]]:
    """Rounds (drafted, accepted) that a document is predicted to take."""
    size = len(item.ids)
    start, stop = np.array([0]), np.array([size])
    agrees = (columns["draft_top"] == columns["token"]) & (columns["proposed"] > 0)
    run = columns.get("accepted_run", run_lengths(agrees, start, stop))
    trace = Trace(run, columns["proposed"].astype(np.int64), start, stop)
    found = listed_rounds(trace, gamma)
    return list(zip(found.drafted.tolist(), found.accepted.tolist(), strict=True))


def decoded(engine: Plain | Speculation, item: Document) -> Decoded:
    """A document's own continuation."""
    return engine.decode(item.prompt, item.max_new_tokens or 0, source_row=item.source_row)


def rounds(found: Decoded) -> list[tuple[int, int]]:
    return list(zip(found.drafted.tolist(), found.accepted.tolist(), strict=True))


def live(model: Model, item: Document) -> list[int]:
    """What transformers writes alone."""
    ids = torch.from_numpy(item.prompt.astype(np.int64))[None]
    how = {"attention_mask": torch.ones_like(ids), "max_new_tokens": item.max_new_tokens, "do_sample": False}
    return model.network.generate(input_ids=ids, **how)[0, ids.shape[1] :].tolist()


FULL = {"full", "partial", "none", "ended by an accepted EOS", "ended by an accepted token"}
# What the rounds of a kind of draft show at least, and the share of drafts that are accepted.
SHOWN: dict[str, tuple[set[str], float, float]] = {
    "model": (FULL, 0.1, 0.8),
    "padded": (FULL, 0.1, 0.8),
    "layer_skip": ({"partial", "none", "full"}, 0.02, 0.8),
    "lookup": ({"full", "partial", "none", "no proposal", "cut proposal"}, 0.02, 0.9),
    "itself": (FULL - {"none"}, 0.7, 1),
    "shuffled": ({"none"}, 0, 0.05),
    "short context": ({"full", "partial", "none", "no proposal", "cut proposal"}, 0.1, 0.8),
}


@pytest.mark.parametrize(
    "kind", ["model", "layer_skip", "lookup", "short context", *slow([("padded",), ("itself",), ("shuffled",)])]
)
def test_strict_texts_are_plain_ones_and_rounds_are_those_of_replay(kind: str) -> None:
    ours, draft = pair(kind)
    seen: set[str] = set()
    share = np.zeros(2)
    for item, columns in profiled(kind):
        assert item.ids.tolist() == live(ours, item.document)
        for gamma in GAMMAS:
            found = decoded(Speculation(ours, draft, STRICT, gamma, Choice(width=min(IDS, ours.vocabulary))), item.document)
            assert found.ids.tolist() == item.ids.tolist()
            assert rounds(found) == replayed(item, columns, gamma)
            seen |= shown(found, gamma, item.finish)
            share += found.accepted.sum(), found.drafted.sum()
    least, low, high = SHOWN[kind]
    assert seen >= least
    assert low <= share[0] / share[1] <= high


def shown(found: Decoded, gamma: int, finish: str) -> set[str]:
    """Which kinds of rounds a text took."""
    seen = {"full" for drafted, accepted in rounds(found) if gamma > 1 and drafted == accepted == gamma}
    seen |= {"partial" for drafted, accepted in rounds(found) if drafted > accepted > 0}
    seen |= {"none" for drafted, accepted in rounds(found) if drafted > accepted == 0}
    seen |= {"no proposal" for drafted, _ in rounds(found) if drafted == 0}
    seen |= {"cut proposal" for drafted, _ in rounds(found) if 0 < drafted < gamma}
    if found.accepted.sum() + len(found.accepted) > len(found.ids) - 1:
        seen.add(f"ended by an accepted {'EOS' if finish == 'eos' else 'token'}")
    return seen


@pytest.mark.parametrize("kind", ["model", "lookup", *slow([("layer_skip",)])])
def test_one_hot_texts_are_plain_samples_and_rounds_are_those_of_replay(kind: str) -> None:
    ours, draft = pair(kind)
    settings = Processing(0.4) if kind == "lookup" else SAMPLED
    choice = Choice(settings, 3)
    accepted = 0
    for item, columns in profiled(kind, settings):
        assert decoded(Plain(ours, choice), item.document).ids.tolist() == item.ids.tolist()
        for gamma in (1, 3, 6):
            found = decoded(Speculation(ours, draft, parse_rule("one_hot"), gamma, choice), item.document)
            assert found.ids.tolist() == item.ids.tolist()
            assert rounds(found) == replayed(item, columns, gamma)
            accepted += found.accepted.sum()
    assert accepted > 0


def test_prompt_lookup_drafts_what_followed_an_end_of_turn_as_replay_says() -> None:
    """The prompt holds an EOS at every fourth place, as a chat does; a proposal goes on after it."""
    ours, draft = pair("lookup")
    given = [document(number, 30, 40, largest=12) for number in range(4)]
    ends = [np.where(np.arange(30) % 4 == 3, 38, item.prompt).astype(np.int32) for item in given]
    beyond = 0
    for item, columns in scored(ours, draft, [replace(item, prompt=ids) for item, ids in zip(given, ends, strict=True)]):
        found = decoded(Speculation(ours, draft, STRICT, 6), item.document)
        assert found.ids.tolist() == item.ids.tolist()
        assert rounds(found) == replayed(item, columns, 6)
        whole, place = before_eos(item.document.prompt.tolist(), item.ids.tolist(), 2, (38,)), 1
        for drafted, accepted in rounds(found):
            beyond += drafted > whole[place]
            place += accepted + 1
    assert beyond > 0


def test_a_draft_proposes_nothing_behind_a_token_that_it_does_not_have() -> None:
    """Replay knows in advance where that token comes, the draft does not: what it drafts in vain there is not foreseen."""
    draft, known = resized(150), 150
    unforeseen = 0
    given = [document(number, 6, 24, largest=known) for number in range(8)]
    for item, columns in scored(target(), draft, given):
        found = decoded(Speculation(target(), draft, STRICT, 4), item.document)
        assert found.ids.tolist() == item.ids.tolist()
        predicted = replayed(item, columns, 4)
        assert [accepted for _, accepted in rounds(found)] == [accepted for _, accepted in predicted]
        place = 1
        for (drafted, accepted), (foreseen, _) in zip(rounds(found), predicted, strict=True):
            assert drafted == (4 if (item.ids[:place] < known).all() else 0)
            assert drafted == foreseen or (item.ids[place : place + 4] >= known).any()
            unforeseen += drafted - foreseen
            place += accepted + 1
    assert unforeseen > 0


def lively(name: str) -> Any:
    """A tiny network of an architecture, with texts that go on, ready for transformers' own decoding."""
    window = {"sliding_window": 8} if "sliding_window" in CONFIGS[name] else {}
    found = network(name, tie_word_embeddings=False, **window)
    found.generation_config = GenerationConfig(eos_token_id=EOS, pad_token_id=257)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter *= 3.0 if parameter.dim() > 1 else 1.0
    return found


@pytest.mark.parametrize("name", [*SOME, *slow((name,) for name in OTHERS)])
def test_other_architectures_decode_as_transformers_does_sliding_windows_included(name: str) -> None:
    item = document(1, 13, NEW_TOKENS)
    model = DraftModel("target", lively(name), "model", name)
    expected = live(model, item)
    assert Plain(model).decode(item.prompt, NEW_TOKENS).ids.tolist() == expected
    assert len(set(expected)) > 1
    draft = DraftModel("draft", noisy(model.network, 0.1), "model", name)
    written = [Continuation(item, np.array(expected, dtype=np.int32), "length")]
    columns = Scorer(model, [draft], IDS).score(written)["draft"]
    taken = np.zeros(2)
    for gamma in (1, 3, 5):
        found = Speculation(model, draft, STRICT, gamma).decode(item.prompt, NEW_TOKENS)
        assert found.ids.tolist() == expected
        assert rounds(found) == replayed(written[0], columns, gamma)
        taken += found.accepted.sum(), found.drafted.sum()
    assert 0.1 < taken[0] / taken[1] < 0.97


def test_a_text_may_fill_the_context_of_the_target() -> None:
    """Learned positions end there: the last rounds draft less, which changes nothing else."""
    network_ = network("GPT2Config", n_positions=13 + NEW_TOKENS)
    network_.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=257)
    model = DraftModel("target", network_, "model", "g")
    item = document(1, 13, NEW_TOKENS)
    draft = DraftModel("draft", noisy(network_, 0.1), "model", "d")
    plain = Plain(model).decode(item.prompt, NEW_TOKENS)
    assert len(plain.ids) == NEW_TOKENS
    written = [Continuation(item, plain.ids, "length")]
    columns = Scorer(model, [draft], IDS).score(written)["draft"]
    for gamma in (2, 6):
        found = Speculation(model, draft, STRICT, gamma).decode(item.prompt, NEW_TOKENS)
        assert found.ids.tolist() == plain.ids.tolist()
        predicted = replayed(written[0], columns, gamma)
        assert [accepted for _, accepted in rounds(found)] == [accepted for _, accepted in predicted]
        left = NEW_TOKENS - 1
        for (drafted, accepted), (foreseen, _) in zip(rounds(found), predicted, strict=True):
            assert drafted == min(foreseen, left)
            left -= accepted + 1


def fed(model: Model, patch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each forward pass of a model is given."""
    forward = model.network.forward
    seen: list[int] = []

    def spy(*arguments: Any, **keywords: Any) -> Any:
        seen.append(keywords["input_ids"].shape[1])
        return forward(*arguments, **keywords)

    patch.setattr(model.network, "forward", spy)
    return seen


def test_every_pass_is_as_long_as_it_must_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target reads what was drafted and the token before it; the draft two tokens first after a round that was full."""
    ours, draft = DraftModel("target", noisy(target().network, 0.0), "model", "t"), close()
    targets, drafts = fed(ours, monkeypatch), fed(draft, monkeypatch)
    firsts = set()
    for item in documents():
        targets.clear()
        drafts.clear()
        found = Speculation(ours, draft, STRICT, 3).decode(item.prompt, NEW_TOKENS)
        assert targets == [len(item.prompt), *(found.drafted + 1)]
        expected = [len(item.prompt)]
        for number in range(len(found.drafted)):
            full = number > 0 and found.accepted[number - 1] == found.drafted[number - 1]
            expected += [2 if full else 1, 1, 1]
            firsts.add(full)
        assert drafts == expected
        targets.clear()
        assert len(Plain(ours).decode(item.prompt, NEW_TOKENS).ids) == len(found.ids)
        assert targets == [len(item.prompt), *[1] * (len(found.ids) - 1)]
    assert firsts == {True, False}


def test_padding_rows_of_the_target_are_not_written() -> None:
    network_ = llama(vocabulary=320)
    with torch.no_grad():
        network_.lm_head.weight[IDS:] = network_.lm_head.weight[:60] * 2  # beats every real id
    padded = DraftModel("target", network_, "model", "t")
    prompt = documents()[2].prompt
    for choice in (Choice(width=IDS), Choice(SAMPLED, 3, width=IDS)):
        assert Plain(padded, choice).decode(prompt, 12).ids.max() < IDS
        rule = parse_rule("strict" if choice.processing is None else "lossless")
        assert Speculation(padded, close(), rule, 3, choice).decode(prompt, 12).ids.max() < IDS
    assert Plain(padded).decode(prompt, 12).ids.max() >= IDS


def test_a_text_depends_on_seed_prompt_and_row_alone() -> None:
    first, second = documents()[1:3]
    for rule in ("lossless", "one_hot", "top_m_2"):

        def text(seed: int, row: int, prompt: Any = first.prompt, rule: str = rule) -> tuple[int, ...]:
            engine = Speculation(target(), close(), parse_rule(rule), 3, Choice(SAMPLED, seed))
            return tuple(engine.decode(prompt, 20, source_row=row).ids.tolist())

        assert text(1, 0) == text(1, 0)
        assert len({text(1, 0), text(2, 0), text(1, 1), text(1, 0, second.prompt)}) == 4


def test_bfloat16_writes_what_its_own_passes_prefer() -> None:
    """Near-ties may fall either way, so the text is held against the largest step of the dtype."""
    ours = DraftModel("target", noisy(target().network, 0.0).to(torch.bfloat16), "model", "t")
    draft = DraftModel("draft", noisy(target().network, 0.04).to(torch.bfloat16), "model", "d")
    for item in documents()[:3]:
        found = Speculation(ours, draft, STRICT, 4).decode(item.prompt, NEW_TOKENS, regret=True)
        assert found.regret is not None
        assert (found.regret == 0).all()
        ids = torch.from_numpy(np.concatenate([item.prompt, found.ids]).astype(np.int64))[None]
        with torch.inference_mode():
            logits = ours.network(input_ids=ids).logits[0, len(item.prompt) - 1 : -1].float().numpy()
        assert (logits.max(1) - logits[np.arange(len(found.ids)), found.ids] <= 0.5).all()
        assert found.accepted.sum() > 0


class Hours:
    """A clock that goes on only while a model runs."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


def test_times_are_those_of_the_passes_they_are_named_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Hours()
    monkeypatch.setattr(speculative, "time", clock)
    ours, draft = DraftModel("target", noisy(target().network, 0.0), "model", "t"), close()
    for model, seconds in ((ours, 10.0), (draft, 1.0)):
        forward = model.network.forward

        def slow(*arguments: Any, forward: Any = forward, seconds: float = seconds, **keywords: Any) -> Any:
            clock.now += seconds
            return forward(*arguments, **keywords)

        monkeypatch.setattr(model.network, "forward", slow)
    prompt = documents()[1].prompt
    found = Speculation(ours, draft, STRICT, 3).decode(prompt, NEW_TOKENS)
    assert found.prefill_s == 11
    assert (found.draft_s, found.verify_s) == (found.drafted.sum(), 10 * len(found.drafted))
    assert found.decode_s == found.draft_s + found.verify_s
    plain = Plain(ours).decode(prompt, NEW_TOKENS)
    steps = 10 * (len(plain.ids) - 1)
    assert (plain.prefill_s, plain.decode_s, plain.draft_s, plain.verify_s) == (10, steps, 0, steps)


def test_a_text_of_one_token_has_no_rounds() -> None:
    found = Speculation(target(), close(), STRICT, 3).decode(documents()[0].prompt, 1, regret=True)
    assert len(found.ids) == 1
    assert found.regret is not None
    assert found.regret.shape == (1,)
    assert (found.drafted.shape, found.accepted.shape) == ((0,), (0,))
    assert (found.draft_s, found.verify_s) == (0, 0)


def test_rules_that_cannot_decode_a_text_are_refused() -> None:
    wrong = [("tree_2", Choice()), ("strict", Choice(SAMPLED)), ("lossless", Choice())]
    for rule, choice in wrong:
        with pytest.raises(RuleNotDecodable, match=f"the rule {rule}"):
            Speculation(target(), close(), parse_rule(rule), 3, choice)


@pytest.mark.filterwarnings("ignore")  # about kernels that are not installed
def test_a_recurrent_model_decodes_plainly_and_is_refused_otherwise() -> None:
    torch.manual_seed(0)
    changes = {"head_dim": 8, "lru_width": 32, "attention_window_size": 16}
    config = transformers.RecurrentGemmaConfig(**CONFIGS["Phi3Config"] | changes)
    net = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    net.generation_config = GenerationConfig(eos_token_id=EOS, pad_token_id=257)
    recurrent = DraftModel("mixed", net, "model", "r")
    item = document(1, 9, 12)
    assert Plain(recurrent).decode(item.prompt, 12).ids.tolist() == live(recurrent, item)
    for ours, draft in ((recurrent, close()), (target(), recurrent)):
        with pytest.raises(ModelUnloadable, match=r"^mixed .*cannot remove tokens") as caught:
            Speculation(ours, draft, STRICT, 2).decode(item.prompt, 12)
        assert "attention" in caught.value.hint


@pytest.mark.filterwarnings("ignore")
def test_a_model_that_keeps_its_state_elsewhere_is_refused_altogether() -> None:
    """Its steps would begin a text anew, without an error."""
    size = {"hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2, "context_length": 64}
    net = transformers.RwkvForCausalLM(transformers.RwkvConfig(vocab_size=IDS, **size)).eval()
    with pytest.raises(ModelUnloadable, match="cannot remove tokens"):
        Plain(DraftModel("rwkv", net, "model", "r")).decode(documents()[0].prompt, 4)


@pytest.mark.parametrize("processing", [None, Processing(0.7, 20, 0.9)], ids=str)
def test_a_gpu_would_draft_and_verify_without_waiting_in_between(processing: Processing | None) -> None:
    """What a round reads back is its verdict alone: `PretendedGpu` holds no values that could be read."""
    model, prompt = DraftModel("d", llama().to("meta"), "model", "d"), list(range(7))
    chooser = Chooser(Choice(processing), np.array(prompt, np.int32), 0, 30, model.device)
    drafter = ModelDrafter(model, chooser, IDS, model.device, drawn=processing is not None)
    verifying = Cached(model, IDS)
    with torch.inference_mode(), PretendedGpu() as mode:
        drafter.start(prompt)
        verifying.prefill(prompt, rewinds=True)
        proposal = drafter.propose([*prompt, 5], 4)
        own = chooser.own(verifying.each(torch.cat([verifying.tensor([5]), proposal.ids])), 1)
        verifying.rewind(3)
        drafter.settle(1)
    assert (len(proposal.ids), len(own), mode.running) == (4, 5, True)
    assert (mode.waited, mode.mixed) == ([], [])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_decodes_as_a_cpu_does_and_its_phases_fit_the_clock() -> None:
    choice = Choice(SAMPLED, 3)
    there = [DraftModel(model.name, noisy(model.network, 0.0).to("cuda"), "model", "g") for model in (target(), close())]
    lookup = DRAFTS["lookup"]()
    for item in documents():
        for rule, chosen in (("strict", Choice()), ("one_hot", choice), ("lossless", choice), ("top_m_3", choice)):
            on_cpu = Speculation(target(), close(), parse_rule(rule), 4, chosen).decode(item.prompt, NEW_TOKENS)
            on_gpu = Speculation(*there, parse_rule(rule), 4, chosen).decode(item.prompt, NEW_TOKENS)
            assert on_gpu.ids.tolist() == on_cpu.ids.tolist()
            assert rounds(on_gpu) == rounds(on_cpu)
            assert 0 <= on_gpu.draft_s + on_gpu.verify_s <= on_gpu.decode_s
        looked_up = Speculation(there[0], lookup, STRICT, 4).decode(item.prompt, NEW_TOKENS)
        assert looked_up.ids.tolist() == Plain(there[0]).decode(item.prompt, NEW_TOKENS).ids.tolist()
