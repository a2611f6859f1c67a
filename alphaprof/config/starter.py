"""What `alphaprof init` writes: a profile file that runs, from a target, drafts and files of prompts."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from alphaprof.config.load import load_profile
from alphaprof.errors import OptionInvalid

KINDS = {  # of drafts that are not models by themselves, by what their name or config.json has
    "dflash": re.compile(r"dflash", re.IGNORECASE),
    "p_eagle": re.compile(r"p-?eagle", re.IGNORECASE),
    "pard": re.compile(r"pard[-_]|pard_token", re.IGNORECASE),
    "eagle3": re.compile(r"eagle-?3", re.IGNORECASE),
    "eagle1": re.compile(r"eagle", re.IGNORECASE),
}
LOOKUP = ("ngram", "prompt_lookup", "lookup")  # names of the draft that every profile has: it needs no model
BLOCK = 16  # rows of a DFlash block, if its files are not here
AFTER = """\
continuation: {kind: greedy, max_new_tokens: 256}   # temperature 0; else {kind: sampled, temperature: 0.7, top_p: 0.9}
decision: {min_speedup: 1.10, confidence: 0.95}     # GO if the speedup's lower bound reaches min_speedup
# Step times are measured on a CPU, computed on a GPU. Your engine's are more relevant: docs/costs.md, docs/vllm.md
# costs: {source: roofline, accelerator: h200, preset: sglang-h200}
"""


def write_profile(target: str, drafts: Sequence[str], sources: Mapping[str, Mapping[str, Any]], out: Path) -> None:
    """Write `out`. `sources`: by domain, the path of a data file and its columns. Raises `OptionInvalid` if `out` exists."""
    if out.exists():
        raise OptionInvalid(f"{out} exists already", "choose another --out, or delete it")
    data = [{"domain": domain, **source, "path": _from(source["path"], out)} for domain, source in sources.items()]
    if _is_base(Path(target)):
        data = [{key: value for key, value in source.items() if key != "chat"} for source in data]
    drafts = [draft for draft in drafts if draft not in LOOKUP or Path(draft).exists()]
    lines = [
        f"target: {{model: {_flow(_from(target, out))}}}   # hub id, local directory or .gguf file",
        "drafts:",
        *_draft_lines(drafts, out),
        "  ngram: {kind: prompt_lookup}   # no model: copies what followed the last tokens earlier in the text",
        "data:",
        *(f"  - {_flow(source)}" for source in data),
    ]
    blocks = sorted({_block(draft) - 1 for draft in drafts if _kind(draft) == "dflash"} - set(range(1, 9)))
    if blocks:
        lines.append(f"gammas: {[*range(1, 9), *blocks]}   # speculative tokens; a DFlash block drafts block size - 1")
    out.write_text("\n".join(lines) + "\n" + AFTER, encoding="utf-8")
    load_profile(out)


def _draft_lines(drafts: Sequence[str], out: Path) -> Iterator[str]:
    names = set[str]()
    for draft in drafts:
        kind = _kind(draft)
        name = kind if kind != "model" else "small"
        name = name if name not in names else f"{name}{len(names) + 1}"
        names.add(name)
        yield f"  {name}: {{kind: {kind}, model: {_flow(_from(draft, out))}}}"


def _kind(draft: str) -> str:
    """Return the kind of draft that a name, or its files, look like."""
    config = Path(draft) / "config.json"
    text = draft + (config.read_text(encoding="utf-8") if config.is_file() else "")
    return next((kind for kind, pattern in KINDS.items() if pattern.search(text)), "model")


def _is_base(target: Path) -> bool:
    """Return whether a local model has no chat template, so that prompts stay as they are."""
    config = target / "tokenizer_config.json"
    return (
        config.is_file()
        and "chat_template" not in config.read_text(encoding="utf-8")
        and not [*target.glob("chat_template*")]
    )


def _block(draft: str) -> int:
    """Return the rows of a block of a DFlash drafter."""
    file = Path(draft) / "config.json"
    config = json.loads(file.read_bytes()) if file.is_file() else {}
    return int(config.get("block_size") or (config.get("dflash_config") or {}).get("block_size") or BLOCK)


def _from(name: str, out: Path) -> str:
    """Return a local path as seen from the folder of the profile; a hub id as it is."""
    return os.path.relpath(name, out.parent) if os.path.exists(name) else name


def _flow(value: Any) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10_000)
    return text.removesuffix("...\n").strip()
