"""Weighted k-NN on frozen features. Every rank embeds its share; the memory bank is put together on all of them."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader, Subset


@torch.no_grad()
def embed_share(backbone, dataset, device, batch_size):
    """Features and labels of the images rank, rank + world, rank + 2 * world ..., and these indices."""
    indices = range(dist.get_rank(), len(dataset), dist.get_world_size())
    features, labels = [], []
    for images, targets in DataLoader(Subset(dataset, indices), batch_size=batch_size):
        features.append(F.normalize(backbone(images.to(device)), dim=-1))
        labels.append(targets.to(device))
    return torch.cat(features), torch.cat(labels), torch.tensor(indices, device=device)


@torch.no_grad()
def knn_accuracy(backbone, train_set, val_set, device, k=10, temperature=0.07, classes=10, batch_size=256):
    was_training = backbone.training
    backbone.eval()

    features, labels, indices = embed_share(backbone, train_set, device, batch_size)
    bank = torch.zeros(len(train_set), features.shape[1], device=device)
    bank_labels = torch.zeros(len(train_set), dtype=torch.long, device=device)
    bank[indices], bank_labels[indices] = features, labels
    dist.all_reduce(bank)  # each row is nonzero on exactly one rank
    dist.all_reduce(bank_labels)

    queries, targets, _ = embed_share(backbone, val_set, device, batch_size)
    similarity, neighbours = (queries @ bank.T).topk(k, dim=1)
    votes = torch.zeros(len(queries), classes, device=device)
    votes.scatter_add_(1, bank_labels[neighbours], (similarity / temperature).exp())
    counts = torch.tensor([(votes.argmax(1) == targets).sum().item(), len(targets)], device=device)
    dist.all_reduce(counts)

    backbone.train(was_training)
    return counts[0].item() / counts[1].item()
