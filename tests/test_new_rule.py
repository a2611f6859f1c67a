"""A rule registered by this file: from a profile's YAML to the report."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from alphaprof.profiling.decoding.speculative import require_decodable
from alphaprof.report.build import build_report
from alphaprof.rules import RULES, SAMPLED, Parameter, Rule, lossless, lossless_emitted, parse_rule
from alphaprof.run.reader import Run
from tests.reporting import as_terminal, every
from tests.runs import profile_file, run_profile

pytestmark = pytest.mark.models
NEW = Rule(
    "as lossless, but only with probability `share`",
    lambda columns, share: share * lossless(columns),
    lambda columns, share: share * lossless_emitted(columns),
    (SAMPLED,),
    (Parameter("share", 0, 1, +1),),
    drawn=True,
)
CHOSEN = ["lossless", "strict", "reluctant_0p5", "reluctant_1"]
DRAWN = {"kind": "sampled", "temperature": 1.2, "seed": 3, "max_new_tokens": 20}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[Run]:
    """A run of a profile that names the rule, while the rule is registered."""
    folder = tmp_path_factory.mktemp("new")
    drafts = {"close": {"kind": "model", "model": str(tiny / "draft")}, "ngram": {"kind": "prompt_lookup"}}
    rules = ["lossless", "strict", {"reluctant": 0.5}, "reluctant:1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RULES, "reluctant", NEW)
        changes = {
            "continuation": DRAWN,
            "certificates": True,
            "costs": {"source": "none"},
            "decision": {"rule": "lossless"},
        }
        path = profile_file(folder, tiny, drafts=drafts, rules=rules, **changes)
        yield run_profile(path, folder / "run")


def test_the_log_has_its_column(run: Run) -> None:
    log = pd.read_parquet(run.path / "positions")
    close, ngram = (log[(log["draft"] == draft) & (log["proposed"] > 0)] for draft in ("close", "ngram"))
    assert close["accept_reluctant_0p5"].to_numpy() == pytest.approx(0.5 * close["overlap"].to_numpy(), abs=1e-6)
    assert np.array_equal(close["accept_reluctant_1"], close["accept_lossless"])
    assert np.array_equal(ngram["accept_reluctant_1"], ngram["target_prob_of_draft_top"])


def test_the_report_has_its_results_and_says_that_no_certificate_is_known(run: Run) -> None:
    report, log = build_report(run), pd.read_parquet(run.path / "positions")
    results = {(item.draft, item.rule, item.domain): item for item in every(report)}
    assert {rule for _, rule, _ in results} == set(CHOSEN)
    for draft in ("close", "ngram"):
        for domain in ("long", "short"):
            rows = log[(log["draft"] == draft) & (log["domain"] == domain) & (log["proposed"] > 0)]
            found = results[draft, "reluctant_0p5", domain]
            assert found.alpha.value == pytest.approx(rows["accept_reluctant_0p5"].mean(), abs=1e-6)
    less, same, known = (results["close", rule, "long"].gammas for rule in ("reluctant_0p5", "reluctant_1", "lossless"))
    assert same == known
    pairs = [(ours.tokens_per_round, theirs.tokens_per_round) for ours, theirs in zip(less, known, strict=True)]
    assert all(ours and theirs and 1 < ours.value < theirs.value for ours, theirs in pairs)
    assert report.section("target").certificates.unknown == ("lossless", "reluctant_0p5", "reluctant_1")
    assert "No certificate is known for lossless, reluctant_0p5, reluctant_1" in as_terminal(report, 200)


def test_a_log_that_was_written_without_it_is_enough(run: Run) -> None:
    """For other parameters, too; and its texts can be decoded."""
    report = build_report(run, rules=["reluctant_0p25"])
    log = pd.read_parquet(run.path / "positions", filters=[("draft", "==", "close"), ("domain", "==", "long")])
    wanted = ("close", "reluctant_0p25", "long")
    (found,) = (item for item in every(report) if (item.draft, item.rule, item.domain) == wanted)
    assert found.alpha.value == pytest.approx(0.25 * log.loc[log["proposed"] > 0, "overlap"].mean(), abs=1e-6)
    require_decodable(parse_rule("reluctant:1"), SAMPLED)
