"""Run ``workshop book``: build the course as a static web site, from the same files that learners and contributors read."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from workshop.course.exercises import Exercise, exercises, stage_files
from workshop.dev.documents import FENCE, LINK, documents
from workshop.errors import UserError
from workshop.jupyter.solutions import MORE
from workshop.repository import packages, require_stages

SETTINGS = "docs/book"  # conf.py of Sphinx, and the style sheet
LANGUAGES = {".py": "python", ".sh": "bash", ".toml": "toml", ".json": "json", ".yml": "yaml", ".yaml": "yaml"}
FRONT = "index.md"  # made from README.md
MORE_STAGES = ["bonus_jax/README", "strategies/README"]  # those without exercises
RESULTS = ["results/which-2-cores", "results/versions-2-cores", "results/plan-validation"]
PARTS = {
    "To look things up": [
        "docs/your-script",
        "docs/check-your-program",
        "docs/diagnose",
        "docs/for-assistants",
        "docs/numerics",
        "docs/plan",
        "docs/simulate",
        "docs/glossary",
        "strategies/RULES",
        "results/README",
        *RESULTS,
    ],
    "For instructors and sites": [
        "INSTRUCTORS",
        "docs/grades",
        "OFFLINE",
        "containers/README",
        "ondemand/README",
        "slurm-multinode/pbs/README",
    ],
    "For contributors": ["CONTRIBUTING", "ARCHITECTURE", "AGENTS", "CHANGELOG", "SECURITY", "api/index"],
}
PICTURES = {".png", ".svg"}


def run_book(output: str | None) -> int:
    """Build the book, and print where it is.

    Args:
        output: the folder of the web site; None: runs/book in the repository.

    Returns:
        The exit status of Sphinx. It is 1 after a warning, for example about a broken link.

    Raises:
        UserError: a package that the book needs is missing, or the folder contains something other than a book.
    """
    root = require_stages()
    site = Path(output).absolute() if output else root / "runs/book"
    if site.exists() and any(site.iterdir()) and not (site / "objects.inv").is_file():
        raise UserError(f"{site} is not empty and contains no book; choose a different folder with --output")
    missing = [name for name, module in packages("book").items() if not _has(module)]
    if missing:
        raise UserError(f"the book needs {', '.join(missing)}: {sys.executable} -m pip install -e '{root}[book]'")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        write_sources(root, source)
        command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-d", f"{folder}/doctrees"]
        status = subprocess.run([*command, str(source), str(site)]).returncode
    if (site / "index.html").is_file():
        print(f"The book is in {os.path.relpath(site)}. Open {os.path.relpath(site / 'index.html')} in a browser.")
    return status


def _has(module: str) -> bool:
    from importlib.util import find_spec

    return find_spec(module) is not None


def write_sources(root: Path, source: Path) -> None:
    """Write the input of Sphinx: the documents, the solved notebooks, the files that they link to, and generated pages."""
    shutil.copytree(root / SETTINGS, source)
    linked = {exercise.path for exercise in exercises()}
    for document in documents():
        name = document.relative_to(root)
        if (root / "solutions" / name).is_file():
            continue  # an unsolved notebook; the book contains the solved one
        page = source / (FRONT if name == Path("README.md") else name)
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text("".join(_rewritten(document, root, linked)))
    for stage in stage_files():
        own = [exercise for exercise in exercises() if exercise.stage == stage]
        pages = [f"Notebook </solutions/{stage}/{stage}>", "Exercises and hints <exercises>"]
        with (source / stage / "README.md").open("a") as page:
            page.write(_contents("", pages if own else pages[:1]))
        if own:
            (source / stage / "exercises.md").write_text("\n".join(_exercise_page(stage, own)))
    for notebook in MORE.values():
        with (source / notebook).with_name("README.md").open("a") as page:
            page.write(_contents("", [f"Notebook </solutions/{notebook}>"]))
    with (source / FRONT).open("a") as page:
        page.write(_contents("The course", [f"{stage}/README" for stage in stage_files()] + MORE_STAGES))
        for caption, pages in PARTS.items():
            page.write(_contents(caption, pages))
    for file in sorted(linked):
        copy = source / file.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
        if file.suffix not in PICTURES:
            copy.with_name(f"{file.name}.md").write_text(_program_page(file, root))
    for name, text in _api_pages(root):
        (source / "api").mkdir(exist_ok=True)
        (source / "api" / f"{name}.md").write_text(text)


def _contents(caption: str, pages: Iterable[str]) -> str:
    """Return a table of contents, which Sphinx shows in the sidebar."""
    named = [f":caption: {caption}"] if caption else []
    return "\n".join(["", "```{toctree}", ":hidden:", *named, "", *pages, "```", ""])


# ---------------------------------------------------------------- links


def _rewritten(document: Path, root: Path, linked: set[Path]) -> Iterator[str]:
    """Yield the lines of a document with links that work in the book, and add the files that they lead to to ``linked``."""
    code = code_cell = False
    for line in document.read_text().splitlines(keepends=True):
        if kind := re.match(r'^ *"cell_type": "(\w+)"', line):
            code, code_cell = False, kind[1] == "code"  # code such as layers["first"](x) is no link
        if FENCE.match(line) or re.match(r'^ *"```', line):  # in the JSON of a notebook, each line is a string
            code = not code
        yield line if code or code_cell else LINK.sub(lambda link: _book_link(link, document, root, linked), line)


def _book_link(link: re.Match[str], document: Path, root: Path, linked: set[Path]) -> str:
    picture, text, target = link.groups()
    name, hash_sign, anchor = target.partition("#")
    there = Path(os.path.normpath(document.parent / name))
    if re.match(r"[a-z]+:", target) or not name or not there.is_relative_to(root):
        return link[0]
    if there.is_dir():
        there /= "README.md"
        if not there.is_file():
            return text  # the book has no page for this folder
    solved = root / "solutions" / there.relative_to(root)
    if there.suffix == ".ipynb" and solved.is_file():
        there = solved
    if there == root / "README.md":
        there = root / FRONT
    if there.suffix not in (".md", ".ipynb"):
        linked.add(there)
        if there.suffix not in PICTURES:
            there = there.with_name(f"{there.name}.md")
    return f"{picture}[{text}]({os.path.relpath(there, document.parent)}{hash_sign}{anchor})"


# ---------------------------------------------------------------- generated pages


def _program_page(file: Path, root: Path) -> str:
    language = LANGUAGES.get(file.suffix, "text")
    lines = [f"# {file.relative_to(root)}", f"```{{literalinclude}} {file.name}", f":language: {language}", "```", ""]
    return "\n".join(["---", "orphan: true", "---", *lines])


def _exercise_page(stage: str, own: Iterable[Exercise]) -> Iterator[str]:
    """Yield the page with the goals of a stage. Each hint is hidden until the reader opens it."""
    yield f"# Exercises and hints: {stage}\n"
    yield "Each exercise is a program with numbered TODOs, and each TODO has a goal. The command checks your program and says"
    yield "which goals are met. Open a hint only when you need it: each hint says more than the one before.\n"
    for exercise in own:
        yield f"## {exercise.file}\n"
        yield f"Program: [{exercise.file}]({exercise.file}.md)\n"
        yield f"```bash\n./workshop.sh check {exercise.name}\n```\n"
        for goal in exercise.goals:
            yield f"### Goal {goal.number}: {goal.title}\n" if goal.hints else f"### At all times: {goal.title}\n"
            for number, hint in enumerate(goal.hints, 1):
                yield f"````{{dropdown}} Hint {number}\n{hint}\n````\n"


def _api_pages(root: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of a page for each package of ``workshop``, with the docstrings of its modules."""
    modules: dict[str, list[str]] = {}
    for file in sorted((root / "workshop").rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        if file.stem not in ("__init__", "__main__"):
            modules.setdefault(".".join(parts[:2]) if len(parts) > 2 else "workshop", []).append(".".join(parts))
    for package, names in modules.items():
        lines = [f"# {package}", ""]
        for name in names:
            lines += [f"## {name}", "", "```{eval-rst}", f".. automodule:: {name}", "   :members:", "```", ""]
        yield package, "\n".join(lines)
    toc = "\n".join(["```{toctree}", ":maxdepth: 1", "", *modules, "```"])
    yield "index", f"# The package `workshop`\n\nThe supporting code of the course, for contributors.\n\n{toc}\n"
