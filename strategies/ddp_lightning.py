"""Train with Lightning, whose Trainer runs the loop, moves model and batches to the device, and wraps the model in DDP.

Run it:  torchrun --standalone --nproc-per-node=2 strategies/ddp_lightning.py --steps 20
"""

import os

import lightning as L
import torch
from torch.utils.data import DataLoader

from workshop.training.strategies import Report, choose_device, load_batches, load_model, loss_of, parse_arguments


def main():
    args = parse_arguments(__doc__)
    device = choose_device()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    trainer = L.Trainer(
        strategy="ddp",
        accelerator="cpu" if device.type == "cpu" else "gpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=world_size // int(os.environ["LOCAL_WORLD_SIZE"]),
        max_epochs=1,
        use_distributed_sampler=False,  # load_batches() has already divided the batches among the ranks
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module(args, Report(args, device))
    trainer.fit(module, DataLoader(load_batches(args, rank, world_size), batch_size=None))
    module.report.end(module.model.state_dict())


class Module(L.LightningModule):
    def __init__(self, args, report):
        super().__init__()
        self.model, self.report = load_model(args), report

    def training_step(self, batch, _):
        return loss_of(self.model, batch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def on_train_batch_end(self, outputs, *_):
        self.report.step(outputs["loss"])


if __name__ == "__main__":
    main()
