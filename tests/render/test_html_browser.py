"""The HTML report in a real browser, without scripts: at three widths, light and dark, and on paper."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from alphaprof.render.blocks import Table, Verdict
from alphaprof.render.html.page import plain_page
from alphaprof.report.formats.page import answer_figure, render_html
from tests.reporting import HOSTILE, reported
from tests.synthetic import Domain, Recipe

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")
FOLDED = ("rules", "context", "times", "run", "legend")  # some of the sections that are folded at first
HEIGHT = 900
LONG = {f"{place} {'a long name of a domain ' * 9}"[:200]: Domain(documents=2) for place in range(9)}
FIVE = {"small": 0.0, "medium": 0.1, "large": 0.2, "a-draft-with-a-long-name-q4_k_m": 0.1, "fifth": 0.15}
RECIPE = Recipe(
    domains=LONG | {HOSTILE["html"]: Domain(), HOSTILE["direction"]: Domain(), "$x_<b>": Domain()},
    drafts=FIVE,
    rules=("strict", "additive_0p1"),
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless browser; without one these tests fail in CI and are skipped elsewhere."""
    if CHROMIUM is None:
        if os.environ.get("CI"):
            pytest.fail("chromium is not installed: scripts/test.sh installs it")
        pytest.skip("chromium is not installed")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=list(QUIET))
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of a run with twelve domains, most of them with long names in which every other word differs."""
    folder = tmp_path_factory.mktemp("page")
    report = reported(folder, RECIPE)
    (folder / "report.html").write_text(render_html(report), encoding="utf-8")
    (folder / "report.svg").write_text(answer_figure(report).svg(alone=True), encoding="utf-8")
    return (folder / "report.html").as_uri()


@pytest.fixture
def opened(browser: Any, address: str) -> Iterator[Any]:
    """How that page is opened, in a window of a width: nothing else than the file may be asked for, and nothing is said."""
    said, asked, contexts = list[str](), list[str](), list[Any]()

    def at(width: int, scheme: str = "light", scripts: bool = False) -> Any:
        size = {"width": width, "height": HEIGHT}
        contexts.append(browser.new_context(viewport=size, color_scheme=scheme, offline=True, java_script_enabled=scripts))
        page = contexts[-1].new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(address)
        return page

    yield at
    for context in contexts:
        context.close()
    assert said == []
    assert {url.split("#")[0] for url in asked if not url.startswith("data:")} == {address}


Box = dict[str, Any]


def boxes(within: Any, selector: str) -> list[Box]:
    """Where the elements of a kind stand that take room, and what is written there."""
    said = "({...each.getBoundingClientRect().toJSON(), text: each.textContent})"
    seen = within.locator(selector).evaluate_all(f"all => all.filter(each => each.checkVisibility()).map(each => {said})")
    return [box for box in seen if box["width"]]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 800, 400])
def test_the_page_is_as_wide_as_its_window(opened: Any, width: int, scheme: str) -> None:
    page = opened(width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for box in boxes(page, "figure, figcaption, h1, h2, .alphaprof-line, nav"):
        assert box["left"] >= 0
        assert box["right"] <= width


@pytest.mark.parametrize("width", [1100, 500, 400])
def test_verdict_and_speedups_by_domain_stand_on_the_first_screen(opened: Any, width: int) -> None:
    page = opened(width)
    (verdict, *_), (figure, *_) = boxes(page, ".alphaprof-verdict"), boxes(page, "#answer figure svg")
    assert verdict["bottom"] < figure["top"] < HEIGHT / 2
    assert figure["width"] > 0.99 * boxes(page, "#answer")[0]["width"]
    written = [box for box in boxes(page, "#answer figure text") if "x [" in box["text"]]
    assert len(written) == 13  # twelve domains, and all traffic
    assert max(box["bottom"] for box in written) < HEIGHT
    assert min(box["height"] for box in written) > 9  # pixels: it can be read


@pytest.mark.parametrize(("width", "media"), [(1280, "print"), (400, "print"), (1100, "screen")])
def test_no_text_of_a_figure_lies_on_another_or_is_cut(opened: Any, width: int, media: str) -> None:
    page = opened(width)
    page.emulate_media(media=media)  # paper unfolds all
    figures = [figure for figure in page.locator("figure svg").all() if figure.is_visible()]
    assert len(figures) >= (4 if media == "print" else 1)
    for figure in figures:
        whole, texts = figure.bounding_box(), boxes(figure, "text")
        for place, one in enumerate(texts):
            assert whole["x"] - 1 <= one["left"]
            assert one["right"] <= whole["x"] + whole["width"] + 1
            for other in texts[:place]:
                across = min(one["right"], other["right"]) - max(one["left"], other["left"])
                down = min(one["bottom"], other["bottom"]) - max(one["top"], other["top"])
                assert across <= 0.5 or down <= 0.3 * one["height"], (one["text"], other["text"])


def test_a_phone_shows_speedup_and_verdict_of_each_domain_in_the_table_too(opened: Any) -> None:
    page = opened(400)
    table = page.locator(".alphaprof-screen table").first
    heads = [head for head in table.locator("thead th").all() if head.is_visible()]
    assert [head.inner_text() for head in heads] == ["domain", "draft", "γ", "speedup [95% each]", "verdict"]
    assert boxes(table, "thead th")[-1]["right"] <= 400


def test_the_dark_page_is_dark_and_so_are_its_figures(opened: Any) -> None:
    for scheme, bright in (("light", False), ("dark", True)):
        page = opened(1280, scheme, scripts=True)
        ink = "element => getComputedStyle(element).fill.match(/\\d+/g).map(Number)"
        colors = page.locator("#answer figure text").first.evaluate(ink)
        assert (sum(colors) > 3 * 128) == bright


def test_a_link_unfolds_what_it_leads_to(opened: Any) -> None:
    page = opened(1280)
    for name in FOLDED:
        folded = page.locator(f"details:has(#{name})").first
        assert folded.get_attribute("open") is None
        page.locator(f"nav a[href='#{name}']").click()
        page.locator(f"details[open]:has(#{name})").first.wait_for()
    page.locator(".what").first.click()
    page.locator("dt:target").wait_for()


def test_paper_gets_every_section_whole_and_nothing_to_press(opened: Any) -> None:
    """Letter less the margins of the page: 726 x 966 CSS pixels."""
    page = opened(726)
    assert boxes(page, "#times table") == []
    page.emulate_media(media="print", color_scheme="dark")
    for selector in ("#contents", ".what", ".skip"):
        assert not page.locator(selector).first.is_visible()
    for name in FOLDED:
        assert page.locator(f"#{name}").bounding_box()["height"] > 20
    assert page.evaluate("document.documentElement.scrollWidth") <= 726
    assert max(box["height"] for box in boxes(page, "figure")) < 966
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


@pytest.mark.parametrize("width", [1280, 800, 400])
def test_pages_of_other_answers_are_as_wide_as_their_window(browser: Any, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": HEIGHT})
    page.set_content(plain_page("alphaprof-check", [Verdict("FAIL", f"  {'a long line of words ' * 20}"), *WIDE_TABLE]))
    (main,) = boxes(page, "main")
    assert 0.75 * width < main["width"] < width
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.close()


WIDE_TABLE = [Table("rules", [f"column {place}" for place in range(40)], [("row", {})])]


def test_a_figure_of_its_own_is_drawn_as_on_the_page(browser: Any, address: str) -> None:
    for scheme, ground in (("light", "rgb(255, 255, 255)"), ("dark", "rgb(20, 24, 29)")):
        page = browser.new_page(color_scheme=scheme)
        page.goto(address.replace(".html", ".svg"))
        assert page.locator("text", has_text="$x_<b>").count() == 1
        assert page.locator("path").first.evaluate("element => getComputedStyle(element).fill") == ground
        page.close()
