"""``workshop plan`` and ``workshop submit --plan``: answers for each site, speed, and wrong input in one line."""

import json
import time

import pytest
from click.testing import CliRunner

from workshop.cli import app
from workshop.errors import UserError
from workshop.plan.cards import find_card
from workshop.plan.cli import parse_tokens
from workshop.plan.search import Request, search
from workshop.plan.sizes import find_model
from workshop.slurm.sites import find_site, known_sites

WITH_CARD = [name for name in known_sites() if find_site(name).card]


def plan(*arguments):
    done = CliRunner().invoke(app, ["plan", *map(str, arguments)])
    if done.exception and not isinstance(done.exception, UserError | SystemExit):
        raise done.exception
    return done


def test_sites_without_a_card_are_those_whose_gpus_are_too_old_or_pretended():
    assert [name for name in known_sites() if name not in WITH_CARD] == ["local", "puhti"]


@pytest.mark.parametrize("name", WITH_CARD)
def test_each_site_has_an_answer_with_its_error(name):
    done = plan("codellama-7b", "--site", name, "--tokens", "100B")
    assert done.exit_code == 0, done.output
    assert "tokens/s per GPU" in done.output
    assert "days" in done.output
    assert "Error on " in done.output
    assert "published runs" in done.output


def test_lumi_answers_for_the_example_of_the_issue(tmp_path):
    done = plan("codellama-34b", "--site", "lumi", "--gpus", 256, "--output", tmp_path / "plan.json")
    assert done.exit_code == 0
    assert "MI250X" in done.output
    found = json.loads((tmp_path / "plan.json").read_text())
    assert (found["nodes"], found["gpus_per_node"], found["site"]) == (32, 8, "lumi")
    layout = found["layout"]
    assert layout["dp"] * layout["tp"] * layout["pp"] * layout["cp"] == 256
    assert found["memory"] < 64e9
    assert found["error"]["median"] < 0.15


@pytest.mark.parametrize(
    ("model", "gpus", "batch", "tokens"),
    [("llama-3-70b", 1024, 1024, 8192), ("llama-3-405b", 16384, 2048, 8192), ("mixtral-8x7b", 1024, 1024, 8192)],
)
def test_a_search_takes_seconds(model, gpus, batch, tokens):
    begin = time.perf_counter()
    plans = search(Request(find_model(model), find_card("h100"), gpus, tokens, batch))
    print(f"{model} on {gpus:,} GPUs: {time.perf_counter() - begin:.2f} s, best {plans[0].layout.mesh()}")
    assert time.perf_counter() - begin < 60  # 10 on an idle machine
    assert all(each.fits and each.layout.gpus == gpus and each.layout.global_batch == batch for each in plans)
    assert plans == sorted(plans, key=lambda each: -each.tokens)


def test_fixed_parts_of_the_layout_stay():
    request = Request(find_model("llama-3-70b"), find_card("h100"), 64, 8192, 64, (("tp", 8), ("pp", 4), ("zero", 1)))
    for each in search(request):
        assert (each.layout.tp, each.layout.pp, each.layout.zero, each.layout.dp) == (8, 4, 1, 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "name a model, such as llama-3-8b"),
        (["gpt-17", "--gpu", "h100"], "there is no model gpt-17"),
        (["llama-3-8b"], "name either a site (--site lumi) or a GPU (--gpu h100)"),
        (["llama-3-8b", "--gpu", "h100", "--site", "lumi"], "name either a site"),
        (["llama-3-8b", "--gpu", "h1"], "there is no card h1; choose from a100-40"),
        (["llama-3-8b", "--site", "moon"], "there is no site 'moon'"),
        (["codellama-34b", "--site", "puhti"], "the profile of puhti names no card"),
        (["codellama-34b", "--site", "adroit", "--gpus", "64"], "a job at adroit can have at most 4 GPUs, not 64"),
        (["llama-3-405b", "--gpu", "h100", "--gpus", "8"], "128 GPUs would do"),
        (
            ["llama-3-8b", "--gpu", "h100", "--gpus", "8", "--layout", "tp=3"],
            "the mesh has 3 GPUs, which does not divide 8",
        ),
        (["llama-3-8b", "--gpu", "h100", "--gpus", "6", "--layout", "tp=3"], "tp=3 does not divide 32 heads"),
        (
            ["llama-3-8b", "--gpu", "h100", "--gpus", "8", "--layout", "dp=2,tp=2,pp=1,cp=1"],
            "the mesh has 4 GPUs, not 8",
        ),
        (["llama-3-8b", "--gpu", "h100", "--gpus", "8", "--layout", "tp=2,x=1"], "--layout x=1: write NAME=VALUE"),
        (["llama-3-8b", "--gpu", "h100", "--sequence-length", "200000"], "takes sequences of up to 131,072 tokens"),
        (["llama-3-8b", "--gpu", "h100", "--gpus", "1000", "--global-batch", "7"], "no mesh of 1,000 GPUs divides"),
        (["llama-3-8b", "--gpu", "h100", "--tokens", "many"], "--tokens many: write a number such as 300B"),
        (["llama-3-8b", "--gpu", "mi250x", "--fp8"], "has no float8; leave out --fp8"),
        (["--validate", "--rows", "nowhere.csv"], "nowhere.csv: No such file"),
    ],
)
def test_wrong_input_is_one_line_that_says_what_would_fit(arguments, words):
    done = plan(*arguments)
    assert isinstance(done.exception, UserError)
    assert words in str(done.exception)
    assert "\n" not in str(done.exception)


@pytest.mark.parametrize(
    ("text", "number"), [("", 0), ("1T", 1e12), ("300B", 3e11), ("15e12", 15e12), ("1.5t", 1.5e12)]
)
def test_numbers_of_tokens(text, number):
    assert parse_tokens(text) == number


def test_a_plan_gives_a_job_its_shape(tmp_path):
    path = tmp_path / "plan.json"
    plan("codellama-34b", "--site", "lumi", "--gpus", 64, "--output", path)
    command = ["submit", "slurm-multinode/launch_scale_2N4G.sh", "--account", "x", "--dry-run", "--plan", str(path)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert "mesh of the plan: " in done.output
    assert "--nodes=8" in done.output
    assert "--gpus-per-node=8" in done.output
    done = CliRunner().invoke(app, [*command, "--nodes", "2"])
    assert "--plan gives nodes and GPUs per node" in str(done.exception)
    path.write_text("{}")
    assert "is not a file of workshop plan --output" in str(CliRunner().invoke(app, command).exception)


def test_this_machine_needs_its_card_first(monkeypatch, tmp_path):
    from workshop.plan import cards, here

    monkeypatch.setattr(cards, "HERE", tmp_path / "card.toml")
    monkeypatch.setattr(here, "HERE", tmp_path / "card.toml")
    assert "run workshop bench --card first" in str(plan("llama-3-8b", "--gpu", "here").exception)
    assert here.compare_here() == []


def test_this_machine_is_measured_as_a_card(monkeypatch, tmp_path, capsys):
    import torch

    from workshop.measure import card as measuring
    from workshop.plan.cards import read_card

    monkeypatch.setattr(measuring, "ROUNDS", 1)
    monkeypatch.setattr(measuring, "link", lambda processes: (1e9, 1e-4))
    monkeypatch.setattr(measuring, "rates", lambda device, sizes: {(8, 8, 8): 1e11})
    monkeypatch.setattr(measuring, "local_device", lambda: torch.device("cpu"))
    assert measuring.run_card("2", str(tmp_path / "card.toml")) == 0
    card = read_card(tmp_path / "card.toml")
    assert (card.bf16, card.link, card.gpus_per_node) == (1e11, 5e8, 2)
