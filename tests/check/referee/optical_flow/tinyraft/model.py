"""A small relative of RAFT: all-pairs correlation, a lookup around the present estimate, a convolutional GRU."""
import torch
import torch.nn as nn
import torch.nn.functional as F

STRIDE = 4  # of the feature maps


def coords_grid(batch, height, width, device):
    y, x = torch.meshgrid(torch.arange(height, device=device), torch.arange(width, device=device), indexing="ij")
    return torch.stack([x, y]).float()[None].repeat(batch, 1, 1, 1)


class Encoder(nn.Module):
    def __init__(self, out_dim, norm):
        super().__init__()
        make_norm = {"instance": nn.InstanceNorm2d, "group": lambda c: nn.GroupNorm(4, c)}[norm]
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 5, stride=2, padding=2), make_norm(16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), make_norm(32), nn.ReLU(),
            nn.Conv2d(32, out_dim, 3, padding=1),
        )

    def forward(self, x):
        return self.layers(x)


class CorrelationPyramid:
    def __init__(self, f1, f2, levels, radius):
        self.radius, self.pyramid = radius, []
        b, c, h, w = f1.shape
        volume = torch.einsum("bchw,bcij->bhwij", f1, f2) / c ** 0.5
        volume = volume.reshape(b * h * w, 1, h, w)
        for _ in range(levels):
            self.pyramid.append(volume)
            volume = F.avg_pool2d(volume, 2)
        around = torch.arange(-radius, radius + 1, device=f1.device, dtype=torch.float32)
        dy, dx = torch.meshgrid(around, around, indexing="ij")
        self.window = torch.stack([dx, dy], dim=-1)[None]

    def __call__(self, coords):
        b, _, h, w = coords.shape
        centre = coords.permute(0, 2, 3, 1).reshape(b * h * w, 1, 1, 2)
        found = []
        for level, volume in enumerate(self.pyramid):
            where = (centre + 0.5) / 2 ** level - 0.5 + self.window
            size = torch.tensor([volume.shape[3] - 1, volume.shape[2] - 1], device=coords.device)
            values = F.grid_sample(volume, 2 * where / size - 1, align_corners=True)
            found.append(values.reshape(b, h, w, -1))
        return torch.cat(found, dim=-1).permute(0, 3, 1, 2)


class UpdateBlock(nn.Module):
    def __init__(self, corr_dim, hidden):
        super().__init__()
        self.corr = nn.Conv2d(corr_dim, 32, 1)
        self.flow = nn.Conv2d(2, 8, 3, padding=1)
        self.motion = nn.Conv2d(40, hidden - 2, 3, padding=1)
        self.gates = nn.Conv2d(3 * hidden, 2 * hidden, 3, padding=1)
        self.candidate = nn.Conv2d(3 * hidden, hidden, 3, padding=1)
        self.flow_head = nn.Sequential(nn.Conv2d(hidden, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 2, 3, padding=1))
        self.mask_head = nn.Conv2d(hidden, STRIDE ** 2 * 9, 1)

    def forward(self, state, context, corr, flow):
        motion = torch.cat([F.relu(self.corr(corr)), F.relu(self.flow(flow))], dim=1)
        x = torch.cat([context, F.relu(self.motion(motion)), flow], dim=1)
        update, reset = torch.sigmoid(self.gates(torch.cat([state, x], dim=1))).chunk(2, dim=1)
        candidate = torch.tanh(self.candidate(torch.cat([reset * state, x], dim=1)))
        state = (1 - update) * state + update * candidate
        return state, self.flow_head(state), self.mask_head(state)


class TinyRAFT(nn.Module):
    def __init__(self, hidden, feature, levels, radius):
        super().__init__()
        self.hidden, self.levels, self.radius = hidden, levels, radius
        self.fnet = Encoder(feature, "instance")
        self.cnet = Encoder(2 * hidden, "group")
        self.update = UpdateBlock(levels * (2 * radius + 1) ** 2, hidden)

    def upsample(self, flow, mask):
        """Every fine pixel is a convex combination of the nine coarse ones around it."""
        b, _, h, w = flow.shape
        mask = mask.float().view(b, 1, 9, STRIDE, STRIDE, h, w).softmax(dim=2)
        near = F.unfold(STRIDE * flow, 3, padding=1).view(b, 2, 9, 1, 1, h, w)
        return (mask * near).sum(2).permute(0, 1, 4, 2, 5, 3).reshape(b, 2, STRIDE * h, STRIDE * w)

    def forward(self, image1, image2, iters):
        f1, f2 = self.fnet(torch.cat([image1, image2])).float().chunk(2)
        with torch.autocast(image1.device.type, enabled=False):
            lookup = CorrelationPyramid(f1, f2, self.levels, self.radius)
        state, context = self.cnet(image1).split(self.hidden, dim=1)
        state, context = torch.tanh(state), F.relu(context)
        start = coords_grid(f1.shape[0], f1.shape[2], f1.shape[3], f1.device)
        coords, predictions = start.clone(), []
        for _ in range(iters):
            coords = coords.detach()
            state, delta, mask = self.update(state, context, lookup(coords), coords - start)
            coords = coords + delta.float()
            predictions.append(self.upsample(coords - start, mask))
        return predictions
