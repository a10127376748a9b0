from torch import nn


class SignalNet(nn.Module):
    def __init__(self, classes, width, depth):
        super().__init__()
        self.stem = nn.Conv1d(1, width, 7, stride=2, padding=3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.GroupNorm(4, width), nn.GELU(), nn.Dropout(0.1),
                                                  nn.Conv1d(width, width, 3, padding=1)) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.abs().mean(dim=2))
