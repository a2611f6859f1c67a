"""A trained assistant of Gemma 4 on a tiny target, through a profile: whole drafts and rounds are those of a plain decoder,
which in turn drafts as a vLLM did.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from alphaprof.config.load import load_profile
from alphaprof.profiling.decoding.drafters import HeadDrafter
from alphaprof.profiling.decoding.speculative import Speculation
from alphaprof.profiling.heads.draft import HeadDraft
from alphaprof.profiling.heads.gemma import LEAST
from alphaprof.profiling.models.kinds import load_drafts
from alphaprof.profiling.models.load import Model, load_model, load_tokenizer
from alphaprof.profiling.models.private import RELEASE
from alphaprof.profiling.timing.steppers import read
from alphaprof.rules import parse_rule
from alphaprof.run.reader import Run
from tests.loops import each
from tests.profiling.test_golden_dflash import profiled, recorded
from tests.profiling.test_golden_head import rounds

pytestmark = [pytest.mark.models, pytest.mark.skipif(RELEASE < LEAST, reason="transformers builds no assistants")]
GOLDEN = Path(__file__).parent.parent / "golden" / "gemma4_assistant"
TEXTS = json.loads((GOLDEN / "rounds.json").read_text())["texts"]
GAMMAS = (2, 4)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recorded target, whose texts go on behind its EOS, with a tokenizer whose words stand for nothing."""
    folder = tmp_path_factory.mktemp("gemma")
    (folder / "model.safetensors").symlink_to(GOLDEN / "target" / "model.safetensors")
    config = json.loads((GOLDEN / "target" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(128)}, unk_token="w3"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def run(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    prompts, draft = [text["prompt"] for text in TEXTS], {"kind": "gemma4_assistant", "model": str(GOLDEN / "assistant")}
    folder = tmp_path_factory.mktemp("run")
    return profiled(folder, target, prompts, *GAMMAS, tokens=40, **draft)


@pytest.fixture(scope="module")
def loaded(run: Run) -> tuple[Model, HeadDraft]:
    options = load_profile(run.path.parent / "profile.yaml", [])
    found = load_model("target", options.target, "float32")
    (draft,) = load_drafts(options, found, load_tokenizer(options.target))
    assert isinstance(draft, HeadDraft)
    return found, draft


@torch.inference_mode()
def drafted(target: Model, network: Any, text: dict[str, Any], gamma: int) -> list[list[Any]]:
    """What one pass over a text drafts in the recorded rounds, which read what they draft: where each starts, and all of its
    tokens.
    """
    prompt, starts = len(text["prompt"]), [start for start, _ in text["drafts"][str(gamma)]]
    ids, features = read(target, network, np.array([*text["prompt"], *text["text"]], dtype=np.int32))
    states, tops = network.states(ids[None, :-1], features[None], gamma, 0), list[torch.Tensor]()
    for depth in range(1, gamma + 1):
        state = states.send(tops[-1][None]) if tops else next(states)
        tops.append(network.logits(state[0], depth).argmax(1))
    return [[start, torch.stack(tops, 1)[prompt + start - 2].tolist()] for start in starts]


@each("gamma", GAMMAS)
def test_one_pass_has_the_recorded_rounds_and_all_of_their_drafts(gamma: int, run: Run, loaded: Any) -> None:
    assert run.continuations(0)["continuation_ids"].to_pylist() == [text["text"] for text in TEXTS]
    target, draft = loaded
    assert [drafted(target, draft.network, text, gamma) for text in TEXTS] == [text["drafts"][str(gamma)] for text in TEXTS]
    assert rounds(run, gamma) == [recorded(text, gamma) for text in TEXTS]


@pytest.mark.usefixtures("one_thread")
@each("gamma", GAMMAS)
def test_real_decoding_has_the_recorded_rounds_and_all_of_their_drafts(
    gamma: int, loaded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    proposed: list[list[int]] = []
    propose = HeadDrafter.propose

    def spy(self: HeadDrafter, ids: list[int], most: int) -> Any:
        proposed.append((proposal := propose(self, ids, most)).ids.tolist())
        return proposal

    monkeypatch.setattr(HeadDrafter, "propose", spy)
    engine = Speculation(*loaded, parse_rule("strict"), gamma)
    for text in TEXTS:
        proposed.clear()
        found = engine.decode(np.array(text["prompt"], dtype=np.int32), len(text["text"]))
        assert found.accepted.tolist() == [accepted for _, accepted in recorded(text, gamma)]
        whole = [tokens for _, tokens in text["drafts"][str(gamma)]]
        assert proposed == [all_of[: len(tokens)] for tokens, all_of in zip(proposed, whole, strict=True)]
        assert proposed[0] == whole[0]
