"""``workshop doctor --class``: each check passes on a good machine and reports what is wrong on others."""

import os
import shutil
import subprocess
import sys

import pytest

import runs
from workshop.doctor import classroom
from workshop.doctor.result import OK, PROBLEM, WARNING


@pytest.mark.full
def test_a_course_can_begin_on_this_machine(tmp_path):
    """Use a committed copy, because changes in this working tree must not fail the test."""
    ignored = shutil.ignore_patterns("runs", "__pycache__", ".git", ".venv*", ".jupyter", ".*_cache")
    copy = shutil.copytree(runs.ROOT, tmp_path / "copy", ignore=ignored)
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message=as delivered"]):
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(["git", *identity, *words], cwd=copy, check=True)
    command = [sys.executable, "-P", "-m", "workshop", "doctor", "--class", 30]
    changed = {"PYTHONPATH": f"{copy}{os.pathsep}{runs.PATCHES}", "TEST_PATCH": "large_disk"}
    done = runs.run(command, tmp_path, **changed)
    assert "The course can begin." in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0
    (copy / "02_pytorch_ddp" / "exercise1_multigpu.py").write_text("solved")
    done = runs.run(command, tmp_path, **changed)
    assert "The course cannot begin here yet: see exercises." in done.stdout
    assert "./workshop.sh reset 02_pytorch_ddp/exercise1_multigpu.py" in done.stdout
    assert done.returncode == 1


def test_a_class_of_0_people_is_refused(tmp_path):
    done = runs.run([sys.executable, "-P", "-m", "workshop", "doctor", "--class", 0], tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("people", "status"), [(1, OK), (10**9, PROBLEM)])
def test_a_machine_too_small_for_the_class_is_a_problem(people, status):
    assert classroom.check_room(people).status == status


def test_a_kernel_that_does_not_start_is_a_problem(monkeypatch):
    from nbclient import NotebookClient

    def broken(self, *_, **__):
        raise RuntimeError("no such kernel\nNo module named torch")

    monkeypatch.setattr(NotebookClient, "execute", broken)
    finding = classroom.check_kernel()
    assert finding.status == PROBLEM
    assert "No module named torch" in finding.seen


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """A function that changes values in a copy of the settings of the app."""

    def use(**changes):
        values = classroom.read_settings() | changes
        monkeypatch.setattr(classroom, "read_settings", lambda: values)

    return use


def test_wrong_settings_of_the_app_are_a_problem(settings, tmp_path):
    assert classroom.check_app().status == OK  # the settings are not filled in
    settings(cluster="c1", workshop="/nowhere", python="")
    assert classroom.check_app().status == PROBLEM
    assert "/nowhere does not exist" in classroom.check_app().seen
    settings(workshop=str(runs.ROOT), python=str(tmp_path / "python"))
    assert f"{tmp_path}/python: " in classroom.check_app().seen
    settings(python=sys.executable, modules="export NOTHING=1")
    assert classroom.check_app().status == OK


def test_the_scheduler_is_asked_for_the_reservation(settings, tmp_path, monkeypatch):
    assert classroom.check_reservation().status == OK
    monkeypatch.setenv("PATH", str(tmp_path))
    settings(reservation="day_1")
    assert classroom.check_reservation().status == WARNING  # no scheduler answers
    for name, setting in (("scontrol", "slurm"), ("pbs_rstat", "pbs")):
        settings(scheduler=setting)
        program = tmp_path / name
        program.write_text(f'#!{shutil.which("sh", path="/bin")}\necho "ReservationName=day_1 $*"\n')
        program.chmod(0o755)
        assert classroom.check_reservation().status == OK
        assert "day_1" in classroom.check_reservation().seen
        program.write_text(
            f"#!{shutil.which('sh', path='/bin')}\necho ReservationName=day_1 StartTime=2999-01-01T09:00:00\n"
        )
        assert classroom.check_reservation().status == WARNING
        program.write_text(f"#!{shutil.which('sh', path='/bin')}\nexit 1\n")
        assert classroom.check_reservation().status == PROBLEM
        assert "empty reservation:" in classroom.check_reservation().advice


def test_a_folder_that_other_users_cannot_read_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(classroom, "ROOT", tmp_path)
    tmp_path.chmod(0o700)
    finding = classroom.check_readable()
    assert finding.status == WARNING
    assert f"other users cannot read {tmp_path}" in finding.seen
    tmp_path.chmod(0o755)


def test_notebooks_with_outputs_are_a_warning(tmp_path, monkeypatch):
    import nbformat

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1", execution_count=1)])
    (tmp_path / "01").mkdir()
    nbformat.write(notebook, tmp_path / "01" / "a.ipynb")
    monkeypatch.setattr(classroom, "ROOT", tmp_path)
    assert classroom.check_notebooks().status == WARNING


def test_the_folder_of_the_board_is_checked(tmp_path, monkeypatch):
    monkeypatch.delenv("WORKSHOP_CLASS", raising=False)
    assert classroom.check_board().status == OK
    assert "no folder of a class is set" in classroom.check_board().seen
    monkeypatch.setenv("WORKSHOP_CLASS", str(tmp_path / "class"))
    assert classroom.check_board().status == PROBLEM
    (tmp_path / "class").mkdir(mode=0o755)
    assert classroom.check_board().status == PROBLEM
    assert classroom.check_board().advice == f"chmod 3773 {tmp_path}/class"
    (tmp_path / "class").chmod(0o2773)
    assert classroom.check_board().status == WARNING
    (tmp_path / "class").chmod(0o3773)
    assert classroom.check_board().status == OK
    assert "learners can write into" in classroom.check_board().seen
