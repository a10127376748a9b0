"""Instruction data: "count on from letter L by N until the alphabet ends". The loss is on the answer only."""
import torch

PAD, BOS, SEP, EOS, FIRST_LETTER, FIRST_STEP, VOCAB_SIZE = 0, 1, 2, 3, 4, 30, 35
IGNORE, SEQ_LEN = -100, 64


def blank():
    return {"tokens": torch.full((SEQ_LEN,), PAD), "labels": torch.full((SEQ_LEN,), IGNORE),
            "positions": torch.arange(SEQ_LEN), "documents": torch.full((SEQ_LEN,), -1)}


def packed_sequences(split, n_sequences, seed):
    """Each is filled with whole examples as far as they fit; the rest is padding (document -1)."""
    pairs = [(letter, step) for letter in range(21) for step in range(1, 6)]
    # one question in eight is kept for validation and never seen in training
    pairs = [pair for i, pair in enumerate(pairs) if (i * 5 % 8 == 0) == (split == "val")]
    g = torch.Generator().manual_seed(seed + (split == "val"))
    rows, row, used = [], blank(), 0
    while len(rows) < n_sequences:
        letter, step = pairs[torch.randint(len(pairs), (1,), generator=g).item()]
        prompt = [BOS, FIRST_STEP + step - 1, FIRST_LETTER + letter, SEP]
        answer = [FIRST_LETTER + i for i in range(letter + step, 26, step)] + [EOS]
        tokens, targets = prompt + answer, [IGNORE] * len(prompt) + answer
        if used + len(tokens) > SEQ_LEN:
            rows.append(row)
            row, used = blank(), 0
        end = used + len(tokens)
        row["tokens"][used:end] = torch.tensor(tokens)
        row["labels"][used:end - 1] = torch.tensor(targets[1:])  # each token predicts the next one
        row["positions"][used:end] = torch.arange(len(tokens))
        row["documents"][used:end] = used  # any number that no other document of the sequence has
        used = end
    return rows


class GlobalBatchSampler:
    """This rank's micro-batches of each global batch. The order depends on seed and epoch only, so that a run
    can go on at any step, and with another number of processes."""

    def __init__(self, n, args, rank, world_size):
        self.n, self.global_batch, self.micro_batch = n, args.global_batch_size, args.micro_batch_size
        self.rank, self.world_size, self.seed = rank, world_size, args.seed
        self.steps_per_epoch, self.epoch, self.first_step = n // self.global_batch, 0, 0

    def __iter__(self):
        order = torch.randperm(self.n, generator=torch.Generator().manual_seed(self.seed + self.epoch)).tolist()
        for step in range(self.first_step, self.steps_per_epoch):
            first = step * self.global_batch
            mine = order[first + self.rank:first + self.global_batch:self.world_size]
            yield from (mine[i:i + self.micro_batch] for i in range(0, len(mine), self.micro_batch))


def validation_batches(n, batch, rank, world_size):
    """Every sequence on exactly one rank. FSDP gathers parameters in every forward, so all ranks need the same number
    of batches: index n stands for a blank sequence, which has no labels and so does not count."""
    mine = list(range(rank, n, world_size))
    mine += [n] * (-(-n // world_size) - len(mine))
    return [mine[i:i + batch] for i in range(0, len(mine), batch)]
