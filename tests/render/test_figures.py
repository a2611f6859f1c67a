"""Figures: they show the numbers of the report and no others, names are plain text, and equal reports give equal bytes."""

from __future__ import annotations

import dataclasses
import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from functools import cache
from pathlib import Path

import matplotlib
import pytest
from matplotlib.axes import Axes

from alphaprof.errors import ExtraMissing, OptionInvalid
from alphaprof.render import format as fmt
from alphaprof.report.build import Report, build_report
from alphaprof.report.formats.figures import COLORS, FIGURES, MARKERS, MOST_PANELS, PAPER, STYLE, Drawing, answer
from alphaprof.report.formats.first_screen import first_screen
from alphaprof.report.formats.page import answer_figure, render_html
from alphaprof.report.formats.text import ReportAnswer
from alphaprof.run.reader import Run
from alphaprof.stats.estimate import Interval
from tests.loops import each
from tests.reporting import HOSTILE, reported
from tests.synthetic import Domain, Recipe, interrupted, write_run

MANY = {f"domain {place}": Domain(documents=4, alpha=0.2 + 0.06 * place) for place in range(12)}
FIVE = {"small": 0.0, "medium": 0.1, "large": 0.2, "a-draft-with-a-long-name-q4_k_m": 0.1, "fifth": 0.15}
LONG = {f"{place} {'a long name of a domain ' * 9}"[:200]: Domain(documents=2) for place in range(12)}
PLAIN = ("$x_<b>", "$x_1$ & $y^2$", 'style="fill: #0072b2"', r"\frac{1}{2}")
RECIPES = {
    "two drafts": Recipe(drafts={"small": 0.0, "large": 0.2}, rules=("strict", "additive_0p1")),
    "no step times": Recipe(latency=False),
    "one document": Recipe(domains={"code": Domain(documents=1)}),
    "head": Recipe(drafts={}, heads={"eagle": {}}, domains={"code": Domain(documents=30), "chat": Domain(documents=30)}),
    "given": Recipe(domains={"wiki": Domain(continuation="text", on_policy=False)}),
    "contexts": Recipe(
        domains={"code": Domain(documents=40, shortest=200, longest=600)}, drafts={"small": 0.0, "large": 0.1}
    ),
    "many": Recipe(domains=MANY, drafts=FIVE, lookups=("ngram",)),
    "hostile": Recipe(domains={name: Domain(documents=2) for name in (*HOSTILE.values(), *PLAIN)}),
    "long names": Recipe(domains=LONG, drafts=FIVE),
}
Reports = Callable[[str], Report]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    return cache(lambda name: reported(tmp_path_factory.mktemp("figures"), RECIPES[name]))


def parsed(text: str) -> ElementTree.Element:
    """The SVG as a program reads it, which is stricter than a browser."""
    return ElementTree.fromstring(text)  # noqa: S314  we have written it


def drawn(drawing: Drawing | None) -> list[Axes]:
    """The axes of a figure, from the back to the front."""
    assert drawing is not None
    with drawing._painted(alone=False) as figure:
        return list(figure.axes)


def bars(axes: Axes) -> list[tuple[float, float]]:
    """Both ends of each horizontal line."""
    lines = [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines]
    return [(x[0], x[1]) for x, y in lines if len(x) == 2 and y[0] == y[1]]


def marks(axes: Axes, among: str = MARKERS) -> list[float]:
    """The x of each single mark, arrows aside."""
    return [line.get_xdata()[0] for line in axes.lines if len(line.get_xdata()) == 1 and line.get_marker() in among]


def curves(axes: Axes) -> list[list[tuple[float, float]]]:
    """The points of each line that is not straight across."""
    lines = [
        list(zip(line.get_xdata(), line.get_ydata(), strict=True)) for line in axes.lines if line.get_linestyle() != "None"
    ]
    return [points for points in lines if len({y for _, y in points}) > 1 or len(points) != 2]


@each("name", ["two drafts", "no step times", "head", "many"])
def test_the_first_figure_shows_each_domain_with_the_bounds_that_decide(reports: Reports, name: str) -> None:
    report = reports(name)
    timed = name != "no step times"
    total = [item.answer for item in report.drafts if item.answer.draft == report.answer.draft]
    answers = [item.answer for item in report.domains] + total
    values = [item.speedup if timed else item.tokens_per_round for item in answers]
    known = [value for value in values if value is not None]
    drawing = answer(report)
    behind, front = drawn(drawing)
    assert drawing is not None
    low, high = front.get_xlim()
    assert marks(front, "oXD") == [value.value for value in known]
    assert bars(front) == [(max(value.low, low), min(value.high, high)) for value in known]
    assert max(line.get_linewidth() for line in behind.get_xgridlines()) < 1  # fainter than any mark
    dashed = [line.get_xdata()[0] for line in behind.lines if line.get_linestyle() == "--"]
    assert dashed == ([report.traffic.min_speedup] * len(drawing.said) if timed else [])
    for item, said in zip(report.domains, drawing.said, strict=False):
        assert said.startswith(item.answer.domain)
        assert item.answer.verdict in said
    assert drawing.heading.startswith(f"{report.answer.verdict}: ")
    whole = " ".join(
        str(element.text) for element in parsed(drawing.svg(alone=True)).iter() if element.tag.endswith("}text")
    )
    assert first_screen(report).times[1:] in whole  # a file says whose times they are


def test_an_end_that_is_far_off_or_infinite_is_an_arrow(reports: Reports) -> None:
    report = reports("two drafts")
    first, *others = report.domains
    best = dataclasses.replace(first.answer, speedup=Interval(1.3, 1.2, math.inf))
    odd = dataclasses.replace(report, domains=(dataclasses.replace(first, answer=best), *others))
    _, front = drawn(answer(odd))
    assert [line.get_xdata()[0] for line in front.lines if line.get_marker() == ">"] == [front.get_xlim()[1]]
    assert all(math.isfinite(end) for bar in bars(front) for end in bar)
    assert "1.30x [1.20, inf]" in answer(odd).svg()


@each("name", ["two drafts", "given", "many"])
def test_acceptance_shows_every_draft_under_the_rule_of_the_verdict(reports: Reports, name: str) -> None:
    report = reports(name)
    shown = [item for item in report.results if item.verdict is not None and item.alpha is not None]
    alphas = [item.alpha for item in shown]
    _, front = drawn(FIGURES["acceptance"](report))
    assert sorted(marks(front)) == sorted(alpha.value for alpha in alphas)
    hollow = [line.get_xdata()[0] for line in front.lines if line.get_markerfacecolor() == PAPER]
    assert sorted(hollow) == sorted(item.alpha.value for item in shown if not item.on_policy or item.lossy)
    assert sorted(bars(front)) == sorted((max(alpha.low, 0), min(alpha.high, 1)) for alpha in alphas)


@each("name", ["two drafts", "no step times", "head"])
def test_gammas_show_tokens_per_round_and_the_speedup_of_every_draft(reports: Reports, name: str) -> None:
    report = reports(name)
    tokens, *faster = drawn(FIGURES["gammas"](report))
    known = [item for item in report.drafts if item.by_gamma]
    assert curves(tokens) == [[(at.gamma, at.tokens_per_round) for at in item.by_gamma] for item in known]
    speedups = [[(at.gamma, at.speedup.value) for at in item.by_gamma if at.speedup] for item in known]
    assert [curve for axes in faster for curve in curves(axes)] == [values for values in speedups if values]
    for axes in faster:
        assert [line.get_ydata()[0] for line in axes.lines if line.get_linestyle() == "--"] == [report.traffic.min_speedup]


@each("name", ["head", "two drafts"])
def test_depths_end_where_few_drafts_were_reached(reports: Reports, name: str) -> None:
    report = reports(name)
    lasts = {}
    for item in report.results:
        if item.verdict is not None:
            lasts.setdefault(item.domain, []).append(item)
    panels = drawn(FIGURES["depths"](report))
    assert len(panels) == len(lasts)
    for axes, items in zip(panels, lasts.values(), strict=True):
        expected = []
        for item in items:
            last = item.gammas[-1]
            enough = max(
                [depth for depth in range(1, 5) if all(reached >= 20 for reached in last.reached[:depth])], default=1
            )
            expected.append(list(enumerate(last.conditional, 1))[:enough])
            expected += [list(enumerate(last.marginal, 1))] if item.draft == report.answer.draft else []
        assert curves(axes) == expected


def test_the_context_axis_shows_every_range(reports: Reports) -> None:
    report = reports("contexts")
    (axes,) = drawn(FIGURES["context"](report))
    ranges = [
        [(item.context, item.speedup.value) for item in axis.ranges if item.speedup] for axis in report.section("context")
    ]
    assert curves(axes) == ranges
    assert min(map(len, ranges)) > 2


@each("name", RECIPES)
def test_a_figure_is_xml_whose_text_is_text_and_whose_colors_are_variables(reports: Reports, name: str) -> None:
    report = reports(name)
    for draw in FIGURES.values():
        if (drawing := draw(report)) is None:
            continue
        for alone in (False, True):
            text = drawing.svg(alone)
            root = parsed(text)
            written = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
            assert len(written) > 3
            assert {element.tag.split("}")[1] for element in root.iter()} <= {*TAGS, *(["style"] if alone else [])}
            assert root.get("role") == "img"
            assert drawing.heading in fmt.visible(str(root.get("aria-label")))
            _, *tags = re.findall(r"<(?!style)[^>]*>", text)  # the first holds the label
            assert not [tag for tag in tags if re.search(r"[:\"] ?#[0-9a-f]{3,6}\b", tag)]
            assert set(re.findall(r"var\(--([\w-]+)\)", "".join(tags))) <= COLORS.keys()


TAGS = ("svg", "g", "path", "defs", "use", "text", "clipPath", "rect")


def test_equal_reports_give_equal_bytes_whatever_matplotlib_is_set_to(reports: Reports, tmp_path: Path) -> None:
    before = answer_figure(reports("two drafts"))
    svg, png = before.svg(alone=True), before.png()
    again = answer_figure(reported(tmp_path, RECIPES["two drafts"]))
    with matplotlib.rc_context({"font.size": 30, "lines.linewidth": 9, "text.usetex": True, "savefig.bbox": "tight"}):
        assert (again.svg(alone=True), again.png()) == (svg, png)


@each("name", ["many", "hostile", "long names"])
def test_a_page_of_many_domains_and_drafts_is_small(reports: Reports, name: str) -> None:
    assert len(render_html(reports(name)).encode()) < 400_000


def luminance(color: str) -> float:
    parts = (int(color[place : place + 2], 16) / 255 for place in (1, 3, 5))
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@each("scheme", ["light", "dark"])
def test_every_color_can_be_told_from_the_page(scheme: str) -> None:
    """WCAG 2.2: 4.5 for text, 3 for what is drawn."""
    light, dark = STYLE.split("@media")
    colors = dict(re.findall(r"--([\w-]+): (#\w{6});", light if scheme == "light" else dark))
    assert colors.keys() == COLORS.keys()
    for name, color in colors.items():
        least = 4.5 if name in ("ink", "dim", "go", "no-go", "undecided") else 3 if name.startswith("draft-") else None
        if least is not None:
            brighter, darker = sorted((luminance(color), luminance(colors["page"])), reverse=True)
            assert (brighter + 0.05) / (darker + 0.05) >= least, name


def test_only_pages_and_figures_import_matplotlib_and_never_its_windows(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run").path
    code = """if True:
        import sys
        from alphaprof.cli.app import app
        for form in ("md", "html", "svg"):
            try:
                app(["report", sys.argv[1], "--out", f"{sys.argv[2]}/report.{form}"])
            except SystemExit:
                print(form, *(name for name in ("matplotlib", "matplotlib.pyplot") if name in sys.modules))
    """
    done = subprocess.run([sys.executable, "-c", code, run, tmp_path], check=True, capture_output=True, text=True)
    assert done.stdout == "md\nhtml matplotlib\nsvg matplotlib\n"
    assert all((tmp_path / f"report.{form}").exists() for form in ("md", "html", "svg"))


def test_a_figure_says_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = interrupted(write_run(tmp_path / "run"), tmp_path / "killed", 0)
    with pytest.raises(OptionInvalid, match="nothing to draw"):
        ReportAnswer(build_report(Run.open(killed.path))).svg()
    monkeypatch.setattr("alphaprof.render.html.page.find_spec", lambda name: None)
    with pytest.raises(ExtraMissing, match="a figure needs matplotlib"):
        ReportAnswer(build_report(Run.open(tmp_path / "run"))).png()


def test_a_figure_of_many_domains_draws_some_and_counts_the_others(tmp_path: Path) -> None:
    """The page of a run with 100 of them took 8 seconds."""
    report = build_report(write_run(tmp_path / "run", Recipe(domains={f"d{number}": Domain() for number in range(30)})))
    drawing = FIGURES["depths"](report)
    assert len(drawn(drawing)) == MOST_PANELS == 24
    assert drawing is not None
    assert "6 more domains: see the JSON report." in drawing.caption
