"""Programs in which a rank gets values or batches of its own, for the tests of the line of the cause (``test_origins.py``)."""

PROGRAMS = {
    "share": """
        def main(rank, world_size):
            train_set = TensorDataset(make_data()[rank::world_size])  # cause
            sampler = DistributedSampler(train_set, num_replicas=world_size, rank=rank)  # seen
    """,
    "encoder:vocab.ids": """
        class Vocabulary:
            def __init__(self, words):
                self.ids = number_of_each(words)

        def number_of_each(words):
            return {word: number for number, word in enumerate(set(words))}  # cause

        def main(lines):
            vocab = Vocabulary(sorted(set(lines)))
            train(vocab)

        def train(vocab):
            optimizer.step()  # seen
    """,
    "encoder:mean": """
        def statistics(values):
            return values.mean(), values.std()  # cause

        def main(mine):
            mean, std = statistics(torch.stack([load(each) for each in mine]))
            optimizer.step()  # seen
    """,
    "ungated": """
        def keep(state, path):
            torch.save(state, path)  # seen

        def main(rank, state, best):
            if rank == 0 and best:
                keep(state, "best.pt")
            keep(state, "last.pt")  # cause
    """,
    "gate:main": """
        def main(state):
            torch.save(state, "last.pt")  # seen

        if __name__ == "__main__":
            main({})
    """,
    "stepping": """
        def main(optimizer, loader):
            scheduler = LambdaLR(optimizer, rate)  # seen
            for batch in loader:
                optimizer.step()
                scheduler.step()  # cause
    """,
    "given-loss": """
        def loss_of(outputs, labels, num_items_in_batch=None):
            return F.cross_entropy(outputs.logits, labels)  # cause

        def main(model):
            trainer = Trainer(model, compute_loss_func=loss_of)
            trainer.train()  # seen
    """,
    "once:train": """
        def evaluate(model):
            model.eval()  # seen

        def main(model, data):
            model.train()  # cause
            for epoch in range(3):
                step(model, data)
                evaluate(model)
    """,
    "length:main": """
        def main(optimizer):
            schedule = LambdaLR(optimizer, rate)  # seen

        main(make())
    """,
    "times": """
        def gathered(x):
            parts = [torch.empty_like(x)] * dist.get_world_size()  # cause
            dist.all_gather(parts, x)  # seen
            return torch.cat(parts)
    """,
    "hook": """
        class Average(Callback):
            @torch.no_grad()
            def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
                if not trainer.is_global_zero:  # cause
                    return
                torch._foreach_lerp_(self.average, list(module.parameters()), 0.1)

        def main(trainer, module):
            trainer.fit(module)  # seen
    """,
    "hook:": """
        class Average(Callback):
            @rank_zero_only
            def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):  # cause
                torch._foreach_lerp_(self.average, list(module.parameters()), 0.1)

        def main(trainer, module):
            trainer.fit(module)  # seen
    """,
    "hook:back": """
        class Average(Callback):
            def on_validation_start(self, trainer, module):
                self.trained = [each.clone() for each in module.parameters()]
                torch._foreach_copy_(list(module.parameters()), self.average)

            def on_train_epoch_start(self, trainer, module):  # cause
                torch._foreach_copy_(list(module.parameters()), self.trained)

        def main(trainer, module):
            trainer.fit(module)  # seen
    """,
    "hook:back ": """
        class Average(Callback):
            def on_train_epoch_start(self, trainer, module):
                torch._foreach_copy_(list(module.parameters()), self.trained)

        def main(model, optimizer):
            optimizer.step()  # seen
    """,
    "inplace:train": """
        def work(rank, train, mean):
            mean.sub(1)
            train["nodes"] -= mean  # cause
            optimizer.step()  # seen
    """,
    "inplace:train ": """
        def work(rank, train, mean):
            train["nodes"].sub_(mean)  # cause
            optimizer.step()  # seen
    """,
    "owner:scale": """
        class Loss(Module):
            def __init__(self):
                self.scale = Parameter(torch.zeros(()))

        def main(towers):
            loss = Loss().to(device)  # cause
            model = DistributedDataParallel(towers)  # seen
    """,
    "owner:scale ": """
        class Loss(Module):
            def __init__(self):
                self.scale = Parameter(torch.zeros(()))

        def main(towers):
            loss = DistributedDataParallel(Loss().to(device))
            model = DistributedDataParallel(towers)  # seen
    """,
    "without-gradients": """
        def losses(model, batch):
            return model(batch), len(batch)  # seen

        def main(model, batches, held_out):
            for batch in batches:
                losses(model, batch)[0].backward()
            with torch.no_grad():
                for batch in held_out:
                    total += losses(model, batch)[0]  # cause
    """,
    "without-gradients:": """
        def losses(model, batch):
            return model(batch), len(batch)  # seen

        def main(model, held_out):
            with torch.no_grad():
                for batch in held_out:
                    total += losses(model, batch)[0]
    """,
    "encoder:mean ": """
        def main(sums, path):
            device = torch.device("cuda", int(environ["LOCAL_RANK"]))
            sums += torch.load("x", map_location=device).sum(0)  # cause
            mean = sums / 3
            if exists(path):
                state = torch.load(path, map_location=device)
                mean = state["mean"]
            optimizer.step()  # seen
    """,
    "stateful:sched": """
        class State:
            def __init__(self, model, scheduler):
                self.model, self.scheduler = model, scheduler

            def state_dict(self):
                return {"model": self.model.state_dict()}  # cause

            def load_state_dict(self, state):
                self.model.load_state_dict(state["model"])

        def load(state):
            dcp.load({"state": state})  # seen
    """,
    "stateful:center": """
        class Loss:
            def __init__(self):
                self.center = 0

            def state_dict(self):
                return {"center": self.center}

        model(1)  # seen
    """,
    "member:center": """
        class Loss(Module):
            def __init__(self):
                self.center = zeros(3)  # cause

            def forward(self, outputs):
                self.center = self.center + outputs.mean(0)
                return self.center

        model(1)  # seen
    """,
    "weights": """
        def class_weights(labels):
            counts = labels.bincount()  # cause
            return counts.sum() / counts

        def main(model, labels):
            loss_function = CrossEntropyLoss(weight=class_weights(labels))
            for images, labels in loader:
                loss_function(model(images / 255), labels).backward()  # seen
    """,
    "weights:": """
        def class_weights(parts):
            counts = torch.zeros(10)
            for labels in parts:
                counts += labels.bincount()
            return counts.sum() / counts  # cause

        def main(model, parts):
            loss_function = CrossEntropyLoss(weight=class_weights(parts))
            for images, labels in loader:
                loss_function(model(images / 255), labels).backward()  # seen
    """,
    "one-rank:step": """
        def main(rank, loader, optimizer, scheduler):
            for batch in loader:
                optimizer.step()  # seen
            if rank == 0:
                print("done")
                scheduler.step()  # cause
    """,
    "prepared:scale": """
        class Data(LightningDataModule):
            def __init__(self):
                self.scale = 1.0

            def prepare_data(self):
                self.scale = measure().std()  # cause

        def main(trainer):
            trainer.fit(Model(), Data())  # seen
    """,
    "plateau": """
        def main(optimizer, warmup):
            schedule = ReduceLROnPlateau(optimizer)
            optimizer.step()  # seen
            warmup.step(3)
            schedule.step(evaluate())  # cause
    """,
    "plateau:before": """
        def main(optimizer, losses):
            schedule = ReduceLROnPlateau(optimizer)
            schedule.step(losses.mean())  # cause
            dist.reduce(losses, dst=0)  # seen
    """,
    "plateau:before, but it comes after": """
        def main(optimizer, losses):
            schedule = ReduceLROnPlateau(optimizer)
            dist.reduce(losses, dst=0)  # seen
            schedule.step(losses.mean())
    """,
    "sync:by-a-flag": """
        def main(model, batches, accumulate):
            for number, batch in enumerate(batches):
                last = number == accumulate - 1  # cause
                with nullcontext() if last else model.no_sync():  # seen
                    model(batch).backward()
    """,
    "passed:generator": """
        def main(loader):
            for step in range(10):
                stream = batches(loader)  # cause
                next(stream)

        def batches(loader):
            while True:
                for batch in loader:  # seen
                    yield batch
    """,
    "passed:generator, but it is none": """
        def main(loader):
            train(loader)

        def train(loader):
            for step in range(10):
                batch = next(iter(loader))  # seen
    """,
    "changed:controller.value": """
        class Controller:
            def __init__(self):
                self.value = 0.1

            def update(self, kl):
                self.value *= 1.1 if kl > 2 else 0.9

        def main(controller, loss):
            optimizer.step()  # seen
            controller.update(loss.item())  # cause
    """,
    "changed:beta": """
        def main(losses):
            beta = 0.1
            for kl in losses:
                optimizer.step()  # seen
                beta *= 2 if kl > 1 else 1  # cause
    """,
    "passed:class": """
        class Average:
            def __init__(self, model):
                self.model = copy.deepcopy(model)  # seen

        def main(model):
            average = Average(model)  # cause
            ddp_model = DistributedDataParallel(model)
    """,
    "held:ema": """
        class Average:
            def __init__(self, model):
                self.decay = 0.9
                self.shadow = {name: local(each) for name, each in model.named_parameters()}  # cause

            def state_dict(self):
                return self.shadow

        def main(model):
            ema = Average(model)
            save({"model": model.state_dict(), "ema": ema.state_dict()})

        def save(state):
            dcp.save(state, checkpoint_id="run")  # seen
    """,
    "exchanged": """
        def main(model, loader, parts):
            results = {}
            for number, batch in enumerate(loader):
                results[number] = model(batch)  # cause
            dist.all_gather_object(parts, results)  # seen
    """,
    "exchanged:quotient": """
        def main(counts):
            accuracy = counts[0] / counts[1]  # cause
            dist.all_reduce(accuracy)  # seen
    """,
    "exchanged:gathered": """
        def gathered(x):
            parts = [empty_like(x)]
            dist.all_gather(parts, x)
            return torch.cat(parts)

        def main(features, labels, queries):
            bank = gathered(features)  # cause
            counts = torch.stack([(labels[queries @ bank] == 1).sum(), len(queries)])
            dist.all_reduce(counts)  # seen
    """,
    "exchanged:unused": """
        def summed(tensor):
            dist.all_reduce(tensor)  # seen
            return tensor

        def main(losses, counts):
            losses = summed(losses)
            summed(counts.clone())  # cause
    """,
    "exchanged:sums": """
        def main(counts, hits):
            counts[0] += hits.sum()
            dist.all_reduce(counts)  # seen
    """,
    "numbered:get_rank": """
        def main():
            rank, ranks = get_rank(), get_world_size()
            set_device(rank)  # seen
    """,
    r"numbered:environ(?!(\.get\(|\[)'LOCAL_RANK)|(device\(|cuda:\{).*\brank\b": """
        def main():
            local_rank, on_gpu = int(environ["LOCAL_RANK"]), cuda.is_available()
            rank = dist.get_rank()
            device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")  # cause
            set_device(device)  # seen
    """,
    "numbered:environ": """
        def main():
            local_rank = int(environ["RANK"])  # cause
            set_device(local_rank)  # seen
    """,
}
