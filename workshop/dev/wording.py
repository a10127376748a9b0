"""Find mistakes in the documents: terms without a link to the glossary, and measured figures without a result file."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from workshop.dev.documents import LINK, documents, prose
from workshop.repository import require_stages

# According to README.md, readers know a PyTorch training loop, and with it these terms.
KNOWN = {"batch", "epoch", "parameter", "gradient", "optimizer state"}
# These words are terms only in such phrases, because "to store" and "a new task" are everyday English.
ONLY_WITH = {"store": r"(?:the|a|its|their|this)\s+(?:\w+\s+)?", "task": r"(?:Slurm|srun|job)\S*\s+(?:\w+\s+)*"}
RATE = re.compile(
    r"(\d[\d,]*(?:\.\d+)?)(?: %)?(?:(?:,| and| to) (\d[\d,]*(?:\.\d+)?))?"
    r" (?:(?:samples|tokens|images)(?:/s| per second)|times as fast|% of the throughput)"
)

NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
DURATION = re.compile(
    rf"(\d[\d,]*(?:\.\d+)?|{'|'.join(NUMBERS)}) (seconds?|minutes?|hours?) on (?:\d+|two) (?:CPU )?cores"
)
SECONDS = {"second": 1, "minute": 60, "hour": 3600}


def unexplained_terms() -> Iterator[str]:
    """Find terms of the glossary whose first use in a notebook has no link to it, unless bold type marks a definition there."""
    root = require_stages()
    for notebook in sorted(root.glob("*/*.ipynb")):
        lines = [line for line in prose(notebook) if not re.match(r"#|You are here|\| *\d+\. ", line[1])]
        for term, anchor in glossary(root):
            for place, line in lines:
                if f"glossary.md#{anchor})" in line or re.search(rf"\*\*{pattern(term)}", line, re.IGNORECASE):
                    break
                if used(term, line):
                    yield f"{notebook.relative_to(root)}:{place}: the first use of {term} has no link to the glossary"
                    break


@cache
def glossary(root: Path) -> list[tuple[str, str]]:
    """Return each term of the glossary with its anchor; a heading such as "MASTER_ADDR and MASTER_PORT" has two terms."""
    headings = re.findall(r"^## (.+)$", (root / "docs/glossary.md").read_text().replace("`", ""), re.MULTILINE)
    found = []
    for heading in headings:
        anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found += [(term, anchor) for term in re.split(r", | and | \(|\)", heading) if term and term not in KNOWN]
    return found


def pattern(term: str) -> str:
    """Return a pattern for a term in the singular or plural, with hyphens, spaces or underscores."""
    return re.sub(r"(\\-|\\ |_)", "[-_ ]", re.escape(term)) + "(?:s|es)?"


def used(term: str, line: str) -> bool:
    """Return whether a line uses a term. Code, and the texts of links and pictures, do not count."""
    plain = LINK.sub("", re.sub(r"`[^`]*`", "", line))
    exact = term != term.lower()  # "DDP" has a fixed case, but "all-reduce" may begin a sentence
    return bool(
        re.search(
            rf"(?<![\w.-]){ONLY_WITH.get(term, '')}{pattern(term)}(?![\w-])", plain, 0 if exact else re.IGNORECASE
        )
    )


def unmeasured_figures() -> Iterator[str]:
    """Find measured speeds and durations in the prose that are in none of the result files to which their paragraph links."""
    root = require_stages()
    for path in documents():
        name = path.relative_to(root)
        if name.parts[0] in ("results", "solutions") or name.name in ("glossary.md", "CHANGELOG.md"):
            continue
        for place, text in paragraphs(path):
            targets = [path.parent / target.partition("#")[0] for _, _, target in LINK.findall(text)]
            sources = [file for file in targets if "results" in file.parts and file.is_file() and file.suffix != ".png"]
            for figure in filter(None, (figure for found in RATE.findall(text) for figure in found)):
                if not any(contains(file, figure) for file in sources):
                    yield f"{name}:{place}: {figure} is in no result file that this paragraph links to"
            for number, unit in DURATION.findall(text):
                figure = str(NUMBERS.index(number)) if number in NUMBERS else number
                scales = (1, 1 / SECONDS[unit.removesuffix("s")])  # the file has the same unit, or seconds
                if not any(contains(file, figure, scales) for file in sources):
                    yield f"{name}:{place}: {number} {unit} is in no result file that this paragraph links to"


def paragraphs(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the paragraphs and the items of lists outside of code blocks, each with the place of its first line."""
    place, text = "", ""
    for here, line in [*prose(path), ("", "")]:
        if not line.strip() or re.match(r" *([-*]|\d+\.) |\|", line):
            if text:
                yield place, text
            place, text = here, line.strip()
        else:
            place, text = (place, f"{text} {line.strip()}") if text else (here, line.strip())


@cache
def numbers(file: Path) -> set[float]:
    """Return all numbers in a file."""
    return {float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*(?:\.\d+)?", file.read_text()) if number}


def contains(file: Path, figure: str, scales: tuple[float, ...] = (1, 100)) -> bool:
    """Return whether a file contains a number that rounds to this figure; by default also a fraction for a percentage.

    Args:
        file: a result file.
        figure: the figure as the text writes it.
        scales: factors between the numbers in the file and the figure.
    """
    wanted = float(figure.replace(",", ""))
    tolerance = 0.5 * 10.0 ** -len(figure.partition(".")[2]) + 1e-9
    return any(abs(number * scale - wanted) <= tolerance for number in numbers(file) for scale in scales)
