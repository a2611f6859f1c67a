"""Which engines serve a draft as it was measured."""

from __future__ import annotations

import dataclasses

from alphaprof.report.serving import paste_formats
from tests.loops import each
from tests.synthetic import draft_facts, head_facts, lookup_facts

BOTH = ("vllm-config", "sglang-args")
MODEL, LOOKUP, HEAD = draft_facts("small"), lookup_facts("lookup"), head_facts("head", 3, reduced_vocabulary=False)
REDUCED = dataclasses.replace(HEAD, reduced_vocabulary=True)
MEDUSA = dataclasses.replace(HEAD, kind="medusa", engine_method="medusa", settings={}, in_one_step=True)
SKIP = dataclasses.replace(MODEL, kind="layer_skip", engine_method=None, settings={})
SERVED = {
    "a model, greedy": (MODEL, "strict", BOTH),
    "a model, its top tokens": (MODEL, "one_hot", BOTH),
    "a model, drawn": (MODEL, "lossless", BOTH[:1]),  # SGLang draws from heads only
    "prompt lookup": (LOOKUP, "strict", BOTH[:1]),  # SGLang's NGRAM is another draft
    "prompt lookup has one token to draw": (LOOKUP, "lossless", BOTH[:1]),
    "one token to draw in both": (dataclasses.replace(LOOKUP, settings=MODEL.settings), "lossless", BOTH),
    "a head": (HEAD, "lossless", BOTH),
    "a head of few tokens": (REDUCED, "one_hot", BOTH),
    "a head of few tokens, drawn": (REDUCED, "lossless", BOTH[:1]),
    "medusa": (MEDUSA, "one_hot", BOTH[:1]),
    "medusa, drawn": (MEDUSA, "lossless", ()),  # vLLM takes its top tokens
    "layers of the target": (SKIP, "strict", ()),
    "a rule of no engine": (MODEL, "additive_0p1", ()),
    "trees": (MODEL, "tree_2", ()),
    "what engines do by default": (REDUCED, "auto", BOTH),
    "a verdict on greedy and on sampled text": (MODEL, "strict and lossless", BOTH[:1]),
}


@each("name", SERVED)
def test_a_format_is_offered_where_its_engine_does_what_was_measured(name: str) -> None:
    facts, rule, expected = SERVED[name]
    assert paste_formats(facts, rule) == expected
