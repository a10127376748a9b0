import builtins
import os
from collections import defaultdict, deque

import torch
import torch.distributed as dist


class SmoothedValue:
    """A series of values: smoothed over a window, and averaged over everything (and all processes)."""

    def __init__(self, window_size=20, fmt="{median:.4f} ({global_avg:.4f})"):
        self.deque, self.fmt = deque(maxlen=window_size), fmt
        self.total, self.count = 0.0, 0

    def update(self, value, n=1):
        self.deque.append(value)
        self.count += n
        self.total += value * n

    def synchronize_between_processes(self):
        self.count, self.total = reduce_across_processes([self.count, self.total])

    @property
    def global_avg(self):
        return self.total / max(self.count, 1)

    def __str__(self):
        median = torch.tensor(list(self.deque) or [0.0]).median().item()
        return self.fmt.format(median=median, global_avg=self.global_avg, value=self.deque[-1] if self.deque else 0.0)


class MetricLogger:
    def __init__(self):
        self.meters = defaultdict(SmoothedValue)

    def __str__(self):
        return "  ".join(f"{name}: {meter}" for name, meter in self.meters.items())

    def synchronize_between_processes(self):
        for name in sorted(self.meters):
            self.meters[name].synchronize_between_processes()

    def log_every(self, iterable, print_freq, header):
        for i, batch in enumerate(iterable):
            yield batch
            if i % print_freq == 0:
                print(f"{header}  [{i}/{len(iterable)}]  {self}")


def is_dist_avail_and_initialized():
    return dist.is_available() and dist.is_initialized()


def get_world_size():
    return dist.get_world_size() if is_dist_avail_and_initialized() else 1


def get_rank():
    return dist.get_rank() if is_dist_avail_and_initialized() else 0


def reduce_across_processes(values):
    if not is_dist_avail_and_initialized():
        return values
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    t = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(t)
    return t.tolist()


def average_buffers(module):
    """BatchNorm statistics follow each process's own batches: make them the same (their mean) everywhere"""
    if is_dist_avail_and_initialized():
        for buffer in module.buffers():
            if buffer.is_floating_point():
                dist.all_reduce(buffer)
                buffer /= get_world_size()


def save_on_master(obj, path):
    if get_rank() == 0:
        torch.save(obj, path + ".tmp")
        os.replace(path + ".tmp", path)


def setup_for_distributed(is_master):
    builtin_print = builtins.print

    def print(*args, **kwargs):
        if is_master:
            builtin_print(*args, **{"flush": True, **kwargs})

    builtins.print = print


def init_distributed_mode(args):
    use_cuda = torch.cuda.is_available()
    args.gpu = int(os.environ.get("LOCAL_RANK", 0))
    args.device = f"cuda:{args.gpu}" if use_cuda else "cpu"
    if use_cuda:
        torch.cuda.set_device(args.gpu)
    args.distributed = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if args.distributed:
        dist.init_process_group("nccl" if use_cuda else "gloo")
        setup_for_distributed(get_rank() == 0)
