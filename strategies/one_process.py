"""Train the tiny CodeLlama in one process. The other programs in this folder are this training with different strategies.

Run it:  python strategies/one_process.py --steps 20
"""

import torch

from workshop.training.strategies import Report, choose_device, load_batches, load_model, loss_of, parse_arguments


def main():
    args = parse_arguments(__doc__)
    device = choose_device()
    train(device, args)


def train(device, args):
    model = load_model(args).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    report = Report(args, device)
    for batch in load_batches(args):
        loss = loss_of(model, batch.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        report.step(loss)
    report.end(model.state_dict())


if __name__ == "__main__":
    main()
