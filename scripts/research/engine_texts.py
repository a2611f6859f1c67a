"""Texts by vLLM beside alphaprof's own: whether they are equal in float32, and how long each takes, in turns.

python scripts/research/engine_texts.py PYTHON_WITH_VLLM MODEL_FOLDER PROFILE [PROMPTS] [MAX_NEW_TOKENS] [SEQUENCES] [TURNS]
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import torch

from alphaprof.config.load import load_profile
from alphaprof.config.options import EngineOptions, TargetOptions
from alphaprof.profiling.engine.client import VllmEngine
from alphaprof.profiling.engine.texts import prompt_of
from alphaprof.profiling.models.load import eos_of, load_model, load_tokenizer
from alphaprof.profiling.texts.continuations import generate
from alphaprof.profiling.texts.corpus import Corpus


def main() -> None:
    """Print a line for each turn, then what differs."""
    python, model, profile = sys.argv[1:4]
    prompts, new, sequences, turns = [*map(int, sys.argv[4:]), *(60, 64, 16, 3)[len(sys.argv) - 4 :]]
    torch.set_num_threads(1)
    source = TargetOptions(model=model, dtype="float32", device="cpu")
    options = load_profile(Path(profile), [f"target.model={model}", f"continuation={{kind: greedy, max_new_tokens: {new}}}"])
    tokenizer = load_tokenizer(source)
    target = load_model("target", source, "float32", extra_eos=eos_of(tokenizer))
    documents = list(Corpus(options, tokenizer, target.context, target.vocabulary, limit=prompts))
    engine = VllmEngine(
        EngineOptions(python=python, args={"enforce_eager": True, "max_num_seqs": sequences}),
        {"model": model, "dtype": "float32"},
    )
    asked = [prompt_of(document, target.eos) for document in documents]
    list(engine.write(asked[:sequences], sequences))  # warms up
    texts: dict[str, dict[int, list[int]]] = {"vllm": {}, "transformers": {}}
    for turn in range(turns):
        took: dict[str, float] = {}
        for name in list(texts) if turn % 2 else list(texts)[::-1]:
            began = time.perf_counter()
            if name == "vllm":
                texts[name] = {answer["place"]: answer["ids"] for answer in engine.write(asked, sequences)}
            else:
                ordered = sorted(documents, key=lambda each: len(each.prompt))
                for start in range(0, len(ordered), sequences):
                    written = generate(target, ordered[start : start + sequences], target.vocabulary)
                    texts[name] |= {text.document.document: text.ids.tolist() for text in written}
            took[name] = time.perf_counter() - began
        tokens = sum(map(len, texts["vllm"].values()))
        print(f"turn {turn}: {tokens} tokens, vLLM {took['vllm']:.1f} s, transformers {took['transformers']:.1f} s")
    equal = [texts["vllm"][place] == texts["transformers"][place] for place in range(len(documents))]
    print(f"{sum(equal)} of {len(equal)} texts equal")
    for place in np.flatnonzero(~np.array(equal)).tolist():
        one, two = texts["vllm"][place], texts["transformers"][place]
        at = next(index for index, pair in enumerate(zip(one, two, strict=False)) if pair[0] != pair[1])
        ids = torch.tensor([[*documents[place].prompt.tolist(), *two[:at]]])
        with torch.inference_mode():
            logits = target.network(input_ids=ids).logits[0, -1].float().log_softmax(-1)
        pair = f"{one[at]} ({logits[one[at]]:.6f}) or {two[at]} ({logits[two[at]]:.6f})"
        print(f"prompt {place}: token {at}, {pair}; log-probabilities in brackets")
    engine.close()


if __name__ == "__main__":
    main()
