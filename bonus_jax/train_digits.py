"""Train the small CNN of stages 01 and 02 with JAX on any number of devices, with the same parameters, batches and losses.
The comments name the corresponding code of solutions/02_pytorch_ddp/exercise2_multigpu_torchrun.py.

One process:  python bonus_jax/train_digits.py --epochs 5
N processes:  NPROC=2 bonus_jax/run_jax.sh train_digits.py --epochs 5
Slurm:        srun --ntasks=2 python bonus_jax/train_digits.py --epochs 5
"""

import os
import time
from functools import partial
from pathlib import Path

from workshop.training.launcher import exit_with_launcher

exit_with_launcher()  # this process must end if torchrun is killed (kill -9); before the slow imports

from meeting import meet  # isort: skip - prints one sentence if JAX is not installed
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision import transforms
from tqdm import tqdm

from workshop.data import load_dataset
from workshop.errors import UserError
from workshop.training.arguments import ArgumentParser, check_arguments, positive_int, require_writable
from workshop.training.logs import EpochLog
from workshop.training.models import SmallCNN

SEED = 42
OPTIMIZER = optax.adamw(1e-3, weight_decay=1e-2)  # the default of torch.optim.AdamW; the default of optax is 1e-4


def main():
    args = parse_arguments()
    meet()  # dist.init_process_group
    train(args)


def parse_arguments():
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=positive_int, default=5, help="passes over the training set")
    parser.add_argument("--batch-size", type=positive_int, default=64, help="samples per batch and process")
    parser.add_argument("--output", default="runs/train_digits.jsonl", help="file for the losses of all steps")
    parser.add_argument("--dataset", default="digits", help="digits, or mnist after ./workshop.sh fetch mnist")
    args = parser.parse_args()
    try:
        if not args.output.endswith(".jsonl"):
            raise UserError(f"--output {args.output}: its name has to end in .jsonl")
        require_writable(f"--output {args.output}", Path(args.output).parent)
    except UserError as error:
        parser.error(error)
    check_arguments(
        parser, args, world_size=int(os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_STEP_NUM_TASKS", 1))
    )
    return args


def train(args):
    rank, world_size = jax.process_index(), jax.process_count()  # dist.get_rank(), dist.get_world_size()
    if args.batch_size % jax.local_device_count():
        devices = jax.local_device_count()
        ArgumentParser().error(f"--batch-size {args.batch_size} does not divide among the process's {devices} devices")
    # The mesh is what PyTorch calls a DeviceMesh. It has one dimension, "data", which contains all devices of all processes.
    # With AxisType.Auto, the compiler chooses the communication.
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    split, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())  # DTensor's Shard(0) and Replicate()

    # The initial parameters are those of single_gpu.py. In JAX, a model is a dictionary of arrays, and functions that take it
    # as an argument.
    torch.manual_seed(SEED)
    params = {name: weight.numpy() for name, weight in SmallCNN().state_dict().items()}
    params = jax.device_put(params, whole)  # the whole model on each device, as with DDP(model)
    state = jax.jit(OPTIMIZER.init, out_shardings=whole)(params)
    log = EpochLog(args.output, args.epochs, jax.default_backend(), processes=world_size)
    if rank == 0:
        print(f"training on {jax.default_backend()}: {world_size} processes, {jax.device_count()} devices", flush=True)

    # JAX has no data loaders, so this program uses PyTorch's. The sampler uses the same permutation as single_gpu.py and deals
    # it to the ranks in turn.
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.5,), (0.5,))])
    train_set, test_set = load_dataset(args.dataset, transform)
    sampler = DistributedSampler(train_set, world_size, rank, seed=SEED, drop_last=True)
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)
    test_loader = DataLoader(Subset(test_set, range(rank, len(test_set), world_size)), args.batch_size)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        start = time.perf_counter()
        losses = []
        for batch in tqdm(train_loader, leave=False, disable=rank > 0 or None):
            # The global batch is one sharded array, and each process provides its own part.
            images, labels = (jax.make_array_from_process_local_data(split, part.numpy()) for part in batch)
            params, state, loss = train_step(params, state, images, labels)
            losses.append(loss)  # not float(loss), which would wait for the device, like item()
        losses = [float(loss) for loss in losses]
        seconds = time.perf_counter() - start
        accuracy = evaluate(params, test_loader)
        if rank == 0:
            log.write(epoch, losses, accuracy, len(losses) * args.batch_size * world_size / seconds)


def forward(params, images):
    """Compute the forward pass of SmallCNN, with the parameters as an argument."""
    x = images
    for layer in ("conv1", "conv2"):
        x = jax.lax.conv(x, params[f"{layer}.weight"], window_strides=(1, 1), padding="VALID")
        x = jax.nn.relu(x + params[f"{layer}.bias"][:, None, None])
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")  # max_pool2d
    x = jax.nn.relu(x.reshape(len(x), -1) @ params["fc1.weight"].T + params["fc1.bias"])
    return x @ params["fc2.weight"].T + params["fc2.bias"]


def loss_of(params, images, labels):
    return optax.softmax_cross_entropy_with_integer_labels(forward(params, images), labels).mean()


# This function is written for the global batch, as if there were one device. The mean over a sharded batch needs all shards, so
# the compiler inserts the all-reduce that DDP does in backward(). donate_argnums: the new parameters and optimizer state may
# reuse the memory of the old ones.
@partial(jax.jit, donate_argnums=(0, 1))
def train_step(params, state, images, labels):
    """Return the new parameters, the new optimizer state, and the loss over the global batch. Nothing is changed in place."""
    loss, gradients = jax.value_and_grad(loss_of)(params, images, labels)  # loss.backward()
    updates, state = OPTIMIZER.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss  # optimizer.step()


@jax.jit
def count_correct(params, images, labels):
    return (forward(params, images).argmax(axis=1) == labels).sum()


def evaluate(params, loader):
    """Return the accuracy over the whole test set, between 0 and 1."""
    # Use the local copy of the parameters, so that each process counts on its own and waits for the others only at the end.
    params = jax.tree.map(lambda weight: weight.addressable_data(0), params)
    counts = np.zeros(2, dtype=int)
    for images, labels in loader:
        counts += [int(count_correct(params, images.numpy(), labels.numpy())), len(labels)]
    correct, total = multihost_utils.process_allgather(counts).reshape(-1, 2).sum(axis=0)
    return float(correct / total)


if __name__ == "__main__":
    main()
