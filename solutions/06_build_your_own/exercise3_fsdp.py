"""Build FSDP: each process stores a shard of every parameter, and has a layer in full only while it computes this layer.

N processes:  torchrun --standalone --nproc-per-node=2 solutions/06_build_your_own/exercise3_fsdp.py
Slurm:        srun --ntasks=1 --gpus=4 --cpus-per-task=32 solutions/06_build_your_own/exercise3_run_fsdp.sh
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map_only

from workshop.training.building import SEED, Log, batches, loss_of, parse_arguments, run
from workshop.training.decoder import Block, Transformer
from workshop.training.modules import describe, parts_of, places_of, put, require_same


class FSDP(nn.Module):
    """Shard the parameters of a module over the ranks, and gather one layer at a time to compute it.

    Between the steps, each parameter is a shard: the elements of one rank, as a vector. Create the optimizer afterwards. It must
    update each element without the others, as AdamW does. All ranks must compute the same layers in the same order.

    Args:
        module: any module, on its device, with parameters of one data type. All ranks get those of the first rank.
        layers: the classes of its layers. Parameters that are in none of them are gathered for the whole forward pass.
        compute_dtype: the type in which parameters are gathered and used; None: their own. Gradients are summed in their own.
        group: the ranks; None: all.

    Raises:
        ValueError: types or ranks differ, or (in ``forward``) a parameter was replaced, moved, frozen or unfrozen.
    """

    def __init__(self, module, layers=(), compute_dtype=None, group=None):
        super().__init__()
        if len({each.dtype for each in module.parameters()}) > 1:
            raise ValueError("FSDP needs parameters of one data type")
        require_same([*module.parameters(), *module.buffers()], group)
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), group_src=0, group=group)
        self.module, self.dtype, self.group = module, compute_dtype, group
        self.units = [Unit(self, part, parameters) for part, parameters in parts_of(module, layers)]
        self.order = []  # the units in the order of the forward pass
        self.wrapped = describe(module)

    def forward(self, *args, **kwargs):
        for unit in self.units:
            unit.free()  # what an earlier pass has gathered may be older than the last step
        if changed := self.wrapped ^ describe(self.module):
            name = min(changed, key=str)[0]
            raise ValueError(f"{name} was replaced, moved, frozen or unfrozen after FSDP() sharded it")
        return self.module(*args, **kwargs)

    def full_state_dict(self):
        """Return the state_dict of the module without sharding, on the CPU. All ranks must call this together."""
        state = {name: value.cpu() for name, value in self.module.state_dict().items()}
        shapes = {shard: shape for unit in self.units for shard, shape in zip(unit.shards, unit.shapes, strict=True)}
        for name, shard in self.module.named_parameters(remove_duplicate=False):
            shards = shard.new_empty(dist.get_world_size(self.group), len(shard))
            dist.all_gather_into_tensor(shards.view(-1), shard.detach(), self.group)
            state[name] = shards.view(-1)[: shapes[shard].numel()].view(shapes[shard]).cpu()
        return state


class Unit:
    """A layer, or the rest of the module: the parameters that are gathered and freed together."""

    def __init__(self, fsdp, part, parameters):
        self.fsdp, self.whole, self.shapes = fsdp, part is fsdp.module, [each.shape for each in parameters]
        self.world_size, rank = dist.get_world_size(fsdp.group), dist.get_rank(fsdp.group)
        rows = [self.divide(each.detach())[rank].clone() for each in parameters]
        self.shards = [nn.Parameter(row, each.requires_grad) for row, each in zip(rows, parameters, strict=True)]
        self.sizes = [len(each) for each in self.shards]
        self.work, self.places = None, places_of(parameters, fsdp.module)
        self.free()
        part.register_forward_pre_hook(self.before_forward, with_kwargs=True, prepend=True)
        part.register_forward_hook(self.after_forward, always_call=True)

    def divide(self, tensor):
        """Return a tensor as a matrix with one row for each rank, filled up with zeros."""
        return F.pad(tensor.flatten(), (0, -tensor.numel() % self.world_size)).view(self.world_size, -1)

    def convert(self, tensor):
        return tensor.to(self.fsdp.dtype) if tensor.is_floating_point() else tensor

    def before_forward(self, part, args, kwargs):
        put(Gather.apply(self, *self.shards), self.places)
        self.saving = torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)
        self.saving.__enter__()
        if self.fsdp.dtype:
            return tree_map_only(torch.Tensor, self.convert, (args, kwargs))

    def after_forward(self, part, args, output):
        self.saving.__exit__(None, None, None)
        self.free()
        for each in tree_leaves(output):
            if isinstance(each, torch.Tensor) and each.requires_grad:
                # The backward pass of this part begins here. Activation checkpointing then computes it again.
                each.register_hook(lambda _: put(self.gather(-1), self.places))

    def pack(self, tensor):
        """Called for each tensor that the backward pass needs. Instead of a gathered parameter, keep only which one it is."""
        number = self.numbers.get(tensor.untyped_storage().data_ptr())
        return tensor if number is None else (number, tensor.shape, tensor.stride(), tensor.storage_offset())

    def unpack(self, packed):
        return packed if isinstance(packed, torch.Tensor) else self.gather(-1)[packed[0]].as_strided(*packed[1:])

    def gather(self, step):
        """Return the parameters in full, and begin to gather those of the next unit; ``step``: -1 in the backward pass."""
        if self.full is None:
            self.start_gather()
            self.work.wait()
            pairs = zip(self.buffer.split(self.sizes, dim=1), self.shapes, strict=True)
            self.full = [torch.cat(list(rows))[: shape.numel()].view(shape) for rows, shape in pairs]
            for full, shard in zip(self.full, self.shards, strict=True):
                full.requires_grad_(shard.requires_grad)
            self.numbers = {each.untyped_storage().data_ptr(): number for number, each in enumerate(self.full)}
            self.work = self.buffer = None
            if step < 0:  # a layer without trained parameters is not freed when its gradients are ready
                torch.autograd.Variable._execution_engine.queue_callback(self.free)
            if self not in self.fsdp.order:
                self.fsdp.order.append(self)
            place = self.fsdp.order.index(self) + step
            if self.whole and step < 0:  # the backward pass begins outside of the layers, and continues in the last one
                place = len(self.fsdp.order) - 1
            if 0 <= place < len(self.fsdp.order):
                self.fsdp.order[place].start_gather()
        return self.full

    def start_gather(self):
        if self.full is None and self.work is None:
            own = torch.cat([each.detach() for each in self.shards]).to(self.fsdp.dtype or self.shards[0].dtype)
            self.buffer = own.new_empty(self.world_size, len(own))
            self.work = dist.all_gather_into_tensor(self.buffer.view(-1), own, group=self.fsdp.group, async_op=True)

    def free(self):
        if self.work:
            self.work.wait()
        self.full = self.work = self.buffer = None
        put(self.shards, self.places)


class Gather(torch.autograd.Function):
    """Gather the parameters of a unit; in the backward pass, average their gradients over the ranks and divide them."""

    @staticmethod
    def forward(ctx, unit, *shards):
        ctx.unit = unit
        ctx.set_materialize_grads(False)
        full = [each.view_as(each) for each in unit.gather(+1)]
        frozen = [each for each, shard in zip(full, shards, strict=True) if not shard.requires_grad]
        ctx.mark_non_differentiable(*frozen)
        return tuple(full)

    @staticmethod
    def backward(ctx, *gradients):
        unit = ctx.unit
        unit.free()
        trained = [number for number, shard in enumerate(unit.shards) if shard.requires_grad]
        used = torch.cat([unit.shards[number].new_full((1,), gradients[number] is not None) for number in trained])
        full = [used.new_zeros(unit.shapes[i]) if gradients[i] is None else gradients[i] for i in trained]
        rows = [used.expand(unit.world_size, -1), *(unit.divide(each).to(used.dtype) for each in full)]
        sent = torch.cat(rows, dim=1) / unit.world_size
        sums = sent.new_empty(sent.shape[1])
        dist.reduce_scatter_tensor(sums, sent.view(-1), group=unit.fsdp.group)
        uses, *pieces = sums.split([len(trained), *(unit.sizes[number] for number in trained)])
        mean = dict(zip(trained, pieces, strict=True))
        for number, use in zip(trained, uses, strict=True):
            if gradients[number] is None and use == 0:  # no rank has used this parameter
                del mean[number]
        return None, *map(mean.get, range(len(gradients)))


def options(parser):
    parser.add_argument("--pytorch", action="store_true", help="use PyTorch's fully_shard")
    parser.add_argument("--compute", choices=["bfloat16", "float16"], help="the type in which layers are gathered")


def train(device, args):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED)
    model = Transformer(args.config).to(device, args.dtype)
    if args.pytorch:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    else:
        model = FSDP(model, layers=[Block], compute_dtype=getattr(torch, args.compute) if args.compute else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    log = Log(args, device)
    for inputs, targets in batches(args):
        inputs, targets = inputs[rank::world_size].to(device), targets[rank::world_size].to(device)
        loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        log.step(loss)
    log.end()


if __name__ == "__main__":
    run(train, parse_arguments(__doc__, options))
