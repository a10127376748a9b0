"""The errors of predictions of published runs: those in results/, and those with the constants as they are."""

import json
import statistics

import pytest

from workshop.plan import validate
from workshop.plan.fit import EXPECTED, fit, relative_error, thinned
from workshop.plan.published import GIVEN, ROWS, read_runs
from workshop.plan.time import fitted

RUNS = read_runs()


def test_the_errors_in_results_are_small_enough():
    found = json.loads(validate.RESULT.read_text())["summary"]
    given, dense = found["given"], found["dense"]
    assert given["runs"] == GIVEN
    assert given["median"] <= 0.08
    assert given["largest"] <= 0.25
    assert given["memory_median"] <= 0.08
    right, total = map(int, given["pairs"].split(" of "))
    assert right / total >= 0.85
    assert dense["median"] <= 0.1
    assert dense["nine_of_ten"] <= 0.25


def test_the_constants_are_those_of_the_results():
    errors = [abs(relative_error(run, fitted())) for run in RUNS if run.model.experts == 1]
    found = json.loads(validate.RESULT.read_text())
    held_out = [abs(row["error"]) for row in found["rows"] if row["experts"] == 1]
    assert len(errors) == len(held_out)
    assert statistics.median(errors) <= statistics.median(held_out) + 0.01
    for name, (expected, _) in EXPECTED.items():
        assert 0.3 < getattr(fitted(), name) / expected < 3, name


def test_long_contexts_and_16384_gpus_are_within_a_third():
    """With the project held out: context parallelism at 131,072 tokens and more, and the runs of Llama 3."""
    rows = json.loads(validate.RESULT.read_text())["rows"]
    rows = [row for row in rows if ("cp" in row["mesh"] and row["sequence_length"] >= 131072) or row["gpus"] >= 16384]
    assert len(rows) >= 6
    assert statistics.median(abs(row["error"]) for row in rows) <= 0.12
    assert max(abs(row["error"]) for row in rows) <= 0.3


def test_tokens_follow_from_what_a_source_states():
    by_source = {run.source: run for run in RUNS}
    korthikanti = next(run for name, run in by_source.items() if name.startswith("Korthikanti"))
    assert korthikanti.tokens == pytest.approx(
        korthikanti.layout.global_batch * 2048 / korthikanti.layout.gpus / 71.49, rel=0.01
    )
    megatron = RUNS[0]  # 408.8 TFLOP/s, counted as 6 N + 12 L h s
    assert megatron.tokens * megatron.model.flops_per_token(4096) == pytest.approx(408.8e12)


def test_a_fit_to_few_runs_stays_near_the_expected_values():
    found = fit(RUNS[:5])
    for name, (expected, width) in EXPECTED.items():
        assert abs(getattr(found, name) / expected - 1) < 4 * width, name


def test_no_project_counts_more_than_its_share():
    chosen = thinned([run for run in RUNS if run.model.experts == 1])
    projects = {run.group for run in chosen}
    assert max(sum(run.group == name for run in chosen) for name in projects) <= 24


def test_pairs_count_only_different_layouts_of_the_same_training():
    row = {
        "source": "a",
        "model": "m",
        "gpus": 8,
        "card": "c",
        "sequence_length": 1,
        "mesh": "tp 8",
        "micro_batch": "1 x 1",
    }
    row |= {"recompute": "none", "fp8": "", "layout": "", "published": 100, "predicted": 100}
    other = row | {"mesh": "tp 4", "published": 120, "predicted": 130}
    assert validate.pairs([row, other]) == (1, 1)
    assert validate.pairs([row, other | {"predicted": 90}]) == (0, 1)
    assert validate.pairs([row, other | {"gpus": 16}]) == (0, 0)
    assert validate.pairs([row, row | {"published": 120}]) == (0, 0)
    assert validate.pairs([row, other | {"published": 101}]) == (0, 0)


def test_rows_of_another_file_are_predicted(tmp_path, capsys):
    from workshop.plan.cli import run_validate

    path = tmp_path / "rows.csv"
    path.write_text("".join(ROWS.read_text().splitlines(keepends=True)[:12]))
    run_validate(str(tmp_path / "out"), str(path))
    assert "11 | " in capsys.readouterr().out
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "plan-validation.json", "plan-validation.md", "plan-validation.png",
    }  # fmt: skip
