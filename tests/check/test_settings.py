"""What the check reports: --ignore, the table in pyproject.toml, and baselines."""

import json
import sys

import pytest

import runs
from check import small
from workshop.check.settings import read_settings
from workshop.errors import UserError

COURSE = ("workshop", "check")


@pytest.fixture
def folder(tmp_path):
    """A folder with a program that has two mistakes; it is in a repository."""
    (tmp_path / ".git").mkdir()
    (tmp_path / "train.py").write_text(small.PROGRAM)
    return tmp_path


def test_a_finding_shows_its_kind_as_soon_as_it_is_known(folder):
    done = small.check(folder, "--", *small.COMMAND)
    assert done.returncode == 1, done.stderr
    early, goes_on, late = done.stdout.partition("the check goes on\n")
    assert goes_on, done.stdout
    for kind in small.MISTAKES:
        assert f"\n      where  train.py:{small.line_of(kind)}\n      kind   {kind}\n" in early
        assert kind not in late
    assert late.splitlines()[-1].startswith("2 errors")


def test_ignored_findings_are_not_reported(folder):
    done = small.check(folder, "--ignore", "same-samples", "--", *small.COMMAND)
    assert done.returncode == 1, done.stderr
    assert "same-samples" not in done.stdout
    assert done.stdout.splitlines()[-1].startswith("1 error in")
    both = [word for kind in small.MISTAKES for word in ("--ignore", kind)]
    done = small.check(folder, *both, "--json", "--", *small.COMMAND)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["passed"]
    assert json.loads(done.stdout)["findings"] == []


def test_a_program_that_cannot_be_judged_stays_so_if_the_reason_is_ignored(folder):
    (folder / "train.py").write_text("print('hello')")
    for options in ([], ["--ignore", "no-training"], ["--write-baseline", "known.json"]):
        done = small.check(folder, *options, "--", "python", "train.py")
        assert done.returncode == 2, done.stdout + done.stderr
    assert not (folder / "known.json").exists()


def test_a_baseline_hides_only_what_is_in_it(folder):
    program = folder / "train.py"
    program.write_text(small.repaired("two-writers"))
    done = small.check(folder, "--write-baseline", "known.json", "--", *small.COMMAND)
    assert done.returncode == 0, done.stdout + done.stderr
    line = small.MISTAKES["same-samples"][0].strip()
    assert json.loads((folder / "known.json").read_text()) == {
        "findings": [{"kind": "same-samples", "path": "train.py", "line": line}]
    }
    program.write_text("# a new first line\n" + small.PROGRAM)
    done = small.check(folder, "--baseline", "known.json", "--", *small.COMMAND)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "kind   two-writers" in done.stdout
    assert "same-samples" not in done.stdout
    assert done.stdout.splitlines()[-1].endswith("; 1 known finding is in known.json")
    program.write_text(program.read_text().replace(small.LOADER, small.LOADER.replace("batch_size=4", "4")))
    done = small.check(folder, "--baseline", "known.json", "--json", "--", *small.COMMAND)
    report = json.loads(done.stdout)
    assert ({each["kind"] for each in report["findings"]}, report["known"]) == (set(small.MISTAKES), 0)


def test_the_table_names_the_command_and_the_command_line_wins(folder):
    (folder / "pyproject.toml").write_text(small.TABLE + 'ignore = ["two-writers"]\nbaseline = "known.json"\n')
    (folder / "known.json").write_text('{"findings": []}')
    inner = folder / "notebooks"
    inner.mkdir()
    (inner / "pyproject.toml").write_text("[project]\n")  # without the table
    done = small.check(inner, "--json", "--sarif", "out.sarif")
    assert done.returncode == 1, done.stderr
    assert [each["kind"] for each in json.loads(done.stdout)["findings"]] == ["same-samples"]
    assert (inner / "out.sarif").exists()
    done = small.check(folder, "--json", "--ignore", "same-samples")
    assert done.returncode == 1, done.stderr
    assert [each["kind"] for each in json.loads(done.stdout)["findings"]] == ["two-writers"]


def test_workshop_check_without_a_file_runs_the_command_of_the_table(folder):
    (folder / "pyproject.toml").write_text(small.TABLE)
    done = small.check(folder, "--json", command=COURSE)
    assert done.returncode == 1, done.stderr
    assert {each["kind"] for each in json.loads(done.stdout)["findings"]} == set(small.MISTAKES)


def test_an_exercise_gets_reports_but_no_findings_of_it_are_ignored(folder):
    spawn = runs.SPAWN.relative_to(runs.ROOT / "solutions")
    progress = folder / "progress.json"
    for options in (["--ignore", "hang"], ["--write-baseline", "known.json"], ["--baseline", "known.json"]):
        refused(small.check(folder, *options, runs.ROOT / spawn, command=COURSE), f"{options[0]} is for a COMMAND")
    arguments = ["check", runs.ROOT / spawn, "--junit", "out.xml", "--sarif", "out.sarif"]
    done = runs.run([sys.executable, "-P", "-m", "workshop", *arguments], folder, WORKSHOP_PROGRESS=progress)
    assert done.returncode == 1, done.stderr
    (found,) = json.loads((folder / "out.sarif").read_text())["runs"][0]["results"]
    assert found["ruleId"] == "no-group"
    assert '<failure type="no-group"' in (folder / "out.xml").read_text()


def test_the_settings_are_those_of_the_nearest_table_below_the_repository(tmp_path):
    outer, inner = tmp_path / "outer", tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    (outer / "pyproject.toml").write_text("[tool.workshop-check]\nsteps = 7\nresume-args = \"--from '{latest}'\"\n")
    found = read_settings(inner)
    assert (found.folder, found.steps, found.resume_args) == (outer, 7, ("--from", "{latest}"))
    (inner / ".git").touch()  # of a git worktree
    assert read_settings(inner).steps is None


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("stepps = 3", "stepps in [tool.workshop-check] is not a setting"),
        ("steps = 1", "steps in [tool.workshop-check] must be a whole number of at least 2"),
        ("steps = true", "steps in"),
        ("command = 3", "command in"),
        ("command = [3]", "command in"),
        ('command = "train.py \'"', "No closing quotation"),
        ('ignore = "hang"', "ignore in"),
        ('ignore = ["hangs"]', "the nearest kinds are hang"),
        ("resume-args = []", "resume-args in"),
        ("baseline = 1", "baseline in"),
        ("baseline = ", "cannot be read"),
    ],
)
def test_a_wrong_setting_is_named_with_its_file(line, words, tmp_path):
    file = tmp_path / "pyproject.toml"
    file.write_text(f"[tool.workshop-check]\n{line}\n")
    with pytest.raises(UserError) as refused:
        read_settings(tmp_path)
    assert str(refused.value).startswith(str(file))
    assert words in str(refused.value)


@pytest.mark.parametrize("text", ["no JSON", "[]", '{"findings": [{"kind": "hang"}]}', '{"findings": [[1, 2, 3]]}'])
def test_a_file_that_is_not_a_baseline_is_refused(text, folder):
    (folder / "known.json").write_text(text)
    refused(small.check(folder, "--baseline", "known.json", "--", *small.COMMAND), "known.json is not a baseline")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--ignore", "same-sampels"], "the nearest kinds are same-samples"),
        (["--baseline", "missing.json"], "missing.json: No such file"),
        (["--sarif", "missing/out.sarif"], "there is no folder"),
        (["--resume-args", "'"], "--resume-args: No closing quotation"),
    ],
)
def test_a_wrong_option_is_refused_before_the_program_runs(options, words, folder):
    refused(small.check(folder, *options, "--", *small.COMMAND), words)


def refused(done, words):
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.count("\n") == 1
    assert words in done.stderr
