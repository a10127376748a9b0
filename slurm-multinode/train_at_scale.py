"""Train ResNet-50 or ViT-B/16 on any number of nodes, and measure the cost of communicating the gradients.
Without --data, the images are generated on the device: ten patterns with added noise, which a model can learn to distinguish.

One process:  torchrun --standalone --nproc-per-node=1 slurm-multinode/train_at_scale.py
N processes:  torchrun --standalone --nproc-per-node=4 slurm-multinode/train_at_scale.py --model vit_b_16 --compile
Slurm:        srun --ntasks=1 --gpus=4 --cpus-per-task=32 slurm-multinode/run_train_at_scale.sh --data /path/to/imagenet
"""

import json
import os
import statistics
import sys
from contextlib import nullcontext
from functools import partial

from workshop.training.launcher import exit_with_launcher

exit_with_launcher()  # this process must end if torchrun is killed (kill -9); before the slow imports

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torchvision.models import get_model
from torchvision.models.resnet import Bottleneck
from torchvision.models.vision_transformer import EncoderBlock

from workshop.data.images import image_batches, open_images, synthetic_batches
from workshop.errors import UserError
from workshop.measure.collectives import enable_network_report, network_report
from workshop.measure.exchange import measure_exchange
from workshop.run.machine import machine
from workshop.tensors import bf16_is_fast
from workshop.training.arguments import PREFLIGHT, ArgumentParser, check_averaging, positive_int
from workshop.training.device import peak_memory, synchronized_time

SEED = 42


@record  # torchrun then shows the traceback of the rank that failed first
def main():
    args = parse_arguments()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])  # torchrun sets these variables
    device = choose_device(int(os.environ["LOCAL_RANK"]))
    enable_network_report()  # lets NCCL log its connections, which network_report() evaluates
    dist.init_process_group(dist.get_default_backend_for_device(device))
    try:
        train(rank, world_size, device, args)
    finally:
        dist.destroy_process_group()


def parse_arguments():
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    # On a CPU a step with 64 images of ImageNet's size would take a minute.
    batch_size, steps, size = (64, 100, 224) if torch.accelerator.is_available() else (8, 20, 64)
    parser.add_argument("--model", choices=["resnet50", "vit_b_16"], default="resnet50", help="model from torchvision")
    parser.add_argument(
        "--strategy",
        choices=["ddp", "fsdp"],
        default="ddp",
        help="each process keeps a full copy of the model (ddp) or a shard (fsdp)",
    )
    parser.add_argument(
        "--data",
        help="folder, .zip or .h5 file with images in train/CLASS/; without it, images are generated on the device",
    )
    parser.add_argument("--batch-size", type=positive_int, default=batch_size, help="images per batch and process")
    parser.add_argument("--accumulate", type=positive_int, default=1, help="batches per step")
    parser.add_argument(
        "--steps",
        type=positive_int,
        default=steps,
        help="training steps; with DDP, about the same number of steps then follow, which measure the communication",
    )
    parser.add_argument(
        "--compile", action="store_true", help="compile the model; the first step then takes about a minute"
    )
    parser.add_argument(
        "--image-size", type=int, choices=[64, 128, 224], default=size, help="height and width of the images in pixels"
    )
    parser.add_argument("--output", help="JSON file for the figures; None: runs/scale-PROCESSES.json")
    args = parser.parse_args()
    world_size = int(os.environ.get("WORLD_SIZE", 0))
    if world_size < 1:
        parser.error("start this program with torchrun: torchrun --standalone --nproc-per-node=2 " + sys.argv[0])
    if args.strategy == "fsdp":
        check_averaging(parser)
    try:
        smallest = args.batch_size * args.accumulate * world_size
        args.images = open_images(args.data, args.image_size, smallest) if args.data else None
        args.output = args.output or f"runs/scale-{world_size}.json"
        os.makedirs(os.path.dirname(args.output) or ".", exist_ok=True)
    except UserError as error:
        parser.error(f"--data {error}")
    except OSError as error:
        parser.error(f"--output {args.output}: {error.strerror}")
    if os.environ.get(PREFLIGHT):
        sys.exit(0)
    return args


def choose_device(local_rank):
    # In a CUDA build, current_accelerator() returns "cuda" even without a GPU, so ask is_available() first.
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    torch.accelerator.set_device_index(local_rank % torch.accelerator.device_count())  # 0 if only one GPU is visible
    return torch.accelerator.current_accelerator()


def train(rank, world_size, device, args):
    torch.manual_seed(SEED)  # the same initial parameters in every run
    options = {"image_size": args.image_size} if args.model == "vit_b_16" else {}
    # BatchNorm in ResNet-50 normalizes over the batch of one process, so the losses depend on the number of processes. The
    # losses of ViT-B/16, which has no BatchNorm, do not.
    # Convolutions are faster with channels_last, which stores the channels of a pixel next to each other.
    model = get_model(args.model, **options).to(device, memory_format=torch.channels_last)
    model = distribute(model, args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if args.images:
        batches = image_batches(args.images, args.batch_size, device, SEED)
    else:
        batches = synthetic_batches(args.batch_size, args.image_size, device, SEED)
    args.bf16 = bf16_is_fast(device)
    network = network_report()
    if rank == 0:
        gpus = torch.accelerator.device_count()
        print(
            f"training {args.model} on {device.type}: {'bfloat16' if args.bf16 else 'float32'}, channels_last, ", end=""
        )
        print(f"compiled: {args.compile}, {world_size} processes, {gpus} GPUs here\n{network}", flush=True)

    losses, rates = torch.zeros(args.steps, device=device), []
    for first in range(0, args.steps, max(1, args.steps // 10)):
        last = min(first + max(1, args.steps // 10), args.steps)
        start = synchronized_time(device)
        for step in range(first, last):
            losses[step] = train_step(model, batches, optimizer, args)
        seconds = synchronized_time(device) - start
        rates.append((last - first) * args.accumulate * args.batch_size * world_size / seconds)
        dist.all_reduce(losses[first:last], dist.ReduceOp.AVG)
        if rank == 0:
            loss = losses[first:last].mean()
            print(f"step {last}/{args.steps} | loss {loss:.4f} | {rates[-1]:,.1f} images/s", flush=True)
    memory = torch.tensor(peak_memory(device), device=device)
    dist.all_reduce(memory, dist.ReduceOp.MAX)

    # The measurement also takes steps without communication, in which each copy of the model has different gradients. With a
    # learning rate of 0 no parameter changes, so the copies stay equal.
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    cost = {}
    if world_size > 1 and args.strategy == "ddp":  # FSDP cannot take a step without communicating gradients
        step = partial(train_step, model, batches, optimizer, args)
        cost = measure_exchange(step, args.batch_size * args.accumulate, max(1, args.steps // 10), device)
    if rank == 0:
        figures = {
            "machine": machine(),
            **{name: value for name, value in vars(args).items() if name not in ("images", "output")},
            "device": device.type,
            "network": network,
            "nodes": world_size // int(os.environ["LOCAL_WORLD_SIZE"]),
            "processes": world_size,
            # without the first steps (warm-up, compilation)
            "samples_per_second": statistics.median(rates[1:] or rates),
            "peak_memory": memory.item(),
            **cost,
            "losses": losses.tolist(),
        }
        report(figures, args.output)


def distribute(model, args):
    """Prepare the model for several processes: DDP keeps a full copy in each process, FSDP only a shard."""
    if args.strategy == "ddp":
        model = DDP(model)  # the same parameters, but backward() averages the gradients over all processes
        if args.compile:
            model.compile()  # after DDP, so that the graph is split at DDP's buckets and communication overlaps with backward()
        return model
    model = model.to(memory_format=torch.contiguous_format)  # FSDP needs contiguous parameters
    for block in [module for module in model.modules() if isinstance(module, (Bottleneck, EncoderBlock))]:
        if args.compile:
            block.compile()
        fully_shard(block)  # one communication group: gathered for the forward and the backward pass, freed after each
    return fully_shard(model)  # the rest: the first and the last layers


def keeps_to_itself(model):
    """Return a context in which each process accumulates its gradients without communicating them."""
    if isinstance(model, DDP):
        return model.no_sync()
    model.set_requires_gradient_sync(False)
    return nullcontext()


def train_step(model, batches, optimizer, args, exchange=True):
    """Take one optimizer step with the next `accumulate` batches and return its loss."""
    step_loss = 0
    for number in range(args.accumulate):
        images, labels = next(batches)
        images = images.to(memory_format=torch.channels_last)
        # Gradients add up until zero_grad(), so communicate them only in the backward pass of the last batch of a step.
        last = exchange and number + 1 == args.accumulate
        if last and args.strategy == "fsdp":
            model.set_requires_gradient_sync(True)
        with nullcontext() if last else keeps_to_itself(model):
            with torch.autocast(images.device.type, torch.bfloat16, enabled=args.bf16):
                loss = F.cross_entropy(model(images), labels) / args.accumulate  # the mean over all batches of the step
            loss.backward()
        step_loss += loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    return step_loss


def report(figures, output):
    """Print the figures of a run, and write them as JSON."""
    print("{samples_per_second:,.1f} images/s;".format(**figures), end=" ")
    print(f"each process needed at most {figures['peak_memory'] / 2**30:.2f} GiB of memory")
    if "efficiency" in figures:
        line = "{with_exchange:,.1f} images/s with the exchange of gradients, {without_exchange:,.1f} without it: "
        line += "efficiency {efficiency:.1%}, communication {communication:.1%} of each step"
        print(line.format(**figures))
        for sentence in figures["stragglers"]:
            print(f"slow: {sentence}")
    with open(output + ".tmp", "w") as file:
        json.dump(figures, file, indent=1)
    os.replace(output + ".tmp", output)


if __name__ == "__main__":
    main()
