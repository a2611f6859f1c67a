"""The HTML report in a real browser: it draws every figure, says nothing on the console, and its buttons work."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from alphaprof.render.html.page import render_html
from tests.reporting import HOSTILE, reported
from tests.synthetic import Domain, Recipe

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")
SECTIONS = ("rules", "context", "difficulty", "documents", "run", "legend")  # some of those that are folded at first
WINDOW = {"width": 1200, "height": 900}
RECIPE = Recipe(
    domains={"code": Domain(), "chat": Domain(alpha=0.4), HOSTILE["html"]: Domain(), HOSTILE["direction"]: Domain()},
    drafts={"small": 0.0, "large": 0.2},
    rules=("strict", "additive_0p1"),
    certificates=True,
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
def opened(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, list[str]]]:
    """The report of RECIPE, scrolled through once, and what the console has said."""
    folder = tmp_path_factory.mktemp("page")
    path = folder / "report.html"
    path.write_text(render_html(reported(folder, RECIPE)), encoding="utf-8")
    context = browser.new_context(viewport=WINDOW, offline=True)
    page = context.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: said.append(f"dialog {dialog.message}") or dialog.dismiss())
    page.goto(path.as_uri())
    assert [name for name in SECTIONS if page.locator(f"#{name} > details").evaluate("part => part.open")] == []
    page.evaluate("() => { location.hash = '#context'; }")
    page.wait_for_function("document.querySelector('#context > details').open")  # a link unfolds its section
    page.evaluate("document.querySelectorAll('section > details').forEach((part) => { part.open = true; })")
    scroll_through(page)
    yield page, said
    context.close()


@pytest.fixture
def page(opened: tuple[Any, list[str]]) -> Iterator[Any]:
    """The page as it is first seen; anything on the console fails the test."""
    found, said = opened
    found.set_viewport_size(WINDOW)
    yield found
    for button in found.locator("#filters button").all():
        wanted = str(button.inner_text() != "additive_0p1").lower()
        if button.get_attribute("aria-pressed") != wanted:
            button.click()
    assert said == []


def drawn(page: Any, figure: str) -> list[dict[str, Any]]:
    """What the library was given of a figure's traces: what they are about, and whether they are shown."""
    found = page.evaluate(
        "name => document.querySelector(`[data-figure=${name}]`).data.map(t => ({...t.meta, shown: t.visible !== false}))",
        figure,
    )
    return list(found)


def test_every_figure_is_drawn(page: Any) -> None:
    names = page.eval_on_selector_all(".plot", "plots => plots.map(plot => plot.dataset.figure)")
    assert names == ["acceptance", "speedups", "depths", "context", "difficulty"]
    for name in names:
        marks = page.eval_on_selector_all(
            f"[data-figure={name}] .trace path, [data-figure={name}] .trace .point", "all => all.length"
        )
        assert marks > 0, name
    assert page.locator("#verdict .verdict").inner_text() in ("GO", "NO-GO", "UNDECIDED")


@pytest.mark.slow
def test_a_button_hides_a_draft_and_shows_it_again(page: Any) -> None:
    button = page.get_by_role("button", name="small")
    assert any(trace["shown"] for trace in drawn(page, "speedups") if trace["draft"] == "small")
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    for figure in ("acceptance", "speedups", "depths", "context", "difficulty"):
        traces = drawn(page, figure)
        assert not any(trace["shown"] for trace in traces if trace["draft"] == "small")
        assert any(trace["shown"] for trace in traces if trace["draft"] == "large")
    assert page.locator(".table[data-draft=small]:visible").count() == 0
    button.click()
    assert any(trace["shown"] for trace in drawn(page, "speedups") if trace["draft"] == "small")
    assert page.locator(".table[data-draft=small]:visible").count() > 0


@pytest.mark.slow
def test_panels_that_show_nothing_say_so(page: Any) -> None:
    """An off-policy or lossy rule has no rounds: no empty axes for it, but a sentence."""
    note = page.locator("#figure-speedups .empty")
    assert not note.is_visible()
    titles = page.locator("[data-figure=speedups] .annotation-text")
    before = titles.count()
    page.get_by_role("button", name="additive_0p1").click()
    page.get_by_role("button", name="strict").click()
    assert note.is_visible()
    assert titles.count() == 0
    page.get_by_role("button", name="strict").click()
    assert not note.is_visible()
    assert titles.count() == before > 0


@pytest.mark.slow
def test_hostile_names_stand_there_as_text(page: Any) -> None:
    assert page.locator("#drafts th", has_text="<script>alert(1)</script>").count() > 0
    titles = page.eval_on_selector_all("[data-figure=speedups] .annotation-text", "all => all.map(t => t.textContent)")
    assert "<script>alert(1)</script>" in titles


def scroll_through(page: Any) -> None:
    """Brings every figure into view once, and waits until it is drawn."""
    for plot in page.locator(".plot").all():
        plot.scroll_into_view_if_needed()
        plot.locator(".main-svg").first.wait_for()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of a run with twelve domains of long names, in which every other word differs, and five drafts."""
    folder = tmp_path_factory.mktemp("large")
    domains = {f"{place} {'a long name of a domain ' * 9}"[:200]: Domain(documents=2) for place in range(12)}
    drafts = {"small": 0.0, "medium": 0.1, "large": 0.2, "a-draft-with-a-long-name-q4_k_m": 0.1, "fifth": 0.15}
    path = folder / "report.html"
    path.write_text(render_html(reported(folder, Recipe(domains=domains, drafts=drafts))), encoding="utf-8")
    return path.as_uri()


@pytest.fixture
def fresh(browser: Any, address: str) -> Iterator[Any]:
    """That page as it is opened on a dark screen; nothing else than the file may be asked for."""
    context = browser.new_context(viewport=WINDOW, color_scheme="dark")
    found, asked = context.new_page(), []
    found.on("request", lambda request: asked.append(request.url))
    found.goto(address)
    yield found
    context.close()
    assert [url for url in asked if not url.startswith(("data:", "blob:"))] == [address]


@pytest.mark.slow
def test_paper_gets_every_figure_whole_and_nothing_to_press(fresh: Any) -> None:
    """Letter less the margins of the page: 726 x 966 CSS pixels."""
    closed = fresh.locator("details:not([open])").count()
    assert closed > 0
    before = fresh.locator(".plot").first.bounding_box()["width"]
    fresh.emulate_media(media="print")
    fresh.set_viewport_size({"width": 726, "height": 966})
    fresh.wait_for_function("window.Plotly")
    fresh.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    for selector in ("#contents", "#filters", ".skip"):
        assert not fresh.locator(selector).is_visible()
    assert fresh.locator("details:not([open])").count() == 0
    for figure in fresh.locator("figure").all():
        assert figure.locator(".main-svg").count() > 0
        box, drawing = figure.bounding_box(), figure.locator(".main-svg").first.bounding_box()
        assert box["height"] < 966
        assert drawing["x"] + drawing["width"] <= 726
    assert fresh.evaluate("document.documentElement.scrollWidth") <= 726
    fresh.evaluate("window.dispatchEvent(new Event('afterprint'))")
    fresh.emulate_media(media="screen")
    fresh.set_viewport_size(WINDOW)
    fresh.wait_for_function(
        "wide => document.querySelector('.plot .main-svg').getBoundingClientRect().width == wide", arg=before
    )
    assert fresh.locator("details:not([open])").count() == closed


@pytest.mark.slow
def test_long_names_leave_the_page_as_wide_as_a_phone(fresh: Any) -> None:
    fresh.set_viewport_size({"width": 400, "height": 800})
    assert fresh.evaluate("document.documentElement.scrollWidth") <= 400


@pytest.mark.slow
def test_a_phone_shows_speedup_and_verdict_of_each_domain(fresh: Any) -> None:
    fresh.set_viewport_size({"width": 400, "height": 800})
    table = fresh.locator(".alphaprof-screen table").first
    heads = [head.inner_text() for head in table.locator("thead th").all() if head.is_visible()]
    assert heads == ["domain", "draft", "γ", "speedup [95% each]", "verdict"]
