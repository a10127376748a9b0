"""The formats of ``workshop report``, the points of the instructor, and the exit status."""

import json
import os
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from workshop.errors import UserError
from workshop.grades.formats import FORMATS, exercise_text
from workshop.grades.points import read_points
from workshop.grades.results import STATES, ExerciseResult, GoalResult, Report, settled
from workshop.repository import ROOT

# ---------------------------------------------------------------- the formats


UGLY = "a\x00\x1b[2J]]>&<b>\ud800\ufffe | `x` \n## 100 of 100 points"


@pytest.fixture
def made() -> Report:
    """A report with every state of a goal, and with texts that try to leave their place."""
    finding = dict.fromkeys(("kind", "seen", "why", "fix", "read", "where", "detail", "level"), UGLY)
    goals = tuple(GoalResult(number, UGLY, state, 1.5, (finding,)) for number, state in enumerate(STATES))
    return Report((ExerciseResult("02/a.py", "judged", goals, (UGLY,), 1.0),), ("03/b.py",), 2.0)


# The elements and attributes of junit-10.xsd, the schema of Jenkins's xUnit plugin; a star marks a required attribute.
SCHEMA = {
    "testsuites": ({"testsuite"}, {"name", "time", "tests", "failures", "errors"}),
    "testsuite": ({"testcase", "properties", "system-out", "system-err"},
                  {"name*", "tests*", "failures*", "errors*", "skipped", "time", "id", "package", "file"}),
    "testcase": ({"skipped", "error", "failure", "system-out", "system-err"}, {"name*", "time", "classname", "group"}),
    "failure": (set(), {"type", "message"}), "error": (set(), {"type", "message"}),
    "skipped": (set(), {"type", "message"}), "system-out": (set(), set()),
}  # fmt: skip


def test_junit_follows_the_schema_of_jenkins(made):
    root = ElementTree.fromstring(FORMATS["junit"](made).encode())
    assert root.tag == "testsuites"
    for element in root.iter():
        children, attributes = SCHEMA[element.tag]
        assert {child.tag for child in element} <= children
        assert set(element.attrib) <= {name.rstrip("*") for name in attributes}
        assert set(element.attrib) >= {name.rstrip("*") for name in attributes if name.endswith("*")}
        assert re.fullmatch(r"\d+\.\d\d", element.get("time", "0.00"))
    (suite,) = root
    assert suite.get("tests") == root.get("tests") == str(len(STATES))
    tags = {case.get("name").partition(":")[0]: {child.tag for child in case} - {"system-out"} for case in suite[:-1]}
    expected = dict(zip(STATES, (f"goal {number}" for number in range(len(STATES))), strict=True))
    assert tags[expected["met"]] == set()
    assert tags[expected["open"]] == tags[expected["blocked"]] == {"failure"}
    assert tags[expected["unjudged"]] == {"error"}
    assert tags[expected["untouched"]] == tags[expected["missing"]] == {"skipped"}


@pytest.mark.parametrize("name", FORMATS)
def test_text_of_a_program_cannot_leave_its_place(name, made):
    text = FORMATS[name](made)
    text.encode()  # no lone surrogates
    assert "\x1b" not in text
    assert "\x00" not in text
    if name == "markdown":
        assert [line for line in text.splitlines() if line.startswith("#")] == [
            f"## 1.5 of {1.5 * len(STATES):g} points"
        ]
        assert "<b>" not in text
        assert len({line.count("|") for line in text.splitlines() if line.startswith("| ")}) == 1


def test_the_text_for_a_terminal_has_no_control_characters(made):
    text = exercise_text(made.exercises[0])
    assert "\x1b" not in text
    assert not [line for line in text.splitlines() if line.startswith("#")]


def test_gradescope_gets_the_fields_that_it_documents(made):
    content = json.loads(FORMATS["gradescope"](made))
    top = {"score", "execution_time", "output", "output_format", "visibility", "stdout_visibility", "tests"}
    assert set(content) == top
    for test in content["tests"]:
        fields = {"score", "max_score", "status", "name", "number", "output", "output_format", "visibility"}
        assert set(test) == fields
        assert test["status"] in ("passed", "failed")
        assert test["visibility"] == "visible"


def test_otter_reads_the_report(made):
    """The fields that ``GradingResults.from_ottr_json`` of otter-grader 4 to 7 reads."""
    (file,) = json.loads(FORMATS["otter"](made))["test_file_results"]
    assert os.path.splitext(os.path.basename(file["filename"]))[0] == "02-a"
    assert len(file["points"]) == len(file["test_case_results"])
    for result in file["test_case_results"]:
        assert set(result) == {"passed", "error", "test_case"}
        fields = {"name", "code", "points", "hidden", "success_message", "failure_message"}
        assert set(result["test_case"]) == fields
        assert isinstance(result["test_case"]["points"], float)


def test_the_documented_fields_of_the_json_report_are_those_that_it_has(made):
    page = (ROOT / "docs" / "grades.md").read_text()
    written = {line.split("`")[1] for line in page.splitlines() if line.startswith("| `") and "`json`" not in line}
    content = made.as_dict()
    (exercise,) = content["exercises"]
    found = set(content) | {f"exercises[].{name}" for name in exercise}
    found |= {f"exercises[].goals[].{name}" for name in exercise["goals"][0]}
    assert {name for name in written if not name.startswith("WORKSHOP")} >= found
    assert found >= {name for name in written if name.partition("[")[0] in content}
    for state in STATES:
        assert f'"{state}"' in page


# ---------------------------------------------------------------- points and exit status


def result_of(*states: str, possible: float = 1.0) -> ExerciseResult:
    goals = (GoalResult(number, "title", state, possible) for number, state in enumerate(states, 1))
    return ExerciseResult("02/a.py", "judged", tuple(goals))


@pytest.mark.parametrize(
    ("exercise", "status"),
    [
        (result_of("met", "met"), 0),
        (result_of("met", "open"), 1),
        (result_of("met", "blocked"), 1),
        (result_of("met", "unjudged"), 2),
        (replace(result_of("open"), state="unjudged"), 2),
        (result_of("unjudged", possible=0.0), 0),  # it gives no points
        (result_of("untouched"), 1),
    ],
)
def test_the_exit_status(exercise, status):
    assert Report((result_of("met"), exercise)).status == status


def test_the_goal_without_a_todo_counts_only_with_another_goal():
    assert settled({1: "open", 2: "open", 0: "met"}) == {1: "open", 2: "open", 0: "delivered"}
    assert settled({1: "met", 2: "open", 0: "met"})[0] == "met"
    assert settled({0: "met"}) == {0: "met"}
    assert GoalResult(0, "", "delivered", 1.0).points == 0


def test_the_instructor_chooses_exercises_and_points(tmp_path):
    file = tmp_path / "points.toml"
    file.write_text(
        'time_limit = 100\n[[exercise]]\nname = "exercise1_multigpu"\npoints = 2\ngoals = { 6 = 3.5, 0 = 0 }\n'
        '[[exercise]]\nname = "exercise1_fsdp_codellama"\ntime_limit = 200\n'
    )
    first, second = read_points(file)
    assert first.points == {1: 2, 2: 2, 3: 2, 4: 2, 5: 2, 6: 3.5, 0: 0}
    assert (first.time_limit, second.time_limit) == (100, 200)
    assert set(second.points.values()) == {1}


NAMED = '[[exercise]]\nname = "exercise1_multigpu"\n'


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("exercise = [", "is not TOML"),
        ("", "exercise is missing"),
        ("exercise = []", "exercise is wrong"),
        ("[[exercise]]\npoints = 1\n", "exercise[0].name is missing"),
        ('[[exercise]]\nname = "exercise99"\n', "there is no exercise 'exercise99'"),
        (NAMED + "point = 1\n", "exercise[exercise1_multigpu].point is not a key of this file"),
        (NAMED + "points = -1\n", "exercise[exercise1_multigpu].points is wrong"),
        (NAMED + "points = inf\n", "points is wrong"),
        (NAMED + "points = nan\n", "points is wrong"),
        (NAMED + 'points = "2"\n', "points is wrong"),
        (NAMED + "points = true\n", "points is wrong"),
        (
            NAMED + "goals = { 7 = 1 }\n",
            "02_pytorch_ddp/exercise1_multigpu.py has no goal 7; its goals are 1, 2, 3, 4, 5, 6, 0",
        ),
        (NAMED + "goals = { 1 = -2 }\n", "goals.1 is wrong"),
        (NAMED + "time_limit = 0\n", "time_limit is wrong"),
        (NAMED + "points = 0\n", "no goal gives points"),
        (NAMED + NAMED, "02_pytorch_ddp/exercise1_multigpu.py occurs 2 times; write each exercise once"),
    ],
)
def test_a_mistake_in_the_file_of_the_instructor_is_named(content, words, tmp_path):
    file = tmp_path / "points.toml"
    file.write_text(content)
    with pytest.raises(UserError) as error:
        read_points(file)
    assert words in str(error.value)
    assert str(file) in str(error.value)
