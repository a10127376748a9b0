"""What docs/for-assistants.md and docs/grades.md promise to programs: the fields of the JSON, their types, the exit statuses."""

import json
import re
import shutil
import sys

import pytest

import runs
from check import small
from workshop.check.report import SIGNS
from workshop.course.exercises import HINTS_PER_GOAL, find_exercise
from workshop.course.learning import HINT_KINDS
from workshop.repository import ROOT

PAGE = ROOT / "docs" / "for-assistants.md"
LEAK = find_exercise(ROOT / "02_pytorch_ddp" / "exercise4_find_the_bug_leak.py")
SPAWN = find_exercise(ROOT / "02_pytorch_ddp" / "exercise1_multigpu.py")
TYPES = {"integer": int, "number": (int, float), "string": str, "boolean": bool, "list": list, "list of strings": list}


def workshop(*arguments, cwd=ROOT, **changes):
    return runs.run([sys.executable, "-P", "-m", "workshop", *arguments], cwd, PATH=small.path(), **changes)


def table(command: str) -> dict[str, str]:
    """Return the types that the page documents for a command, by field."""
    _, _, rest = PAGE.read_text().partition(f"| field of `{command}` |")
    lines = rest.partition("\n\n")[0].splitlines()[2:]
    return {cells[1].strip(" `"): cells[2].strip() for cells in (line.split("|") for line in lines)}


def fields(value, name: str = "") -> dict[str, list]:
    """Return all values in a JSON document, by the name of their field as the page writes it."""
    found: dict[str, list] = {}
    if name and not name.endswith("[]"):
        found[name] = [value]
    if isinstance(value, dict):
        parts = [fields(item, f"{name}.{key}".lstrip(".")) for key, item in value.items()]
    else:
        parts = [fields(item, f"{name}[]") for item in value] if isinstance(value, list) else []
    for part in parts:
        for key, values in part.items():
            found.setdefault(key, []).extend(values)
    return found


def agrees(document: dict, command: str) -> set[str]:
    """Fail if a field of a document or its type is not documented; return the names of its fields."""
    types, found = table(command), fields(document)
    inner = re.compile(r"goals\[\]\.findings\[\]\.")
    for name, values in found.items():
        documented = types[inner.sub("findings[].", name)]
        for value in values:
            kinds = documented.removesuffix(" or null")
            assert (value is None and documented.endswith("or null")) or isinstance(value, TYPES[kinds]), (name, value)
            assert not (kinds in ("integer", "number") and isinstance(value, bool)), name
            assert kinds != "list of strings" or all(isinstance(each, str) for each in value), name
    return {inner.sub("findings[].", name) for name in found}


@pytest.fixture(scope="module")
def checks(tmp_path_factory) -> dict:
    """The process and the JSON of real checks."""
    folder = tmp_path_factory.mktemp("mine")
    (folder / "train.py").write_text(small.PROGRAM)
    (folder / "idle.py").write_text("print('no training')\n")
    shutil.copy(LEAK.solution, folder)
    commands = {
        "untouched": (SPAWN.path,),
        "failing": (LEAK.path,),
        "passing": (folder / LEAK.file,),
        "no exercise": ("--", *small.COMMAND),
        "not judged": ("--", "python", "idle.py"),
    }
    progress = folder / "progress.json"
    done = {
        name: workshop("check", "--json", "--device", "cpu", *words, cwd=folder, WORKSHOP_PROGRESS=progress)
        for name, words in commands.items()
    }
    return {name: (each, json.loads(each.stdout)) for name, each in done.items()}


def test_the_page_documents_all_fields_of_the_check_and_no_others(checks):
    seen = set()
    for done, document in checks.values():
        seen |= agrees(document, "check --json")
        assert document["status"] == done.returncode
        assert document["version"] == 1
        top = {name for name in table("check --json") if "[" not in name}
        assert set(document) == top  # in each document
        assert done.stderr == ""
    assert seen == set(table("check --json"))


def test_the_exit_status_of_each_case_is_documented(checks):
    statuses = {name: done.returncode for name, (done, _) in checks.items()}
    assert statuses == {"untouched": 1, "failing": 1, "passing": 0, "no exercise": 1, "not judged": 2}
    assert [document["passed"] for _, document in checks.values()] == [False, False, True, False, False]
    assert {name for name, (_, document) in checks.items() if document["exercise"] is None} == {
        "no exercise",
        "not judged",
    }
    assert {goal["state"] for goal in checks["passing"][1]["goals"]} == {"met"}
    assert checks["untouched"][1]["goals"][0]["findings"] == checks["untouched"][1]["findings"]


def test_each_state_of_a_goal_is_documented():
    (meaning,) = (line for line in PAGE.read_text().splitlines() if line.startswith("| `goals[].state`"))
    assert re.findall(r'"(\w+)"', meaning) == list(SIGNS)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("check", "--json", "nowhere.py"), "no such file"),
        (("check", "--json", "broken.py"), "line 1"),
        (("hint", "--json", "nowhere"), "there is no exercise"),
        (("hint", "--json", SPAWN.name, "9"), "but not for goal 9"),
        (("hint", "--json", SPAWN.name, "0"), "but not for goal 0"),
        (("hint", "--json", SPAWN.name, "1", "3"), "unexpected extra argument"),  # no hint can be skipped
    ],
)
def test_a_wrong_command_prints_no_json_and_one_line_of_error(arguments, words, tmp_path):
    (tmp_path / "broken.py").write_text("def main(:\n")
    done = workshop(*arguments, cwd=tmp_path, WORKSHOP_PROGRESS=tmp_path / "progress.json")
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_hints_come_in_their_order_and_the_last_one_repeats(tmp_path):
    progress = tmp_path / "progress.json"
    given = []
    for _ in range(HINTS_PER_GOAL + 1):
        done = workshop("hint", "--json", SPAWN.name, "5", WORKSHOP_PROGRESS=progress)
        assert (done.returncode, done.stderr) == (0, "")
        given.append(json.loads(done.stdout))
        assert agrees(given[-1], "hint --json") == set(table("hint --json"))
    assert [each["number"] for each in given] == [1, 2, 3, 3]
    assert [each["text"] for each in given[:3]] == list(SPAWN.goal(5).hints)
    assert [each["kind"] for each in given[:3]] == list(HINT_KINDS)
    assert all(f'"{kind}"' in PAGE.read_text() for kind in HINT_KINDS)
    for each in given[:2]:  # the code with gaps comes last
        assert "```" not in each["text"]
    assert json.loads(workshop("hint", "--json", SPAWN.name, WORKSHOP_PROGRESS=progress).stdout)["goal"] == 1


def test_without_a_progress_file_only_the_first_hint_is_given(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    for _ in range(2):
        hint = json.loads(workshop("hint", "--json", SPAWN.name, "5", WORKSHOP_PROGRESS=tmp_path / "file" / "p").stdout)
        assert (hint["number"], hint["saved"]) == (1, False)
