"""Two tasks, one network, with Lightning:  python train.py --devices 2

Go on after the last finished epoch:  python train.py --devices 2 --resume
"""
import argparse
import os

import lightning as L
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from balance import Report, TaskBalancer
from data import TurnedDigits
from model import TASKS, MultiTask


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--accelerator", default="cpu", help="cpu, gpu or auto")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=50, help="per device")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--checkpoint-dir", default="checkpoints")
    parser.add_argument("--resume", action="store_true", help="start from last.ckpt in the checkpoint directory")
    return parser.parse_args()


def main():
    args = parse_args()
    L.seed_everything(args.seed, workers=True, verbose=False)
    data = TurnedDigits(batch_size=args.batch_size, seed=args.seed)
    model = MultiTask(lr=args.lr, seed=args.seed)
    balancer = TaskBalancer(TASKS)
    # saved when the training epoch is over and the balancer (which comes before it) has noted the epoch's losses
    checkpoint = ModelCheckpoint(dirpath=args.checkpoint_dir, filename="best", monitor="val_loss", mode="min",
                                 save_top_k=1, save_last=True, save_on_train_epoch_end=True,
                                 enable_version_counter=False)
    trainer = L.Trainer(
        accelerator=args.accelerator,
        devices=args.devices,
        strategy="ddp",
        max_epochs=args.epochs,
        gradient_clip_val=args.clip,
        gradient_clip_algorithm="norm",
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        callbacks=[balancer, Report(balancer), checkpoint],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    last = os.path.join(args.checkpoint_dir, "last.ckpt")
    trainer.fit(model, datamodule=data, ckpt_path=last if args.resume else None)
    if trainer.is_global_zero:
        print(f"best: {checkpoint.best_model_path} with val loss {checkpoint.best_model_score:.4f}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
