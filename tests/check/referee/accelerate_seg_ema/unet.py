import copy

import torch
import torch.nn as nn


def block(inside, outside):
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, padding=1, bias=False), nn.GroupNorm(4, outside), nn.SiLU(),
        nn.Conv2d(outside, outside, 3, padding=1, bias=False), nn.GroupNorm(4, outside), nn.SiLU())


class UNet(nn.Module):
    """A U-Net with two levels below the full resolution."""

    def __init__(self, classes, width=8, dropout=0.05):
        super().__init__()
        self.down1, self.down2, self.middle = block(3, width), block(width, 2 * width), block(2 * width, 4 * width)
        self.pool, self.dropout = nn.MaxPool2d(2), nn.Dropout2d(dropout)
        self.up2, self.up1 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.join2, self.join1 = block(4 * width, 2 * width), block(2 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(self.pool(a))
        c = self.dropout(self.middle(self.pool(b)))
        b = self.join2(torch.cat([self.up2(c), b], 1))
        a = self.join1(torch.cat([self.up1(b), a], 1))
        return self.head(a)


class EMA:
    """A second model whose weights follow the trained ones slowly. Every rank keeps one; they stay equal, because
    the trained weights are equal on all ranks."""

    def __init__(self, model, decay):
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for average, parameter in zip(self.model.parameters(), model.parameters()):
            average.lerp_(parameter, 1 - self.decay)
        for average, buffer in zip(self.model.buffers(), model.buffers()):
            average.copy_(buffer)

    def state_dict(self):
        return {"model": self.model.state_dict()}

    def load_state_dict(self, state):
        self.model.load_state_dict(state["model"])
