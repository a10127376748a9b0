"""Find mistakes in the documents: broken links, and pictures without alternative text."""

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from workshop.repository import require_stages

LINK = re.compile(r"(!?)\[((?:[^][]|\[[^][]*\])*)\]\(([^)\s]+)\)")  # the text of a link may contain a pair of brackets
FENCE = re.compile(r"^ {0,3}```")


def documents() -> list[Path]:
    """Return the Markdown files and the notebooks of the repository."""
    root = require_stages()
    folders = [
        path for path in root.iterdir() if path.is_dir() and path.name[0] != "." and path.name not in ("runs", "data")
    ]
    found = [
        *root.glob("*.md"),
        *(path for folder in folders for kind in ("*.md", "*.ipynb") for path in folder.rglob(kind)),
    ]
    return sorted(path for path in found if not {".ipynb_checkpoints", "runs"} & set(path.parts[len(root.parts) :]))


def wrong_links() -> Iterator[str]:
    """Find links to files or headings that do not exist, and pictures without alternative text."""
    root = require_stages()
    for path in documents():
        for place, line in prose(path):
            for picture, text, target in LINK.findall(re.sub(r"`[^`]*`", "``", line)):
                if re.match(r"[a-z]+:", target):
                    continue  # an address on the web
                if picture and not text:
                    yield f"{path.relative_to(root)}:{place}: the picture {target} has no alternative text"
                file, _, anchor = target.partition("#")
                there = path.parent / file if file else path
                if not there.exists():
                    yield f"{path.relative_to(root)}:{place}: {target} does not exist"
                elif anchor and there.suffix in (".md", ".ipynb") and anchor not in anchors(there):
                    yield f"{path.relative_to(root)}:{place}: {file or path.name} has no heading #{anchor}"


def prose(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the lines outside of code blocks, each with its place: the line number, in a notebook with the cell number."""
    if path.suffix == ".ipynb":
        cells = json.loads(path.read_text())["cells"]
        texts = [
            (f"cell {number}, line ", "".join(cell["source"]))
            for number, cell in enumerate(cells, 1)
            if cell["cell_type"] == "markdown"
        ]
    else:
        texts = [("", path.read_text())]
    for prefix, text in texts:
        code = False
        for number, line in enumerate(text.splitlines(), 1):
            if FENCE.match(line):
                code = not code
            elif not code:
                yield f"{prefix}{number}", line


@cache
def anchors(path: Path) -> set[str]:
    """Return the anchors of a document: its headings, converted as GitHub does, and its explicit anchors."""
    found: set[str] = set()
    for _, line in prose(path):
        found |= set(re.findall(r'<a name="([^"]+)"', line))
        if heading := re.match(r"#{1,6} +(.+)", line):
            words = re.sub(r"<[^>]+>|\[([^]]*)\]\([^)]*\)", r"\1", heading[1]).strip().lower()
            found.add(re.sub(r"[^\w\- ]", "", words).replace(" ", "-"))
    return found
