"""A kind of draft that the product does not know, defined in this file alone, in every command that asks a draft."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import yaml
from pydantic import Field
from typer.testing import CliRunner

from alphaprof.cli.app import app
from alphaprof.config.options import DRAFTS, DraftOptions, Whole
from alphaprof.errors import CheckFailed
from alphaprof.run.manifest import DraftFacts
from alphaprof.run.reader import Run
from alphaprof.run.schema import PROPOSED_LIMIT
from alphaprof.totals.count import TotalsRequest
from alphaprof.totals.files import read_totals

EVERY, COST_MS, NEW_TOKENS, GAMMAS = 4, 0.25, 24, (1, 2, 5)
Ids = np.ndarray[Any, Any]


class OracleDraft(DraftOptions):
    """The text itself, with a wrong token at every place that `every` divides."""

    loader = f"{__name__}:load"
    has_steps = False
    kind: Literal["oracle"]
    every: Whole = Field(EVERY, ge=2, description="places between two wrong tokens")


@dataclass(frozen=True)
class Oracle:
    """The draft: in a pass over a text it knows the text; at work it has the target write it first."""

    name: str
    target: Any
    every: int

    vocabulary = property(lambda self: self.target.vocabulary)
    models = ()

    def facts(self) -> DraftFacts:
        return DraftFacts(
            reference="an oracle",
            kind="oracle",
            architecture="none",
            fingerprint=hashlib.sha256(f"oracle {self.every}".encode()).hexdigest(),
            dtype="float32",
            device="cpu",
            parameters=0,
            context=None,
            vocabulary=self.vocabulary,
            eos=self.target.eos,
            noise=0.0,
            has_distribution=False,
            has_steps=False,
        )

    def told(self, places: Ids, tokens: Ids) -> Ids:
        return np.where(places % self.every == 0, (tokens + 1) % self.vocabulary, tokens)

    def teacher_forced(self, target: Any) -> None:
        return None

    def columns(self, ids: Ids, prompt: int) -> dict[str, Ids]:
        places = np.arange(prompt, len(ids))
        return {"draft_top": self.told(places, ids[prompt:]), "proposed": np.full(len(places), PROPOSED_LIMIT)}


class AtWork:
    """The oracle in one text that is being written."""

    reads = ()

    def __init__(self, draft: Oracle) -> None:
        self.draft = draft

    def start(self, ids: list[int]) -> None:
        from alphaprof.profiling.decoding.speculative import Plain

        written = Plain(self.draft.target).decode(np.array(ids), NEW_TOKENS).ids
        self.text = np.concatenate([ids, written, np.zeros(max(GAMMAS), dtype=np.int64)])

    def propose(self, ids: list[int], most: int) -> Any:
        import torch

        from alphaprof.profiling.decoding.drafters import Proposal

        places = np.arange(len(ids), len(ids) + most)
        return Proposal(torch.from_numpy(self.draft.told(places, self.text[places])))

    def observe(self, states: Any) -> None:
        pass

    def settle(self, accepted: int) -> None:
        pass


def load(name: str, draft: OracleDraft, options: Any, target: Any, tokenizer: Any) -> Oracle:
    from alphaprof.profiling.decoding.drafters import drafter_of
    from alphaprof.profiling.timing.steppers import TimedStep, round_steps

    def searches(draft: Oracle, text: Ids, batch: int, context: int, longest: int) -> list[list[TimedStep]]:
        return [[TimedStep(draft.name, "lookup", 1, batch, context, lambda: batch * COST_MS / 1e3)]]

    drafter_of.register(Oracle, lambda draft, *_, **__: AtWork(draft))
    round_steps.register(Oracle, searches)
    return Oracle(name, target, draft.every)


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    DRAFTS.append(OracleDraft)
    yield
    DRAFTS.remove(OracleDraft)


def profile_file(folder: Path, tiny: Path, **oracle: Any) -> Path:
    (folder / "data.jsonl").write_text(
        "".join(json.dumps({"text": word * 3}) + "\n" for word in ("aloud ", "be", "some of it"))
    )
    tree = {
        "target": {"model": str(tiny / "target"), "dtype": "float32"},
        "drafts": {"oracle": {"kind": "oracle"} | oracle, "ngram": {"kind": "prompt_lookup"}},
        "data": [{"domain": "all", "path": "data.jsonl", "prompt": "{text}"}],
        "continuation": {"kind": "greedy", "max_new_tokens": NEW_TOKENS},
        "gammas": list(GAMMAS),
        "costs": {"context": 16, "repeats": 3},
    }
    path = folder / "profile.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def command(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def answer(*arguments: object) -> Any:
    result = command(*arguments, "--format", "json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def profiled(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run, beside its profile."""
    folder = tmp_path_factory.mktemp("oracle")
    result = command("profile", profile_file(folder, tiny), "--out", folder / "run")
    assert result.exit_code == 0, result.output
    return folder / "run"


def rounds(prompt: int, length: int, gamma: int) -> int:
    """Rounds of a text of `length` tokens: the prefill writes the first, each round goes up to the next wrong draft."""
    place, count = prompt + 1, 0
    while place < prompt + length:
        place, count = place + min(gamma, -place % EVERY) + 1, count + 1
    return count


@pytest.mark.models
def test_its_rounds_are_what_the_arithmetic_says(profiled: Path) -> None:
    run = Run.open(profiled)
    texts = run.documents().to_pylist()
    totals = read_totals(run, "oracle", TotalsRequest(["strict"], run.gammas))
    rows = {row["document"]: row for row in totals.to_pylist()}
    for gamma in GAMMAS:
        expected = [rounds(text["prompt_tokens"], text["continuation_tokens"], gamma) for text in texts]
        assert [rows[text["document"]][f"rounds_{gamma}"] for text in texts] == expected
        assert min(expected) > 1
    (facts,) = [facts for name, facts in run.manifest.drafts.items() if name == "oracle"]
    assert (facts.kind, facts.has_distribution, facts.has_steps, facts.starts_matter) == ("oracle", False, False, False)


@pytest.mark.models
def test_it_is_reported_with_its_own_cost(profiled: Path) -> None:
    report = answer("report", profiled)
    (result,) = [item for item in report["sections"]["drafts"] if item["draft"] == "oracle"]
    table = Run.open(profiled).latency().to_pylist()
    (cost,) = [row for row in table if row["model"] == "oracle"]
    assert (cost["step"], cost["p10_ms"], cost["p90_ms"]) == ("lookup", COST_MS, COST_MS)
    assert set(report["times"]["lookup_ms"]) == {"oracle", "ngram"}
    assert result["coverage"] == 1
    assert result["alpha"]["value"] == pytest.approx(1 - 1 / EVERY, abs=0.1)
    assert all(item["speedup"] is not None for item in result["gammas"])
    losses = [item for item in report["sections"]["causes"] if item["draft"] == "oracle"]
    assert losses
    assert all("prompt lookup" not in [cause["name"] for cause in item["causes"]] for item in losses)
    text = command("report", profiled)
    assert text.exit_code == 0
    assert "oracle" in text.output


@pytest.mark.models
def test_it_is_checked_compared_and_exported(profiled: Path) -> None:
    assert command("check", profiled, "--draft", "oracle", "--min-alpha", "0.3").exit_code == 0
    assert isinstance(command("check", profiled, "--draft", "oracle", "--min-alpha", "0.99").exception, CheckFailed)
    found = answer("compare", f"{profiled}:oracle", f"{profiled}:ngram", "--rules", "strict")
    (difference,) = found["differences"]
    assert difference["difference"]["value"] < 0
    rates = json.loads(command("export", f"{profiled}:oracle", "--to", "rates").stdout)
    assert rates["gammas"][0]["marginal_all"][0] > 0.3
    assert "vLLM has no method for" in command("export", f"{profiled}:oracle", "--to", "vllm-config").exception.message
    target = answer("report", profiled, "--show", "target")["sections"]["target"]
    assert "oracle" not in {item["draft"] for item in target["coverage"]}  # it proposes one chain of tokens


@pytest.mark.models
def test_it_decodes_for_real_as_replayed(tiny: Path, tmp_path: Path) -> None:
    line = ("validate", profile_file(tmp_path, tiny), "--gamma", 5, "--repeats", 1)
    found = json.loads(command(*line, "--tolerance", "1000", "--format", "json").stdout)
    (cell,) = [cell for cell in found["cells"] if cell["draft"] == "oracle"]
    assert cell["same_text"] == cell["same_rounds"] == cell["documents"] == 3
    assert cell["tokens_per_round"]["measured"] == cell["tokens_per_round"]["predicted"]


@pytest.mark.models
def test_it_is_looked_at_before_a_run(tiny: Path, tmp_path: Path) -> None:
    found = answer("profile", profile_file(tmp_path, tiny), "--dry-run")
    contexts = {check["subject"] for check in found["checks"] if check["name"] == "context"}
    assert contexts == {"target", "oracle", "ngram"}
