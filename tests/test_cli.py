"""The command ``workshop`` shows its help quickly and reports mistakes in one line."""

import subprocess
import sys

import pytest

import runs


def workshop(*arguments, cwd=None):
    return subprocess.run(
        [sys.executable, "-m", "workshop", *arguments], cwd=cwd, env=runs.environment(), capture_output=True, text=True
    )


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (
            "workshop.cli",
            [f"\n  {name} " for name in ("tour", "doctor", "bench", "submit", "cluster", "fetch", "test")],
        ),
        ("workshop.check.cli", ["workshop-check [OPTIONS] -- COMMAND", "--resume-args"]),
    ],
)
def test_help_is_complete_and_imports_nothing_heavy(module, words):
    program = (
        "import sys; sys.argv = ['workshop', '--help']\n"
        f"from {module} import main\n"
        "try: main()\n"
        "except SystemExit as end: code = end.code\n"
        "print(code, sorted({'torch', 'rich', 'matplotlib', 'numpy', 'psutil', 'pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], env=runs.environment(), capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "0 []"
    for word in words:
        assert word in done.stdout


def test_without_a_command_it_shows_the_help():
    assert workshop().stdout == workshop("--help").stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["dance"],
        ["fetch"],
        ["tour", "--epochs", "0"],
        ["tour", "--epochs", "x"],
        ["tour", "--speed"],
        ["tour", "--stages", "99"],
        ["tour", "--stages", "01,x"],
        ["bench"],
        ["bench", "nowhere.py"],
        ["bench", "--logs"],
        ["cluster", "up", "0"],
        ["cluster", "up", "2", "--name", "a b"],
        ["cluster", "kill", "node1", "--name", "nowhere"],
        ["submit", "nowhere.sh", "--site", "local"],
        ["submit", "nowhere.sh", "--site", "atlantis"],
        ["check", "nowhere.sh"],
        ["gpu-day"],
        ["gpu-day", "--output", "day", "--minutes", "x"],
    ],
)
def test_mistakes_are_reported_in_one_line(arguments, tmp_path):
    done = workshop(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr.startswith("workshop: ")


def test_a_tour_that_cannot_write_says_so_in_one_line(tmp_path):
    (tmp_path / "file").touch()
    done = workshop("tour", "--output", "file/tour", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "cannot write into" in done.stderr


def test_the_test_command_names_the_packages_that_are_missing(tmp_path):
    program = (
        "import importlib.metadata as m, sys; version = m.version\n"
        "def gone(name):\n    if name == 'pytest': raise m.PackageNotFoundError(name)\n    return version(name)\n"
        "m.version = gone; sys.argv = ['workshop', 'test', '--version']; from workshop.cli import main; main()"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=runs.environment(), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "the tests need pytest" in done.stderr


def test_without_the_stages_the_commands_say_what_is_missing(tmp_path):
    """With only the package, as a wheel installs it, tour and test say what is missing."""
    (tmp_path / "workshop").symlink_to(runs.ROOT / "workshop")
    program = (
        "import workshop.repository as r, pathlib; r.ROOT = pathlib.Path('.'); from workshop.cli import main; main()"
    )
    for command in ("tour", "test"):
        done = subprocess.run(
            [sys.executable, "-c", program, command],
            cwd=tmp_path,
            env=runs.environment(),
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert "the stages are not beside the installed package" in done.stderr
