"""The program about formats of numbers: its rounding is that of the formats, and its table shows what each one loses."""

import json
import runpy
import sys

import pytest
import torch

import runs

PROGRAM = runs.ROOT / "06_build_your_own" / "numerics.py"


@pytest.fixture(scope="module")
def numerics():
    return runpy.run_path(str(PROGRAM))


@pytest.mark.parametrize(
    ("dtype", "most", "bits"),
    [(torch.bfloat16, 3.39e38, 7), (torch.float8_e4m3fn, 448, 3), (torch.float8_e5m2, 57344, 2)],
)
def test_values_are_rounded_to_the_format(numerics, dtype, most, bits):
    x = torch.logspace(-1.5, 2, 1000)  # all formats have these values with their whole precision
    found = numerics["rounded"](x, dtype, False)
    assert torch.equal(found, x.to(dtype).float())
    assert ((found - x).abs() / x).max() <= 2.0 ** -(bits + 1)
    assert numerics["rounded"](torch.tensor([3.4e38]), dtype, False).item() == pytest.approx(most, rel=0.01)
    if dtype.itemsize == 1:
        small = x[-200:] * 1e-9  # too small for the format without a scale
        assert torch.count_nonzero(numerics["rounded"](small, dtype, False)) == 0
        scaled = numerics["rounded"](small, dtype, True)
        assert ((scaled - small).abs() / small).max() <= 2.0 ** -(bits + 1) * 1.01


def test_the_product_is_exact_without_a_format(numerics):
    x, weight = (
        torch.randn(5, 3, 4, dtype=torch.float64, requires_grad=True),
        torch.randn(6, 4, dtype=torch.float64, requires_grad=True),
    )
    numerics["Product"].apply(x, weight, None, None, False).square().sum().backward()
    found = x.grad, weight.grad
    x.grad = weight.grad = None
    torch.nn.functional.linear(x, weight).square().sum().backward()
    assert torch.allclose(found[0], x.grad)
    assert torch.allclose(found[1], weight.grad)


def test_the_table_shows_what_each_format_loses(tmp_path):
    done = runs.run([sys.executable, "-P", PROGRAM, "--steps", "25", "--batch-size", "2", "--folder", "run"], tmp_path)
    assert done.returncode == 0, done.stderr
    rows = {each["name"]: each for each in json.loads((tmp_path / "run" / "numerics.json").read_text())["rows"]}
    exact = rows["float32"]
    assert exact["gradients_lost"] == 0
    assert exact["updates_lost"] < 1e-4
    assert rows["bfloat16 everywhere"]["updates_lost"] > 0.2
    assert rows["bfloat16 products, float32 parameters"]["updates_lost"] < 0.001
    assert rows["float8 products, not scaled"]["gradients_lost"] > 0.5
    assert rows["float8 products, each tensor scaled"]["gradients_lost"] < 0.01
    assert abs(rows["float8 products, each tensor scaled"]["loss"] - exact["loss"]) < 0.05
