"""The trained EAGLE-3 head in a real vLLM (golden/vllm/README.md): its rounds are those of one pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from alphaprof.config.load import load_profile
from alphaprof.log.store import Run
from alphaprof.profiling.run import pipeline
from alphaprof.totals.replay import Trace, steps
from tests.profiling.test_speculation import Silent

pytestmark = pytest.mark.demo_model
GOLDEN = Path(__file__).parent.parent / "golden"
RECORDED = json.loads((GOLDEN / "vllm" / "rounds-eagle3-stories15m.json").read_text())["requests"]
# By gamma: rounds of vLLM, and the drafts that it accepted by depth, without those after the end of a text.
COUNTED = {1: (3467, [1152]), 3: (3166, [1057, 327, 69]), 5: (3157, [1054, 325, 69, 14, 0])}


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def run(request: pytest.FixtureRequest, stories15m: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The recorded prompts, whose continuations the target writes anew, with the head's files as an engine reads them."""
    folder = tmp_path_factory.mktemp("vllm")
    lines = [json.dumps({"ids": item["prompt_ids"]}) for item in RECORDED]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    head = {"kind": "eagle3", "model": str(GOLDEN / "eagle3_stories15m"), "serve_as": request.param}
    tree = {
        "target": {"model": str(stories15m), "dtype": "float32"},
        "drafts": {"head": head},
        "data": [{"domain": "stories", "path": "prompts.jsonl", "prompt_ids": "ids"}],
        "continuation": {"kind": "greedy", "max_new_tokens": 120},
        "gammas": list(COUNTED),
        "rules": ["strict"],
        "costs": {"source": "none"},
    }
    (folder / "profile.yaml").write_text(yaml.safe_dump(tree))
    return pipeline.profile(load_profile(folder / "profile.yaml", []), folder / request.param, Silent())


def test_rounds_are_those_of_vllm_one_by_one(run: Run) -> None:
    """Texts too. Read as SGLang does, each state comes one layer later, and the rounds are others."""
    texts = run.continuations(0)["continuation_ids"].to_pylist()
    assert texts == [item["continuation_ids"] for item in RECORDED]
    table = run.positions("head", 0)
    columns = {name: table[name].fill_null(0).to_numpy().astype(np.int64) for name in ("accepted_run", "proposed")}
    sizes = np.array([len(text) for text in texts])
    stop = np.cumsum(sizes)
    for gamma, counted in COUNTED.items():
        trace = Trace(
            columns["accepted_run"], columns["proposed"], stop - sizes, stop, sizes, np.zeros(stop[-1], dtype=bool)
        )
        found = steps(trace, gamma)
        equal = [
            found.accepted[found.document == number].tolist() == _in_text(item["per_step_accepted"][str(gamma)], len(text))
            for number, (item, text) in enumerate(zip(RECORDED, texts, strict=True))
        ]
        by_depth = [int((found.accepted >= depth).sum()) for depth in range(1, gamma + 1)]
        if run.path.name == "vllm":
            assert all(equal)
            assert (len(found.accepted), by_depth) == counted
        else:
            assert sum(equal) < len(equal) / 10
            assert sum(by_depth) < 0.9 * sum(counted[1])


def _in_text(accepted: list[int], size: int) -> list[Any]:
    """What vLLM accepted in each round, without drafts after the end of the text. The prefill writes position 0."""
    kept, place = [], 1
    for number in accepted:
        kept.append(min(number, size - place))
        place += number + 1
    return kept
