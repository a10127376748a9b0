"""A process group without other processes: this process is one rank of many, and its collectives return at once."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.parallel import distributed as ddp_module


@contextmanager
def world(rank: int, ranks: int) -> Iterator[None]:
    """Be one rank of many in a with-block, on PyTorch's fake process group."""
    join(rank, ranks)
    try:
        with ddp_of_fake_tensors():
            yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


init_process_group = dist.init_process_group  # a script's own call of it is replaced


def join(rank: int, ranks: int) -> None:
    """Join the fake process group as a rank."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)


@contextmanager
def ddp_of_fake_tensors() -> Iterator[None]:
    """Let DDP work with fake tensors, in three places where its C++ code reads values.

    DDP does not compare the shapes of the parameters between ranks. A communication hook calls the all-reduce, because the fake
    process group returns no result to C++. DDP keeps its first buckets: the new ones, after the first step, are in the order in
    which the gradients were ready, but have about the same sizes.
    """
    init = DDP.__init__

    def made(model, *args, **kwargs):
        init(model, *args, **kwargs)
        model.register_comm_hook(model.process_group, _average)
        model.reducer = _Reducer(model.reducer)

    with (
        mock.patch.object(ddp_module, "_verify_param_shape_across_processes", return_value=True),
        mock.patch.object(DDP, "__init__", made),
    ):
        yield


def _average(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the gradients in a bucket, as DDP does without a hook."""
    gradients = bucket.buffer().div_(group.size())
    dist.all_reduce(gradients, group=group)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(gradients)
    return done


class _Reducer:
    """The reducer of DDP, which never rebuilds its buckets."""

    def __init__(self, reducer):
        self._reducer = reducer

    def __getattr__(self, name):
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False
