"""What a learner shares with the board of the class: only after joining, only events, and never at the cost of the check."""

import fcntl
import json
import os
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

import runs
from needs import needs
from workshop.board.board import Board
from workshop.board.protection import gaps
from workshop.course import progress, sharing
from workshop.course.exercises import find_exercise
from workshop.errors import UserError

WORKSHOP = [sys.executable, "-P", "-m", "workshop"]
EXERCISE = "01_single_gpu/exercise1_fast_single_gpu.py"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be several users and to mount a disk")


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The folder of a class, and a progress file of the test."""
    place = tmp_path / "class"
    place.mkdir()
    place.chmod(0o3773)
    monkeypatch.setenv("WORKSHOP_CLASS", str(place))
    monkeypatch.setenv("WORKSHOP_PROGRESS", str(tmp_path / "progress.json"))
    return place


@pytest.fixture
def record(folder, tmp_path) -> Path:
    """The record of a learner who has joined as Ada."""
    sharing.join("Ada", tmp_path / "ada.board")
    return tmp_path / "ada.board"


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for file in folder.iterdir() for line in file.read_text().splitlines()]


def test_nothing_is_shared_before_joining(folder):
    progress.next_hint(find_exercise(runs.ROOT / EXERCISE), 1)
    assert list(folder.iterdir()) == []
    sharing.join("Ada", progress.sharing_path())
    progress.next_hint(find_exercise(runs.ROOT / EXERCISE), 1)
    assert [line["event"] for line in lines(folder)] == ["join", "hint"]


def test_a_check_and_a_hint_are_shared_without_any_text_of_the_program(folder, tmp_path):
    variables = {"WORKSHOP_CLASS": folder, "WORKSHOP_PROGRESS": tmp_path / "progress.json"}
    for words in (["board", "join", "Ada"], ["check", EXERCISE], ["hint", EXERCISE]):
        done = runs.run([*WORKSHOP, *words], tmp_path, **variables)
        assert done.returncode == (words[0] == "check"), done.stderr
    joined, checked, hinted = lines(folder)
    assert joined.keys() == {"at", "event", "name"}
    assert checked.keys() == {"at", "event", "exercise", "goals", "rule", "seconds"}
    assert (checked["exercise"], checked["goals"]["1"], checked["rule"]) == (EXERCISE, False, "data-per-sample")
    assert hinted.keys() == {"at", "event", "exercise", "goal", "number"}
    done = runs.run([*WORKSHOP, "progress"], tmp_path, **variables)
    assert f"The board of the class in {folder} shows this as 'Ada'." in done.stdout
    done = runs.run([*WORKSHOP, "board", "leave"], tmp_path, **variables)
    assert list(folder.iterdir()) == []
    done = runs.run([*WORKSHOP, "progress"], tmp_path, **variables)
    assert "you share nothing with it" in done.stdout


@pytest.mark.parametrize(
    ("words", "changed", "said"),
    [
        (["join", " \x1b\n"], {}, "the name for the board is empty"),
        (["join", "Ada"], {"WORKSHOP_CLASS": "/nowhere"}, "/nowhere, does not exist"),
        (["join", "Ada"], {"WORKSHOP_CLASS": None}, "no folder of a class is set"),
        ([], {"WORKSHOP_CLASS": None}, "no folder of a class is set"),
        (["--names"], {}, "--names belongs to --export"),
        (["--export", "course.txt"], {}, "must end with .json, .csv or .md"),
        (["--export", "/nowhere/course.json"], {}, "cannot write /nowhere/course.json"),
        (["--port", "1"], {}, "port 1 cannot be used"),
    ],
)
def test_mistakes_are_reported_in_one_line(words, changed, said, folder, tmp_path):
    if words == ["--port", "1"]:
        taken = __import__("socket").create_server(("127.0.0.1", 0))
        words = ["--port", str(taken.getsockname()[1])]
        said = f"port {words[1]} cannot be used"
    done = runs.run([*WORKSHOP, "board", *words], tmp_path, timeout=60, **{"WORKSHOP_CLASS": folder} | changed)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert said in done.stderr


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("  Ada \t Lovelace ", "Ada Lovelace"),
        ("\x1b[31mred\x07", "[31mred"),
        ("a\u202eb\u200bc", "a b c"),
        ("x" * 99, "x" * 30),
    ],
)
def test_names_have_no_control_characters_and_are_short(given, shown):
    assert sharing.clean_name(given) == shown


def test_two_learners_with_one_name_have_two_files_and_a_new_name_keeps_the_file(folder, record, tmp_path):
    sharing.join("Ada", tmp_path / "other.board")
    assert len(list(folder.iterdir())) == 2
    sharing.join("Grace", record)
    assert len(list(folder.iterdir())) == 2


def test_the_group_of_the_folder_can_read_the_file_whatever_the_umask_is(folder, tmp_path):
    before = os.umask(0o077)
    try:
        sharing.join("Ada", tmp_path / "ada.board")
    finally:
        os.umask(before)
    [file] = folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o640


def test_a_file_that_the_instructor_has_deleted_is_written_again_with_the_name(folder, record):
    next(folder.iterdir()).unlink()
    sharing.share(record, event="hint", exercise=EXERCISE, goal=1, number=1)
    assert [line["event"] for line in lines(folder)] == ["join", "hint"]


def test_an_event_after_a_torn_line_is_on_a_line_of_its_own(folder, record):
    [file] = folder.iterdir()
    with file.open("a") as torn:
        torn.write('{"event": "chec')
    sharing.share(record, event="hint", exercise=EXERCISE, goal=1, number=1)
    assert json.loads(file.read_text().splitlines()[-1])["event"] == "hint"


def test_thirty_processes_of_one_learner_lose_no_line(folder, record):
    """A learner may run a check in a terminal, and read hints in a notebook, at the same time."""
    pids = []
    for number in range(30):
        if (pid := os.fork()) == 0:
            for _ in range(20):
                sharing.share(record, event="hint", exercise=EXERCISE, goal=1, number=1 + number % 3)
            os._exit(0)
        pids.append(pid)
    assert all(os.waitpid(pid, 0)[1] == 0 for pid in pids)
    assert len(lines(folder)) == 601


def test_a_process_waits_until_a_different_one_has_written_its_line(folder, record):
    [file] = folder.iterdir()
    with file.open("ab", buffering=0) as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        other.write(b'{"at": 1795700000.0, ')
        process = threading.Thread(
            target=sharing.share, args=(record,), kwargs={"event": "hint", "goal": 1, "number": 1}
        )
        process.start()
        process.join(0.2)
        other.write(b'"event": "start", "stage": "02_pytorch_ddp"}\n')
        fcntl.flock(other, fcntl.LOCK_UN)
        process.join()
    assert [line["event"] for line in lines(folder)] == ["join", "start", "hint"]


# ---------------------------------------------------------------- what goes wrong


def test_a_folder_that_does_not_exist_any_more_costs_one_sentence(folder, record, capsys):
    shutil.rmtree(folder)
    sharing.share(record, event="hint", exercise=EXERCISE, goal=1, number=1)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "did not get this (No such file or directory); everything else works" in said


def test_a_file_system_that_does_not_answer_delays_a_check_by_two_seconds_at_most(folder, record, capsys, monkeypatch):
    released = threading.Event()
    monkeypatch.setattr(sharing, "_append", lambda *_: released.wait(60))
    begun = time.monotonic()
    sharing.share(record, event="hint", exercise=EXERCISE, goal=1, number=1)
    assert time.monotonic() - begun < sharing.PATIENCE + 1
    assert "the file system does not answer" in capsys.readouterr().err
    released.set()


def test_a_link_is_not_followed(folder, record, tmp_path, capsys):
    [file] = folder.iterdir()
    file.unlink()
    file.symlink_to(tmp_path / "elsewhere")
    sharing.share(record, event="hint", exercise=EXERCISE, goal=1, number=1)
    assert not (tmp_path / "elsewhere").exists()
    assert "did not get this" in capsys.readouterr().err


@needs("mount")
@as_root
def test_a_full_disk_costs_one_sentence_and_the_board_shows_the_rest(tmp_path):
    """On a disk of 32 kB: learners share until it is full, then space is freed, and they share again."""
    program = f"""
import os, sys
from pathlib import Path
from workshop.course import sharing
from workshop.board.board import Board
disk, record = Path({str(tmp_path)!r}), Path({str(tmp_path.parent)!r}) / "ada.board"
os.environ["WORKSHOP_CLASS"] = str(disk)
(disk / "ballast").write_bytes(bytes(16 << 10))
sharing.join("Ada", record)
hint = dict(event="hint", exercise={EXERCISE!r}, goal=1, number=1)
for _ in range(200):
    sharing.share(record, **hint)
board = Board(disk)
board.look()
before = board.rows.popitem()[1].hints
(disk / "ballast").unlink()
sharing.share(record, **hint)
board = Board(disk)
board.look()
print(before, board.rows.popitem()[1].hints, board.left_out(board.looked + 60))
"""
    words = f'mount -t tmpfs -o size=32k none "{tmp_path}" && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", words, "sh", sys.executable, "-P", "-c", program]
    done = subprocess.run(command, env=runs.environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    before, after, _ = done.stdout.split(maxsplit=2)
    assert 50 < int(before) < 200
    # 2: only the newline of a line did not fit on the disk, and the next line began with one.
    assert int(after) - int(before) in (1, 2)
    assert "No space left on device" in done.stderr or "the disk is full" in done.stderr
    assert "Traceback" not in done.stderr
    assert "left out: 1 lines that are no events" in done.stdout or "left out" not in done.stdout


# ---------------------------------------------------------------- two users


INSTRUCTOR, ADA, EVE, STAFF, CLASS = 23001, 23002, 23003, 23101, 23102


def as_user(uid: int, groups: list[int], function) -> object:
    """Call a function in a process of a different user, and return its result, or the name of its error."""
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.setgroups(groups)
            os.setresgid(groups[0], groups[0], groups[0])
            os.setresuid(uid, uid, uid)
            os.umask(0o077)
            result = function()
        except BaseException as error:
            result = type(error).__name__
        os.write(writing, json.dumps(result).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        result = json.load(pipe)
    os.waitpid(pid, 0)
    return result


@pytest.fixture
def shared(monkeypatch):
    """A folder below one that all users may enter, which belongs to the instructor; a record of Ada's beside it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        os.chmod(place, 0o711)
        folder, home = Path(place) / "class", Path(place) / "home"
        folder.mkdir()
        os.chown(folder, INSTRUCTOR, STAFF)
        home.mkdir()
        os.chown(home, ADA, ADA)
        monkeypatch.setenv("WORKSHOP_CLASS", str(folder))
        yield folder, home / "ada.board"


def access_list(folder: Path, reader: int) -> None:
    """Give new files in a folder an access control list, as ``setfacl -d -m u:READER:r,g::-,o::-`` does."""
    entries = [
        (0x01, 6, 0xFFFFFFFF),
        (0x02, 4, reader),
        (0x04, 0, 0xFFFFFFFF),
        (0x10, 4, 0xFFFFFFFF),
        (0x20, 0, 0xFFFFFFFF),
    ]
    value = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    os.setxattr(folder, "system.posix_acl_default", value)


@as_root
@pytest.mark.parametrize("how", ["setgid and sticky", "access control list"])
def test_learners_cannot_read_change_delete_or_list_the_files_of_others(how, shared):
    folder, record = shared
    staff = [INSTRUCTOR]  # the access control list names this user
    if how == "setgid and sticky":
        staff = [INSTRUCTOR, STAFF]
        os.chmod(folder, 0o3773)
    else:
        os.chmod(folder, 0o1733)
        try:
            access_list(folder, INSTRUCTOR)
        except OSError as error:
            pytest.skip(f"this file system has no access control lists ({error.strerror})")
    assert gaps(folder) == []
    assert as_user(ADA, [ADA, CLASS], lambda: sharing.join("Ada", record).name) == "Ada"
    [file] = folder.iterdir()  # as root, who also knows its name
    content = file.read_bytes()
    attempts = {
        "read": lambda: file.read_text(),
        "change": lambda: os.close(os.open(file, os.O_WRONLY | os.O_APPEND)),
        "cut": lambda: os.truncate(file, 0),
        "delete": lambda: file.unlink(),
        "rename": lambda: file.rename(folder / "learner-other.jsonl"),
        "replace": lambda: os.replace(_own(folder), file),
        "list": lambda: os.listdir(folder),
        "board": lambda: Board(folder).look(),
        "mode": lambda: file.chmod(0o666),
    }
    found = {what: as_user(EVE, [EVE, CLASS], attempt) for what, attempt in attempts.items()}
    assert found.pop("board") is True  # it says that it cannot read the folder
    assert set(found.values()) == {"PermissionError"}
    assert file.read_bytes() == content
    assert as_user(INSTRUCTOR, staff, lambda: _names(folder)) == ["Ada"]
    assert as_user(ADA, [ADA, CLASS], lambda: sharing.leave(record).name) == "Ada"
    assert not file.exists()


def _own(folder: Path) -> Path:
    own = folder / "learner-eve.jsonl"
    own.write_text("forged")
    return own


def _names(folder: Path) -> list[str]:
    board = Board(folder)
    board.look()
    return sorted(row.name for row in board.rows.values() if row.name)


@as_root
@pytest.mark.parametrize(
    ("mode", "said"),
    [
        (0o755, "only its owner can write"),
        (0o2773, "can delete the files of others"),
        (0o1773, "may not be able to read"),
        (0o3777, "list who shares"),
    ],
)
def test_a_folder_that_protects_less_is_described(mode, said, shared):
    folder, _ = shared
    os.chmod(folder, mode)
    assert said in gaps(folder)[0].seen


@as_root
def test_a_learner_without_permission_is_told_when_joining(shared):
    folder, record = shared
    os.chmod(folder, 0o755)
    assert as_user(ADA, [ADA, CLASS], lambda: sharing.join("Ada", record).name) == UserError.__name__
    assert not record.exists()
