"""Cases of exercise 8 of stage 06: several kinds of parallelism on a mesh."""

from check.bank.built import STAGE
from check.bank.case import mistake, part, style

MESH = f"{STAGE}/exercise8_all.py"
ORDER = 'AXES = ("pp", "dp", "cp", "tp")\n'
SAMPLES = 'self.samples = self.mesh["dp", "cp"]._flatten("samples").get_group()'
PARAMETERS = 'self.parameters = self.mesh["pp", "tp"]._flatten("parameters").get_group()'
JOIN = part(MESH, "    gradients = [each.grad for each in stage", "\n\ndef clip_gradients")
SUM_SQUARES = part(MESH, "    total = torch.zeros((), dtype", "    for parameter in trained.values():")
REDUCE = "    dist.all_reduce(total, group=layout.parameters)\n"
PLACED = 'DTensor.from_local(tensor, layout.mesh["tp"], [placement])'
MOMENTS = '(("parameter", parameter.detach()), *sorted(optimizer.state[parameter].items()))'

MISTAKES = (
    mistake(
        "mesh-layers-whole",
        MESH,
        "parts-missing",
        "Each rank along tp computes whole layers.",
        ("        parallelize(model, self.tp)\n", ""),
    ),
    mistake(
        "mesh-axes-reversed",
        MESH,
        "axes-in-wrong-order",
        "The ranks of tp are the farthest from each other.",
        (ORDER, 'AXES = ("tp", "cp", "dp", "pp")\n'),
    ),
    mistake(
        "mesh-pipeline-last",
        MESH,
        "axes-in-wrong-order",
        "The stages of a pipeline are neighbors, and the parts of a layer are not.",
        (ORDER, 'AXES = ("dp", "cp", "tp", "pp")\n'),
    ),
    mistake(
        "mesh-context-not-averaged",
        MESH,
        "axis-not-averaged",
        "Gradients are averaged along dp only.",
        (SAMPLES, 'self.samples = self.mesh.get_group("dp")'),
    ),
    mistake(
        "mesh-mean-of-all-ranks",
        MESH,
        ("axis-not-averaged", "built-differs"),
        "The sum over dp and cp is divided by the number of all ranks.",
        ("/ dist.get_world_size(layout.samples)", "/ dist.get_world_size()"),
    ),
    mistake(
        "mesh-sum-instead-of-mean",
        MESH,
        ("axis-not-averaged", "built-differs"),
        "The gradients are added.",
        (" / dist.get_world_size(layout.samples)", ""),
    ),
    mistake(
        "mesh-each-gradient-alone",
        MESH,
        "axes-averaged-alone",
        "There is one call for each parameter.",
        (
            JOIN,
            "    for parameter in stage.parameters():\n"
            "        parameter.grad /= dist.get_world_size(layout.samples)\n"
            "        dist.all_reduce(parameter.grad, group=layout.samples)\n",
        ),
    ),
    mistake(
        "mesh-norm-of-a-stage",
        MESH,
        "norm-wrong",
        "Each stage of the pipeline has a norm of its own.",
        (REDUCE, "    dist.all_reduce(total, group=layout.tp)\n"),
    ),
    mistake(
        "mesh-norm-without-tensor-axis",
        MESH,
        "norm-wrong",
        "The norm forgets the axis tp.",
        (REDUCE, "    dist.all_reduce(total, group=layout.pp)\n"),
    ),
    mistake(
        "mesh-copies-counted",
        MESH,
        "norm-wrong",
        "The parameters that all ranks of tp have are counted several times.",
        ("dist.get_world_size(layout.tp) if layout.divided(name, parameter) is None else 1", "1"),
    ),
    mistake(
        "mesh-norm-of-all-ranks",
        MESH,
        ("norm-wrong", "built-differs"),
        "Ranks along dp have the same gradients, which are counted twice.",
        (REDUCE, "    dist.all_reduce(total)\n"),
    ),
    mistake(
        "mesh-gathers-gradients",
        MESH,
        "norm-sends-gradients",
        "The norm is right, but all ranks send all gradients for it.",
        (
            SUM_SQUARES,
            "    own, everyone = {}, [None] * dist.get_world_size(layout.parameters)\n"
            "    for name, parameter in trained.items():\n"
            "        part = 0 if layout.divided(name, parameter) is None else dist.get_rank(layout.tp)\n"
            "        own[name, part] = parameter.grad.cpu()\n"
            "    dist.all_gather_object(everyone, own, group=layout.parameters)\n"
            "    whole = {place: each for some in everyone for place, each in some.items()}\n"
            "    norm = sum(each.double().square().sum() for each in whole.values()).sqrt()\n",
        ),
    ),
    mistake(
        "mesh-whole-tensors",
        MESH,
        "checkpoint-parts",
        "Each rank gathers the whole tensors, and writes them.",
        (
            PLACED,
            PLACED + ".full_tensor()",
        ),
    ),
    mistake(
        "mesh-without-moments",
        MESH,
        "checkpoint-parts",
        "The checkpoint has no moments of AdamW, so the training starts with new ones.",
        (MOMENTS, '(("parameter", parameter.detach()), ("step", optimizer.state[parameter]["step"]))'),
    ),
    mistake(
        "mesh-first-dimension",
        MESH,
        "checkpoint-parts",
        "All parameters are said to be divided along dimension 0.",
        ("else Shard(dimension)\n", "else Shard(0)\n"),
    ),
    mistake(
        "mesh-copies-loaded",
        MESH,
        "mesh-cannot-resume",
        "The checkpoint is loaded into copies, and the training continues without it.",
        ('("parameter", parameter.detach())', '("parameter", parameter.detach().clone())'),
    ),
    mistake(
        "mesh-same-sequences",
        MESH,
        ("mesh-computes-other", "built-differs"),
        "All ranks along dp train on the same sequences.",
        ("each[rank::size]", "each[: len(each) // size]"),
    ),
    mistake(
        "mesh-wrong-positions",
        MESH,
        "mesh-computes-other",
        "All ranks along cp use the first positions.",
        (
            "shard_sequence(torch.arange(length, device=device), 0, self.cp)",
            "torch.arange(length // dist.get_world_size(self.cp), device=device)",
        ),
    ),
    mistake(
        "mesh-attention-alone",
        MESH,
        "mesh-computes-other",
        "Each rank attends only to its own part of the sequence.",
        ("ring_attention(query, key, value, self.cp)", "ring_attention(query, key, value, self.alone)"),
        (SAMPLES, SAMPLES + "\n        self.alone = dist.new_subgroups(1)[0]"),
    ),
)

STYLES = (
    style(
        "mesh-context-outside",
        MESH,
        "cp and dp are exchanged; the ranks of tp are still neighbors.",
        (ORDER, 'AXES = ("pp", "cp", "dp", "tp")\n'),
        ('self.mesh["dp", "cp"]', 'self.mesh["cp", "dp"]'),
    ),
    style(
        "mesh-groups-by-hand",
        MESH,
        "The joined groups are made without _flatten.",
        (SAMPLES, "self.samples = self.group_along(1, 2)"),
        (PARAMETERS, "self.parameters = self.group_along(0, 3)"),
        (
            "    def own_batch(",
            "    def group_along(self, *axes):\n"
            "        others = [axis for axis in range(4) if axis not in axes]\n"
            "        ranks = self.mesh.mesh.permute(*others, *axes).flatten(2).flatten(0, 1)\n"
            "        return dist.new_subgroups_by_enumeration(ranks.tolist())[0]\n\n"
            "    def own_batch(",
        ),
    ),
    style(
        "mesh-buckets",
        MESH,
        "The gradients are averaged in several asynchronous calls.",
        (
            JOIN,
            "    gradients, works = [each.grad for each in stage.parameters()], []\n"
            "    for start in range(0, len(gradients), 8):\n"
            "        some = gradients[start : start + 8]\n"
            "        together = torch.cat([each.flatten() for each in some]) / dist.get_world_size(layout.samples)\n"
            "        works.append((some, together, dist.all_reduce(together, group=layout.samples, async_op=True)))\n"
            "    for some, together, work in works:\n"
            "        work.wait()\n"
            "        for gradient, values in zip(some, together.split([each.numel() for each in some]), strict=True):\n"
            "            gradient.copy_(values.view_as(gradient))\n",
        ),
    ),
    style(
        "mesh-norm-of-two-sums",
        MESH,
        "The squares of divided parameters are summed over pp and tp, the others over pp only.",
        (
            SUM_SQUARES,
            "    sums = torch.zeros(2, dtype=torch.float64, device=next(stage.parameters()).device)\n"
            "    for name, parameter in trained.items():\n"
            "        sums[int(layout.divided(name, parameter) is None)] += parameter.grad.double().square().sum()\n"
            "    dist.all_reduce(sums[:1], group=layout.tp)\n"
            "    dist.all_reduce(sums, group=layout.pp)\n"
            "    norm = sums.sum().sqrt()\n",
        ),
    ),
    style(
        "mesh-four-placements",
        MESH,
        "The DTensors know all axes of the mesh that have the same stage.",
        (
            PLACED,
            'DTensor.from_local(tensor, layout.mesh["dp", "cp", "tp"], [Replicate(), Replicate(), placement])',
        ),
    ),
)
