"""The table of engines, and what their own parsers said to each row when `scripts/engine_conformance.sh` ran last."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from alphaprof.config.engines import EVERY, FORMATS, TOP, engine_of, used_by
from alphaprof.errors import OptionInvalid
from alphaprof.report.serving import PASTED
from tests.loops import each

SAID = (Path(__file__).parents[2] / "docs/research/engine-conformance.txt").read_text()
# SpeculativeMethod of vLLM 0.33.0, without the names of MTP in one model each.
METHODS = {"ngram", "ngram_gpu", "draft_model", "suffix", "custom_class", "eagle", "eagle3", "mtp", "dflash", "dspark"}
# SpeculativeAlgorithm of SGLang 0.5.23, and --spec-type of llama.cpp b11549.
ALGORITHMS = {"EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM", "DFLASH", "DSPARK", "UNO"}
TYPES = {"draft-simple", "draft-eagle3", "draft-mtp", "draft-dflash", "draft-dspark", "ngram-simple", "ngram-mod"}


def test_engines_know_the_words_of_the_table() -> None:
    for to, known in zip(PASTED, (METHODS, ALGORITHMS, TYPES), strict=True):
        for engine in FORMATS[to]:
            assert {method.name for method in engine.methods.values()} <= known


ROWS = [(to, engine, version) for to in PASTED for engine in FORMATS[to] for version in engine.versions]


@each("row", ROWS, ids=lambda row: f"{row[0]} {row[2]}")
def test_the_engines_parser_took_what_the_table_calls_served_and_nothing_else_is_called_so(row: tuple) -> None:
    """Prompt lookup has one token to draw, under every rule."""
    to, engine, version = row
    lines = re.findall(rf"^(\w+) +{to} {re.escape(version)} (\w+) (\w+): (served|not served): (.*)", SAID, re.MULTILINE)
    assert {state for state, *_ in lines} == {"ok"}
    found = {(kind, rule): (served == "served", words) for _, kind, rule, served, words in lines}
    assert {key for key, (served, _) in found.items() if served} == {
        (kind, rule) for kind, method in engine.methods.items() for rule in method.rules
    }
    for (kind, rule), (served, words) in found.items():
        if served:
            assert "ignored" not in words
            if to == "vllm-config":
                assert f"{engine.methods[kind].name}, 4 tokens" in words
                assert f"runner {engine.methods[kind].runner}" in words
                assert ("at 1, 8, 9, 64 sequences 4 4 0 0" in words) == engine.methods[kind].schedule
        elif kind in engine.methods and rule in engine.rules and kind != "prompt_lookup":
            assert "Error" in words or "SystemExit" in words or "ignored" in words or not_seen(to, kind, rule)


def not_seen(to: str, kind: str, rule: str) -> bool:
    """What only the source shows: llama.cpp's library calls `spec_retune` in draft-simple and draft-mtp alone, and vLLM 0.29
    reads rejection_sample_method in its V2 runner alone.
    """
    return to == "llamacpp-args" and kind in ("eagle3", "dflash", "dspark") and rule == "lossless"


def test_what_engines_refuse_or_drop_was_seen() -> None:
    for seen in (
        r"vllm-config 0.33 with method medusa: ValidationError",
        r"vllm-config 0.33 with two data-parallel ranks: .*ignored: the schedule",
        r"vllm-config 0.33 mtp, 2 modules, K = 3: \w+Error: .*divisible by n_predict=2",
        r"sglang-args 0.5.23 dflash lossless: not served: .*ignored: rejection sampling",
        r"sglang-args 0.5.23 dflash block: not served: .*ignored: block verification",
        r"sglang-args 0.5.23 with an EAGLE-3 head of speculators: ValueError",
        r"vllm-config 0.33 pard block: not served: .*ignored: block",
    ):
        assert re.search(seen, SAID)


def test_a_rule_names_the_engines_that_apply_it_and_how_they_are_asked() -> None:
    assert used_by("strict") == used_by("additive") == ""
    assert used_by("one_hot") == "vLLM, SGLang, llama.cpp"
    assert "llama.cpp with --spec-draft-sampling probabilistic" in used_by("lossless")
    assert "vLLM with draft_sample_method probabilistic and rejection_sample_method block" in used_by("block")
    assert set(EVERY) > set(TOP)


def test_a_version_is_for_an_engine() -> None:
    with pytest.raises(OptionInvalid, match="--to rates is for no engine"):
        engine_of("rates", "0.33")
