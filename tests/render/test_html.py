"""The HTML report as text: it holds what the report says, nothing foreign, and untrusted text means nothing but itself."""

from __future__ import annotations

import dataclasses
import re
import shutil
import sys
from collections.abc import Callable
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import pytest

from alphaprof.errors import ExtraMissing
from alphaprof.render import format as fmt
from alphaprof.render.blocks import Figure, Small, Table
from alphaprof.render.html.page import plain_page
from alphaprof.report.build import Report, build_report
from alphaprof.report.formats.first_screen import first_screen
from alphaprof.report.formats.page import render_html
from alphaprof.report.sections import NAMES
from tests.loops import each
from tests.reporting import as_terminal, reported
from tests.synthetic import Domain, Recipe, write_run

SAMPLED = Domain(temperature=1.0, continuation="sampled", documents=8)
RECIPES = {
    "greedy": Recipe(drafts={"small": 0.0, "large": 0.2}, rules=("strict", "lossless", "additive_0p1"), thinking=0.5),
    "lookup": Recipe(drafts={}, lookups=("ngram",), domains={"code": Domain(coverage=0.7)}),
    "one document": Recipe(domains={"code": Domain(documents=1)}),
    "no step times": Recipe(latency=False),
    "two temperatures": Recipe(
        domains={"code": SAMPLED},
        sources=[("code", dataclasses.replace(SAMPLED, temperature=0.5))],
        rules=("one_hot", "lossless", "strict"),
    ),
    "given": Recipe(
        domains={"code": Domain(continuation="given")},
        sources=[("code", Domain(continuation="given", on_policy=False, alpha=0.3))],
        rules=("strict", "additive_0p1"),
        certificates=True,
    ),
    "alike": Recipe(domains={"x" * 60 + "1": Domain(), "x" * 60 + "2": Domain(alpha=0.3)}, rules=("strict", "one_hot")),
}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Pages:
    """Return the report of a recipe and its page, by the recipe's name."""
    return cache(lambda name: page_of(tmp_path_factory.mktemp("page"), RECIPES[name]))


class Page(HTMLParser):
    """What a page is made of: its elements, and its text by element."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.source = text
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.by_element: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []  # every element is closed

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "br"):
            self._open.append(tag)
            self.by_element.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] != "style":
            self.words.append(data)
            for tag in self._open:
                self.by_element[tag][-1] += data

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


Pages = Callable[[str], tuple[Report, Page]]


def page_of(path: Path, recipe: Recipe) -> tuple[Report, Page]:
    report = reported(path, recipe)
    return report, Page(render_html(report))


@each("name", RECIPES)
def test_the_page_holds_all_that_a_section_prints_and_no_table_twice(pages: Pages, name: str) -> None:
    """The glossary takes the place of the legend's lines; line breaks and gaps are the page's."""
    report, page = pages(name)
    titles = [str(about["aria-label"]) for tag, about in page.elements if tag == "table"]
    assert len(set(titles)) == len(titles)
    rows = ["".join(row.split()) for row in page.by_element["tr"]]
    everything = "".join(page.text.split())
    drawn = [report.drawn(section) for section in NAMES if section != "legend"]
    blocks = [block for _, blocks, empty in drawn if not empty for block in blocks]
    assert len(blocks) > 5
    for block in blocks:
        if isinstance(block, Figure):
            continue
        texts = [block] if isinstance(block, str) else [block.text] if isinstance(block, Small) else block.below
        assert all("".join(fmt.visible(text.strip()).split()) in everything for text in texts)
        if not isinstance(block, Table):
            continue
        assert fmt.visible(fmt.sentence(block.title)) in titles
        lines = [(block.named, {column: column for column in block.columns}), *block.rows, *block.footer]
        for first, cells in lines:
            cut = [fmt.visible(part) for column in block.columns for part in cells.get(column, "").split("\n")]
            assert "".join("".join([fmt.visible(first), *cut]).split()) in rows


@each("name", RECIPES)
def test_the_first_screen_says_what_the_terminal_says(pages: Pages, name: str) -> None:
    report, page = pages(name)
    screen = first_screen(report)
    order = [screen.conclusion, screen.verdict, *screen.about, screen.times, screen.run]
    for table in (screen.table, *([screen.load] if screen.load else [])):
        order += [table.named, *table.columns]
        order += [text for name, cells in (*table.rows, *table.footer) for text in (name, *cells.values())]
        order += table.below
    order += [screen.pays] if screen.load else []
    order += [*screen.notes, *(screen.serve or ())]
    place = 0
    for part in order:  # a figure stands before the table, and the page's contents in place of other sections
        place = page.text.index(" ".join(part.split()), place) + len(part)
    verdicts = [str(about["class"]) for tag, about in page.elements if tag == "b"]
    assert verdicts[0] == f"alphaprof-verdict {report.answer.verdict.lower()}"
    assert len(verdicts) == 1 + len(report.domains) + bool(screen.table.footer)


def test_a_report_of_a_run_without_its_position_log_says_what_is_missing(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Recipe(certificates=True))
    whole = build_report(run)
    shutil.rmtree(run.path / "positions")
    report = build_report(run)
    assert report.results == whole.results
    target = report.section("target")
    assert (target.tenths, report.section("causes"), target.certificates, target.texts) == ((), (), None, ())
    assert report.drawn("causes")[2]
    assert "it needs the position log" in as_terminal(report, 100, "causes")


@each("name", RECIPES)
def test_nothing_comes_from_anywhere_else_and_no_script_could_run(pages: Pages, name: str) -> None:
    _, page = pages(name)
    addresses = [value for _, about in page.elements for key, value in about.items() if key in ("src", "href", "action")]
    assert [value for value in addresses if value and not value.startswith(("#", "data:,"))] == []
    assert "url(" not in "".join(re.findall(r"<style>(.*?)</style>", page.source, re.DOTALL))
    plain = Page(plain_page("alphaprof-check", ["PASS  <script>alert(1)</script>"]))
    for each_page in (page, plain):
        assert not {"script", "noscript", "button"} & {tag for tag, _ in each_page.elements}
        assert not [key for _, about in each_page.elements for key in about if key.startswith("on")]
        policy = next(str(about["content"]) for tag, about in each_page.elements if tag == "meta" and "content" in about)
        assert policy.split("; ")[0] == "default-src 'none'"
        assert "script" not in policy


def test_a_line_does_not_end_inside_an_option() -> None:
    source = plain_page("alphaprof-check", ["PASS", "see --show wiring & a--b", Small("or --out report.html")])
    assert 'see <span class="option">--show</span> wiring &amp; a--b' in source
    assert 'or <span class="option">--out</span> report.html' in source
    assert ".option { white-space: nowrap; }" in source


def test_the_same_run_gives_the_same_page(pages: Pages) -> None:
    report, page = pages("greedy")
    assert render_html(report) == page.source


def test_no_two_elements_of_a_page_have_one_name(pages: Pages) -> None:
    for name in RECIPES:
        _, page = pages(name)
        names = [about["id"] for _, about in page.elements if about.get("id")]
        assert len(set(names)) == len(names)
        used = [value for _, about in page.elements for key, value in about.items() if key in ("href", "xlink:href")]
        used += [f"#{found}" for found in re.findall(r"url\(#(\w+)\)", page.source)]
        assert {value for value in used if value and value.startswith("#")} <= {f"#{each_name}" for each_name in names}


@each("package", ["jinja2", "matplotlib"])
def test_without_a_package_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setattr("alphaprof.render.html.page.find_spec", lambda name: None if name == package else sys)
    with pytest.raises(ExtraMissing, match=f"the HTML report needs {package}") as caught:
        render_html(reported(tmp_path))
    assert caught.value.hint.startswith("pip install ")


def test_files_that_are_no_modules_are_shipped() -> None:
    import tomllib

    root = Path(__file__).parents[2]
    listed = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    shipped = {
        path for package, names in listed.items() for name in names for path in (root / package.replace(".", "/")).glob(name)
    }
    files = [path for path in (root / "alphaprof").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    others = {path for path in files if path.suffix != ".py"}
    assert shipped == others != set()
