"""The log of a training run under Lightning: the same lines and the same file as those of the scripts without it.

Importing this also silences what Lightning says at each start and a learner can do nothing about.
"""

import logging
import time
import warnings

import torch
from lightning.pytorch.callbacks import Callback

from workshop.training.device import synchronized_time
from workshop.training.logs import EpochLog

for noise in (
    ".*isinstance\\(treespec, LeafSpec\\)",  # Lightning's own use of torch
    "The `srun` command is available on your system but is not used",  # also where srun is not wanted
    "Checkpoint directory .* exists and is not empty",  # it is there to be carried on from
    "When using the `ThroughputMonitor`, you need to define a `flops_per_batch`",
):
    warnings.filterwarnings("ignore", noise)
# The tip to install a logger of theirs.
logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
    lambda record: "litlogger" not in record.getMessage()
)


class EpochReport(Callback):
    """Writes an ``EpochLog`` from rank 0: the loss of every step, averaged over the processes, samples/s, and what was
    logged as "accuracy".

    Args:
        checkpoint: the path of the run's checkpoint, which the log lies beside.
    """

    def __init__(self, checkpoint):
        self.checkpoint, self.log = checkpoint, None

    def on_train_start(self, trainer, module):
        device, processes = trainer.strategy.root_device, trainer.world_size
        self.log = EpochLog(self.checkpoint, trainer.max_epochs, device, processes)
        if trainer.is_global_zero:
            epoch, gpus = trainer.current_epoch + 1, torch.accelerator.device_count()
            print(f"training on {device.type} from epoch {epoch}: {processes} processes, {gpus} GPUs here", flush=True)

    def on_train_epoch_start(self, trainer, module):
        self.losses, self.samples, self.start = [], 0, time.perf_counter()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_index):
        self.losses.append(outputs["loss"].detach())
        self.samples += len(batch[0])
        if trainer.is_last_batch:  # what follows is the validation
            self.seconds = synchronized_time(module.device) - self.start

    def on_train_epoch_end(self, trainer, module):
        # What Lightning hands on is the loss divided by the batches of a step; an epoch's last step may have fewer.
        batches = trainer.accumulate_grad_batches
        losses = torch.stack([step.mean() * batches for step in torch.stack(self.losses).split(batches)])
        losses = trainer.strategy.reduce(losses, reduce_op="mean")
        if trainer.is_global_zero:
            accuracy = trainer.callback_metrics.get("accuracy")
            accuracy = None if accuracy is None else accuracy.item()
            samples_per_second = self.samples * trainer.world_size / self.seconds
            self.log.write(trainer.current_epoch, losses.tolist(), accuracy, samples_per_second)
