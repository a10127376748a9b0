"""The strategies of the course beside each other: the bytes that ``workshop memory`` shows.

DDP, ZeRO, FSDP and LoRA divide only parameters, gradients and optimizer state. ``workshop.plan.memory`` counts layouts that also
divide the model, with the same bytes for each layer; a test compares the two where they describe the same training.
"""

from dataclasses import asdict, fields

from workshop.training.memory import Memory, estimate
from workshop.training.transformer import Sizes

# The rows of the table: the name, and the strategy for ``estimate``.
PLANS = (
    ("DDP", "ddp"),
    ("ZeRO-1", "zero1"),
    ("ZeRO-2", "zero2"),
    ("ZeRO-3", "zero3"),
    ("FSDP", "fsdp"),
    ("LoRA", "lora"),
)
SAME_ON_ANY_NUMBER = ("DDP", "LoRA")
PARTS = [field.name for field in fields(Memory) if field.name != "peak"]  # peak: the most of the others at one time


def predictions(sizes: Sizes, counts: list[int], settings: dict) -> list[dict]:
    """Return a row for each strategy and number of GPUs: bytes by part, and totals also with checkpointing and offload.

    Args:
        sizes: the sizes of the model.
        counts: the numbers of GPUs.
        settings: ``batch_size`` and ``sequence_length``.
    """
    rows = []
    for name, strategy in PLANS:
        for count in counts if name not in SAME_ON_ANY_NUMBER else [counts[-1]]:
            if count == 1 and len(counts) > 1 and strategy in ("zero1", "zero2"):
                continue  # on one GPU nothing is sharded: the same as ZeRO-3
            plain = estimate(sizes, strategy, count, **settings)
            less = estimate(sizes, strategy, count, checkpointing=True, **settings)
            offloaded = estimate(sizes, strategy, count, checkpointing=True, offload=True, **settings)
            rows.append(
                {
                    "strategy": name,
                    "gpus": count,
                    **asdict(plain),
                    "total": plain.total,
                    "with_checkpointing": less.total,
                    "with_checkpointing_and_offload": offloaded.total,
                }
            )
    return rows
