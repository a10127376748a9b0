"""The files that instructors copy: the workflow for GitHub Classroom, and the autograder for Gradescope."""

import json
import os
import shutil
import sys
from xml.etree import ElementTree

import pytest
import yaml

import runs
from workshop.course.exercises import find_exercise
from workshop.grades.points import read_points
from workshop.repository import ROOT

GRADING = ROOT / "docs" / "grading"
PAGE = ROOT / "docs" / "grades.md"
LEAK = find_exercise(ROOT / "02_pytorch_ddp" / "exercise4_find_the_bug_leak.py")
COUNTED = f'[[exercise]]\nname = "{LEAK.name}"\ngoals = {{ 1 = 3 }}\n'


def job() -> dict:
    return yaml.safe_load((GRADING / "classroom.yml").read_text())["jobs"]["grade"]


@pytest.fixture
def checked_out(tmp_path):
    """A folder as after the steps that check out: the learner's repository, and the course with the instructor's points."""
    (tmp_path / "submission" / LEAK.stage).mkdir(parents=True)
    shutil.copy(LEAK.solution, tmp_path / "submission" / LEAK.stage)
    course = tmp_path / "course"
    (course / "docs" / "grading").mkdir(parents=True)
    (course / "docs" / "grading" / "points.toml").write_text(COUNTED)
    (course / "workshop.sh").symlink_to(ROOT / "workshop.sh")
    (course / "pyproject.toml").symlink_to(ROOT / "pyproject.toml")
    return tmp_path


def run_steps(folder, summary) -> list:
    """Run the commands of the workflow until one fails, and return what they said."""
    done = []
    for step in job()["steps"]:
        if "run" in step:
            command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
            done.append(runs.run(command, folder, timeout=600, GITHUB_STEP_SUMMARY=summary))
            if done[-1].returncode:
                break
    return done


def test_the_workflow_reports_the_points_and_keeps_the_report(checked_out):
    summary = checked_out / "summary"
    summary.touch()
    *_, last = run_steps(checked_out, summary)
    assert last.returncode == 0, last.stdout + last.stderr
    assert summary.read_text().startswith("## 4 of 4 points\n")
    (uploaded,) = [step["with"]["path"].split() for step in job()["steps"] if "upload" in step.get("uses", "")]
    xml, content = (checked_out / name for name in uploaded)
    assert json.loads(content.read_text())["points"] == 4
    assert ElementTree.parse(xml).getroot().get("failures") == "0"
    shutil.copy(LEAK.path, checked_out / "submission" / LEAK.stage)
    assert run_steps(checked_out, summary)[-1].returncode == 1
    assert summary.read_text().startswith("## 0 of 4 points\n")


def test_the_workflow_takes_the_points_and_the_check_from_the_course_and_not_from_the_learner():
    places = {step["with"]["path"]: step["with"] for step in job()["steps"] if "checkout" in step.get("uses", "")}
    assert set(places) == {"submission", "course"}
    assert places["course"]["repository"] == "OWNER/COURSE"
    assert not any(place["persist-credentials"] for place in places.values())
    commands = " ".join(step["run"] for step in job()["steps"] if "run" in step)
    assert commands.count("course/workshop.sh report submission --points course/docs/grading/points.toml") == 1


@pytest.fixture
def autograder(tmp_path):
    """The folders of Gradescope after setup.sh; apt-get and git are replaced, and the course is this one."""
    root, programs = tmp_path / "autograder", tmp_path / "bin"
    for name in ("source", "submission", "results"):
        (root / name).mkdir(parents=True)
    programs.mkdir()
    (programs / "apt-get").write_text("#!/bin/sh\nexit 0\n")
    (programs / "git").write_text(f'#!/bin/sh\nfor last; do :; done\nln -s "{ROOT}" "$last"\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    for name in ("setup.sh", "run_autograder"):
        shutil.copy(GRADING / name, root / "source")
    (root / "source" / "points.toml").write_text(COUNTED)
    path = os.pathsep.join([str(programs), os.path.dirname(sys.executable), os.environ["PATH"]])
    done = runs.run([root / "source" / "setup.sh"], tmp_path, AUTOGRADER_ROOT=root, PATH=path)
    assert done.returncode == 0, done.stderr
    return root


def grade(root) -> dict:
    done = runs.run([root / "source" / "run_autograder"], root, timeout=600, AUTOGRADER_ROOT=root)
    assert done.returncode == 0, done.stderr
    return json.loads((root / "results" / "results.json").read_text())


def test_gradescope_gets_the_points_of_a_submission(autograder):
    shutil.copy(LEAK.solution, autograder / "submission")
    found = grade(autograder)
    assert (found["score"], [test["status"] for test in found["tests"]]) == (4, ["passed", "passed"])


@pytest.mark.parametrize(("name", "content"), [("essay.txt", "words"), ("points.toml", COUNTED)])
def test_gradescope_shows_the_reason_if_a_submission_contains_no_exercise(autograder, name, content):
    (autograder / "submission" / name).write_text(content)
    found = grade(autograder)
    assert found["score"] == 0
    assert "contains no file of an exercise" in found["output"]


def test_the_example_of_points_is_right_and_the_page_shows_the_files():
    spawn, leak = read_points(GRADING / "points.toml")
    assert spawn.points == {1: 2, 2: 2, 3: 2, 4: 2, 5: 4, 6: 2, 0: 0}
    assert leak.points == {1: 1, 0: 1}
    page = PAGE.read_text()
    for name in ("points.toml", "classroom.yml", "setup.sh", "run_autograder"):
        assert f"(grading/{name})" in page
    assert (GRADING / "points.toml").read_text() in page
