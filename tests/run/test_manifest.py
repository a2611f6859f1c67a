"""What a manifest says of the process that wrote a run, and what it refuses to be."""

from __future__ import annotations

from typing import Any

import pytest

from alphaprof.run.manifest import Environment, differences


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, []),
        ({"device": "cuda"}, ["device cuda, not cpu"]),
        ({"torch_threads": 2}, ["2 threads, not 1"]),
        ({"packages": {"torch": "2", "transformers": "5", "numba": "1"}}, ["torch 2, not 1"]),
        ({"packages": {"torch": "1", "transformers": "5", "numba": "2"}}, []),
        ({"statistics": "b"}, ["other statistics of the same logits"]),
    ],
)
def test_a_process_that_computes_otherwise_is_named_by_what_differs(changed: Any, said: list[str]) -> None:
    """numba's version is none of that: the checksum of the statistics says what its loops compute."""
    before: Environment = {
        "device": "cpu",
        "torch_threads": 1,
        "packages": {"torch": "1", "transformers": "5", "numba": "1"},
        "statistics": "a",
    }
    here = dict(before) | changed
    assert differences(before, Environment(**here)) == said  # type: ignore[typeddict-item]
