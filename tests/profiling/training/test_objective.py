"""What a head is trained for: KL by depth, and agreement, against a decoder that recomputes everything."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from alphaprof.profiling.heads.eagle import Eagle3
from alphaprof.profiling.training.features import Features, TargetLaw, free_memory
from alphaprof.profiling.training.initial import trained_parameters
from alphaprof.profiling.training.trainer import drafts, losses, right
from alphaprof.run.split import RunText
from tests.eagle import Recomputing, config, loaded, target, tensors, written

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
            RunText(number, "a", "u", "greedy", True, None, prompt.astype(np.int32), ids.astype(np.int32))
            for number, (prompt, ids) in enumerate(made)
        ]
        self.features = Features(self.model, network.layers, self.texts, folder, 64)
        self.features.fill(lambda _: None)
        self.law = TargetLaw(self.model, network.ids)
        self.batch = self.features.batch(range(len(self.texts)))


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    return Setting(tmp_path_factory.mktemp("objective"))


def reference(setting: Setting) -> list[list[tuple[float, bool]]]:
    """For each depth the KL of each draft and whether it is the token: round by round, from the definition."""
    naive = Recomputing(setting.described, setting.weights, setting.model.network.get_input_embeddings().weight)
    found: list[list[tuple[float, bool]]] = [[] for _ in range(DEPTHS)]
    for text in setting.texts:
        ids, prompt = text.tokens.tolist(), len(text.prompt)
        output = setting.model.network(torch.tensor([ids]), output_hidden_states=True)
        features = torch.cat([output.hidden_states[layer][0] for layer in setting.network.layers], -1)
        for start in range(max(prompt, 2), len(ids)):  # a round drafts this position first
            for depth in range(DEPTHS):
                at = start + depth
                if at >= len(ids):
                    break
                logits = naive.logits(ids[:start], features[: start - 1], ids[start:at])
                q = logits.double().log_softmax(0).numpy()
                p = output.logits[0, at - 1, KNOWN].double().softmax(0).numpy()
                kl = float((p * (np.log(p) - q)).sum())
                found[depth].append((kl, KNOWN[int(logits.argmax())] == ids[at]))
    return found


@pytest.mark.parametrize("whole", [False, True])
def test_the_targets_law_is_of_its_own_dtype_while_a_head_is_trained_in_another(setting: Setting, whole: bool) -> None:
    """Autocast rounds what a head computes; rounded as well, the law that it learns would not be the target's."""
    law = TargetLaw(setting.model, setting.network.ids)
    if whole:  # as where the rows of its last layer are not all there is
        law._rows = None
    last = setting.batch.last[0]
    expected = law(last)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(law(last), expected)
        assert setting.network.logits(torch.zeros(1, last.shape[1]), 1).dtype == torch.bfloat16  # the head's are rounded


@pytest.mark.parametrize(
    ("groups", "files", "left"),
    [
        ("0::/\n", {}, 9 << 10),
        ("0::/pod/main\n", {"pod/memory.max": "max"}, 9 << 10),
        ("0::/\n", {"memory.max": "5000", "memory.current": "4000", "memory.stat": "anon 1\ninactive_file 500"}, 1500),
        (  # the pod's limit holds, although its container has none; its path is that of another namespace
            "0::/kubepods/gone\n",
            {"memory.max": "4000", "memory.current": "4100", "memory.stat": "inactive_file 0"},
            0,
        ),
        (
            "4:cpu,memory:/job\n0::/\n",
            {
                "memory/job/memory.limit_in_bytes": "9223372036854771712",
                "memory/job/memory.usage_in_bytes": "10",
                "memory/job/memory.stat": "total_inactive_file 0",
                "memory/memory.limit_in_bytes": "6000",
                "memory/memory.usage_in_bytes": "5000",
                "memory/memory.stat": "inactive_file 7\ntotal_inactive_file 200",
            },
            1200,
        ),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": "99000", "memory/memory.usage_in_bytes": "1"}, 9 << 10),
    ],
)
def test_free_memory_is_what_control_groups_leave(groups: str, files: dict[str, str], left: int, tmp_path: Path) -> None:
    """A container of 16 GiB on a machine of a terabyte was killed: /proc/meminfo is the machine's."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 99 kB\nMemAvailable: 9 kB\n")
    (tmp_path / "proc/self/cgroup").write_text(groups)
    for name, content in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content + "\n")
    assert free_memory(tmp_path) == left


def test_the_loss_is_that_of_every_round_from_its_definition(setting: Setting) -> None:
    with torch.no_grad():
        found = [float(loss) for loss in losses(setting.network, setting.batch, setting.law, DEPTHS)]
    expected = reference(setting)
    assert found == pytest.approx([sum(kl for kl, _ in rows) for rows in expected], rel=1e-4)
    counted = [sum(drafts(len(t.prompt), len(t.tokens), depth) for t in setting.texts) for depth in range(1, DEPTHS + 1)]
    assert counted == [len(rows) for rows in expected]
    assert min(counted) > 15


def test_agreement_is_counted_round_by_round(setting: Setting) -> None:
    agree, starts, prefix = right(setting.network, setting.batch, DEPTHS)
    expected = reference(setting)
    assert starts.tolist() == [len(rows) for rows in expected]
    assert agree.tolist() == [sum(hit for _, hit in rows) for rows in expected]
    assert prefix[0] == agree[0]
    assert prefix[0] >= prefix[1] >= prefix[2]


def test_a_text_counts_the_same_alone_and_in_a_batch(setting: Setting) -> None:
    with torch.no_grad():
        alone = [
            torch.stack(losses(setting.network, setting.features.batch([index]), setting.law, DEPTHS))
            for index in range(len(setting.texts))
        ]
        together = torch.stack(losses(setting.network, setting.batch, setting.law, DEPTHS))
    assert torch.allclose(sum(alone, torch.zeros(DEPTHS)), together, rtol=1e-4)


def test_gradients_are_those_of_differences(setting: Setting) -> None:
    """Along a random direction of each tensor; a wrong gradient of one of them is off by its whole share."""
    weights = trained_parameters(setting.network)
    for weight in weights.values():
        weight.requires_grad_(True)

    def total() -> torch.Tensor:
        found = losses(setting.network, setting.batch, setting.law, DEPTHS)
        return torch.stack(found).double().sum()

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


def test_the_law_is_that_of_the_full_logits(setting: Setting) -> None:
    assert setting.law._rows is not None  # few rows are multiplied instead
    rows = setting.batch.last[0, :5]
    full = setting.model.network.lm_head(rows)[:, KNOWN].log_softmax(-1)
    assert torch.allclose(setting.law(rows), full, atol=1e-5)
    setting.law._rows = None  # as of a target whose LM head has a bias or a cap
    assert torch.allclose(setting.law(rows), full, atol=1e-5)


def test_states_are_the_same_wherever_they_are_kept(
    setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("alphaprof.profiling.training.features.IN_MEMORY", 0.0)
    features = Features(setting.model, setting.network.layers, setting.texts, tmp_path, 64)
    assert features.on_disk
    features.fill(lambda _: None)
    assert list(tmp_path.iterdir()) == []
    batch = features.batch([2, 1])
    for row, index in enumerate([2, 1]):
        size = len(setting.texts[index].tokens) - 1
        assert torch.allclose(batch.states[row, :size], setting.batch.states[index, :size], rtol=1e-4, atol=1e-4)
