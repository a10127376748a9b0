"""Build ZeRO stage 1: each process stores the optimizer state of some of the parameters, updates them, and sends them to all.

N processes:  torchrun --standalone --nproc-per-node=2 solutions/06_build_your_own/exercise2_zero1.py
Slurm:        srun --ntasks=1 --gpus=4 --cpus-per-task=32 solutions/06_build_your_own/exercise2_run_zero1.sh
"""

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from workshop.training.building import SEED, Log, batches, loss_of, parse_arguments, run
from workshop.training.decoder import Transformer
from workshop.training.modules import require_same


class ShardedOptimizer(torch.optim.Optimizer):
    """Divide the optimizer state over the ranks: each rank updates its own parameters, and sends them to the others.

    Args:
        parameters: parameters or parameter groups, the same on all ranks. Their gradients must be equal on all ranks.
        optimizer_class: a class of ``torch.optim``, or a similar one, that updates each parameter without the others.
        group: the ranks; None: all.
        options: arguments for ``optimizer_class``.

    Raises:
        ValueError: the parameters differ between the ranks, or the class cannot update some parameters without the others.
    """

    def __init__(self, parameters, optimizer_class, group=None, **options):
        if optimizer_class is torch.optim.LBFGS:
            raise ValueError("LBFGS computes with all parameters at once: its state cannot be divided over the ranks")
        self.group, self.inner = group, None
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.owners = {}  # parameter -> the rank that updates it
        super().__init__(parameters, options)
        require_same(self.owners, group)
        self.inner = optimizer_class([self.own_part(each) for each in self.param_groups], **options)
        self.state, self.defaults = self.inner.state, self.inner.defaults
        for ours, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            ours.update({name: value for name, value in inner.items() if name not in ours})  # the default options

    def add_param_group(self, param_group):
        """Add a group of parameters."""
        super().add_param_group(param_group)
        for parameter in sorted(self.param_groups[-1]["params"], key=torch.numel, reverse=True):
            sizes = [0] * self.world_size
            for each, owner in self.owners.items():
                sizes[owner] += each.numel()
            self.owners[parameter] = sizes.index(min(sizes))  # the rank with the fewest elements so far
        if self.inner:
            self.inner.add_param_group(self.own_part(self.param_groups[-1]))

    def own_part(self, param_group):
        return {**param_group, "params": [each for each in param_group["params"] if self.owners[each] == self.rank]}

    def step(self, closure=None):
        for ours, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            # A schedule of the learning rate changes our groups.
            inner.update({name: value for name, value in ours.items() if name != "params"})
        loss = self.inner.step(closure)
        self.share_parameters()
        return loss

    @torch.no_grad()
    def share_parameters(self):
        """Send the updated parameters to all ranks."""
        trained = [parameter for parameter in self.owners if parameter.requires_grad]
        sent = []
        for rank, dtype in sorted({(self.owners[each], each.dtype) for each in trained}, key=str):
            parameters = [each for each in trained if (self.owners[each], each.dtype) == (rank, dtype)]
            together = torch.cat([each.flatten() for each in parameters])
            work = dist.broadcast(together, group_src=rank, group=self.group, async_op=True)
            sent.append((parameters, together, work))
        for parameters, together, work in sent:
            work.wait()
            for each, values in zip(parameters, together.split([each.numel() for each in parameters]), strict=True):
                each.copy_(values.view_as(each))

    def state_dict(self):
        """Return the state of the optimizer. All ranks must call this together."""
        full = super().state_dict()  # with the state of this rank's parameters
        everyone = [None] * self.world_size
        dist.all_gather_object(everyone, tree_map_only(torch.Tensor, torch.Tensor.cpu, full["state"]), self.group)
        full["state"] = {number: state for each in everyone for number, state in sorted(each.items())}
        return full

    def load_state_dict(self, state_dict):
        """Load a state from ``state_dict``, or from ``optimizer_class`` itself, on any number of ranks."""
        super().load_state_dict(state_dict)  # the state of all parameters
        own = {parameter: state for parameter, state in self.state.items() if self.owners[parameter] == self.rank}
        self.inner.state.clear()
        self.inner.state.update(own)
        self.state = self.inner.state


def options(parser):
    parser.add_argument("--pytorch", action="store_true", help="use PyTorch's ZeroRedundancyOptimizer")


def train(device, args):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED)
    model = DistributedDataParallel(Transformer(args.config).to(device, args.dtype))  # averages the gradients
    sharded = ZeroRedundancyOptimizer if args.pytorch else ShardedOptimizer
    optimizer = sharded(model.parameters(), torch.optim.AdamW, lr=3e-3)
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
