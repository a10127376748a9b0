"""Synthetic scenes: 32x32 images with zero to four bright rectangles of two classes."""
import torch
from torch.utils.data import Dataset

SIZE, GRID, CLASSES = 32, 8, 2


class Scenes(Dataset):
    def __init__(self, size, seed):
        self.size, self.seed = size, seed

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        gen = torch.Generator().manual_seed(self.seed * 100_003 + i)
        image = 0.2 * torch.randn(3, SIZE, SIZE, generator=gen)
        boxes, labels = [], []
        for _ in range(int(torch.randint(0, 5, (1,), generator=gen))):
            w, h = (5 + 6 * torch.rand(2, generator=gen)).tolist()
            x, y = ((SIZE - 11) * torch.rand(2, generator=gen)).tolist()
            label = int(torch.randint(0, CLASSES, (1,), generator=gen))
            image[label, round(y):round(y + h), round(x):round(x + w)] += 1.0
            boxes.append([x, y, x + w, y + h])
            labels.append(label)
        return image, {"image_id": i, "boxes": torch.tensor(boxes).reshape(-1, 4),
                       "labels": torch.tensor(labels, dtype=torch.long)}


def collate(batch):
    return torch.stack([b[0] for b in batch]), [b[1] for b in batch]
