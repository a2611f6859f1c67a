"""Trained block drafters on stories15M: whole drafts and rounds are those of a plain decoder, whose rounds are those of
z-lab's generator (DFlash with windows, DFlash2) or of DeepSpec's evaluator (DSpark).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from alphaprof.config.heads import recognized
from alphaprof.config.options import ModelOptions
from alphaprof.costs.shapes import ModelShape
from alphaprof.errors import ModelUnloadable
from alphaprof.profiling.decoding.speculative import Speculation
from alphaprof.profiling.heads.attention import Reach
from alphaprof.profiling.heads.dflash import Walked
from alphaprof.profiling.heads.draft import HeadDraft
from alphaprof.profiling.models.load import Model, load_model
from alphaprof.profiling.scoring.scorer import Scorer, by_document, position_table
from alphaprof.profiling.texts.continuations import Continuation
from alphaprof.profiling.texts.corpus import Document
from alphaprof.profiling.timing.steppers import read
from alphaprof.rules import parse_rule
from alphaprof.run.reader import Run
from alphaprof.run.schema import LogRules
from tests.loops import each
from tests.profiling.golden import drafted, models_of, recorded, require_drafted, rounds
from tests.profiling.test_golden_dflash import changed, profiled

pytestmark = pytest.mark.demo_model
GOLDEN = Path(__file__).parent.parent / "golden"
NAMES = {name: GOLDEN / f"dflash_windows_{name}_stories15m" for name in ("mixed", "all")}
NAMES |= {name: GOLDEN / f"{name}_stories15m" for name in ("dflash2", "dspark")}
TEXTS = {name: json.loads((folder / "rounds.json").read_text())["texts"] for name, folder in NAMES.items()}
of_each = pytest.mark.parametrize("name", NAMES)


def asked(name: str, folder: Path, target: Path, *gammas: int, **draft: Any) -> Run:
    prompts, size = [text["prompt"] for text in TEXTS[name]], len(TEXTS[name][0]["text"])
    kind = "dspark" if name == "dspark" else "dflash"
    return profiled(folder, target, prompts, *gammas, tokens=size, **({"kind": kind, "model": str(NAMES[name])} | draft))


@pytest.fixture(scope="module")
def runs(stories15m: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Where a layer is not causal, each γ is a draft; else one draft has all of them. The first of each drafter of its own
    kind is tried in other readings.
    """
    folder, read_once = tmp_path_factory.mktemp("windows"), {"check_wiring": False}
    given = {"mixed": read_once, "dflash2": {}, "dspark": {}}
    of_blocks = {name: asked(name, folder / name, stories15m, 3, 7, **given[name]) for name in given}
    return of_blocks | {"all": asked("all", folder / "all", stories15m, 7, gamma=None, depths=7, **read_once)}


@pytest.fixture(scope="module")
def loaded(runs: dict[str, Run]) -> dict[str, tuple[Model, dict[int, HeadDraft]]]:
    """The target, and the drafts by how many tokens they draft."""
    found = {name: models_of(run.manifest.profile) for name, run in runs.items()}
    return {name: (target, {draft.depths: draft for draft in drafts}) for name, (target, drafts) in found.items()}


@of_each
@each("gamma", (3, 7))
def test_one_pass_has_the_recorded_rounds_and_all_of_their_drafts(
    name: str, gamma: int, runs: dict[str, Run], loaded: Any
) -> None:
    run, texts, (target, drafts) = runs[name], TEXTS[name], loaded[name]
    assert run.continuations(0)["continuation_ids"].to_pylist() == [text["text"] for text in texts]
    draft = drafts[7 if name == "all" else gamma]
    feeds = isinstance(draft.network, Walked)
    assert [drafted(target, draft.network, text, gamma, feeds) for text in texts] == [
        text["drafts"][str(gamma)] for text in texts
    ]
    assert rounds(run, gamma, draft.name) == [recorded(text, gamma) for text in texts]
    assert draft.facts().lengths([1, 3, 7]) == ([1, 3, 7] if name == "all" else [gamma])


@pytest.mark.usefixtures("one_thread")
@of_each
@each("gamma", (3, 7))
def test_real_decoding_has_the_recorded_rounds_and_all_of_their_drafts(name: str, gamma: int, loaded: Any) -> None:
    target, drafts = loaded[name]
    engine = Speculation(target, drafts[7 if name == "all" else gamma], parse_rule("strict"), gamma)
    for text in TEXTS[name][:1]:
        require_drafted(engine, text, gamma)


def seen(change: Callable[[tuple[Reach, ...]], tuple[Reach, ...]]) -> Callable[[Any], Any]:
    return lambda network: network.changed(reach=change(network.reach))


def without(network: Any, method: str, answer: Callable[..., Any]) -> Any:
    """The same with a method that does nothing of its own."""
    return network.changed(**{method: answer})


WRONG: dict[str, tuple[str, Callable[[Any], Any], int]] = {
    # Of which drafter, how it would be read, and how many of the whole drafts of the first text stay at γ 7
    "window ignored": ("mixed", seen(lambda reach: tuple(replace(item, window=None) for item in reach)), 6),
    "window one wider": ("mixed", seen(lambda reach: (replace(reach[0], window=17), reach[1])), 25),
    "window on the full layer too": ("mixed", seen(lambda reach: (reach[0], replace(reach[1], window=16))), 0),
    "sliding layer not causal": ("mixed", seen(lambda reach: (replace(reach[0], causal=False), reach[1])), 17),
    "full layer causal too": ("mixed", seen(lambda reach: (reach[0], replace(reach[1], causal=True))), 23),
    "not causal": ("all", seen(lambda reach: tuple(replace(item, causal=False) for item in reach)), 10),
    "no window at all": ("all", seen(lambda reach: tuple(replace(item, window=None) for item in reach)), 2),
    "is_causal not read": ("dflash2", seen(lambda reach: tuple(replace(item, causal=True) for item in reach)), 20),
    "no window of DFlash2": ("dflash2", seen(lambda reach: tuple(replace(item, window=None) for item in reach)), 4),
    "no selector": ("dflash2", lambda network: without(network, "after", lambda logits, states: logits), 0),
    "no convolution": ("dflash2", lambda network: without(network, "through", plain), 0),
    "no multiplier, no softcap": ("dflash2", lambda network: network.changed(multiplier=1.0, cap=0.0), 16),
    "16 candidates": ("dflash2", lambda network: network.changed(top=16), 19),
    "no Markov head": ("dspark", lambda network: without(network, "after", lambda logits, states: logits), 4),
    "1 + K rows": ("dspark", lambda network: network.changed(anchored=0), 0),
    "causal": ("dspark", seen(lambda reach: tuple(replace(item, causal=True) for item in reach)), 10),
}


def plain(layer: Any, hidden_states: torch.Tensor, rows: int, **given: Any) -> Any:
    return layer(hidden_states, **given)


@each("words", WRONG)
def test_a_wrong_reading_changes_as_many_drafts_as_an_independent_program_says(words: str, loaded: Any) -> None:
    name, change, kept = WRONG[words]
    target, drafts = loaded[name]
    text = TEXTS[name][0]
    network = change(drafts[7].network)
    found = drafted(target, network, text, 7, isinstance(network, Walked))
    assert sum(map(list.__eq__, found, text["drafts"]["7"])) == kept


@of_each
def test_its_shape_is_that_of_its_config(name: str, loaded: Any) -> None:
    target, drafts = loaded[name]
    network, config = drafts[7].network, json.loads((NAMES[name] / "config.json").read_text())
    whole = ModelShape.from_config(target.network.config.to_dict())
    found, computed = network.shape(), ModelShape.of_head(config, whole, recognized(config))
    assert (found.parameters, found.one_pass, found.layers) == (computed.parameters, True, computed.layers)


@each("gamma", (3, 7))
def test_the_log_has_the_confidences_of_the_authors_program(gamma: int, runs: dict[str, Run], loaded: Any) -> None:
    """Of whole rounds, in the row where each starts, null where nothing is drafted; of first drafts alone where the head
    reads the text's tokens.
    """
    texts, (target, drafts) = TEXTS["dspark"], loaded["dspark"]
    rows, names = runs["dspark"].positions(drafts[gamma].name, 0), [f"draft_confidence_{d + 1}" for d in range(gamma)]
    logged = np.stack([rows[name].to_numpy() for name in names], 1)
    for found, text in zip(np.split(logged, len(texts)), texts, strict=True):
        for start, confidences in text["confidence"][str(gamma)]:
            assert found[start] == pytest.approx(confidences, abs=1e-5)
    batch, short = [], replace(drafts[gamma], name="short", context=90)  # some rounds draft less than gamma
    for number, (prompt, ids) in enumerate((np.int32(text["prompt"]), np.int32(text["text"])) for text in texts):
        document = Document(number, "a", None, 0, number, prompt, None, False, len(ids), "greedy", True, None)
        batch.append(Continuation(document, ids, "length"))
    for own_path in (True, False):
        scorer = Scorer(target, [short], target.vocabulary, own_path=own_path)
        columns, facts = scorer.score(batch)["short"], short.facts()
        table = position_table(
            batch, by_document(batch, columns), LogRules(("strict",)).of(facts), "short", starts_matter=True
        )
        known = [1 if not own_path and count else count for count in columns["proposed"]]
        expected = np.where(np.arange(gamma) < np.reshape(known, (-1, 1)), logged, np.nan)
        found = np.stack([table[name].to_numpy() for name in names], 1)
        assert found == pytest.approx(expected, abs=1e-5, nan_ok=True)
        assert len(set(known)) == (gamma + 1 if own_path else 2)


@torch.inference_mode()
def test_dspark_of_speculators_with_a_vocabulary_of_its_own_has_the_same_logits_of_its_tokens(
    stories15m: Path, loaded: Any, tmp_path: Path
) -> None:
    """In the order of the target's ids, whatever the order of the files."""
    (target, drafts), config = loaded["dspark"], json.loads((NAMES["dspark"] / "config.json").read_text())
    weights, ids = load_file(NAMES["dspark"] / "model.safetensors"), torch.arange(31999, 3, -2)
    head, moved = target.network.lm_head.weight, "markov_head.markov_w2.weight"
    weights |= {"lm_head.weight": head[ids].clone(), "embed_tokens.weight": head.clone()}
    weights |= {"d2t": ids - torch.arange(len(ids)), moved: weights[moved][ids]}
    kept = ("markov_rank", "enable_confidence_head", "confidence_head_with_markov", "mask_token_id", "block_size")
    written = {key: config[key] for key in kept} | {
        "speculators_model_type": "dspark",
        "transformer_layer_config": {key: config[key] for key in config if key not in ("architectures", "target_layer_ids")},
        "aux_hidden_state_layer_ids": [2, 3, 5],
        "draft_vocab_size": len(ids),
    }
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(written))
    run = asked("dspark", tmp_path / "run", stories15m, 3, model=str(tmp_path), check_wiring=False)
    _, (reduced,) = models_of(run.manifest.profile)
    assert (reduced.gamma, reduced.foreign, reduced.engines) == (3, ("SGLang",), ())
    assert [each.engines for each in reduced.alternatives if each.changed.startswith("4 rows")] == [("vLLM",)]
    text, features = read(target, reduced.network, np.array(TEXTS["dspark"][0]["prompt"], dtype=np.int32))
    one, other = (list(each.network.states(text[None, :-1], features[None], 3, 0)) for each in (reduced, drafts[3]))
    for depth in (1, 2, 3):
        whole = drafts[3].network.logits(other[depth - 1][0], depth)[:, ids.flip(0)]
        torch.testing.assert_close(reduced.network.logits(one[depth - 1][0], depth), whole)


def test_dflash2_of_speculators_is_read_from_its_own_keys(stories15m: Path, tmp_path: Path) -> None:
    """Which lie at the top level, where z-lab has them in dflash_config, and count the target's layers from 1."""
    config = json.loads((NAMES["dflash2"] / "config.json").read_text())
    layers, own = config["dflash_config"].pop("target_layer_ids"), config.pop("dflash_config")
    written = own | {
        "architectures": ["DFlash2DraftModel"],
        "speculators_model_type": "dflash2",
        "transformer_layer_config": {key: config[key] for key in config if key != "architectures"},
        "aux_hidden_state_layer_ids": [layer + 1 for layer in layers],
        "sliding_window_non_causal": not config["is_causal"],
    }
    (tmp_path / "model.safetensors").symlink_to(NAMES["dflash2"] / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(written))
    run = asked("dflash2", tmp_path / "run", stories15m, 7, model=str(tmp_path), check_wiring=False)
    facts = run.manifest.drafts["head"]
    assert (facts.architecture, facts.reading["layout"], facts.foreign) == ("DFlash2", "speculators", ("SGLang",))
    assert rounds(run, 7) == [recorded(text, 7) for text in TEXTS["dflash2"]]


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {  # changes of a config.json, by words of the refusal
    "markov_head_type \\S+lstm": ("dspark", {"markov_head_type": "lstm"}),
    "markov_rank -1": ("dspark", {"markov_rank": -1}),
    "hold tensors that its config does not use: markov_head": ("dspark", {"markov_rank": 0}),
    "no valid selector_top_k": ("dflash2", {"dflash_config": {"selector_top_k": 0}}),
    "mask token 32000 is not in its vocabulary of 32000": ("mixed", {"dflash_config": {"mask_token_id": 32000}}),
    "groups of 7 channels of 288": ("dflash2", {"dflash_config": {"conv_group_size": 7}}),
}


@each("words", REFUSED)
def test_settings_that_fit_no_files_are_refused(words: str, stories15m: Path, tmp_path: Path) -> None:
    name, changes = REFUSED[words]
    model = changed(tmp_path / str(len(words)), changes, NAMES[name])
    with pytest.raises(ModelUnloadable, match=words):
        asked(name, tmp_path / "run", stories15m, 7, model=model)


def test_deepseeks_files_of_rank_0_are_dspark_without_a_markov_head(stories15m: Path, tmp_path: Path) -> None:
    """The rows of DSpark, of which the anchor's drafts; a copy of the target's embedding is the target's."""
    weights = load_file(NAMES["dspark"] / "model.safetensors")
    weights = {name: each for name, each in weights.items() if not name.startswith(("markov", "confidence"))}
    embedding = load_model("t", ModelOptions(model=str(stories15m)), "float32").network.get_input_embeddings().weight
    save_file(weights | {"embed_tokens.weight": embedding.detach().clone()}, tmp_path / "model.safetensors")
    config = json.loads((NAMES["dspark"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"markov_rank": 0, "enable_confidence_head": False}))
    run = asked("dspark", tmp_path / "run", stories15m, 3, model=str(tmp_path), check_wiring=False)
    facts = run.manifest.drafts["head"]
    assert facts.reading["Markov head"].startswith("none")
    assert (facts.reading["embedding"], facts.reading["block"].split(";")[0]) == ("the target's", "3 rows")
    assert facts.foreign == ("SGLang",)
    assert not any("confidence" in name for name in run.positions("head", 0).column_names)
