"""Show the board in a terminal.

The lines are made without tables of rich, because drawing these for thirty learners takes most of a percent of a core.
"""

import shutil
import textwrap
import time
from collections.abc import Iterator
from typing import Any

from rich.cells import set_cell_size

from workshop.board.summary import duration
from workshop.course.sharing import LONGEST_NAME

BOLD, DIM, RED, GREEN, YELLOW, PLAIN = "\033[1m", "\033[2m", "\033[31m", "\033[32m", "\033[33m", "\033[0m"
LONG, VERY_LONG = 600, 1200  # seconds of waiting that are shown in yellow and in red
HOME, CLEAR_LINE, CLEAR_BELOW = "\033[H", "\033[K", "\033[J"
ENTER, LEAVE = "\033[?1049h\033[?25l", "\033[?25h\033[?1049l"  # a screen of its own, without a cursor


def screen(state: dict[str, Any], address: str) -> str:
    """Return the whole screen as text with control sequences, cut to the size of the terminal."""
    width, height = shutil.get_terminal_size()
    lines = list(board_lines(state, width, address))
    if len(lines) > height:
        left = len(lines) - height + 1
        lines = [*lines[: height - 1], f"{DIM}{left} more lines: make the window larger, or open the page{PLAIN}"]
    return HOME + "".join(f"{line}{CLEAR_LINE}\n" for line in lines)[:-1] + CLEAR_BELOW


def board_lines(state: dict[str, Any], width: int, address: str = "") -> Iterator[str]:
    """Yield the lines of the board: what to do next first, then the learners of each exercise."""
    clock = time.strftime("%H:%M:%S", time.localtime(state["now"]))
    yield BOLD + _cut(f"{_learners(state['learners'])}, {state['working']} at work, {clock}", width) + PLAIN
    if address:
        yield DIM + address + PLAIN
    if found := state["next"]:
        yield ""
        yield from _wrapped(found["seen"] + ".", width, YELLOW)
        taught = f" Taught in {found['taught']}." if found["taught"] else ""
        yield from _wrapped(f"Show {found['show']}.{taught}", width)
        yield f"  {BOLD}{found['command']}{PLAIN}"
    for number, mistake in enumerate(state["mistakes"]):
        if number == 0:
            yield ""
        yield from _wrapped(f"{mistake['learners']} have now {mistake['rule']}: {mistake['why']}", width)
        if number == 0:
            yield from _wrapped(f"fix: {mistake['fix']}", width, DIM)
    for exercise in state["exercises"]:
        yield ""
        yield from _exercise(exercise, width)
    if waiting := state["not_begun"]:
        names = ", ".join(each["name"] + (f" ({each['stage']})" if each["stage"] else "") for each in waiting)
        yield ""
        yield from _wrapped(f"No check yet: {names}", width, DIM)
    for sentence in state["left_out"]:
        yield from _wrapped(sentence, width, DIM)


def _exercise(exercise: dict[str, Any], width: int) -> Iterator[str]:
    numbers = [goal["number"] for goal in exercise["goals"]]
    yield BOLD + _cut(f"{exercise['short']}: {_learners(len(exercise['rows']))}", width) + PLAIN
    for goal in exercise["goals"]:
        if goal["waiting"] or goal["minutes"] is not None:
            figures = f"{goal['met']:>2} met, {goal['waiting']:>2} wait"
            figures += f", median {goal['minutes']:g} min" if goal["minutes"] is not None else ""
            figures += f" (last course {goal['last']:g})" if goal["last"] is not None else ""
            yield _cut(f"  goal {goal['number']}: {figures}: {goal['title']}", width)
    name = min(LONGEST_NAME, max([len(row["name"]) for row in exercise["rows"]] + [8]))
    head = f"{'':{name}} {''.join(f'{number} ' for number in numbers)}{'waits at':>18} checks hints mistake"
    yield DIM + _cut(head, width) + PLAIN
    for row in exercise["rows"]:
        yield _row(row, numbers, name, width)


def _row(row: dict[str, Any], numbers: list[int], name: int, width: int) -> str:
    squares = "".join(
        ("■ " if met else "▶ " if number == row["goal"] else "· ")
        for number, met in zip(numbers, row["met"], strict=True)
    )
    if row["goal"] is None:
        style, rest = GREEN, f"{'done':>18}"
    else:
        style = DIM if row["quiet"] else RED if row["waits"] >= VERY_LONG else YELLOW if row["waits"] >= LONG else ""
        where = "quiet" if row["quiet"] else f"goal {row['goal']}, {duration(row['waits'])}"
        rest = f"{where:>18} {row['checks']:>6} {row['hints']:>5} {row['mistake']}"
    return style + _cut(f"{set_cell_size(row['name'], name)} {squares}{rest}", width) + PLAIN


def _learners(number: int) -> str:
    return f"{number} learner{'s' * (number != 1)}"


def _cut(text: str, width: int) -> str:
    return set_cell_size(text, width).rstrip()


def _wrapped(text: str, width: int, style: str = "") -> Iterator[str]:
    yield from (style + line + (PLAIN if style else "") for line in textwrap.wrap(text, width))
