"""The small model that stages 01 to 03 train."""

import torch
from torch import nn
from torch.nn import functional as F


class SmallCNN(nn.Module):
    """The convolutional network of the MNIST tutorials: conv 32, conv 64, linear 128, linear 10; 1,199,882 parameters.

    It has no dropout and no BatchNorm on purpose: its output for a sample depends on that sample and the weights alone,
    so one process and N processes that see the same global batches compute the same training.
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
