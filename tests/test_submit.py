"""``workshop submit``: the exact command for a site, what it refuses, and the environment of sbatch and qsub."""

import json
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

import pytest

import runs
from site_models.table import BODY, script
from workshop.errors import UserError
from workshop.slurm import cluster
from workshop.slurm.request import find_queue, find_shape, seconds
from workshop.slurm.script import read_script
from workshop.slurm.shape import Shape
from workshop.slurm.sites import find_site
from workshop.slurm.submission import submission
from workshop.slurm.submit import choose_site, run_submit, shell_line

SETTINGS = runs.ROOT / "runs" / "sites"
PBS_LINES = ["-N launch", "-l select=2:ncpus=64:mpiprocs=1:ngpus=4:mem=480GB", "-l walltime=00:10:00", "-j oe"]


def pbs_script(folder, *lines) -> Path:
    """Write a job script for PBS, with these directives or the usual ones."""
    path = folder / "launch.sh"
    path.write_text("\n".join(["#!/bin/bash", *(f"#PBS {line}" for line in lines or PBS_LINES), "", BODY]))
    return path


def build(path, site, **options):
    """Build a submission without the variables of the session."""
    return submission(path, site, find_site(site), environment={"WORKSHOP_IMAGE": "/images/torch.sif"}, **options)


# ---------------------------------------------------------------- the line


@pytest.mark.parametrize(
    ("site", "options", "line"),
    [
        (
            "roihu",
            {"account": "project_1", "arguments": ["--epochs", "5"]},
            "sbatch --account=project_1 --partition=gputest --nodes=2 --ntasks-per-node=1 --gpus-per-node=gh200:4 "
            "--cpus-per-task=288 --time=00:10:00 --export=ALL {script} --epochs 5",
        ),
        (
            "roihu",
            {"account": "project_1", "gpus_per_node": 2, "time": "1-0", "reservation": "course"},
            "sbatch --account=project_1 --partition=gpumedium --reservation=course --nodes=2 --ntasks-per-node=1 "
            "--gpus-per-node=gh200:2 --cpus-per-task=144 --time=24:00:00 --export=ALL {script}",
        ),
        (
            "lumi",
            {"account": "project_1", "nodes": 40, "gpus_per_node": 8},
            "sbatch --account=project_1 --partition=standard-g --nodes=40 --ntasks-per-node=1 --gpus-per-node=8 "
            "--cpus-per-task=56 --mem-per-gpu=60G --time=00:10:00 --export=ALL {script}",
        ),
        (
            "marenostrum5",
            {"account": "bsc1", "queue": "acc_training"},
            "sbatch --account=bsc1 --partition=acc --qos=acc_training --nodes=2 --ntasks-per-node=1 --gpus-per-node=4 "
            "--cpus-per-task=80 --time=00:10:00 --export=ALL {script}",
        ),
        (
            "hipergator",
            {"account": "group", "gpus_per_node": 1},
            "sbatch --account=group --partition=hpg-b200 --qos=group --nodes=2 --ntasks-per-node=1 --gpus-per-node=b200:1 "
            "--cpus-per-task=14 --mem=112G --time=00:10:00 --export=ALL {script}",
        ),
        (
            "della",
            {"gpus_per_node": 2},
            "sbatch --nodes=2 --ntasks-per-node=1 --gpus-per-node=2 --cpus-per-task=24 --mem=32G --time=00:10:00 "
            "--constraint=gpu80 --export=ALL {script}",
        ),
        (
            "derecho",
            {"account": "UABC0001", "arguments": ["--epochs", "5", "--rates=0.1,0.2"]},
            "qsub -A UABC0001 -q develop -l select=2:ncpus=64:mpiprocs=1:ngpus=4:mem=480GB -l walltime=00:10:00 "
            "-l place=scatter -v WORKSHOP_SITE={settings},ARGUMENTS='--epochs 5 --rates=0.1,0.2' {script}",
        ),
        (
            "derecho",
            {"account": "UABC0001", "nodes": 3, "reservation": "R123"},
            "qsub -A UABC0001 -q R123 -l select=3:ncpus=64:mpiprocs=1:ngpus=4:mem=480GB -l walltime=00:10:00 "
            "-l place=scatter -v WORKSHOP_SITE={settings} {script}",
        ),
        (
            "casper",
            {"account": "UABC0001", "gpus_per_node": 1, "time": "30"},
            "qsub -A UABC0001 -q casper -l select=2:ncpus=32:mpiprocs=1:ngpus=1:gpu_type=a100_80gb:mem=248GB "
            "-l walltime=00:30:00 -l place=scatter -v WORKSHOP_SITE={settings} {script}",
        ),
    ],
)
def test_submit_builds_the_exact_command_of_a_site(site, options, line, tmp_path):
    path = pbs_script(tmp_path) if find_site(site).scheduler == "pbs" else script(tmp_path)
    job = build(path, site, **options)
    assert " ".join(job.command) == line.format(settings=SETTINGS / f"{site}.sh", script=path)
    assert job.folder == Path.cwd()


@pytest.mark.parametrize("text", ["-N2 -t 10", "-N 2 --time=10", "--nodes 2 --time 00:10:00   # two of them"])
def test_a_directive_can_be_written_in_several_ways(text, tmp_path):
    path = tmp_path / "job.sh"
    path.write_text(
        f"#!/bin/bash\n\n# a remark\n#SBATCH {text}\n##SBATCH --nodes=7\n#SBATCH --gres=gpu:a100:1,nvme:100\ntrue\n"
    )
    site = find_site("della")
    shape = find_shape(read_script(path, "slurm"), site, None, None, None)
    assert (shape.nodes, shape.gpus, shape.seconds) == (2, 1, 600)
    assert "--gres=gpu:1,nvme:100" in build(path, "della").command  # the other resources stay


def test_one_task_per_gpu_stays_one_task_per_gpu(tmp_path):
    path = script(tmp_path)
    path.write_text(path.read_text().replace("--ntasks-per-node=1", "--ntasks-per-node=4"))
    line = build(path, "lumi", account="p", gpus_per_node=8).command
    assert {"--ntasks-per-node=8", "--cpus-per-task=7"} <= set(line)


def test_queue_account_and_memory_of_the_script_take_precedence(tmp_path):
    path = script(tmp_path, "--partition=small-g", "--account=mine", "--mem=100G")
    line = build(path, "lumi").command
    assert {"--partition=small-g", "--account=mine"} <= set(line)
    assert not [word for word in line if word.startswith("--mem")]  # Slurm refuses two kinds of memory options
    path = script(tmp_path, "--partition=gpu")  # a partition of a different site
    assert "--partition=dev-g" in build(path, "lumi", account="p").command


@pytest.mark.parametrize(
    ("text", "scheduler", "expected"),
    [
        ("30", "slurm", 1800),
        ("10:30", "slurm", 630),
        ("1:00:00", "slurm", 3600),
        ("2-0", "slurm", 172800),
        ("1-12:30", "slurm", 131400),
        ("1-00:00:01", "slurm", 86401),
        ("30", "pbs", 30),
        ("10:30", "pbs", 630),
        ("12:00:00", "pbs", 43200),
    ],
)
def test_a_time_limit_is_read_as_the_scheduler_reads_it(text, scheduler, expected):
    assert seconds(text, scheduler) == expected


# ---------------------------------------------------------------- refusals


def text_of(*lines) -> str:
    return "\n".join(["#!/bin/bash", *lines, ""])


GOOD = ["#SBATCH --nodes=2", "#SBATCH --gpus-per-node=4", "#SBATCH --time=00:10:00"]


@pytest.mark.parametrize(
    ("site", "text", "options", "words"),
    [
        ("nowhere", text_of(*GOOD), {}, "there is no site 'nowhere'; choose from adroit, casper, "),
        ("puhti", text_of(*GOOD), {}, "is retired"),
        ("mahti", text_of(*GOOD), {}, "is retired"),
        ("lumi", text_of(*GOOD), {}, "needs to know which account pays; add --account ACCOUNT"),
        ("lumi", text_of("# SBATCH --nodes=2", *GOOD), {}, "line 2 of job.sh: a space after #"),
        ("lumi", text_of(*GOOD, "set -e", "#SBATCH --nodes=3"), {}, "line 6 of job.sh: #SBATCH after the first command"),
        ("lumi", text_of(*GOOD).replace("\n", "\r\n"), {}, "Windows line endings"),
        ("lumi", text_of('#SBATCH --job-name="x'), {}, "line 2 of job.sh: No closing quotation"),
        ("lumi", text_of("echo hello"), {}, "has no #SBATCH lines"),
        ("lumi", text_of("#PBS -l select=1:ngpus=4"), {}, "reads #SBATCH lines, but job.sh has #PBS"),
        ("derecho", text_of(*GOOD), {}, "reads #PBS lines, but job.sh has #SBATCH; use a script in slurm-multinode/pbs"),
        ("della", text_of(*GOOD[:2]), {}, "has no time limit; add --time"),
        ("della", text_of(GOOD[0], GOOD[2]), {}, "requests no GPUs; give the number per node"),
        ("della", text_of(*GOOD), {"time": "soon"}, "'soon' is not a time limit"),
        ("della", text_of(*GOOD), {"time": "0"}, "a job cannot have a time limit of 0"),
        ("della", text_of(*GOOD, "#SBATCH --nodes=2-4"), {}, "nodes=2-4: write a whole number"),
        ("della", text_of(*GOOD, "#SBATCH --ntasks=8"), {}, "write --ntasks-per-node instead of --ntasks"),
        ("della", text_of(*GOOD, "#SBATCH -G 8"), {}, "write --gpus-per-node instead of --gpus"),
        ("della", text_of(*GOOD, "#SBATCH --gres=gpu:4"), {}, "requests GPUs twice"),
        ("della", text_of(*GOOD, "#SBATCH --qos=gpu-test"), {}, "refuses --qos, which job.sh has: it follows from --time"),
        ("della", text_of(*GOOD, "#SBATCH -q gpu-test"), {}, "refuses --qos"),
        ("marenostrum5", text_of(*GOOD, "#SBATCH --mem=100G"), {}, "refuses --mem, which job.sh has: memory comes with"),
        ("della", text_of(*GOOD), {"gpus_per_node": 8}, "a node of Della (Princeton) has 4 GPUs, not 8"),
        ("adroit", text_of(*GOOD), {}, "a job at Adroit (Princeton) cannot have 2 nodes; the most is 1"),
        ("adroit", text_of(*GOOD), {"nodes": 1, "time": "5:00:00"}, "short: at most 04:00:00; gpu-medium: at most 2 GPUs"),
        ("roihu", text_of(*GOOD), {"account": "p", "time": "1:00:00"}, "gpumedium: at most 4 GPUs per job); only with --queue"),
        ("roihu", text_of(*GOOD), {"account": "p", "queue": "gputest", "time": "16"}, "gputest at Roihu-GPU (CSC) does not"),
        ("roihu", text_of(*GOOD), {"account": "p", "queue": "gpu"}, "has no queue 'gpu'; choose from gputest"),
        ("marenostrum5", text_of(*GOOD), {"account": "p"}, "needs WORKSHOP_IMAGE, the path of the .sif file"),
    ],
)  # fmt: skip
def test_a_job_that_does_not_fit_the_site_is_refused_in_one_sentence(site, text, options, words, tmp_path, monkeypatch):
    monkeypatch.delenv("WORKSHOP_IMAGE", raising=False)
    monkeypatch.delenv("SBATCH_ACCOUNT", raising=False)
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("the job was submitted"))
    (tmp_path / "job.sh").write_bytes(text.encode())
    with pytest.raises(UserError) as refusal:
        run_submit(str(tmp_path / "job.sh"), site, **options)
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("lines", "options", "words"),
    [
        (["-l select=2:ncpus=64:ngpus=8", "-l walltime=10"], {}, "a node of Derecho (NCAR) has 4 GPUs, not 8"),
        (PBS_LINES, {"nodes": 83}, "cannot have 83 nodes"),
        (PBS_LINES, {"time": "13:00:00"}, "(develop: at most 06:00:00; main: at most 12:00:00)"),
        (PBS_LINES, {"queue": "develop", "nodes": 3}, "at most 8 GPUs per job"),
        (["-l select=1:ngpus=4+1:ngpus=2", "-l walltime=10"], {}, "one chunk in select=, without +"),
        (["-l walltime=1-00", "-l select=1:ngpus=4"], {}, "'1-00' is not a time limit"),
        (PBS_LINES, {"arguments": ["a b"]}, "qsub cannot pass on the argument 'a b'"),
        (PBS_LINES, {"arguments": ["it's"]}, "qsub cannot pass on"),
        (PBS_LINES, {"arguments": ["$HOME"]}, "qsub cannot pass on"),
        (PBS_LINES, {"arguments": [""]}, "qsub cannot pass on"),
    ],
)
def test_a_job_that_does_not_fit_a_pbs_site_is_refused(lines, options, words, tmp_path):
    with pytest.raises(UserError) as refusal:
        run_submit(str(pbs_script(tmp_path, *lines)), "derecho", account="a", **options)
    assert words in str(refusal.value)


def test_a_missing_script_or_scheduler_is_reported(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"/no[.]sh: No such file"):
        run_submit(str(tmp_path / "no.sh"), "della")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"there is no sbatch on this machine; submit from a login node"):
        run_submit(str(script(tmp_path)), "della")


def test_a_folder_with_a_comma_in_its_name_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("workshop.slurm.submission.ROOT", tmp_path / "a,b")
    with pytest.raises(UserError, match="move the workshop"):
        build(script(tmp_path), "della")


# ---------------------------------------------------------------- what the scheduler receives

# The variables of a job, as Slurm and PBS set them in a session of Open OnDemand, and those that its kernel adds.
SESSION = {
    "SLURM_JOB_ID": "77",
    "SLURM_EXPORT_ENV": "NONE",
    "SLURM_MEM_PER_NODE": "8192",
    "SLURM_CPUS_PER_TASK": "2",
    "SLURM_NTASKS": "1",
    "SLURMD_NODENAME": "node1",
    "SRUN_CPUS_PER_TASK": "2",
    "SBATCH_PARTITION": "interactive",
    "PMI_RANK": "0",
    "PMIX_RANK": "0",
    "PALS_RANKID": "0",
    "PBS_JOBID": "78.server",
    "PBS_NODEFILE": "/var/spool/78",
    "RANK": "0",
    "MASTER_ADDR": "node1",
    "CUDA_VISIBLE_DEVICES": "3",
    "ROCR_VISIBLE_DEVICES": "3",
    "OMP_NUM_THREADS": "2",
    "PYTHONPATH": "/kernel",
    "LD_LIBRARY_PATH": "/kernel/lib",
    "VIRTUAL_ENV": "/kernel",
}
KEPT = {"SBATCH_ACCOUNT": "course", "SLURM_CONF": "/etc/slurm/site.conf", "HOME": "/home/me", "WORKSHOP_DATA": "/data"}

FAKE = """\
#!{python}
import json, os, sys
json.dump([sys.argv, dict(os.environ), os.getcwd()], open({record!r}, "w"))
print({words!r})
sys.exit({status})
"""


@pytest.fixture
def session(tmp_path, monkeypatch):
    """A session of Open OnDemand on a node of the cluster, with a scheduler that records its arguments and environment."""
    monkeypatch.setattr("workshop.slurm.submission.ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    for name, value in (SESSION | KEPT).items():
        monkeypatch.setenv(name, value)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)

    class Session:
        folder = tmp_path

        def scheduler(self, program, words, status=0):
            path = tmp_path / "bin" / program
            path.write_text(
                FAKE.format(python=sys.executable, record=str(tmp_path / "seen"), words=words, status=status)
            )
            path.chmod(0o755)

        def seen(self):
            return json.loads((tmp_path / "seen").read_text())

    return Session()


def test_sbatch_gets_no_job_variables_of_the_session(session, capsys):
    session.scheduler("sbatch", "Submitted batch job 4711 on cluster x")
    path = script(session.folder, "--output=logs/%x-%j.log", "--job-name=launch")
    assert run_submit(str(path), "lumi", arguments=["--epochs", "5", "a b"]) == 0
    arguments, environment, folder = session.seen()
    assert arguments[1] == "--account=course"  # from SBATCH_ACCOUNT
    assert arguments[-4:] == [str(path), "--epochs", "5", "a b"]
    assert not SESSION.keys() & environment.keys()
    assert KEPT.items() <= environment.items()
    assert folder == str(session.folder)
    settings = session.folder / "runs/sites/lumi.sh"
    assert "--export=ALL" in arguments
    assert environment["WORKSHOP_SITE"] == str(settings)
    assert "export WORKSHOP_DATA=/data\n" in settings.read_text()
    assert [path.name for path in settings.parent.iterdir()] == ["lumi.sh"]
    assert (session.folder / "logs").is_dir()  # without it Slurm would end the job without a message
    shown = capsys.readouterr()
    assert shown.err == ""
    assert shown.out.splitlines() == [
        "job 4711: 2 nodes with 4 GPUs for 00:10:00, in dev-g at LUMI-G",
        f"output, after the job has started: {session.folder}/logs/launch-4711.log",
        "state of the job: squeue --job=4711",
        "use of its GPUs: srun --interactive --pty --jobid=4711 rocm-smi",
    ]


def test_qsub_gets_arguments_unchanged(session, capsys):
    session.scheduler("qsub", "4711.desched1")
    path = pbs_script(session.folder)
    run_submit(str(path), "derecho", account="UABC0001", arguments=["--rates", "0.1,0.2"])
    arguments, environment, _ = session.seen()
    assert not SESSION.keys() & environment.keys()
    assert arguments[-1] == str(path)
    # qsub takes text within '' as one value, including commas.
    assert arguments[-2] == f"WORKSHOP_SITE={session.folder}/runs/sites/derecho.sh,ARGUMENTS='--rates 0.1,0.2'"
    out = capsys.readouterr().out
    assert "job 4711.desched1: 2 nodes with 4 GPUs for 00:10:00, in develop at Derecho (NCAR)" in out
    assert f"{session.folder}/launch.o4711\n" in out
    assert "qstat 4711.desched1" in out


def test_a_refusal_by_sbatch_is_reported_in_one_sentence(session):
    words = "sbatch: error: Invalid account\nsbatch: error: Batch job submission failed: Unspecified error"
    session.scheduler("sbatch", words, status=1)
    with pytest.raises(UserError) as refusal:
        run_submit(str(script(session.folder)), "lumi")
    assert str(refusal.value) == (
        "sbatch refused the job: Invalid account Batch job submission failed: Unspecified error"
    )


def test_a_script_that_ignores_the_settings_gets_a_warning(session, capsys):
    session.scheduler("sbatch", "Submitted batch job 1")
    path = script(session.folder)
    path.write_text(path.read_text().replace("source", "# source"))
    run_submit(str(path), "lumi")
    assert capsys.readouterr().err.count("\n") == 1
    run_submit(str(path), "lumi", dry_run=True)
    assert "launch.sh does not use the site's settings" in capsys.readouterr().err


@pytest.mark.parametrize("site", ["lumi", "derecho"])
def test_the_line_of_a_dry_run_submits_the_same_job(site, session, capsys):
    """It submits nothing; its line, pasted into a shell, gives the scheduler the same input as ``submit``."""
    program = {"lumi": "sbatch", "derecho": "qsub"}[site]
    session.scheduler(program, "Submitted batch job 1" if program == "sbatch" else "1.server")
    path = script(session.folder) if site == "lumi" else pbs_script(session.folder)
    options = {"account": "course", "arguments": ["--rates", "0.1,0.2"]}
    run_submit(str(path), site, dry_run=True, **options)
    assert not (session.folder / "seen").exists()
    line, _, rest = capsys.readouterr().out.partition("\n\n")
    assert max(map(len, line.splitlines())) < 200
    assert (session.folder / f"runs/sites/{site}.sh").read_text() in rest
    runs.subprocess.run(["bash", "-c", line], check=True)
    pasted = session.seen()[0]
    run_submit(str(path), site, **options)
    assert pasted == session.seen()[0]


def test_scripts_of_the_workshop_start_in_their_own_folder(tmp_path):
    path = runs.ROOT / "slurm-multinode" / "launch_ddp_1N4G.sh"
    job = build(path, "lumi", account="p")
    assert f"--chdir={path.parent}" in job.command
    assert job.log.startswith(str(path.parent))
    assert not [word for word in build(script(tmp_path), "lumi", account="p").command if word.startswith("--chdir")]


def test_submit_recognizes_the_site(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "uan02")
    assert choose_site(None) == "lumi"
    assert choose_site("della") == "della"
    monkeypatch.setattr("socket.gethostname", lambda: "laptop")
    monkeypatch.setattr(cluster, "find_cluster", lambda: None)
    with pytest.raises(UserError, match="belongs to no known site; name one with --site: adroit, "):
        choose_site(None)
    monkeypatch.setattr(cluster, "find_cluster", lambda: "a cluster")
    assert choose_site(None) == "local"


def test_submit_chooses_the_first_queue_that_accepts_the_job():
    site = find_site("roihu")

    def queue(nodes, gpus, hours):
        return find_queue(site, Shape(nodes, gpus, tasks=1, seconds=hours * 3600), None).name

    assert queue(2, 4, 0.2) == "gputest"
    assert queue(4, 1, 0.2) == "gpumedium"
    assert queue(1, 4, 36) == "gpumedium"
    with pytest.raises(UserError, match="at most 36:00:00"):
        queue(1, 4, 37)


@runs.needs_cluster
def test_submit_runs_a_job_on_the_practice_cluster(monkeypatch, capsys):
    """Submit a job to a real Slurm with two nodes and read its output."""
    # A separate folder, in case the user has a cluster; its path is short, for the sockets.
    place = tempfile.mkdtemp(prefix="submit-", dir="/tmp")
    monkeypatch.setattr(tempfile, "tempdir", place)
    monkeypatch.setattr("socket.gethostname", lambda: "laptop")
    monkeypatch.chdir(place)
    path = script(Path(place), "--output=%j.log")
    path.write_text(
        path.read_text().replace(BODY, BODY.splitlines()[0])
        + '\nsrun ${PYTHON:-false} -c "import workshop; print(3 * 7)"\n'
    )
    up = cluster.up(2)
    try:
        for name, value in SESSION.items():
            monkeypatch.setenv(name, value)
        run_submit(str(path), nodes=2, gpus_per_node=1)
        said = capsys.readouterr().out
        assert "in normal at the practice cluster on this machine" in said
        number = int(re.match(r"job (\d+):", said)[1])
        log, end = Path(place) / f"{number}.log", time.monotonic() + 60
        while (not log.exists() or log.read_text().count("21") < 2) and time.monotonic() < end:
            time.sleep(0.1)
        assert log.read_text().split() == ["21", "21"]
        with pytest.raises(UserError, match=r"^sbatch refused the job: .*reservation"):
            run_submit(str(path), reservation="gone")
        # From a shell on the cluster, which cannot see the processes outside or enter the cluster again.
        program = f"from workshop.slurm.submit import run_submit; run_submit({str(path)!r}, time='1')"
        said = up.run("env", f"PYTHONPATH={runs.ROOT}", sys.executable, "-c", program)
        start = f"job {number + 2}: 2 nodes with 4 GPUs for 00:01:00, in normal at the practice cluster"
        assert said.startswith(start)
        assert f"state of the job: squeue --job={number + 2}" in said
    finally:
        up.end()
        shutil.rmtree(place, ignore_errors=True)


def test_a_command_is_quoted_for_the_shell():
    words = ["printf", "%s\\n", "--comment=it's", "a b", "x" * 150, "--last"]
    line = shell_line(words)
    assert line.count("\n") == 2
    assert runs.run(["bash", "-c", line], Path.cwd()).stdout.splitlines() == words[2:]
