"""Measure the board of a class: thirty processes share checks and hints as learners do, while the board runs in a terminal.

``python -m board.load --minutes 10`` prints the result as JSON (results/board-load.json). For each line it measures the time from
the moment at which the learner's call returned until the page shows the row as it must then be.
"""

import argparse
import fcntl
import http.client
import json
import multiprocessing
import os
import pty
import random
import re
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from board.learners import NAMES, events
from workshop.course.sharing import join, share
from workshop.run.environment import environment
from workshop.run.machine import machine

SAMPLED = 0.25  # seconds between two requests for the state
AFTER = 5.0  # seconds that the board has after the last line


def learner(number: int, until: float, between: float, folder: Path) -> None:
    """Share events until the given time, and write what the board must show after each into a log."""
    chance, record = random.Random(number), folder / f"{number}.board"
    join(NAMES[number], record)
    expected = {"checks": 0, "hints": 0}
    with (folder / f"{number}.log").open("w", buffering=1) as log:
        while True:
            for event in events(chance):
                pause = chance.expovariate(1 / between)
                if time.time() + pause > until:
                    return
                time.sleep(pause)
                share(record, **event)
                expected["checks" if event["event"] == "check" else "hints"] += 1
                if event["event"] == "check":
                    expected |= {"exercise": event["exercise"], "met": [event["goals"][goal] for goal in _order(event)]}
                log.write(json.dumps(expected | {"name": NAMES[number], "at": time.time()}) + "\n")


def _order(event: dict) -> list[int]:
    return sorted(event["goals"], key=lambda goal: (goal == 0, goal))


class Screen:
    """The board in a terminal of 120 columns and 50 lines, which this process reads."""

    def __init__(self, folder: Path) -> None:
        self.reading, writing = pty.openpty()
        fcntl.ioctl(writing, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 120, 0, 0))
        command = [sys.executable, "-P", "-m", "workshop", "board"]
        changed = {"WORKSHOP_CLASS": str(folder), "WORKSHOP_LAB": None, "SSH_CONNECTION": None, "SLURM_JOB_ID": None}
        self.process = subprocess.Popen(command, stdout=writing, stdin=writing, env=environment(**changed))
        os.close(writing)
        self.text, self.bytes = "", 0
        threading.Thread(target=self._drain, daemon=True).start()
        while not (found := re.search(r"http://\S+/", self.text)):
            if self.process.poll() is not None:
                raise SystemExit(f"the board ended: {self.text}")
            time.sleep(0.05)
        self.address = found[0]

    def _drain(self) -> None:
        while True:
            try:
                content = os.read(self.reading, 1 << 16)
            except OSError:  # the board has ended
                return
            self.bytes += len(content)
            self.text = (self.text + content.decode(errors="replace"))[-10_000:]


def watch(address: str, until: float) -> list[tuple[float, dict]]:
    """Ask for the state until the given time, as a browser does; return each new state with its time."""
    seen, version, place = [], "", urlsplit(address)
    connection = http.client.HTTPConnection(place.netloc, timeout=10)
    while time.time() < until:
        connection.request("GET", place.path + "state", headers={"Board-Version": version})
        answer = connection.getresponse()
        content, version = answer.read(), answer.headers["Board-Version"]
        if answer.status == 200:
            state = json.loads(content)
            rows = {
                row["name"]: row | {"exercise": each["name"]} for each in state["exercises"] for row in each["rows"]
            }
            seen.append((time.time(), rows))
        time.sleep(SAMPLED)
    connection.close()
    return seen


def judge(seen: list[tuple[float, dict]], folder: Path) -> dict:
    """Compare the states with the logs: how late each event was shown, which rows were wrong, which events were lost."""
    late, wrong, lost = [], [], []
    for log in sorted(folder.glob("*.log")):
        for line in map(json.loads, log.read_text().splitlines()):
            counts = (line["checks"], line["hints"])
            for at, rows in seen:
                row = rows.get(line["name"])
                if row and row["all_checks"] >= counts[0] and row["all_hints"] >= counts[1]:
                    late.append(at - line["at"])
                    if (row["all_checks"], row["all_hints"]) == counts and "met" in line:
                        wrong += [line] if (row["met"], row["exercise"]) != (line["met"], line["exercise"]) else []
                    break
            else:
                lost.append(line)
    late.sort()
    return {
        "lines": len(late) + len(lost),
        "lost": len(lost),
        "wrong_rows": len(wrong),
        "seconds_until_shown": {
            "median": round(statistics.median(late), 2),
            "99 of 100": round(late[int(0.99 * len(late))], 2),
            "longest": round(late[-1], 2),
        },
        "later_than_2_s": sum(each > 2 for each in late),
    }


def main() -> None:
    """Measure, and print the result."""
    parser = argparse.ArgumentParser(prog="python -m board.load", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10, help="how long the learners work")
    parser.add_argument("--between", type=float, default=10, help="mean seconds between two lines of a learner")
    parser.add_argument("--folder", type=Path, help="where to create the folder of the class, to try a file system")
    parser.add_argument(
        "--seen-as", type=Path, help="a second mount of that file system, for the board, as on a different node"
    )
    args = parser.parse_args()
    if args.seen_as and not args.folder:
        parser.error("--seen-as needs --folder")
    with tempfile.TemporaryDirectory(dir=args.folder) as place, tempfile.TemporaryDirectory() as logs:
        folder = Path(place) / "class"
        folder.mkdir()
        folder.chmod(0o3773)
        os.environ["WORKSHOP_CLASS"] = str(folder)
        screen = Screen(args.seen_as / folder.relative_to(args.folder) if args.seen_as else folder)
        board = psutil.Process(screen.process.pid)
        started, begun = sum(board.cpu_times()[:2]), time.time()
        until = begun + 60 * args.minutes
        fork = multiprocessing.get_context("fork")
        people = [
            fork.Process(target=learner, args=(number, until, args.between, Path(logs))) for number in range(len(NAMES))
        ]
        for each in people:
            each.start()
        seen = watch(screen.address, until + AFTER)
        used, seconds = sum(board.cpu_times()[:2]) - started, time.time() - begun
        for each in people:
            each.join()
        result = {
            "machine": machine(),
            "load_average": [round(each, 1) for each in os.getloadavg()],
            "command": f"python -m board.load --minutes {args.minutes:g}"
            + (" --folder A_MOUNT" if args.folder else "")
            + (" --seen-as A_SECOND_MOUNT" if args.seen_as else ""),
            "what": f"{len(NAMES)} processes append a check or a hint every {args.between:g} s on average; the board runs in a "
            f"terminal of 120 x 50 and serves its page, which this driver asks {1 / SAMPLED:g} times per second",
            "seconds": round(seconds),
            **judge(seen, Path(logs)),
            "board": {
                "share_of_a_core": round(used / seconds, 5),
                "share_of_a_core_with_its_start": round((used + started) / seconds, 5),
                "memory": board.memory_info().rss,
                "bytes_to_the_terminal": screen.bytes,
            },
        }
        print(json.dumps(result, indent=1), flush=True)
        screen.process.terminate()
        screen.process.wait(20)


if __name__ == "__main__":
    main()
