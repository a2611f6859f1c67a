"""`batch_tokens: auto`: what a device with so much memory is given, resolved once and kept by the run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from alphaprof.commands.merge import merge
from alphaprof.config.load import load_profile
from alphaprof.config.part import Part
from alphaprof.errors import RunMismatch
from alphaprof.profiling import profile as profiling
from alphaprof.profiling.checks import as_measured
from alphaprof.profiling.scoring import batch_tokens
from alphaprof.profiling.scoring.batch_tokens import bytes_per_token, fitting
from alphaprof.run.reader import Run
from tests.loops import each
from tests.runs import Silent, profile_file
from tests.synthetic import interrupted

GB = 1e9
# Of the models' config.json, as they are published.
LLAMA_8B = {"layers": 32, "hidden": 4096, "heads": 32, "kv": 8, "inner": 14_336, "ids": 128_256}
LLAMA_70B = {"layers": 80, "hidden": 8192, "heads": 64, "kv": 8, "inner": 28_672, "ids": 128_256}
QWEN_8B = {"layers": 36, "hidden": 4096, "heads": 32, "kv": 8, "inner": 12_288, "ids": 151_936, "head_dim": 128}


def scorer(
    layers: int, hidden: int, heads: int, kv: int, inner: int, ids: int, drafts: Any = (), chunked: bool = True, **more: Any
) -> Any:
    """What a scorer of such a target in bfloat16 says of it."""
    config = SimpleNamespace(num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads, **more)
    config.num_key_value_heads, config.intermediate_size, config.get_text_config = kv, inner, lambda: config
    network = SimpleNamespace(config=config, parameters=lambda: iter(more.get("weights", ())))
    model = SimpleNamespace(network=network, dtype=torch.bfloat16, vocabulary=ids)
    return SimpleNamespace(target=SimpleNamespace(model=model, chunked=chunked), drafts=list(drafts))


def test_the_bytes_of_a_token_are_those_that_one_can_count() -> None:
    """Llama-3.1-8B: 131,072 bytes of keys and values, 65,536 of states, 86,016 of the MLP, 32,565 of statistics."""
    assert bytes_per_token(scorer(**LLAMA_8B)) == 131_072 + 65_536 + 86_016 + 65 * 128_256 / 256
    head = SimpleNamespace(by_depth=True, reads=(2, 16, 29), depths=8)
    lookup = SimpleNamespace(by_depth=False, reads=(24,), depths=1, chunked=True)
    assert bytes_per_token(scorer(**LLAMA_8B, drafts=[head, lookup])) == bytes_per_token(scorer(**LLAMA_8B)) + 14 * 8192
    assert bytes_per_token(scorer(**LLAMA_8B, chunked=False)) == bytes_per_token(scorer(**LLAMA_8B)) + 4 * 128_256
    # DeepSeek's latent attention is cached unpacked: 128 heads of 192 and 128; several experts are one wide MLP.
    deepseek = {"layers": 61, "hidden": 7168, "heads": 128, "kv": 128, "inner": 18_432, "ids": 129_280}
    more = {"head_dim": 64, "qk_head_dim": 192, "v_head_dim": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 2048}
    assert bytes_per_token(scorer(**deepseek, **more)) == pytest.approx(
        2 * 61 * 128 * 320 + 2 * 7168 * 8 + 6 * 18_432 + 32_825
    )
    assert bytes_per_token(scorer(**LLAMA_8B | {"inner": [14_336, 7168]})) == bytes_per_token(scorer(**LLAMA_8B))  # by layer


@each(
    ("model", "weights", "gpu", "expected"),
    [
        (LLAMA_8B, 16.1, 150.1, 65_536),  # H200; the most that was measured
        (LLAMA_8B, 16.1, 85.9, 65_536),  # A100 80 GB
        (LLAMA_8B, 16.1, 47.7, 32_768),  # L40S
        (QWEN_8B, 17.6, 25.4, 8192),  # a GPU of 24 GB: all of the room is taken
        (LLAMA_8B, 16.1, 17.2, 256),  # no room at all
        (LLAMA_8B, 16.1, 19.5, 2048),  # short of it
        (LLAMA_70B, 141.1, 300.2, 65_536),  # on two H200
        (LLAMA_70B, 141.1, 171.8, 8192),  # on two A100 80 GB
    ],
)
def test_a_gpu_takes_what_fits_and_never_more_than_was_measured(
    model: dict[str, Any], weights: float, gpu: float, expected: int
) -> None:
    assert fitting(gpu * GB, weights * GB, bytes_per_token(scorer(**model))) == expected


def test_gpus_of_one_kind_agree_and_more_memory_is_never_less() -> None:
    found = [fitting(total * GB, 16 * GB, 315_000) for total in torch.linspace(10, 160, 2000).tolist()]
    assert found == sorted(found)
    assert {*found} <= {2**power for power in range(8, 17)}


def test_parts_of_a_gpu_and_several_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """An actor that shares a GPU with three others has a quarter of it; a split target has all of its devices."""
    monkeypatch.setattr(batch_tokens, "memory", lambda device: (40 * GB, 4 * GB))
    where = [SimpleNamespace(device=torch.device("cuda", index)) for index in (0, 0, 1)]

    def found(weights: Any, workers: Any = 1, share: float = 1.0, **more: Any) -> int:
        execution = SimpleNamespace(workers=workers, gpus_per_worker=share)
        options: Any = SimpleNamespace(execution=execution)
        return batch_tokens.batch_tokens_of(options, scorer(**LLAMA_8B, weights=weights, **more))

    assert found(where[:2]) == 32_768
    assert found(where) == 65_536
    assert found(where[:2], workers=4, share=0.25) == fitting(10 * GB, 4 * GB, bytes_per_token(scorer(**LLAMA_8B))) == 8192
    assert found(where[:2], share=0.25) == 32_768  # alone
    assert found(where[:2], _attn_implementation="eager") == 8192
    assert found([SimpleNamespace(device=torch.device("cpu"))]) == 8192


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What auto becomes: each time that of a machine with more memory."""
    found: list[int] = []

    def more(options: Any, scorer: Any) -> int:
        found.append(80 * 2 ** len(found))
        return found[-1]

    monkeypatch.setattr(profiling, "batch_tokens_of", more)
    return found


def small(folder: Path, tiny: Path, **changes: Any) -> Path:
    drafts = {"close": {"kind": "model", "model": str(tiny / "draft")}}
    continuation = {"kind": "greedy", "max_new_tokens": 4}
    given = {"drafts": drafts, "continuation": continuation, "costs": {"source": "none"}, "batch_tokens": "auto"}
    return profile_file(folder, tiny, **given | changes)


@pytest.mark.models
def test_a_run_keeps_what_auto_became_and_goes_on_with_it(tiny: Path, tmp_path: Path, measured: list[int]) -> None:
    options = load_profile(small(tmp_path, tiny))
    assert options.batch_tokens == "auto"
    run = profiling.profile(options, tmp_path / "run", Silent())
    assert run.manifest.config["batch_tokens"] == run.manifest.profile.padded_tokens == 80
    left = interrupted(run, tmp_path / "left", 1)
    resumed = profiling.profile(options, Path(left.path), Silent(), resume=True)
    assert resumed.manifest.status == "complete"
    assert resumed.manifest.config["batch_tokens"] == 80  # though the machine has more now
    assert measured == [80]
    assert as_measured(options, run.manifest).batch_tokens == 80
    again = profiling.profile(options, tmp_path / "reused", Silent(), reuse=Path(run.path))
    assert again.manifest.config["batch_tokens"] == 160  # a run of its own
    given = options.model_copy(update={"batch_tokens": 70})
    assert profiling.profile(given, tmp_path / "given", Silent()).manifest.config["batch_tokens"] == 70
    assert measured == [80, 160]
    with pytest.raises(RunMismatch, match=r"another profile \(batch_tokens changed\)"):
        profiling.profile(given, Path(run.path), Silent(), resume=True)


@pytest.mark.models
def test_parts_from_gpus_of_other_sizes_are_not_merged(tiny: Path, tmp_path: Path, measured: list[int]) -> None:
    options = load_profile(small(tmp_path, tiny))
    parts = [profiling.profile(options, tmp_path / str(index), Silent(), part=Part(index, 2)) for index in range(2)]
    with pytest.raises(RunMismatch, match="batch_tokens 160, not 80: give it in the profile"):
        merge([str(run.path) for run in parts], tmp_path / "run")
    assert Run.open(parts[1].path).manifest.config["batch_tokens"] == 160
