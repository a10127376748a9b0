"""The timeline of a step: what a process computes, and when its collectives run."""

from types import SimpleNamespace

import pytest
from PIL import Image
from torch.autograd import DeviceType

from workshop.demo.timelines import draw_timelines
from workshop.training.timeline import START, Timeline, computing_share, merged, pieces


def event(name, start, end, number=0, **more):
    """An event of the profiler, in milliseconds."""
    times = SimpleNamespace(start=1000 * start, end=1000 * end)
    device = DeviceType.CUDA if "linked_correlation_id" in more else DeviceType.CPU
    fields = {"id": number, "thread": 1, "is_async": False, "sequence_nr": -1, "is_user_annotation": False}
    return SimpleNamespace(name=name, time_range=times, device_type=device, **(fields | more))


NODE = "autograd::engine::evaluate_function: MmBackward0"
STEP = [
    event("aten::add", 0, 1, 1),  # before the step
    event(START, 2, 2, 2),
    event("aten::mm", 2, 6, 3, sequence_nr=1),
    event("aten::empty", 3, 4, 4),  # a part of the operation before
    event("c10d::allgather_into_tensor_coalesced_", 6, 6.1, 5),
    event("gloo:all_gather", 6.1, 9, 6, is_async=True),
    event("aten::mm", 9, 12, 7, sequence_nr=2),
    event(NODE, 12, 20, 8),
    event("aten::mm", 12, 14, 9),
    event("c10d::_reduce_scatter_base_", 14, 14.2, 10),
    event("gloo:all_reduce", 14.2, 22, 11, is_async=True),  # how gloo computes a reduce-scatter
    event("aten::mm", 14.2, 20, 12),
    event("aten::copy_", 22, 23, 13),
    event("Optimizer.step#AdamW.step", 23, 27, 14),
    event("aten::lerp_", 23, 25, 15),
    event("aten::sqrt", 25.1, 27, 16),
    event("aten::stack", 27, 29, 17, sequence_nr=3),  # after the backward pass, so it is no forward pass
]


def test_the_events_of_a_step_become_computations_and_communication():
    assert pieces(reversed(STEP)) == [
        ("forward", 0, 4),
        ("all_gather", pytest.approx(4.1), 7),
        ("forward", 7, 10),
        ("backward", 10, 18),
        ("reduce_scatter", pytest.approx(12.2), 20),
        ("other", 20, 21),
        ("optimizer", 21, 25),
        ("other", 25, 27),
    ]


def test_on_a_gpu_the_kernels_count_and_not_the_calls():
    kernels = [
        event("gemm_kernel", 30, 34, 20, linked_correlation_id=3),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 33, 36, 21, linked_correlation_id=5),
        event("gemm_kernel", 34, 35, 22, linked_correlation_id=9),
        event("nccl:all_reduce", 33, 36, 23, linked_correlation_id=5, is_user_annotation=True),
    ]
    assert pieces(STEP + kernels) == [("forward", 28, 32), ("all_reduce", 31, 34), ("backward", 32, 33)]


def test_short_gaps_and_short_other_computations_are_no_waits():
    found = [("forward", 0, 1), ("other", 1.1, 1.2), ("forward", 1.25, 3), ("forward", 3.5, 4), ("other", 5, 6)]
    assert merged(found) == [("forward", 0, 3), ("forward", 3.5, 4), ("other", 5, 6)]


def test_the_share_of_computing_is_the_mean_of_the_ranks():
    assert computing_share([[("forward", 0, 6), ("send", 6, 10)], [("receive", 0, 8), ("forward", 8, 10)]]) == 0.4
    assert computing_share([[], []]) == 0


def test_a_real_step_has_its_parts_in_order():
    import torch

    model, timeline = torch.nn.Linear(400, 400), Timeline()
    optimizer = torch.optim.AdamW(model.parameters())
    for number in range(2):
        if number:
            timeline.start()
        model(torch.ones(2000, 400)).square().sum().backward()
        optimizer.step()
    timeline.stop()
    kinds = list(dict.fromkeys(kind for kind, start, end in timeline.pieces if end - start > 0.1))
    assert [kind for kind in kinds if kind != "other"] == ["forward", "backward", "optimizer"]


def test_the_picture_has_a_row_for_each_rank_and_strategy(tmp_path):
    one, two = [("forward", 0.0, 4.0), ("send", 4.0, 5.0)], [("receive", 0.0, 5.0), ("all_reduce", 5.0, 6.0)]
    draw_timelines(tmp_path / "one.png", {"one": [one]}, {"one": 0.8}, "title")
    draw_timelines(tmp_path / "both.png", {"one": [one], "two": [one, two]}, {"one": 0.8, "two": 0.4}, "title")
    with Image.open(tmp_path / "one.png") as small, Image.open(tmp_path / "both.png") as large:
        assert large.height > small.height
        assert len(large.convert("RGB").getcolors(1 << 20)) > 20, "the picture is empty"
