"""What a data set holds, and how the check tells that equal indices are different samples."""

import itertools
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from check.made import Made
from workshop.check import recollated
from workshop.check.evidence.misuses import DataHeld, StreamEndless
from workshop.check.evidence.process import Process
from workshop.check.evidence.run import _hold_different_data
from workshop.check.probes.contents import attributes
from workshop.check.probes.held import begins_again, held, ignores_index
from workshop.check.probes.recorder import Recorder


class Files:
    def __init__(self, names):
        self.files, self.transform, self.size = names, len, 64


class Records:
    def __init__(self, values):
        self.parts = [{"values": values}, Files([f"{number}.png" for number in range(40)])]


class Options(dict):
    """Options as attributes: what is missing, for example __dict__, is a KeyError."""

    __slots__ = ()

    def __getattr__(self, name):
        return self[name]


def test_an_object_may_answer_with_any_error():
    records = Records(torch.arange(100.0))
    records.options = Options(width=8)
    assert sorted(held(records)) == [".parts[0].values", ".parts[1].files"]
    recorder = object.__new__(Recorder)
    recorder.root, recorder.around, recorder.script = "", "", __file__
    assert recorder.of_program(records.options)
    assert attributes(records.options) == {}


class WithoutLength(Dataset):
    """Such as an IterableDataset of Hugging Face: it has the method, but not the length."""

    def __len__(self):
        raise TypeError("object of type 'IterableDataset' has no len()")


def test_a_data_set_may_refuse_its_length():
    assert recollated.Drawn(SimpleNamespace(_dataset=WithoutLength())).size == 0
    assert recollated.Drawn(SimpleNamespace(_dataset=range(7))).size == 7


def test_the_checksums_are_those_of_data_and_not_of_settings():
    known = held(Records(torch.arange(100.0)))
    assert sorted(known) == [".parts[0].values", ".parts[1].files"]
    assert known == held(Records(numpy.arange(100.0, dtype="float32")))  # the same in every process
    large = torch.arange(100_000.0)
    assert len({tuple(held(Records(large)).values()) for _ in range(20)}) == 1  # of which only some values are read
    other = held(Records(torch.arange(100.0) + 1))
    assert [name for name in known if known[name] != other[name]] == [".parts[0].values"]
    assert held(Files(["a.png"])) == {}  # too short to be data
    assert held(TensorDataset(torch.randn(20, 3))) != held(TensorDataset(torch.randn(20, 3)))
    lists = [[torch.arange(3) + number + shift for number in range(30)] for shift in (0, 0, 1)]
    first, same, different = (held(Files(each)) for each in lists)
    assert first == same != different


class Frame:
    """As much of a DataFrame as is read."""

    __module__ = "pandas.core.frame"

    def __init__(self, values):
        self.values = self.iloc = numpy.array(values)

    def __len__(self):
        return len(self.values)


def test_tables_are_read():
    class Rows:
        def __getitem__(self, part):
            return Frame(range(*part.indices(50)))

    frame = Frame(range(50))
    frame.iloc = Rows()
    assert list(held(Records(frame))) == [".parts[0].values", ".parts[1].files"]


class Forever(IterableDataset):
    def __iter__(self):
        while True:
            yield from range(4)


class Counted(IterableDataset):
    def __iter__(self):
        yield from itertools.count()


class Once(IterableDataset):
    def __iter__(self):
        number = 0
        while True:
            number += 1
            if number > 4:
                return
            yield number


def test_a_stream_that_begins_again_has_no_end():
    assert [begins_again(each()) for each in (Forever, Counted, Once)] == [True, True, False]
    assert not begins_again(iter([]))  # its text cannot be read


class Drawn(Dataset):
    def __getitem__(self, index):
        index = torch.randint(10, ()).item()
        return index


class Unused(Dataset):
    def __getitem__(self, _):
        return torch.randn(3)


class Usual(Dataset):
    def __getitem__(self, index):
        index = index % 10
        return index


class Passed(Dataset):
    def __getitem__(self, index):
        return self.load(index)


def test_an_index_that_is_not_used_names_no_sample():
    assert [ignores_index(each) for each in (Drawn, Unused, Usual, Passed)] == [True, True, False, False]


@pytest.mark.parametrize(("other", "differ"), [({"x": 1, "y": 2}, False), ({"x": 1, "y": 3}, True), ({"z": 9}, False)])
def test_data_sets_of_one_name_and_length_are_compared(other, differ):
    ranks = [
        Process(number, [(0.0, DataHeld(name="Files", length=40, contents=contents))])
        for number, contents in enumerate([{"x": 1, "y": 2}, other])
    ]
    assert _hold_different_data({("Files", 40)}, *ranks) is differ
    assert not _hold_different_data({("Files", 41)}, *ranks)


LOADING = """
    import itertools
    import torch
    from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

    class Endless(IterableDataset):
        def __iter__(self):
            while True:
                yield torch.zeros(2)

    class Numbers(Dataset):
        def __init__(self):
            self.values = torch.arange(40.0)

        def __len__(self):
            return 40

        def __getitem__(self, index):
            return self.values[index]

    for loader in (DataLoader(Endless()), DataLoader(Subset(Numbers(), range(8))), DataLoader(list(range(30)))):
        for batch in itertools.islice(loader, 2):
            pass
"""


def test_what_loaders_iterate_over_is_recorded(place):
    (process,) = Made(place("loading"), LOADING).well().run.processes
    assert [event.loader for event in process.of(StreamEndless)] == [1]
    assert [(event.name, event.length, list(event.contents)) for event in process.of(DataHeld)] == [
        ("Numbers", 40, [".values"])
    ]
