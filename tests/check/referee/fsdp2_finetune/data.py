"""Two related toy languages. In each, the next word depends on the last one; the second language changes some of the
rules of the first. A text has a prompt and an answer of different lengths, and only the answer is to be learned."""
import torch
from torch.utils.data import Dataset

WORDS, PAD, IGNORE = 40, 0, -100


def make_rules(seed, changed_words=0):
    """A table with the probabilities of the next word. changed_words: for so many words the rules are new."""
    g = torch.Generator().manual_seed(seed)
    scores = 2.5 * torch.randn(WORDS, WORDS, generator=g)
    if changed_words:
        g = torch.Generator().manual_seed(seed + 1)
        new = torch.randperm(WORDS - 1, generator=g)[:changed_words] + 1
        scores[new] = 2.5 * torch.randn(changed_words, WORDS, generator=g)
    scores[:, PAD] = -float("inf")
    return scores.softmax(1)


class Texts(Dataset):
    def __init__(self, n, rules, seed, longest=32, prompt=True):
        g = torch.Generator().manual_seed(seed)
        words = torch.randint(1, WORDS, (n, 1), generator=g)
        for _ in range(longest - 1):
            words = torch.cat([words, torch.multinomial(rules[words[:, -1]], 1, generator=g)], 1)
        lengths = torch.randint(longest // 4, longest + 1, (n,), generator=g)
        prompts = (lengths * 0.4 * torch.rand(n, generator=g)).long() if prompt else torch.zeros_like(lengths)
        self.items = [(text[:length], int(start)) for text, length, start in zip(words, lengths, prompts)]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def collate(items):
    """Inputs and labels (the next word), padded. An empty list of items becomes one row without labels."""
    longest = max([len(text) for text, _ in items], default=2) - 1
    inputs = torch.full((max(len(items), 1), longest), PAD)
    labels = torch.full((max(len(items), 1), longest), IGNORE)
    for row, (text, start) in enumerate(items):
        inputs[row, :len(text) - 1] = text[:-1]
        labels[row, start:len(text) - 1] = text[start + 1:]
    return inputs, labels
