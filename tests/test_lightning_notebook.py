"""Notebook 03 as it is delivered: in a file of its own, so that it runs beside the rest of its stage."""

from test_notebooks import copy, judge_03, run_as_delivered  # noqa: F401 - a fixture


def test_the_notebook_as_delivered(copy):  # noqa: F811
    run_as_delivered("03_pytorch_lightning", judge_03, copy)
