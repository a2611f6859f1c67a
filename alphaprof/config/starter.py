"""What `alphaprof init` writes: a profile file that runs, from a target, drafts and files of prompts."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from alphaprof.config.heads import DFLASH, MODEL, causal_layers, longest_block, recognized, require_kind, settings_of
from alphaprof.config.load import load_profile
from alphaprof.config.model_files import ModelFiles, context_of
from alphaprof.errors import OptionInvalid

KINDS = {  # of drafts that are not models by themselves, by their names, where their files are not here
    "dspark": re.compile(r"dspark|dflash_.*_block7$", re.IGNORECASE),  # as DeepSeek calls its DSpark files of rank 0
    "dflash": re.compile(r"dflash", re.IGNORECASE),
    "p_eagle": re.compile(r"p-?eagle", re.IGNORECASE),
    "pard": re.compile(r"pard[-_]", re.IGNORECASE),
    "gemma4_assistant": re.compile(r"gemma-?4.*assistant", re.IGNORECASE),
    "eagle3": re.compile(r"eagle-?3", re.IGNORECASE),
    "eagle1": re.compile(r"eagle", re.IGNORECASE),
}
LOOKUP = ("ngram", "prompt_lookup", "lookup")  # names of the draft that every profile has: it needs no model
NEW_TOKENS = 256  # at most, and at most half of the target's context: the other half is for prompts
BLOCK, USUAL = 15, set(range(1, 9))  # drafts of a DFlash round, if files do not say; and gammas of profiles
ELSE = "# temperature 0; else {kind: sampled, temperature: 0.7, top_p: 0.9}"
AFTER = """\
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
    unknown = any(_draft(draft)["kind"] == DFLASH.kind and not Path(draft).exists() for draft in drafts)
    if more := sorted({*(_draft(draft).get("gamma", 1) for draft in drafts), *[BLOCK] * unknown} - USUAL):
        lines.append(f"gammas: {[*sorted(USUAL), *more]}   # speculative tokens, with the gamma of DFlash drafts")
    context = context_of(Path(target)) if Path(target).exists() else None
    greedy = {"kind": "greedy", "max_new_tokens": min(NEW_TOKENS, context // 2) if context else NEW_TOKENS}
    lines.append(f"continuation: {_flow(greedy)}   {ELSE}")
    out.write_text("\n".join(lines) + "\n" + AFTER, encoding="utf-8")
    load_profile(out)


def _draft_lines(drafts: Sequence[str], out: Path) -> Iterator[str]:
    names = set[str]()
    for draft in drafts:
        options = _draft(draft)
        name = options["kind"] if options["kind"] != MODEL.kind else "small"
        name = name if name not in names else f"{name}{len(names) + 1}"
        names.add(name)
        yield f"  {name}: {_flow(options | {'model': _from(draft, out)})}"


def _draft(draft: str) -> dict[str, Any]:
    """Return the options of a draft, by its files, or else by its name. Raises `ModelUnloadable` for files of a kind that
    cannot be measured.
    """
    place = Path(draft)
    if not place.exists():
        return {"kind": next((kind for kind, pattern in KINDS.items() if pattern.search(draft)), MODEL.kind), "model": draft}
    form, config, found = MODEL, dict[str, Any](), place if place.is_file() else ModelFiles.of(place)
    if isinstance(found, ModelFiles) and found.config:
        form, config = recognized(found.config, found.tensors), found.config
    kind = form.kind or MODEL.kind
    require_kind(draft, kind, found)
    options: dict[str, Any] = {"kind": kind, "model": draft}
    if form.block and not all(causal_layers(config, settings_of(config).get("layer_types") or [""])):
        options["gamma"] = longest_block({"block_size": BLOCK + 1} | config, form)  # whose rows read each other
    return options


def _is_base(target: Path) -> bool:
    """Return whether a local model has no chat template, so that prompts stay as they are."""
    config = target / "tokenizer_config.json"
    return (
        config.is_file()
        and "chat_template" not in config.read_text(encoding="utf-8")
        and not [*target.glob("chat_template*")]
    )


def _from(name: str, out: Path) -> str:
    """Return a local path as seen from the folder of the profile; a hub id as it is."""
    return os.path.relpath(name, out.parent) if os.path.exists(name) else name


def _flow(value: Any) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10_000)
    return text.removesuffix("...\n").strip()
