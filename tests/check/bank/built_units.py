"""Longer pieces of text for the cases of exercise 3 of stage 06: units that gather parameters in a different way."""

from check.bank import built

KEEPS_LAST = (
    (
        built.FREE_LAYER,
        "        if self.fsdp.order[-1] is self:\n"
        "            put(self.shards, self.places)\n"
        "        else:\n"
        "            self.free()\n"
        "        for each in tree_leaves(output):\n",
    ),
    (
        "        if self.full is None:\n            self.start_gather()\n            self.work.wait()\n",
        "        if self.full and step < 0 and self.fsdp.order[-1] is self:\n"
        "            for before in self.fsdp.order[-2:-1]:\n"
        "                before.start_gather()\n"
        "        if self.full is None:\n            self.start_gather()\n            self.work.wait()\n",
    ),
)

FSDP_AROUND = """
class FSDP(nn.Module):
    def __init__(self, module, layers=(), compute_dtype=None, group=None):
        super().__init__()
        self.module = module
        for each in module.modules():
            if isinstance(each, tuple(layers)):
                fully_shard(each)
        fully_shard(module)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def full_state_dict(self):
        return {name: each.full_tensor() for name, each in self.module.state_dict().items()}


"""

SUMS_AT_THE_END = """        if not hasattr(unit.fsdp, "late"):
            unit.fsdp.late = []
        if not unit.fsdp.late:
            torch.autograd.Variable._execution_engine.queue_callback(lambda: sum_all(unit.fsdp))
        unit.fsdp.late.append((unit, sent, trained, gradients))
"""

MEAN_AT_THE_END = """        return (None,) * (len(gradients) + 1)


def sum_all(fsdp):
    for unit, sent, trained, gradients in fsdp.late:
        sums = sent.new_empty(sent.shape[1])
        dist.reduce_scatter_tensor(sums, sent.view(-1), group=fsdp.group)
        give(unit, sums, trained, gradients)
    fsdp.late.clear()


def give(unit, sums, trained, gradients):
    uses, *pieces = sums.split([len(trained), *(unit.sizes[number] for number in trained)])
    for number, use, piece in zip(trained, uses, pieces, strict=True):
        if gradients[number] is not None or use > 0:
            shard = unit.shards[number]
            shard.grad = piece if shard.grad is None else shard.grad + piece
"""

SUMS_MEANWHILE = """        if not hasattr(unit.fsdp, "pending"):
            unit.fsdp.pending = []
        if not unit.fsdp.pending:
            torch.autograd.Variable._execution_engine.queue_callback(lambda: end(unit.fsdp))
        sums = sent.new_empty(sent.shape[1])
        work = dist.reduce_scatter_tensor(sums, sent.view(-1), group=unit.fsdp.group, async_op=True)
        used_here = [each is not None for each in gradients]
        unit.fsdp.pending.append((unit, sent, sums, work, trained, used_here))
"""

MEAN_MEANWHILE = """        return (None,) * (len(gradients) + 1)


def end(fsdp):
    for unit, _, sums, work, trained, used_here in fsdp.pending:
        work.wait()
        uses, *pieces = sums.split([len(trained), *(unit.sizes[number] for number in trained)])
        for number, use, piece in zip(trained, uses, pieces, strict=True):
            if used_here[number] or use > 0:
                shard = unit.shards[number]
                shard.grad = piece if shard.grad is None else shard.grad + piece
    fsdp.pending.clear()
"""

AROUND_FORWARD = """        part.forward = self.computed(part.forward)

    @contextlib.contextmanager
    def gathered(self):
        put(Gather.apply(self, *self.shards), self.places)
        try:
            with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
                yield
        finally:
            self.free()

    def computed(self, forward):
        def replaced(*args, **kwargs):
            if self.fsdp.dtype:
                args, kwargs = tree_map_only(torch.Tensor, self.converted, (args, kwargs))
            with self.gathered():
                output = forward(*args, **kwargs)
            for each in tree_leaves(output):
                if isinstance(each, torch.Tensor) and each.requires_grad:
                    each.register_hook(lambda _: put(self.gather(-1), self.places))
            return output

        return replaced

    def converted(self, tensor):
        return tensor.to(self.fsdp.dtype) if tensor.is_floating_point() else tensor
"""

GATHER_EACH = """            parts = zip(own.split(self.sizes), self.sizes, strict=True)
            self.pieces = [(part.clone(), part.new_empty(self.world_size, size)) for part, size in parts]
            *self.works, self.work = [
                dist.all_gather_into_tensor(piece.view(-1), part, group=self.fsdp.group, async_op=True)
                for part, piece in self.pieces
            ]
"""

WAIT_EACH = """            for each in (*self.works, self.work):
                each.wait()
            pairs = zip([piece for _, piece in self.pieces], self.shapes, strict=True)
            self.pieces = self.works = None
"""

FSDP_RESIZED = """
class FSDP(nn.Module):
    def __init__(self, module, layers=(), compute_dtype=None, group=None):
        super().__init__()
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), group_src=0, group=group)
        self.module, self.dtype, self.group, self.size = module, compute_dtype, group, dist.get_world_size(group)
        self.units = [Unit(self, part, parameters) for part, parameters in parts_of(module, layers)]
        self.order, self.computing = [], []

    def forward(self, *args, **kwargs):
        for unit in self.units:
            unit.release()
        return self.module(*args, **kwargs)

    def full_state_dict(self):
        state = {name: value.cpu() for name, value in self.module.state_dict().items()}
        named = list(self.module.named_parameters(remove_duplicate=False))
        for unit in self.units:
            for full, shard in zip(unit.full, unit.shards, strict=True):
                rows = shard.new_empty(self.size * len(shard))
                dist.all_gather_into_tensor(rows, shard.detach(), group=self.group)
                whole = rows[: full.numel()].view(full.shape).cpu()
                state.update({name: whole for name, each in named if each is shard})
        return state

    def end(self):
        while self.computing:
            self.computing[0].sum_gradients()


class Unit:
    def __init__(self, fsdp, part, parameters):
        self.fsdp, self.places, rank = fsdp, places_of(parameters, fsdp.module), dist.get_rank(fsdp.group)
        self.shards = [nn.Parameter(self.rows(each.detach())[rank].clone(), each.requires_grad) for each in parameters]
        self.full = [torch.empty_like(each, dtype=fsdp.dtype, requires_grad=each.requires_grad) for each in parameters]
        self.here, self.work, self.is_root = False, None, part is fsdp.module
        self.release()
        part.register_forward_pre_hook(self.before, with_kwargs=True)
        part.register_forward_hook(self.after)

    def rows(self, tensor):
        return F.pad(tensor.flatten(), (0, -tensor.numel() % self.fsdp.size)).view(self.fsdp.size, -1)

    def start(self):
        if not self.here and self.work is None:
            own = torch.cat([each.detach() for each in self.shards]).to(self.full[0].dtype)
            self.buffer = own.new_empty(self.fsdp.size * len(own))
            self.work = dist.all_gather_into_tensor(self.buffer, own, group=self.fsdp.group, async_op=True)

    def gather(self):
        if not self.here:
            self.start()
            self.work.wait()
            columns = self.buffer.view(self.fsdp.size, -1).split([len(each) for each in self.shards], dim=1)
            for full, column in zip(self.full, columns, strict=True):
                full.untyped_storage().resize_(full.numel() * full.element_size())
                full.data.copy_(column.reshape(-1)[: full.numel()].view(full.shape))  # .data: unnoticed by autograd
            self.here, self.work, self.buffer = True, None, None
        put(self.full, self.places)

    def release(self):
        if self.work:
            self.work.wait()
        for full in self.full:
            full.untyped_storage().resize_(0)
        self.here, self.work, self.buffer = False, None, None
        put(self.shards, self.places)

    def before(self, part, args, kwargs):
        order = self.fsdp.order
        if self not in order:
            order.append(self)
        self.gather()
        for following in order[order.index(self) + 1 :][:1]:
            following.start()
        if dtype := self.fsdp.dtype:
            return tree_map_only(torch.Tensor, lambda each: each.to(dtype) if each.is_floating_point() else each, (args, kwargs))

    def after(self, part, args, output):
        self.release()
        for each in tree_leaves(output):
            if isinstance(each, torch.Tensor) and each.requires_grad:
                each.register_hook(self.begin_backward)

    def begin_backward(self, _):
        fsdp = self.fsdp
        if self in fsdp.computing:
            return
        if not fsdp.computing:
            torch.autograd.Variable._execution_engine.queue_callback(fsdp.end)
        for unit in [each for each in fsdp.computing if not each.is_root]:
            unit.sum_gradients()  # its backward pass is over
        fsdp.computing.append(self)
        self.gather()
        place = (len(fsdp.order) if self.is_root else fsdp.order.index(self)) - 1
        for before in fsdp.order[max(place, 0) :][:1]:
            before.start()

    def sum_gradients(self):
        fsdp = self.fsdp
        fsdp.computing.remove(self)
        trained = [(full, shard) for full, shard in zip(self.full, self.shards, strict=True) if shard.requires_grad]
        used = self.shards[0].new_tensor([full.grad is not None for full, _ in trained])
        found = [torch.zeros_like(full) if full.grad is None else full.grad for full, _ in trained]
        matrix = torch.cat([used.expand(fsdp.size, -1), *(self.rows(each).to(used.dtype) for each in found)], dim=1)
        own = matrix.new_empty(matrix.shape[1])
        dist.reduce_scatter_tensor(own, (matrix / fsdp.size).view(-1), group=fsdp.group)
        uses, *pieces = own.split([len(trained), *(len(shard) for _, shard in trained)])
        for (full, shard), use, piece in zip(trained, uses, pieces, strict=True):
            if full.grad is not None or use > 0:
                shard.grad = piece if shard.grad is None else shard.grad + piece
            full.grad = None
        self.release()


"""
