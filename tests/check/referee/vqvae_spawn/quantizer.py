"""Vector quantisation whose codebook follows exponential moving averages of the encoder outputs of all ranks."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class EMAQuantizer(nn.Module):
    """The codebook, its running counts and its running sums are buffers. Every rank makes the same update from sums
    over all ranks, so that the copies stay equal without being sent around.

    In training, forward leaves the statistics of its batch behind and `update_codebook` uses them up."""

    def __init__(self, num_codes, dim, decay=0.95, commitment=0.25, dead_below=1.0, seed=0):
        super().__init__()
        self.num_codes, self.dim = num_codes, dim
        self.decay, self.commitment, self.dead_below = decay, commitment, dead_below
        codebook = torch.randn(num_codes, dim, generator=torch.Generator().manual_seed(seed))
        self.register_buffer("codebook", codebook)
        # at the edge of death: codes that the first batch does not use move onto encoder outputs at once
        self.register_buffer("ema_counts", torch.full((num_codes,), dead_below))
        self.register_buffer("ema_sums", codebook * dead_below)
        self.pending = None  # the vectors of the last training batch and their codes

    def forward(self, z):
        """z: (batch, dim, height, width). Returns the quantised z, the codes and the commitment loss."""
        batch, _, height, width = z.shape
        vectors = z.permute(0, 2, 3, 1).reshape(-1, self.dim)
        with torch.no_grad():
            distances = (
                vectors.pow(2).sum(1, keepdim=True) - 2 * vectors @ self.codebook.t() + self.codebook.pow(2).sum(1)
            )
            codes = distances.argmin(dim=1)
            if self.training:
                self.pending = (vectors.detach(), codes)
        quantized = self.codebook[codes].view(batch, height, width, self.dim).permute(0, 3, 1, 2)
        loss = self.commitment * F.mse_loss(z, quantized)
        quantized = z + (quantized - z).detach()  # straight through
        return quantized, codes.view(batch, height, width), loss

    @torch.no_grad()
    def update_codebook(self, generator):
        """Called by every rank once per training step. Returns the number of codes that were brought back to life."""
        vectors, codes = self.pending
        self.pending = None
        one_hot = F.one_hot(codes, self.num_codes).to(vectors.dtype)
        counts = one_hot.sum(dim=0)
        sums = torch.einsum("nk,nd->dk", one_hot, vectors).t().contiguous()
        dist.all_reduce(counts)
        dist.all_reduce(sums)

        self.ema_counts.mul_(self.decay).add_(counts, alpha=1 - self.decay)
        self.ema_sums.mul_(self.decay).add_(sums, alpha=1 - self.decay)
        self.codebook.copy_(self.ema_sums / self.ema_counts.clamp(min=1e-5).unsqueeze(1))
        return self.revive_dead_codes(vectors, generator)

    def revive_dead_codes(self, vectors, generator):
        """Moves each code that is hardly used onto an encoder output, drawn from those of all ranks."""
        dead = self.ema_counts < self.dead_below
        n = int(dead.sum())  # the same on every rank, as the counts are
        if n == 0:
            return 0
        # each rank offers n of its vectors; all ranks see the same offers and rank 0 says which ones are taken
        picks = torch.randint(len(vectors), (n,), generator=generator).to(vectors.device)
        offers = [torch.empty(n, self.dim, device=vectors.device) for _ in range(dist.get_world_size())]
        dist.all_gather(offers, vectors[picks].contiguous())
        offers = torch.cat(offers)
        chosen = torch.randperm(len(offers), generator=generator)[:n].to(vectors.device)
        dist.broadcast(chosen, src=0)
        fresh = offers[chosen]
        self.codebook[dead] = fresh
        self.ema_counts[dead] = 2.0 * self.dead_below
        self.ema_sums[dead] = fresh * 2.0 * self.dead_below
        return n
