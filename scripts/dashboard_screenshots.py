"""Pictures of every view of the dashboard, from a real run: `python scripts/dashboard_screenshots.py RUN [RUN …]`.

Writes `docs/images/dashboard-VIEW.png`, and for some views one in the dark and one of a phone. Needs playwright and a
Chromium, as tests/browser does, and makes the files small with pngquant where that is installed. Make the runs first:
one with a judge shows the most, and several are compared.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

OUT = Path(__file__).parent.parent / "docs/images"
VIEWS = ("overview", "judge", "weights", "timeline", "samples", "ledger", "compare")
WIDE, PHONE = {"width": 1280, "height": 860}, {"width": 390, "height": 800}
TWO_VERSIONS = """[...document.querySelectorAll('.said')].slice(0, 2).every(one =>
    [...one.children].filter(part => part.textContent.trim()).length > 1)"""
SETTLES_MS = 1500
"""Until data has come and is drawn."""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("runs", nargs="+", metavar="RUN")
    options.add_argument("--out", type=Path, default=OUT)
    given = options.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    chromium = os.environ.get("FREEWHEEL_CHROMIUM") or shutil.which("chromium")
    command = [sys.executable, "-m", "freewheel", "dashboard", *given.runs]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server, sync_playwright() as playwright:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1]
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        try:
            page = browser.new_page(viewport=WIDE, color_scheme="light")
            for view in VIEWS:
                shoot(page, url, view, given.out / f"dashboard-{view}.png")
            dark = browser.new_page(viewport=WIDE, color_scheme="dark")
            shoot(dark, url, "overview", given.out / "dashboard-dark.png")
            phone = browser.new_page(viewport=PHONE, color_scheme="dark", is_mobile=True, has_touch=True)
            shoot(phone, url, "overview", given.out / "dashboard-phone.png")
        finally:
            browser.close()
            server.terminate()


def shoot(page: Page, url: str, view: str, path: Path) -> None:
    page.goto(url)
    page.wait_for_selector("#content .panel")
    page.click(f"nav [data-view={view}]")
    page.wait_for_selector(f"nav [data-view={view}][aria-current=page]")
    page.wait_for_timeout(SETTLES_MS)
    if view == "samples":
        find_two_versions(page)
    page.screenshot(path=path)
    if shutil.which("pngquant"):
        subprocess.run(["pngquant", "--force", "--skip-if-larger", "--ext", ".png", "--", str(path)], check=False)


def find_two_versions(page: Page) -> None:
    """Open the first sample that two weight versions made: only such a sample shows what the colours mean."""
    for run in page.eval_on_selector_all("#runs option", "all => all.map(one => one.value)"):
        page.select_option("#runs", run)
        page.wait_for_timeout(SETTLES_MS)
        for _ in range(page.locator(".card").count()):
            if page.evaluate(TWO_VERSIONS):
                page.evaluate("document.activeElement.blur()")
                return
            page.keyboard.press("j")
            page.wait_for_timeout(100)


if __name__ == "__main__":
    main()
