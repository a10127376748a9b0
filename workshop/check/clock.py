"""Mark the times that a program measures: each is NaN, however it is printed, so that nobody compares it between two runs."""

import operator
import time
from collections.abc import Callable
from typing import Any

CLOCKS = ("time", "perf_counter")  # not those of the recorder
ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
COMPARED = ("lt", "le", "gt", "ge", "eq", "ne")


def mark_times() -> None:
    """Let the clocks of the module ``time`` return moments whose differences are ``Elapsed``."""
    for name in CLOCKS:
        setattr(time, name, _marking(getattr(time, name)))


def _marking(clock: Callable[[], float]) -> Callable[[], float]:
    return lambda: Moment(clock())


class Moment(float):
    """A moment: an ordinary number, but the time since another moment is ``Elapsed``."""

    def __sub__(self, other: float) -> float:
        seconds = float.__sub__(self, other)
        return Elapsed(seconds) if isinstance(other, Moment) else Moment(seconds)

    def __add__(self, other: float) -> float:
        return Moment(float.__add__(self, other))

    __radd__ = __add__


class Elapsed(float):
    """A time: printed as "nan", and so is what is computed from it; compared as what it is, so that time limits work."""

    seconds: float

    def __new__(cls, seconds: float = 0.0) -> "Elapsed":
        """Keep the seconds beside the value, which is NaN."""
        made = super().__new__(cls, float("nan"))
        made.seconds = float(seconds)
        return made

    def __int__(self) -> int:
        return int(self.seconds)

    __trunc__ = __floor__ = __ceil__ = __int__

    def __round__(self, digits: Any = None) -> Any:
        return self

    def __neg__(self) -> "Elapsed":
        return Elapsed(-self.seconds)

    def __bool__(self) -> bool:
        return bool(self.seconds)

    def __divmod__(self, other: Any) -> Any:
        return Elapsed(self.seconds // other), Elapsed(self.seconds % other)

    __hash__ = float.__hash__


def _seconds(value: Any) -> Any:
    return value.seconds if isinstance(value, Elapsed) else value


def _computed(name: str, *, compared: bool = False, reflected: bool = False) -> Callable[..., Any]:
    def compute(self: Elapsed, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        one, two = self.seconds, _seconds(other)
        try:
            result = getattr(operator, name)(*((two, one) if reflected else (one, two)))
        except ZeroDivisionError:  # an interval of 0 s, which the printed number does not show anyway
            result = 0.0
        return result if compared else Elapsed(result)

    return compute


for _name in ARITHMETIC:
    setattr(Elapsed, f"__{_name}__", _computed(_name))
    setattr(Elapsed, f"__r{_name}__", _computed(_name, reflected=True))
for _name in COMPARED:
    setattr(Elapsed, f"__{_name}__", _computed(_name, compared=True))
