"""A head for a story teller, as the demo trains it: what it reaches on documents held out, and that real rounds are so."""

from __future__ import annotations

from pathlib import Path

import pytest

from alphaprof.config.load import load_profile
from alphaprof.config.options import Eagle3Draft
from alphaprof.profiling import profile as profiling
from alphaprof.profiling.decoding.speculative import Speculation
from alphaprof.profiling.models.kinds import load_draft
from alphaprof.profiling.models.load import load_model, load_tokenizer
from alphaprof.profiling.training import TrainingOptions, TrainingRecord, train
from alphaprof.rules import parse_rule
from alphaprof.run.split import texts_of
from alphaprof.totals.pool import decoded_totals
from tests.conftest import ROOT
from tests.runs import Silent


@pytest.mark.slow
@pytest.mark.demo_model
@pytest.mark.usefixtures("one_thread")
def test_a_short_training_drafts_three_tenths_right_and_real_rounds_are_those_of_replay(
    stories15m: Path, tmp_path: Path
) -> None:
    """A third of the demo's steps, on 12,219 tokens."""
    changes = [f"target.model={stories15m}", "costs.source=none", "drafts={}"]
    options = load_profile(ROOT / "profiles" / "stories.yaml", changes)
    profiling.profile(options, tmp_path / "run", Silent())
    run = train(options, str(tmp_path / "run"), tmp_path / "head", TrainingOptions(steps=28), Silent())
    assert TrainingRecord.read(tmp_path / "head").tokens > 11_000
    test = run.documents()
    totals, _ = decoded_totals(run, "head", test, run.manifest.profile.decision.rule)
    assert totals["accepted"].sum() / totals["proposals"].sum() > 0.30
    target, tokenizer = load_model("target", options.target, "float32", extra_eos=(2,)), load_tokenizer(options.target)
    given = Eagle3Draft(kind="eagle3", model=str(tmp_path / "head"))
    draft, total = load_draft("head", given, options, target, tokenizer), 0
    texts = {text.document: text for text in texts_of(run)}
    for row, number in list(enumerate(test["document"].to_pylist()))[:3]:
        for gamma in (1, 5):
            text = texts[number]
            decoded = Speculation(target, draft, parse_rule("strict"), gamma).decode(text.prompt, 96)
            assert decoded.ids.tolist() == text.ids.tolist()
            assert len(decoded.drafted) == totals[f"rounds_{gamma}"][row]
            total += len(decoded.drafted)
    assert total > 250
