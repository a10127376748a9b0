"""Elastic training: nodes leave and join, and no sample of an epoch is lost or trained on twice."""

import json

import pytest

import elastic_events
from elastic_events import BATCH, RATE, SAMPLES
from workshop.repository import ROOT


def lines_of(start, first, steps, ranks):
    """Return what the ranks of one start record: the right samples of these steps of epoch 0."""
    found = []
    for step in steps:
        batch = list(range(step * BATCH, min(SAMPLES, (step + 1) * BATCH)))
        for rank in range(ranks):
            facts = {"start": start, "from": [0, first], "rank": rank, "ranks": ranks, "epoch": 0, "step": step}
            found.append(facts | {"samples": batch[rank::ranks], "rate": RATE})
            found.append(facts | {"loss": 1.0 / ranks})
    return found


STEPS = -(-SAMPLES // BATCH)


def test_steps_after_the_checkpoint_count_only_in_the_next_start():
    found = elastic_events.judge([*lines_of(1, 0, range(7), 2), *lines_of(2, 4, range(4, STEPS), 3)], 1)
    assert (found["samples_lost"], found["samples_twice"], found["steps_repeated"]) == (0, 0, 3)
    assert found["global_batches"] == [BATCH]
    assert found["learning_rates"] == [RATE]
    assert len(found["losses"]) == STEPS


def test_a_step_that_no_start_has_counted_is_found():
    found = elastic_events.judge([*lines_of(1, 0, range(4), 2), *lines_of(2, 4, range(5, STEPS), 3)], 1)
    assert found["samples_lost"] == BATCH


def test_a_rank_that_takes_samples_of_another_is_found():
    lines = lines_of(1, 0, range(STEPS), 2)
    lines[2]["samples"] = lines[0]["samples"]  # rank 1 repeats those of rank 0 in step 0
    found = elastic_events.judge(lines, 1)
    assert (found["samples_lost"], found["samples_twice"]) == (BATCH // 2, BATCH // 2)


def right(result: dict) -> bool:
    """Whether a run with events ended like an undisturbed one."""
    return (
        not result.get("problem")
        and 0 in result["statuses"]
        and result["samples_lost"] == result["samples_twice"] == 0
        and result["global_batches"] == [BATCH]
        and result["learning_rates"] == [RATE]
        and max(result["loss_difference"], result["parameter_difference"]) < 1e-10
    )


def test_the_committed_result_has_twenty_events_and_all_are_right():
    result = json.loads((ROOT / "results" / "elastic-2-cores.json").read_text())
    events = [event for run in result["runs"] for event in run["events"]]
    assert len(events) >= 20
    assert {event["event"] for event in events} >= {
        "joins",
        "leaves: SIGKILL",
        "leaves: SIGTERM",
        "leaves: the whole node",
    }
    assert all(map(right, result["runs"]))
    assert result["machine"]["torch"]


@pytest.mark.full
def test_a_node_joins(tmp_path):
    epochs = 8  # the training must last longer than the start of the second node
    expected = elastic_events.fixed(tmp_path / "fixed", epochs)
    group = elastic_events.Group(tmp_path, epochs, seed=1)
    try:
        group.join()
        group.trains_with(1, 0)
        group.join()
        group._until(group.ended, "the nodes do not end", 300)
        found = elastic_events.judge(group.lines(), epochs)
    finally:
        group.close()
    assert found["ranks"] == [1, 2], group.said()
    assert (found["samples_lost"], found["samples_twice"]) == (0, 0)
    losses = found["losses"]
    assert losses == pytest.approx({at: expected[at] for at in losses}, abs=1e-10)
    assert elastic_events.difference(tmp_path / "run.pt", tmp_path / "fixed" / "run.pt") < 1e-10


@pytest.mark.full
def test_nodes_leave_and_join_at_random_moments(tmp_path):
    result = elastic_events.measure(events=6, epochs=8, seed=3, place=tmp_path)
    assert sum(len(run["events"]) for run in result["runs"]) >= 6
    assert all(map(right, result["runs"])), json.dumps(result, indent=1)
