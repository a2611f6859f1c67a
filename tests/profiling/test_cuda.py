"""On a GPU, where there is one: the scoring loop never waits for the device, and the columns are those of a CPU."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from alphaprof.profiling.models.kinds import DraftModel, PromptLookup
from alphaprof.profiling.models.load import Model
from alphaprof.profiling.models.processing import Processing
from alphaprof.profiling.scoring import scorer as module
from alphaprof.profiling.scoring.scorer import Extras, Scorer
from alphaprof.profiling.texts.continuations import Continuation, generate
from alphaprof.profiling.texts.corpus import Document
from tests.reference import LOGGED_RULES
from tests.tiny import llama, noisy

pytestmark = [pytest.mark.models, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
TOKENS = 260
SETTINGS = [None, Processing(0.8), Processing(1.3, 20, 0.9, 0.05)]
each_setting = pytest.mark.parametrize("settings", SETTINGS, ids=str)


def models(device: str, dtype: torch.dtype) -> tuple[Model, Model]:
    """A target and a draft on a device."""
    network = llama(seed=7)
    pair = copy.deepcopy(network), noisy(network, 0.05)
    target, draft = (item.to(device=device, dtype=dtype).requires_grad_(False) for item in pair)
    return DraftModel("target", target, "model", "t"), DraftModel("draft", draft, "model", "d")


def documents(settings: Processing | None) -> list[Document]:
    """Prompts of different lengths."""
    found = []
    for number, length in enumerate([3, 17, 8, 30]):
        ids = np.random.default_rng(number).integers(0, 250, length).astype(np.int32)
        kind, seed = ("greedy", None) if settings is None else ("sampled", 0)
        found.append(Document(number, "a", None, 0, number, ids, None, False, 24, kind, True, settings, seed))
    return found


def texts(settings: Processing | None) -> list[Continuation]:
    """The documents with random continuations, which do not depend on the device."""
    generator = np.random.default_rng(9)
    return [Continuation(item, generator.integers(0, 250, 24).astype(np.int32), "length") for item in documents(settings)]


REQUESTED = Extras.of(LOGGED_RULES, certificates=True)


def scorer(target: Model, draft: Model) -> Scorer:
    """A scorer that takes several rounds of its loop for a batch, and measures all that can be asked for."""
    found = Scorer(target, [draft, PromptLookup("ngram", 2, (256,), TOKENS, "float32")], TOKENS, extras=REQUESTED)
    found.head_rows, found.statistics_rows = 40, 16
    return found


@pytest.fixture
def no_waiting() -> Iterator[Callable[[Callable[..., Any]], Callable[..., Any]]]:
    """Wraps a function so that it fails where the host waits for the device in it; a test's own setting ends with it."""
    before = torch.cuda.get_sync_debug_mode()

    def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **keywords: Any) -> Any:
            with warnings.catch_warnings():  # torch says that the mode is a prototype
                warnings.simplefilter("ignore", UserWarning)
                torch.cuda.set_sync_debug_mode("error")
            try:
                return function(*arguments, **keywords)
            finally:
                torch.cuda.set_sync_debug_mode(before)

        return run

    yield guarded
    torch.cuda.set_sync_debug_mode(before)


def test_the_guard_notices_a_wait(no_waiting: Any) -> None:
    value = torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError, match="synchroniz"):
        no_waiting(lambda: value.sum().item())()
    assert value.sum().item() == 3


@each_setting
def test_the_loop_over_a_batch_waits_for_the_device_once_at_its_end(
    settings: Processing | None, no_waiting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scoring = scorer(*models("cuda", torch.bfloat16))
    batch = texts(settings)
    scoring.score(batch)  # libraries load at the first use of a kernel, and that waits
    crossed: list[tuple[int, ...]] = []
    calls: list[int] = []
    cpu, statistics, look_up, to_host = torch.Tensor.cpu, scoring._statistics, module._joined_columns, module._to_host

    def spy(tensor: torch.Tensor) -> torch.Tensor:
        crossed.append(tuple(tensor.shape))
        return cpu(tensor)

    def counted(*arguments: Any) -> Any:
        calls.append(1)
        return statistics(*arguments)

    def begun(*arguments: Any) -> Any:
        """All forward passes are on their way; before each of them transformers looks at its position ids."""
        torch.cuda.set_sync_debug_mode("error")
        return look_up(*arguments)

    def ended(groups: Any) -> Any:
        torch.cuda.set_sync_debug_mode("default")
        return to_host(groups)

    monkeypatch.setattr(torch.Tensor, "cpu", spy)
    monkeypatch.setattr(module, "_joined_columns", begun)
    monkeypatch.setattr(module, "_to_host", ended)
    monkeypatch.setattr(scoring, "_statistics", counted)
    found = scoring.score(batch)
    positions = sum(len(item.ids) for item in batch)
    assert len(calls) == -(-positions // 40) > 1
    assert [shape[:1] for shape in crossed] == [(positions,)]
    assert set(found) == {"draft", "ngram"}
    assert {"threshold_strict", "thresholds_exact", "target_top_10_prob"} <= set(found["ngram"])


@each_setting
def test_columns_in_float32_are_those_of_a_cpu(settings: Processing | None) -> None:
    batch = texts(settings)
    expected, found = (scorer(*models(device, torch.float32)).score(batch) for device in ("cpu", "cuda"))
    for draft, columns in expected.items():
        for name, values in columns.items():
            equal = np.isclose(found[draft][name], values, atol=1e-3, rtol=1e-3, equal_nan=True)
            # Rounding may move a token across a cut of the truncation or of a rule, and past its neighbor in rank.
            cut = settings == SETTINGS[-1] or name.startswith("threshold") or "_rank_" in name
            assert equal.mean() > 0.97 if cut else equal.all(), name


@each_setting
def test_a_small_run_in_bfloat16_writes_and_scores_its_own_text(settings: Processing | None) -> None:
    target, draft = models("cuda", torch.bfloat16)
    written = generate(target, documents(settings), TOKENS)
    own = DraftModel("draft", target.network, "model", "t")
    assert [item.finish == "eos" for item in written] == [int(item.ids[-1]) == 256 for item in written]
    found = scorer(target, own).score(written)["draft"]
    assert np.all(found["overlap"] > 1 - 1e-4)
    assert np.array_equal(found["draft_top"], found["target_top"])
    other = scorer(target, draft).score(written)["draft"]
    assert 0 < other["overlap"].mean() < 1
    if settings is None:
        assert np.mean(found["target_top"] == found["token"]) > 0.9  # bfloat16 near-ties may fall otherwise
    else:
        assert np.mean(found["target_token_prob"] > 0) > 0.9


def test_sampled_text_in_float32_does_not_depend_on_its_batch_or_the_device() -> None:
    settings = Processing(1.2, 0, 0.95)
    on_cpu, on_gpu = (models(device, torch.float32)[0] for device in ("cpu", "cuda"))
    together = {item.document.document: item.ids.tolist() for item in generate(on_gpu, documents(settings), TOKENS)}
    for document in documents(settings):
        alone = dataclasses.replace(document, document=document.document + 10)
        for target in (on_cpu, on_gpu):
            assert generate(target, [alone], TOKENS)[0].ids.tolist() == together[document.document]
