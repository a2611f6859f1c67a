"""Runs of prompt lookup from texts alone: what a profiled run has, what a plain loop counts, and what nobody knows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from alphaprof.report.build import build_report
from alphaprof.report.sections import NAMES
from alphaprof.run.reader import Run
from alphaprof.run.schema import depth_names
from alphaprof.totals.count import TotalsRequest
from alphaprof.totals.files import read_totals
from tests.cli.test_cli_errors import HEAVY
from tests.cli.test_cli_errors import run as alphaprof
from tests.commands.test_import import failure, invoke
from tests.loops import each
from tests.reporting import as_first_screen
from tests.runs import run_of_prompts

Pair = tuple[list[int], list[int]]  # token ids of a prompt and its answer


def log(folder: Path, pairs: Sequence[Pair], name: str = "log", **more: Any) -> Path:
    path = folder / f"{name}.jsonl"
    rows = [{"prompt_token_ids": prompt, "token_ids": answer} | more for prompt, answer in pairs]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def imported(folder: Path, path: Path, *options: object, name: str = "run") -> Run:
    result = invoke("import", path, *options, "--out", folder / name)
    if result.exception:
        raise result.exception
    run = Run.open(folder / name)
    run.verify()
    return run


def totals(run: Run, draft: str) -> pd.DataFrame:
    return read_totals(run, draft, TotalsRequest(run.rules, run.gammas)).to_pandas()


@pytest.mark.models
@pytest.mark.usefixtures("one_thread")
@each("written", [{"kind": "greedy"}, {"kind": "sampled", "temperature": 1.5, "seed": 2}])
def test_totals_are_those_of_a_run_that_was_profiled(tmp_path: Path, tiny: Path, written: dict[str, Any]) -> None:
    """On sampled text a draft counts as kept if it was written, not by its probability, which only the target knows."""
    folder = tmp_path / written["kind"]
    folder.mkdir()
    ways = {"ngram-1-3": ("rightmost", 1), "ngram-2-3": ("rightmost", 2)}
    drafts = {
        name: {"kind": "prompt_lookup", "match": match, "min_ngram": low, "max_ngram": 3}
        for name, (match, low) in ways.items()
    }
    sampled = written["kind"] == "sampled"
    rules = ["one_hot"] if sampled else ["strict"]
    run = run_of_prompts(folder, tiny, continuation=written | {"max_new_tokens": 40}, rules=rules, drafts=drafts)
    texts = pd.read_parquet(folder / "run" / "continuations")
    path = log(
        folder, [(list(map(int, row.prompt_ids)), list(map(int, row.continuation_ids))) for row in texts.itertuples()]
    )
    asked = ("--min-ngram", 1, "--min-ngram", 2, "--max-ngram", 3, "--gamma", 1, "--gamma", 2, "--gamma", 3)
    found = imported(folder, path, *asked, *(("--temperature", 1.5) if sampled else ()), name="texts")
    for draft in ways:
        expected, mine = totals(run, draft), totals(found, draft)
        unscored = ["impossible", "mismatches", "clear_mismatches", "near_ties"]
        assert mine[unscored].isna().all(axis=None)
        other = [*unscored, *(["accepted", "control_1", "control_2", "control_3"] if sampled else [])]
        assert float(mine["accepted"].sum()) == float(mine["emitted"].sum())
        pd.testing.assert_frame_equal(mine.drop(columns=other), expected.drop(columns=other), check_dtype=False)
        assert mine["drafted_3"].sum() == 3 * mine["rounds_3"].sum()  # padded
    prompts = [run.documents()["prompt_hash"].to_pylist(), found.documents()["prompt_hash"].to_pylist()]
    assert prompts[0] == prompts[1]


def proposed(
    texts: list[Pair], number: int, end: int, sizes: tuple[int, int], rightmost: bool, pool: int | None
) -> list[int]:
    """What is drafted behind the first `end` tokens of a text, and of answers before it from the `pool`-th text on."""
    text = [*texts[number][0], *texts[number][1]][:end]
    for size in range(sizes[1], sizes[0] - 1, -1):
        run = text[-size:]
        places = [at for at in range(len(text) - size) if text[at : at + size] == run] if size < len(text) else []
        if places:
            return text[places[-1 if rightmost else 0] + size :]
        for answer in [answer for _, answer in texts[pool:number]][::-1] if pool is not None and len(run) == size else ():
            if found := [at for at in range(len(answer) - size) if answer[at : at + size] == run]:
                return answer[found[-1] + size :]
    return []


def rounds(texts: list[Pair], number: int, gamma: int, rightmost: bool, **way: Any) -> tuple[int, int, int]:
    """Rounds of a plain loop, drafted tokens, and accepted ones."""
    prompt, answer = texts[number]
    count = drafted = accepted = 0
    at = 1
    while at < len(answer):
        drafts = proposed(texts, number, len(prompt) + at, rightmost=rightmost, **way)[:gamma]
        if rightmost:
            drafts += [(prompt + answer)[len(prompt) + at - 1]] * (gamma - len(drafts))
        kept = 0
        while kept < len(drafts) and at + kept < len(answer) and drafts[kept] == answer[at + kept]:
            kept += 1
        count, drafted, accepted = count + 1, drafted + len(drafts), accepted + kept
        at += kept + 1
    return count, drafted, accepted


@each("match", ["leftmost", "rightmost"])
def test_rounds_are_those_of_a_plain_loop_with_and_without_a_pool(tmp_path: Path, match: str) -> None:
    """A cold pool fills in the order of the log; a warm one has the answers of another file first."""
    rng = np.random.default_rng(5)
    words = [rng.integers(0, 7, rng.integers(3, 7)).tolist() for _ in range(6)]

    def text(least: int) -> list[int]:
        return [token for word in rng.integers(0, 6, rng.integers(least, 5)) for token in words[word]]

    texts = [(text(1), text(1)) for _ in range(14)]
    path, before = log(tmp_path, texts[4:], match), log(tmp_path, texts[:4], f"earlier-{match}")
    asked = ("--match", match, "--min-ngram", 2, "--min-ngram", 3, "--max-ngram", 4, "--gamma", 2, "--gamma", 5)
    cold = imported(tmp_path, path, *asked, "--pool", name=f"cold-{match}")
    warm = imported(tmp_path, path, *asked, "--earlier", before, name=f"warm-{match}")
    assert list(cold.manifest.drafts) == ["ngram-2-4", "ngram-3-4", "pool-2-4", "pool-3-4"] == list(warm.manifest.drafts)
    seen = set()
    for run, first in ((cold, 4), (warm, 0)):
        for draft in run.manifest.drafts:
            table = totals(run, draft)
            low, pool = int(draft.split("-")[1]), first if draft.startswith("pool") else None
            for gamma in (2, 5):
                way = {"sizes": (low, 4), "rightmost": match == "rightmost", "pool": pool}
                expected = [rounds(texts, number, gamma, **way) for number in range(4, 14)]
                kept = table[depth_names("accepted", gamma)].sum(axis=1)
                found = zip(table[f"rounds_{gamma}"], table[f"drafted_{gamma}"], kept, strict=True)
                assert [tuple(map(int, row)) for row in found] == expected
                seen.add((draft, first if pool is not None else None, sum(row[0] for row in expected)))
    assert len({count for draft, _, count in seen if draft == "pool-2-4"}) == 4  # cold and warm differ, at both gammas


ANSWER = {"choices": [{"token_ids": [1, 2, 3]}, {"token_ids": [1, 2]}], "prompt_token_ids": [7, 8]}


@each(
    ("row", "documents"),
    [
        ({"prompt_token_ids": [7, 8], "token_ids": [1, 2, 3]}, [(2, 3)]),
        (ANSWER, [(2, 3), (2, 2)]),
        ({"custom_id": "a", "response": {"status_code": 200, "body": ANSWER}}, [(2, 3), (2, 2)]),
        ({"prompt": "a b a", "response": "b a"}, [(3, 2)]),
        ({"prompt": "a b a", "choices": [{"text": "b"}, {"message": {"content": "a b a"}}]}, [(3, 1), (3, 3)]),
    ],
)
def test_a_line_is_read_as_servers_and_people_write_it(tmp_path: Path, row: Any, documents: list[tuple[int, int]]) -> None:
    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="b"))
    tokenizer.pre_tokenizer = Whitespace()
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    path = folder / "log.jsonl"
    path.write_text(json.dumps(row | {"kind": "talk"}) + "\n" + json.dumps({"error": "overloaded", "kind": "talk"}) + "\n")
    run = imported(folder, path, "--tokenizer", folder, "--domain-key", "kind")
    table = run.documents().to_pandas()
    assert list(zip(table["prompt_tokens"], table["continuation_tokens"], strict=True)) == documents
    assert set(table["domain"]) == {"talk"}
    assert run.manifest.skipped == {"the engine answered with an error": 1}


@each(
    ("row", "options", "expected"),
    [
        ({"prompt": "a", "response": "b"}, (), "line 1: prompt_token_ids or token_ids are missing | log them"),
        ({"prompt_token_ids": [1], "token_ids": [-2]}, (), "token_ids.0 is -2"),
        ({"prompt_token_ids": [1], "token_ids": []}, (), "no answer to look up: with an empty prompt or answer (1)"),
        ({}, ("--min-ngram", 4, "--max-ngram", 3), "every --min-ngram exceeds every --max-ngram"),
        ({}, ("--domain", "a", "--domain", "b"), "1 files (1 distinct), given with 2 --domain"),
        ({}, ("--tokenizer", "nowhere"), "--tokenizer nowhere: "),
        ({"prompt_token_ids": [1], "token_ids": [2]}, ("--set", "target.dtype=auto"), "can only change decision.*, costs.*"),
        ({"prompt_token_ids": [1], "token_ids": [2]}, ("--set", "costs.source=measured"), "a report measures no step times"),
        ({"prompt_token_ids": [1], "token_ids": [2]}, ("--domain-key", "kind"), "'kind' is missing"),
        ({"prompt_token_ids": [1], "choices": 3}, ("--format", "texts"), "prompt_token_ids or token_ids are missing"),
        (
            {"prompt_token_ids": [1], "choices": [[2], None]},
            ("--format", "texts"),
            "prompt_token_ids or token_ids are missing",
        ),
        ([[1], {"token_ids": [2]}], (), "prompt_token_ids or token_ids are missing"),
    ],
)
def test_what_cannot_be_read_is_said_with_file_and_line(tmp_path: Path, row: Any, options: Any, expected: str) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps(row) + "\n")
    code, said = failure(invoke("import", path, *options, "--out", tmp_path / "run"))
    assert expected in said
    assert code in (2, 3)
    assert not (tmp_path / "run").exists()


LLAMA = {
    "model_type": "llama",
    "dtype": "bfloat16",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "vocab_size": 128256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
}
TIMES = "model,step,tokens,batch,context,ms\ntarget,decode,1,1,8,7\ntarget,verify,5,1,8,{}\nngram,lookup,1,1,8,0.05\n"


def repetitive(documents: int = 40) -> list[Pair]:
    rng = np.random.default_rng(3)
    found = []
    for _ in range(documents):
        prompt = rng.integers(0, 500, 30).tolist()
        found.append((prompt, [*prompt[:20], *rng.integers(0, 500, 5).tolist(), *prompt[10:]]))
    return found


def test_a_verdict_comes_with_a_table_and_a_roofline(tmp_path: Path) -> None:
    """One row of the search is enough for all drafts of a table, and config.json for a roofline."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    path = log(tmp_path, repetitive())
    asked = ("--target", tmp_path, "--min-ngram", 2, "--max-ngram", 3, "--max-ngram", 4, "--gamma", 4)
    run = imported(tmp_path, path, *asked)
    assert (run.manifest.target.dtype, run.manifest.target.shape["weight_bytes"]) == ("bfloat16", 2.0)
    verdicts = []
    for verify in (8, 30):
        (tmp_path / "times.csv").write_text(TIMES.format(verify))
        table = ("--set", "costs.source=table", "--set", f"costs.path={tmp_path / 'times.csv'}")
        answer = json.loads(invoke("report", run.path, *table, "--format", "json").stdout)["answer"]
        verdicts.append(answer["verdict"])
        priced = answer["tokens_per_round"]["value"] / ((verify + 0.05) / 7)  # every round verifies 5 tokens
        assert answer["speedup"]["value"] == pytest.approx(priced, rel=0.02)
    assert verdicts == ["GO", "NO-GO"]
    computed = ("--set", "costs.source=roofline", "--set", "costs.accelerator=h200")
    answer = json.loads(invoke("report", run.path, *computed, "--format", "json").stdout)["answer"]
    assert answer["speedup"]["value"] > 1.5
    exported = invoke("export", f"{run.path}:ngram-2-4", "--gamma", 4, "--to", "vllm-config").stdout
    assert json.loads(exported) | {"prompt_lookup_max": 4, "prompt_lookup_min": 2, "method": "ngram"} == json.loads(exported)


def test_what_only_the_target_knows_is_unknown(tmp_path: Path) -> None:
    run = imported(tmp_path, log(tmp_path, repetitive(6)), "--pool", "--gamma", 3)
    report = build_report(run)
    assert {result.near_ties for result in report.results} == {result.mismatches for result in report.results} == {None}
    assert all(result.alpha is not None and result.coverage == 1 for result in report.results)
    assert [note.code for note in report.notes if note.code in ("no_log", "near_ties", "imported")] == []
    drawn = [block for section in NAMES for block in report.drawn(section)[1] if isinstance(block, str)]
    way = "rightmost and filled up, as vLLM's V2 runner"
    assert {f"ngram-2-3: prompt lookup of 2 to 3 tokens, {way}"} <= set(drawn)
    assert f"pool-5-5: prompt lookup of 5 to 5 tokens in the text and the newest earlier answer, {way}" in drawn
    assert report.failures() == []
    assert " for served, " in as_first_screen(report)  # and not "served dtype unknown"
    code, said = failure(invoke("report", run.path, "--rules", "additive:0.1"))
    assert (code, "was imported from texts" in said) == (6, True)
    code, said = failure(invoke("export", f"{run.path}:pool-2-3", "--gamma", 3, "--to", "vllm-config"))
    assert "vLLM does not take this draft" in said


def test_no_model_library_is_needed(tmp_path: Path) -> None:
    words = ("import", str(log(tmp_path, repetitive(3))), "--out", str(tmp_path / "run"))
    result = alphaprof(tmp_path, *words, without=(*HEAVY, "tokenizers"))
    assert (result.returncode, result.stderr) == (0, "")
