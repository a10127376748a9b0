"""Exercise 5: build pipeline parallelism. Each process has some of the layers, and micro-batches pass through all processes.
This program works as delivered, but only one process computes at a time.
Do the TODOs in order. Run and check the program after each TODO.

Run it:    06_build_your_own/exercise5_run_pipeline.sh --steps 40
Check it:  ./workshop.sh check 06_build_your_own/exercise5_pipeline.py
"""

from dataclasses import replace

import torch
import torch.distributed as dist

from workshop.training.arguments import positive_int
from workshop.training.building import SEED, Log, batches, loss_of, parse_arguments, run
from workshop.training.decoder import Transformer
from workshop.training.pipeline import SEVERAL, PyTorchPipeline, report_timeline, split, timed


class Pipeline:
    """Train a model whose stages are on the ranks of a group, in the order of the ranks.

    Args:
        stage: the module of this rank, on its device. It takes one tensor and returns one. All micro-batches have the same shape.
        loss_function: called on the last rank with the output and the targets of a micro-batch; returns the mean of its samples.
        microbatches: the number of equal parts of each batch.
        schedule: "gpipe" or "1f1b".
        group: the ranks of the pipeline; None: all.

    Attributes:
        timeline: of the last step, a list of (rank, "forward" or "backward", micro-batch, start, end), in seconds.

    Raises:
        ValueError: an unknown schedule, fewer micro-batches than stages, or (in ``step``) a batch that they do not divide.
    """

    def __init__(self, stage, loss_function, microbatches, schedule="1f1b", group=None):
        rank, stages = dist.get_rank(group), dist.get_world_size(group)
        if schedule not in ("gpipe", "1f1b"):
            raise ValueError(f"the schedule {schedule!r} is unknown; choose gpipe or 1f1b")
        if microbatches < stages:
            raise ValueError(f"{microbatches} micro-batches are fewer than the {stages} stages; use at least {stages}")
        self.stage, self.loss_function, self.microbatches, self.group = stage, loss_function, microbatches, group
        self.previous, self.rank, self.next = rank - 1 if rank else None, rank, rank + 1 if rank + 1 < stages else None
        self.order = order_of_work(schedule, rank, stages, microbatches)
        self.shapes, self.outgoing, self.works = None, [], []
        dist.barrier(group)  # with NCCL, all ranks must have communicated before two of them use batch_isend_irecv

    def step(self, inputs, targets):
        """Compute the gradients of the mean loss of a batch. Return the loss on the last rank, None on the others.

        Args:
            inputs, targets: the batch, the same on all ranks. Only the first rank reads the inputs, and only the last one the
                targets. The others may pass None if all batches have the same shape.
        """
        known = [each for each in (inputs, targets) if each is not None]
        shapes = [each.shape for each in known]
        for samples, *_ in shapes:
            if samples % self.microbatches or samples != shapes[0][0]:
                raise ValueError(f"{self.microbatches} micro-batches do not divide a batch of {samples} samples")
        # TODO 3: Each activation costs three messages, because its shape and data type are announced before it. All micro-batches
        # of a batch have the same ones: announce them only in the first step and when the shape of the batch changes. Then reset
        # self.sent and self.expected. Look up: torch.distributed.send_object_list (how many messages does it send?).
        tensors = (*self.stage.parameters(), *self.stage.buffers(), *known)
        self.device = tensors[0].device if tensors else torch.get_default_device()
        self.inputs = inputs.chunk(self.microbatches) if self.previous is None else None
        self.targets = targets.chunk(self.microbatches) if self.next is None else None
        self.kept, self.losses, self.timeline = {}, [], []
        for kind, number in self.order:
            received = self.receive(kind, number)
            result = self.forward(number, received) if kind == "forward" else self.backward(number, received)
            self.send(kind, result)
        # TODO 2: Wait here until the last result is sent.
        return torch.stack(self.losses).sum() if self.losses else None

    @timed
    def forward(self, number, x):
        output = self.stage(x)
        if self.next is None:
            output = self.loss_function(output, self.targets[number]) / self.microbatches
            self.losses.append(output.detach())
        self.kept[number] = x, output
        return output

    @timed
    def backward(self, number, gradient):
        x, output = self.kept.pop(number)
        if output.requires_grad:  # false if all parameters up to here are frozen
            output.backward(gradient)
        if self.previous is not None:
            return torch.zeros_like(x) if x.grad is None else x.grad

    def receive(self, kind, number):
        """Return the input of a forward pass, or the gradient for a backward pass."""
        source = self.previous if kind == "forward" else self.next
        if source is None:
            # TODO 2: The last result must be sent here too, although this rank has nothing to receive.
            return self.inputs[number] if kind == "forward" else None
        if kind == "forward":  # TODO 3: only if the shape is not known yet
            received = [None]
            dist.recv_object_list(received, group_src=source, group=self.group)
            self.expected = received[0]
        like = self.expected if kind == "forward" else self.kept[number][1]
        buffer = torch.empty_like(like, device=self.device, memory_format=torch.contiguous_format)
        dist.recv(buffer, group_src=source, group=self.group)  # TODO 2: send and receive in one call
        return buffer.requires_grad_(buffer.is_floating_point())

    def send(self, kind, result):
        destination = self.next if kind == "forward" else self.previous
        if destination is None:
            return
        result = result.detach().contiguous()
        if kind == "forward":  # TODO 3: only if the shape is not announced yet
            self.sent = result.to("meta")  # the shape and the data type without the numbers
            dist.send_object_list([self.sent], group_dst=destination, group=self.group)
        if kind == "forward" and (result.shape, result.dtype) != (self.sent.shape, self.sent.dtype):
            raise ValueError(f"an output has the shape {list(result.shape)}, not {list(self.sent.shape)} as before")
        # TODO 2: With 1F1B, two neighbors send to each other at the same time. If both wait until their message is received,
        # both wait forever. Only note the message here, in self.outgoing. Before the next pass, send it and receive the input of
        # that pass in one call, and wait for both. Look up: torch.distributed.batch_isend_irecv, P2POp and its group_peer.
        dist.send(result, group_dst=destination, group=self.group)


def order_of_work(schedule, rank, stages, microbatches):
    """Return a list of ("forward" or "backward", micro-batch) for a rank."""
    if schedule == "gpipe":
        # TODO 1: While one stage computes, all others wait, because the first stage begins with a micro-batch only after the
        # backward pass of the one before. Compute all forward passes first, then all backward passes. Look up: "GPipe" in the
        # notebook and in the documentation of torch.distributed.pipelining.
        order = [(kind, number) for number in range(microbatches) for kind in ("forward", "backward")]
    else:
        # TODO 2: GPipe keeps the activations of all micro-batches. Begin with the backward passes as early as possible: one
        # forward pass for each later stage, then alternately a forward pass and the backward pass of the oldest micro-batch, and
        # at the end the remaining backward passes. Rank r of p then keeps at most p - r micro-batches. Look up: "1F1B" in both.
        order = [(kind, number) for number in range(microbatches) for kind in ("forward", "backward")]
    return order


def options(parser):
    parser.add_argument("--layers", type=positive_int, default=4, help="of the model")
    parser.add_argument("--microbatches", type=positive_int, default=4, help="equal parts of each global batch")
    parser.add_argument("--schedule", choices=["gpipe", "1f1b", *SEVERAL], default="1f1b")
    parser.add_argument("--pytorch", action="store_true", help="use PyTorch's pipelining; it has all these schedules")


def train(device, args):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED)  # each process creates the whole model, with the same numbers, and keeps its stage
    model = Transformer(replace(args.config, tied=False)).to(args.dtype)
    if args.pytorch:
        pipeline = PyTorchPipeline(model, loss_of, args.microbatches, args.schedule, device)
    else:
        pipeline = Pipeline(split(model, world_size)[rank].to(device), loss_of, args.microbatches, args.schedule)
    del model
    optimizer = torch.optim.AdamW(pipeline.stage.parameters(), lr=3e-3)
    log, timelines = Log(args, device), []
    for inputs, targets in batches(args):
        loss = pipeline.step(inputs.to(device), targets.to(device))
        optimizer.step()
        optimizer.zero_grad()
        log.step(loss)
        timelines.append(pipeline.timeline)
    log.end()
    report_timeline(args, timelines)


if __name__ == "__main__":
    run(train, parse_arguments(__doc__, options, divides="layers"))
