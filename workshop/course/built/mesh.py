"""Cases for the class Layout and the functions of exercise 8, on the four processes of a mesh."""

from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp

from workshop.course.built.cases import CLOSE, Case
from workshop.training.decoder import Config, Transformer

CONFIG = Config(layers=2, width=16, heads=2, length=16, tied=False)
CPU = torch.device("cpu")
FOLDER = "checkpoint-of-the-case"  # in the folder of the run, which all ranks share


def made(module: ModuleType, **sizes: int) -> tuple[Any, torch.nn.Module, dict[str, torch.Tensor]]:
    """Return a layout, the stage of this rank, and the parameters of the whole model."""
    layout = module.Layout(CPU, **{"pp": 1, "dp": 1, "cp": 1, "tp": 1} | sizes)
    torch.manual_seed(0)
    model = Transformer(CONFIG).double()
    whole = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return layout, layout.build(model, CONFIG.length, CPU), whole


def part_of(whole: torch.Tensor, own: torch.Tensor, layout: Any) -> torch.Tensor:
    """Return the part of a whole tensor that this rank has: that of its place along tp."""
    for dimension, (size, all_of_it) in enumerate(zip(own.shape, whole.shape, strict=True)):
        if size != all_of_it:
            return whole.chunk(all_of_it // size, dimension)[dist.get_rank(layout.tp)]
    return whole


def parts(module: ModuleType) -> str:
    _, stage, whole = made(module, dp=2, tp=2)
    own = dict(stage.named_parameters())
    name = "blocks.0.mlp.up.weight"
    if own[name].numel() * 2 != whole[name].numel():
        return f"with tp = 2, each rank has all of {name}: complete exercise 4, or copy its solution"
    return ""


def order(module: ModuleType) -> str:
    for sizes in ({"dp": 2, "tp": 2}, {"pp": 2, "tp": 2}, {"cp": 2, "tp": 2}):
        layout = module.Layout(CPU, **{"pp": 1, "dp": 1, "cp": 1, "tp": 1} | sizes)
        ranks = dist.get_process_group_ranks(layout.tp)
        if ranks[-1] - ranks[0] != len(ranks) - 1:
            other = next(axis for axis in sizes if axis != "tp")
            return (
                f"with {other} = 2 and tp = 2, ranks {ranks[0]} and {ranks[1]} share a layer, and may be on two nodes"
            )
    return ""


def computed(module: ModuleType) -> str:
    layout, stage, _ = made(module, cp=2, tp=2)
    torch.manual_seed(0)
    model = Transformer(CONFIG).double()
    tokens = torch.randint(CONFIG.vocabulary, (2, CONFIG.length))
    own, places = layout.own_batch(tokens, torch.arange(CONFIG.length).expand(2, -1))
    expected = model(tokens).detach()[:, places[0]]
    found = stage(own).detach()
    if found.shape != expected.shape or float((found - expected).abs().max()) > CLOSE:
        return "the output differs from that of the whole model for the same tokens"
    return ""


def divided(module: ModuleType) -> str:
    layout = made(module, dp=2, cp=2)[0]
    tokens = torch.arange(4 * CONFIG.length).view(4, -1)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, layout.own_batch(tokens, tokens)[0].flatten().tolist())
    times = torch.tensor([number for own in everyone for number in own]).bincount(minlength=tokens.numel())
    if missing := int((times == 0).sum()):
        return f"own_batch() gives {missing} of {tokens.numel()} tokens of a global batch to no rank"
    return f"own_batch() gives {int((times > 1).sum())} tokens to several ranks" if int(times.max()) > 1 else ""


def averaged(module: ModuleType) -> str:
    for sizes in ({"dp": 2, "cp": 2}, {"dp": 2, "tp": 2}):
        layout, stage, _ = made(module, **sizes)
        for parameter in stage.parameters():
            parameter.grad = torch.full_like(parameter, dist.get_rank())
        module.average_gradients(stage, layout)
        together = range(dist.get_world_size()) if "cp" in sizes else dist.get_process_group_ranks(layout.dp)
        mean = sum(together) / len(together)
        for name, parameter in stage.named_parameters():
            if float((parameter.grad - mean).abs().max()) > CLOSE:
                ranks = " and ".join(map(str, together))
                return f"after average_gradients(), the gradient of {name} is not the mean of ranks {ranks}"
    return ""


def clipped(module: ModuleType) -> str:
    layout, stage, whole = made(module, pp=2, tp=2)
    gradients = {name: torch.randn(each.shape, dtype=each.dtype) for name, each in whole.items()}
    for name, parameter in stage.named_parameters():
        parameter.grad = part_of(gradients[name], parameter, layout).clone()
    norm = float(sum(each.square().sum() for each in gradients.values())) ** 0.5
    found = float(module.clip_gradients(stage, layout, norm / 2))
    if abs(found - norm) > CLOSE * norm:
        return f"clip_gradients() returns the norm {found:.6f}; the gradients of the whole model have {norm:.6f}"
    for name, parameter in stage.named_parameters():
        expected = part_of(gradients[name], parameter, layout) / 2
        if float((parameter.grad - expected).abs().max()) > 1e-5:
            return f"after clip_gradients(), the gradient of {name} is not the scaled one"
    return ""


def trained(module: ModuleType, **sizes: int) -> tuple[Any, torch.nn.Module, Any, dict[str, torch.Tensor]]:
    """Return a layout, its stage, the optimizer after a step with the same gradients on all meshes, and the model before."""
    layout, stage, whole = made(module, **sizes)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=0.1, foreach=False)
    for name, parameter in stage.named_parameters():
        parameter.grad = part_of(whole[name].sin(), parameter, layout).clone()
    optimizer.step()
    return layout, stage, optimizer, whole


def state(module: ModuleType) -> str:
    layout, stage, optimizer, whole = trained(module, dp=2, tp=2)
    written_state = module.checkpoint_state(stage, optimizer, layout)
    for each in written_state.values():
        if hasattr(each, "to_local") and all(each.shape != one.shape for one in whole.values()):
            return f"checkpoint_state() has a tensor of shape {list(each.shape)}, but the whole model has no such parameter"
    own = 3 * sum(each.numel() for each in stage.parameters())  # with the two moments of AdamW
    written = sum(
        _local(each).numel() for each in written_state.values() if isinstance(each, torch.Tensor) and each.dim()
    )
    if written < own:
        return f"checkpoint_state() has {written:,} numbers; this rank has {own:,} in parameters and moments"
    return f"each rank writes {written:,} numbers, of which it has {own:,}" if written > own else ""


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def resumed(module: ModuleType) -> str:
    layout, stage, optimizer, _ = trained(module, dp=2, tp=2)
    dcp.save(module.checkpoint_state(stage, optimizer, layout), checkpoint_id=FOLDER)
    layout, stage, optimizer, _ = trained(module, pp=2, cp=2)
    after = {name: each.detach().clone() for name, each in stage.named_parameters()}
    moments = {name: optimizer.state[each]["exp_avg"].clone() for name, each in stage.named_parameters()}
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.zero_()
    other = torch.optim.AdamW(stage.parameters(), lr=0.1, foreach=False)
    steps = module.resume(stage, other, layout, FOLDER)
    for name, parameter in stage.named_parameters():
        found = {
            "the parameter": (parameter, after[name]),
            "the moment of": (other.state[parameter]["exp_avg"], moments[name]),
        }
        for what, (loaded, expected) in found.items():
            if float((loaded - expected).abs().max().detach()) > CLOSE:
                return (
                    f"saved on a mesh of dp 2 and tp 2, and resumed on pp 2 and cp 2, {what} {name} is a different one"
                )
    return "" if steps == 1 else f"resume() returns {steps} steps after one step"


CASES: dict[str, Case] = {
    "order": order,
    "parts": parts,
    "divided": divided,
    "computed": computed,
    "averaged": averaged,
    "clipped": clipped,
    "state": state,
    "resumed": resumed,
}
