"""What `alphaprof init` writes: a profile file that runs, from a target, drafts and files of prompts."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from alphaprof.config.load import load_profile
from alphaprof.errors import DataUnreadable, OptionInvalid, shown

KINDS = {  # of drafts that are not models by themselves, by what their name or config.json has
    "dflash": re.compile(r"dflash", re.IGNORECASE),
    "p_eagle": re.compile(r"p-?eagle", re.IGNORECASE),
    "pard": re.compile(r"pard[-_]|pard_token", re.IGNORECASE),
    "medusa": re.compile(r"medusa", re.IGNORECASE),
    "eagle3": re.compile(r"eagle-?3", re.IGNORECASE),
    "eagle1": re.compile(r"eagle", re.IGNORECASE),
}
BLOCK = 16  # rows of a DFlash block, if its files are not here
CLUSTERS = ("conversation_id", "conversation", "session_id", "user_id")
AFTER = """\
continuation: {kind: greedy, max_new_tokens: 256}   # temperature 0; else {kind: sampled, temperature: 0.7, top_p: 0.9}
decision: {min_speedup: 1.10, confidence: 0.95}     # GO if the speedup's lower bound reaches min_speedup
# Step times are measured here by default. Your engine's are more relevant: docs/costs.md, docs/vllm.md
# costs: {source: roofline, accelerator: h200, engine: sglang-h200}
"""


def write_profile(target: str, drafts: Sequence[str], data: Sequence[Path], out: Path) -> None:
    """Write `out`, with a source for each file of `data`. Raises `OptionInvalid` if `out` exists or a file is given twice,
    and `DataUnreadable` for data without a first row.
    """
    if out.exists():
        raise OptionInvalid(f"{out} exists already", "choose another --out, or delete it")
    if twice := [file for place, file in enumerate(data) if file in data[:place]]:
        raise OptionInvalid(f"--data names {twice[0]} twice", "name each file once")
    lines = [
        f"target: {{model: {_flow(_from(target, out))}}}   # hub id, local directory or .gguf file",
        "drafts:",
        *_draft_lines(drafts, out),
        "  ngram: {kind: prompt_lookup}   # no model: copies what followed the last tokens earlier in the text",
        "data:",
        *(f"  - {_source(file, domain, out)}" for domain, file in _domains(data).items()),
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


def _block(draft: str) -> int:
    """Return the rows of a block of a DFlash drafter."""
    file = Path(draft) / "config.json"
    config = json.loads(file.read_bytes()) if file.is_file() else {}
    return int(config.get("block_size") or (config.get("dflash_config") or {}).get("block_size") or BLOCK)


def _domains(data: Sequence[Path]) -> dict[str, Path]:
    """Return the data files by domain: each file's name without its suffix, numbered if another file has that name too."""
    domains: dict[str, Path] = {}
    for file in data:
        numbered = (f"{file.stem}{number}" for number in itertools.count(2))
        domains[next(name for name in itertools.chain([file.stem], numbered) if name not in domains)] = file
    return domains


def _source(data: Path, domain: str, out: Path) -> str:
    """Return the entry of a data file, with the column of its prompts."""
    row = _first_row(data)
    if isinstance(row.get("messages"), list):
        columns: dict[str, object] = {"messages": "messages"}
    else:
        texts = [name for name, value in row.items() if isinstance(value, str)]
        column = "prompt" if "prompt" in texts else next(iter(texts), None)
        if column is None:
            problem = f"no column of {data} holds text or messages; it has {shown(', '.join(row))}"
            raise DataUnreadable(problem, 'write one request per line: {"messages": [...]} or {"prompt": "..."}')
        columns = {"prompt": f"{{{column}}}", "chat": True}
    if found := [name for name in CLUSTERS if name in row]:
        columns["cluster"] = found[0]
    return _flow({"domain": domain, "path": _from(str(data), out)} | columns)


def _first_row(data: Path) -> dict[str, Any]:
    """Return the first row of a .jsonl, .csv or .parquet file. Raises `DataUnreadable`."""
    row: Any = None
    try:
        if data.suffix == ".parquet":
            import pyarrow.parquet as pq

            row = next(pq.ParquetFile(data).iter_batches(1)).to_pylist()[0]
        elif data.suffix == ".csv":
            import pandas as pd

            row = pd.read_csv(data, nrows=1).iloc[0].to_dict()
        else:
            with data.open(encoding="utf-8") as lines:
                row = json.loads(next(line for line in lines if line.strip()))
    except (OSError, ValueError, StopIteration, IndexError) as error:
        reason = getattr(error, "strerror", None) or str(error) or "it is empty"
        raise DataUnreadable(f"cannot read a row of {data}: {reason}", "give a .jsonl, .csv or .parquet file") from error
    if not isinstance(row, dict):
        raise DataUnreadable(f"the first line of {data} is not an object", 'write one request per line: {"prompt": "..."}')
    return row


def _from(name: str, out: Path) -> str:
    """Return a local path as seen from the folder of the profile; a hub id as it is."""
    return os.path.relpath(name, out.parent) if os.path.exists(name) else name


def _flow(value: Any) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10_000)
    return text.removesuffix("...\n").strip()
