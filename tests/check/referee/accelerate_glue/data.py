"""A stand-in for SST-2: made-up reviews whose words carry a polarity that a preceding negation turns around."""
import torch
from torch.utils.data import Dataset

PAD, CLS, SEP, NOT = 0, 1, 2, 3
FIRST_WORD, NUM_GOOD, NUM_BAD, NUM_NEUTRAL = 4, 20, 20, 56
VOCAB_SIZE = FIRST_WORD + NUM_GOOD + NUM_BAD + NUM_NEUTRAL


def make_review(generator):
    """One review as token ids, and 1 if its good words outweigh the bad ones (0 otherwise)."""
    def draw(n):
        return int(torch.randint(n, (1,), generator=generator))

    mood = 0.75 if draw(2) else 0.25
    tokens, balance = [CLS], 0
    for _ in range(6 + draw(14)):
        if draw(10) < 6:
            tokens.append(FIRST_WORD + NUM_GOOD + NUM_BAD + draw(NUM_NEUTRAL))
            continue
        good = float(torch.rand(1, generator=generator)) < mood
        negated = draw(6) == 0
        balance += 1 if good else -1
        if negated:  # "not bad" counts as good
            tokens.append(NOT)
        tokens.append(FIRST_WORD + draw(NUM_GOOD) + (NUM_GOOD if good == negated else 0))
    tokens.append(SEP)
    return tokens, balance


class Reviews(Dataset):
    """`size` reviews with a clear verdict; the same seed gives the same reviews on every process."""

    def __init__(self, size, seed):
        generator = torch.Generator().manual_seed(seed)
        self.examples = []
        while len(self.examples) < size:
            tokens, balance = make_review(generator)
            if balance != 0:
                self.examples.append({"input_ids": tokens, "label": int(balance > 0)})

    def __len__(self):
        return len(self.examples)

    def __getitem__(self, index):
        return self.examples[index]


def collate(examples):
    """Pads to the longest review of the batch."""
    width = max(len(example["input_ids"]) for example in examples)
    input_ids = torch.full((len(examples), width), PAD)
    for row, example in zip(input_ids, examples):
        row[:len(example["input_ids"])] = torch.tensor(example["input_ids"])
    return {
        "input_ids": input_ids,
        "attention_mask": (input_ids != PAD).long(),
        "labels": torch.tensor([example["label"] for example in examples]),
    }
