"""Train ViT-B/16 with DeepSpeed on ImageNet-sized images, generated on the device or read from a folder.
It is the training of slurm-multinode/train_at_scale.py --model vit_b_16, without the measurements.

One process:  torchrun --standalone --nproc-per-node=1 05_deepspeed/zero_vit.py
N processes:  torchrun --standalone --nproc-per-node=4 05_deepspeed/zero_vit.py --config 05_deepspeed/zero2.json
Slurm:        srun --ntasks=1 --gpus=4 --cpus-per-task=32 torchrun --standalone --nproc-per-node=4 zero_vit.py
"""

import json
import os
import time
from pathlib import Path

from workshop.training.deepspeed import load_config, require_deepspeed
from workshop.training.launcher import exit_with_launcher

exit_with_launcher()  # this process must end if torchrun is killed (kill -9); before the slow imports
require_deepspeed()  # ends with one line if DeepSpeed is missing; selects the CPU on a machine without a GPU

import deepspeed
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn import functional as F
from torchvision.models import get_model

from workshop.data.images import image_batches, open_images, synthetic_batches
from workshop.errors import UserError
from workshop.tensors import bf16_is_fast
from workshop.training.arguments import ArgumentParser, positive_int, require_writable

SEED = 42
CONFIG = os.path.join(os.path.dirname(os.path.abspath(__file__)), "zero3.json")


@record  # torchrun then shows the traceback of the rank that failed first
def main():
    args = parse_arguments()
    device = choose_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(dist.get_default_backend_for_device(device))
    try:
        train(device, args)
    finally:
        dist.destroy_process_group()


def parse_arguments():
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    # On a CPU a step with 64 images of ImageNet's size would take a minute.
    batch_size, steps, size = (64, 100, 224) if torch.accelerator.is_available() else (4, 10, 64)
    parser.add_argument("--config", default=CONFIG, help="JSON file with the configuration of DeepSpeed")
    parser.add_argument(
        "--data",
        help="folder, .zip or .h5 file with images in train/CLASS/; without it, images are generated on the device",
    )
    parser.add_argument("--batch-size", type=positive_int, default=batch_size, help="images per step and process")
    parser.add_argument("--steps", type=positive_int, default=steps)
    parser.add_argument(
        "--image-size", type=int, choices=[64, 128, 224], default=size, help="height and width of the images in pixels"
    )
    parser.add_argument("--output", default="runs/zero_vit.json", help="JSON file for the losses")
    args = parser.parse_args()
    world_size = int(os.environ.get("WORLD_SIZE", 0))
    try:
        if world_size < 1:
            raise UserError("start this program with torchrun: torchrun --standalone --nproc-per-node=2 zero_vit.py")
        args.config = load_config(args.config, args.batch_size, world_size)
        args.images = open_images(args.data, args.image_size, args.batch_size * world_size) if args.data else None
        require_writable(f"--output {args.output}", Path(args.output).absolute().parent)
    except UserError as error:
        parser.error(error)
    return args


def choose_device(local_rank):
    # In a CUDA build, current_accelerator() returns "cuda" even without a GPU, so ask is_available() first.
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    torch.accelerator.set_device_index(local_rank % torch.accelerator.device_count())  # 0 if only one GPU is visible
    return torch.accelerator.current_accelerator()


def train(device, args):
    torch.manual_seed(SEED)  # the same initial parameters in every run
    # (If a model does not fit into one process, create it under deepspeed.zero.Init(), which shards each parameter at once.)
    model = get_model("vit_b_16", image_size=args.image_size).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    precision = {"torch_autocast": {"enabled": bf16_is_fast(device), "dtype": "bfloat16"}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=args.config | precision)
    if args.images:
        batches = image_batches(args.images, args.batch_size, device, SEED)
    else:
        batches = synthetic_batches(args.batch_size, args.image_size, device, SEED)

    losses = torch.zeros(args.steps, device=device)
    report_every, start = max(1, args.steps // 10), time.perf_counter()
    for step in range(args.steps):
        images, labels = next(batches)
        loss = F.cross_entropy(engine(images), labels)
        engine.backward(loss)
        engine.step()
        losses[step] = loss.detach()
        if (step + 1) % report_every == 0:
            mean = losses[step + 1 - report_every : step + 1].mean()
            dist.all_reduce(mean, dist.ReduceOp.AVG)
            mean, seconds = mean.item(), time.perf_counter() - start
            if dist.get_rank() == 0:
                rate = report_every * args.batch_size * dist.get_world_size() / seconds
                print(f"step {step + 1}/{args.steps} | loss {mean:.4f} | {rate:,.1f} images/s", flush=True)
            start = time.perf_counter()
    dist.all_reduce(losses, dist.ReduceOp.AVG)
    if dist.get_rank() == 0:
        Path(args.output).parent.mkdir(parents=True, exist_ok=True)
        Path(args.output).write_text(json.dumps({"processes": dist.get_world_size(), "losses": losses.tolist()}))


if __name__ == "__main__":
    main()
