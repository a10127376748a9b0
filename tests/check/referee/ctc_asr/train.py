"""CTC acoustic model on synthetic utterances with length-bucketed batches: torchrun --nproc-per-node=2 train.py"""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler

N_MELS, VOCAB, BLANK = 20, 16, 0
EPOCHS, LR, MAX_FRAMES, SEED, CHECKPOINT = 7, 4e-3, 600, 0, "ctc.pt"


def make_corpus(n, seed):
    """Each token is a fixed spectrum held for a few frames, with a short pause after it."""
    spectra = torch.randn(VOCAB, N_MELS, generator=torch.Generator().manual_seed(99))
    g = torch.Generator().manual_seed(seed)
    corpus = []
    for _ in range(n):
        n_tokens = int(torch.randint(3, 13, (1,), generator=g))
        tokens = torch.randint(1, VOCAB, (n_tokens,), generator=g)
        durations = torch.randint(2, 6, (2 * n_tokens,), generator=g)
        with_pauses = torch.stack([tokens, torch.zeros_like(tokens)], 1).flatten()
        feats = spectra[with_pauses].repeat_interleave(durations, 0)
        corpus.append((feats + 1.2 * torch.randn(feats.shape, generator=g), tokens))
    return corpus


class BucketBatchSampler(Sampler):
    """Batches of similar length, each at most `max_frames` after padding, dealt out to the ranks."""
    def __init__(self, lengths, max_frames, rank, world_size, seed=0):
        self.rank, self.world_size, self.seed, self.epoch = rank, world_size, seed, 0
        self.batches, batch = [], []
        for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
            if batch and lengths[i] * (len(batch) + 1) > max_frames:
                self.batches.append(batch)
                batch = []
            batch.append(i)
        self.batches.append(batch)

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.batches), generator=g).tolist()
        order = order[: len(self) * self.world_size]
        return iter([self.batches[i] for i in order[self.rank :: self.world_size]])

    def __len__(self):
        return len(self.batches) // self.world_size


def collate(items):
    feats, tokens = zip(*items)
    lengths, token_lengths = torch.tensor([len(f) for f in feats]), torch.tensor([len(t) for t in tokens])
    return nn.utils.rnn.pad_sequence(feats, batch_first=True), lengths, torch.cat(tokens), token_lengths


class AcousticModel(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.subsample = nn.Conv1d(N_MELS, hidden, kernel_size=3, stride=2, padding=1)
        self.rnn = nn.GRU(hidden, hidden, batch_first=True, bidirectional=True)
        self.dropout = nn.Dropout(0.1)
        self.out = nn.Linear(2 * hidden, VOCAB)

    def forward(self, feats, lengths):
        x = F.relu(self.subsample(feats.transpose(1, 2))).transpose(1, 2)
        lengths = (lengths + 1) // 2
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        x, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.out(self.dropout(x)).log_softmax(-1), lengths


def edit_distance(a, b):
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        prev, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            prev, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, prev + (x != y))
    return row[-1]


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    counts = torch.zeros(2, dtype=torch.float64, device="cuda")  # token errors, reference tokens
    for feats, lengths, tokens, token_lengths in loader:
        log_probs, out_lengths = model(feats.cuda(), lengths)
        references = tokens.split(token_lengths.tolist())
        for best, n, reference in zip(log_probs.argmax(-1).cpu(), out_lengths, references):
            hypothesis = [t for t in torch.unique_consecutive(best[:n]).tolist() if t != BLANK]
            counts[0] += edit_distance(hypothesis, reference.tolist())
            counts[1] += len(reference)
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def main():
    dist.init_process_group("nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    train_set, dev_set = make_corpus(320, seed=1), make_corpus(80, seed=2)
    sampler = BucketBatchSampler([len(f) for f, _ in train_set], MAX_FRAMES, rank, world_size, SEED)
    train_loader = DataLoader(train_set, batch_sampler=sampler, collate_fn=collate)
    dev_loader = DataLoader(dev_set[rank::world_size], batch_size=20, collate_fn=collate)

    torch.manual_seed(SEED)
    model = DDP(AcousticModel().cuda(), device_ids=[torch.cuda.current_device()])
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.05)
    torch.manual_seed(SEED + rank)  # dropout differs between the ranks

    start_epoch = 0
    if os.path.exists(CHECKPOINT):
        state = torch.load(CHECKPOINT, map_location="cpu")
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["rng"][rank][0])
        torch.cuda.set_rng_state(state["rng"][rank][1])
        start_epoch = state["epoch"] + 1

    for epoch in range(start_epoch, EPOCHS):
        model.train()
        sampler.epoch = epoch
        for feats, lengths, tokens, token_lengths in train_loader:
            log_probs, out_lengths = model(feats.cuda(), lengths)
            loss = F.ctc_loss(log_probs.transpose(0, 1), tokens.cuda(), out_lengths, token_lengths, BLANK, "sum")
            # The batches differ in size: normalise by the utterances of all ranks (DDP averages over ranks).
            n_utterances = torch.tensor(len(lengths), device="cuda")
            dist.all_reduce(n_utterances)
            loss = loss * world_size / n_utterances
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
        cer = evaluate(model.module, dev_loader)
        scheduler.step(cer)
        rng = [None] * world_size
        dist.all_gather_object(rng, (torch.get_rng_state(), torch.cuda.get_rng_state()))
        if rank == 0:
            print(f"epoch {epoch}  token error rate {cer:.4f}  lr {optimizer.param_groups[0]['lr']:.2e}", flush=True)
            torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(),
                        "scheduler": scheduler.state_dict(), "rng": rng, "epoch": epoch}, CHECKPOINT)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
