"""The documentation is true: generated pages are in sync, commands and options exist, paths lead somewhere."""

from __future__ import annotations

import re
import runpy
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from typer.testing import CliRunner

from alphaprof.cli.app import app
from alphaprof.commands.schema import json_schema
from alphaprof.config import options
from alphaprof.config.profile import ProfileOptions
from alphaprof.run.notes import NOTES, REMARKS
from tests.synthetic import Recipe, write_run

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
INDEX = ROOT / "docs" / "README.md"


def help_of(command: str) -> str:
    """What --help says of a command."""
    result = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    return result.output


def anchors(page: Path) -> set[str]:
    """What links to the parts of a page are made of: headings in lower case, without punctuation, with hyphens."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def fields(node: Any, schema: dict[str, Any], place: str = "", within: tuple[str, ...] = ()) -> Iterator[str]:
    """The paths of all fields of a JSON Schema, with [] behind lists."""
    if "$ref" in node:
        name = node["$ref"].rpartition("/")[2]
        if name not in within:
            yield from fields(schema["$defs"][name], schema, place, (*within, name))
        return
    for inner in node.get("anyOf", ()):
        yield from fields(inner, schema, place, within)
    if isinstance(node.get("items"), dict):
        yield f"{place}[]"
        yield from fields(node["items"], schema, f"{place}[]", within)
    for name, inner in node.get("properties", {}).items():
        path = f"{place}.{name}".lstrip(".")
        yield path
        yield from fields(inner, schema, path, within)


def test_files_of_a_run_that_the_pages_name_are_those_that_it_has(tmp_path: Path) -> None:
    folder = Path(write_run(tmp_path / "run", Recipe()).path)
    columns = re.findall(r"^## .*: `([^`]+)`", (ROOT / "docs" / "columns.md").read_text(), re.MULTILINE)
    (listed,) = re.findall(r"```text\n(manifest.json.*?)```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL)
    places = [name.replace("NAME", "small") for name in (*columns, *(line.split()[0] for line in listed.splitlines()))]
    assert len(places) > 9
    unwritten = {"continuations/", "prompts/", "records/", "engines.parquet"}  # by a run without models
    assert {place for place in places if not (folder / place).exists()} <= unwritten


def test_fields_and_notes_that_the_pages_name_exist() -> None:
    schema = json_schema("report")
    there = {*fields(schema, schema)}
    text = "\n".join(page.read_text() for page in PAGES if "decisions" not in page.parts)
    named = re.findall(r"`((?:answer|traffic|conditions|sections|times|domains\[\]|drafts\[\])\.[\w.\[\]]+)`", text)
    assert len({*named}) > 15
    assert {path for path in named if path not in there and path != "sections.NAME"} == set()
    codes = re.findall(r"\bnotes? `(\w+)`", text)
    assert len({*codes}) > 5
    assert {code for code in codes if code not in {*NOTES, *REMARKS}} == set()


def test_reference_pages_are_what_the_declarations_say() -> None:
    generated = runpy.run_path(str(ROOT / "scripts" / "make_reference.py"))["pages"]()
    assert [path.name for path, text in generated if path.read_text() != text] == []


def test_the_page_of_the_profile_has_every_group_with_its_keys() -> None:
    page = (ROOT / "docs" / "profile.md").read_text()
    schema = ProfileOptions.model_json_schema()
    groups = [*schema["$defs"].values(), *(draft.model_json_schema() for draft in (*options.DRAFTS, options.HybridOptions))]
    keys = {key for group in (schema, *groups) for key in group["properties"]}
    assert len(groups) > 15
    assert {key for key in keys - {"kind", "source"} if f"`{key}`" not in page} == set()
    kinds = {kind for draft in options.DRAFTS for kind in get_args(draft.model_fields["kind"].annotation)}
    assert {kind for kind in kinds if f"`kind: {kind}`" not in page and f"- `{kind}`: " not in page} == set()
    assert {"`hybrids.NAME`", "`vllm`"} <= {*re.findall(r"`[\w.]+`", " ".join(re.findall(r"^## .*", page, re.MULTILINE)))}


@pytest.mark.parametrize("command", ["report", "check", "compare", "validate", "predict", "doctor"])
def test_every_answer_has_the_formats_that_the_readme_names(command: str) -> None:
    (choices,) = re.findall(r"--format\s+[<\[]([a-z|]+)[>\]]", help_of(command))  # of older typers: brackets
    named = re.search(r"with `--format md`, `html` and `json`", README)
    assert named is not None
    assert {"terminal", "md", "html", "json"} <= set(choices.split("|"))


def test_the_road_and_the_places_that_the_page_for_developers_names_exist() -> None:
    (road,) = re.findall(r"\| file \| produces \|\n(.*?)\n\n", README, re.DOTALL)
    places = re.findall(r"`([\w/]+\.py)`", road)
    assert len(places) >= 12
    assert [place for place in places if not (ROOT / "alphaprof" / place).exists()] == []
    developing = re.findall(r"`(alphaprof/[a-z_/]+(?:\.py)?)`", (ROOT / "docs" / "developing.md").read_text())
    assert [name for name in developing if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_options_of_commands_in_workflows_exist(page: Path) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)
    lines = [line.split("#")[0] for block in blocks for line in block.splitlines()]
    for line in lines:
        for command, rest in re.findall(r"\balphaprof ([a-z]+) (.*)", line):
            shown = help_of(command)
            assert [option for option in re.findall(r"--[a-z-]+", rest) if option not in shown] == [], line


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_profiles_in_a_page_are_valid(page: Path) -> None:
    blocks = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)]
    profiles = [block for block in blocks if isinstance(block, dict) and "target" in block]
    assert len(profiles) == (page.name in ("README.md", "getting-started.md", "heads.md") and page != INDEX)
    (common,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    partial = [block for block in blocks if isinstance(block, dict) and "drafts" in block and "target" not in block]
    for profile in (*profiles, *(yaml.safe_load(common) | block for block in partial)):
        ProfileOptions.model_validate(profile)


def test_the_index_names_every_page_once_and_the_readme_leads_to_it() -> None:
    pages = [path.name for path in (ROOT / "docs").glob("*.md") if path != INDEX]
    assert sorted(re.findall(r"^- \[(.*?\.md)\]\(\1\): ", INDEX.read_text(), re.MULTILINE)) == sorted(pages)
    assert "(docs/README.md)" in README


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_and_scripts_named_in_a_page_exist(page: Path) -> None:
    text = page.read_text()
    for link, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", text):
        assert (page.parent / link).exists(), link
        assert not anchor or anchor in anchors(page.parent / link if link else page), f"{link}#{anchor}"
    for script in re.findall(r"\bscripts/[a-z_/]+\.(?:py|sh)\b", text):
        assert (ROOT / script).exists(), script


def test_errors_and_notes_that_troubleshooting_quotes_are_those_of_the_program() -> None:
    """Of an error what stands between the dots, of a note its code."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    source = "".join(path.read_text() for path in (ROOT / "alphaprof").rglob("*.py"))
    quoted = re.findall(r"^- `(.*?)`: ", page.split("## Errors")[1], re.MULTILINE)
    assert len(quoted) > 10
    parts = {part.strip(" :") for text in quoted for part in text.split("...")}
    notes = {f'"{code}"' for code in re.findall(r"\bnote `(\w+)`", page)}
    assert len(notes) > 2
    assert {text for text in parts | notes if text not in source} == set()


def test_the_oldest_versions_that_are_tested_are_those_that_pyproject_admits() -> None:
    """What `constraints-oldest.txt` lists first, but for GGUF files, which need newer transformers."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *extras["profile"], *extras["multi-device"], *extras["html"]]
    lowest = dict(re.fullmatch(r"([\w-]+)>=([\d.]+)(?:,<\d+)?", text).groups() for text in needed if "[" not in text)
    pins = dict(re.findall(r"^([\w-]+)==([\d.]+)$", (ROOT / "constraints-oldest.txt").read_text(), re.MULTILINE))
    assert {name: pins[name][: len(version)] for name, version in lowest.items()} == lowest
    assert [name for name, version in lowest.items() if set(pins[name][len(version) :]) - set(".0")] == []
    assert list(pins)[: len(lowest)] == sorted(lowest)


def test_the_changelog_names_the_version() -> None:
    from alphaprof.version import __version__

    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert f'version = "{__version__}"' in (ROOT / "pyproject.toml").read_text()


def test_the_demo_asks_for_no_file_inside_its_runs() -> None:
    """`--out` refuses one, so that the demo would end before its reports."""
    assert re.findall(r'--out "?\$run/', (ROOT / "scripts" / "demo.sh").read_text()) == []
