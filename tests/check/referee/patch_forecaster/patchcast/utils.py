"""Process group, files, early stopping."""
import os

import torch
import torch.distributed as dist


def setup():
    use_cuda = torch.cuda.is_available()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if use_cuda else "gloo")
    return device


def log(message):
    if dist.get_rank() == 0:
        print(message, flush=True)


def save(state, path):
    """Write a temporary file and rename it, so that `path` is always a whole file. Only rank 0 calls this."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    torch.save(state, path + ".part")
    os.replace(path + ".part", path)


class EarlyStopping:
    def __init__(self, patience, min_delta):
        self.patience, self.min_delta = patience, min_delta
        self.best, self.bad_epochs = float("inf"), 0

    def improved(self, value):
        """Notes the value of an epoch and tells whether it is the best so far."""
        if value < self.best - self.min_delta:
            self.best, self.bad_epochs = value, 0
            return True
        self.bad_epochs += 1
        return False

    @property
    def stop(self):
        return self.bad_epochs >= self.patience

    def state_dict(self):
        return {"best": self.best, "bad_epochs": self.bad_epochs}

    def load_state_dict(self, state):
        self.best, self.bad_epochs = state["best"], state["bad_epochs"]
