"""The line of a cause, found from the line of what was seen."""

import ast
from textwrap import dedent

import pytest

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
    "total:by hand": """
        def set_rate(optimizer, step, total):
            rate = 0.1 * (1 - step / total)
            optimizer.param_groups[0]["lr"] = rate

        def main(loader, data, size, optimizer):
            last = 3 * len(data) // size  # cause
            for step, batch in enumerate(loader):
                set_rate(optimizer, 5 * len(loader) + step, last)
                optimizer.step()  # seen
    """,
    "tag": """
        def main(engine, loss):
            tag = f"loss-{loss:.2f}"  # cause
            engine.save_checkpoint("out", tag=tag)  # seen
    """,
    "divisor": """
        def summed(model, batch):
            return cross_entropy(model(batch), reduction="sum"), (batch != -100).sum()

        def main(model, batch, accumulate):
            loss, count = summed(model, batch)
            mean = loss / count  # cause
            (mean / accumulate).backward()  # seen
    """,
    "sync": """
        def main(model, batches):
            for number, batch in enumerate(batches):
                model.require_backward_grad_sync = number == 0  # cause
                loss = model(batch)
                loss.backward()  # seen
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
    "restored": """
        def main(model, path):
            epoch, step = 0, 0
            if path.exists():
                state = torch.load(path)  # seen
                model.load_state_dict(state["model"])
                epoch = state["epoch"]  # cause
                print("resumed")
    """,
    "restored:masks": """
        def main(model, path, masks):
            state = torch.load(path)  # seen
            masks.set_state(state["masks"])  # cause
            epoch = state["epoch"]
    """,
    "made:draws": """
        def main(model, path, seed):
            draws = default_rng(seed)  # cause
            state = torch.load(path)  # seen
    """,
    "state": """
        def save(path, model, optimizer):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}  # cause
            torch.save(state, path)  # seen
    """,
    "seed:of each rank": """
        def main(policy, seed, rank):
            generator = torch.Generator().manual_seed(seed + rank)
            policy(torch.rand(3, generator=generator))  # seen
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


def test_every_kind_of_cause_is_tested():
    assert {origin.partition(":")[0] for origin in PROGRAMS} == FINDERS.keys()


def test_a_file_that_is_no_python_changes_nothing(tmp_path):
    (tmp_path / "train.py").write_text("if\n")
    finding = Finding(RULES["schedule-length"], "seen", "train.py:1", origin="total")
    assert at_origin(finding, tmp_path / "train.py", tmp_path).where == "train.py:1"


def test_definitions_that_refer_to_themselves_end():
    source = Source(ast.parse("def f(x):\n    y = f(y)\n    return f(y)\n"))
    assert list(source.trace([])) == []
    assert FINDERS["total"](source, source.statement(3), "") is None
