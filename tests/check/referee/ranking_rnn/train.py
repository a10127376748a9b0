"""Session-based recommendation with a GRU: predict the next item at every position, judged by NDCG@10.

    torchrun --standalone --nproc-per-node=2 train.py

Sessions of similar length share a batch, and a batch holds at most --max-tokens positions, padding included.
Started again, it goes on from the last checkpoint, also in the middle of an epoch.
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Sampler

PAD = 0


def make_sessions(users, items, seed, topics=12):
    """Each session stays within a topic, where most items have a usual successor; many are short, a few are long."""
    g = torch.Generator().manual_seed(seed)
    topic_of, successor = torch.randint(topics, (items,), generator=g), torch.zeros(items, dtype=torch.long)
    members = [(topic_of == t).nonzero().flatten() for t in range(topics)]
    for own in members:
        successor[own] = own[torch.randperm(len(own), generator=g)]
    lengths = (5 + torch.empty(users).exponential_(1 / 9, generator=g)).long().clamp(max=50)
    sessions = []
    for topic, length in zip(torch.randint(topics, (users,), generator=g).tolist(), lengths.tolist()):
        random_items = members[topic][torch.randint(len(members[topic]), (length,), generator=g)].tolist()
        follows = (torch.rand(length, generator=g) < 0.6).tolist()
        session = random_items[:1]
        for item, follow in zip(random_items[1:], follows[1:]):
            session.append(successor[session[-1]].item() if follow else item)
        sessions.append(torch.tensor(session) + 1)  # 0 is the padding
    return sessions


class LengthGroupedBatchSampler(Sampler):
    """Batches of similar lengths up to a budget of padded positions; the batches are dealt to the ranks in turn.

    All ranks make up the same list of batches. In training it is shuffled each epoch, and what does not go round
    is left out, so that all ranks take the same number of steps; in evaluation every sequence appears exactly once.
    """

    def __init__(self, lengths, max_tokens, rank, world_size, train, seed=0):
        self.lengths, self.max_tokens, self.train, self.seed = torch.as_tensor(lengths), max_tokens, train, seed
        self.rank, self.world_size, self.epoch, self.skip = rank, world_size, 0, 0

    def set_epoch(self, epoch, skip=0):
        """`skip`: the batches of this epoch that each rank has already had, when a run goes on."""
        self.epoch, self.skip = epoch, skip

    def all_batches(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        noise = 0.1 * torch.rand(len(self.lengths), generator=g) if self.train else 0.0
        order = torch.argsort(self.lengths * (1 + noise), stable=True)
        batches, batch, longest = [], [], 0
        for index, length in zip(order.tolist(), self.lengths[order].tolist()):
            if batch and (len(batch) + 1) * max(longest, length) > self.max_tokens:
                batches.append(batch)
                batch, longest = [], 0
            batch.append(index)
            longest = max(longest, length)
        batches.append(batch)
        if self.train:
            batches = [batches[i] for i in torch.randperm(len(batches), generator=g).tolist()]
            batches = batches[:len(batches) // self.world_size * self.world_size]
        return batches

    def __iter__(self):
        return iter(self.all_batches()[self.rank::self.world_size][self.skip:])


def collate(sequences):
    """(inputs, targets): the targets are the inputs shifted by one, padding on the right."""
    return (pad_sequence([s[:-1] for s in sequences], batch_first=True, padding_value=PAD),
            pad_sequence([s[1:] for s in sequences], batch_first=True, padding_value=PAD))


class GRURecommender(nn.Module):
    def __init__(self, items, dim=32):
        super().__init__()
        self.embedding = nn.Embedding(items + 1, dim, padding_idx=PAD)
        nn.init.normal_(self.embedding.weight[1:], std=0.2)
        self.gru = nn.GRU(dim, dim, batch_first=True)
        self.project = nn.Linear(dim, dim)
        self.bias = nn.Parameter(torch.zeros(items + 1))

    def forward(self, inputs):
        hidden, _ = self.gru(self.embedding(inputs))  # padding comes after the items and cannot reach them
        return F.linear(self.project(hidden), self.embedding.weight, self.bias)


@torch.no_grad()
def evaluate(net, loader, device, k=10):
    """NDCG@k of the last item of each session; the mean over all users, wherever they were evaluated."""
    net.eval()
    gain, users = torch.zeros(2, dtype=torch.float64, device=device)
    for inputs, targets in loader:
        inputs, targets = inputs.to(device), targets.to(device)
        rows, last = torch.arange(len(inputs), device=device), (inputs != PAD).sum(dim=1) - 1
        scores, wanted = net(inputs)[rows, last], targets[rows, last]
        scores[:, PAD] = -torch.inf
        place = (scores > scores[rows, wanted].unsqueeze(1)).sum(dim=1)
        gain += torch.where(place < k, 1 / torch.log2(place + 2.0), 0.0).sum()
        users += len(inputs)
    totals = torch.stack([gain, users])
    dist.all_reduce(totals)
    return (totals[0] / totals[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--users", type=int, default=700)
    parser.add_argument("--items", type=int, default=120)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=320, help="padded positions in a batch of one process")
    parser.add_argument("--lr", type=float, default=0.3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", type=int, default=10, help="steps")
    parser.add_argument("--checkpoint-dir", default="checkpoints")
    args = parser.parse_args()

    use_cuda, local_rank = torch.cuda.is_available(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if use_cuda else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    sessions = make_sessions(args.users, args.items, args.seed)
    train_set = [s[:-1] for s in sessions]  # the last item of each session is kept for the evaluation
    train_sampler = LengthGroupedBatchSampler([len(s) for s in train_set], args.max_tokens, rank, world_size,
                                              train=True, seed=args.seed)
    test_sampler = LengthGroupedBatchSampler([len(s) for s in sessions], 2400, rank, world_size, train=False)
    train_loader = DataLoader(train_set, batch_sampler=train_sampler, collate_fn=collate)
    test_loader = DataLoader(sessions, batch_sampler=test_sampler, collate_fn=collate)

    torch.manual_seed(args.seed)
    net = GRURecommender(args.items).to(device)
    model = DDP(net, device_ids=[local_rank] if use_cuda else None)
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
    first_epoch, done, best, totals = 0, 0, 0.0, torch.zeros(2, dtype=torch.float64, device=device)

    path = os.path.join(args.checkpoint_dir, "last.pt")
    if os.path.exists(path):
        state = torch.load(path, map_location=device)
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        first_epoch, done, best, totals = state["epoch"], state["done"], state["best"], state["totals"]

    def save(name, **more):
        if rank == 0:
            os.makedirs(args.checkpoint_dir, exist_ok=True)
            target = os.path.join(args.checkpoint_dir, name)
            torch.save({"model": net.state_dict(), **more}, target + ".tmp")
            os.replace(target + ".tmp", target)

    def save_last(epoch, done):
        save("last.pt", optimizer=optimizer.state_dict(), scheduler=scheduler.state_dict(), epoch=epoch, done=done,
             best=best, totals=totals)

    for epoch in range(first_epoch, args.epochs):
        train_sampler.set_epoch(epoch, skip=done)
        model.train()
        for done, (inputs, targets) in enumerate(train_loader, start=done + 1):
            inputs, targets = inputs.to(device), targets.to(device)
            loss_sum = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=PAD,
                                       reduction="sum")
            step_totals = torch.stack([loss_sum.detach(), (targets != PAD).sum()])
            dist.all_reduce(step_totals)
            # the mean over the valid positions of all ranks; DDP divides the gradients by the number of ranks
            loss = loss_sum * world_size / step_totals[1]
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 5.0)
            optimizer.step()
            totals += step_totals
            if done % args.save_every == 0:
                save_last(epoch, done)
        scheduler.step()
        ndcg = evaluate(net, test_loader, device)
        if rank == 0:
            print(f"epoch {epoch}: {done} steps, loss {totals[0] / totals[1]:.4f}, NDCG@10 {ndcg:.4f}", flush=True)
        done, totals = 0, torch.zeros_like(totals)
        if ndcg > best:
            best = ndcg
            save("best.pt", epoch=epoch, ndcg=ndcg)
        save_last(epoch + 1, done)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
