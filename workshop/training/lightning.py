"""Write the log of a Lightning run: the same lines and the same file as the scripts without Lightning.

Importing this module also suppresses messages of Lightning that a learner can do nothing about.
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
    "The `srun` command is available on your system but is not used",  # it warns even if you do not want srun
    "Checkpoint directory .* exists and is not empty",  # the run resumes from it
    "When using the `ThroughputMonitor`, you need to define a `flops_per_batch`",
):
    warnings.filterwarnings("ignore", noise)
# The tip to install Lightning's own logger.
logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
    lambda record: "litlogger" not in record.getMessage()
)


class EpochReport(Callback):
    """Write an ``EpochLog`` on rank 0: the loss of every step, averaged over the ranks, samples per second, and the
    metric "accuracy".

    Args:
        checkpoint: the path of the checkpoint; the log is in the same folder.
    """

    def __init__(self, checkpoint):
        self.checkpoint, self.log = checkpoint, None

    def on_train_start(self, trainer, module):
        device, processes = trainer.strategy.root_device, trainer.world_size
        self.log = EpochLog(self.checkpoint, trainer.max_epochs, device, processes)
        if trainer.is_global_zero:
            epoch, gpus = trainer.current_epoch + 1, torch.accelerator.device_count()
            print(f"training on {device} from epoch {epoch}: {processes} processes, {gpus} GPUs here", flush=True)

    def on_train_epoch_start(self, trainer, module):
        self.losses, self.samples, self.start = [], 0, time.perf_counter()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_index):
        self.losses.append(outputs["loss"].detach())
        self.samples += len(batch[0])
        if trainer.is_last_batch:  # the validation that follows does not count
            self.seconds = synchronized_time(module.device) - self.start

    def on_train_epoch_end(self, trainer, module):
        # Lightning returns the loss divided by the batches per step; the last step of an epoch may have fewer batches.
        batches = trainer.accumulate_grad_batches
        losses = torch.stack([step.mean() * batches for step in torch.stack(self.losses).split(batches)])
        losses = trainer.strategy.reduce(losses, reduce_op="mean")
        if trainer.is_global_zero:
            accuracy = trainer.callback_metrics.get("accuracy")
            accuracy = None if accuracy is None else accuracy.item()
            samples_per_second = self.samples * trainer.world_size / self.seconds
            self.log.write(trainer.current_epoch, losses.tolist(), accuracy, samples_per_second)
