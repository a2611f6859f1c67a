"""Untrusted names change nothing but their own text: an output of a run with one equals that of a run with a plain one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from typer.testing import CliRunner

from alphaprof.cli.app import app
from alphaprof.cli.common import one_line
from alphaprof.errors import AlphaprofError
from alphaprof.render import format as fmt
from alphaprof.render.answer import answer_text
from alphaprof.report.build import RunReport
from alphaprof.report.formats.text import ReportAnswer
from alphaprof.report.sections import NAMES as NAMED
from tests.loops import each
from tests.reporting import HOSTILE, reported
from tests.synthetic import Domain, Recipe, write_run

PLAIN = "plainname"
NAMES = {
    "markup": HOSTILE["markup"] + HOSTILE["html"] + HOSTILE["emoji code"] + "<!--]]>&lt;%{x}${y}{{z}}|`",
    "control": HOSTILE["newline"] + HOSTILE["escape"] + HOSTILE["direction"] + "\u200b\u2028\x00",
    "wide": HOSTILE["wide"],
    "huge": "ab" * 50_000,
}
LINKS, FORMULAS = ("https://evil.example/x", "www.evil.example"), ("$x_1$ & $y^2$", r"\frac{1}{2}", "=cmd|' /C calc'!A0")
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
    "rates, JSON": ("export", "{run}:small", "--to", "rates"),
    "an engine's configuration, JSON": ("export", "{run}:small", "--to", "vllm-config", "--gamma", "2"),
    "all sections": ("report", "{run}", "--show", "all"),
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


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> RunReport:
    """Sampled and off-policy text, text that is not what it claims, spans, and a reason that names domains."""
    drawn = Domain(documents=4, alpha=0.5, temperature=0.7, continuation="sampled", uniform=True)
    names = [*HOSTILE.values(), *LINKS, *FORMULAS]
    domains = dict.fromkeys(names, drawn)
    domains |= {f"{name} ": Domain(documents=2, on_policy=False, continuation="text") for name in names}
    rules = ("strict", "one_hot", "lossless", "additive_0p1")
    return reported(tmp_path_factory.mktemp("hostile"), Recipe(domains=domains, rules=rules, thinking=0.5))


@each("form", ["terminal", "md", "html", "svg", "json"])
def test_names_are_text_in_every_format(form: str, hostile: RunReport, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all sections: no markup, link, emoji, formula or broken table, and nothing that steers a terminal."""
    monkeypatch.setenv("COLUMNS", "100")
    text, names = answer_text(ReportAnswer(hostile, NAMED), form), {item.answer.domain for item in hostile.domains}
    assert {char for char in text if not char.isprintable()} <= {"\n"}
    if form == "terminal":
        assert max(map(cell_len, text.splitlines())) <= 100
    elif form == "json":
        assert (text.isascii(), {item["answer"]["domain"] for item in json.loads(text)["domains"]}) == (True, names)
    elif form == "md":
        assert not re.search(r"(?<!\\):\w+:|https://|www\.evil|<script", text)
        tables = [part.splitlines() for part in text.split("\n\n") if part.startswith("|")]
        assert len(tables) > 5
        for lines in tables:
            assert len({re.sub(r"\\.", "", line).count("|") for line in lines}) == 1
    else:
        written = HTMLParser()
        tags, words = list[str](), list[str]()

        def start(tag: str, given: list[tuple[str, str | None]]) -> None:
            tags.append(tag)
            if form == "svg":  # the rows of a figure have no room for long names, which its label has whole
                words.append(dict(given).get("aria-label") or "")

        monkeypatch.setattr(written, "handle_starttag", start)
        monkeypatch.setattr(written, "handle_data", words.append)
        written.feed(text)
        assert {"script", "img", "b" if form == "svg" else "iframe"}.isdisjoint(tags)
        assert [name for name in (HOSTILE["html"], HOSTILE["markup"], *FORMULAS) if name not in "\n".join(words)] == []


def figures(text: str) -> list[str]:
    """Numbers and verdicts of a text, in their order; no name here holds one. Figures of the page are left out: their marks
    lie where names leave room.
    """
    text = re.sub(r"<svg.*?</svg>", "", text, flags=re.DOTALL)
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
