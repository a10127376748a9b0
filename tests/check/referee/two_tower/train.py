"""Two-tower retrieval: queries and items are embedded by two small networks, the items of all ranks are each other's negatives.

Every start trains --epochs epochs, on top of those in the checkpoint that it finds in --out.
"""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def make_world(n_items, seed=7):
    """Item features and queries are two different noisy views of the items' hidden traits."""
    g = torch.Generator().manual_seed(seed)
    traits = torch.randn(n_items, 12, generator=g)
    to_item, to_query = torch.randn(12, 48, generator=g), torch.randn(12, 32, generator=g)
    items = torch.tanh(traits @ to_item / 3) + 0.3 * torch.randn(n_items, 48, generator=g)

    def queries(n):
        ids = torch.randint(n_items, (n,), generator=g)
        wish = traits[ids] + 0.5 * torch.randn(n, 12, generator=g)
        return torch.tanh(wish @ to_query / 3), ids

    return items, queries(4800), queries(901)


class TwoTower(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.query = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, dim))
        self.item = nn.Sequential(nn.Linear(48, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, dim))

    def forward(self, queries, items):
        return F.normalize(self.query(queries), dim=-1), F.normalize(self.item(items), dim=-1)


class GatherWithGrad(torch.autograd.Function):
    """all_gather along dim 0; each rank's part receives the gradients of the losses of all ranks."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


class InBatchSoftmax(nn.Module):
    """Each local query against the items of all ranks, with a learned temperature."""

    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(math.log(5.0)))

    def forward(self, q, items, ids):
        all_items = GatherWithGrad.apply(items)
        all_ids = [torch.empty_like(ids) for _ in range(dist.get_world_size())]
        dist.all_gather(all_ids, ids)
        logits = self.log_scale.clamp(max=4.6).exp() * q @ all_items.t()
        labels = torch.arange(len(q), device=q.device) + dist.get_rank() * len(q)
        same = ids[:, None] == torch.cat(all_ids)[None, :]  # the same item elsewhere in the batch is no negative
        same[torch.arange(len(q), device=q.device), labels] = False
        return F.cross_entropy(logits.masked_fill(same, float("-inf")), labels)


@torch.no_grad()
def recall(towers, items, queries, ids, device, k=5):
    """Recall@k over the whole gallery; rank r embeds items r, r+W, r+2W, ... and asks every W-th query."""
    towers.eval()
    rank, world, n = dist.get_rank(), dist.get_world_size(), len(items)
    per_rank = math.ceil(n / world)
    q, mine = towers(queries[rank::world].to(device), items[rank::world].to(device))
    mine = F.pad(mine, (0, 0, 0, per_rank - len(mine)))
    parts = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(parts, mine)
    gallery = torch.stack(parts, dim=1).flatten(0, 1)[:n]
    found = (q @ gallery.t()).topk(k).indices == ids[rank::world, None].to(device)
    counts = torch.tensor([found.sum().item(), len(q)], dtype=torch.float64, device=device)
    dist.all_reduce(counts)
    towers.train()
    return (counts[0] / counts[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=240, help="pairs per step over all ranks")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--out", default="run")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    device_ids = [device.index] if cuda else None
    if cuda:
        torch.cuda.set_device(device)
    assert args.batch % world == 0
    torch.manual_seed(0)
    items, train_pairs, test_pairs = make_world(1001)
    data = TensorDataset(train_pairs[0], items[train_pairs[1]], train_pairs[1])
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, batch_size=args.batch // world, sampler=sampler, drop_last=True, pin_memory=cuda)

    towers, loss_fn = TwoTower().to(device), InBatchSoftmax().to(device)
    model = DDP(towers, device_ids=device_ids)
    criterion = DDP(loss_fn, device_ids=device_ids)
    opt = torch.optim.AdamW([*towers.parameters(), *loss_fn.parameters()], lr=args.lr, weight_decay=0.01)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: min(1.0, (step + 1) / 20) * 0.995 ** step)

    path, first = os.path.join(args.out, "checkpoint.pt"), 0
    if os.path.exists(path):
        state = torch.load(path, map_location=device)
        towers.load_state_dict(state["towers"])
        loss_fn.load_state_dict(state["loss"])
        opt.load_state_dict(state["opt"])
        sched.load_state_dict(state["sched"])
        first = state["epoch"] + 1

    for epoch in range(first, first + args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros((), device=device)
        for queries, its, ids in loader:
            queries, its, ids = (t.to(device, non_blocking=True) for t in (queries, its, ids))
            loss = criterion(*model(queries, its), ids)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            sched.step()
            total += loss.detach()
        total /= len(loader)
        dist.all_reduce(total)
        score = recall(towers, items, *test_pairs, device)
        if rank == 0:
            print(f"epoch {epoch}: loss {total.item() / world:.4f}, recall@5 {score:.4f}, "
                  f"scale {loss_fn.log_scale.exp().item():.3f}", flush=True)
            os.makedirs(args.out, exist_ok=True)
            torch.save({"towers": towers.state_dict(), "loss": loss_fn.state_dict(), "opt": opt.state_dict(),
                        "sched": sched.state_dict(), "epoch": epoch}, path + ".tmp")
            os.replace(path + ".tmp", path)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
