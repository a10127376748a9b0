"""A made-up corpus: documents in a few dialects, each dialect with its own habits of which word follows which."""
import torch
from torch.utils.data import Dataset


def make_dialects(num_dialects, vocab_size, generator):
    """Transition probabilities [dialect, word, next word]: four likely successors each, the rest is rare."""
    table = torch.full((num_dialects, vocab_size, vocab_size), 0.06 / vocab_size)
    for dialect in range(num_dialects):
        for word in range(vocab_size):
            followers = torch.randperm(vocab_size, generator=generator)[:4]
            table[dialect, word, followers] += torch.tensor([0.54, 0.25, 0.10, 0.05])
    return table


class DialectCorpus(Dataset):
    """Documents of `length` + 1 tokens: the first token says the dialect, the others are words."""

    def __init__(self, num_docs, length, num_dialects=3, vocab_size=40, seed=0, split="train"):
        table = make_dialects(num_dialects, vocab_size, torch.Generator().manual_seed(seed))
        generator = torch.Generator().manual_seed(2 * seed + {"train": 1_000_000, "val": 1_000_001}[split])
        dialect = torch.randint(num_dialects, (num_docs,), generator=generator)
        word = torch.randint(vocab_size, (num_docs,), generator=generator)
        columns = [vocab_size + dialect, word]
        for _ in range(length - 1):
            word = torch.multinomial(table[dialect, word], 1, generator=generator).squeeze(1)
            columns.append(word)
        self.tokens = torch.stack(columns, dim=1)
        self.num_tokens = vocab_size + num_dialects

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        document = self.tokens[index]
        return document[:-1], document[1:]
