"""Untrusted names change nothing but their own text: an output of a run with one equals that of a run with a plain one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from alphaprof.cli.app import app
from alphaprof.cli.common import one_line
from alphaprof.errors import AlphaprofError
from alphaprof.report import format as fmt
from alphaprof.run.reader import Run
from tests.loops import each
from tests.reporting import HOSTILE
from tests.synthetic import Domain, Recipe, write_run

PLAIN = "plainname"
NAMES = {
    "markup": HOSTILE["markup"] + HOSTILE["html"] + HOSTILE["emoji code"] + "<!--]]>&lt;%{x}${y}{{z}}|`",
    "control": HOSTILE["newline"] + HOSTILE["escape"] + HOSTILE["direction"] + "\u200b\u2028\x00",
    "wide": HOSTILE["wide"],
    "huge": "ab" * 50_000,
}
OUTPUTS = {
    "report": ("report", "{run}"),
    "report as JSON": ("report", "{run}", "--format", "json"),
    "report as Markdown": ("report", "{run}", "--format", "md"),
    "report as a page": ("report", "{run}", "--format", "html"),
    "check": ("check", "{run}", "--draft", "small", "--gamma", "2", "--min-alpha", "0.9"),
    "check as JSON": ("check", "{run}", "--draft", "small", "--gamma", "2", "--min-alpha", "0.9", "--format", "json"),
    "check as Markdown": ("check", "{run}", "--draft", "small", "--gamma", "2", "--min-alpha", "0.9", "--format", "md"),
    "check as JUnit": ("check", "{run}", "--draft", "small", "--gamma", "2", "--min-alpha", "0.9", "--format", "junit"),
    "the decision": ("check", "{run}"),
    "baseline": ("check", "{run}", "--draft", "small", "--baseline", "{run}:small"),
    "compare": ("compare", "{run}:small", "{run}:ngram"),
    "compare as JSON": ("compare", "{run}:small", "{run}:ngram", "--format", "json"),
    "vLLM's rates, JSON": ("export", "{run}:small", "--to", "vllm-synthetic"),
    "an engine's configuration, JSON": ("export", "{run}:small", "--to", "vllm-config", "--gamma", "2"),
    "trees": ("trees", "{run}:small", "--nodes", "4"),
    "trees as JSON": ("trees", "{run}:small", "--nodes", "4", "--format", "json"),
}


@cache
def run_of(folder: Path, name: str) -> Path:
    """A run of two domains, one of them called `name`, that warnings and reasons have cause to speak of."""
    domains = {name: Domain(documents=4, finish="eos"), "other": Domain(documents=4, alpha=0.4)}
    recipe = Recipe(domains=domains, lookups=("ngram",), rules=("strict", "one_hot", "additive_0p1"), certificates=True)
    return write_run(folder / "run", recipe).path


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[str, str]]:
    """What a command prints about the run with a name, and the message that it ends with."""
    root = tmp_path_factory.mktemp("names")

    @cache
    def told(what: str, key: str) -> tuple[str, str]:
        run = run_of(root / key, NAMES.get(key, PLAIN))
        found = CliRunner().invoke(app, [part.format(run=run) for part in OUTPUTS[what]])
        assert found.exception is None or isinstance(found.exception, AlphaprofError | SystemExit), found.exception
        message = getattr(found.exception, "message", "") + found.stderr
        return found.stdout.replace(str(root), ""), one_line(message)

    return told


@pytest.mark.slow
@each("key", NAMES)
@each("what", OUTPUTS)
def test_a_name_changes_nothing_but_its_own_text(
    printed: Callable[[str, str], tuple[str, str]], what: str, key: str
) -> None:
    (odd, message), (plain, usual) = printed(what, key), printed(what, "plain")
    name = NAMES[key]
    if "JSON" in what:
        found, expected = (json.loads(text, parse_constant=pytest.fail) for text in (odd, plain))
        assert swapped(found, name, key) == swapped(expected, PLAIN, "plain")
    else:
        assert not [char for char in odd if not char.isprintable() and char != "\n"]
        assert len("".join(odd.split())) < 1.3 * len(plain) + 20 * fmt.NAME
        assert figures(odd) == figures(plain)
    assert figures(message) == figures(usual)
    assert len(message) <= len(usual) + 20 * fmt.NAME


def figures(text: str) -> list[str]:
    """Numbers and verdicts of a text, in their order; no name here holds one."""
    text = re.sub(r"<path d=[^>]*>", "", text)  # the ground of a name is as wide as that
    return re.findall(r"[-+]?\d+\.\d+|\b(?:GO|NO-GO|UNDECIDED|PASS|FAIL|pass|fail|undecided)\b", text)


def swapped(value: Any, name: str, key: str) -> Any:
    """JSON with a name, whole or as reasons and warnings show it, as the plain one; and the run's path as well."""
    if isinstance(value, dict):
        return {swapped(part, name, key): swapped(item, name, key) for part, item in value.items()}
    if isinstance(value, list):
        return [swapped(item, name, key) for item in value]
    if isinstance(value, str):
        value = value.replace(f"/{key}/run", "/plain/run")
        return value.replace(name, PLAIN).replace(fmt.short(name), PLAIN)
    return value


@pytest.mark.slow
@pytest.mark.models
def test_a_hostile_dataset_is_profiled_and_reported_like_any_other(tiny: Path, tmp_path: Path) -> None:
    """Names and prompts of a dataset, from the file on disk to every output, with what is said on the way."""
    names = [*NAMES.values(), HOSTILE["long"], "=cmd|' /C calc'!A0"]
    prompts = ["<script>alert(1)</script>\u202e{x} [red] ${y} %s", "a\x00b\x1b[2Jc\r\n\u2028 tab\t"]
    rows = [{"kind": name, "text": f"{prompt} {turn}"} for turn in range(2) for name in names for prompt in prompts]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    profile = {
        "target": {"model": str(tiny / "target"), "dtype": "float32"},
        "drafts": {"small": {"kind": "model", "model": str(tiny / "draft")}, "ngram": {"kind": "prompt_lookup"}},
        "data": [{"domain": {"column": "kind"}, "path": str(tmp_path / "rows.jsonl"), "prompt": "{text}"}],
        "continuation": {"kind": "greedy", "max_new_tokens": 4},
        "gammas": [1, 2],
        "costs": {"repeats": 3, "context": 16},
    }
    (tmp_path / "profile.yaml").write_text(yaml.safe_dump(profile))
    file, run = str(tmp_path / "profile.yaml"), str(tmp_path / "run")
    commands = [["profile", file, "--dry-run"], ["profile", file, "--out", run]]
    commands += [["report", run, "--format", kind] for kind in ("terminal", "json", "md", "html")]
    for command in commands:
        found = CliRunner().invoke(app, command)
        assert found.exit_code == 0, (command, found.output[-2000:])
        assert {char for char in found.output if not char.isprintable()} <= {"\n"}, command
    assert set(Run.open(tmp_path / "run").documents()["domain"].to_pylist()) == set(names)
