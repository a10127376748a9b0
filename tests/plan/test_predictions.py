"""Times, bytes and failures, computed by hand."""

import math
import random
from dataclasses import replace

import pytest
from torch._subclasses.fake_tensor import UnsupportedOperatorException

from workshop.plan.cards import find_card
from workshop.plan.failures import RATE, daly, expected, goodput
from workshop.plan.layout import Layout
from workshop.plan.memory import predict_bytes, states
from workshop.plan.sizes import Model, find_model
from workshop.plan.time import Constants, Machine, layer_times, predict
from workshop.training.memory import estimate
from workshop.training.transformer import Sizes

H100 = find_card("h100")
PLAIN = Constants(matmul=1, attention=1, traffic=1, link=1, network=1, latency=1, overlap=1, step=0)
LLAMA = find_model("llama-3-8b")


def test_a_product_takes_its_operations_and_its_bytes():
    seconds = Machine(H100, PLAIN).product(8192, 4096, 1024)
    operations, moved = 2 * 8192 * 4096 * 1024, 2 * (8192 * 4096 + 4096 * 1024 + 8192 * 1024)
    assert seconds == pytest.approx(operations / (989e12 * 0.801) + moved / 3.35e12)


def test_a_ring_uses_the_link_in_a_node_and_one_adapter_for_each_rank_between_nodes():
    machine = Machine(H100, PLAIN)
    hop = H100.latency
    assert machine.ring(8e9, 8, 8) == pytest.approx(8e9 * 7 / 8 / 450e9 + 7 * 0.2 * hop)
    assert machine.ring(8e9, 16, 8) == pytest.approx(8e9 * 15 / 16 / (8 * 50e9) + (1 + 14 * 0.2) * hop)
    assert machine.ring(8e9, 16, 1) == pytest.approx(8e9 * 15 / 16 / 50e9 + 15 * hop)
    assert machine.ring(8e9, 1, 1) == 0


def test_computation_hides_an_exchange_only_while_it_lasts():
    machine = Machine(H100, replace(PLAIN, overlap=0.9))
    assert machine.hidden(1, 10) == pytest.approx(0.1)
    assert machine.hidden(10, 1) == pytest.approx(9.1)


@pytest.mark.parametrize(
    ("schedule", "vpp", "share"), [("1f1b", 1, 3 / 8), ("interleaved", 2, 3 / 16), ("zero-bubble", 1, 1 / 8)]
)
def test_the_bubble_of_a_pipeline(schedule, vpp, share):
    """Of 4 stages and 8 micro-batches: (pp - 1) / m of the time of computation, less with more parts or zero bubble."""
    layout = Layout(pp=4, vpp=vpp, schedule=schedule, microbatches=8, zero=1, balanced=False)
    times = predict(find_model("llama-2-70b"), layout, H100, 4096, PLAIN)
    computing = times.matmul + times.attention + times.traffic + times.tp
    assert times.bubble == pytest.approx(share * computing, rel=1e-6)


def test_recomputation_adds_a_forward_pass_of_four():
    machine = Machine(H100, PLAIN)
    none, full = (layer_times(LLAMA, Layout(recompute=kind), machine, 4096) for kind in ("none", "full"))
    assert sum(full.matmul) == pytest.approx(4 / 3 * sum(none.matmul))
    assert sum(full.attention) == pytest.approx(4.5 / 3.5 * sum(none.attention))


def test_tensor_parallelism_exchanges_four_times_forward_and_four_times_backward():
    layer = layer_times(LLAMA, Layout(tp=8), Machine(H100, PLAIN), 8192)
    once = 2 * 8192 * 4096 * 7 / 8 / 450e9 + 7 * 0.2 * H100.latency
    assert layer.tp == pytest.approx((4 * once, 4 * once))


def test_small_micro_batches_and_small_matrices_are_slower():
    def rate(**layout):
        layout = Layout(**layout)
        times = predict(LLAMA, layout, H100, 2048)
        return layout.global_batch / times.step / layout.gpus

    assert rate(mbs=4, microbatches=1) > rate(mbs=1, microbatches=4)
    assert rate(mbs=4) > rate(mbs=4, tp=8)


def test_fsdp_stores_sixteen_bytes_a_parameter_divided_by_the_ranks():
    found = states(LLAMA, Layout(dp=8), LLAMA.layers, 2)
    assert found == pytest.approx([LLAMA.parameters * width / 8 for width in (4, 4, 8)])


@pytest.mark.parametrize(
    ("layout", "parameters", "optimizer", "peak"),
    [
        (Layout(dp=4, tp=4), 1_684_836_352, 3_369_673_868, 9_519_621_268),
        (Layout(dp=8), 3_369_273_344, 6_738_547_852, 24_697_924_756),
    ],
)
def test_the_states_are_those_that_workshop_simulate_counts(layout, parameters, optimizer, peak):
    """``workshop simulate codellama-7b --ranks 16 --mesh fsdp=4,tp=4``, and ``--ranks 8 --mesh fsdp=8``, with 2,048 tokens."""
    model = find_model("codellama-7b")
    found = states(model, layout, model.layers, 2)
    assert found == pytest.approx((parameters, parameters, optimizer), rel=1e-3)
    eager = replace(layout, kernels="eager", fused_loss=False)
    assert predict_bytes(model, eager, 2048).peak == pytest.approx(peak, rel=0.06)


def test_zero_1_stores_the_optimizer_state_once():
    found = states(LLAMA, Layout(dp=8, zero=1, gradient_bytes=4), LLAMA.layers, 2)
    assert found == pytest.approx([LLAMA.parameters * width for width in (2, 4, 12 / 8)])


def test_tensor_parallelism_and_a_pipeline_divide_the_states():
    model = find_model("llama-2-70b")
    quarter = states(model, Layout(dp=2, tp=4, pp=2, zero=1), 40, 1)
    whole = states(model, Layout(dp=2, zero=1), 80, 2)
    assert [small * 8 / large for small, large in zip(quarter, whole, strict=True)] == pytest.approx([1] * 3, rel=1e-3)


def test_a_pipeline_keeps_as_many_micro_batches_as_stages():
    few, many = (
        predict_bytes(find_model("llama-2-70b"), Layout(pp=4, tp=8, microbatches=count, zero=1), 4096)
        for count in (1, 16)
    )
    assert many.activations == pytest.approx(4 * few.activations)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_plan_agrees_with_workshop_memory(recompute):
    """Both count FSDP of a PyTorch program: the states are equal, and the peaks differ by at most a tenth."""
    layout = Layout(dp=8, recompute=recompute, kernels="eager", fused_loss=False)
    found = predict_bytes(LLAMA, layout, 4096)
    known = estimate(
        LLAMA, "fsdp", 8, batch_size=1, sequence_length=4096, checkpointing=recompute == "full", on_gpu=True
    )
    for part in ("parameters", "gradients", "optimizer"):
        assert getattr(found, part) == pytest.approx(getattr(known, part), rel=1e-6)
    assert found.peak == pytest.approx(known.peak, rel=0.1)


@pytest.mark.full
@pytest.mark.parametrize(
    ("layers", "vocabulary", "ranks", "sequences", "tokens", "checkpointing"),
    [
        (3, 32000, 4, 8, 256, False),
        (6, 1024, 8, 4, 256, False),
        (12, 1024, 16, 1, 128, True),
        (8, 4096, 8, 4, 512, False),
    ],
)
def test_the_peak_of_fsdp_is_that_of_a_simulated_step(layers, vocabulary, ranks, sequences, tokens, checkpointing):
    from simulated import peak_of_a_step

    shape = (layers, 768, 2048, 6, 6, 128, vocabulary)
    layout = Layout(dp=ranks, mbs=sequences, kernels="eager", fused_loss=False)
    layout = replace(layout, recompute="full" if checkpointing else "none")
    try:
        found = peak_of_a_step(
            Sizes(*shape), "fsdp", ranks, sequences, tokens, checkpointing=checkpointing, foreach=True
        )
    except UnsupportedOperatorException as error:
        pytest.skip(f"this version of torch cannot simulate {error}")
    predicted = predict_bytes(Model(*shape), layout, tokens).peak
    print(f"predicted {predicted / found - 1:+.1%}")
    assert predicted == pytest.approx(found, rel=0.12)


def test_interruptions_are_those_of_llama_3():
    found = expected(16384, 54 * 24)
    assert found.interruptions == pytest.approx(466)
    between = 3600 / (RATE * 16384)
    assert found.interval == pytest.approx((2 * 60 * between) ** 0.5)  # Young
    assert found.hours < expected(16384, 54 * 24, interval=4 * found.interval).hours
    assert found.hours < expected(16384, 54 * 24, interval=found.interval / 4).hours
    assert expected(8, 24, rate=0).hours < 0.05


@pytest.mark.parametrize(("between", "best"), [(24 * 60, 117), (6 * 60, 57), (15, 9.1)])
def test_the_best_interval_is_that_of_dalys_paper(between, best):
    """The captions of figures 3, 4 and 5 have these values in minutes, for a checkpoint of 5 minutes."""
    assert daly(5, between) == pytest.approx(best, rel=0.01)
    ways = {interval: goodput(interval, checkpoint=5, restart=10, between=between) for interval in range(1, 200)}
    assert max(ways, key=ways.__getitem__) == pytest.approx(best, abs=2)


def test_the_goodput_for_rare_interruptions_is_that_to_first_order():
    found = expected(16384, 54 * 24, checkpoint=5)
    between = 3600 / (RATE * 16384)
    exact = goodput(found.interval, checkpoint=5, restart=600, between=between)
    assert exact == pytest.approx(found.goodput(54 * 24), abs=0.01)
    assert exact > 0.9  # Meta reports an effective training time of more than 90 %


def test_the_goodput_agrees_with_simulated_interruptions():
    interval, checkpoint, restart, between = 60.0, 5.0, 20.0, 200.0
    random_numbers, work, now = random.Random(0), 200_000.0, 0.0
    done, failure = 0.0, random_numbers.expovariate(1 / between)
    while done < work:
        if now + interval + checkpoint <= failure:
            now, done = now + interval + checkpoint, done + interval
            continue
        now = failure
        failure = now + random_numbers.expovariate(1 / between)
        while now + restart > failure:  # interrupted again while it restarts
            now, failure = failure, failure + random_numbers.expovariate(1 / between)
        now += restart
    found = goodput(interval, checkpoint=checkpoint, restart=restart, between=between)
    assert found == pytest.approx(done / now, rel=0.02)


def test_the_goodput_of_extreme_cases():
    assert goodput(60, checkpoint=0, restart=0, between=1e12) == pytest.approx(1)
    assert goodput(1e6, checkpoint=60, restart=600, between=100) == 0
    assert goodput(60, checkpoint=20, restart=600, between=math.inf) == 0.75
    assert daly(500, 100) == 100
