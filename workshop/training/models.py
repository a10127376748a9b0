"""The models that stages 01 to 03 train."""

import torch
from torch import nn
from torch.nn import functional as F


class SmallCNN(nn.Module):
    """The convolutional network of the MNIST tutorials: conv 32, conv 64, linear 128, linear 10; 1,199,882 parameters.

    It has no dropout and no BatchNorm on purpose: its output for a sample depends only on that sample and the parameters,
    so one process and N processes that use the same global batches train the same model.
    """

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, kernel_size=3)
        self.conv2 = nn.Conv2d(32, 64, kernel_size=3)
        self.fc1 = nn.Linear(64 * 12 * 12, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images of shape (batch, 1, 28, 28) to logits of shape (batch, 10)."""
        x = F.relu(self.conv1(images))
        x = F.max_pool2d(F.relu(self.conv2(x)), kernel_size=2)
        x = F.relu(self.fc1(x.flatten(start_dim=1)))
        return self.fc2(x)


class ResNet18(nn.Module):
    """ResNet-18 for ten classes, as in He et al. 2015 (https://arxiv.org/abs/1512.03385), table 1.

    Its stem is made for photographs of 224 x 224 pixels: a 7 x 7 convolution and a pooling keep one sixteenth of the pixels.

    Args:
        width: channels of the first stage, doubled in each of the other three. The paper has 64 (11.2 million parameters); 16
            takes one sixteenth of the computation.
    """

    def __init__(self, width: int = 64):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, kernel_size=7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
        )
        blocks, channels = [], width
        for stage in range(4):
            for stride in (1 if stage == 0 else 2, 1):
                blocks.append(_Block(channels, width * 2**stage, stride))
                channels = width * 2**stage
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images of shape (batch, 3, height, width) to logits of shape (batch, 10)."""
        return self.head(self.blocks(self.stem(images)))


class _Block(nn.Module):
    """Two 3 x 3 convolutions, and a shortcut around them."""

    def __init__(self, channels: int, out: int, stride: int):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, out, kernel_size=3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
            nn.Conv2d(out, out, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.shortcut = nn.Identity()
        if stride > 1 or channels != out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, out, kernel_size=1, stride=stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.layers(x) + self.shortcut(x))
