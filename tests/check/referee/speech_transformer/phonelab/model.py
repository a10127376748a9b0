import torch
import torch.nn as nn


class FrameTagger(nn.Module):
    """Convolutional front end and a transformer encoder that label every frame with a phone."""

    def __init__(self, feats, phones, dim, layers, heads, dropout):
        super().__init__()
        self.front = nn.Conv1d(feats, dim, kernel_size=5, padding=2)
        block = nn.TransformerEncoderLayer(dim, heads, 2 * dim, dropout, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(block, layers, norm=nn.LayerNorm(dim), enable_nested_tensor=False)
        self.out = nn.Linear(dim, phones)
        self.register_buffer("rates", 1e4 ** (-torch.arange(0, dim, 2) / dim), persistent=False)

    def forward(self, feats, padding):
        angles = torch.arange(feats.shape[1], device=feats.device).unsqueeze(1) * self.rates
        x = self.front(feats.transpose(1, 2)).transpose(1, 2) + torch.cat([angles.sin(), angles.cos()], dim=1)
        return self.out(self.encoder(x, src_key_padding_mask=padding))
