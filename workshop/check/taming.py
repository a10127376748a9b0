"""Let a step be the same for several ranks with their batches and for one process with the joined batch.

Random numbers are the same for each sample of a batch, dropout changes nothing, BatchNorm uses its running statistics, and
autocast is off. What remains different is the work of the program: its loss, and what it does with the gradients.
"""

import random
import sys
from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch.nn import functional as F


def tame(batch: Callable[[], int], of_rank: Callable[[], int] = lambda: 0) -> None:
    """Replace the random functions of torch in this process, and seed all others as in every other process.

    ``batch`` returns the size of the present batch: random numbers are the same along the first dimension of this size, or else
    along the first dimension. ``of_rank`` returns the size that it had on a rank if it is a joined one: a program may draw as
    many numbers as its arguments name for a batch, and gets as many as the joined batch has.
    """
    torch.manual_seed(1)
    random.seed(1)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(1)
    number = count(1)
    rand, randn, randint = torch.rand, torch.randn, torch.randint

    def same_for_all(shape: Any, draw: Callable[..., torch.Tensor], **options: Any) -> torch.Tensor:
        """Return random numbers of this shape that are the same for each sample; a single number is the same at each call."""
        sizes = tuple(shape)
        samples = sizes.index(batch()) if batch() in sizes else 0
        generator = torch.Generator().manual_seed(next(number) if sizes else 0)
        one = draw((*sizes[:samples], *sizes[samples + 1 :]), generator)
        kept = {name: options[name] for name in ("dtype", "requires_grad") if options.get(name) is not None}
        whole = one.unsqueeze(samples).expand(sizes).clone() if sizes else one
        return whole.to(kept.get("dtype", whole.dtype)).requires_grad_(kept.get("requires_grad", False))

    def uniform(*shape: Any, **options: Any) -> torch.Tensor:
        return same_for_all(_shape(shape, options), lambda sizes, by: rand(sizes, generator=by), **options)

    def normal(*shape: Any, **options: Any) -> torch.Tensor:
        return same_for_all(_shape(shape, options), lambda sizes, by: randn(sizes, generator=by), **options)

    def integers(low: int, high: Any = None, size: Any = None, **options: Any) -> torch.Tensor:
        if not isinstance(high, int):  # randint(high, size)
            low, high, size = 0, low, high if size is None else size
        return same_for_all(
            _of_batch(size, batch(), of_rank()), lambda sizes, by: randint(low, high, sizes, generator=by), **options
        )

    def filled(draw: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def fill(self: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
            options.pop("generator", None)
            with torch.no_grad():
                return self.copy_(draw(self, *args, **options))

        return fill

    def asked(draw: Callable[..., torch.Tensor]) -> Any:
        return lambda *sizes, **options: draw(_of_batch(_shape(sizes, options), batch(), of_rank()), **options)

    torch.rand, torch.randn, torch.randint = asked(uniform), asked(normal), integers
    torch.rand_like = lambda like, **options: uniform(*like.shape, **{"dtype": like.dtype} | options)
    torch.randn_like = lambda like, **options: normal(*like.shape, **{"dtype": like.dtype} | options)
    torch.randperm = lambda n, **options: torch.arange(n)
    torch.bernoulli = lambda p, *_, **__: (p > 0.5).to(p.dtype)
    tensor: Any = torch.Tensor
    tensor.normal_ = filled(lambda own, mean=0.0, std=1.0: normal(*own.shape) * std + mean)
    tensor.uniform_ = filled(
        lambda own, low=0.0, high=1.0, **to: uniform(*own.shape) * (to.get("to", high) - low) + low
    )
    tensor.bernoulli_ = filled(lambda own, p=0.5: (torch.as_tensor(p) > 0.5).to(own.dtype).expand(own.shape))
    _without_chance()


def _of_batch(shape: Any, joined: int, of_rank: int) -> tuple[int, ...]:
    """The shape that a program asks for, with the size of the joined batch in place of that of a rank."""
    sizes = tuple(shape)
    meant = sizes and joined and sizes[0] == of_rank and joined not in sizes
    return (joined, *sizes[1:]) if meant else sizes


def _shape(sizes: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The shape in the arguments of a function such as ``torch.rand``."""
    sizes = sizes or (options["size"],)
    return sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes


def _without_chance() -> None:
    """Disable dropout and autocast, and let BatchNorm use its running statistics."""
    functional: Any = F
    enter = torch.autocast.__enter__
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"):
        setattr(functional, name, lambda input, *_, **__: input)
    attention, batch_norm = functional.scaled_dot_product_attention, functional.batch_norm

    def without_dropout(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *rest: Any, **more: Any
    ) -> Any:
        return attention(query, key, value, attn_mask, 0.0, *rest, **more)

    def with_running(
        input: Any,
        mean: Any,
        var: Any,
        weight: Any = None,
        bias: Any = None,
        training: bool = False,
        *rest: Any,
        **more: Any,
    ) -> Any:
        return batch_norm(input, mean, var, weight, bias, training and mean is None, *rest, **more)

    def in_full(self: Any) -> Any:
        self._enabled = False  # here, because Accelerate creates the context before the first batch
        return enter(self)

    functional.scaled_dot_product_attention, functional.batch_norm = without_dropout, with_running
    torch.autocast.__enter__ = in_full
    if amp := sys.modules.get("lightning.fabric.plugins.precision.amp"):
        amp.MixedPrecision.convert_input = lambda _, data: data  # of Fabric, to the type of autocast
