"""``workshop diagnose`` names the cause from what was seen of the ranks."""

import json
import pickle
from dataclasses import replace

import pytest

from workshop.diagnose import recorder
from workshop.diagnose.calls import first_difference
from workshop.diagnose.causes import judge
from workshop.diagnose.causes.words import names
from workshop.diagnose.evidence import Call, Doing, Failure, Place, Process, Rank, Scene, from_json, to_json
from workshop.diagnose.remains import first_error
from workshop.diagnose.slurm import join


def at(line: int) -> Place:
    return Place("/home/me/train.py", line, "main")


def calls(*lines: int, complete: bool = True, name: str = "all_reduce", size: int = 4) -> tuple[Call, ...]:
    """Return collectives of these lines; the last one is complete or not."""
    made = [
        Call("default_pg", number, name, ((size,),), ("Float",), True, at(line)) for number, line in enumerate(lines, 1)
    ]
    return (*made[:-1], replace(made[-1], complete=complete))


def waiting(rank: int, *lines: int, **options) -> Rank:
    return Rank(
        rank, doing=Doing("waits", "all_reduce", at(lines[-1])), calls=calls(*lines, complete=False, **options), world=2
    )


def test_a_rank_that_leaves_out_a_collective_is_named_with_the_number_and_the_line():
    late = Rank(1, doing=Doing("sleep", "", at(90)), calls=calls(10, 20), world=2)
    diagnosis = judge(Scene((waiting(0, 10, 20, 88), late)))
    assert (
        diagnosis.line
        == "Rank 1 never called all_reduce #3 (train.py:88): it is in a sleep (train.py:90). It may wake up again."
    )
    assert diagnosis.why == "Rank 0 waits in all_reduce #3 (train.py:88)."


def test_ranks_that_part_by_a_branch_are_named_at_the_first_different_line():
    """Rank 1 skips the call of line 20. Its next calls are of the same kind and size, so they meet those of rank 0."""
    zero, one = waiting(0, 10, 20, 30, 10, 20), waiting(1, 10, 30, 10, 30, 10)
    difference = first_difference([zero, one])
    assert (difference.kind, difference.number) == ("line", 2)
    diagnosis = judge(Scene((zero, one)))
    assert diagnosis.cause == "skipped"
    assert "before call #2: rank 0 called all_reduce #2 (train.py:20), and rank 1 called" in diagnosis.line


def test_the_order_of_calls_that_differ_by_line_only_is_no_difference_if_all_agree_again():
    """A broadcast stands on different lines of rank 0 and rank 1 in many correct programs."""
    zero, one = waiting(0, 10, 21, 30), replace(waiting(1, 10, 23, 30), doing=Doing("waits", "all_reduce", at(30)))
    assert first_difference([zero, one]) is None


def test_sizes_and_types_that_differ_are_named():
    other = replace(
        waiting(1, 10, 20), calls=(*calls(10), Call("default_pg", 2, "all_reduce", ((6,),), ("Float",), False, at(20)))
    )
    assert judge(Scene((waiting(0, 10, 20), other))).cause == "shape"
    other = replace(
        waiting(1, 10, 20), calls=(*calls(10), Call("default_pg", 2, "all_reduce", ((4,),), ("Double",), False, at(20)))
    )
    diagnosis = judge(Scene((waiting(0, 10, 20), other)))
    assert diagnosis.cause == "dtype"
    assert "[4] float" in diagnosis.line
    assert "[4] double" in diagnosis.line


def test_gathering_tensors_of_different_sizes_by_all_to_all_is_allowed():
    def rank(number, size):
        call = Call("default_pg", 1, "all_to_all", ((size,),), ("Float",), False, at(10))
        return Rank(number, doing=Doing("waits", "all_to_all", at(10)), calls=(call,), world=2)

    assert first_difference([rank(0, 3), rank(1, 5)]) is None


def test_a_lock_copied_by_fork_differs_from_a_slow_worker():
    stack = (at(27), Place("/lib/python3.11/site-packages/torch/utils/data/_utils/worker.py", 300, "_worker_loop"))
    worker = Process(9, Doing("lock", "", at(27), stack), worker=True)
    loads = Rank(1, doing=Doing("loads", "", at(38)), calls=calls(10), children=(worker,), world=2)
    diagnosis = judge(Scene((waiting(0, 10, 40), loads)))
    assert (diagnosis.cause, diagnosis.place) == ("fork", at(27))
    asleep = replace(worker, doing=Doing("sleep", "", at(27), stack))
    assert judge(Scene((waiting(0, 10, 40), replace(loads, children=(asleep,))))).cause == "loader"
    assert judge(Scene((waiting(0, 10, 40), replace(loads, children=(), lost_workers=(9,))))).cause == "worker"


def test_the_rank_that_failed_first_is_named_and_not_the_one_that_lost_its_connection():
    echo = Failure("RuntimeError", "Connection closed by peer [127.0.0.1]", seconds=1.0)
    error = Failure("ValueError", "label 12 is out of range", place=at(31), seconds=2.0)
    scene = Scene((Rank(0, alive=False, failure=echo), Rank(1, alive=False, failure=error)))
    assert judge(scene).line == "Rank 1 failed first (train.py:31): ValueError: label 12 is out of range"


def test_a_process_that_the_kernel_killed_for_memory_is_told_from_a_kill():
    scene = Scene((Rank(0, doing=Doing("waits", "all_reduce", at(3))), Rank(1, 77, alive=False, signal=9)))
    assert judge(scene).cause == "killed"
    assert judge(replace(scene, killed_for_memory=(77,))).cause == "memory"


def test_an_interface_that_the_node_does_not_have_is_named():
    rank = Rank(0, node="n1", doing=Doing("joins"), settings={"NCCL_SOCKET_IFNAME": "ib0"}, world=2)
    diagnosis = judge(Scene((rank,), {"n1": ("lo", "eth0")}))
    assert diagnosis.cause == "interface"
    assert "eth0, lo" in diagnosis.why
    assert (
        judge(Scene((replace(rank, settings={"NCCL_SOCKET_IFNAME": "eth"}),), {"n1": ("lo", "eth0")})).cause
        == "rendezvous"
    )


def test_ranks_with_different_addresses_are_named():
    def rank(number, address):
        return Rank(
            number, doing=Doing("joins", "", at(5)), settings={"MASTER_ADDR": address, "WORLD_SIZE": "2"}, world=2
        )

    assert "MASTER_ADDR (rank 0: n1; rank 1: n2)" in judge(Scene((rank(0, "n1"), rank(1, "n2")))).line
    assert judge(Scene((rank(0, "n1"),))).line == "Rank 1 of 2 has not started, or not here."


def test_torchrun_on_one_node_waits_for_no_other_node():
    """On a very busy machine, the ranks may start only after the first look at the processes."""

    def line(options):
        command = {"COMMAND": f"torchrun {options} train.py"}
        return judge(Scene((Rank(-1, doing=Doing("joins"), node="n1", settings=command),))).line

    assert line("--standalone --nproc-per-node=2") == "torchrun on n1 has not started the ranks yet."
    assert line("--nproc-per-node=2") == "torchrun on n1 has not started the ranks yet."
    assert line("--nnodes=2 --rdzv-endpoint=n0:29500").startswith(
        "torchrun on n1 waits for the other nodes at n0:29500"
    )


def test_a_program_that_computes_is_no_hang():
    assert judge(Scene((Rank(0, doing=Doing("computes", "", at(7)), busy=0.9),))).cause == "moves"


def test_ranks_in_words():
    assert names([3]) == "rank 3"
    assert names([2, 0]) == "ranks 0 and 2"
    assert names(range(7)) == "ranks 0 to 6"
    assert names(range(0, 40, 2)) == "ranks 0, 2, 4, 6, 8, 10, 12, 14 and others"


def test_a_scene_survives_the_file():
    worker = Process(9, Doing("lock", "", at(27), (at(27),)), worker=True)
    rank = replace(
        waiting(1, 10, 20),
        children=(worker,),
        before=Doing("sleep"),
        failure=Failure("E", "m", place=at(2), stack=(at(2),)),
    )
    scene = Scene((rank,), {"n1": ("lo",)}, ("a",), "log", (3,), 4.5, "n1")
    assert from_json(json.loads(json.dumps(to_json(scene)))) == scene


def test_the_scenes_of_two_nodes_are_joined():
    launcher = Rank(-1, doing=Doing("joins"), node="n2")
    joined = join(
        [Scene((waiting(1, 10),), {"n2": ("lo",)}, ("x",)), Scene((waiting(0, 10), launcher), {"n1": ("lo",)}, ("x",))]
    )
    assert [rank.rank for rank in joined.ranks] == [0, 1]
    assert joined.missing == ("x",)


ENTRY = {
    "process_group": ("0", "default_pg"),
    "collective_seq_id": 3,
    "p2p_seq_id": 0,
    "is_p2p": False,
    "profiling_name": "gloo:all_reduce",
    "input_sizes": [[2, 3]],
    "input_dtypes": ["Float"],
    "retired": False,
    "state": "scheduled",
    "frames": [
        {"name": "all_reduce", "filename": "/x/site-packages/torch/distributed/distributed_c10d.py", "line": 9},
        {"name": "main", "filename": "/home/me/train.py", "line": 88},
    ],
}


def test_the_flight_recorder_is_read_as_pickle_and_as_json():
    expected = Call("default_pg", 3, "all_reduce", ((2, 3),), ("Float",), False, Place("/home/me/train.py", 88, "main"))
    data = {"version": "2.10", "entries": [ENTRY]}
    assert recorder.read(pickle.dumps(data, protocol=2)) == (expected,)
    assert recorder.read(json.dumps(data).encode()) == (expected,)


class Evil:
    def __reduce__(self):
        return (print, ("this must not run",))


@pytest.mark.parametrize(
    ("trace", "words"),
    [
        (pickle.dumps({"version": "2.10", "entries": [ENTRY]})[:-40], "not a complete dump"),
        (pickle.dumps({"version": "1.0", "entries": []}), "its version is 1.0"),
        (pickle.dumps([1, 2]), "no dump of the flight recorder"),
        (pickle.dumps({"version": "2.10", "entries": [{"a": 1}]}), "cannot be read"),
        (pickle.dumps(Evil()), "no plain value"),
        (b"", "not a complete dump"),
    ],
    ids=["cut short", "other version", "other data", "other fields", "code", "empty"],
)
def test_a_bad_file_of_the_flight_recorder_is_one_sentence_and_runs_no_code(trace, words, capsys):
    with pytest.raises(ValueError, match=words):
        recorder.read(trace)
    assert capsys.readouterr().out == ""


def test_the_first_error_of_a_log_is_not_the_lost_connection(tmp_path):
    (tmp_path / "rank0.log").write_text(
        "epoch 1\nTraceback (most recent call last):\nRuntimeError: Connection closed by peer [10.0.0.1]\n"
    )
    (tmp_path / "rank1.log").write_text(
        'Traceback (most recent call last):\n  File "/home/me/t.py", line 3, in f\nValueError: bad label\n'
    )
    assert first_error(tmp_path).endswith("ValueError: bad label")
