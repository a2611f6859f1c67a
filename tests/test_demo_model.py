"""The real demo model: its tokenizer, its layer-skip draft, and a whole run through the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from transformers import GenerationConfig

from alphaprof.config import TargetOptions
from alphaprof.errors import ModelUnloadable
from alphaprof.log.store import Run
from alphaprof.profiling import models
from alphaprof.profiling.drafts import layer_skip
from alphaprof.profiling.models import Model, load_model, load_tokenizer

pytestmark = pytest.mark.demo_model
ROOT = Path(__file__).parent.parent
NEW_TOKENS = 32


@pytest.fixture(scope="module")
def target(demo_model: Path) -> Model:
    return load_model("target", TargetOptions(model=str(demo_model)), "float32")


@pytest.fixture(scope="module")
def run(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The demo's profile, shorter, in float32, and with the target as a draft of itself."""
    folder = tmp_path_factory.mktemp("demo")
    tree = yaml.safe_load((ROOT / "profiles" / "demo.yaml").read_text())
    tree["target"] = {"model": str(demo_model), "dtype": "float32"}
    tree["drafts"]["self"] = {"kind": "model", "model": str(demo_model)}
    tree["data"] = [source | {"path": str(ROOT / "profiles" / source["path"])} for source in tree["data"][:3]]
    tree["continuation"]["max_new_tokens"] = NEW_TOKENS
    tree["costs"] = {"repeats": 3, "context": 64}
    (folder / "profile.yaml").write_text(yaml.safe_dump(tree))
    command = [sys.executable, "-m", "alphaprof", "profile", "profile.yaml", "--out", "run", "--limit", "2"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return Run.open(folder / "run")


def test_the_tokenizer_adds_no_bos_and_chat_text_is_what_the_template_says(demo_model: Path) -> None:
    tokenizer = load_tokenizer(TargetOptions(model=str(demo_model)))
    assert tokenizer("Hello  world\n\tx = 12; Zürich")["input_ids"] == [
        19556,
        216,
        905,
        198,
        197,
        104,
        446,
        216,
        33,
        34,
        43,
        1777,
        7170,
        5130,
    ]
    assert tokenizer.eos_token_id == 2


def test_the_target_as_its_own_draft_has_alpha_one_and_full_rounds(run: Run) -> None:
    log = pd.read_parquet(run.path / "positions", filters=[("draft", "==", "self")])
    assert (log["accept_strict"] == 1).all()
    assert (log["overlap"] > 1 - 1e-5).all()
    assert (log["kl_target_draft"] < 1e-5).all()
    totals = pd.read_parquet(run.path / "totals", filters=[("draft", "==", "self")])
    assert (totals["rounds_4"] == np.ceil(totals["tokens"] / 5)).all()


def test_the_skipping_draft_agrees_sometimes(run: Run) -> None:
    log = pd.read_parquet(run.path / "positions", filters=[("draft", "==", "skip")])
    assert 0.1 < log["accept_strict"].mean() < 0.9
    assert set(log["domain"]) == {"code", "structured", "math"}


def test_greedy_text_and_hf_rounds_equal_assisted_generation(run: Run, target: Model) -> None:
    from alphaprof.analysis.totals import read_totals

    skip = layer_skip("skip", target, [10, 13, 16, 19, 22, 25]).network
    skip.generation_config = GenerationConfig(
        eos_token_id=list(target.eos),
        pad_token_id=2,
        num_assistant_tokens=3,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    )
    totals = read_totals(run, "skip", "hf").to_pandas().set_index("document")
    for row in run.continuations(0).to_pylist()[:3]:
        ids = torch.tensor([row["prompt_ids"]])
        calls: list[int] = []
        hook = target.network.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        output = target.network.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            assistant_model=skip,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
        )
        hook.remove()
        assert output[0, ids.shape[1] :].tolist() == row["continuation_ids"]
        assert len(calls) == totals.loc[row["document"], "rounds_3"]


def test_the_report_of_the_run_reads_and_sums_up(run: Run) -> None:
    command = [sys.executable, "-m", "alphaprof", "report", str(run.path), "--format", "json"]
    report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert report["run"]["documents"] == 6
    own = [result for result in report["results"] if result["draft"] == "self"]
    assert {result["alpha"]["value"] for result in own} == {1.0}
    assert all(result["gammas"][3]["conditional"] == [1.0] * 4 for result in own)


def test_older_transformers_are_refused_for_gguf_with_the_reason(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "version", lambda _: "5.22.1")
    with pytest.raises(ModelUnloadable, match="reads the tokenizers of GGUF files wrongly") as caught:
        load_tokenizer(TargetOptions(model=str(demo_model)))
    assert "5.23 or later" in caught.value.hint
