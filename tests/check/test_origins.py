"""The line of a cause, found from the line of what was seen."""

import ast
from textwrap import dedent

import pytest

from check import lines_of_checkpoints, lines_of_loaders, lines_of_ranks
from workshop.check.origins import FINDERS, Source, at_origin
from workshop.check.rules.rule import RULES
from workshop.check.verdict import Finding

# For each kind of cause: a program, in which "# seen" and "# cause" mark the lines. Without a cause, none must be found.
PROGRAMS = {
    "total": """
        def main(data, size, optimizer):
            updates = len(data) // size  # cause
            warmup, total = 10, 3 * updates
            schedule = LambdaLR(optimizer, lambda step: rate(step, warmup, total))  # seen
    """,
    **lines_of_checkpoints.PROGRAMS,
    **lines_of_loaders.PROGRAMS,
    **lines_of_ranks.PROGRAMS,
    "total:by-hand": """
        def set_rate(optimizer, step, total):
            rate = 0.1 * (1 - step / total)
            optimizer.param_groups[0]["lr"] = rate

        def main(loader, data, size, optimizer):
            last = 3 * len(data) // size  # cause
            for step, batch in enumerate(loader):
                set_rate(optimizer, 5 * len(loader) + step, last)
                optimizer.step()  # seen
    """,
    "total:in-the-function-of-the-schedule": """
        def schedule(optimizer, data, size):
            updates = len(data) // size  # cause

            def factor(step):
                return 1 - step / updates

            return LambdaLR(optimizer, factor)  # seen
    """,
    "divisor": """
        def summed(model, batch):
            return cross_entropy(model(batch), reduction="sum"), (batch != -100).sum()

        def main(model, batch, accumulate):
            loss, count = summed(model, batch)
            mean = loss / count  # cause
            (mean / accumulate).backward()  # seen
    """,
    "divisor:compute_loss": """
        class OwnTrainer(Trainer):
            def compute_loss(self, model, inputs, num_items_in_batch=None):
                loss = cross_entropy(model(inputs), reduction="sum")
                loss = loss / num_items_in_batch  # cause
                return loss

        def main(trainer):
            trainer.train()  # seen
    """,
    "divisor:": """
        class OwnLoss:
            def __call__(self, outputs, labels, num_items_in_batch=None):
                total = cross_entropy(outputs, labels, reduction="sum")
                count = labels.ne(-100).sum()  # cause
                return total / count

        def main(trainer):
            trainer.train()  # seen
    """,
    "averaged": """
        class Averager:
            def __init__(self, model):
                self.parts, part = [], []
                for parameter in model.parameters():
                    part.append(parameter)
                    if len(part) > 3:
                        self.parts.append(part)  # cause
                        part = []

            def average(self):
                pending = []
                for part in self.parts:
                    flat = torch.cat([parameter.grad.flatten() for parameter in part])
                    pending.append((part, dist.all_reduce(flat)))  # seen
    """,
    "averaged:": """
        def average(parameters):
            flat = torch.cat([parameter.grad.flatten() for parameter in parameters])
            dist.all_reduce(flat)  # seen

        def main(model, loss):
            loss.backward()
            average(list(model.head.parameters()))  # cause
    """,
    "reduced:all_reduce": """
        def loss_of(logits, targets):
            count = torch.tensor(float(len(targets)))
            dist.all_reduce(count)  # seen
            count = count.clamp(min=1)  # cause
            return cross_entropy(logits, targets, reduction="sum") / count
    """,
    "gathering": """
        class Gather(Function):
            @staticmethod
            def forward(ctx, part):
                parts = [torch.empty_like(part) for _ in range(2)]
                dist.all_gather(parts, part)  # seen
                return torch.cat(parts)

            @staticmethod
            def backward(ctx, gradient):
                return gradient.chunk(2)[dist.get_rank()]  # cause
    """,
    "sync": """
        def main(model, batches):
            for number, batch in enumerate(batches):
                model.require_backward_grad_sync = number == 0  # cause
                loss = model(batch)
                loss.backward()  # seen
    """,
    "sync:swapped": """
        def main(model, optimizer, batches):
            for number, batch in enumerate(batches):
                update = number % 4 == 3
                with model.no_sync() if update else nullcontext():  # cause
                    model(batch).backward()  # seen
                if update:
                    optimizer.step()
    """,
    "meets:3": """
        def write(folder):
            save(folder)

        def read(folder):
            return load(folder)  # seen

        def main(folder):
            if rank == 0:
                write(folder)
            data = read(folder)  # cause
    """,
    "listed": """
        def train(data, chosen):
            part = Subset(data, chosen)
            sampler = DistributedSampler(part)  # seen

        def main(data):
            chosen = [1, 2]
            for each in range(3):
                train(data, chosen)
                bought = best(data)
                chosen = chosen + bought  # cause
    """,
    "listed:once": """
        def main(data):
            chosen = pick(data)  # cause
            part = Subset(data, chosen)
            sampler = DistributedSampler(part)  # seen
    """,
    "used:AveragedModel": """
        def accuracy(model, batches):
            return mean(model(batch) for batch in batches)  # seen

        def main(model, batches):
            average = AveragedModel(model)
            average.update_parameters(model)
            print(accuracy(average, batches))  # cause
    """,
    "plateau:metric": """
        def accuracy(model, batches):
            return right(model, batches) / len(batches)  # cause

        def main(model, batches, optimizer):
            schedule = ReduceLROnPlateau(optimizer)
            for epoch in range(3):
                schedule.step(accuracy(model, batches))
                optimizer.step()  # seen
    """,
    "condition:step": """
        def main(engine, loss):
            engine.backward(loss)  # seen
            if engine.is_gradient_accumulation_boundary():  # cause
                engine.step()
    """,
    "member:head": """
        class Net(Module):
            def __init__(self):
                self.body = Linear(2, 2)
                self.head = Linear(2, 3)  # cause

        model(1)  # seen
    """,
    "seed": """
        import torch

        def main(policy, seed, rank):
            torch.manual_seed(seed)
            generator = torch.Generator()
            for epoch in range(3):
                generator.manual_seed(seed + epoch)  # cause
                games = play(policy, torch.rand(3, generator=generator))
                policy(games)  # seen
    """,
    "seed:of-each-rank": """
        def main(policy, seed, rank):
            generator = torch.Generator().manual_seed(seed + rank)
            policy(torch.rand(3, generator=generator))  # seen
    """,
    "call:Trainer.devices|Trainer": """
        def main(module, data):
            trainer = Trainer(
                devices=1,  # cause
            )
            trainer.fit(module, data)  # seen
    """,
    "call:.Model.*from_": """
        tokenizer = AutoTokenizer.from_pretrained("tiny")
        model = AutoModelForCausalLM.from_pretrained("tiny")  # cause
        fully_shard(model)  # seen
    """,
    "configured": """
        def main(config):
            config["zero_optimization"]["stage"] = 0  # cause
            engine, *_ = initialize(config=config)  # seen
    """,
    "environ:MASTER_": """
        def main():
            os.environ["MASTER_ADDR"] = "localhost"  # cause
            init_process_group("gloo")  # seen
    """,
    "figure:losses": """
        def epoch(model, loader):
            losses = torch.zeros(len(loader))
            for step, batch in enumerate(loader):
                losses[step] = model(batch).item()  # cause
            return losses, time()

        def main(model, loader, log):
            losses, seconds = epoch(model, loader)
            log.write(1, losses, seconds)  # seen
    """,
    "figure:accuracy": """
        def evaluate(right, count):
            mean = right / count  # cause
            return mean

        def main(right, count, log):
            log.write(1, accuracy=evaluate(right, count))  # seen
    """,
    "gate": """
        import torch

        def save(path, model):
            torch.save(model.state_dict(), path)  # seen

        def main(model, epoch):
            if epoch % 2 == 0:  # cause
                save("model.pt", model)
    """,
    "gate:alone": """
        import torch

        def save(model):
            torch.save(model.state_dict(), "last.pt")  # seen

        def train(model):
            for epoch in range(3):
                if epoch % 2 == 0:
                    print(epoch)
                    if epoch:  # cause
                        save(model)
    """,
    "gate:%": """
        def main(loader, optimizer, every):
            for number, batch in enumerate(loader):
                last = number % every == 0  # cause
                if last:
                    optimizer.step()  # seen
    """,
    "holds:environ": """
        def choose(index):
            torch.accelerator.set_device_index(index)  # seen

        rank = int(os.environ["RANK"])  # cause
        choose(rank)
    """,
    "kept": """
        def main(loader, model, optimizer, losses):
            for step, batch in enumerate(loader):
                loss = model(batch)
                optimizer.step()  # seen
                losses[step] = loss  # cause
    """,
    "length": """
        def linear_schedule(optimizer, warmup_steps, training_steps):
            return LambdaLR(optimizer, lambda step: 1 - step / training_steps)  # seen

        def main(accelerator, optimizer, steps):
            schedule = linear_schedule(
                optimizer,
                warmup_steps=10,
                training_steps=steps,  # cause
            )
            accelerator.prepare(schedule)
    """,
    "loader": """
        def epoch(model, loader):
            for batch in tqdm(loader):
                model(batch)  # seen

        def main(model, data):
            train_loader = DataLoader(data, 8, shuffle=True)  # cause
            epoch(model, train_loader)
    """,
    "loader:of-a-sampler": """
        def main(model, data):
            sampler = DistributedSampler(data, num_replicas=1, rank=0)  # cause
            loader = DataLoader(data, 8, sampler=sampler)
            for batch in loader:
                model(batch)  # seen
    """,
    "loader:itself": """
        def main(model, data):
            sampler = BatchSampler(RandomSampler(data), 8)
            loader = DataLoader(data, sampler=sampler)  # cause
            for batch in loader:
                model(batch)  # seen
    """,
    "loader:order": """
        def main(model, sampler, loader):
            for epoch in range(3):
                sampler.set_epoch(0)  # cause
                for batch in loader:
                    model(batch)  # seen
    """,
    "loader:evaluation": """
        class Data(LightningDataModule):
            def train_dataloader(self):
                return DataLoader(self.train)

            def val_dataloader(self):
                return DataLoader(self.test)  # cause

        Trainer().fit(Module(), Data())  # seen
    """,
    "loader:of-trainer": """
        class OwnTrainer(Trainer):
            def get_train_dataloader(self):
                sampler = WeightedSampler(self.train_dataset)
                return DataLoader(self.train_dataset, 8, sampler=sampler)  # cause

        def main(trainer):
            trainer.train()  # seen
    """,
    "logged:accuracy": """
        class Module(LightningModule):
            def validation_step(self, batch):
                self.log("loss", self(batch))
                self.log("accuracy", self.right(batch))  # cause

        Trainer().fit(Module())  # seen
    """,
    "model": """
        def epoch(model, loader):
            for batch in loader:
                cross_entropy(model(batch), batch)  # seen

        def main(loader, device):
            model = Net().to(device)  # cause
            epoch(model, loader)
    """,
    "argument:backward": """
        def error(model, images, labels):
            return loss_of(model(images), labels)  # seen

        def validate(loader, model):
            return sum(error(model, *batch) for batch in loader)

        def train(loader, ddp_model):
            for images, labels in loader:
                loss = error(ddp_model.module, images, labels)  # cause
                loss.backward()
    """,
    "passed": """
        import torch

        def save(path, model):
            torch.save(model.state_dict(), path)  # seen

        save("model.pt", ddp_model)  # cause
    """,
    "printed": """
        def main(rank, epoch, losses):  # seen
            if rank == 0:
                print("training")
            print(f"epoch {epoch}: {losses.mean()}")  # cause
    """,
    "receiver:backward": """
        def main(model, batch, optimizer):
            loss = model(batch).sum()  # cause
            loss.backward()
            optimizer.step()  # seen
    """,
    "reseeded": """
        def main(rank, model, batch):
            torch.manual_seed(0)
            torch.manual_seed(rank)  # cause
            model(batch)  # seen
    """,
    "reseeded:loop": """
        def main(model, loader):
            torch.manual_seed(0)
            for epoch in range(3):
                torch.manual_seed(epoch)  # cause
                model(next(loader))  # seen
    """,
    "returned:training_step": """
        class Module(LightningModule):
            def training_step(self, batch):
                return self(batch).detach()  # cause

        Trainer().fit(Module())  # seen
    """,
    "text:^[^#]*port=": """
        # port=0 would let the system choose
        port=29500  # cause
        srun train.py  # seen
    """,
    "uncalled": """
        def resume(path, model):  # cause
            model.load_state_dict(torch.load(path))

        def main(parser):
            check_arguments(parser)  # seen
    """,
    "uncalled model": """
        def main(loader):
            model = Net()  # cause
            for batch in loader:
                model(batch)  # seen
    """,
}


@pytest.mark.parametrize("origin", PROGRAMS)
def test_the_line_of_the_cause_is_found(origin, tmp_path):
    text = dedent(PROGRAMS[origin])
    script = tmp_path / "train.py"
    script.write_text(text)
    lines = {mark: number for number, line in enumerate(text.splitlines(), 1) if (mark := line.partition("  # ")[2])}
    finding = Finding(RULES["schedule-length"], "seen", f"train.py:{lines['seen']}", origin=origin)
    found = at_origin(finding, script, tmp_path)
    assert found.where == f"train.py:{lines.get('cause', lines['seen'])}"


def test_every_kind_of_cause_is_tested_and_exists():
    assert {origin.partition(":")[0] for origin in PROGRAMS} == {"text", *FINDERS, "uncalled model"}
    kinds = {part.partition(":")[0] for rule in RULES.values() for part in rule.origin.split()}
    assert kinds <= {"text", *FINDERS}


@pytest.mark.parametrize("name", ["train.py", "src/train.py"])
def test_a_finding_without_a_line_gets_one(name, tmp_path):
    script = tmp_path / name
    script.parent.mkdir(exist_ok=True)
    script.write_text("def main():\n    loader = DataLoader(data)\n")
    assert at_origin(Finding(RULES["loader-by-hand"], "seen"), script, tmp_path).where == f"{name}:2"


def test_the_origin_of_a_finding_counts_more_than_that_of_its_rule(tmp_path):
    (tmp_path / "train.py").write_text("loader = DataLoader(data)\nfor batch in loader:\n    model(batch)\n")
    for origin, line in (("", 1), ("here", 3)):
        finding = Finding(RULES["same-samples"], "seen", "train.py:3", origin=origin)
        assert at_origin(finding, tmp_path / "train.py", tmp_path).where == f"train.py:{line}"


def test_a_file_that_is_empty_or_no_python_changes_nothing(tmp_path):
    (tmp_path / "train.py").write_text("if\n")
    (tmp_path / "__init__.py").write_text("")
    for kind, origin in (("schedule-length", "total"), ("crash", "member:head")):
        finding = Finding(RULES[kind], "seen", "train.py:1", origin=origin)
        assert at_origin(finding, tmp_path / "train.py", tmp_path).where == "train.py:1"


def test_definitions_that_refer_to_themselves_end():
    source = Source(ast.parse("def f(x):\n    y = f(y)\n    return f(y)\n"))
    assert list(source.trace([])) == []
    assert FINDERS["total"](source, source.statement(3), "") is None
