"""Direct preference optimisation of a tiny causal language model against its frozen starting point.

    accelerate launch --num_processes 2 train.py
"""
import argparse
import copy
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader, TensorDataset

VOCAB, PROMPT, REPLY = 32, 6, 10


def make_preferences(n, seed):
    """Replies count on from the last token of the prompt, with slips: few in the preferred one, many in the other."""
    g = torch.Generator().manual_seed(seed)
    prompt = torch.randint(VOCAB, (n, PROMPT), generator=g)
    replies = (prompt[:, None, -1:] + torch.arange(1, REPLY + 1)).expand(-1, 2, -1) % VOCAB
    slips = torch.rand(n, 2, REPLY, generator=g) < torch.tensor([[0.1], [0.4]])
    replies = torch.where(slips, torch.randint(VOCAB, (n, 2, REPLY), generator=g), replies)
    lengths = torch.randint(REPLY // 2, REPLY + 1, (n, 2), generator=g)
    mask = torch.arange(REPLY) < lengths[:, :, None]
    return TensorDataset(prompt, replies, mask)


class TinyLM(nn.Module):
    def __init__(self, dim=64, layers=2, heads=4):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, dim)
        self.positions = nn.Embedding(PROMPT + REPLY, dim)
        block = nn.TransformerEncoderLayer(dim, heads, 4 * dim, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, norm=nn.LayerNorm(dim), enable_nested_tensor=False)
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        causal = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        return self.head(self.blocks(x, mask=causal, is_causal=True))


def reply_logps(model, prompt, replies, mask):
    """Summed log-probabilities of the reply tokens, [batch, 2] for (chosen, rejected)."""
    ids = torch.cat([prompt[:, None].expand(-1, 2, -1), replies], 2).flatten(0, 1)
    logps = model(ids[:, :-1])[:, PROMPT - 1 :].log_softmax(-1)
    logps = logps.gather(2, replies.flatten(0, 1).unsqueeze(2)).squeeze(2)
    return (logps * mask.flatten(0, 1)).sum(1).view(-1, 2)


def reward_margin(policy, ref, batch, beta):
    with torch.no_grad():
        ref_logps = reply_logps(ref, *batch)
    rewards = beta * (reply_logps(policy, *batch) - ref_logps)
    return rewards[:, 0] - rewards[:, 1]


def pretrain(model, steps=25):
    """A short language-model warm-up on both kinds of replies, the same on every process."""
    data = make_preferences(1024, seed=7).tensors
    ids = torch.cat([data[0][:, None].expand(-1, 2, -1), data[1]], 2).flatten(0, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for batch in ids[torch.randperm(len(ids))].split(len(ids) // steps)[:steps]:
        loss = F.cross_entropy(model(batch[:, :-1])[:, PROMPT - 1 :].transpose(1, 2), batch[:, PROMPT:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def evaluate(accelerator, policy, ref, loader, beta):
    margins = [accelerator.gather_for_metrics(reward_margin(policy, ref, batch, beta)) for batch in loader]
    margins = torch.cat(margins)
    return -F.logsigmoid(margins).mean().item(), (margins > 0).float().mean().item()


class Progress:
    epoch = 0

    def state_dict(self):
        return {"epoch": self.epoch}

    def load_state_dict(self, state):
        self.epoch = state["epoch"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=16, help="pairs per process")
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="checkpoint")
    args = parser.parse_args()

    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        gradient_accumulation_steps=args.accumulate,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    set_seed(args.seed)
    model = TinyLM()
    pretrain(model)
    ref = copy.deepcopy(model).eval().requires_grad_(False).to(accelerator.device)

    train_loader = DataLoader(make_preferences(768, seed=1), args.batch_size, shuffle=True, drop_last=True)
    test_loader = DataLoader(make_preferences(250, seed=2), 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    policy, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)

    updates = args.epochs * (len(train_loader) // args.accumulate)
    # a prepared scheduler makes num_processes steps at every update
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, updates * accelerator.num_processes)
    scheduler = accelerator.prepare(scheduler)

    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if os.path.isdir(args.output):
        accelerator.load_state(args.output)

    for epoch in range(progress.epoch, args.epochs):
        policy.train()
        train_loader.set_epoch(epoch)
        for batch in train_loader:
            with accelerator.accumulate(policy):
                loss = -F.logsigmoid(reward_margin(policy, ref, batch, args.beta)).mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(policy.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

        policy.eval()
        test_loss, accuracy = evaluate(accelerator, policy, ref, test_loader, args.beta)
        lr = scheduler.get_last_lr()[0]
        accelerator.print(f"epoch {epoch}  held-out loss {test_loss:.4f}  accuracy {accuracy:.4f}  lr {lr:.1e}")
        progress.epoch = epoch + 1
        accelerator.save_state(args.output)

    accelerator.end_training()


if __name__ == "__main__":
    main()
