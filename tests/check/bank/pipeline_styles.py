"""Longer pieces of text for the cases of exercise 5 of stage 06: pipelines that are built in a different way."""

_START = '''
class Pipeline:
    def __init__(self, stage, loss_function, microbatches, schedule="1f1b", group=None):
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if schedule not in {"gpipe", "1f1b"}:
            raise ValueError(f"no such schedule: {schedule}")
        if microbatches < self.size:
            raise ValueError("fewer micro-batches than stages")
        self.stage, self.loss, self.count, self.schedule, self.group = stage, loss_function, microbatches, schedule, group
        self.first, self.last = self.rank == 0, self.rank == self.size - 1
        self.known = self.meta = None
        self.prepare()

    def prepare(self):
        pass

    def divide(self, inputs, targets):
        shapes = tuple(each.shape for each in (inputs, targets) if each is not None)
        if any(shape[0] % self.count for shape in shapes):
            raise ValueError(f"the batch cannot be divided into {self.count} micro-batches")
        if shapes != self.known:
            self.known, self.meta = shapes, None
        self.inputs = inputs.chunk(self.count) if self.first else [None] * self.count
        self.targets = targets.chunk(self.count) if self.last else [None] * self.count
        self.total, self.timeline = 0, []
        self.device = next((each.device for each in self.stage.parameters()), torch.device("cpu"))

    def compute(self, x, number):
        """The forward pass."""
        output = self.stage(x)
        if self.last:
            output = self.loss(output, self.targets[number]) / self.count
            self.total = self.total + output.detach()
        return output

    def differentiate(self, x, output, gradient):
        """The backward pass."""
        if output.requires_grad:
            torch.autograd.backward(output, gradient)
        if not self.first:
            return torch.zeros_like(x) if x.grad is None else x.grad
'''

PHASES = (
    _START
    + '''
    def step(self, inputs, targets):
        self.divide(inputs, targets)
        ahead = self.size - 1 - self.rank if self.schedule == "1f1b" else self.count
        ahead, self.waiting, self.works = min(ahead, self.count), [], []
        for number in range(ahead):
            self.forward(number, self.exchange(None, "input"))
        for number in range(ahead, self.count):
            x = self.exchange(None, "input") if number == ahead or self.first else x
            self.forward(number, x, send=False)
            gradient = self.exchange(self.output, "gradient")
            result = self.backward(gradient)
            more = number + 1 < self.count
            x = self.exchange(result, "input" if more else "nothing")
        for _ in range(ahead):
            self.exchange(self.backward(self.exchange(None, "gradient")), "nothing")
        for work, _ in self.works:
            work.wait()
        self.works = []
        return self.total if self.last else None

    def forward(self, number, x, send=True):
        x = self.inputs[number] if self.first else x
        self.output = self.compute(x, number)
        self.waiting.append((x, self.output))
        if send:
            self.exchange(self.output, "nothing")

    def backward(self, gradient):
        return self.differentiate(*self.waiting.pop(0), gradient)

    def exchange(self, result, wanted):
        """Send a result, and receive what the next pass needs."""
        target = None if result is None else self.rank + 1 if result is self.output else self.rank - 1
        source = {"input": self.rank - 1, "gradient": self.rank + 1}.get(wanted, -1)
        batch, received = [], None
        if target is not None and 0 <= target < self.size:
            tensor = result.detach().clone(memory_format=torch.contiguous_format)
            if target > self.rank and self.meta is None:
                self.meta = tensor.to("meta")
                dist.send_object_list([self.meta], group_dst=target, group=self.group)
            batch.append(dist.P2POp(dist.isend, tensor, group=self.group, group_peer=target))
        if 0 <= source < self.size:
            if source < self.rank and self.known_input() is None:
                shape = [None]
                dist.recv_object_list(shape, group_src=source, group=self.group)
                self.of_input = (self.known, shape[0])
            like = self.known_input() if source < self.rank else self.waiting[0][1]
            received = torch.empty(like.shape, dtype=like.dtype, device=self.device)
            batch.append(dist.P2POp(dist.irecv, received, group=self.group, group_peer=source))
        for work, _ in self.works:
            work.wait()
        self.works = [(work, batch) for work in dist.batch_isend_irecv(batch)] if batch else []
        if received is not None:
            for work, _ in self.works:
                work.wait()
            self.works = []
            return received.requires_grad_(received.is_floating_point())

    def known_input(self):
        known, meta = getattr(self, "of_input", (None, None))
        return meta if known == self.known else None


'''
)

POSTED_EARLY = (
    _START
    + '''
    def step(self, inputs, targets):
        self.divide(inputs, targets)
        if self.meta is None:
            self.learn_shapes()
        coming, going = self.meta
        post = lambda like, peer: [self.irecv(like, peer) for _ in range(self.count)] if like is not None else []
        activations, gradients = post(coming, self.rank - 1), post(going, self.rank + 1)
        kept, sent = {}, []
        for kind, number in plan(self.schedule, self.rank, self.size, self.count):
            if kind == "F":
                x = self.inputs[number] if self.first else arrived(activations[number])
                output = self.compute(x, number)
                kept[number] = x, output
                if not self.last:
                    sent.append(self.isend(output, self.rank + 1))
            else:
                gradient = None if self.last else arrived(gradients[number]).detach()
                result = self.differentiate(*kept.pop(number), gradient)
                activations[number : number + 1] = [None] if activations else []
                if not self.first:
                    sent.append(self.isend(result, self.rank - 1))
            while sent and sent[0][1].is_completed():
                sent.pop(0)
        for _, work in sent:
            work.wait()
        return self.total if self.last else None

    def learn_shapes(self):
        """Each rank computes the shape of its output from that of its input, without numbers."""
        coming = None
        if self.first:
            x = self.inputs[0]
        else:
            box = [None]
            dist.recv_object_list(box, group_src=self.rank - 1, group=self.group)
            coming = box[0]
            x = torch.zeros(coming.shape, dtype=coming.dtype, device=self.device)
        going = None
        if not self.last:
            with torch.no_grad():
                going = self.stage(x).to("meta")
            dist.send_object_list([going], group_dst=self.rank + 1, group=self.group)
        self.meta = coming, going

    def irecv(self, like, peer):
        tensor = torch.empty(like.shape, dtype=like.dtype, device=self.device)
        return tensor, dist.irecv(tensor, group_src=peer, group=self.group)

    def isend(self, tensor, peer):
        tensor = tensor.detach().contiguous()
        return tensor, dist.isend(tensor, group_dst=peer, group=self.group)


def arrived(message):
    tensor, work = message
    work.wait()
    return tensor.requires_grad_(tensor.is_floating_point())


def plan(schedule, rank, size, count):
    early = count if schedule == "gpipe" else min(count, size - 1 - rank)
    forward, backward = iter(range(count)), iter(range(count))
    yield from (("F", next(forward)) for _ in range(early))
    for number in forward:
        yield "F", number
        yield "B", next(backward)
    yield from (("B", number) for number in backward)


'''
)

BROADCASTS = (
    _START
    + """
    def prepare(self):
        ranks = dist.get_process_group_ranks(self.group or dist.group.WORLD)
        self.downward, self.upward = {}, {}
        for number, pair in enumerate(zip(ranks, ranks[1:])):
            self.downward[number], self.upward[number] = dist.new_group(list(pair)), dist.new_group(list(pair))

    def step(self, inputs, targets):
        self.divide(inputs, targets)
        ahead = self.count if self.schedule == "gpipe" else self.size - 1 - self.rank
        kept, self.pending = [], []
        for turn in range(self.count + ahead):
            if turn < self.count:
                x = self.inputs[turn] if self.first else self.take(self.downward[self.rank - 1], 0, self.like())
                kept.append((x, self.compute(x, turn)))
                if not self.last:
                    self.give(self.downward[self.rank], 0, kept[-1][1], announce=True)
            if turn >= ahead:
                gradient = None if self.last else self.take(self.upward[self.rank], 1, kept[0][1]).detach()
                result = self.differentiate(*kept.pop(0), gradient)
                if not self.first:
                    self.give(self.upward[self.rank - 1], 1, result)
        for _, work in self.pending:
            work.wait()
        return self.total if self.last else None

    def like(self):
        if getattr(self, "of", None) != self.known:
            box = [None]
            dist.recv_object_list(box, group_src=self.rank - 1, group=self.group)
            self.of, self.shape_of_input = self.known, box[0]
        return self.shape_of_input

    def take(self, group, source, like):
        tensor = torch.empty(like.shape, dtype=like.dtype, device=self.device)
        dist.broadcast(tensor, group_src=source, group=group)
        return tensor.requires_grad_(tensor.is_floating_point())

    def give(self, group, source, tensor, announce=False):
        tensor = tensor.detach().contiguous()
        if announce and self.meta is None:
            self.meta = tensor.to("meta")
            dist.send_object_list([self.meta], group_dst=self.rank + 1, group=self.group)
        while self.pending and self.pending[0][1].is_completed():
            self.pending.pop(0)
        self.pending.append((tensor, dist.broadcast(tensor, group_src=source, group=group, async_op=True)))


"""
)
