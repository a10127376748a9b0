"""The documents: links, glossary, figures, and the page "Your script in ten edits"."""

import io
import json
import re
import subprocess
import sys

import pytest
from rich.console import Console

import runs
from workshop.check.command import check_command
from workshop.check.report import show
from workshop.course.checking import check_file
from workshop.dev import documents, wording

DOCS = runs.ROOT / "docs"
TORCHRUN = ["torchrun", "--nproc-per-node=2"]
SCRIPT = DOCS / "your_script" / "many_gpus.py"


def test_the_documents_have_no_wrong_links():
    assert list(documents.wrong_links()) == []


def test_the_page_of_the_planner_has_the_errors_of_the_result_file():
    found = json.loads((runs.ROOT / "results" / "plan-validation.json").read_text())["summary"]["dense"]
    page = " ".join((DOCS / "plan.md").read_text().split())
    assert f"On {found['runs']} runs of {found['projects']} projects" in page
    for what, name in (
        ("the median error of tokens/s", "median"),
        ("90 % of the errors are below", "nine_of_ten"),
        ("the largest", "largest"),
    ):
        assert re.search(rf"{what}\D* {100 * found[name]:.0f} %", page), (what, found[name])


def test_a_wrong_link_is_named_with_its_line(tmp_path, monkeypatch):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "glossary.md").write_text("# Glossary\n\n## all-reduce\n\nA sum.\n\n## MASTER_ADDR and `x`\n")
    (tmp_path / "README.md").write_text(
        "[good](docs/glossary.md#all-reduce), [good](docs/glossary.md#master_addr-and-x), [web](https://a.org/b#c)\n"
        "[bad](docs/glossary.md#all-gather)\n"
        "```\n[code](nowhere.md)\n```\n"
        "![](docs/none.svg)\n"
    )
    monkeypatch.setattr(documents, "require_stages", lambda: tmp_path)
    assert list(documents.wrong_links()) == [
        "README.md:2: docs/glossary.md has no heading #all-gather",
        "README.md:6: the picture docs/none.svg has no alternative text",
        "README.md:6: docs/none.svg does not exist",
    ]


def test_each_term_is_linked_or_defined_at_its_first_use_in_a_notebook():
    assert list(wording.unexplained_terms()) == []


def test_each_measured_speed_is_in_a_result_file_to_which_its_paragraph_links():
    assert list(wording.unmeasured_figures()) == []


def test_a_term_without_a_link_is_named_with_its_line(tmp_path, monkeypatch):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/glossary.md").write_text("# Glossary\n\n## DDP\n\n## all-reduce\n\n## rank\n\n## store\n")
    cell = {
        "cell_type": "markdown",
        "source": ["Store it with `DDP`.\n", "**all_reduce** adds.\n", "Each rank, in DDP.\n"],
    }
    stage = tmp_path / "02_pytorch_ddp"
    stage.mkdir()
    (stage / "02_pytorch_ddp.ipynb").write_text(json.dumps({"cells": [cell, cell]}))
    monkeypatch.setattr(wording, "require_stages", lambda: tmp_path)
    assert list(wording.unexplained_terms()) == [
        "02_pytorch_ddp/02_pytorch_ddp.ipynb:cell 1, line 3: the first use of DDP has no link to the glossary",
        "02_pytorch_ddp/02_pytorch_ddp.ipynb:cell 1, line 3: the first use of rank has no link to the glossary",
    ]


def test_a_figure_that_was_not_measured_is_named_with_its_line(tmp_path, monkeypatch):
    (tmp_path / "results").mkdir()
    (tmp_path / "results/speed.json").write_text('{"ratio": 0.8819, "speedup": 1.4537, "rate": 1234.4}')
    text = "reaches 88 % of the throughput,\n1.45 times as fast, 1,234 samples/s ([speeds](results/speed.json))"
    (tmp_path / "README.md").write_text(
        f"It {text}.\n\n- It {text.replace('1.45', '1.5').replace('1,234', '1,300')}.\n"
    )
    for module in (wording, documents):
        monkeypatch.setattr(module, "require_stages", lambda: tmp_path)
    assert list(wording.unmeasured_figures()) == [
        "README.md:4: 1,300 is in no result file that this paragraph links to",
    ]


def test_a_duration_that_was_not_measured_is_named_with_its_line(tmp_path, monkeypatch):
    (tmp_path / "results").mkdir()
    (tmp_path / "results/time.json").write_text('{"seconds": 148.3, "cores": 2}')
    text = "takes {} minutes on two CPU cores ([seconds](results/time.json))."
    (tmp_path / "README.md").write_text(f"It {text.format('2')}\n\nIt {text.format('six')}\n")
    for module in (wording, documents):
        monkeypatch.setattr(module, "require_stages", lambda: tmp_path)
    assert list(wording.unmeasured_figures()) == [
        "README.md:3: six minutes is in no result file that this paragraph links to",
    ]


def test_the_readme_shows_what_the_check_says():
    (quoted,) = re.findall(r"```text\n(01_single_gpu/.*?)\.\.\.\n", (runs.ROOT / "README.md").read_text(), re.DOTALL)
    console = Console(file=io.StringIO(), width=200, color_system=None)
    *_, verdict = check_file(runs.ROOT / "01_single_gpu" / "exercise1_fast_single_gpu.py", quick=True)
    show(verdict, console)
    said = [" ".join(line.split()) for line in console.file.getvalue().splitlines()]
    assert [line for line in quoted.splitlines() if " ".join(line.split()) not in said] == []


# ---------------------------------------------------------------- the glossary


def entries() -> dict[str, str]:
    """Return the definition of each term, without the line of links below it."""
    parts = re.split(r"^## (.+)$", (DOCS / "glossary.md").read_text(), flags=re.MULTILINE)
    return {term: text.partition("\nSee:")[0].strip() for term, text in zip(parts[1::2], parts[2::2], strict=True)}


def test_the_glossary_is_sorted_and_short():
    terms = list(entries())
    assert len(terms) >= 60
    assert terms == sorted(terms, key=lambda term: term.lower().replace("-", " "))
    for term, definition in entries().items():
        plain = re.sub(r"\[([^]]+)\]\([^)]*\)|`[^`]*`", r"\1", definition)
        assert len(re.findall(r"[.!?](?= |$)", plain)) in (1, 2), f"{term}: {definition}"


# ---------------------------------------------------------------- the figures


def test_the_figures_are_what_the_script_draws(tmp_path):
    subprocess.run([sys.executable, DOCS / "figures" / "draw.py", "--folder", tmp_path], check=True, timeout=300)
    drawn, there = (
        {path.name: path.read_text() for path in folder.glob("*.svg")} for folder in (tmp_path, DOCS / "figures")
    )
    assert len(drawn) >= 14
    assert drawn.keys() == there.keys()
    assert [name for name, text in drawn.items() if text != there[name]] == []
    assert all(
        re.search(r"<title\b[^>]*>.+</title>.*<desc\b[^>]*>.{40,}</desc>", text, re.DOTALL) for text in drawn.values()
    )


# ---------------------------------------------------------------- your script in ten edits


def test_the_edits_on_the_page_are_those_of_the_script():
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "your-script.md").read_text(), re.DOTALL)
    assert len(blocks) > 10
    assert [block for block in blocks if block not in SCRIPT.read_text()] == []


def test_the_check_finds_nothing_in_the_script():
    *_, verdict = check_command([*TORCHRUN, SCRIPT.name], folder=SCRIPT.parent)
    assert [finding.seen for finding in verdict.findings] == []
    assert verdict.subject.file == SCRIPT


@pytest.mark.full
def test_before_the_edits_the_check_finds_what_the_page_repairs():
    *_, verdict = check_command([*TORCHRUN, "one_gpu.py"], folder=SCRIPT.parent)
    assert {finding.kind for finding in verdict.findings} >= {"no-group", "two-writers", "several-print"}
