"""Small noisy pictures of discs and squares, with a class for every pixel: background, disc, square."""
import torch
from torch.utils.data import Dataset

CLASSES = ("background", "disc", "square")


class Shapes(Dataset):
    def __init__(self, n, size=24, noise=0.35, seed=0):
        g = torch.Generator().manual_seed(seed)
        ys, xs = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
        self.images = noise * torch.randn(n, 3, size, size, generator=g)
        self.masks = torch.zeros(n, size, size, dtype=torch.long)
        for image, mask in zip(self.images, self.masks):
            image += 0.3 * torch.rand(3, 1, 1, generator=g)
            for _ in range(int(torch.randint(1, 4, (1,), generator=g))):
                kind = int(torch.randint(1, 3, (1,), generator=g))
                y, x = torch.randint(4, size - 4, (2,), generator=g).tolist()
                radius = float(torch.randint(4, 7, (1,), generator=g))
                if kind == 1:
                    inside = (ys - y) ** 2 + (xs - x) ** 2 <= radius ** 2
                else:
                    inside = torch.maximum((ys - y).abs(), (xs - x).abs()) <= radius - 1
                colour = 0.5 + 0.5 * torch.rand(3, 1, generator=g)
                colour[kind] += 0.5  # discs are greener, squares bluer
                image[:, inside] = colour + 0.5 * noise * torch.randn(3, int(inside.sum()), generator=g)
                mask[inside] = kind

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], self.masks[index]


def augment(images, masks, noise=0.05):
    """Flip each picture or not, in both directions, and add a little noise (from the global random generator)."""
    for dim in (1, 2):
        flip = torch.rand(len(images), device=images.device) < 0.5
        images = torch.where(flip.view(-1, 1, 1, 1), images.flip(dim + 1), images)
        masks = torch.where(flip.view(-1, 1, 1), masks.flip(dim), masks)
    return images + noise * torch.randn_like(images), masks
