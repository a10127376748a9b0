"""The files that other people copy: the workflow for GitHub, and the hook for pre-commit."""

import json
import shutil
import subprocess
import sys
import venv

import pytest
import yaml

import runs
from check import small
from needs import needs

WORKFLOW = runs.ROOT / "docs" / "check-in-ci" / "workflow.yml"
PAGE = runs.ROOT / "docs" / "check-your-program.md"
HOOKS = runs.ROOT / ".pre-commit-hooks.yaml"
SOURCE = '"workshop-check @ git+URL#subdirectory=distribution"'
STARTED = f'#!/bin/sh\nexec "{sys.executable}" -P -m workshop.check "$@"\n'


@pytest.fixture
def project(tmp_path):
    """A project with a program that has one mistake, and the command workshop-check in the folder bin beside it."""
    folder, programs = tmp_path / "project", tmp_path / "bin"
    folder.mkdir()
    programs.mkdir()
    (folder / "train.py").write_text(small.repaired("two-writers"))
    (folder / "pyproject.toml").write_text(small.TABLE)
    (folder / "requirements.txt").write_text("torch\n")
    (programs / "workshop-check").write_text(STARTED)
    (programs / "workshop-check").chmod(0o755)
    return folder


def path(project):
    return small.path(project.parent / "bin")


def run_steps(project):
    """Run the steps of the workflow until one fails, without the installation; return the last one."""
    (job,) = yaml.safe_load(WORKFLOW.read_text())["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    installed = [command for command in commands if SOURCE in command]
    assert len(installed) == 1
    for command in commands:
        if command not in installed:
            done = runs.run(
                ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", command], project, PATH=path(project)
            )
            if done.returncode:
                break
    return done


def test_the_workflow_fails_at_the_line_of_a_mistake_and_passes_after_its_repair(project):
    (project / ".git").mkdir()
    (job,) = yaml.safe_load(WORKFLOW.read_text())["jobs"].values()
    uploaded = [step["with"] for step in job["steps"] if "upload" in step.get("uses", "")]
    sarif, report = project / uploaded[0]["sarif_file"], project / uploaded[1]["path"]
    done = run_steps(project)
    assert done.returncode == 1, done.stdout + done.stderr
    (found,) = json.loads(sarif.read_text())["runs"][0]["results"]
    place = found["locations"][0]["physicalLocation"]
    assert found["ruleId"] == "same-samples"
    assert place["artifactLocation"]["uri"] == "train.py"
    assert place["region"]["startLine"] == small.line_of("same-samples", small.repaired("two-writers"))
    assert "<failure" in report.read_text()
    (project / "train.py").write_text(small.repaired(*small.MISTAKES))
    done = run_steps(project)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(sarif.read_text())["runs"][0]["results"] == []
    assert "<failure" not in report.read_text()


def test_the_workflow_installs_the_distribution_that_is_here():
    assert (runs.ROOT / "distribution" / "pyproject.toml").is_file()
    assert f"```yaml\n{WORKFLOW.read_text()}```" in PAGE.read_text()


@pytest.fixture(scope="module")
def pre_commit(tmp_path_factory):
    """The program pre-commit, in an environment of its own if it is not installed."""
    if found := shutil.which("pre-commit"):
        return found
    folder = tmp_path_factory.mktemp("pre-commit")
    venv.create(folder, with_pip=True)
    install = [
        folder / "bin" / "python",
        "-m",
        "pip",
        "install",
        "--quiet",
        "--timeout=15",
        "--retries=1",
        "pre-commit",
    ]
    if subprocess.run(install, capture_output=True, timeout=300).returncode:
        pytest.skip("pre-commit is not installed, and cannot be")
    return folder / "bin" / "pre-commit"


@needs("git")
def test_pre_commit_runs_the_hook_on_changed_programs(project, pre_commit, tmp_path):
    def git(folder, *arguments):
        names = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
        return subprocess.run(
            ["git", *names, *arguments], cwd=folder, check=True, capture_output=True, text=True
        ).stdout

    hooks = tmp_path / "hooks"
    hooks.mkdir()
    shutil.copy(HOOKS, hooks)
    for folder in (hooks, project):
        git(folder, "init", "--quiet")
    git(hooks, "add", ".")
    git(hooks, "commit", "--quiet", "--message", "hook")
    (given,) = [block for block in PAGE.read_text().split("```yaml\n") if block.startswith("repos:")]
    config = given.partition("```")[0].replace("repo: URL", f"repo: {hooks.as_uri()}")
    config = config.replace("NEWEST-TAG", git(hooks, "rev-parse", "HEAD").strip())
    (project / ".pre-commit-config.yaml").write_text(config)

    def commits():
        git(project, "add", ".")
        return runs.run([pre_commit, "run"], project, PATH=path(project), PRE_COMMIT_HOME=tmp_path / "cache")

    done = commits()
    assert done.returncode == 1, done.stdout + done.stderr
    assert "exit code: 1" in done.stdout
    assert "kind   same-samples" in done.stdout
    (project / "train.py").write_text(small.repaired(*small.MISTAKES))
    done = commits()
    assert (done.returncode, "Passed" in done.stdout) == (0, True), done.stdout + done.stderr
    git(project, "commit", "--quiet", "--message", "program")
    (project / "notes.txt").write_text("nothing to check")
    assert "no files to check" in commits().stdout


def test_the_entry_of_the_hook_is_the_command_of_the_distribution(project):
    (hook,) = yaml.safe_load(HOOKS.read_text())
    assert (hook["language"], hook["pass_filenames"]) == ("system", False)
    done = runs.run([hook["entry"], *hook.get("args", ())], project, PATH=path(project))
    assert done.returncode == 1, done.stdout + done.stderr
