"""scikit-learn's handwritten digits (8 x 8), the transforms for training, and mixup."""
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import Dataset, default_collate

NUM_CLASSES, NUM_VAL = 10, 357


class ClassificationPresetTrain:
    def __call__(self, image):
        dy, dx = torch.randint(3, (2,)).tolist()
        shifted = F.pad(image, (1, 1, 1, 1))[:, dy:dy + 8, dx:dx + 8]
        return shifted + 0.05 * torch.randn_like(image)


class Digits(Dataset):
    def __init__(self, train, transform=None):
        images, labels = load_digits(return_X_y=True)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        order = order[NUM_VAL:] if train else order[:NUM_VAL]
        self.images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8)[order] / 16
        self.labels, self.transform = torch.tensor(labels)[order], transform

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        image = self.images[i]
        return (self.transform(image) if self.transform else image), self.labels[i]


class MixUpCollate:
    """Mixes each batch with itself, shifted by one place; the targets become probabilities."""

    def __init__(self, alpha):
        self.alpha = alpha

    def __call__(self, samples):
        images, labels = default_collate(samples)
        targets = F.one_hot(labels, NUM_CLASSES).float()
        if self.alpha > 0:
            lam = torch.distributions.Beta(self.alpha, self.alpha).sample()
            images = images * lam + images.roll(1, 0) * (1 - lam)
            targets = targets * lam + targets.roll(1, 0) * (1 - lam)
        return images, targets
