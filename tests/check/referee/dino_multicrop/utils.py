"""Process group, schedules and checkpoints."""
import math
import os

import torch
import torch.distributed as dist


def init_distributed():
    """Joins the group that torchrun describes in the environment; returns the device of this process."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl")
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    return device


def is_main_process():
    return dist.get_rank() == 0


def cosine_schedule(start, end, total, warmup=0, warmup_start=0.0):
    """One value for each iteration of the whole training."""
    values = [warmup_start + (start - warmup_start) * i / warmup for i in range(warmup)]
    length = total - warmup
    return values + [end + 0.5 * (start - end) * (1 + math.cos(math.pi * i / length)) for i in range(length)]


def save_checkpoint(state, path):
    if is_main_process():
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        torch.save(state, path + ".tmp")
        os.replace(path + ".tmp", path)
