"""Mean average precision over the detections of all ranks."""
import torch
import torch.distributed as dist
from torchvision.ops import box_iou

from .data import CLASSES
from .model import decode


def average_precision(results, label, iou_threshold):
    scores, hits, total = [], [], 0
    for det, truth in results.values():
        gt = truth["boxes"][truth["labels"] == label]
        mine = det["labels"] == label
        total += len(gt)
        used = torch.zeros(len(gt), dtype=torch.bool)
        for score, box in zip(det["scores"][mine], det["boxes"][mine]):  # by falling score
            iou = box_iou(box[None], gt)[0].masked_fill(used, 0) if len(gt) else torch.zeros(1)
            hit = bool(iou.max() >= iou_threshold)
            if hit:
                used[iou.argmax()] = True
            scores.append(score.item())
            hits.append(float(hit))
    if not scores:
        return 0.0
    tp = torch.tensor(hits)[torch.tensor(scores).argsort(descending=True, stable=True)]
    precision = tp.cumsum(0) / torch.arange(1, len(tp) + 1)
    return ((precision * tp).sum() / max(total, 1)).item()


@torch.no_grad()
def evaluate(model, loader, cfg, device):
    model.eval()
    local = {}
    for images, targets in loader:
        detections = decode(*model(images.to(device)), cfg["score_threshold"])
        for det, target in zip(detections, targets):
            local[target["image_id"]] = (det, target)
    model.train()
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, local)
    results = {}
    for part in parts:  # images repeated by the sampler's padding have the same id
        results.update(part)
    return sum(average_precision(results, c, cfg["iou_threshold"]) for c in range(CLASSES)) / CLASSES
