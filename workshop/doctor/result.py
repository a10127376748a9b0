"""The result of a check of this machine."""

from dataclasses import dataclass

OK, WARNING, PROBLEM = "ok", "warning", "problem"
GIB = 2**30


@dataclass(frozen=True)
class Result:
    """The result of one check.

    Attributes:
        name: what was checked.
        status: OK, WARNING (training runs, but not as well as it could) or PROBLEM (training cannot run).
        seen: what the check found.
        advice: what to do about it, in one line; "": nothing.
    """

    name: str
    status: str
    seen: str
    advice: str = ""
