"""The HTML report as text: it holds what the report says, nothing foreign, and untrusted text means nothing but itself."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import math
import re
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from alphaprof.report.draw import SECTIONS

from alphaprof.errors import ExtraMissing
from alphaprof.render import format as fmt
from alphaprof.render.blocks import Figure
from alphaprof.render.html.figures import label
from alphaprof.render.html.page import first_screen_fragment, render_html
from alphaprof.report.build import Report, build_report
from alphaprof.report.first_screen import first_screen
from tests.loops import each
from tests.reporting import HOSTILE, reported
from tests.synthetic import Domain, Recipe, rewritten, write_run

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


@pytest.fixture(autouse=True, scope="module")
def _short_library() -> Iterator[None]:
    """Five megabytes of the library in every page would be most of the time here; the browser's tests have them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("plotly.offline.get_plotlyjs", lambda: "window.Plotly = null;")
        yield


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Pages:
    """Return the report of a recipe and its page, by the recipe's name."""
    return cache(lambda name: page_of(tmp_path_factory.mktemp("page"), RECIPES[name]))


class Page(HTMLParser):
    """What a page is made of: its elements, its text by element, and the scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.source = text
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
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
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "script":
            about, text = self.scripts[-1]
            self.scripts[-1] = (about, text + data)
        elif self._open and self._open[-1] != "style":
            self.words.append(data)
            for tag in self._open:
                self.by_element[tag][-1] += data

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def figures(self) -> Any:
        (found,) = [text for about, text in self.scripts if about.get("id") == "figures"]
        return json.loads(found, parse_constant=pytest.fail)


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
    blocks = [block for section in SECTIONS if section.name != "legend" and not section.is_empty(report)
              for block in section.blocks(report)]  # fmt: skip
    assert len(blocks) > 5
    for block in blocks:
        if isinstance(block, Figure):
            continue
        texts = [block] if isinstance(block, str) else block.below
        assert all("".join(fmt.visible(text.strip()).split()) in everything for text in texts)
        if isinstance(block, str):
            continue
        assert fmt.visible(fmt.sentence(block.title)) in titles
        lines = [(block.named, {column: column for column in block.columns}), *block.rows, *block.footer]
        for first, cells in lines:
            cut = [fmt.visible(part) for column in block.columns for part in cells.get(column, "").split("\n")]
            assert "".join("".join([fmt.visible(first), *cut]).split()) in rows


@each("name", RECIPES)
def test_the_first_screen_stands_by_itself_and_says_what_the_terminal_says(pages: Pages, name: str) -> None:
    report, page = pages(name)
    text, screen = first_screen_fragment(report), first_screen(report)
    fragment = Page(text)
    order = [screen.run, screen.verdict, *screen.about, screen.times]
    for table in (screen.table, *([screen.load] if screen.load else [])):
        order += [table.named, *table.columns]
        order += [text for name, cells in (*table.rows, *table.footer) for text in (name, *cells.values())]
        order += table.below
    order += [screen.pays] if screen.load else []
    order += [*screen.notes, *(screen.serve or ()), screen.more]
    place, said = 0, fragment.text
    for part in order:
        place = said.index(" ".join(part.split()), place) + len(part)
    assert said in page.text
    layout = {"style", "div", "p", "b", "table", "thead", "tbody", "tfoot", "tr", "th", "td", "ol", "li", "code"}
    assert {tag for tag, _ in fragment.elements} <= layout  # no script
    selectors = re.findall(r"^[^{\n]+", text.split("</style>")[0].removeprefix("<style>"), re.MULTILINE)
    assert all(selector.startswith((".alphaprof-", "@media")) for selector in selectors)
    verdicts = [about["class"] for tag, about in fragment.elements if tag == "b"]
    assert verdicts[0] == f"alphaprof-verdict {report.verdict.lower()}"
    assert len(verdicts) == 1 + len(report.domains) + bool(screen.table.footer)


def test_points_of_the_speedup_figure_are_the_reports(pages: Pages) -> None:
    report, page = pages("greedy")
    figure = page.figures()["speedups"]
    lines = [trace for trace in figure["data"] if trace["mode"] == "lines+markers"]
    grounds = [trace for trace in figure["data"] if trace.get("fill") == "toself"]
    timed = [result for result in report.results if any(item.speedup for item in result.gammas)]
    assert len(lines) == len(grounds) == len(timed)
    for result in timed:
        known = [item.speedup for item in result.gammas if item.speedup is not None]
        place = list(dict.fromkeys(item.domain for item in timed)).index(result.domain)
        where = ("x" if place == 0 else f"x{place + 1}", {"draft": result.draft, "rule": result.rule})
        (line,) = [trace for trace in lines if (trace["xaxis"], trace["meta"]) == where]
        assert line["y"] == [item.value for item in known]
        (ground,) = [trace for trace in grounds if (trace["xaxis"], trace["meta"]) == where]
        assert ground["y"] == [*(item.high for item in known), *(item.low for item in reversed(known))]
    levels = [(shape["xref"], shape["y0"]) for shape in figure["layout"]["shapes"]]
    panels = {trace["xaxis"] for trace in lines}
    assert sorted(levels) == sorted((f"{panel} domain", y) for panel in panels for y in (1.0, report.traffic.min_speedup))


def points(figure: Any, dash: str | None = None) -> list[tuple[Any, Any]]:
    """Points of a figure's curves and marks, without the grounds of intervals; with a `dash` of such lines alone."""
    marked = [trace for trace in figure["data"] if "markers" in trace["mode"]]
    chosen = [trace for trace in marked if dash is None or trace["line"]["dash"] == dash]
    return [pair for trace in chosen for pair in zip(trace["x"], trace["y"], strict=True)]


@each("name", RECIPES)
def test_figures_hold_every_number_of_the_report_and_no_other(pages: Pages, name: str) -> None:
    report, page = pages(name)
    figures, results = page.figures(), report.results
    marks = [(mark["x"], mark["error_x"]["arrayminus"], mark["error_x"]["array"]) for mark in figures["acceptance"]["data"]]
    alphas = [(item.alpha.value, item.alpha.low, item.alpha.high) for item in results if item.alpha]
    ends = [(value, value - low, high - value) for value, low, high in alphas]
    assert sorted(marks) == sorted(tuple([end if math.isfinite(end) else 0.0] for end in known) for known in ends)
    places = [y for _, y in points(figures["acceptance"])]
    assert len(set(places)) == len(places)  # none lies on another
    tenths = [item for item in report.difficulty if item.axis == "margin"]
    accepted = [(item.place, item.accepted.value) for item in tenths if item.accepted is not None]
    assert sorted(points(figures["difficulty"], "solid")) == sorted(accepted)
    certified = [(item.place, item.certified.value) for item in tenths if item.certified is not None]
    assert sorted(points(figures["difficulty"], "dot")) == sorted(certified)
    lasts = [max(item.gammas, key=lambda found: found.gamma) for item in results if item.gammas]
    for dash, values in (("solid", [last.conditional for last in lasts]), ("dot", [last.marginal for last in lasts])):
        deep = [pair for shares in values for pair in enumerate(shares, 1)]
        assert sorted(map(str, points(figures.get("depths", {"data": []}), dash))) == sorted(map(str, deep))


def test_a_tenth_in_which_nothing_is_proposed_leaves_its_place_empty(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Recipe(domains={"code": Domain(documents=12)}))

    def silenced(frame: pd.DataFrame) -> None:
        frame.loc[frame["target_margin"] < frame["target_margin"].quantile(0.3), "proposed"] = 0

    report = build_report(rewritten(run, "small", silenced))
    margins = [item for item in report.difficulty if item.axis == "margin" and item.rule == "strict"]
    assert margins[0].accepted is None
    found = Page(render_html(report)).figures()["difficulty"]
    shown = [x for trace in found["data"] if trace.get("xaxis") == "x" and "fill" not in trace for x in trace["x"]]
    assert shown == [item.place for item in margins if item.accepted is not None]
    assert 1 not in shown


def test_a_report_of_a_run_without_its_position_log_says_what_is_missing(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Recipe(certificates=True))
    whole = build_report(run)
    shutil.rmtree(run.path / "positions")
    report = build_report(run)
    assert report.results == whole.results
    assert (report.difficulty, report.causes, report.certificates, report.predictability) == ((), (), None, ())
    assert "no_log" in {note.code for note in report.notes}
    assert "no position log" in Page(render_html(report)).text


@each("name", RECIPES)
def test_nothing_comes_from_anywhere_else(pages: Pages, name: str) -> None:
    _, page = pages(name)
    addresses = [value for _, about in page.elements for key, value in about.items() if key in ("src", "href", "action")]
    assert [value for value in addresses if value and not value.startswith(("#", "data:,"))] == []
    assert "url(" not in next(iter(re.findall(r"<style>(.*?)</style>", page.source, re.DOTALL)))


def test_no_script_may_run_but_the_two_of_the_page(tmp_path: Path) -> None:
    _, page = page_of(tmp_path, Recipe())
    policy = next(str(about["content"]) for tag, about in page.elements if tag == "meta" and "content" in about)
    allowed = set(re.findall(r"'sha256-([^']+)'", policy))
    packed, own = (text for about, text in page.scripts if about.get("type") in (None, "text/plain"))
    run = [zlib.decompress(base64.b64decode(packed)).decode(), own]
    assert run[0] == "window.Plotly = null;"
    assert {base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in run} == allowed
    assert "default-src 'none'" in policy
    assert "unsafe-eval" not in policy
    assert not any(key.startswith("on") for _, about in page.elements for key in about)


@each("name", ["html", "escape", "direction", "long", "empty"])
def test_hostile_names_change_nothing_but_their_own_text(tmp_path: Path, name: str) -> None:
    _, plain = page_of(tmp_path / name / "plain", Recipe(domains={"name": Domain()}))
    _, page = page_of(tmp_path / name / "odd", Recipe(domains={HOSTILE[name]: Domain()}))
    skeleton = [(tag, sorted(about)) for tag, about in page.elements]
    assert skeleton == [(tag, sorted(about)) for tag, about in plain.elements]
    assert all(char.isprintable() or char == "\n" for _, script in page.scripts[:1] for char in script)
    assert fmt.visible(fmt.short(HOSTILE[name])).split() == [
        word for word in fmt.visible(fmt.short(HOSTILE[name])).split() if word in page.text
    ]
    figures, shown = page.figures(), label(fmt.short(HOSTILE[name]))
    assert [note["text"] for note in figures["speedups"]["layout"]["annotations"]] == [f"<b>{shown}</b>"]
    assert figures["acceptance"]["layout"]["yaxis"]["ticktext"] == [shown]
    hover = [
        text for key in ("acceptance", "speedups", "depths") for bar in figures[key]["data"] for text in bar.get("text", ())
    ]
    assert {text.split("</b>")[0] for text in hover} == {f"<b>{shown}"}
    assert "\u202e" not in page.source
    assert "\x1b" not in page.source


def test_labels_show_markup_as_it_is() -> None:
    assert label('<a href="javascript:x">&amp;</a>') == '&lt;a href="javascript:x"&gt;&amp;amp;&lt;/a&gt;'


def test_without_the_plotting_library_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("alphaprof.render.html.page.find_spec", lambda name: None if name == "plotly" else sys)
    with pytest.raises(ExtraMissing, match="plotly"):
        render_html(reported(tmp_path))


def test_files_that_are_no_modules_are_shipped() -> None:
    import tomllib

    root = Path(__file__).parents[2]
    listed = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    shipped = {
        path for package, names in listed.items() for name in names for path in (root / package.replace(".", "/")).glob(name)
    }
    files = [path for path in (root / "alphaprof").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    others = {path for path in files if path.suffix != ".py"}
    assert shipped == others
    assert {path.name for path in shipped} >= {
        "page.html.j2",
        "first_screen.css",
        "page.css",
        "page.js",
    }
