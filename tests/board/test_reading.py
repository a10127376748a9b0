"""What the board makes of the files of learners: rows that only their own file changes, whatever is in the others."""

import json
import os
import random
import sys
import time
from pathlib import Path

import psutil
import pytest

import runs
from board.learners import NAMES, events, write, write_class
from workshop.board import files
from workshop.board.board import LAST_COURSE, Board
from workshop.board.export import report
from workshop.board.rows import QUIET, Row, known_goals, parse, times
from workshop.course.exercises import exercises

SPAWN = "02_pytorch_ddp/exercise1_multigpu.py"
TORCHRUN = "02_pytorch_ddp/exercise2_multigpu_torchrun.py"


@pytest.fixture
def folder(tmp_path) -> Path:
    tmp_path.chmod(0o3773)
    return tmp_path


def check(met=(), rule="no-group", exercise=SPAWN, **more) -> dict:
    goals = {str(number): number in met for number in known_goals()[exercise]}
    return {
        "event": "check",
        "at": time.time(),
        "exercise": exercise,
        "goals": goals,
        "rule": rule,
        "seconds": 5,
    } | more


def hint(goal=1, number=1, **more) -> dict:
    return {"event": "hint", "at": time.time(), "exercise": SPAWN, "goal": goal, "number": number} | more


def ada(*events: dict) -> list[dict]:
    return [{"event": "join", "at": time.time(), "name": "Ada"}, *events]


def looked(folder) -> Board:
    board = Board(folder)
    board.look()
    return board


def append(path: Path, *lines: dict | bytes) -> None:
    with path.open("ab") as file:
        file.writelines(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines)


# ---------------------------------------------------------------- a row


def test_a_row_shows_the_goal_the_checks_and_hints_since_it_began_and_the_mistake():
    row = Row()
    for second, event in [
        (0, check(rule="no-group")),
        (60, hint(1, 1)),
        (120, check(met=[1], rule="device-shared")),
        (180, check(met=[1], rule="device-shared")),
        (240, hint(2, 1)),
        (300, hint(2, 2)),
    ]:
        row.apply(parse(json.dumps(event).encode()), 1000 + second)
    assert (row.goal, row.waits(1600), row.current.checks, row.current.hints) == (2, 480, 1, 2)
    assert (row.rule, row.checks, row.hints) == ("device-shared", 3, 3)
    first = row.states[SPAWN][1]
    assert (first.minutes, first.checks, first.hints, first.mistakes) == (2, 2, 1, {"no-group"})
    row.apply(parse(json.dumps(check(met=range(7), rule="")).encode()), 1600)
    assert (row.goal, row.waits(9999)) == (None, 0)


def test_a_goal_that_a_check_could_not_judge_stays_as_it_was():
    row = Row()
    row.apply(parse(json.dumps(check(met=[1, 2], rule="several-print")).encode()), 1000)
    crashed = check(rule="crash") | {"goals": {"0": False}}
    row.apply(parse(json.dumps(crashed).encode()), 1100)
    assert (row.goal, row.rule) == (3, "crash")


def test_a_break_and_the_time_in_a_different_exercise_do_not_count_as_waiting():
    row = Row()
    row.apply(parse(json.dumps(check()).encode()), 1000)
    row.apply(parse(json.dumps(check()).encode()), 1000 + 2 * QUIET)
    assert row.waits(1000 + 2 * QUIET + 60) == 60
    row.apply(parse(json.dumps(check(exercise=TORCHRUN)).encode()), 9000)
    row.apply(parse(json.dumps(check()).encode()), 9900)
    assert row.waits(9960) == 60


def test_the_simulated_learners_finish_every_exercise():
    row = Row()
    for second, event in enumerate(events(random.Random(1))):
        row.apply(parse(json.dumps(event).encode()), 1000 + second)
    assert set(row.states) == {each.name for each in exercises() if each.stage == "02_pytorch_ddp"}
    assert all(state.met for states in row.states.values() for state in states.values())


# ---------------------------------------------------------------- lines that are wrong


FORGED = [
    b"",
    b"{",
    b"null",
    b"[1, 2]",
    b"[" * 4000,
    b'{"event": "check"}',
    b"\x00\xff\xfe binary \x1b[2J",
    b'{"event": "check", "goals": {"1": true}, "exercise": {"a": 1}, "rule": "", "seconds": 1}',
    json.dumps(check(seconds=float("nan"))).encode(),
    json.dumps(check(seconds=-1)).encode(),
    json.dumps(check(seconds="5")).encode(),
    json.dumps(check(exercise=SPAWN) | {"exercise": "../../etc/passwd"}).encode(),
    json.dumps(check() | {"goals": {"99": True}}).encode(),
    json.dumps(check() | {"goals": {"1": "yes"}}).encode(),
    json.dumps(check() | {"goals": [1]}).encode(),
    json.dumps(check(rule="<script>alert(1)</script>")).encode(),
    json.dumps(check(rule=["no-group"])).encode(),
    json.dumps(hint(goal=99)).encode(),
    json.dumps(hint(number=4)).encode(),
    json.dumps(hint(number=0)).encode(),
    json.dumps(hint(number=1.5)).encode(),
    b'{"event": "hint", "exercise": "' + SPAWN.encode() + b'", "goal": 1e400, "number": 1}',
    b'{"event": "start", "stage": ["02_pytorch_ddp"]}',
    b'{"event": "leave", "name": "Ada"}',
]


@pytest.mark.parametrize("line", FORGED)
def test_a_line_that_is_no_event_changes_nothing(line, folder):
    write(folder / "learner-a.jsonl", ada(check()))
    before = looked(folder).state["exercises"]
    append(folder / "learner-a.jsonl", line + b"\n")
    append(folder / "learner-b.jsonl", line + b"\n")
    board = looked(folder)
    assert [row | {"waits": 0} for row in board.state["exercises"][0]["rows"]] == [
        row | {"waits": 0} for row in before[0]["rows"]
    ]
    assert len(board.state["exercises"]) == 1
    assert bool(line) == any("left out: 2 " in sentence for sentence in board.state["left_out"])


def test_a_line_in_one_file_cannot_change_the_row_of_a_different_learner(folder):
    write(folder / "learner-a.jsonl", ada(check(met=[1], rule="device-shared")))
    forged = [{"event": "join", "at": 1, "name": "Ada", "file": "learner-a.jsonl"}, check(met=range(7), rule="")]
    write(folder / "learner-b.jsonl", forged)
    board = looked(folder)
    assert board.rows["learner-a.jsonl"].goal == 2
    shown = [row["name"] for row in board.state["exercises"][0]["rows"]]
    owner = board._files.files["learner-a.jsonl"].owner
    assert sorted(shown) == [f"Ada ({owner})", f"Ada ({owner}) #2"]


def test_random_bytes_never_end_the_board(folder):
    chance = random.Random(3)
    board = Board(folder)
    write(folder / "learner-a.jsonl", ada(check()))
    line = json.dumps(check()).encode()
    for _ in range(300):
        damaged = bytearray(line)
        for _ in range(chance.randint(1, 6)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        append(folder / "learner-b.jsonl", bytes(damaged) + b"\n" * chance.randint(0, 1))
        board.look()
    assert board.rows["learner-a.jsonl"].checks == 1


def test_a_torn_line_is_shown_when_its_end_arrives(folder):
    line = json.dumps(check()).encode() + b"\n"
    write(folder / "learner-a.jsonl", ada())
    append(folder / "learner-a.jsonl", line[:40])
    board = looked(folder)
    assert board.rows["learner-a.jsonl"].checks == 0
    assert board.state["left_out"] == []
    append(folder / "learner-a.jsonl", line[40:])
    board.look()
    assert board.rows["learner-a.jsonl"].checks == 1
    append(folder / "learner-a.jsonl", line[:40])  # its end never arrives: the disk was full
    board.look()
    assert board.left_out(time.time() + 60) == ["left out: 1 lines that are no events"]


def test_a_file_of_1_gb_is_read_in_part_and_the_newest_lines_count(folder):
    path = folder / "learner-a.jsonl"
    write(path, ada(check()))
    with path.open("ab") as file:
        file.truncate(1 << 30)  # holes, which take no space on the disk
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + json.dumps(check(met=[1])).encode() + b"\n")
    write(folder / "learner-b.jsonl", ada(check()))
    before, begun = psutil.Process().memory_info().rss, time.monotonic()
    board = looked(folder)
    assert time.monotonic() - begun < 5
    assert psutil.Process().memory_info().rss - before < 100 << 20
    assert board.rows["learner-a.jsonl"].goal == 2
    assert board.rows["learner-b.jsonl"].goal == 1
    assert any("MB in the middle of a file" in sentence for sentence in board.state["left_out"])


def test_a_line_of_1_mb_is_left_out_and_not_kept(folder):
    path = folder / "learner-a.jsonl"
    write(path, ada())
    board = looked(folder)
    for _ in range(20):
        append(path, b"x" * 50_000)
        board.look()
        assert len(board._files.files[path.name].rest) <= 4096
    append(path, b"\n", check())
    board.look()
    assert board.rows[path.name].checks == 1
    assert board.state["left_out"] == ["left out: 1 lines that are too long"]


# ---------------------------------------------------------------- files and folders that change


def test_only_new_bytes_are_read(folder, monkeypatch):
    write(folder / "learner-a.jsonl", ada(*[check() for _ in range(50)]))
    board, read, pread = looked(folder), [], os.pread
    monkeypatch.setattr(files.os, "pread", lambda *words: read.append(pread(*words)) or read[-1])
    board.look()
    assert read == []
    append(folder / "learner-a.jsonl", check())
    board.look()
    assert len(b"".join(read)) < 400


def test_a_file_that_is_replaced_or_cut_begins_a_new_row(folder):
    path = folder / "learner-a.jsonl"
    write(path, ada(check(), check(), check()))
    board = looked(folder)
    other = folder / "new"
    write(other, ada(check(met=[1], rule="device-shared")))
    os.replace(other, path)
    board.look()
    assert (board.rows[path.name].checks, board.rows[path.name].goal) == (1, 2)
    write(path, ada())
    board.look()
    assert board.rows[path.name].checks == 0
    path.unlink()
    board.look()
    assert board.state["learners"] == 0


def test_a_folder_that_disappears_keeps_the_rows_and_says_so(folder):
    place = folder / "class"
    place.mkdir()
    write(place / "learner-a.jsonl", ada(check()))
    board = looked(place)
    place.rename(folder / "away")
    assert board.look()
    assert board.state["learners"] == 1
    assert "cannot be read (No such file or directory)" in board.state["left_out"][0]
    (folder / "away").rename(place)
    assert board.look()
    assert "cannot be read" not in str(board.state["left_out"])


def test_pipes_links_folders_and_unreadable_files_do_not_stop_the_board(folder):
    write(folder / "learner-a.jsonl", ada(check()))
    os.mkfifo(folder / "learner-pipe.jsonl")
    (folder / "learner-link.jsonl").symlink_to("/etc/passwd")
    (folder / "learner-zero.jsonl").symlink_to("/dev/zero")
    (folder / "learner-folder.jsonl").mkdir()
    (folder / "notes.txt").write_text("not a file of a learner")
    begun = time.monotonic()
    board = looked(folder)
    assert time.monotonic() - begun < 5
    assert board.state["learners"] == 1
    assert (
        sum(int(each.rpartition(" ")[2]) for each in board.state["left_out"] if "files that cannot be read" in each)
        == 4
    )


def test_one_account_with_a_thousand_files_does_not_displace_the_others(folder, monkeypatch):
    """The account is in the name of the file here, because tests may not run as root."""
    monkeypatch.setattr(files, "_owner", lambda path: path.name.split("-")[1])
    for number in range(1000):
        write(folder / f"learner-eve-{number:04}.jsonl", [{"event": "join", "at": 1.0, "name": f"Eve {number}"}])
    board = looked(folder)
    for number in range(29):
        write(folder / f"learner-other{number}-0.jsonl", ada(check()))
    board.look()
    assert sum(row.name == "Ada" for row in board.rows.values()) == 29
    assert len(board.rows) == files.MOST_FILES
    assert "the board shows 300 of 1029 files" in board.state["left_out"][0]


# ---------------------------------------------------------------- clocks


WRONG = pytest.mark.parametrize("wrong", [0, -3 * 3600, 5 * 86400, -1e9])


def about_the_clock(board) -> list[str]:
    return [sentence for sentence in board.state["left_out"] if sentence.startswith("the clock of Ada is")]


@WRONG
def test_a_wrong_clock_does_not_change_how_long_a_learner_waits_when_the_board_starts_late(wrong, folder):
    now = time.time()
    path = folder / "learner-a.jsonl"
    append(
        path,
        {"event": "join", "at": now + wrong - 600, "name": "Ada"},
        check(at=now + wrong - 300),
        hint(at=now + wrong),
    )
    board = looked(folder)  # the file system has set the time of the change, with the right clock
    assert abs(board.rows[path.name].waits(now) - 300) < 5
    assert bool(about_the_clock(board)) is bool(wrong)


@WRONG
def test_a_wrong_clock_does_not_change_how_long_a_learner_waits_while_the_board_runs(wrong, folder, monkeypatch):
    now, path = time.time(), folder / "learner-a.jsonl"
    append(path, {"event": "join", "at": now + wrong, "name": "Ada"})
    board = looked(folder)
    for minute in (1, 2, 9):
        monkeypatch.setattr("workshop.board.board.time.time", lambda minute=minute: now + 60 * minute)
        append(path, check(at=now + wrong + 60 * minute))
        board.look()
    assert abs(board.rows[path.name].waits(now + 540) - 480) < 1
    said = about_the_clock(board)
    assert bool(said) is bool(wrong)
    assert not wrong or (" fast;" if wrong > 0 else " slow;") in said[0]


def test_times_never_decrease_and_never_lie_in_the_future():
    def at(*clocks):
        return [{"at": clock} for clock in clocks]

    assert times(at(10, 20, 30), 130, 0) == [110, 120, 130]
    assert times(at(10, 99999, 30), 130, 0) == [110, 130, 130]  # the clock was wrong for a moment
    assert times(at(10, None, 30), 130, 0) == [110, 130, 130]
    assert times(at(10, 20, 30), 130, 125) == [125, 125, 130]
    assert times(at(None, None), 130, 0) == [130, 130]


# ---------------------------------------------------------------- the whole class


def test_the_board_suggests_the_next_hint_where_most_wait(folder):
    for number in range(10):
        lines = ada(check(met=[1], rule="device-shared"), *[hint(2, 1)] * (number < 6))
        write(folder / f"learner-{number}.jsonl", lines)
    found = looked(folder).state
    assert found["next"]["command"] == f"./workshop.sh hint {SPAWN} 2"
    assert found["next"]["show"] == "hint 2 of 3: half of them have read hint 1"
    assert found["next"]["hint"].startswith("Look up `torch.accelerator.set_device_index`")
    assert found["next"]["taught"] == "notebook 02, part 3: mp.spawn: start the processes yourself"
    assert [(each["rule"], each["learners"]) for each in found["mistakes"]] == [("device-shared", 10)]
    assert "share a GPU" in found["mistakes"][0]["why"]
    for number in range(10):
        append(folder / f"learner-{number}.jsonl", hint(2, 2), hint(2, 3))
    assert looked(folder).state["next"]["command"] == f"./workshop.sh diff {SPAWN} --solution"


def test_every_exercise_has_the_part_of_the_notebook_that_teaches_it():
    from workshop.board.summary import taught

    without = [each.name for each in exercises() if not taught(each.name).startswith("notebook ")]
    assert without == []


def test_learners_who_were_away_for_an_hour_do_not_count_as_waiting(folder):
    write_class(folder, time.time() - 2 * QUIET)
    found = looked(folder).state
    assert (found["learners"], found["working"], found["next"], found["mistakes"]) == (30, 0, None, [])
    assert all(row["quiet"] for each in found["exercises"] for row in each["rows"])


def test_the_report_has_no_names_unless_asked_and_is_shown_beside_the_next_course(folder):
    write_class(folder, time.time())
    board = looked(folder)
    without, named = report(board, False), report(board, True)
    assert not any(name in json.dumps(without) for name in NAMES if len(name) > 3)
    assert set(named["rows"]) == set(NAMES)
    goal = next(goal for goal in without["goals"] if (goal["exercise"], goal["goal"]) == (SPAWN, 2))
    assert goal["met"] <= goal["begun"] <= 30
    assert goal["median_minutes"] > 0
    assert goal["median_checks"] >= 1
    assert "device-shared" in goal["mistakes"]
    (folder / LAST_COURSE).write_text(json.dumps(without))
    shown = looked(folder).state["exercises"][0]["goals"]
    assert next(each["last"] for each in shown if each["number"] == 2) == goal["median_minutes"]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"goals": [{"exercise": 1}]}', '{"goals": 3}'])
def test_a_broken_report_of_the_last_course_is_not_shown(content, folder):
    (folder / LAST_COURSE).write_text(content)
    write(folder / "learner-a.jsonl", ada(check()))
    assert all(goal["last"] is None for goal in looked(folder).state["exercises"][0]["goals"])


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be a different user")
def test_a_report_of_the_last_course_that_a_learner_wrote_is_not_shown(folder):
    write_class(folder, time.time())
    (folder / LAST_COURSE).write_text(json.dumps(report(looked(folder), False)))
    os.chown(folder / LAST_COURSE, 23002, 23002)
    assert all(goal["last"] is None for goal in looked(folder).state["exercises"][0]["goals"])


@pytest.mark.parametrize("ending", ["json", "csv", "md"])
def test_the_export_writes_each_format(ending, folder, tmp_path_factory):
    write_class(folder, time.time())
    place = tmp_path_factory.mktemp("export")
    command = [sys.executable, "-P", "-m", "workshop", "board", "--export", f"course.{ending}"]
    done = runs.run(command, place, WORKSHOP_CLASS=folder)
    assert done.returncode == 0, done.stderr
    text = (place / f"course.{ending}").read_text()
    assert SPAWN in text
    assert "device-shared" in text
