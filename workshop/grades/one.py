"""The process that checks one exercise of this copy of the course: ``python -m workshop.grades.one EXERCISE RESULT``.

It writes JSON to RESULT: the states of the goals by number, the findings with the numbers of their goals, what was not checked,
and whether anything was judged. If the program cannot be run, for example because of a syntax error, "error" says why.
"""

import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

from workshop.course.checking import check_file
from workshop.errors import UserError
from workshop.files import write_atomically
from workshop.repository import ROOT

OUTPUT = 1 << 30  # bytes that a file of a program may have
LONGEST = 4_000  # characters of a text of a finding


def main() -> None:
    """Check the exercise, and write the result."""
    name, result = sys.argv[1:]
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # the check ends what it has started
    resource.setrlimit(resource.RLIMIT_FSIZE, (OUTPUT, OUTPUT))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    content: dict[str, Any] = {}
    try:
        for verdict in check_file(Path(name)):
            content = {
                "states": {str(number): state for number, state in verdict.states().items()},
                "findings": [
                    {"goal": verdict.goal_of(each), **{key: short(text) for key, text in each.as_dict().items()}}
                    for each in verdict.findings
                ],
                "not_checked": [short(text) for text in verdict.unchecked],
                "judged": verdict.judged,
            }
    except UserError as error:
        content = {"error": short(str(error))}
    write_atomically(result, json.dumps(content))
    sys.stdout.flush()
    os._exit(0)  # a normal exit takes most of a second after torch was imported


def short(text: str) -> str:
    """Return a text without the folder of this copy of the course, and not longer than ``LONGEST``."""
    text = text.replace(f"{ROOT}{os.sep}", "")
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} [...]"


if __name__ == "__main__":
    main()
