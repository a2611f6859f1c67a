"""A rule that needs full distributions, registered by this file: from a profile's YAML to the report."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from alphaprof.errors import OptionInvalid, RuleNotDecodable
from alphaprof.log.run import Run
from alphaprof.profiling.decoding.speculative import require_decodable
from alphaprof.report.build import build_report
from alphaprof.rules import RULES, SAMPLED, Parameter, Rule, agrees, one_hot, parse_rule
from tests.reporting import as_terminal
from tests.runs import profile_file, run_profile

pytestmark = pytest.mark.models


def meeting(p: Any, q: Any, token: Any, share: float) -> tuple[Any, Any]:
    """The target draws from p by itself, and keeps a draft that is the same token, with probability `share`: sum p q, and
    q(x_t) once the token is known.
    """
    return share * (p * q).sum(1), share * q.gather(1, token[:, None])[:, 0]


NEW = Rule(
    "with probability `share` if the target, which draws by itself, draws the draft's token",
    lambda columns, share: share * one_hot(columns),
    lambda columns, share: share * agrees(columns),
    (SAMPLED,),
    (Parameter("share", 0, 1, +1),),
    drawn=True,
    measure=meeting,
)
CHOSEN = ["lossless", "strict", "multi_draft_2", "meeting_0p5", "meeting_1"]
DRAWN = {"kind": "sampled", "temperature": 1.2, "seed": 3, "max_new_tokens": 20}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[Run]:
    """A run of a profile that names the rule, while the rule is registered."""
    folder = tmp_path_factory.mktemp("new")
    drafts = {"close": {"kind": "model", "model": str(tiny / "draft")}, "ngram": {"kind": "prompt_lookup"}}
    rules = ["lossless", "strict", "multi_draft:2", {"meeting": 0.5}, "meeting:1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RULES, "meeting", NEW)
        changes = {
            "continuation": DRAWN,
            "certificates": True,
            "costs": {"source": "none"},
            "decision": {"rule": "lossless"},
        }
        path = profile_file(folder, tiny, drafts=drafts, rules=rules, **changes)
        yield run_profile(path, folder / "run")


def test_its_columns_are_those_of_whole_distributions(run: Run) -> None:
    log = pd.read_parquet(run.path / "positions")
    assert run.manifest.emitted == ("multi_draft_2", "meeting_0p5", "meeting_1")
    close, ngram = (log[(log["draft"] == draft) & (log["proposed"] > 0)] for draft in ("close", "ngram"))
    assert close["emitted_meeting_1"].to_numpy() == pytest.approx(close["draft_token_prob"].to_numpy(), abs=1e-6)
    assert close["accept_meeting_0p5"].to_numpy() == pytest.approx(0.5 * close["accept_meeting_1"].to_numpy(), abs=1e-6)
    # sum p q lies between what the two top tokens alone give and both largest probabilities.
    least = close["draft_top_prob"] * close["target_prob_of_draft_top"]
    most = close[["draft_top_prob", "target_top_prob"]].min(axis=1)
    assert (close["accept_meeting_1"].between(least - 1e-6, most + 1e-6)).all()
    assert close["accept_meeting_1"].mean() == pytest.approx(close["emitted_meeting_1"].mean(), abs=0.1)
    assert np.array_equal(ngram["accept_meeting_1"], ngram["target_prob_of_draft_top"])
    assert ngram["emitted_meeting_1"].isna().all()


def test_the_report_has_its_results_and_says_that_no_certificate_is_known(run: Run) -> None:
    report, log = build_report(run), pd.read_parquet(run.path / "positions")
    results = {(item.draft, item.rule, item.domain): item for item in report.results}
    assert {rule for _, rule, _ in results} == set(CHOSEN)
    for draft in ("close", "ngram"):
        for domain in ("long", "short"):
            rows = log[(log["draft"] == draft) & (log["domain"] == domain) & (log["proposed"] > 0)]
            found = results[draft, "meeting_1", domain]
            assert found.alpha.value == pytest.approx(rows["accept_meeting_1"].mean(), abs=1e-6)
    one, two = (results["close", rule, "long"].gammas for rule in ("meeting_1", "lossless"))
    pairs = [(ours.tokens_per_round, theirs.tokens_per_round) for ours, theirs in zip(one, two, strict=True)]
    assert all(ours and theirs and 1 < ours.value < theirs.value for ours, theirs in pairs)
    assert report.certificates.unknown == ("lossless", "multi_draft_2", "meeting_0p5", "meeting_1")
    assert "No certificate is known for lossless, multi_draft_2, meeting_0p5, meeting_1" in as_terminal(report, 200)


def test_what_is_not_implemented_for_it_is_refused(run: Run, tmp_path: Path) -> None:
    """Its verification, and values that the log was not written with."""
    with pytest.raises(RuleNotDecodable, match="meeting_1 needs full distributions"):
        require_decodable(parse_rule("meeting:1"), SAMPLED)
    with pytest.raises(OptionInvalid, match=r"is not enough for meeting_0p25, which needs whole"):
        build_report(run, rules=["meeting_0p25"])
