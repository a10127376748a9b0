"""Where a program stops early, as its text shows it."""

import textwrap

import pytest

from check.made import Made
from check.test_run import joined, run
from workshop.check.evidence.events import StepBegun, StepTaken, VariablesSeen
from workshop.check.evidence.misuses import StopsAtLimit, StopsEarly
from workshop.check.rules.collectives import stop_decided_alone
from workshop.check.stopping import early_stops, stops_at_limits

LOOP = """
def main():
    best, bad = float("inf"), 0
    for epoch in range(10):
        loss = evaluate()
        if loss < best:  # compared
            best, bad = loss, 0
        else:
            bad += 1
            END
"""
CLASS = """
class Stopper:
    def __call__(self, loss):
        if self.best is None:
            self.best = loss
        elif loss > self.best - self.delta:  # compared
            self.counter += 1
            if self.counter >= self.patience:
                SAID
        else:
            self.best = loss
            self.counter = 0

for epoch in range(10):
    USED
"""


def found(text):
    text = textwrap.dedent(text)
    lines = text.splitlines()
    return ["# compared" in lines[stop.line - 1] for stop in early_stops({"train.py": text})]


@pytest.mark.parametrize(
    "text",
    [
        LOOP.replace("END", "if bad >= 3: break"),
        LOOP.replace("END", "if bad > 3:\n                return"),
        LOOP.replace("END", "stop = bad >= 3\n        if stop: break"),
        LOOP.replace("for epoch in range(10)", "while bad < 3").replace("END", "pass"),
        CLASS.replace("SAID", "self.early_stop = True").replace(
            "USED", "stopper(loss)\n    if stopper.early_stop: break"
        ),
        CLASS.replace("SAID", "return True").replace("USED", "if early_stopping(loss): break"),
        CLASS.replace("__call__", "step")
        .replace("SAID", "return True")
        .replace("USED", "if stopper.step(loss): break"),
        CLASS.replace("__call__", "bad").replace("SAID", "return True").replace("USED", "if stopper.bad(loss): break"),
    ],
)
def test_the_comparison_that_decides_when_a_loop_ends_is_found(text):
    assert found(text) == [True]


LIMIT = """
while epoch < 10 and not solved:
    for batch in loader:
        step()  # running
    value = evaluate()
    solved = value > 0.9  # compared
"""


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (LIMIT, 1),
        (LIMIT.replace("while epoch < 10 and not solved", "for epoch in range(10)") + "    if solved: break", 1),
        (LIMIT.replace(" and not solved", "").replace("solved = value > 0.9", "if value > 0.9: break"), 1),
        (LIMIT.replace("  # compared", "\n    dist.all_reduce(t := torch.tensor(solved))"), 0),
        (LIMIT.replace(" and not solved", "") + "    while value > 0.5: value /= 2", 0),  # no loop of the training
    ],
)
def test_a_limit_that_ends_a_loop_of_the_training_is_found(text, number):
    lines = text.splitlines()
    running = {"train.py": [next(number for number, line in enumerate(lines, 1) if "# running" in line)]}
    stops = [stop for stop in stops_at_limits({"train.py": text}, running) if stop.compared != ("epoch",)]
    assert ["# compared" in lines[stop.line - 1] for stop in stops] == [True] * number


@pytest.mark.parametrize(
    "text",
    [
        LOOP.replace("END", "pass"),
        LOOP.replace("END", "if bad >= 3: print(bad)"),
        # The ranks tell each other what they decide.
        LOOP.replace("END", "stop = bad >= 3\n        dist.all_reduce(t := torch.tensor(stop))\n        if t: break"),
        LOOP.replace("END", "stop = broadcast_object(bad >= 3)\n        if stop: break"),
        LOOP.replace("END", "if bad >= 3: accelerator.set_trigger()\n        if accelerator.check_trigger(): break"),
        # A count that only lowers the learning rate, and the step of an optimizer.
        LOOP.replace("END", "if bad >= 3: group['lr'] /= 2"),
        CLASS.replace("__call__", "step")
        .replace("SAID", "return True")
        .replace("USED", "if optimizer.step(loss): break"),
        LOOP.replace("best, bad = loss, 0", "best = loss").replace("END", "if bad >= 3: break"),
    ],
)
def test_other_counts_are_not(text):
    assert found(text) == []


def test_it_is_recorded_after_the_first_step(tmp_path):
    text = """
        import torch

        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        best, bad = 9.0, 0
        for epoch in range(3):
            loss = model(torch.ones(1, 1)).sum()
            loss.backward()
            optimizer.step()
            if loss.item() < best:  # compared
                best, bad = loss.item(), 0
            else:
                bad += 1
                if bad > 2:
                    break
    """
    made = Made(tmp_path, text).well()
    (event,) = made.run.all(StopsEarly)
    assert event.where == made.line("# compared")
    assert "best" in event.names


@pytest.mark.parametrize(("values", "seen"), [((0.5, 0.4), True), ((0.5, 0.500001), False), ((3.0, 2.0), False)])
@pytest.mark.parametrize(("kind", "name"), [(StopsEarly, "best"), (StopsAtLimit, "state.best")])
def test_only_numbers_that_differ_between_the_ranks_are_reported(values, seen, kind, name):
    """Other than by rounding; whole numbers may be those of the rank."""
    ranks = []
    for rank, value in enumerate(values):
        begun = StepBegun(gradients=[], weights=[], names=[], rates=[], state=0, of_model=True, fitting=False)
        variables = VariablesSeen(numbers={"state.best": value, "rate": 0.1 * rank}, states={})
        stops = kind(names=[name], where="t.py:8")
        again = kind(names=[name], where="t.py:70")  # in a function that does not run
        ranks.append(joined(rank, begun, StepTaken(weights=[]), stops, again, variables))
    said = list(stop_decided_alone.detectors[0].function(run(*ranks)))
    assert [(each.where, "`state.best`" in each.text) for each in said] == ([("t.py:8", True)] if seen else [])


@pytest.mark.parametrize(("others", "seen"), [((2.0, 2.0), False), ((2.0, 0.3), True)])
def test_a_variable_of_a_different_function_does_not_decide(others, seen):
    """It has the same name, and never changes."""
    ranks = []
    for rank, values in enumerate(((2.0, 0.5), others)):
        variables = [VariablesSeen(numbers={"value": value}, states={}) for value in values]
        begun = StepBegun(gradients=[], weights=[], names=[], rates=[], state=0, of_model=True, fitting=False)
        ranks.append(
            joined(rank, begun, StepTaken(weights=[]), StopsEarly(names=["value"], where="t.py:8"), *variables)
        )
    assert bool(list(stop_decided_alone.detectors[0].function(run(*ranks)))) == seen
