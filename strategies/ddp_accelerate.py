"""Train with Accelerate, which finds the rank and the device by itself and wraps the model in DDP.

Run it:  torchrun --standalone --nproc-per-node=2 strategies/ddp_accelerate.py --steps 20
"""

import torch
from accelerate import Accelerator

from workshop.training.strategies import Report, choose_device, load_batches, load_model, loss_of, parse_arguments


def main():
    args = parse_arguments(__doc__)
    accelerator = Accelerator(cpu=choose_device().type == "cpu")
    train(accelerator, args)
    accelerator.end_training()


def train(accelerator, args):
    model = load_model(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    report = Report(args, accelerator.device)
    for batch in load_batches(args, accelerator.process_index, accelerator.num_processes):
        loss = loss_of(model, batch.to(accelerator.device))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        report.step(loss)
    report.end(accelerator.unwrap_model(model).state_dict())


if __name__ == "__main__":
    main()
