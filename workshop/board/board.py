"""The board: the rows of all learners, kept up to date by looking into the folder of the class."""

import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

from workshop.board.files import Folder, LearnerFile
from workshop.board.protection import gaps
from workshop.board.rows import BROKEN, Row, parse, times
from workshop.board.summary import duration, summary
from workshop.course.sharing import require_class_folder
from workshop.errors import UserError

EVERY = 0.5  # seconds between two looks
RENEWED = 15.0  # seconds after which the state is computed again although nothing was appended
UNFINISHED = 5.0  # seconds after which a last line without an end counts as broken
WRONG_CLOCK = 60.0  # seconds
LAST_COURSE = "last-course.json"  # an export, in the folder of the class


class Board:
    """The rows of the learners, and what was left out.

    Attributes:
        folder: the folder of the class.
        rows: the row of each learner, by the name of the file.
        version: it increases when ``state`` changes.
        state: what the page and the terminal show, see ``summary``.
        body: the state as JSON.
        looked: when the last look ended, in seconds since 1970.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._files = folder, Folder(folder)
        self.rows: dict[str, Row] = {}
        self.version = time.time_ns()  # a page that was open before a restart does not know this version
        self.state: dict[str, Any] = {}
        self.body, self.looked, self._renewed = b"{}", 0.0, 0.0
        self._problems: list[str] = []
        self._left_out: dict[str, Counter[str]] = {}
        self._last_course = read_last_course(folder)

    def look(self) -> bool:
        """Read what is new, and return whether the state has changed."""
        now = time.time()
        new = self._files.look()
        for name, lines in new.items():
            self._apply(name, self._files.files[name], lines, now)
        gone = self.rows.keys() - self._files.files.keys()
        for name in gone:
            del self.rows[name], self._left_out[name]
        self.looked = time.time()
        changed = bool(new or gone) or self._problems != self._files.problems or not 0 <= now - self._renewed < RENEWED
        if changed:
            self._renewed, self._problems = now, self._files.problems
            self.version += 1
            self.state = summary(self.named_rows(), now, self._last_course) | {"left_out": self.left_out(now)}
            self.body = json.dumps(self.state).encode()
        return changed

    def _apply(self, name: str, file: LearnerFile, lines: list[bytes], now: float) -> None:
        if file.restarted or name not in self.rows:
            self.rows[name], self._left_out[name] = Row(), Counter()
        row, events = self.rows[name], []
        for line in lines:
            event = parse(line)
            if isinstance(event, str):
                self._left_out[name][event] += 1
            else:
                events.append(event)
        # Lines that are older than this board arrived when the file was changed; the others arrive now.
        reference = min(file.changed, now) if file.first or file.restarted else now
        reference = max(reference, row.last)
        for event, at in zip(events, times(events, reference, row.last), strict=True):
            row.apply(event, at)
        if events and events[-1]["at"] is not None:
            row.skew = reference - events[-1]["at"]

    def named_rows(self) -> dict[str, Row]:
        """Return the rows by names that are all different: with the account or a number if two learners chose one name."""
        plain = {name: row.name or "without a name" for name, row in self.rows.items()}
        twice = {name for name, number in Counter(plain.values()).items() if number > 1}
        named: dict[str, Row] = {}
        for name, row in self.rows.items():
            shown = plain[name] + f" ({self._files.files[name].owner})" * (plain[name] in twice)
            number = 2
            while shown in named:
                shown = f"{shown.partition(' #')[0]} #{number}"
                number += 1
            named[shown] = row
        return named

    def left_out(self, now: float) -> list[str]:
        """Return what the board could not read or does not believe, in sentences."""
        total = sum(self._left_out.values(), Counter())
        for file in self._files.files.values():
            total.update(file.left_out)
            if file.rest and now - file.changed > UNFINISHED:
                total[BROKEN] += 1
        said = [f"left out: {number} {what}" for what, number in sorted(total.items())]
        for shown, row in self.named_rows().items():
            if abs(row.skew) > WRONG_CLOCK:
                wrong = f"{duration(abs(row.skew))} {'slow' if row.skew > 0 else 'fast'}"
                said.append(f"the clock of {shown} is {wrong}; the board uses its own")
        return [*self._files.problems, *said, *(f"{gap.seen}: {gap.advice}" for gap in gaps(self.folder))]


def open_board() -> Board:
    """Return the board of the class, after a first look.

    Raises:
        UserError: no folder of a class is set, or it cannot be read.
    """
    folder = require_class_folder()
    try:
        os.listdir(folder)
    except OSError as error:
        raise UserError(
            f"{folder} cannot be read ({error.strerror}): only the instructors of the class can read it"
        ) from error
    board = Board(folder)
    board.look()
    return board


def read_last_course(folder: Path) -> dict[tuple[str, int], float]:
    """Return the median minutes of each goal in the last course, by exercise and number; empty if there is no export of it.

    Only a file of the owner of the folder counts, because learners may be able to write into the folder.
    """
    path = folder / LAST_COURSE
    try:
        if path.is_symlink() or path.stat().st_uid not in (folder.stat().st_uid, os.getuid()):
            return {}
        goals: list[dict[str, Any]] = json.loads(path.read_text())["goals"]
        return {
            (goal["exercise"], goal["goal"]): float(goal["median_minutes"])
            for goal in goals
            if goal["median_minutes"] is not None
        }
    except (OSError, ValueError, LookupError, TypeError):
        return {}
