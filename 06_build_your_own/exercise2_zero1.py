"""Exercise 2: build ZeRO stage 1. Each process updates some of the parameters, and stores the optimizer state of these only.
This program works as delivered, but the first rank stores the whole optimizer state.
Do the TODOs in order. Run and check the program after each TODO.

Run it:    06_build_your_own/exercise2_run_zero1.sh --steps 40
Check it:  ./workshop.sh check 06_build_your_own/exercise2_zero1.py
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
        # TODO 1: Each parameter is updated by one rank, which alone stores its optimizer state. All ranks must choose the same
        # rank for it, and all ranks must get about the same number of elements, also if one parameter is much larger than the
        # others. Look up: ZeroRedundancyOptimizer.
        for parameter in self.param_groups[-1]["params"]:
            self.owners[parameter] = 0  # the first rank updates all parameters
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
        # TODO 2: Each rank sends all of its parameters of one data type in one call, and starts the next call without waiting
        # for it. Leave out parameters that are not trained. Look up: torch.cat, Tensor.split, async_op.
        for parameter, owner in self.owners.items():
            dist.broadcast(parameter, group_src=owner, group=self.group)

    def state_dict(self):
        """Return the state of the optimizer. All ranks must call this together."""
        # TODO 3: Return the state that optimizer_class would have in one process, so that rank 0 can save all of it. Without
        # this, a checkpoint contains the state of one rank. Look up: torch.distributed.all_gather_object.
        return super().state_dict()

    def load_state_dict(self, state_dict):
        """Load a state from ``state_dict``, or from ``optimizer_class`` itself, on any number of ranks."""
        super().load_state_dict(state_dict)  # the state of all parameters
        own = self.state  # TODO 3: keep only the state of the parameters that this rank updates
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
