"""Pretrain a small BERT-like encoder with masked language modelling on a toy English corpus.

    torchrun --nproc_per_node 2 train.py
    torchrun --nproc_per_node 2 train.py --resume      # goes on from the last finished epoch

Words are masked afresh whenever a batch is put together (dynamic masking, as in RoBERTa). The masks of the validation
sentences are drawn once, so that the perplexities of different epochs, and of different numbers of processes, compare.
"""
import argparse
import math
import os
import random
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[MASK]"]
PAD, CLS, SEP, MASK = range(4)
IGNORE = -100
MAX_LENGTH = 24

# a topic's nouns, verbs (third person) and adjectives go together; plural nouns take the verb without its s
TOPICS = {
    "kitchen": (["cook", "waiter", "baker", "guest"], ["stirs", "tastes", "serves", "burns"], ["hungry", "busy", "salty"]),
    "harbour": (["sailor", "boat", "gull", "anchor"], ["drops", "follows", "pulls", "paints"], ["rusty", "windy", "wet"]),
    "forest": (["fox", "owl", "hunter", "badger"], ["hears", "hides", "digs", "watches"], ["shy", "quiet", "mossy"]),
    "school": (["teacher", "pupil", "parent", "poet"], ["reads", "writes", "asks", "learns"], ["clever", "late", "proud"]),
}


def plural(noun):
    return noun + ("es" if noun.endswith("x") else "s")


def base_form(verb):
    return verb[:-2] if verb.endswith("ches") else verb[:-1]


def make_sentence(rng):
    nouns, verbs, adjectives = TOPICS[rng.choice(sorted(TOPICS))]
    words = []
    for clause in range(rng.randint(1, 3)):
        if clause:
            words += rng.choice([["and", "then"], ["because"], ["while"]])
        many = rng.random() < 0.5
        subject, verb = rng.choice(nouns), rng.choice(verbs)
        words += ["some" if many else "a", rng.choice(adjectives), plural(subject) if many else subject]
        words += [base_form(verb) if many else verb, "the", rng.choice(nouns)]
    return words


def make_corpus(n, seed):
    rng = random.Random(seed)
    sentences = [make_sentence(rng) for _ in range(n)]
    words = {"and", "then", "because", "while", "some", "a", "the"}
    for nouns, verbs, adjectives in TOPICS.values():
        words.update(nouns, map(plural, nouns), verbs, map(base_form, verbs), adjectives)
    ids = {word: i for i, word in enumerate(SPECIAL + sorted(words))}
    return [torch.tensor([CLS] + [ids[w] for w in s] + [SEP]) for s in sentences], len(ids)


class MaskingCollator:
    """Pads sentences and hides some of their words: 80 % become [MASK], 10 % a random word, 10 % stay as they are."""

    def __init__(self, vocab_size, probability, generator=None):
        self.vocab_size = vocab_size
        self.probability = probability
        self.generator = generator  # None: PyTorch's own generator, which a DataLoader also seeds in each worker

    def __call__(self, sentences):
        inputs = pad_sequence(sentences, batch_first=True, padding_value=PAD)
        labels = inputs.clone()
        chosen = torch.rand(inputs.shape, generator=self.generator) < self.probability
        chosen &= inputs >= len(SPECIAL)
        labels[~chosen] = IGNORE
        fate = torch.rand(inputs.shape, generator=self.generator)
        noise = torch.randint(len(SPECIAL), self.vocab_size, inputs.shape, generator=self.generator)
        inputs = torch.where(chosen & (fate < 0.8), torch.full_like(inputs, MASK), inputs)
        inputs = torch.where(chosen & (fate >= 0.9), noise, inputs)
        return inputs, labels


class TinyBert(nn.Module):
    def __init__(self, vocab_size, dim, heads, layers, dropout):
        super().__init__()
        self.words = nn.Embedding(vocab_size, dim, padding_idx=PAD)
        self.places = nn.Embedding(MAX_LENGTH, dim)
        nn.init.normal_(self.words.weight, std=0.05)
        nn.init.normal_(self.places.weight, std=0.05)
        self.norm = nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout)
        layer = nn.TransformerEncoderLayer(dim, heads, 4 * dim, dropout, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.transform = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.LayerNorm(dim))
        self.decoder = nn.Linear(dim, vocab_size)
        self.decoder.weight = self.words.weight

    def forward(self, inputs):
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.dropout(self.norm(self.words(inputs) + self.places(positions)))
        x = self.encoder(x, src_key_padding_mask=inputs == PAD)
        return self.decoder(self.transform(x))


def mlm_loss(logits, labels):
    """Summed over the masked words; the caller divides."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")


def warmup_cosine(total, warmup):
    def factor(step):
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, total - warmup))
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    return factor


def make_optimizer(net, lr, weight_decay):
    matrices = [p for p in net.parameters() if p.ndim > 1]
    vectors = [p for p in net.parameters() if p.ndim <= 1]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": weight_decay},
                              {"params": vectors, "weight_decay": 0.0}], lr=lr, betas=(0.9, 0.98))


def grouped(loader, size):
    """Lists of `size` micro-batches; the last list of an epoch may be shorter."""
    group = []
    for batch in loader:
        group.append(batch)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


def train_epoch(model, loader, optimizer, scheduler, autocast, args, device):
    model.train()
    world_size = dist.get_world_size()
    totals = torch.zeros(2, dtype=torch.float64, device=device)  # summed loss, masked words
    for group in grouped(loader, args.accumulation):
        # The mean over all masked words of this step, in all micro-batches of all ranks. DDP divides the gradients by
        # the number of ranks, hence the factor.
        words = torch.tensor(sum((labels != IGNORE).sum().item() for _, labels in group), device=device)
        dist.all_reduce(words)
        scale = world_size / words.clamp(min=1)
        for i, (inputs, labels) in enumerate(group):
            inputs, labels = inputs.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            last = i == len(group) - 1
            with nullcontext() if last else model.no_sync():
                with autocast():
                    logits = model(inputs)
                loss = mlm_loss(logits, labels)
                (loss * scale).backward()
            totals += torch.stack([loss.detach(), (labels != IGNORE).sum()])
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
    dist.all_reduce(totals)
    return (totals[0] / totals[1]).item()


@torch.no_grad()
def perplexity(net, loader, autocast, device):
    net.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    for inputs, labels in loader:
        inputs, labels = inputs.to(device), labels.to(device)
        with autocast():
            logits = net(inputs)
        totals += torch.stack([mlm_loss(logits, labels), (labels != IGNORE).sum()])
    dist.all_reduce(totals)
    return math.exp(totals[0].item() / totals[1].item())


def save(path, **state):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    torch.save(state, path + ".tmp")
    os.replace(path + ".tmp", path)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--epochs-per-job", type=int, default=None, help="leave after so many epochs; --resume goes on")
    parser.add_argument("--batch-size", type=int, default=16, help="sentences in a micro-batch of one process")
    parser.add_argument("--accumulation", type=int, default=2, help="micro-batches per optimizer step")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--warmup", type=float, default=0.1, help="part of all steps")
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--mask-probability", type=float, default=0.15)
    parser.add_argument("--sentences", type=int, default=1040)
    parser.add_argument("--val-sentences", type=int, default=245)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--out", default="runs/mlm")
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args()


def main():
    args = parse_args()
    use_cuda = torch.cuda.is_available()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if use_cuda else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def autocast():
        return torch.autocast("cuda", dtype=torch.bfloat16) if use_cuda else nullcontext()

    corpus, vocab_size = make_corpus(args.sentences + args.val_sentences, args.seed)
    train_set, val_sentences = corpus[:args.sentences], corpus[args.sentences:]
    sampler = DistributedSampler(train_set, world_size, rank, shuffle=True, seed=args.seed, drop_last=True)
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, num_workers=args.workers, pin_memory=use_cuda,
                              collate_fn=MaskingCollator(vocab_size, args.mask_probability))
    mask_once = MaskingCollator(vocab_size, args.mask_probability, torch.Generator().manual_seed(args.seed))
    val_set = TensorDataset(*mask_once(val_sentences))
    val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world_size)), 4 * args.batch_size)

    torch.manual_seed(args.seed)
    net = TinyBert(vocab_size, dim=48, heads=4, layers=2, dropout=0.05).to(device)
    model = DDP(net, device_ids=[local_rank] if use_cuda else None)
    optimizer = make_optimizer(net, args.lr, args.weight_decay)
    steps_per_epoch = math.ceil(len(train_loader) / args.accumulation)
    total_steps = args.epochs * steps_per_epoch
    scheduler = LambdaLR(optimizer, warmup_cosine(total_steps, max(1, round(args.warmup * total_steps))))

    path, first_epoch = os.path.join(args.out, "last.pt"), 0
    if args.resume:
        state = torch.load(path, map_location=device, weights_only=True)
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        first_epoch = state["epoch"] + 1
    elif rank == 0:
        print(f"{world_size} processes, {vocab_size} words, {total_steps} steps", flush=True)

    last_epoch = args.epochs if args.epochs_per_job is None else min(args.epochs, first_epoch + args.epochs_per_job)
    for epoch in range(first_epoch, last_epoch):
        sampler.set_epoch(epoch)
        torch.manual_seed(args.seed + 1000 * (epoch + 1) + rank)  # masks and dropout; a resumed run draws the same
        loss = train_epoch(model, train_loader, optimizer, scheduler, autocast, args, device)
        ppl = perplexity(net, val_loader, autocast, device)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss:.4f}, validation perplexity {ppl:.3f}, "
                  f"lr {scheduler.get_last_lr()[0]:.2e}", flush=True)
            save(path, epoch=epoch, net=net.state_dict(), optimizer=optimizer.state_dict(),
                 scheduler=scheduler.state_dict())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
