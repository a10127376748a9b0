"""Sharded checkpoints: every rank writes its own shards, DCP writes .metadata last and so marks the folder complete."""
import os
import shutil

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful


class TrainState(Stateful):
    def __init__(self, model, optimizer, scheduler):
        self.model, self.optimizer, self.scheduler, self.step = model, optimizer, scheduler, 0

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "scheduler": self.scheduler.state_dict(), "step": self.step}

    def load_state_dict(self, state):
        model, optimizer = state["model"], state["optimizer"]
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        self.scheduler.load_state_dict(state["scheduler"])
        self.step = state["step"]


class Checkpointer:
    def __init__(self, folder, state, keep=2):
        self.folder, self.state, self.keep = folder, state, keep

    def complete_steps(self):
        names = os.listdir(self.folder) if os.path.isdir(self.folder) else []
        return sorted(int(name[5:]) for name in names if os.path.exists(f"{self.folder}/{name}/.metadata"))

    def save(self):
        dcp.save({"train": self.state}, checkpoint_id=f"{self.folder}/step-{self.state.step}")
        if dist.get_rank() == 0:
            for step in self.complete_steps()[:-self.keep]:
                os.remove(f"{self.folder}/step-{step}/.metadata")  # from here on no longer complete
                shutil.rmtree(f"{self.folder}/step-{step}")

    def load_latest(self):
        """True if there was a checkpoint. Rank 0 looks, so that all ranks take the same one."""
        steps = [self.complete_steps() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(steps, src=0)
        if steps[0]:
            dcp.load({"train": self.state}, checkpoint_id=f"{self.folder}/step-{steps[0][-1]}")
        return bool(steps[0])
