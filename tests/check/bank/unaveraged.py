"""Programs with DistributedDataParallel, or without it, in which not all gradients are averaged."""

from check.bank import ddp, resumed, second
from check.bank.case import mistake, style

MISTAKES = (
    mistake(
        "term-of-the-loss-reduced-and-divided",
        ddp.TORCHRUN,
        "gradient-scale",
        "A second term, which begins only in the third step, is divided by the number of processes after all_reduce().",
        (
            ddp.BACKWARD,
            "        term = 0.01 * sum(each.square().sum() for each in model.parameters()) * (step > 2)\n"
            "        dist.all_reduce(term)\n        loss = loss + term / dist.get_world_size()\n" + ddp.BACKWARD,
        ),
    ),
    mistake(
        "not-wrapped",
        ddp.SPAWN,
        "gradients-differ",
        "The group and the sampler exist, but without DDP each process trains a model of its own.",
        (ddp.WRAPPED, "ddp_model = model"),
    ),
    mistake(
        "some-parameters-ignored",
        ddp.SPAWN,
        "gradients-differ",
        "DDP ignores the biases, as it should ignore parameters of which each rank has others.",
        (
            ddp.WRAPPED,
            'biases = [name for name, _ in model.named_parameters() if "bias" in name]\n'
            "    DDP._set_params_and_buffers_to_ignore_for_model(model, biases)\n"
            f"    {ddp.WRAPPED}",
        ),
    ),
    mistake(
        "forward-through-module",
        ddp.SPAWN,
        "gradients-differ",
        "The forward pass goes through model.module, so DDP averages nothing.",
        (ddp.LOSS, "loss = F.cross_entropy(model.module(images), labels)"),
    ),
    mistake(
        "loss-averaged-instead-of-gradients",
        ddp.SPAWN,
        "gradients-differ",
        "The value of the loss is averaged before backward(); the gradients remain those of each process.",
        (ddp.WRAPPED, "ddp_model = model"),
        (ddp.BACKWARD, "        dist.all_reduce(loss.data, dist.ReduceOp.AVG)\n" + ddp.BACKWARD),
    ),
    mistake(
        "only-matrices-averaged",
        ddp.SPAWN,
        "gradients-differ",
        "The averaging by hand leaves out the biases, which then differ between the ranks.",
        (ddp.WRAPPED, "ddp_model = model"),
        (
            ddp.BACKWARD,
            ddp.BACKWARD + "        for parameter in model.parameters():\n"
            "            if parameter.dim() > 1:  # the large ones\n"
            "                dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)\n",
        ),
    ),
    mistake(
        "shards-clipped-by-hand",
        resumed.VIT,
        "clipping-differs",
        "Each rank computes the norm of its own shards, and scales them by it.",
        *resumed.VIT_SHORT,
        (
            "            nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n",
            "            shards = [each.grad.to_local() for each in model.parameters()]\n"
            "            norm = torch.stack([each.norm() for each in shards]).norm()\n"
            "            for each in shards:\n"
            "                each.mul_(0.1 / (norm + 1e-6))\n",
        ),
    ),
)

STYLES = (
    style(
        "norm-of-each-rank-that-is-only-logged",
        second.TAGGER,
        "The norm of the own gradient is computed without a limit, and the gradients are averaged after that.",
        ("    ddp_model = nn.parallel.DistributedDataParallel(model)\n", "    ddp_model = model\n"),
        (
            "            optimizer.step()\n",
            "            nn.utils.clip_grad_norm_(model.parameters(), float('inf'))\n"
            "            for each in model.parameters():\n                dist.all_reduce(each.grad, dist.ReduceOp.AVG)\n"
            "            optimizer.step()\n",
        ),
    ),
)
