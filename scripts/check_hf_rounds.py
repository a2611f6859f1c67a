#!/usr/bin/env python3
"""Hold replayed rounds against recorded rounds of Hugging Face assisted generation, on the real models.

    python scripts/check_hf_rounds.py RECORDS.json MODELS        (MODELS holds the folders that RECORDS.json names)

RECORDS.json has, for each pair of models, prompts as token ids, the generated ids, and for each gamma the rounds as
[drafted, matched]. Every prompt is profiled in float32 from scratch; the rounds are then replayed in the `hf` flavour.
Exit code 1 when a round or a number of matched tokens differs.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import yaml

from alphaprof.cli.progress import ConsoleProgress
from alphaprof.config.load import load_profile
from alphaprof.log.store import Run
from alphaprof.profiling.run.pipeline import profile
from alphaprof.totals.replay import Trace, run_lengths, steps

PAIRS = {
    "tinyllama+stories15M": ("tinyllama", {"kind": "model", "model": "stories15m"}),
    "smollm2_135m+24l": ("smollm2", {"kind": "layer_skip", "drop_layers": [10, 13, 16, 19, 22, 25]}),
}


def run_pair(pair: dict, models: Path, work: Path) -> Run:
    """Profile the prompts of one pair."""
    target, draft = PAIRS[pair["pair"]]
    draft = dict(draft)
    if "model" in draft:
        draft["model"] = str(models / draft["model"])
    rows = [json.dumps({"ids": record["prompt_ids"]}) for record in pair["records"]]
    (work / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    tree = {
        "target": {"model": str(models / target), "dtype": "float32"},
        "drafts": {"draft": draft},
        "data": [{"domain": "all", "path": "prompts.jsonl", "prompt_ids": "ids"}],
        "continuation": {"kind": "greedy", "max_new_tokens": pair["max_new_tokens"]},
        "gammas": pair["gammas"],
        "costs": {"repeats": 3},
    }
    path = work / "profile.yaml"
    path.write_text(yaml.safe_dump(tree))
    with ConsoleProgress() as progress:
        return profile(load_profile(path), work / "run", progress)


def differences(pair: dict, run: Run) -> Counter[str]:
    """What the replay of a pair's profile says against its records, counted."""
    counts: Counter[str] = Counter()
    positions = run.positions("draft", 0)
    documents = run.continuations(0)
    eos = run.manifest.target.eos
    for number, record in enumerate(pair["records"]):
        rows = positions.filter(pc.equal(positions["document"], number))
        token, top = rows["token"].to_numpy(), rows["draft_top"].to_numpy()
        counts["texts that differ"] += documents["continuation_ids"][number].as_py() != record["output_ids"]
        start, stop = np.array([0]), np.array([len(token)])
        trace = Trace(
            run=run_lengths(top == token, start, stop),
            proposed=rows["proposed"].to_numpy().astype(np.int64),
            start=start,
            stop=stop,
            limit=np.array([pair["max_new_tokens"]]),
            draft_ends=np.isin(top, eos),
        )
        for gamma in pair["gammas"]:
            recorded = record["runs"][str(gamma)]
            rounds = steps(trace, gamma, "hf")
            found = list(zip(rounds.drafted.tolist(), rounds.accepted.tolist(), strict=True))
            counts["runs"] += 1
            counts["rounds recorded"] += len(recorded)
            counts["runs with another number of rounds"] += len(found) != len(recorded)
            for (drafted, matched), (expected_drafted, expected_matched) in zip(found, recorded, strict=False):
                counts["rounds with another number matched"] += matched != expected_matched
                # After its first wrong token a draft is on a path that a teacher-forced pass does not see.
                hidden = drafted > expected_drafted > matched
                counts["rounds where the draft ended after a wrong token"] += hidden
                counts["rounds with another number drafted"] += drafted != expected_drafted and not hidden
    return counts


def main() -> None:
    """Check every pair and print the counts."""
    records, models = Path(sys.argv[1]), Path(sys.argv[2]).resolve()
    failed = False
    for pair in json.loads(records.read_text())["pairs"]:
        with tempfile.TemporaryDirectory() as work:
            counts = differences(pair, run_pair(pair, models, Path(work)))
        print(pair["pair"], dict(counts))
        failed |= any(count for name, count in counts.items() if "another" in name or "differ" in name)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
