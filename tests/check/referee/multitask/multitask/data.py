import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

VOCAB, LENGTH, TOPICS = 200, 20, 6


def make_documents(n, seed):
    """Bags of words: the topic decides which words are likely, the words carry a sentiment."""
    world = torch.Generator().manual_seed(123)
    topic_words = (1.2 * torch.randn(TOPICS, VOCAB, generator=world)).softmax(-1)
    sentiment = torch.randn(VOCAB, generator=world)
    g = torch.Generator().manual_seed(seed)
    topics = torch.randint(TOPICS, (n,), generator=g)
    words = torch.multinomial(topic_words[topics], LENGTH, replacement=True, generator=g)
    ratings = sentiment[words].mean(1) * 3 + 0.1 * torch.randn(n, generator=g)
    return words, topics, ratings


def build_loaders(cfg, rank, world_size):
    """One training loader for each task (different documents), and this rank's share of the held-out ones."""
    words_t, topics, _ = make_documents(cfg["data"]["topic_train"], seed=1)
    words_r, _, ratings = make_documents(cfg["data"]["rating_train"], seed=2)
    train = {}
    for task, data in {"topic": TensorDataset(words_t, topics), "rating": TensorDataset(words_r, ratings)}.items():
        sampler = DistributedSampler(data, world_size, rank, shuffle=True, seed=cfg["seed"], drop_last=True)
        train[task] = DataLoader(data, cfg["batch_size"], sampler=sampler, drop_last=True)

    words, topics, ratings = (t[rank::world_size] for t in make_documents(cfg["data"]["held_out"], seed=3))
    held_out = {
        "topic": DataLoader(TensorDataset(words, topics), 100),
        "rating": DataLoader(TensorDataset(words, ratings), 100),
    }
    return train, held_out
