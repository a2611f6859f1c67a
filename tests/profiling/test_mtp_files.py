"""MTP modules in checkpoints: what is read from them, and what is refused, with both sides named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM

from alphaprof.config.options import MtpDraft, TargetOptions
from alphaprof.errors import ModelUnloadable
from alphaprof.profiling.heads import mtp, wiring
from alphaprof.profiling.heads.draft import HeadDraft
from alphaprof.profiling.heads.mtp import ChainedModules, ReusedModule, beside_head, load_mtp
from alphaprof.profiling.models.load import Model, load_model
from alphaprof.profiling.texts.continuations import given
from alphaprof.profiling.texts.corpus import Document
from tests.profiling.modules import GLM, NEEDS_MTP, SIZES, MtpModel, modules_of, published, save, target

pytestmark = [pytest.mark.models, pytest.mark.usefixtures("one_thread"), NEEDS_MTP]
Tensors = dict[str, torch.Tensor]
TARGET_LAYERS = 2


def load(served: Model, folder: object, gammas: tuple[int, ...] = (1, 2), **settings: Any) -> HeadDraft:
    """The modules of a target's folder."""
    profile: Any = SimpleNamespace(target=TargetOptions(model=str(folder)), gammas=list(gammas))
    return load_mtp("ahead", MtpDraft(kind="mtp", **settings), profile, served, None)  # type: ignore[arg-type]


def checkpoint(folder: Path, modules: int, change: Callable[[Tensors], object] = len, **settings: Any) -> Model:
    """A target whose checkpoint holds modules, changed in some way."""
    network = target("glm4_moe", num_nextn_predict_layers=modules, **GLM | settings)
    tensors = published(modules_of(network, modules), TARGET_LAYERS)
    change(tensors)
    return load_model("target", TargetOptions(model=str(save(network, folder, tensors))), "float32")


def test_a_checkpoint_is_loaded_bit_for_bit(tmp_path: Path) -> None:
    network = target("glm4_moe", num_nextn_predict_layers=3, **GLM)
    modules = modules_of(network, 3)
    copies = {"model.layers.3.embed_tokens.weight": network.get_input_embeddings().weight}
    copies["model.layers.2.shared_head.head.weight"] = network.lm_head.weight
    folder = save(network, tmp_path, published(modules, TARGET_LAYERS) | copies)
    served = load_model("target", TargetOptions(model=str(folder)), "float32")
    before = served.digest
    draft = load(served, folder, reuse=False)
    expected = modules.layers.state_dict()
    found = draft.network.state_dict()  # type: ignore[attr-defined]
    assert {name.removeprefix("own.") for name in found} == set(expected)
    assert all(torch.equal(found[f"own.{name}"], tensor) for name, tensor in expected.items())
    assert served.network.config.get_text_config().num_hidden_layers == TARGET_LAYERS
    assert draft.depths == 2
    assert draft.reading["use of modules"].startswith("a chain")
    del served.__dict__["digest"]
    assert served.digest == before  # the target's weights and config are as they were


def test_one_module_is_reused_and_several_need_a_choice(tmp_path: Path) -> None:
    one = checkpoint(tmp_path / "one", 1)
    assert load(one, tmp_path / "one", gammas=(7,)).network.most is None
    with pytest.raises(ModelUnloadable, match="has 1 depths, but 2 are needed"):
        load(one, tmp_path / "one", reuse=False)
    three = checkpoint(tmp_path / "three", 3)
    with pytest.raises(ModelUnloadable, match="has 3 MTP modules, and engines use them in two ways: set reuse"):
        load(three, tmp_path / "three")
    assert load(three, tmp_path / "three", reuse=True).reading["use of modules"] == "the first module at every depth"
    assert load(three, tmp_path / "three", reuse=False, depths=3).depths == 3


def test_states_fed_back_before_the_norm_are_an_alternative(tmp_path: Path) -> None:
    """On the same tensors: what depth 1 drafts stays, and depth 2 reads the state that the norm has not changed yet."""
    served = checkpoint(tmp_path, 1)
    draft = load(served, tmp_path)
    (other,) = draft.alternatives
    assert (other.changed, other.depth, other.engines) == ("states fed back before the norm", 2, ("vLLM",))
    own, theirs = ({each.data_ptr() for each in way.network.own.state_dict().values()} for way in (draft, other))  # type: ignore[attr-defined]
    assert own == theirs
    ids = torch.arange(12)[None] * 5 % 7
    features = torch.randn(1, 12, 32, generator=torch.Generator().manual_seed(3))
    (normed, after), (bare, fed) = (list(way.network.states(ids, features, 2, 0)) for way in (draft, other))
    norm = draft.network.own[0].post_norm  # type: ignore[attr-defined]
    torch.testing.assert_close(norm(bare), normed)
    torch.testing.assert_close(other.network.logits(bare[0], 1), draft.network.logits(normed[0], 1))
    assert not torch.allclose(other.network.logits(fed[0], 2), draft.network.logits(after[0], 2), atol=0.1)
    prompt, text = np.array([1, 2], np.int32), np.arange(30, dtype=np.int32) * 5 % 7
    item = Document(0, "a", None, 0, 0, prompt, text, False, len(text), "logged", False)
    trials, _ = wiring.checked(draft, [given([item], served.eos)], 7)
    found = [(trial.changed, trial.depth, trial.positions) for trial in trials]
    assert found == [("", 1, 30), (other.changed, 2, 29)]
    three = checkpoint(tmp_path / "three", 3)
    assert not load(three, tmp_path / "three", reuse=False).alternatives


PLACE = f"model.layers.{TARGET_LAYERS}"
CHANGES: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "none": (lambda tensors: tensors.clear(), "holds no MTP modules"),
    "missing": (lambda tensors: tensors.pop(f"{PLACE}.hnorm.weight"), "lack weights of MTP modules: layers.0.hnorm.weight"),
    "misshapen": (
        lambda tensors: tensors.update({f"{PLACE}.eh_proj.weight": torch.ones(32, 32)}),
        r"other shapes.* \[32, 32\] for \[32, 64\]",
    ),
    "nan": (lambda tensors: tensors[f"{PLACE}.enorm.weight"].fill_(float("nan")), "hold NaN .*enorm.weight"),
    "another head": (
        lambda tensors: tensors.update({f"{PLACE}.shared_head.head.weight": torch.ones(7, 32)}),
        "shared_head.head.weight differs from the target's own",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_checkpoint_that_is_not_whole_is_refused(change: str, tmp_path: Path) -> None:
    edit, words = CHANGES[change]
    served = checkpoint(tmp_path, 1, edit)
    with pytest.raises(ModelUnloadable, match=f"draft ahead: .*{words}"):
        load(served, tmp_path)


def spread_over(network: Any, tokens: torch.device) -> Any:
    """A target as accelerate prepares it for a `device_map`: tokens are embedded, and positions turned, on one device."""
    hooks = pytest.importorskip("accelerate").hooks
    for module in (network.get_input_embeddings(), network.base_model.rotary_emb):
        hooks.add_hook_to_module(module, hooks.AlignDevicesHook(tokens))
    return network


def test_modules_of_a_target_on_several_devices_compute_where_its_lm_head_is() -> None:
    """Tensors without data stand for both devices, of a kind that need not be there."""
    here, there = torch.device("cuda", 0), torch.device("cpu")
    config = AutoConfig.for_model("glm4_moe", **SIZES | GLM, num_nextn_predict_layers=1)
    with FakeTensorMode(), torch.inference_mode():
        network = AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation="batched_mm")
        rotary, embedding = network.base_model.rotary_emb, network.get_input_embeddings()
        rotary.inv_freq = torch.empty_like(rotary.inv_freq, device=here)
        embedding.weight = torch.nn.Parameter(torch.empty_like(embedding.weight, device=here))
        modules = beside_head(MtpModel(spread_over(network, here), 1), there)
        ids, features = torch.zeros((2, 9), dtype=torch.long), torch.zeros((2, 9, 32))
        for head in (ReusedModule(modules, 7), ChainedModules(modules, 7)):
            states = list(head.states(ids, features, head.most or 3, 0))
            cached = head.cache().extend(ids[:, 1:4], features[:, :3])
            assert {each.device for each in (*states, cached, head.logits(states[0][0], 1))} == {there}
    assert rotary.inv_freq.device == here  # the target's is as it was


def test_modules_of_a_spread_target_draft_as_on_one_device(tmp_path: Path) -> None:
    served = checkpoint(tmp_path, 1)
    ids, features = torch.arange(18).reshape(2, 9) % 7, torch.randn(2, 9, 32)
    whole = load(served, tmp_path).network
    spread_over(served.network, torch.device("cpu"))
    spread = load(served, tmp_path).network
    for expected, found in zip(*(net.states(ids, features, 3, 0) for net in (whole, spread)), strict=True):
        assert torch.equal(expected, found)


def test_attention_that_the_registry_does_not_choose_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would not know of rounds."""
    served = checkpoint(tmp_path, 1)
    monkeypatch.setattr(mtp, "use_rounds", lambda layers, config: None)
    with pytest.raises(ModelUnloadable, match="cannot be run depth by depth: attention that transformers' registry"):
        load(served, tmp_path)
