"""Toy "speech": every utterance is a walk over phones, each held for a few noisy feature frames."""
import torch
from torch.nn.utils.rnn import pad_sequence

PHONES, FEATS, PAD = 12, 16, -100


def synthesize(num_utts, seed):
    world = torch.Generator().manual_seed(1234)  # the language is the same for all splits
    templates = torch.randn(PHONES, FEATS, generator=world)
    successors = torch.stack([torch.randperm(PHONES, generator=world)[:3] for _ in range(PHONES)])
    g = torch.Generator().manual_seed(seed)
    utts = []
    for _ in range(num_utts):
        phone, labels = torch.randint(PHONES, (), generator=g), []
        for _ in range(torch.randint(3, 15, (), generator=g)):
            labels += [phone] * torch.randint(2, 6, (), generator=g).item()
            phone = successors[phone, torch.randint(3, (), generator=g)]
        labels = torch.stack(labels)
        noise = 1.2 * torch.randn(len(labels), FEATS, generator=g)
        channel = 0.4 * torch.randn(FEATS, generator=g)
        utts.append((templates[labels] + channel + noise, labels))
    return utts


def collate(utts):
    feats, labels = zip(*utts)
    return pad_sequence(feats, batch_first=True), pad_sequence(labels, batch_first=True, padding_value=PAD)


class BucketSampler:
    """Batches of utterances of about the same length. All ranks get the same number of them, and at each step
    neighbours in the order of length, so that none waits for another one's long utterances."""

    def __init__(self, lengths, batch_size, rank, world_size, seed):
        self.lengths = torch.tensor(lengths, dtype=torch.float)
        self.batch_size, self.rank, self.world_size = batch_size, rank, world_size
        self.seed, self.epoch = seed, 0

    def __len__(self):
        return len(self.lengths) // (self.batch_size * self.world_size)

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.argsort(self.lengths * (1 + 0.1 * torch.randn(len(self.lengths), generator=g)))
        keep = torch.randperm(len(order), generator=g)[:len(self) * self.batch_size * self.world_size]
        steps = order[keep.sort().values].view(len(self), self.world_size, self.batch_size)
        for step in torch.randperm(len(self), generator=g):
            yield steps[step, self.rank].tolist()
