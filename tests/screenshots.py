"""Take pictures for results/: solved notebooks in JupyterLab, the web book, the card of an Open OnDemand session, and the board
of a class with thirty simulated learners.

Run python tests/screenshots.py [card] [book] [board] [notebooks], then look at each picture.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from playwright.sync_api import sync_playwright

import runs
from board.learners import write_class
from test_jupyter import LAB, address
from workshop.board.board import EVERY, LAST_COURSE, Board
from workshop.board.export import report
from workshop.board.page import Server

RESULTS = runs.ROOT / "results"
SCENES = {  # the cell to show, by stage and theme
    ("01_single_gpu", "light"): "Where does the time go?",
    ("02_pytorch_ddp", "dark"): "DDP by hand",
    ("03_pytorch_lightning", "dark"): "Is it the same training, and as fast?",
    ("04_model_parallel_with_fsdp", "light"): "1. Does it fit?",
    ("05_deepspeed", "light"): "7. Which should I use?",
}


def notebooks(playwright) -> None:
    chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(
            runs.ROOT, Path(folder) / "workshop", ignore=shutil.ignore_patterns("runs", ".venv*", ".git", ".jupyter")
        )
        lab = runs.Running(LAB, copy, PYTHONPATH=copy, HOME=folder)
        try:
            url, token = address(lab)
            for (stage, theme), heading in SCENES.items():
                page = chromium.new_page(viewport={"width": 1300, "height": 1500})
                page.goto(f"{url}/lab/tree/solutions/{stage}/{stage}.ipynb?token={token}")
                page.get_by_role("heading", name=stage[:2]).first.wait_for(timeout=60_000)
                if theme == "dark":
                    page.get_by_role("menuitem", name="Settings", exact=True).click()
                    page.get_by_text("Theme", exact=True).hover()
                    page.get_by_role("menuitem", name="JupyterLab Dark", exact=True).click()
                page.keyboard.press("Control+b")  # the notebook without the side bars
                page.get_by_role("heading", name=heading).evaluate(
                    "heading => heading.scrollIntoView({block: 'start'})"
                )
                page.wait_for_timeout(3000)
                page.get_by_role("heading", name=heading).evaluate(
                    "heading => heading.scrollIntoView({block: 'start'})"
                )
                page.wait_for_timeout(1000)
                page.screenshot(path=RESULTS / f"notebook-{stage[:2]}-solved.png")
                page.close()
        finally:
            lab.end()
    chromium.close()


def card(playwright) -> None:
    """Return the card of a session as the dashboard shows it: its info text and the button of view.html.erb."""
    with tempfile.TemporaryDirectory() as session:
        asked = {
            "connection": {
                "host": "node1",
                "port": "2000",
                "password": "x",
                "notebook": "01_single_gpu/01_single_gpu.ipynb",
            }
        }
        command = ["ruby", runs.ROOT / "tests/ondemand/render.rb", runs.ROOT / "ondemand", session, json.dumps(asked)]
        rendered = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    style = (
        "body { font: 16px sans-serif; width: 640px } .card { border: 1px solid #bbb; border-radius: 4px } "
        ".head { background: #d1e7dd; padding: 10px } .body { padding: 12px } "
        ".btn { background: #0d6efd; color: white; border: 0; border-radius: 4px; padding: 8px 14px; font-size: 16px }"
    )
    info = rendered["info"].replace("\n\n", "<p>").replace("`", "")
    info = info.replace(session, "~/ondemand/data/.../output/SESSION")
    page = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"]).new_page()
    page.set_content(
        f"<style>{style}</style><div class=card><div class=head><b>Distributed PyTorch workshop</b> (1234) "
        f"<b>1 node | 2 cores | Running</b></div><div class=body>{info}<p>{rendered['view']}</div></div>"
    )
    page.locator(".card").screenshot(path=RESULTS / "ondemand-card.png")
    page.context.browser.close()


BOOK = {  # the page and the text to show, by the name of the picture, the theme and the width in pixels
    ("book-light", "light", 1300): ("solutions/02_pytorch_ddp/02_pytorch_ddp.html", "gives every rank the tensors"),
    ("book-dark", "dark", 1300): ("solutions/02_pytorch_ddp/02_pytorch_ddp.html", "gives every rank the tensors"),
    ("book-phone", "dark", 390): ("02_pytorch_ddp/exercises.html", "Goal 2"),
}


def book(playwright) -> None:
    """Show a page with a figure and an output in both themes, and the hints of an exercise on a phone."""
    chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
    with tempfile.TemporaryDirectory() as site:
        subprocess.run([sys.executable, "-m", "workshop", "book", "--output", site], cwd=runs.ROOT, check=True)
        for (name, theme, width), (path, text) in BOOK.items():
            page = chromium.new_page(viewport={"width": width, "height": 1000}, color_scheme=theme)
            page.goto(f"file://{site}/{path}")
            page.get_by_text(text).last.evaluate("it => window.scrollTo(0, it.getBoundingClientRect().top - 500)")
            if width < 500:
                page.locator("details.sd-dropdown summary").nth(5).click()
            page.wait_for_timeout(500)
            page.screenshot(path=RESULTS / f"{name}.png")
    chromium.close()


def look_forever(shown) -> None:
    while True:
        shown.look()
        time.sleep(EVERY)


def board(playwright) -> None:
    """Show the board in both themes, and on a phone."""
    chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        folder.chmod(0o3773)
        write_class(folder, time.time() - 7 * 86400, seed=6)
        last = Board(folder)
        last.look()
        (folder / LAST_COURSE).write_text(json.dumps(report(last, names=False)))
        write_class(folder, time.time())
        shown = Board(folder)
        shown.look()
        server = Server(shown, 0)
        threading.Thread(target=look_forever, args=(shown,), daemon=True).start()
        for name, theme, width in (("light", "light", 1300), ("dark", "dark", 1300), ("phone", "light", 390)):
            page = chromium.new_page(viewport={"width": width, "height": 1000}, color_scheme=theme)
            page.goto(server.address)
            page.locator("tbody tr").first.wait_for()
            if width < 500:
                row = page.locator("tbody tr").first
                row.evaluate("it => window.scrollTo(0, it.getBoundingClientRect().top + window.scrollY - 300)")
            page.screenshot(path=RESULTS / f"board-{name}.png", full_page=width > 500)
        server.shutdown()
    chromium.close()


if __name__ == "__main__":
    with sync_playwright() as playwright:
        for picture in (card, book, board, notebooks):
            if picture.__name__ in (sys.argv[1:] or ("card", "book", "board", "notebooks")):
                picture(playwright)
