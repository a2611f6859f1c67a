"""The files of a trained head: whatever it began as, the loader of profiles reads the same head from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from alphaprof.profiling.heads.eagle import Eagle3
from alphaprof.profiling.heads.eagle_new import config_content, new_head, weights_content
from alphaprof.profiling.models.kinds import DraftModel
from alphaprof.profiling.training import CONFIG, WEIGHTS
from tests.eagle import config, converted, loaded, target, tensors, written
from tests.profiling.test_eagle import VARIANTS

pytestmark = [pytest.mark.models, pytest.mark.usefixtures("one_thread")]


def again(folder: Path, network: Eagle3, model: DraftModel) -> Eagle3:
    """The head that the loader reads from what the trainer writes."""
    folder.mkdir()
    (folder / CONFIG).write_bytes(config_content(network, model, 3))
    (folder / WEIGHTS).write_bytes(weights_content(network, torch.float32))
    found = loaded(folder, model).network
    assert isinstance(found, Eagle3)
    return found


def same(one: Eagle3, other: Eagle3) -> None:
    assert one.wiring == other.wiring
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    ids = torch.randint(7, (2, 12), generator=torch.Generator().manual_seed(0))
    features = torch.randn(2, 12, one.fc.in_features, generator=torch.Generator().manual_seed(1))  # type: ignore[arg-type]
    with torch.inference_mode():
        for ours_at, theirs_at in zip(one.states(ids, features, 3, 0), other.states(ids, features, 3, 0), strict=True):
            assert torch.equal(ours_at, theirs_at)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_head_that_training_may_begin_with_is_read_again_as_it_was(variant: str, tmp_path: Path) -> None:
    changes, ids, more = VARIANTS[variant]
    model, described = target(1), config(**changes)
    network = loaded(written(tmp_path / "given", described, tensors(described, ids) | more), model).network
    assert isinstance(network, Eagle3)
    same(network, again(tmp_path / "written", network, model))


@pytest.mark.parametrize("layout", ["SafeAILab", "SpecForge"])
def test_heads_of_other_layouts_are_written_in_that_of_speculators(layout: str, tmp_path: Path) -> None:
    """SafeAILab's say nothing of their layers: after 2, 3 and 3 of six, which are two; so the target has eight."""
    model, described = target(1, num_hidden_layers=8), config(eagle_aux_hidden_state_layer_ids=[2, 4, 5])
    given = converted(described, tensors(described), layout)
    network = loaded(written(tmp_path / "given", *given), model).network
    assert isinstance(network, Eagle3)
    same(network, again(tmp_path / "written", network, model))
    stored = json.loads((tmp_path / "written" / CONFIG).read_text())
    assert stored["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert stored["norm_before_residual"] is False


def test_a_new_head_begins_as_the_last_layer_of_its_target() -> None:
    """Without the embedding's half of its projections it computes what the target computes from its highest state."""
    model = target(2, num_hidden_layers=4)
    network = new_head(model, torch.arange(7), seed=3)
    assert network.layers == (1, 2, 3)
    hidden = model.network.config.hidden_size
    ids = torch.randint(7, (1, 9), generator=torch.Generator().manual_seed(4))
    output = model.network(ids, output_hidden_states=True)
    with torch.no_grad():
        network.fc.weight[:, : 2 * hidden] = 0  # type: ignore[operator]
        network.fc.weight[:, 2 * hidden :] = torch.eye(hidden)  # type: ignore[operator]
        for name in "qkv":
            getattr(network.blocks[0].self_attn, f"{name}_proj").weight[:, :hidden] = 0
        features = torch.cat([output.hidden_states[layer] for layer in network.layers], -1)
        (states,) = network.states(ids, features, 1, 0)
        assert torch.allclose(network.logits(states[0], 1), output.logits[0], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("blocks", "layers"),
    [(32, (2, 16, 29)), (8, (2, 4, 5)), (7, (2, 3, 4)), (6, (1, 3, 5)), (4, (1, 2, 3)), (3, (1, 2)), (2, (1,)), (1, (0, 1))],
)
def test_layers_are_those_that_engines_guess_where_these_are_three(
    blocks: int, layers: tuple[int, ...], tmp_path: Path
) -> None:
    model = target(1, num_hidden_layers=blocks)
    network = new_head(model, torch.tensor([0, 2, 5]), seed=1)
    assert network.layers == layers
    same(network, again(tmp_path / "written", network, model))
