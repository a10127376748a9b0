"""The web book: it builds without a warning, works offline in a browser and on a phone, and has the exercises and outputs."""

import html
import os
import re
import shutil
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest
from filelock import FileLock

import runs
from needs import require
from workshop.course.exercises import exercises

BOOK = [sys.executable, "-P", "-m", "workshop", "book"]
PHONE, LAPTOP = {"width": 390, "height": 844}, {"width": 1300, "height": 900}


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    """The built book. Sphinx treats warnings, for example about a broken link, as errors."""
    # The processes of pytest-xdist share the folder above their own, and the first one builds the book for all.
    folder = (
        tmp_path_factory.getbasetemp().parent
        if "PYTEST_XDIST_WORKER" in os.environ
        else tmp_path_factory.mktemp("book")
    )
    site = folder / "site"
    with FileLock(folder / "book.lock"):
        if not site.exists():
            done = subprocess.run([*BOOK, "--output", site], cwd=runs.ROOT, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
    return site


@pytest.fixture(scope="module")
def chromium():
    require("chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def address(book):
    """A web server of the book."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(book))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def page(chromium, address):
    """A page in dark mode; the test fails if it loads anything from a different host or finds a file missing."""
    made = chromium.new_page(viewport=LAPTOP, color_scheme="dark", base_url=address)
    wrong = []
    made.on(
        "request", lambda request: None if request.url.startswith((address, "data:")) else wrong.append(request.url)
    )
    made.on("requestfailed", lambda request: wrong.append(request.url))
    yield made
    made.close()
    assert not wrong


def targets(file: Path) -> set[str]:
    """Return the targets of the links, pictures and scripts of a page."""
    return {html.unescape(target) for target in re.findall(r'(?:href|src)="([^"]+)"', file.read_text())}


def identifiers(file: Path) -> set[str]:
    return set(re.findall(r'id="([^"]+)"', file.read_text()))


def test_every_link_of_the_book_exists(book):
    pages = sorted(book.rglob("*.html"))
    known = {file: identifiers(file) for file in pages}
    for file in pages:
        for target in targets(file):
            if re.match(r"[a-z]+:", target):
                continue  # an address on the web, or data
            name, _, anchor = unquote(target).partition("#")
            there = (file.parent / name.partition("?")[0]).resolve() if name else file
            assert there.exists(), f"{file.relative_to(book)}: {target}"
            if anchor and there in known:
                assert anchor in known[there], f"{file.relative_to(book)}: {target}"


def test_the_book_has_every_exercise_with_its_hints_closed(page):
    for stage in {exercise.stage for exercise in exercises()}:
        page.goto(f"/{stage}/exercises.html")
        own = [exercise for exercise in exercises() if exercise.stage == stage]
        hints = page.locator("details.sd-dropdown")
        assert hints.count() == sum(len(goal.hints) for exercise in own for goal in exercise.goals)
        assert all(page.get_by_role("heading", name=exercise.file).count() for exercise in own)
        text = hints.first.locator(".sd-card-body")
        assert not text.is_visible()
        hints.first.locator("summary").click()
        assert text.is_visible()


def test_the_book_has_the_outputs_of_the_solved_notebooks(book):
    for notebook in (runs.ROOT / "solutions").glob("*/*.ipynb"):
        text = (book / notebook.relative_to(runs.ROOT).with_suffix(".html")).read_text()
        assert ("goals met in" in text) is ('"check(' in notebook.read_text())  # a cell that checks an exercise
        assert "cell_output" in text


def test_figures_load_and_no_page_is_wider_than_a_phone(book, page):
    page.set_viewport_size(PHONE)
    for file in sorted(book.rglob("*.html")):
        page.goto(f"/{file.relative_to(book)}")
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], file
        broken = "[...document.images].filter(image => !image.complete || !image.naturalWidth).map(image => image.src)"
        assert page.evaluate(broken) == []


def test_the_search_finds_a_term(page):
    page.goto("/index.html")
    page.get_by_placeholder("Search").first.fill("DistributedSampler")
    page.keyboard.press("Enter")
    found = page.locator("#search-results li a")
    found.first.wait_for()
    assert any("glossary" in link.get_attribute("href") for link in found.all())


def test_the_book_follows_the_dark_mode_of_the_browser_and_has_a_switch(page):
    page.goto("/index.html")
    background = (
        "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).reduce((a, b) => a + +b, 0)"
    )
    assert page.evaluate(background) < 150
    for _ in range(3):  # auto, light, dark
        page.locator("button.theme-toggle:visible").first.click()
        if page.evaluate(background) > 600:
            return
    pytest.fail("no theme is light")


def test_a_folder_that_is_not_a_book_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("three years of work")
    done = subprocess.run([*BOOK, "--output", tmp_path], cwd=runs.ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "is not empty" in done.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]
