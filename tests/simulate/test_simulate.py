"""``workshop simulate``: bytes against arithmetic and the prediction, collectives, the command, and wrong options."""

import json
import sys
from dataclasses import replace

import pytest
from torch.distributed.tensor import _redistribute
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

import runs
from workshop.errors import UserError
from workshop.plan.layout import Layout as Planned
from workshop.plan.memory import states
from workshop.plan.sizes import FAMILIES, Model
from workshop.repository import ROOT
from workshop.simulate.layout import check_model, read_layout
from workshop.simulate.step import Settings, simulate
from workshop.simulate.summary import summary
from workshop.simulate.world import world
from workshop.training.memory import estimate
from workshop.training.transformer import MODELS

TINY = Model(layers=4, hidden=256, intermediate=512, heads=8, kv_heads=8, head=32, vocabulary=1024, context=4096)
EXPERTS = replace(TINY, experts=8, active=2, family="mixtral")
STATE = {"parameters": 4, "optimizer": 8}  # bytes per parameter


def step_of(mesh: str, sizes: Model = TINY, rank: int = 0, **settings):
    """Return the recorder of a step, and its summary."""
    ranks = 1
    for part in mesh.split(","):
        axis, _, size = part.partition("=")
        ranks *= 1 if axis == "ep" else int(size)
    layout, chosen = read_layout(mesh, ranks), Settings(**{"sequence_length": 128} | settings)
    check_model(layout, sizes, chosen.sequence_length, chosen.stages(layout), chosen.micro_batches, chosen.batch_size)
    # DTensor remembers the groups of the previous simulation in this process.
    _clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    with world(rank, ranks):
        recorder = simulate(sizes, layout, chosen)
        names = layout.group_names()
        return recorder, summary(recorder, lambda group: (names[group.group_name], group.size()))


def calls_of(found: dict) -> dict:
    """Return how often each collective of each group was called."""
    calls: dict = {}
    for row in found["collectives"]:
        key = row["group"], row["collective"]
        calls[key] = calls.get(key, 0) + row["times"]
    return calls


NORMS = 2 * TINY.layers * TINY.hidden + TINY.hidden
# The parameters that a rank keeps, and the collectives that it calls in a step.
MESHES = {
    "dp=2": (TINY.parameters, {("dp", "all_reduce"): 1, ("dp", "broadcast"): 1}),
    "fsdp=4": (TINY.parameters / 4, {("fsdp", "all_gather"): 9, ("fsdp", "reduce_scatter"): 5}),
    "dp=2,fsdp=2": (
        TINY.parameters / 2,
        {("fsdp", "all_gather"): 9, ("fsdp", "reduce_scatter"): 5, ("dp", "all_reduce"): 5},
    ),
    # Tensor parallelism divides everything except the norms.
    "tp=4": ((TINY.parameters - NORMS) / 4 + NORMS, {("tp", "all_gather"): 18, ("tp", "reduce_scatter"): 18}),
    "fsdp=2,tp=2": (
        ((TINY.parameters - NORMS) / 2 + NORMS) / 2,
        {("fsdp", "all_gather"): 9, ("tp", "all_gather"): 18, ("tp", "reduce_scatter"): 18},
    ),
    "dp=2,tp=2": ((TINY.parameters - NORMS) / 2 + NORMS, {("dp", "all_reduce"): 1}),
    "cp=2": (TINY.parameters, {("cp", "all_gather"): 8, ("cp", "all_to_all"): 8, ("cp", "all_reduce"): 1}),
    "fsdp=2,cp=2": (TINY.parameters / 4, {("cp", "all_to_all"): 8, ("fsdp+cp", "all_gather"): 9}),
}


@pytest.mark.parametrize("mesh", MESHES)
def test_bytes_and_collectives_are_those_of_the_strategy(mesh):
    parameters, collectives = MESHES[mesh]
    recorder, found = step_of(mesh)
    for kind, each in STATE.items():
        assert recorder.kept[kind] == pytest.approx(each * parameters, rel=0.001)
    # With tensor parallelism alone, PyTorch keeps the gradient of the whole embedding on each rank.
    whole = 4 * TINY.vocabulary * TINY.hidden * 3 / 4 if mesh == "tp=4" else 0
    assert recorder.gradients == recorder.kept["parameters"] + whole
    assert found["peak"]["bytes"] == sum(found["peak"]["of"].values()) == recorder.peak
    assert calls_of(found) == calls_of(found) | collectives
    for row in found["collectives"]:  # nothing is in a group of one rank
        assert row["ranks"] > 1


def test_the_operations_are_those_of_the_formula():
    """Nothing else is counted, also none of the operations on whole tensors with which DTensor finds shapes."""
    expected = TINY.flops_per_token(128) * 128
    for mesh, share in (("fsdp=4", 1), ("tp=4", 4)):
        recorder, _ = step_of(mesh)
        # PyTorch counts five products of the backward pass of flash attention, where MFU has four.
        assert sum(recorder.flops.values()) == pytest.approx(expected / share, rel=0.02)


def test_recomputing_takes_less_memory_and_more_operations():
    more = {"sequence_length": 512, "batch_size": 4}
    plain, _ = step_of("fsdp=4", **more)
    again, found = step_of("fsdp=4", recompute=True, **more)
    assert again.peak < 0.7 * plain.peak
    assert sum(again.flops.values()) > 1.2 * sum(plain.flops.values())
    assert any("recompute" in row for row in found["flops"])


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero-bubble"])
def test_each_rank_of_a_pipeline_keeps_its_stage(schedule):
    kept, peaks = 0, []
    for rank in range(2):
        recorder, found = step_of("pp=2", rank=rank, schedule=schedule, micro_batches=8)
        kept += recorder.kept["parameters"]
        peaks.append(found["most"]["activations"])
        assert calls_of(found)["pp", "send"] == (24 if schedule in ("interleaved", "zero-bubble") else 8)
    assert kept == 4 * TINY.parameters
    if schedule == "1f1b":  # the first rank keeps two micro-batches, the last one only one
        assert peaks[0] < step_of("pp=2", schedule="gpipe", micro_batches=8)[1]["most"]["activations"]


# With experts: the collectives of a step. The ranks of ep exchange the tokens of each layer twice in each pass.
EXPERT_MESHES = {
    "fsdp=4": {("fsdp", "all_gather"): 9, ("fsdp", "reduce_scatter"): 5},
    "fsdp=4,ep=2": {("ep", "all_to_all"): 16, ("fsdp", "all_gather"): 9, ("fsdp/ep", "reduce_scatter"): 4},
    "fsdp=4,ep=4": {("fsdp, ep", "all_to_all"): 16, ("fsdp, ep", "reduce_scatter"): 5},
    "fsdp=2,tp=2,ep=2": {("fsdp, ep", "all_to_all"): 16, ("tp", "reduce_scatter"): 18},
    "fsdp=16,ep=8": {("fsdp/ep", "reduce_scatter"): 4},  # fewer experts than shards
    "dp=2,fsdp=4,ep=2": {("ep", "all_to_all"): 16, ("dp", "all_reduce"): 9},
}


@pytest.mark.parametrize("mesh", EXPERT_MESHES)
def test_experts_are_shared_as_the_plan_says(mesh):
    recorder, found = step_of(mesh, EXPERTS)
    layout = read_layout(mesh, {"d": 8, "f": 16 if "16" in mesh else 4}[mesh[0]])
    planned = Planned(
        dp=layout.dp * layout.fsdp, replicas=layout.dp, tp=layout.tp, ep=layout.ep, zero=3, kernels="eager"
    )
    parameters, _, optimizer = states(EXPERTS, planned, EXPERTS.layers, roots=2)
    assert recorder.kept["parameters"] == pytest.approx(parameters, rel=0.001)
    assert recorder.kept["optimizer"] == pytest.approx(optimizer, rel=0.001)
    assert recorder.gradients == recorder.kept["parameters"]
    assert calls_of(found) == calls_of(found) | EXPERT_MESHES[mesh]
    expected = EXPERTS.flops_per_token(128) * 128 / layout.tp
    assert sum(recorder.flops.values()) == pytest.approx(expected, rel=0.02)
    # Each token goes to two experts, in bfloat16.
    exchanged = [row["bytes"] for row in found["collectives"] if row["collective"] == "all_to_all"]
    assert set(exchanged) <= {2 * 2 * 128 * EXPERTS.hidden}


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_of_models_keeps_its_parameters(family):
    """Qwen has biases or norms in the attention besides: less than 0.1 %."""
    sizes = replace(TINY, family=family, **({"experts": 4, "active": 2} if "mix" in family or "moe" in family else {}))
    recorder, _ = step_of("fsdp=2,tp=2", sizes)
    assert recorder.kept["parameters"] == pytest.approx(sizes.parameters, rel=0.002)


def test_all_axes_together():
    recorder, found = step_of("pp=2,fsdp=2,cp=2,tp=2", rank=15, micro_batches=2)
    assert {row["group"] for row in found["collectives"]} == {"pp", "fsdp+cp", "cp", "tp"}
    assert recorder.kept["parameters"] < 4 * TINY.parameters / 4


def test_bytes_are_those_that_workshop_memory_predicts():
    for strategy, mesh in (("fsdp", "fsdp=4"), ("ddp", "dp=4")):
        recorder, _ = step_of(mesh)
        predicted = estimate(TINY, strategy, 4, batch_size=1, sequence_length=128)
        assert recorder.kept["parameters"] == pytest.approx(predicted.parameters, rel=0.001)
        assert recorder.gradients == pytest.approx(predicted.gradients, rel=0.001)
        assert recorder.kept["optimizer"] == pytest.approx(predicted.optimizer, rel=0.001)


WRONG = {
    "fsdp=4,tp=4 --ranks 8": "4 x 4 is 16, not the 8 ranks of --ranks; fsdp=2 would",
    "xp=8 --ranks 8": "write sizes for pp, dp, fsdp, cp, tp, ep, such as fsdp=128,tp=8",
    "ep=8 --ranks 8": "ep=8 does not divide fsdp=1; the ranks of ep are a part of those of fsdp",
    "fsdp=8,ep=2 --ranks 8": "ep=2 does not divide the 1 experts of a layer; 1 would",
    "tp=64 --ranks 64": "tp=64 does not divide the 32 heads of the model; 16 or 32 would",
    "cp=8 --ranks 8 --sequence-length 100": "2 cp tp = 16 does not divide the 100 tokens",
    "pp=64 --ranks 64": "64 stages are more than the 32 layers",
    "pp=4 --ranks 4 --micro-batches 2": "pp=4 needs at least 4 micro-batches, not 2",
    "fsdp=8 --ranks 8 --rank 8": "--rank 8: the 8 ranks are 0 to 7",
    "fsdp=8 --ranks 8 --sequence-length 20000": "takes sequences of up to 16,384 tokens, not 20,000",
}


@pytest.mark.parametrize("options", WRONG)
def test_wrong_options_are_one_line(options, tmp_path, capsys):
    mesh, *others = options.split()
    status = command("codellama-7b", "--mesh", mesh, *others, "--output", tmp_path / "out")
    message = capsys.readouterr().err
    assert status == 2
    assert WRONG[options] in message
    assert message.count("\n") == 1
    assert not (tmp_path / "out").exists()


WRONG_EXPERTS = {
    "fsdp=16,ep=16 --ranks 16": "ep=16 does not divide the 8 experts of a layer; 4 or 8 would",
    "fsdp=24,ep=8 --ranks 24": "fsdp/ep = 3 does not divide the rows of the matrices of the experts; 32 or 64 would",
    "fsdp=4,cp=2,ep=2 --ranks 8": "ep and cp cannot be simulated together; use only one of them",
    "fsdp=8,ep=8 --ranks 8 --sequence-length 10": "1 x 10 tokens cannot be divided equally among 8 experts",
}


@pytest.mark.parametrize("options", WRONG_EXPERTS)
def test_experts_that_cannot_be_divided_are_one_line(options, tmp_path, capsys):
    mesh, *others = options.split()
    assert command("mixtral-8x7b", "--mesh", mesh, *others, "--output", tmp_path / "out") == 2
    message = capsys.readouterr().err
    assert WRONG_EXPERTS[options] in message
    assert message.count("\n") == 1


def test_a_model_without_a_gate_is_one_line(capsys):
    assert command("gpt-3-175b", "--ranks", "8") == 2
    assert "has no gate" in capsys.readouterr().err


def test_an_unknown_model_is_one_line(capsys):
    assert command("gpt-17", "--ranks", "8") == 2
    assert "there is no model gpt-17" in capsys.readouterr().err


def command(*words) -> int:
    """Run ``workshop simulate`` in this process, and return its exit status."""
    import click

    from workshop import cli

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cli, "leave", lambda status: None)
            cli.app.main(args=["simulate", *map(str, words)], prog_name="workshop", standalone_mode=False)
        return 0
    except (UserError, click.ClickException) as error:
        print(error, file=sys.stderr)
        return 2


def test_the_command_writes_the_timeline_and_the_data(tmp_path, capsys):
    sizes = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256,
             "num_attention_heads": 4, "vocab_size": 512, "max_position_embeddings": 256}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    folder = tmp_path / "out"
    assert (
        command(tmp_path / "config.json", "--ranks", 16, "--mesh", "fsdp=8,tp=2", "--rank", 5, "--output", folder) == 0
    )
    printed = capsys.readouterr().out
    assert "Rank 5 of 16, mesh: fsdp 8 x tp 2" in printed
    assert "layers.*.self_attn.q_proj" in printed
    data = json.loads((folder / "simulate.json").read_text())
    assert data["mesh"] == {"fsdp": 8, "tp": 2}
    assert len(data["timeline"]["operation"]) <= 300
    assert (folder / "simulate.png").stat().st_size > 20_000


@pytest.mark.full
def test_a_rank_of_70b_on_1024_takes_little_time_and_memory(tmp_path):
    """The bytes are exact to 0.1 %. The time is that of this machine, so the limit is generous."""
    done = runs.run(
        [sys.executable, "-P", "-m", "workshop", "simulate", "llama-3-70b", "--ranks", 1024, "--mesh", "fsdp=128,tp=8",
         "--sequence-length", 4096, "--output", tmp_path], ROOT, timeout=580,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    data = json.loads((tmp_path / "simulate.json").read_text())
    sizes = MODELS["llama-3-70b"]
    for kind, each in STATE.items():
        assert data["between_steps"][kind] == pytest.approx(each * sizes.parameters / 1024, rel=0.001)
    assert data["process"]["memory"] < 2e9
