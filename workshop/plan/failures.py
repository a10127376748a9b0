"""How often a large training is interrupted, how often to write a checkpoint, and how much of the time is useful."""

import math
from dataclasses import dataclass

# Llama 3 was interrupted 466 times in 54 days on 16,384 GPUs: Dubey et al., 2024, section 3.3.4,
# https://arxiv.org/abs/2407.21783
RATE = 466 / (54 * 24 * 16384)  # interruptions per hour and GPU


@dataclass(frozen=True)
class Failures:
    """How often a training is interrupted, and how often it writes a checkpoint.

    Attributes:
        rate: interruptions per hour and GPU.
        interval: seconds between checkpoints; 0: the best.
        checkpoint: seconds in which training stops to write a checkpoint.
        restart: seconds from an interruption until training goes on.
    """

    rate: float = RATE
    interval: float = 0
    checkpoint: float = 60
    restart: float = 600


@dataclass(frozen=True)
class Losses:
    """What interruptions cost a run.

    Attributes:
        interruptions: the number to expect.
        interval: seconds between checkpoints.
        hours: hours lost to checkpoints, to work done twice, and to restarts.
    """

    interruptions: float
    interval: float
    hours: float

    def goodput(self, hours: float) -> float:
        """Return the useful share of the time of a training that takes ``hours`` without interruptions, between 0 and 1."""
        return hours / (hours + self.hours) if hours else 1.0


def expected(
    gpus: int, hours: float, *, rate: float = RATE, checkpoint: float = 60, restart: float = 600, interval: float = 0
) -> Losses:
    """Return what to expect, to first order: an interruption loses half an interval on average, and the restart.

    Args:
        gpus: the number of GPUs.
        hours: the length of the training without interruptions.
        rate: interruptions per hour and GPU.
        checkpoint: seconds in which training stops to write a checkpoint.
        restart: seconds from an interruption until training continues.
        interval: seconds between checkpoints; 0: the best (``young``).
    """
    between = 3600 / (rate * gpus) if rate else math.inf
    interval = interval or min(young(checkpoint, between), max(3600 * hours, 1))
    times = rate * gpus * hours
    lost = hours * checkpoint / interval + times * (interval / 2 + restart) / 3600
    return Losses(times, interval, lost)


def young(checkpoint: float, between: float) -> float:
    """Return the best interval between checkpoints to first order, in seconds of training.

    Young, 1974: A first order approximation to the optimum checkpoint interval, https://doi.org/10.1145/361147.361115

    Args:
        checkpoint: seconds in which training stops to write a checkpoint.
        between: mean seconds between two interruptions.
    """
    return math.sqrt(2 * checkpoint * between)


def daly(checkpoint: float, between: float) -> float:
    """Return the best interval between checkpoints to higher order, in seconds of training.

    It is more exact than ``young`` if interruptions are so frequent that a checkpoint takes a large part of the time between
    them. Daly, 2006: A higher order estimate of the optimum checkpoint interval for restart dumps, equation 37,
    https://doi.org/10.1016/j.future.2004.11.016

    Args:
        checkpoint: seconds in which training stops to write a checkpoint.
        between: mean seconds between two interruptions.
    """
    if checkpoint >= 2 * between:
        return between
    part = checkpoint / (2 * between)
    return young(checkpoint, between) * (1 + math.sqrt(part) / 3 + part / 9) - checkpoint


def goodput(interval: float, *, checkpoint: float, restart: float, between: float) -> float:
    """Return the share of the time in which training makes progress that an interruption does not destroy, between 0 and 1.

    This is Daly's model (2006, equation 20) of interruptions that are independent of each other and of the time. They also
    happen during checkpoints and restarts, and to work that is done twice.

    Args:
        interval: seconds of training between two checkpoints.
        checkpoint: seconds in which training stops to write a checkpoint.
        restart: seconds from an interruption until training goes on.
        between: mean seconds between two interruptions; infinite: there are none.
    """
    if math.isinf(between):
        return interval / (interval + checkpoint)
    exponent = (interval + checkpoint) / between
    if exponent + restart / between > 500:  # nothing is ever finished
        return 0.0
    return interval / (between * math.exp(restart / between) * math.expm1(exponent))
