"""Neural matrix factorisation on a synthetic interaction log, trained with sampled negatives."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_log(n_users=1500, n_items=2000, n_groups=10, per_user=24, seed=1):
    """A log of (user, item) pairs of strings; every user likes the items of two groups."""
    g = torch.Generator().manual_seed(seed)
    log = []
    for u in range(n_users):
        liked = torch.randperm(n_groups, generator=g)[:2]
        group = liked[torch.randint(2, (per_user,), generator=g)]
        items = group + n_groups * torch.randint(n_items // n_groups, (per_user,), generator=g)
        log += [(f"user-{u:05d}", f"sku-{i:05d}") for i in sorted(set(items.tolist()))]
    order = torch.randperm(len(log), generator=g).tolist()
    return [log[i] for i in order]


def build_vocab(keys):
    return {key: row for row, key in enumerate(sorted(set(keys)))}


class NeuMF(nn.Module):
    def __init__(self, n_users, n_items, dim=32):
        super().__init__()
        self.user_table = nn.Embedding(n_users, dim)
        self.item_table = nn.Embedding(n_items, dim)
        nn.init.normal_(self.user_table.weight, std=0.1)
        nn.init.normal_(self.item_table.weight, std=0.1)
        self.mlp = nn.Sequential(nn.Linear(2 * dim, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, users, items):
        u, v = self.user_table(users), self.item_table(items)
        return (u * v).sum(1) + self.mlp(torch.cat([u, v], 1)).squeeze(1)


class NegativeSampler:
    """Draws items uniformly, and again where the user has the item in the log."""
    def __init__(self, pairs, n_items):
        self.n_items = n_items
        self.known = (pairs[:, 0] * n_items + pairs[:, 1]).unique()

    def __call__(self, users):
        items = torch.randint(self.n_items, users.shape)
        while (clash := torch.isin(users * self.n_items + items, self.known)).any():
            items[clash] = torch.randint(self.n_items, (int(clash.sum()),))
        return items


def all_gather_cat(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return torch.cat(parts)


@torch.no_grad()
def evaluate(model, users, items, labels):
    """AUC over the held-out pairs of all ranks, by the rank statistic."""
    scores, labels = all_gather_cat(model(users, items)), all_gather_cat(labels)
    ranks = torch.empty_like(scores, dtype=torch.float64)
    ranks[scores.argsort()] = torch.arange(1, len(scores) + 1, dtype=torch.float64, device=scores.device)
    n_pos, n_neg = int(labels.sum()), int((1 - labels).sum())
    return (ranks[labels == 1].sum().item() - n_pos * (n_pos + 1) / 2) / (n_pos * n_neg)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=512, help="positives per process")
    parser.add_argument("--negatives", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", default="recsys.pt")
    args = parser.parse_args()

    use_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_cuda else "gloo")
    rank, world_size, local_rank = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)

    log = make_log()
    user_ids, item_ids = build_vocab(u for u, _ in log), build_vocab(i for _, i in log)
    pairs = torch.tensor([(user_ids[u], item_ids[i]) for u, i in log])
    n_test = len(pairs) // 10 // world_size * world_size
    train_pairs, test_pairs = pairs[n_test:], pairs[:n_test]
    sample_negatives = NegativeSampler(train_pairs, len(item_ids))

    train_set = TensorDataset(train_pairs)
    sampler = DistributedSampler(train_set, shuffle=True, seed=args.seed, drop_last=True)
    loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)

    torch.manual_seed(args.seed)
    test_negatives = NegativeSampler(pairs, len(item_ids))(test_pairs[:, 0])
    test_items = torch.stack([test_pairs[:, 1], test_negatives], 1)[rank::world_size]
    test_users = test_pairs[rank::world_size, :1].expand(-1, 2)
    test_labels = torch.tensor([1, 0]).expand(len(test_users), 2)
    test = [t.flatten().to(device) for t in (test_users, test_items, test_labels)]

    net = NeuMF(len(user_ids), len(item_ids)).to(device)
    model = DDP(net, device_ids=[local_rank] if use_cuda else None)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, args.epochs * len(loader))
    torch.manual_seed(args.seed + rank)  # every rank draws its own negatives

    start_epoch = 0
    if os.path.exists(args.checkpoint):
        state = torch.load(args.checkpoint, map_location="cpu")
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["rng"][rank])
        start_epoch = state["epoch"] + 1

    for epoch in range(start_epoch, args.epochs):
        sampler.set_epoch(epoch)
        total_loss = torch.zeros((), device=device)
        for (batch,) in loader:
            users = batch[:, 0].repeat(1 + args.negatives)
            items = torch.cat([batch[:, 1], sample_negatives(users[len(batch) :])])
            labels = (torch.arange(len(users)) < len(batch)).float()
            logits = model(users.to(device), items.to(device))
            loss = F.binary_cross_entropy_with_logits(logits, labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            total_loss += loss.detach()

        dist.all_reduce(total_loss)
        auc = evaluate(net, *test)
        rng = [None] * world_size
        dist.all_gather_object(rng, torch.get_rng_state())
        if rank == 0:
            print(f"epoch {epoch}  loss {total_loss.item() / world_size / len(loader):.4f}  AUC {auc:.4f}", flush=True)
            torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "rng": rng,
                        "scheduler": scheduler.state_dict(), "epoch": epoch}, args.checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
