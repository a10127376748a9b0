"""A one-stage anchor-free detector: for every cell class scores and the distances to the box sides."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torchvision.ops import batched_nms, sigmoid_focal_loss

from .data import CLASSES, GRID, SIZE

STRIDE = SIZE // GRID


def cell_centers(device):
    c = (torch.arange(GRID, device=device) + 0.5) * STRIDE
    yy, xx = torch.meshgrid(c, c, indexing="ij")
    return torch.stack([xx, yy], -1).reshape(-1, 2)


class Detector(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        layers, channels = [], 3
        for stride in (1, 2, 2, 1):
            layers += [nn.Conv2d(channels, width, 3, stride, 1), nn.GroupNorm(4, width), nn.ReLU()]
            channels = width
        self.trunk = nn.Sequential(*layers)
        self.cls, self.box = nn.Conv2d(width, CLASSES, 1), nn.Conv2d(width, 4, 1)
        nn.init.constant_(self.cls.bias, -2.0)

    def forward(self, images):
        f = self.trunk(images)
        logits = self.cls(f).flatten(2).transpose(1, 2)
        ltrb = F.softplus(self.box(f)).flatten(2).transpose(1, 2) * STRIDE
        centers = cell_centers(images.device)
        return logits, torch.cat([centers - ltrb[..., :2], centers + ltrb[..., 2:]], -1)


def detection_loss(logits, boxes, targets, box_weight):
    """Focal loss and L1 box loss, normalised by the number of boxes over all ranks."""
    one_hot, matched, positive = torch.zeros_like(logits), torch.zeros_like(boxes), []
    for b, target in enumerate(targets):
        for box, label in zip(target["boxes"].to(boxes.device), target["labels"].tolist()):
            x, y = (((box[:2] + box[2:]) / 2) // STRIDE).long().tolist()
            cell = y * GRID + x
            one_hot[b, cell, label], matched[b, cell] = 1.0, box
            positive.append((b, cell))
    num_boxes = torch.tensor(float(sum(len(t["labels"]) for t in targets)), device=logits.device)
    dist.all_reduce(num_boxes)
    num_boxes = (num_boxes / dist.get_world_size()).clamp(min=1)

    rows = torch.tensor(positive, dtype=torch.long, device=boxes.device).reshape(-1, 2)
    cls_loss = sigmoid_focal_loss(logits, one_hot, reduction="sum") / num_boxes
    picked = boxes[rows[:, 0], rows[:, 1]], matched[rows[:, 0], rows[:, 1]]
    box_loss = F.l1_loss(*picked, reduction="sum") / (num_boxes * STRIDE)
    return 4 * cls_loss + box_weight * box_loss


def decode(logits, boxes, score_threshold):
    """Detections of each image after non-maximum suppression."""
    out = []
    for scores, bx in zip(logits.sigmoid(), boxes):
        score, label = scores.max(-1)
        keep = score > score_threshold
        score, label, bx = score[keep], label[keep], bx[keep]
        keep = batched_nms(bx, score, label, 0.4)
        out.append({"scores": score[keep].cpu(), "labels": label[keep].cpu(), "boxes": bx[keep].cpu()})
    return out
