"""The peak of the memory of a training step, without this memory: fake tensors have sizes, but no values."""

import weakref
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint
from transformers import LlamaForCausalLM

from workshop.measure.language_model import make_model
from workshop.tensors import own_part


class Allocated(TorchDispatchMode):
    """Add up the bytes of all storages that exist.

    Attributes:
        now, peak: the bytes at this moment, and the most so far.
    """

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.sizes = {}  # by storage: a weak reference, and the bytes

    def add(self, tensor):
        storage = own_part(tensor).untyped_storage()
        key = storage._cdata
        if key not in self.sizes:
            self.sizes[key] = [weakref.ref(storage, lambda _: self.change(-self.sizes.pop(key)[1])), storage.nbytes()]
            self.change(storage.nbytes())

    def change(self, by):
        self.now += by
        self.peak = max(self.peak, self.now)

    def resize(self, original, storage, size):
        """FSDP frees gathered parameters by ``resize_(0)``."""
        result = original(storage, size)
        if entry := self.sizes.get(storage._cdata):
            self.change(storage.nbytes() - entry[1])
            entry[1] = storage.nbytes()
        return result

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, self.add, result)
        return result


def peak_of_a_step(sizes, strategy, processes, batch_size, sequence_length, checkpointing=False, foreach=False) -> int:
    """Return the most bytes in one of these processes during a step as in stage 04, without the buckets of DDP."""
    dist.init_process_group("fake", rank=0, world_size=processes, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (processes,))
        config = make_model(sizes).config
        fake, allocated = FakeTensorMode(allow_non_fake_inputs=True), Allocated()
        with fake:
            model = LlamaForCausalLM(config)
            batch = torch.randint(sizes.vocabulary, (batch_size, sequence_length))
        if checkpointing:
            for layer in model.model.layers:
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
        if strategy == "fsdp":
            for part in (*model.model.layers, model):
                fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32))
        for parameter in model.parameters():
            allocated.add(parameter)
        original = torch.UntypedStorage.resize_
        resize = lambda storage, size: allocated.resize(original, storage, size)  # noqa: E731
        with fake, mock.patch.object(torch.UntypedStorage, "resize_", resize), allocated:
            optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
            for _ in range(2):  # the optimizer state exists after the first step
                allocated.peak = allocated.now
                with torch.autocast("cpu", torch.bfloat16, enabled=strategy == "ddp"):
                    loss = model(input_ids=batch, labels=batch, use_cache=False).loss
                loss.backward()
                del loss
                optimizer.step()
                optimizer.zero_grad()
        return allocated.peak
    finally:
        dist.destroy_process_group()
