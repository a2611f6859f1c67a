"""The files of a trained head: whatever it began as, the loader of profiles reads the same head from them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from alphaprof.profiling.heads.eagle import Eagle3
from alphaprof.profiling.models.kinds import DraftModel
from alphaprof.profiling.training.initial import (
    CONFIG,
    WEIGHTS,
    config_content,
    layers_to_read,
    new_head,
    prepared,
    weights_content,
)
from alphaprof.profiling.training.train import card
from alphaprof.run.split import unit_of
from alphaprof.totals.count import TotalsRequest
from alphaprof.totals.files import read_totals
from tests.eagle import config, converted, loaded, target, tensors, written
from tests.heads import training_record
from tests.profiling.test_eagle import VARIANTS
from tests.synthetic import Domain, Recipe, write_run

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


def test_a_new_head_is_read_again_as_it_was(tmp_path: Path) -> None:
    model = target(2)
    network = new_head(model, torch.tensor([0, 2, 5]), seed=3)
    same(network, again(tmp_path / "written", network, model))


def test_a_new_head_begins_as_the_last_layer_of_its_target() -> None:
    """Without the embedding's half of its projections it computes what the target computes from its highest state."""
    model = target(2, num_hidden_layers=4)
    network = new_head(model, None, seed=3)
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
    ("blocks", "layers"), [(32, (2, 16, 29)), (8, (2, 4, 5)), (7, (2, 3, 4)), (6, (1, 3, 5)), (4, (1, 2, 3))]
)
def test_layers_are_those_that_engines_guess_where_these_are_three(blocks: int, layers: tuple[int, ...]) -> None:
    assert layers_to_read(blocks) == layers
    assert all(max(layers_to_read(few)) <= few for few in range(1, 9))
    assert all(len(set(layers_to_read(few))) == len(layers_to_read(few)) for few in range(1, 9))


def test_rows_of_ids_that_a_head_lacks_come_from_the_target(tmp_path: Path) -> None:
    model, described = target(1), config()
    draft = loaded(written(tmp_path / "given", described, tensors(described)), model)
    known = draft.network.lm_head.weight.clone()  # type: ignore[union-attr]
    network = prepared(draft, model, torch.tensor([1, 2, 3, 4]))
    assert network.lm_head is not None
    rows = model.network.get_output_embeddings().weight
    expected = torch.stack([rows[1], known[1], known[2], rows[4]])  # it proposes 0, 2, 3, 5, 6
    assert torch.equal(network.lm_head.weight, expected)
    assert network.ids is not None
    assert network.ids.tolist() == [1, 2, 3, 4]


def test_the_card_says_what_was_measured_and_nothing_breaks_out_of_it(tmp_path: Path) -> None:
    record = training_record()
    settings = record.settings | {"layers": [1, 3, 5], "init": None}
    record = dataclasses.replace(record, settings=settings, target=dataclasses.replace(record.target, model="a|b`c\n<x>"))
    run = write_run(tmp_path / "tested", Recipe(domains={"chat": Domain(documents=12)}, drafts={}, heads={"head": {}}))
    documents = run.documents()
    units = tuple(map(unit_of, documents["cluster"].to_pylist(), documents["prompt_hash"].to_pylist()))
    record = dataclasses.replace(record, units=dataclasses.replace(record.units, stop=units[8:], test=units[:8]))
    text = card(record, run, Path("heads/it's"))
    assert "a\\|b\\`c \\<x>" in text
    totals = read_totals(run, "head", TotalsRequest(["strict"], run.gammas)).to_pandas()[:8]  # the test part
    assert f"| {totals['accepted'].sum() / totals['proposals'].sum():.3f} |" in text
    assert f"{totals['tokens'].sum() / totals['rounds_1'].sum():.3f}" in text
    assert "may include" not in text
    begun = dataclasses.replace(record, settings=record.settings | {"init": "h", "learnt": None})
    assert "may include" in card(begun, run, Path("h"))
