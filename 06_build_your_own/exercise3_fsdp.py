"""Exercise 3: build FSDP. Each process stores a shard of every parameter, and gathers a layer only while it computes it.
This program works as delivered, but each rank has the whole model in full during a step.
Do the TODOs in order. Run and check the program after each TODO.

Run it:    06_build_your_own/exercise3_run_fsdp.sh --steps 40
Check it:  ./workshop.sh check 06_build_your_own/exercise3_fsdp.py
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
        # TODO 1: Gather each layer alone, so that a rank never has the whole model in full. Look up: parts_of.
        self.units = [Unit(self, module, list(module.parameters()))]
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
        # TODO 2: Free the gathered parameters after the forward pass of the part. Autograd must not keep them either: let it keep
        # only the number of the parameter, and gather the part again when the backward pass needs it. Activation checkpointing
        # computes a part again in the backward pass, so the module must contain the gathered parameters then.
        # Look up: torch.autograd.graph.saved_tensors_hooks, Tensor.as_strided, Tensor.register_hook.
        if self.fsdp.dtype:
            return tree_map_only(torch.Tensor, self.convert, (args, kwargs))

    def after_forward(self, part, args, output):
        self.free()  # TODO 2: autograd still keeps the gathered parameters until the backward pass

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
            # TODO 3: Begin to gather the next unit, so that it is ready when this one has been computed: in the forward pass the
            # next one, in the backward pass the previous one. Remember the order of the first forward pass.
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
        # TODO 4: Each rank needs only the sums for its shards. Do not send the others, and send all gradients of the unit in one
        # call. Look up: torch.distributed.reduce_scatter_tensor.
        uses, *sums = [each.to(used.dtype, copy=True) / unit.world_size for each in (used, *full)]
        for each in (uses, *sums):
            dist.all_reduce(each, group=unit.fsdp.group)
        pieces = [unit.divide(each)[dist.get_rank(unit.fsdp.group)].clone() for each in sums]
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
