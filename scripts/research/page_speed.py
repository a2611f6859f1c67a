"""How large the HTML report is, and how soon it is there: a synthetic run of 3 drafts, 8 domains and 8 rules in Chromium.

    python scripts/research/page_speed.py [--repeats 5]

`load`: until the browser's load event, by its own clock; everything but the figures can be read by then. `figures`: until
the first figure is drawn, where the page is opened at it.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from alphaprof.render.html.page import render_html
from alphaprof.report.build import build_report
from alphaprof.rules import DEFAULT_RULES
from tests.synthetic import Domain, Recipe, write_run

DOMAINS = ("code", "chat", "math", "translation", "summaries", "stories", "extraction", "tables")
RECIPE = Recipe(
    domains={name: Domain(documents=20, alpha=0.3 + 0.07 * place) for place, name in enumerate(DOMAINS)},
    drafts={"small": 0.0, "medium": 0.1, "large": 0.2},
    gammas=range(1, 9),
    rules=DEFAULT_RULES,
    certificates=True,
    shard_documents=40,
)
QUIET = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")
LOAD = "() => { const t = performance.getEntriesByType('navigation')[0]; return t.loadEventEnd - t.startTime; }"


def main() -> None:
    """Write the page, open it again and again, print medians."""
    parser = argparse.ArgumentParser(description="How large the HTML report is, and how soon it is there.")
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        sys.exit("chromium is not installed")
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        path = Path(folder) / "report.html"
        path.write_text(render_html(build_report(write_run(Path(folder) / "run", RECIPE))), encoding="utf-8")
        print(f"size    {path.stat().st_size / 1e6:.2f} MB")
        browser = playwright.chromium.launch(executable_path=chromium, args=list(QUIET))
        loads, figures = [], []
        for _ in range(repeats):
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.goto(path.as_uri() + "#figure-acceptance")
            loads.append(page.evaluate(LOAD))
            page.locator("#figure-acceptance .main-svg").first.wait_for()
            figures.append(page.evaluate("() => performance.now()"))
            page.close()
        browser.close()
    for name, times in (("load", loads), ("figures", figures)):
        print(f"{name:7} {statistics.median(times) / 1000:.2f} s (largest of {repeats}: {max(times) / 1000:.2f} s)")


if __name__ == "__main__":
    main()
