"""``workshop plan``: models, cards and layouts, and what they refuse."""

import json

import pytest

from workshop.errors import UserError
from workshop.plan.cards import find_card, known_cards, networks
from workshop.plan.layout import Layout, misfit, parse_layout
from workshop.plan.sizes import find_model, part

CODELLAMA = find_model("codellama-7b")


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-3-8b", 8.03),
        ("llama-3-70b", 70.6),
        ("llama-3-405b", 405.9),
        ("mixtral-8x7b", 46.7),
        ("gpt-3-175b", 175.2),
    ],
)
def test_known_models_have_their_published_number_of_parameters(name, billions):
    assert find_model(name).parameters / 1e9 == pytest.approx(billions, rel=0.005)


def test_a_token_is_multiplied_with_the_active_experts_only():
    assert find_model("mixtral-8x7b").active_parameters / 1e9 == pytest.approx(12.7, rel=0.01)


def test_a_configuration_of_hugging_face_is_read(tmp_path):
    content = {"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 11008,
               "num_attention_heads": 32, "vocab_size": 32016, "max_position_embeddings": 16384}  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(content))
    assert find_model(str(path)) == find_model(str(tmp_path)) == CODELLAMA
    for changed in ({"model_type": "bert"}, {"hidden_size": "x"}, {"num_hidden_layers": 0}, {"num_attention_heads": 0}):
        path.write_text(json.dumps(content | changed))
        with pytest.raises(UserError, match=r"config.json"):
            find_model(str(path))


def test_the_parts_of_all_ranks_are_the_model():
    """Norms are on every rank of tensor parallelism; everything else exists once."""
    for model in (CODELLAMA, find_model("llama-3-70b")):
        norms = 2 * model.hidden
        whole = 8 * (part(model, 8).layer_parameters - norms) + norms
        assert whole == model.layer_parameters


def test_cards_have_all_values_and_a_source():
    assert len(known_cards()) == 12
    for name in known_cards():
        card = find_card(name)
        assert card.source
        assert card.bf16 > 1e14
        assert 0.4 < card.matmul < 0.9
        assert card.rate == networks()[card.network]["rate"]
        assert card.memory_bandwidth > 1e12


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: find_card("h1"), "there is no card h1; choose from a100-40"),
        (lambda: find_card("h100", "token-ring"), "there is no network token-ring; choose from ndr400"),
        (
            lambda: find_model("gpt-17"),
            "there is no model gpt-17: name a folder or a config.json, or one of: tinyllama",
        ),
        (lambda: parse_layout("tp"), "--layout tp: write NAME=VALUE with one of dp, zero"),
        (lambda: parse_layout("tp=x"), "--layout tp=x: tp is a whole number of at least 1"),
        (lambda: parse_layout("sp=3"), "--layout sp=3: write yes or no"),
    ],
)
def test_unknown_names_are_one_line_with_the_known_ones(call, words):
    with pytest.raises(UserError) as error:
        call()
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(tp=3), "tp=3 does not divide 32 heads and 32 key-value heads; 1, 2, 4, 8, 16 or 32 would"),
        (Layout(pp=40), "is more than 32 layers; at most 32 parts would fit"),
        (Layout(pp=8, vpp=3, microbatches=8), "vpp=3 does not divide 32 layers over pp=8; vpp=1, 2 or 4 would"),
        (Layout(pp=4, vpp=2, microbatches=6), "needs micro-batches in groups of pp=4, not 6"),
        (Layout(cp=3), "cp=3 and tp=1 do not divide 4,096 tokens"),
        (Layout(ep=2, dp=2), "ep=2 does not divide 1 experts"),
        (Layout(dp=8, replicas=3), "replicas=3 needs zero=3 and must divide dp=8"),
        (Layout(schedule="gpipe"), "schedule is one of"),
        (Layout(recompute="all"), "recompute is one of"),
        (Layout(fp8="yes"), "fp8 is tensorwise or rowwise"),
        (Layout(attention="fast"), "attention is one of"),
    ],
)
def test_a_layout_that_the_model_does_not_allow_says_what_would_fit(layout, words):
    assert not misfit(Layout(dp=2, tp=4, pp=4), CODELLAMA, 4096)
    assert words in misfit(layout, CODELLAMA, 4096)


def test_a_balanced_pipeline_gives_the_last_stage_fewer_layers():
    """Llama 3 405B: 126 layers, embedding and head, over 16 stages."""
    assert Layout(pp=16, balanced=True).stage_layers(126, head=2) == 8
    assert Layout(pp=16, balanced=False).stage_layers(126) == 8
    assert Layout(pp=4, balanced=False).stage_layers(32) == 8
    assert Layout(pp=2, balanced=True).stage_layers(16, head=4) == 10
