"""Barlow Twins for machine recordings with Lightning.

    python main.py fit
    python main.py fit --ckpt_path checkpoints/last.ckpt
    python main.py validate --ckpt_path checkpoints/best.ckpt
"""
import argparse

import lightning.pytorch as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from barlow.callbacks import AveragedWeights, EpochLine
from barlow.data import NUM_CLASSES, MachineData
from barlow.model import BarlowTwins


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["fit", "validate"])
    parser.add_argument("--devices", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--max_epochs", type=int, default=5)
    parser.add_argument("--batch_size", type=int, default=64, help="per process")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint_dir", default="checkpoints")
    parser.add_argument("--ckpt_path", default=None)
    return parser.parse_args()


def main():
    args = parse_args()
    L.seed_everything(args.seed)
    data = MachineData(batch_size=args.batch_size, seed=args.seed)
    model = BarlowTwins(NUM_CLASSES, lr=args.lr)
    checkpoint = ModelCheckpoint(dirpath=args.checkpoint_dir, filename="best", monitor="val/accuracy", mode="max",
                                 save_last=True, enable_version_counter=False)
    trainer = L.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=args.devices,
        strategy="ddp",
        max_epochs=args.max_epochs,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        callbacks=[AveragedWeights(), EpochLine(), checkpoint],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    if args.command == "fit":
        trainer.fit(model, datamodule=data, ckpt_path=args.ckpt_path)
    else:
        trainer.validate(model, datamodule=data, ckpt_path=args.ckpt_path)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
