"""Longer pieces of text for the cases of exercises 1 and 2 of stage 06: classes that are built in a different way."""

# ---------------------------------------------------------------- exercise 1

INHERITED_DDP = """
class DDP(nn.parallel.DistributedDataParallel):
    def __init__(self, module, bucket_bytes=1 << 18, group=None):
        super().__init__(module, process_group=group, bucket_cap_mb=bucket_bytes / 2**20)
"""

DDP_CLOSURES = """
class DDP(nn.Module):
    def __init__(self, module, bucket_bytes=1 << 18, group=None):
        super().__init__()
        self.module, self.before = module, describe(module)
        size, queue = dist.get_world_size(group), torch.autograd.Variable._execution_engine.queue_callback
        with torch.no_grad():
            for each in (*module.parameters(), *module.buffers()):
                dist.broadcast(each, group_src=0, group=group)
        buckets = [[]]
        for parameter in reversed([each for each in module.parameters() if each.requires_grad]):
            if sum(each.nbytes for each in buckets[-1]) >= bucket_bytes:
                buckets.append([])
            buckets[-1].append(parameter)
        ready, pending = set(), []

        def start(bucket):
            gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in bucket]
            joined = torch.cat([each.reshape(-1) for each in gradients])
            pending.append((bucket, joined, dist.all_reduce(joined, group=group, async_op=True)))

        def end():
            for bucket in buckets[len(pending) :]:
                start(bucket)
            everything = [each for bucket in buckets for each in bucket]
            used = everything[0].new_tensor([each.grad is not None for each in everything])
            dist.all_reduce(used, group=group)
            is_used = dict(zip(everything, used.tolist(), strict=True))
            for bucket, joined, work in pending:
                work.wait()
                for each, piece in zip(bucket, joined.split([each.numel() for each in bucket]), strict=True):
                    each.grad = piece.view_as(each) / size if is_used[each] else None
            ready.clear()
            pending.clear()

        def hook(parameter):
            if not ready:
                queue(end)
            ready.add(parameter)
            while len(pending) < len(buckets) and ready.issuperset(buckets[len(pending)]):
                start(buckets[len(pending)])

        for parameter in (each for bucket in buckets for each in bucket):
            parameter.register_post_accumulate_grad_hook(hook)

    def forward(self, *args, **kwargs):
        for name, *_ in self.before - describe(self.module):
            raise ValueError(f"{name} is not the parameter that DDP() has wrapped")
        return self.module(*args, **kwargs)
"""

DDP_FUNCTION = """
def DDP(module, bucket_bytes=1 << 18, group=None):
    for each in [*module.parameters(), *module.buffers()]:
        dist.broadcast(each.data, group_src=0, group=group)
    module.sync = state = {"group": group, "buckets": [], "works": [], "nodes": [], "known": dict(module.named_parameters())}
    for parameter in list(module.parameters())[::-1]:
        if parameter.requires_grad:
            node = parameter.view_as(parameter).grad_fn.next_functions[0][0]
            node.register_hook(lambda *_, parameter=parameter: on_gradient(state, parameter))
            state["nodes"].append(node)  # otherwise the hook is lost
            if not state["buckets"] or sum(each.nbytes for each in state["buckets"][-1]) > bucket_bytes // 2:
                state["buckets"].append([])
            state["buckets"][-1].append(parameter)
    state["open"] = {parameter for bucket in state["buckets"] for parameter in bucket}
    module.register_forward_pre_hook(check)
    return module


def check(module, args):
    for name, parameter in module.named_parameters():
        if module.sync["known"].get(name) is not parameter:
            raise ValueError(f"DDP() does not know the parameter {name}")


def on_gradient(state, parameter):
    if not state["works"] and len(state["open"]) == sum(map(len, state["buckets"])):
        torch.autograd.Variable._execution_engine.queue_callback(lambda: on_end(state))
    state["open"].discard(parameter)
    send(state)


def send(state, everything=False):
    for bucket in state["buckets"][len(state["works"]) :]:
        if state["open"].intersection(bucket) and not everything:
            return
        zeros = torch.zeros(len(bucket), dtype=bucket[0].dtype, device=bucket[0].device)
        parts = [each.grad.flatten() if each.grad is not None else each.detach().flatten() * 0 for each in bucket]
        flags = zeros + torch.tensor([each.grad is not None for each in bucket], device=zeros.device)
        joined = torch.cat((flags, *parts)) / dist.get_world_size(state["group"])
        state["works"].append((joined, dist.all_reduce(joined, group=state["group"], async_op=True)))


def on_end(state):
    send(state, everything=True)
    for bucket, (joined, work) in zip(state["buckets"], state["works"], strict=True):
        work.wait()
        place = len(bucket)
        for number, each in enumerate(bucket):
            if joined[number] > 0:
                each.grad = joined[place : place + each.numel()].reshape(each.shape)
            place += each.numel()
    state["works"].clear()
    state["open"].update(parameter for bucket in state["buckets"] for parameter in bucket)
"""

BUCKET_OF_VIEWS = """
class Bucket:
    def __init__(self, parameters, group):
        self.parameters, self.group, self.missing = parameters, group, set(parameters)
        self.memory = torch.zeros(sum(each.numel() for each in parameters) + len(parameters), dtype=parameters[0].dtype)
        *views, self.flags = self.memory.split([*(each.numel() for each in parameters), len(parameters)])
        self.views = [view.view_as(each) for view, each in zip(views, parameters, strict=True)]

    def start(self):
        for number, (each, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            self.flags[number] = each.grad is not None
            if each.grad is None:
                view.zero_()
            elif each.grad is not view:
                each.grad = view.copy_(each.grad)
        self.memory.div_(dist.get_world_size(self.group))
        self.work = dist.all_reduce(self.memory, group=self.group, async_op=True)

    def finish(self):
        self.work.wait()
        for each, view, flag in zip(self.parameters, self.views, self.flags.tolist(), strict=True):
            if flag:
                each.grad = view
        self.missing = set(self.parameters)


"""

DDP_TENSOR_HOOKS = """
class DDP(nn.Module):
    def __init__(self, module, bucket_bytes=1 << 18, group=None):
        super().__init__()
        self.module, self.group, self.wrapped = module, group, describe(module)
        for each in (*module.parameters(), *module.buffers()):
            dist.broadcast(each.detach(), group_src=0, group=group)
        self.found, self.sent = {}, []
        self.buckets, size = [[]], 0
        for each in [each for each in module.parameters() if each.requires_grad][::-1]:
            size += each.nbytes
            if size > bucket_bytes and self.buckets[-1]:
                self.buckets.append([])
                size = each.nbytes
            self.buckets[-1].append(each)
            each.register_hook(lambda gradient, each=each: self.collect(each, gradient))

    def forward(self, *args, **kwargs):
        changed = sorted(self.wrapped ^ describe(self.module), key=str)
        if changed:
            raise ValueError("changed since DDP(): " + ", ".join(each[0] for each in changed))
        return self.module(*args, **kwargs)

    def collect(self, parameter, gradient):
        if not self.found:
            torch.autograd.variable.Variable._execution_engine.queue_callback(self.end)
        self.found[parameter] = self.found.get(parameter, 0) + gradient  # a tied parameter has one hook call as well
        while len(self.sent) < len(self.buckets) and all(each in self.found for each in self.buckets[len(self.sent)]):
            self.send(self.buckets[len(self.sent)])
        return torch.zeros_like(gradient)  # the average is added at the end

    def send(self, bucket):
        flags = bucket[0].new_tensor([each in self.found for each in bucket])
        parts = [self.found.get(each, torch.zeros_like(each)).flatten() for each in bucket]
        joined = torch.cat([*parts, flags]).div_(dist.get_world_size(self.group))
        self.sent.append((bucket, joined, dist.all_reduce(joined, group=self.group, async_op=True)))

    @torch.no_grad()
    def end(self):
        for bucket in self.buckets[len(self.sent) :]:
            self.send(bucket)
        for bucket, joined, work in self.sent:
            work.wait()
            *parts, flags = joined.split([*(each.numel() for each in bucket), len(bucket)])
            for each, part, flag in zip(bucket, parts, flags.tolist(), strict=True):
                if flag:
                    each.grad = part.view_as(each) + (0 if each.grad is None else each.grad)
        self.found, self.sent = {}, []
"""

BUCKET_IN_TWO_CALLS = """
class Bucket:
    def __init__(self, parameters, group):
        self.parameters, self.group, self.missing = parameters, group, set(parameters)

    def start(self):
        size = dist.get_world_size(self.group)
        flags = self.parameters[0].new_tensor([each.grad is not None for each in self.parameters])
        parts = [torch.zeros_like(each) if each.grad is None else each.grad for each in self.parameters]
        joined = torch.cat([*(each.flatten() for each in parts), flags]) / size
        self.sent = torch.cat([joined, joined.new_zeros(-len(joined) % size)])
        self.own = self.sent.new_empty(len(self.sent) // size)
        self.work = dist.reduce_scatter_tensor(self.own, self.sent, group=self.group, async_op=True)

    def finish(self):
        self.work.wait()
        dist.all_gather_into_tensor(self.sent, self.own, group=self.group)
        place, flags = 0, self.sent[sum(each.numel() for each in self.parameters) :]
        for each, flag in zip(self.parameters, flags, strict=False):
            if each.grad is not None or flag > 0:
                each.grad = self.sent[place : place + each.numel()].view_as(each)
            place += each.numel()
        self.missing = set(self.parameters)


"""

# ---------------------------------------------------------------- exercise 2

ROUND_ROBIN = """        for number, parameter in enumerate(self.param_groups[-1]["params"]):
            self.owners[parameter] = number % self.world_size
"""

ROUND_ROBIN_BY_SIZE = """        by_size = sorted(self.param_groups[-1]["params"], key=torch.numel, reverse=True)
        for number, parameter in enumerate(by_size):
            self.owners[parameter] = number % self.world_size
"""

INHERITED_ZERO1 = """
class ShardedOptimizer(ZeroRedundancyOptimizer):
    def __init__(self, parameters, optimizer_class, group=None, **options):
        super().__init__(parameters, optimizer_class, process_group=group, **options)

    def state_dict(self):
        for rank in range(dist.get_world_size()):
            self.consolidate_state_dict(to=rank)
        return super().state_dict()


"""

SHARE_BY_ALL_GATHER = """        trained = [parameter for parameter in self.owners if parameter.requires_grad]
        for dtype in dict.fromkeys(each.dtype for each in trained):
            parts = [
                [each for each in trained if each.dtype == dtype and self.owners[each] == rank]
                for rank in range(self.world_size)
            ]
            longest = max(sum(each.numel() for each in part) for part in parts)
            own = torch.zeros(longest, dtype=dtype, device=trained[0].device)
            if parts[self.rank]:
                together = torch.cat([each.flatten() for each in parts[self.rank]])
                own[: len(together)] = together
            rows = own.new_empty(self.world_size, longest)
            dist.all_gather_into_tensor(rows.view(-1), own, group=self.group)
            for part, row in zip(parts, rows, strict=True):
                for each in part:
                    each.copy_(row[: each.numel()].view_as(each))
                    row = row[each.numel() :]
"""

RANGES = """        whole, before = sum(each.numel() for each in self.param_groups[-1]["params"]), 0
        for parameter in self.param_groups[-1]["params"]:
            middle = before + parameter.numel() / 2
            self.owners[parameter] = min(int(self.world_size * middle / whole), self.world_size - 1)
            before += parameter.numel()
"""

ZERO1_ELEMENTS = '''
class ShardedOptimizer(torch.optim.Optimizer):
    """Each rank updates a range of the elements, so the class must update each element without the others."""

    def __init__(self, parameters, optimizer_class, group=None, **options):
        super().__init__(parameters, options)
        self.group, self.rank, self.world_size = group, dist.get_rank(group), dist.get_world_size(group)
        self.trained = [[each for each in part["params"] if each.requires_grad] for part in self.param_groups]
        self.shards = [nn_parameter(self.rows([each.detach() for each in part])[self.rank]) for part in self.trained]
        groups = [{**part, "params": [shard]} for part, shard in zip(self.param_groups, self.shards, strict=True)]
        self.inner = optimizer_class(groups, **options)
        self.state, self.defaults = self.inner.state, self.inner.defaults
        for ours, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            ours.update({name: value for name, value in inner.items() if name != "params"})

    def rows(self, tensors):
        flat = torch.cat([each.flatten() for each in tensors])
        return torch.cat([flat, flat.new_zeros(-len(flat) % self.world_size)]).view(self.world_size, -1)

    def whole(self, shard, part):
        rows = shard.new_empty(self.world_size, len(shard))
        dist.all_gather_into_tensor(rows.view(-1), shard.detach(), group=self.group)
        flat = rows.view(-1)[: sum(each.numel() for each in part)]
        return [values.view_as(each) for values, each in zip(flat.split([each.numel() for each in part]), part, strict=True)]

    @torch.no_grad()
    def step(self, closure=None):
        for ours, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update({name: value for name, value in ours.items() if name != "params"})
        for shard, part in zip(self.shards, self.trained, strict=True):
            shard.grad = self.rows([torch.zeros_like(each) if each.grad is None else each.grad for each in part])[self.rank]
        loss = self.inner.step(closure)
        for shard, part in zip(self.shards, self.trained, strict=True):
            shard.grad = None
            for each, values in zip(part, self.whole(shard, part), strict=True):
                each.copy_(values)
        return loss

    def state_dict(self):
        groups, count = [], 0
        for part in self.param_groups:
            count += len(part["params"])
            groups.append({**part, "params": list(range(count - len(part["params"]), count))})
        numbers = {each: number for number, each in enumerate(each for part in self.param_groups for each in part["params"])}
        state = {numbers[each]: {} for part in self.trained for each in part}
        for shard, part in zip(self.shards, self.trained, strict=True):
            for name, value in self.inner.state[shard].items():
                values = self.whole(value, part) if value.dim() else [value.clone() for _ in part]
                for each, own in zip(part, values, strict=True):
                    state[numbers[each]][name] = own.cpu()
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        full, own = dict(self.state), {}
        for shard, part in zip(self.shards, self.trained, strict=True):
            states = [full[each] for each in part]
            own[shard] = {
                name: self.rows([each[name] for each in states])[self.rank].clone() if value.dim() else value
                for name, value in states[0].items()
            }
        self.inner.state.clear()
        self.inner.state.update(own)
        self.state = self.inner.state


def nn_parameter(row):
    return torch.nn.Parameter(row.clone())


'''
