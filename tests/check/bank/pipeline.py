"""Cases of exercise 5 of stage 06: pipeline parallelism."""

from check.bank import pipeline_styles
from check.bank.built import STAGE
from check.bank.case import Edit, mistake, part, style

PIPELINE = f"{STAGE}/exercise5_pipeline.py"
GPIPE = part(PIPELINE, '        order = [(kind, number) for kind in ("forward"', "    else:")
AHEAD = "order, ahead = [], stages - 1 - rank"
FORGET = part(PIPELINE, "        if shapes != self.shapes:", "        tensors = (*self.stage")
NO_SOURCE = "        if source is None:\n            self.communicate()\n"
NOTE_SEND = "        self.outgoing = [dist.P2POp(dist.isend, result, group=self.group, group_peer=destination)]\n"
SEND_LATER = NOTE_SEND.replace("self.outgoing = [", "self.outgoing += [")
RECEIVE = "        self.communicate(dist.P2POp(dist.irecv, buffer, group=self.group, group_peer=source))\n"
START = "        self.works = dist.batch_isend_irecv(self.operations) if self.operations else []\n"
POP = "        x, output = self.kept.pop(number)\n"
SET_SHAPES = "        self.shapes, self.outgoing, self.works = None, [], []\n"
KEEP_SCHEDULE = "        self.shapes, self.outgoing, self.works, self.schedule = None, [], [], schedule\n"
KEPT = "        self.kept[number] = x, output\n        return output\n"
END = "        self.communicate()\n        self.wait()\n        return torch.stack"
OWN_STAGE = "        pipeline = Pipeline(split(model, world_size)[rank].to(device), loss_of, args.microbatches, args.schedule)\n"
CLASS = part(PIPELINE, "class Pipeline:\n", "def options(parser)")


def pipeline(text: str) -> Edit:
    """Return the edit that replaces the class and the function with the order."""
    return CLASS, text.lstrip("\n") + "\n\n"


MISTAKES = (
    # ---- gpipe-waits
    mistake(
        "pipeline-one-micro-batch-at-a-time",
        PIPELINE,
        "gpipe-waits",
        "With gpipe, the backward pass of each micro-batch comes directly after its forward pass.",
        (GPIPE, GPIPE.replace('for kind in ("forward", "backward") for number in range(microbatches)',
                              'for number in range(microbatches) for kind in ("forward", "backward")')),
    ),
    mistake(
        "pipeline-backward-order-of-one-rank",
        PIPELINE,
        "microbatches-differ",
        "Only the last rank goes backward through the micro-batches, so each gradient belongs to a different one.",
        (GPIPE, GPIPE + "        if rank == stages - 1:\n            order[microbatches:] = order[: microbatches - 1 : -1]\n"),
    ),
    mistake(
        "pipeline-message-waits-for-the-next-receive",
        PIPELINE,
        "gpipe-waits",
        "The first rank receives nothing in a forward pass, so its activations wait for the first gradient.",
        (NO_SOURCE, "        if source is None:\n"),
        (NOTE_SEND, SEND_LATER),
    ),
    mistake(
        "pipeline-waits-for-an-answer",
        PIPELINE,
        "gpipe-waits",
        "The order is that of GPipe, but each rank waits until the next one has computed its forward pass.",
        (KEPT, KEPT.replace("        return", "        if self.previous is not None and self.schedule == \"gpipe\":\n"
                            "            dist.send(torch.zeros(1), group_dst=self.previous, group=self.group)\n        return")),
        (NOTE_SEND, NOTE_SEND + "        if kind == \"forward\" and self.schedule == \"gpipe\":\n"
                                "            self.communicate()\n"
                                "            dist.recv(torch.zeros(1), group_src=destination, group=self.group)\n"),
        (SET_SHAPES, KEEP_SCHEDULE),
    ),
    mistake(
        "pipeline-ignores-the-micro-batches",
        PIPELINE,
        ("gpipe-waits", "stage-waits"),
        "The whole batch is one micro-batch.",
        ("        self.stage, self.loss_function, self.microbatches, self.group = stage, loss_function, microbatches, group\n",
         "        self.stage, self.loss_function, self.microbatches, self.group = stage, loss_function, 1, group\n"
         "        microbatches = 1\n"),
    ),
    mistake(
        "pipeline-losses-not-divided",
        PIPELINE,
        ("microbatches-differ", "built-differs"),
        "The mean of the losses is reported, but the gradients are those of their sum.",
        ("self.loss_function(output, self.targets[number]) / self.microbatches\n",
         "self.loss_function(output, self.targets[number])\n"),
        ("torch.stack(self.losses).sum()", "torch.stack(self.losses).mean()"),
    ),
    mistake(
        "pipeline-targets-of-different-samples",
        PIPELINE,
        ("microbatches-differ", "built-differs"),
        "The targets are divided in turn, and the inputs into consecutive parts.",
        ("self.targets = targets.chunk(self.microbatches) if",
         "self.targets = [targets[number :: self.microbatches] for number in range(self.microbatches)] if"),
    ),
    # ---- stage-waits
    mistake(
        "pipeline-1f1b-without-a-start",
        PIPELINE,
        "stage-waits",
        "No rank computes a micro-batch ahead; the losses are equal, and each rank keeps one micro-batch.",
        (AHEAD, "order, ahead = [], 0"),
    ),
    # ---- many-kept
    mistake(
        "pipeline-one-micro-batch-too-many",
        PIPELINE,
        "many-kept",
        "Each rank computes one forward pass more than necessary before its first backward pass.",
        (AHEAD, "order, ahead = [], stages - rank"),
    ),
    mistake(
        "pipeline-1f1b-is-gpipe",
        PIPELINE,
        "many-kept",
        "The order is that of GPipe under both names; the losses are equal.",
        ('if schedule == "gpipe":', 'if schedule in ("gpipe", "1f1b"):'),
    ),
    mistake(
        "pipeline-all-ranks-start-equally",
        PIPELINE,
        "many-kept",
        "Each rank computes as many forward passes ahead as the first one.",
        (AHEAD, "order, ahead = [], stages - 1"),
    ),
    # ---- activations-stay
    mistake(
        "pipeline-keeps-everything",
        PIPELINE,
        "activations-stay",
        "The order is right, but inputs and outputs stay in the dictionary until the end of the step.",
        (POP, POP.replace("self.kept.pop(number)", "self.kept[number]")),
    ),
    mistake(
        "pipeline-keeps-all-inputs",
        PIPELINE,
        "activations-stay",
        "A list keeps each received input for the end of the step.",
        (POP, POP + "        self.finished.append(x)\n"),
        ("        self.kept, self.losses, self.timeline = {}, [], []\n",
         "        self.kept, self.losses, self.timeline, self.finished = {}, [], [], []\n"),
    ),
    # ---- sends-not-awaited
    mistake(
        "pipeline-waits-for-receives-only",
        PIPELINE,
        "sends-not-awaited",
        "The handles of the sends stay in a list, and nothing waits for them.",
        (START,
         START + "        self.sends += [each for each, of in zip(self.works, self.operations) if of.op is dist.isend]\n"
         "        self.works = [each for each, of in zip(self.works, self.operations) if of.op is dist.irecv]\n"),
        (SET_SHAPES, SET_SHAPES + "        self.sends = []\n"),
    ),
    # ---- one-forward-one-backward-fails
    mistake(
        "pipeline-1f1b-holds-results-back",
        PIPELINE,
        "one-forward-one-backward-fails",
        "With 1F1B, a result is sent together with the next receive only, so the next rank starts one pass later.",
        (NO_SOURCE, NO_SOURCE.replace("            self.", "            if self.schedule == \"gpipe\":\n                self.")),
        (NOTE_SEND, SEND_LATER),
        (SET_SHAPES, KEEP_SCHEDULE),
    ),
    mistake(
        "pipeline-blocking-messages",
        PIPELINE,
        ("one-forward-one-backward-fails", "hang"),
        "Two neighbors both wait in dist.send, until the check stops them.",
        (RECEIVE, "        dist.recv(buffer, group_src=source, group=self.group)\n"),
        (NOTE_SEND, "        dist.send(result, group_dst=destination, group=self.group)\n"),
    ),
    mistake(
        "pipeline-last-passes-missing",
        PIPELINE,
        ("one-forward-one-backward-fails", "hang", "built-differs", "collectives-differ"),
        "The first ranks do not compute the backward passes of the last micro-batches.",
        ("range(microbatches + ahead)", "range(microbatches)"),
    ),
    # ---- many-announcements
    mistake(
        "pipeline-announces-each-activation",
        PIPELINE,
        "many-announcements",
        "The shape of each activation is announced, although it is always the same.",
        ('if kind == "forward" and self.sent is None:', 'if kind == "forward":'),
        ('if kind == "forward" and self.expected is None:', 'if kind == "forward":'),
        ("            received = [None]\n",
         "            self.communicate()\n            received = [None]\n"),
    ),
    mistake(
        "pipeline-announces-in-each-step",
        PIPELINE,
        "many-announcements",
        "The shapes count as new in every step, so they are announced again.",
        ("        if shapes != self.shapes:\n            self.shapes,", "        self.shapes,"),
    ),
    mistake(
        "pipeline-shape-as-a-tensor",
        PIPELINE,
        "many-announcements",
        "Each activation is announced by a tensor with its shape, which nobody reads after the first step.",
        (RECEIVE,
         "        if kind == \"forward\":\n"
         "            shape = torch.empty(buffer.dim(), dtype=torch.int64)\n"
         "            announced = dist.P2POp(dist.irecv, shape, group=self.group, group_peer=source)\n"
         "            self.communicate(announced, dist.P2POp(dist.irecv, buffer, group=self.group, group_peer=source))\n"
         "        else:\n    " + RECEIVE),
        (NOTE_SEND,
         NOTE_SEND + "        if kind == \"forward\":\n"
         "            shape = torch.tensor(result.shape)\n"
         "            self.outgoing.insert(0, dist.P2POp(dist.isend, shape, group=self.group, group_peer=destination))\n"),
    ),
    # ---- shape-forgotten
    mistake(
        "pipeline-announces-once",
        PIPELINE,
        ("shape-forgotten",),
        "The shape of the first batch is expected in all later steps too.",
        (FORGET, FORGET.replace("shapes != self.shapes", "self.shapes is None")),
    ),
    mistake(
        "pipeline-only-the-receiver-forgets",
        PIPELINE,
        ("shape-forgotten",),
        "When the shape changes, the receiver waits for an announcement that the sender does not send.",
        (FORGET, "        self.sent = getattr(self, \"sent\", None)\n" + FORGET.replace("self.shapes, self.sent, self.expected ="
                 " shapes, None, None", "self.shapes, self.expected = shapes, None")),
    ),
    # ---- stage-whole
    mistake(
        "pipeline-everything-everywhere",
        PIPELINE,
        ("stage-whole", "held-whole"),
        "Each rank is a pipeline of its own with all layers, so the losses are equal and nothing is sent.",
        (OWN_STAGE,
         "        groups = [dist.new_group([each]) for each in range(world_size)]\n"
         "        stage = split(model, 1)[0].to(device)\n"
         "        pipeline = Pipeline(stage, loss_of, args.microbatches, args.schedule, groups[rank])\n"),
    ),
    # ---- pipeline-fails
    mistake(
        "pipeline-frozen-stage-fails",
        PIPELINE,
        "pipeline-fails",
        "backward() of an output without a graph is an error.",
        ("        if output.requires_grad:  # false if all parameters up to here are frozen\n            output.backward",
         "        if True:\n            output.backward"),
    ),
    mistake(
        "pipeline-one-data-type",
        PIPELINE,
        "pipeline-fails",
        "All activations are received in the type of the parameters.",
        ("        buffer = torch.empty_like(like, device=self.device, memory_format=torch.contiguous_format)\n",
         "        own = next((each.dtype for each in self.stage.parameters()), like.dtype)\n"
         "        buffer = torch.empty(like.shape, dtype=own, device=self.device)\n"),
    ),
    mistake(
        "pipeline-samples-left-out",
        PIPELINE,
        "pipeline-fails",
        "A batch that the micro-batches do not divide is no error.",
        ("            if samples % self.microbatches or samples != shapes[0][0]:", "            if samples != shapes[0][0]:"),
    ),
    mistake(
        "pipeline-ranks-of-the-run",
        PIPELINE,
        ("pipeline-fails", "crash"),
        "The rank and the number of stages are those of the whole run, and not of the group.",
        ("        rank, stages = dist.get_rank(group), dist.get_world_size(group)\n",
         "        rank, stages = dist.get_rank(), dist.get_world_size()\n"),
    ),
    # ---- pipeline-of-pytorch
    mistake(
        "pipeline-uses-that-of-pytorch",
        PIPELINE,
        "pipeline-of-pytorch",
        "train() uses PyTorch's schedule without --pytorch.",
        ("    if args.pytorch:\n", "    if True:\n"),
    ),
)  # fmt: skip

STYLES = (
    style(
        "pipeline-style-phases",
        PIPELINE,
        "Three loops: the start, one forward and one backward pass in turn, and the end.",
        pipeline(pipeline_styles.PHASES),
    ),
    style(
        "pipeline-style-posted-early",
        PIPELINE,
        "Each step begins with irecv for all messages; a pass waits for its own one.",
        pipeline(pipeline_styles.POSTED_EARLY),
    ),
    style(
        "pipeline-style-broadcasts",
        PIPELINE,
        "Two neighbors form two groups, and each message is a broadcast in one of them.",
        pipeline(pipeline_styles.BROADCASTS),
    ),
    style(
        "pipeline-style-single-messages",
        PIPELINE,
        "isend and irecv are called one after the other.",
        (
            START,
            "        self.works = [each.op(each.tensor, each.peer, each.group) for each in self.operations]\n",
        ),
    ),
    style(
        "pipeline-style-checkpointing",
        PIPELINE,
        "The activations inside of a stage are computed again in the backward pass.",
        ("        output = self.stage(x)\n", "        output = checkpoint(self.stage, x, use_reentrant=False)\n"),
        ("import torch\n", "import torch\nfrom torch.utils.checkpoint import checkpoint\n"),
    ),
)  # fmt: skip
