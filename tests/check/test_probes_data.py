"""What the probes record of the data, the copies of a model and the weights of a loss."""

import pytest

from check.made import Made
from workshop.check.evidence.events import (
    DATA_SET,
    Drawn,
    FileWritten,
    LoaderStarted,
    LossWeighted,
    ModelCopied,
    ModelUpdated,
)
from workshop.check.evidence.misuses import (
    InputsWithoutGradients,
    LabelsShifted,
    LossCounted,
    LossOfProbabilities,
    LossScaled,
    OtherSamplerSet,
    PythonStarted,
    WorkersKept,
)
from workshop.check.probes.recorder import Recorder

# ---------------------------------------------------------------- two ranks that train


DRAWING = """
    import random
    import numpy, torch
    from torch.utils.data import DataLoader, DistributedSampler, random_split

    values = list(range(50))
    for seed in (1, 1, 2):
        parts = random_split(values, [30, 20], generator=torch.Generator().manual_seed(seed))  # split
    torch.randperm(50)
    random.shuffle(values)  # by the module
    random.Random(1).shuffle(x=values)
    random.sample(values, 10)
    numpy.random.permutation(50)
    numpy.random.default_rng(1).shuffle(values)  # by NumPy
    DistributedSampler(values, num_replicas=4, rank=1)  # divided
    for batch in DataLoader(values, shuffle=True):  # drawn by a library
        pass
"""


def test_random_splits_and_orders_of_the_program_are_recorded(place):
    drawing = Made(place("drawing"), DRAWING).well()
    (process,) = drawing.run.processes
    first, again, different, *others, divided = process.of(Drawn)
    assert first == again
    assert (first.name, first.size, first.where) == ("random_split", 50, drawing.line("# split"))
    assert different.of == first.of
    assert different.result != first.result
    functions = ["torch.randperm", "random.shuffle", "shuffle", "random.sample", "numpy.random.permutation", "shuffle"]
    assert [each.name for each in others] == functions
    assert others[1].where == drawing.line("# by the module")
    assert others[-1].where == drawing.line("# by NumPy")
    assert (divided.name, divided.size, divided.of, divided.where) == (DATA_SET, 50, 4, drawing.line("# divided"))


# ---------------------------------------------------------------- samplers, and files without contents

SAMPLING = """
    import os, tempfile
    from torch.utils.data import DataLoader, DistributedSampler

    samplers = [DistributedSampler([1, 2, 3, 4], num_replicas=2, rank=0) for _ in range(2)]
    loaders = [DataLoader([1, 2, 3, 4], sampler=sampler) for sampler in samplers]
    for epoch in range(3):
        samplers[1].set_epoch(epoch)
        for loader in loaders:
            list(loader)
    with open("log.txt", "w") as log:  # each rank may do this
        pass
    open("flag.txt", "w").close()  # a file that tells something by being there
    with tempfile.NamedTemporaryFile("w", dir=".", delete=False, prefix="named") as file:
        file.write("x")
    import subprocess, sys
    subprocess.run([sys.executable, "-c", ""])  # a further program
    os.system("cd . && python3 -c ''")  # by a shell
    subprocess.run("exit 0 # pythonic", shell=True)
    with open("written.txt", "w") as file:
        file.write("x")
"""


def test_a_sampler_that_gets_no_epoch_although_another_does_is_recorded(place):
    (process,) = Made(place("sampling"), SAMPLING).well().run.processes
    assert [event.loader for event in process.of(OtherSamplerSet)] == [1]


def test_a_further_python_program_is_recorded(place):
    made = Made(place("starting"), SAMPLING).well()
    (process,) = made.run.processes
    started = [event.where for event in process.of(PythonStarted)]
    assert started == [made.line("# a further program"), made.line("# by a shell")]


def test_files_that_are_only_emptied_and_folders_of_temporary_files_do_not_count(place):
    (process,) = Made(place("emptying"), SAMPLING).well().run.processes
    flag, named, written = (event.path.rsplit("/", 1)[-1] for event in process.of(FileWritten))
    assert (flag, written) == ("flag.txt", "written.txt")
    assert named.startswith("named")


# ---------------------------------------------------------------- streams

STREAMING = """
    from torch.utils.data import ChainDataset, DataLoader, IterableDataset

    class Stream(IterableDataset):
        def __iter__(self):  # of the stream
            yield from range(4)

    class Renamed(DataLoader):
        def __iter__(self):
            return super().__iter__()

    for workers in (0, 2):
        for batch in Renamed(Stream(), num_workers=workers):
            pass
    chained = ChainDataset(Stream() for _ in range(2))  # its length needs the whole generator
    assert sum(1 for _ in DataLoader(chained)) == 8
"""


PERSISTENT = """
    from torch.utils.data import DataLoader, Dataset

    class Numbers(Dataset):
        def __init__(self):
            self.epoch, self.size = 0, 4

        def __getitem__(self, index):
            return index + self.epoch

        def __len__(self):
            return self.size

    numbers = Numbers()
    kept = DataLoader(numbers, num_workers=1, persistent_workers=True)
    anew = DataLoader(numbers, num_workers=1)
    for epoch in range(3):
        numbers.epoch = epoch
        assert sum(kept) == 6 and sum(anew) == 6 + 4 * epoch  # kept
    list(kept)
"""


def test_a_data_set_that_changes_beside_persistent_workers_is_recorded(place):
    made = Made(place("persistent"), PERSISTENT).well()
    found = [(each.names, each.where) for each in made.run.all(WorkersKept)]
    assert found == [(["epoch"], made.line("# kept"))] * 2


def test_the_workers_of_a_stream_are_recorded(place):
    streaming = Made(place("streaming"), STREAMING).well()
    started = [each for process in streaming.run.processes for each in process.of(LoaderStarted)]
    assert [each.workers for each in started] == [0, 2, 0]
    assert {each.source for each in started[:2]} == {streaming.line("# of the stream")}
    assert {each.where for each in started[:2]} == {streaming.line("for batch in")}  # and not the line in Renamed


# ---------------------------------------------------------------- copies of models

COPYING = """
    import copy
    import torch

    @torch.no_grad()
    def follow(average, model):
        for old, new in zip(average.parameters(), model.parameters()):
            old.lerp_(new, 0.1)

    model = torch.nn.Linear(2, 1)
    average = copy.deepcopy(model)
    copy.deepcopy([1, [2]])
    layer = torch.nn.TransformerEncoderLayer(4, 1, 4)
    torch.nn.TransformerEncoder(layer, 2)  # copied by torch
    library = {}
    exec(compile("from copy import deepcopy\\ndef averaged(model): return deepcopy(model)", "/elsewhere/ema.py", "exec"), library)
    library["averaged"](model)  # copied by another library
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model(torch.randn(4, 2)).mean().backward()
        optimizer.step()
        follow(average, model)  # on every rank
"""


def test_copies_of_a_model_and_their_updates_are_recorded(place):
    copying = Made(place("copying"), COPYING).well()
    (process,) = copying.run.processes
    copied = process.of(ModelCopied)
    assert [(each.model, each.names) for each in copied] == [("Linear", ["weight", "bias"])] * 2
    assert [each.where for each in copied] == [
        copying.line("average = copy"),
        copying.line("# copied by another library"),
    ]
    first, _ = process.of(ModelUpdated)
    assert [where for _, where, *_ in first.calls] == [
        copying.line("old.lerp_"),
        copying.line("# on every rank"),
    ]


# ---------------------------------------------------------------- losses

WEIGHTING = """
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    model, weights = nn.Linear(4, 3), torch.tensor([0.5, 1.0, 2.0])
    labels = torch.tensor([0, 1, 2, 2, 0, 1, 2, 2])

    def weighted(logits):
        return (nn.functional.cross_entropy(logits, labels, reduction="none") * weights[labels]).mean()

    nn.functional.cross_entropy(model(torch.randn(8, 4)), labels, weight=weights).backward()  # argument
    weighted(model(torch.randn(8, 4))).backward()
    checkpoint(weighted, model(torch.randn(8, 4)), use_reentrant=False).backward()  # its tensors are not there
    checkpoint(model, torch.randn(8, 4), use_reentrant=True)  # inputs
    checkpoint(model, torch.randn(8, 4, requires_grad=True), use_reentrant=True)
    (model(torch.randn(8, 4)).mean() / 4 + 0.25 * 3 * model(torch.randn(8, 4)).square().mean()).backward()
"""


def test_the_constants_that_weight_a_loss_are_recorded(place):
    weighting = Made(place("weighting"), WEIGHTING).well()
    argument, factors = weighting.run.processes[0].of(LossWeighted)
    assert argument.values == factors.values == [0.5, 1.0, 2.0]
    assert argument.argument
    assert not factors.argument
    assert argument.where == weighting.line("# argument")
    assert factors.where == weighting.line('reduction="none"')
    assert [each.where for each in weighting.run.all(InputsWithoutGradients)] == [weighting.line("# inputs")]
    assert [sorted(each.factors) for each in weighting.run.processes[0].of(LossScaled)][-1:] == [[0.75, 4.0]]


COUNTING = """
    import torch
    from torch import nn
    from torch.nn import functional as F

    model = nn.Linear(4, 1)
    for chosen in (3, 5):
        inputs, mask = torch.randn(8, 4), torch.arange(8) < chosen
        (model(inputs).square().squeeze(1) * mask).sum().div(mask.sum()).backward()
        model(inputs)[mask].abs().mean().backward()
        F.mse_loss(model(inputs)[mask], torch.ones(chosen, 1)).backward()
        (model(inputs).mean() / 2 + model(inputs).square().mean()).backward()  # means of all
        F.mse_loss(model(inputs), torch.ones(8, 1)).backward()
        (model(inputs).sum() / torch.tensor(float("inf")) * 0.5).backward()
"""


def test_the_counts_by_which_a_loss_is_divided_are_recorded(place):
    counting = Made(place("counting"), COUNTING).well()
    events = counting.run.processes[0].of(LossCounted)
    assert [each.counts for each in events] == [[3], [3], [3], [2], [5], [5], [5], [2]]
    assert events[3].where == counting.line("# means of all")


MISTAKEN = """
    import torch
    from torch import nn
    from torch.nn import functional as F

    class TinyForCausalLM(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(9, 9)

        def forward(self, input_ids, labels):
            logits = self.table(input_ids)[:, :-1]
            return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())

    model, labels = nn.Linear(4, 3), torch.tensor([0, 1, 2])
    for _ in range(2):
        F.cross_entropy(model(torch.randn(3, 4)).softmax(1), labels).backward()  # softmax
        F.binary_cross_entropy_with_logits(model(torch.randn(3, 4))[:, 0].sigmoid().unsqueeze(1), torch.ones(3, 1))  # sigmoid
        F.nll_loss(model(torch.randn(3, 4)).log_softmax(1), labels)  # right
    tokens, language_model = torch.randint(9, (2, 6)), TinyForCausalLM()
    language_model(tokens, labels=tokens).backward()  # right
    language_model(input_ids=tokens[:, :-1], labels=tokens[:, 1:]).backward()  # shifted
"""


def test_losses_of_probabilities_and_shifted_labels_are_recorded(place):
    mistaken = Made(place("mistaken"), MISTAKEN).well()
    (process,) = mistaken.run.processes
    found = [(event.name, event.of, event.where) for event in process.of(LossOfProbabilities)]
    assert found == [
        ("cross_entropy", "softmax", mistaken.line("# softmax")),
        ("binary_cross_entropy_with_logits", "sigmoid", mistaken.line("# sigmoid")),
    ]
    (shifted,) = process.of(LabelsShifted)
    assert (shifted.model, shifted.where) == ("TinyForCausalLM", mistaken.line("# shifted"))


# ---------------------------------------------------------------- processes that a program starts


@pytest.mark.parametrize(
    ("batches", "length", "first", "steps", "to_go"),
    [
        (30, 50, 0, 30, 22),  # to the end of the epoch, and two steps more
        (30, 50, 10, 25, 12),  # two batches for each step
        (24, 50, 0, 24, 1),  # more than half of the epoch is left
        (50, 50, 0, 50, 1),
        (30, 0, 0, 30, 1),  # nobody knows the length
        (0, 0, 0, 30, 1),  # there is no loader
    ],
)
def test_a_long_run_ends_after_its_epoch_if_most_of_it_is_over(batches, length, first, steps, to_go, tmp_path):
    recorder = Recorder(tmp_path, tmp_path, tmp_path)
    recorder.steps, recorder.epoch = steps, (batches, length, first)
    assert recorder._to_go() == to_go


# The program looks for the recorder, which the tests read.
FINDS = """\
    import gc
    recorder = next(each for each in gc.get_objects() if type(each).__name__ == "Recorder")
"""
EPOCHS = """
    import torch
    from torch.utils.data import DataLoader

    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        for number, batch in enumerate(DataLoader(torch.ones(8, 1), 2)):
            model(batch).sum().backward()
            if number % 2:
                optimizer.step()
                print(recorder.epoch)
"""


def test_the_recorder_knows_how_far_an_epoch_is(place):
    made = Made(place("epochs"), EPOCHS.replace("    import torch\n", f"    import torch\n{FINDS}", 1)).well()
    (process,) = made.run.processes
    assert process.stdout.split("\n")[:4] == ["(2, 4, 0)", "(4, 4, 0)", "(2, 4, 2)", "(4, 4, 2)"]


SCRIPTED = """
    import torch
    from torch.nn import functional as F

    @torch.jit.script
    def focal(outputs, targets):
        return F.binary_cross_entropy_with_logits(outputs, targets)

    focal(torch.zeros(2), torch.ones(2))
"""


def test_torch_jit_can_compile_what_calls_an_observed_function(place):
    Made(place("scripted"), SCRIPTED).well()
