"""Kill nodes of jobs on a practice cluster, and compare how the jobs end with runs that nobody has killed.

``PYTHONPATH=tests python -m node_kills`` kills one node of each of 12 jobs, six for each way of saving checkpoints, and writes
results/node-kills-2-cores.json. If you stop it and start it again, it continues.
"""

import json
import random
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

import kills
import runs
from workshop.course.trial import Trial
from workshop.run.machine import machine
from workshop.slurm.cluster import Cluster, up

REQUEUE = runs.ROOT / "solutions" / "slurm-multinode" / "exercise3_requeue.sh"
RESULT = runs.ROOT / "results" / "node-kills-2-cores.json"
# Two processes with one thread each, so that the results are equal bit for bit.
SHAPE = ["--nodes=2", "--gpus-per-node=1", "--cpus-per-task=1"]
STEPS = 33  # of three epochs, with global batches of 128 samples
OF_EPOCH = {"epochs": 11, "steps": 1}  # steps in the unit that a program counts


def job_script(way: kills.Way, place: Path) -> Path:
    """Write the job script that Slurm requeues, and let it start the program of this way."""
    before = 'multigpu_torchrun.py --checkpoint "$run.pt"'
    text = REQUEUE.read_text()
    assert before in text
    script = place / REQUEUE.name
    script.write_text(text if way.name == "epochs" else text.replace(before, f"{way.script.name} --save-every 3"))
    return script


def killed(cluster: Cluster, way: kills.Way, victim: int, seed: str, expected: dict, place: Path) -> dict:
    """Kill a node of a job at a random moment, and return a row of the table.

    Args:
        victim: 0: the node of the batch script; 1: the other one.
        seed: the seed of the moment.
        expected: the last checkpoint of a run that nobody has killed.
    """
    chance, begin = random.Random(seed), time.monotonic()
    trial = Trial(job_script(way, place), place, cluster, None)
    trial.limit = 900
    for file in way.script.parent.glob("*.py"):
        shutil.copy(file, trial.folder)
    arguments = ["--epochs", str(kills.EPOCHS), "--batch-size", "64", way.options[0], way.place]
    job = trial.submit(SHAPE, arguments)
    line = f"{'epoch' if way.name == 'epochs' else 'step'} "
    least = chance.randint(1, kills.EPOCHS - 1) if way.name == "epochs" else 3 * chance.randint(1, STEPS // 3 - 1)
    assert trial.follow(job, until=lambda job: f"\n{line}{least}" in job.output), job.output
    time.sleep(chance.uniform(0, 2))
    node = job.nodes[victim]
    cluster.fault("kill", node)
    writing = bool(way.writing(trial.folder))
    try:
        assert trial.follow(job, until=lambda job: job.restarts > 0, stall=90), job.output
        trial.start_again(job)
        trial.follow(job)
    finally:
        cluster.fault("heal", node)
    starts = re.findall(r"training on \w+ from \w+ (\d+)", job.output)
    row = {"way": way.name, "seed": seed, "node": ("the batch script's", "the other")[victim], "writing": writing}
    row |= {"after_step": least * OF_EPOCH[way.name], "resumed_from": (int(starts[-1]) - 1) * OF_EPOCH[way.name]}
    row |= {"state": job.state, "restarts": job.restarts}
    row["same"] = job.state == "COMPLETED" and kills.equal(way.content(trial.folder), expected)
    return row | {"seconds": round(time.monotonic() - begin, 1)}


def main() -> int:
    done = {row["kill"] for row in kills.read(RESULT)}
    kills.warm_up()
    place = Path(tempfile.mkdtemp(prefix="node-kills-"))
    expected = {way.name: kills.undisturbed(way, place, small=False) for way in kills.WAYS.values()}
    cluster = up(4, name="nodekills", mine=True)
    about = {"machine": machine() | {"slurm": cluster.version()}, "command": "PYTHONPATH=tests python -m node_kills"}
    try:
        for number in range(12):
            if number not in done:
                way = list(kills.WAYS.values())[number % 2]
                folder = place / str(number)
                folder.mkdir()
                row = killed(cluster, way, number // 2 % 2, f"node {number}", expected[way.name], folder)
                print(json.dumps(row), flush=True)
                kills.add({"kill": number, **row}, RESULT, about)
    finally:
        cluster.end()
    bad = [row for row in kills.read(RESULT) if not row["same"]]
    if not bad:
        shutil.rmtree(place)
    return len(bad) > 0


if __name__ == "__main__":
    sys.exit(main())
