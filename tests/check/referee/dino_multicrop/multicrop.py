"""Noisy handwritten digits and their multi-crop views: two large crops and several small ones of every image."""
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

IMAGE_SIZE = 16


def digit_splits(val_size=357, noise=0.8, seed=0):
    """The same images and the same split on every rank: they come from a generator of their own."""
    generator = torch.Generator().manual_seed(seed)
    pixels, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(pixels).float().view(-1, 1, 8, 8) / 16.0
    images = F.interpolate(images, size=IMAGE_SIZE, mode="bilinear", align_corners=False)
    images = (images - 0.3) / 0.35 + noise * torch.randn(images.shape, generator=generator)
    order = torch.randperm(len(images), generator=generator)
    images, labels = images[order], torch.from_numpy(labels).long()[order]
    return TensorDataset(images[val_size:], labels[val_size:]), TensorDataset(images[:val_size], labels[:val_size])


class MultiCrop:
    """Random resized, slightly turned crops of a whole batch, with a jitter of contrast and noise.

    Draws from the global generator, so that the seed of the process decides what is cut out.
    """

    def __init__(self, global_scale, local_scale, local_crops, global_size=IMAGE_SIZE, local_size=IMAGE_SIZE // 2):
        self.plan = [(global_size, global_scale)] * 2 + [(local_size, local_scale)] * local_crops

    @staticmethod
    def crop(images, size, scale):
        n, device = len(images), images.device
        low, high = scale
        side = (low + (high - low) * torch.rand(n, device=device)).sqrt()
        angle = 0.25 * (2 * torch.rand(n, device=device) - 1)
        shift = (1 - side).unsqueeze(1) * (2 * torch.rand(n, 2, device=device) - 1)
        cos, sin = side * angle.cos(), side * angle.sin()
        theta = torch.stack([torch.stack([cos, -sin, shift[:, 0]], 1), torch.stack([sin, cos, shift[:, 1]], 1)], 1)
        grid = F.affine_grid(theta, (n, images.shape[1], size, size), align_corners=False)
        crops = F.grid_sample(images, grid, padding_mode="border", align_corners=False)
        contrast = 0.7 + 0.6 * torch.rand(n, 1, 1, 1, device=device)
        return crops * contrast + 0.1 * torch.randn_like(crops)

    def __call__(self, images):
        return [self.crop(images, size, scale) for size, scale in self.plan]
