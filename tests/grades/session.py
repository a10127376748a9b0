"""Run the commands of the workflow for GitHub Classroom on this machine, and write what they print to results/.

Run PYTHONPATH=.:tests python -m grades.session, then read the text and look at the picture.
"""

import os
import shutil
import tempfile
from pathlib import Path

import yaml
from markdown_it import MarkdownIt
from playwright.sync_api import sync_playwright

import runs
from workshop.course.exercises import exercises
from workshop.course.todo import write_version
from workshop.run.machine import machine

WORKFLOW = runs.ROOT / "docs" / "grading" / "classroom.yml"
# What the learner has done: the TODOs of each exercise.
DONE = {"exercise3_global_metrics": (1,), "exercise4_find_the_bug_restart": (), "exercise1_ddp": (1, 2)}
SOLVED, MISSING = "exercise4_find_the_bug_leak", "exercise9_find_the_bug_ring"
STYLE = """
body { font: 15px/1.5 sans-serif; max-width: 1100px; margin: 24px auto; padding: 0 24px; color: #1f2328; background: #fff; }
table { border-collapse: collapse; } tr:nth-child(even) { background: #f6f8fa; }
th, td { border: 1px solid #d1d9e0; padding: 6px 12px; }
"""
HEAD = """\
The commands of docs/grading/classroom.yml, run on a machine of our own and not on GitHub: {cores} cores, {gpus}, {system},
Python {python}, torch {torch}. Other programs used the machine too. The learner has done TODO 1 of exercise3_global_metrics and
TODOs 1 and 2 of exercise1_ddp, has solved the leak, has not begun the restart, and has not submitted the bug in the ring.
"""


def prepare(folder: Path) -> None:
    """Write the folders as the steps that check out leave them."""
    found = {exercise.path.stem: exercise for exercise in exercises()}
    for name, done in DONE.items():
        stage = folder / "submission" / found[name].stage
        stage.mkdir(parents=True, exist_ok=True)
        write_version(found[name], done, stage)
    solution = found[SOLVED].solution
    shutil.copy(solution, folder / "submission" / found[SOLVED].stage)
    course = folder / "course"
    (course / "docs" / "grading").mkdir(parents=True)
    for name in ("workshop.sh", "pyproject.toml"):
        (course / name).symlink_to(runs.ROOT / name)
    points = "".join(f'[[exercise]]\nname = "{name}"\n' for name in (SOLVED, *DONE, MISSING))
    (course / "docs" / "grading" / "points.toml").write_text(points)


def picture(markdown: str, path: Path) -> None:
    """Draw the table that the workflow writes for the page of the job."""
    body = MarkdownIt().enable("table").render(markdown)
    with sync_playwright() as playwright:
        options = {"executable_path": shutil.which("chromium"), "args": ["--no-sandbox"]}
        page = playwright.chromium.launch(**options).new_page(viewport={"width": 1200, "height": 600})
        page.set_content(f"<meta charset='utf-8'><style>{STYLE}</style>{body}")
        page.screenshot(path=path, full_page=True)


def main() -> None:
    (job,) = yaml.safe_load(WORKFLOW.read_text())["jobs"].values()
    here = machine() | {"gpus": "no GPU"}
    text = HEAD.format(**here)
    with tempfile.TemporaryDirectory() as place:
        folder, summary = Path(place), Path(place) / "summary.md"
        summary.touch()
        prepare(folder)
        for step in job["steps"]:
            if "run" in step and "progress" not in step["run"]:  # that step installs the course
                command = ["bash", "-eo", "pipefail", "-c", step["run"]]
                done = runs.run(command, folder, timeout=1800, GITHUB_STEP_SUMMARY=summary)
                text += f"\n$ {step['run']}\n{done.stdout}{done.stderr}(exit status {done.returncode})\n"
        for name in ("report.xml", "report.json"):
            lines = (folder / name).read_text().splitlines()
            text += f"\n$ head -n 12 {name}\n" + "\n".join(lines[:12]) + "\n"
        text += f'\n$ cat "$GITHUB_STEP_SUMMARY"\n{summary.read_text()}'
        assert place not in text
        (runs.ROOT / "results" / "report-session.txt").write_text(text)
        picture(summary.read_text(), runs.ROOT / "results" / "report-summary.png")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
