"""Spoken numbers ("four thousand uh seventy two") and their digits ("4 0 7 2"): vocabulary, data set, collator."""
import random

import torch
from torch.utils.data import Dataset

PAD, EOS = 0, 1
ONES = ("one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
        "seventeen eighteen nineteen").split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
FILLERS = ["uh", "well", "hmm"]
TOKENS = ["<pad>", "</s>", *"0123456789", *ONES, *TENS, "hundred", "thousand", *FILLERS]
ID = {token: i for i, token in enumerate(TOKENS)}
MAX_DIGITS = 4


def spell(number):
    words = []
    for size, name in ((1000, "thousand"), (100, "hundred")):
        if number >= size:
            words += [ONES[number // size - 1], name]
            number %= size
    if number >= 20:
        words.append(TENS[number // 10 - 2])
        number %= 10
    if number:
        words.append(ONES[number - 1])
    return words


def split_numbers(n_train, n_eval, seed):
    """Two disjoint lists of numbers; small ones are as frequent as large ones."""
    rng = random.Random(seed)
    chosen = set()
    while len(chosen) < n_train + n_eval:
        chosen.add(rng.randrange(1, 10 ** rng.choice([3, 4, 4])))
    numbers = sorted(chosen)
    rng.shuffle(numbers)
    return numbers[:n_train], numbers[n_train:]


class SpokenNumbers(Dataset):
    """With hesitation > 0 the speaker says "uh" here and there, in other places in each epoch."""

    def __init__(self, numbers, hesitation=0.0, seed=0):
        self.numbers, self.hesitation, self.seed, self.epoch = numbers, hesitation, seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, index):
        number = self.numbers[index]
        rng = random.Random(f"{self.seed}/{self.epoch}/{number}")
        words = []
        for word in spell(number):
            if rng.random() < self.hesitation:
                words.append(rng.choice(FILLERS))
            words.append(word)
        return {"words": words, "digits": list(str(number))}


def pad(rows, value):
    width = max(map(len, rows))
    return torch.tensor([row + [value] * (width - len(row)) for row in rows])


class NumberCollator:
    """Pads both sides. The labels are -100 where there is nothing to predict; the decoder reads them shifted."""

    def __init__(self, decoder_start_token_id):
        self.start = decoder_start_token_id

    def __call__(self, samples):
        sources = [[ID[word] for word in s["words"]] + [EOS] for s in samples]
        targets = [[ID[digit] for digit in s["digits"]] + [EOS] for s in samples]
        return {
            "input_ids": pad(sources, PAD),
            "attention_mask": pad([[1] * len(source) for source in sources], 0),
            "decoder_input_ids": pad([[self.start] + target[:-1] for target in targets], PAD),
            "labels": pad(targets, -100),
        }
