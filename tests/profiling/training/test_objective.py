"""What a head is trained for: both losses by depth, and acceptance, against a decoder that recomputes everything."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from alphaprof.profiling.heads.eagle import Eagle3
from alphaprof.profiling.training import States, TargetLaw, TrainingOptions, accepted, backward, drafts, lk, losses_by_depth
from alphaprof.run.split import RunText
from tests.eagle import Recomputing, config, loaded, target, tensors, written
from tests.runs import Silent

pytestmark = [pytest.mark.models, pytest.mark.usefixtures("one_thread")]
KNOWN, DEPTHS = [0, 2, 3, 5, 6], 3
SIZES = [(1, 9), (6, 14), (4, 4), (8, 7)]  # tokens of prompts and continuations: one begins before any state is known


class Setting:
    """A random head on a random target, with some texts."""

    def __init__(self, folder: Path) -> None:
        self.model, self.described = target(3), config()
        self.weights = tensors(self.described, KNOWN, seed=4)
        network = loaded(written(folder, self.described, self.weights), self.model).network
        assert isinstance(network, Eagle3)
        self.network = network
        rng = np.random.default_rng(0)
        made = [(rng.integers(0, 7, prompt), rng.integers(0, 7, size)) for prompt, size in SIZES]
        self.texts = [
            RunText(number, "a", "u", True, prompt.astype(np.int32), ids.astype(np.int32))
            for number, (prompt, ids) in enumerate(made)
        ]
        self.states = States(self.model, network.layers, self.texts, folder, 64, Silent())
        self.law = TargetLaw(self.model, network.ids)
        self.batch = self.states.batch(range(len(self.texts)))

    def losses(self, chosen: Sequence[int] | None = None, loss: str = "kl") -> list[torch.Tensor]:
        """The loss by depth of some of its texts, default all."""
        batch = self.batch if chosen is None else self.states.batch(chosen)
        return losses_by_depth(self.network, batch, self.law, TrainingOptions(loss=loss))


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    return Setting(tmp_path_factory.mktemp("objective"))


@dataclasses.dataclass(frozen=True)
class Draft:
    """A draft of a round: its losses, and whether it and those before it in the round are the text's tokens."""

    kl: float
    lk: float
    kept: bool


def reference(setting: Setting) -> list[list[Draft]]:
    """The drafts of each depth: round by round, from the definition."""
    naive = Recomputing(setting.described, setting.weights, setting.model.network.get_input_embeddings().weight)
    found: list[list[Draft]] = [[] for _ in range(DEPTHS)]
    for text in setting.texts:
        ids, prompt = text.tokens.tolist(), len(text.prompt)
        output = setting.model.network(torch.tensor([ids]), output_hidden_states=True)
        features = torch.cat([output.hidden_states[layer][0] for layer in setting.network.layers], -1)
        for start in range(max(prompt, 2), len(ids)):  # a round drafts this position first
            kept = True
            for depth in range(DEPTHS):
                at = start + depth
                if at >= len(ids):
                    break
                logits = naive.logits(ids[:start], features[: start - 1], ids[start:at])
                q = logits.double().log_softmax(0).numpy()
                p = output.logits[0, at - 1, KNOWN].double().softmax(0).numpy()
                kept = kept and KNOWN[int(logits.argmax())] == ids[at]
                kl = float((p * (np.log(p) - q)).sum())
                acceptance = float(np.minimum(p, np.exp(q)).sum())
                share = math.exp(-3 * acceptance)
                found[depth].append(Draft(kl, share * kl + (1 - share) * (1 - acceptance), kept))
    return found


@pytest.mark.parametrize("whole", [False, True])
def test_the_targets_law_is_of_its_own_dtype_while_a_head_is_trained_in_another(setting: Setting, whole: bool) -> None:
    """Autocast rounds what a head computes; rounded as well, the law that it learns would not be the target's."""
    law = TargetLaw(setting.model, setting.network.ids)
    if whole:  # as where the rows of its last layer are not all there is
        law.rows = None
    last = setting.batch.last[0]
    expected = law(last)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(law(last), expected)
        assert setting.network.logits(torch.zeros(1, last.shape[1]), 1).dtype == torch.bfloat16  # the head's are rounded


@pytest.mark.parametrize("loss", ["kl", "lk"])
def test_the_loss_is_that_of_every_round_from_its_definition(setting: Setting, loss: str) -> None:
    with torch.no_grad():
        found = [float(each) for each in setting.losses(loss=loss)]
    expected = reference(setting)
    assert found == pytest.approx([sum(getattr(draft, loss) for draft in each) for each in expected], rel=1e-4)
    counted = [sum(drafts(text, depth) for text in setting.texts) for depth in range(1, DEPTHS + 1)]
    assert counted == [len(each) for each in expected]
    assert min(counted) > 15


def test_acceptance_is_counted_round_by_round(setting: Setting) -> None:
    kept, rounds = accepted(setting.network, setting.batch, DEPTHS)
    expected = reference(setting)
    assert rounds.tolist() == [len(each) for each in expected]
    assert kept.tolist() == [sum(draft.kept for draft in each) for each in expected]
    assert kept[0] > kept[1] > 0


@pytest.mark.parametrize("budget", [20, 10_000])
def test_the_loss_of_a_step_is_a_mean_over_drafts_however_many_texts_are_run_at_a_time(
    setting: Setting, budget: int
) -> None:
    weights = list(setting.network.parameters())
    for weight in weights:
        weight.requires_grad_(True)
    found = backward(setting.network, setting.states, range(4), setting.law, TrainingOptions(), budget)
    assert found == pytest.approx([np.mean([draft.kl for draft in each]) for each in reference(setting)], rel=1e-4)
    sums = setting.losses()
    means = [each / sum(drafts(text, depth) for text in setting.texts) for depth, each in enumerate(sums, 1)]
    whole = torch.autograd.grad(means[0] + 0.8 * means[1] + 0.64 * means[2], weights)
    for weight, gradient in zip(weights, whole, strict=True):
        assert weight.grad is not None
        assert torch.allclose(weight.grad, gradient, rtol=1e-3, atol=1e-5)
        weight.grad = None
        weight.requires_grad_(False)


def test_gradients_are_those_of_differences(setting: Setting) -> None:
    """Along a random direction of each tensor; a wrong gradient of one of them is off by its whole share."""
    weights = dict(setting.network.named_parameters())
    for weight in weights.values():
        weight.requires_grad_(True)

    def total() -> torch.Tensor:
        return torch.stack(setting.losses()).double().sum()

    total().backward()
    generator = torch.Generator().manual_seed(1)
    for name, weight in weights.items():
        assert weight.grad is not None, name
        way = torch.randn(weight.shape, generator=generator)
        way /= way.norm()
        slope = float((weight.grad * way).sum())
        with torch.no_grad():
            ends = []
            for sign in (1, -1):
                weight.add_(sign * 1e-2 * way)
                ends.append(float(total()))
                weight.sub_(sign * 1e-2 * way)
        weight.requires_grad_(False)
        assert slope == pytest.approx((ends[0] - ends[1]) / 2e-2, rel=0.03, abs=0.02), name
        weight.grad = None


def test_the_blend_of_lk_is_no_part_of_its_gradient() -> None:
    """By hand: of KL q - p, of acceptance q times who is below p, less their sum."""
    generator = torch.Generator().manual_seed(0)
    p, logits = (torch.randn(5, 9, generator=generator, dtype=torch.float64) for _ in range(2))
    p, logits = p.log_softmax(-1), (2 * logits).requires_grad_(True)
    lk(p, logits.log_softmax(-1)).backward()
    q = logits.detach().softmax(-1)
    below = q * (q < p.exp())
    share = torch.exp(-3 * torch.minimum(q, p.exp()).sum(-1, keepdim=True))
    expected = share * (q - p.exp()) - (1 - share) * (below - q * below.sum(-1, keepdim=True))
    assert logits.grad is not None
    assert torch.allclose(logits.grad, expected)


def test_the_law_is_that_of_the_full_logits(setting: Setting) -> None:
    assert setting.law.rows is not None  # few rows are multiplied instead
    rows = setting.batch.last[0, :5]
    full = setting.model.network.lm_head(rows)[:, KNOWN].log_softmax(-1)
    assert torch.allclose(setting.law(rows), full, atol=1e-5)
    setting.law.rows = None  # as of a target whose LM head has a bias or a cap
    assert torch.allclose(setting.law(rows), full, atol=1e-5)


def test_states_are_the_same_wherever_they_are_kept(
    setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("alphaprof.profiling.training.free_memory", lambda: 0)
    states = States(setting.model, setting.network.layers, setting.texts, tmp_path, 64, told := Silent())
    assert [line for line in told.lines if "kept on disk" in line]
    assert list(tmp_path.iterdir()) == []
    batch = states.batch([2, 1])
    for row, index in enumerate([2, 1]):
        size = len(setting.texts[index].tokens) - 1
        assert torch.allclose(batch.states[row, :size], setting.batch.states[index, :size], rtol=1e-4, atol=1e-4)
