"""What a check of this machine found."""

from dataclasses import dataclass

OK, WARNING, PROBLEM = "ok", "warning", "problem"
GIB = 2**30


@dataclass(frozen=True)
class Result:
    """What one check saw.

    Attributes:
        name: what was looked at.
        status: OK, WARNING (training runs, but not as it could) or PROBLEM (training cannot run).
        seen: the fact.
        advice: what to do about it, in one line; "" where there is nothing to do.
    """

    name: str
    status: str
    seen: str
    advice: str = ""
