"""How often a large training is interrupted, how often to write a checkpoint, and how many hours both cost."""

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
    """

    rate: float = RATE
    interval: float = 0


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


def expected(
    gpus: int, hours: float, *, rate: float = RATE, checkpoint: float = 60, restart: float = 600, interval: float = 0
) -> Losses:
    """Return what to expect.

    The best interval is sqrt(2 x checkpoint x mean time between interruptions): Young, 1974, and Daly, 2006
    (https://doi.org/10.1016/j.future.2004.11.016). An interruption loses half an interval on average, and the restart.

    Args:
        gpus: the number of GPUs.
        hours: the length of the training without interruptions.
        rate: interruptions per hour and GPU.
        checkpoint: seconds in which training stops to write a checkpoint.
        restart: seconds from an interruption until training continues.
        interval: seconds between checkpoints; 0: the best.
    """
    between = 3600 / (rate * gpus) if rate else math.inf
    interval = interval or min(math.sqrt(2 * checkpoint * between), max(3600 * hours, 1))
    times = rate * gpus * hours
    lost = hours * checkpoint / interval + times * (interval / 2 + restart) / 3600
    return Losses(times, interval, lost)
