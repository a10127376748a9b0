"""Image pairs with known flow: a random texture, looked at before and after a random motion."""
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset

MARGIN = 10  # texture around the frame, so that what moves in is not black


def pixel_grid(height, width):
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack([x, y]).float()


class FlowPairs(Dataset):
    """image1(x) == image2(x + flow(x)) up to noise. The pair depends on the index only, the augmentation also on the epoch."""

    def __init__(self, motion, count, size, seed, augment):
        self.motion, self.count, self.size, self.seed, self.augment = motion, count, tuple(size), seed, augment
        self.epoch = 0

    def __len__(self):
        return self.count

    def set_epoch(self, epoch):
        self.epoch = epoch

    def texture(self, g):
        h, w = self.size[0] + 2 * MARGIN, self.size[1] + 2 * MARGIN
        out = torch.zeros(1, 1, h, w)
        for cell, weight in ((3, 0.6), (6, 1.0)):
            noise = torch.randn(1, 1, h // cell + 1, w // cell + 1, generator=g)
            out += weight * F.interpolate(noise, size=(h, w), mode="bicubic", align_corners=True)
        return out

    def flow(self, g):
        h, w = self.size
        shift = 10.0 * torch.rand(2, 1, 1, generator=g) - 5.0
        flow = shift.expand(2, h, w).clone()
        if self.motion == "affine":
            centred = pixel_grid(h, w) - torch.tensor([(w - 1) / 2, (h - 1) / 2]).view(2, 1, 1)
            matrix = 0.12 * torch.randn(2, 2, generator=g)
            flow = 0.6 * flow + torch.einsum("ij,jhw->ihw", matrix.clamp(-0.25, 0.25), centred)
        return flow

    def __getitem__(self, index):
        g = torch.Generator().manual_seed(self.seed * 100_003 + index)
        texture, flow = self.texture(g), self.flow(g)
        h, w = self.size
        target = pixel_grid(h, w) + flow
        scale = torch.tensor([w + 2 * MARGIN - 1, h + 2 * MARGIN - 1]).view(2, 1, 1)
        where = (2 * (target + MARGIN) / scale - 1).permute(1, 2, 0)[None]
        image1 = F.grid_sample(texture, where, align_corners=True)[0]
        image2 = texture[0, :, MARGIN:MARGIN + h, MARGIN:MARGIN + w].clone()
        valid = (target[0] >= 0) & (target[0] <= w - 1) & (target[1] >= 0) & (target[1] <= h - 1)
        if self.augment:
            g.manual_seed((self.seed + 7919 * (self.epoch + 1)) * 100_003 + index)
            contrast, brightness = 0.8 + 0.4 * torch.rand(1, generator=g), 0.2 * torch.randn(1, generator=g)
            image1, image2 = image1 * contrast + brightness, image2 * contrast + brightness
            image1 += 0.05 * torch.randn(image1.shape, generator=g)
            image2 += 0.05 * torch.randn(image2.shape, generator=g)
        return image1, image2, flow, valid
