"""The kinds of runs that a check can make of a program. A rule names the scenarios that it judges; a bench makes them."""

from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from workshop.check.evidence.engine import EngineCheckpoint, PlainWeights
from workshop.check.evidence.job import Job, Request
from workshop.check.evidence.real import Kills, RealRun, Speeds
from workshop.check.evidence.run import Run
from workshop.check.evidence.text import Checkpoint, Exported, OptionRuns, Restarted

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True)
class Scenario(Generic[T_co]):
    """A kind of run."""

    name: str
    title: str  # what it shows, as in "not checked: TITLE"
    slow: bool = False  # with a real launcher or training; made only if the quick ones found nothing


@dataclass(frozen=True)
class Split:
    """A run that ended early, and a second run started in the same folder."""

    first: Run
    second: Run


@dataclass(frozen=True)
class Compared:
    """Two runs with the same global batches, and without chance: for METRICS whole runs, otherwise of two steps."""

    several: Run
    single: Run  # with one process
    narrow: ClassVar[bool] = False


class Narrow(Compared):
    """The same, but the joined batch is wider than those of the ranks, so that the contents of padded samples differ."""

    narrow = True


class Unavailable(Exception):
    """A bench cannot make a scenario here; the message says why, as in "not checked: MESSAGE"."""


# Of any program, with forked ranks.
WHOLE: Scenario[Run] = Scenario("whole", "the run")
SPLIT: Scenario[Split] = Scenario("split", "whether a second start resumes from the checkpoint")
COMPARED: Scenario[Compared] = Scenario("compared", "whether one process computes the same")
METRICS: Scenario[Compared] = Scenario("metrics", "the numbers that it prints after an evaluation")
# Of exercises that train for epochs.
SINGLE: Scenario[Run] = Scenario("single", "whether one process computes the same")
DEVICES: Scenario[Run] = Scenario("devices", "which device each process uses")
TWO_NODES: Scenario[Run] = Scenario("two-nodes", "which device each process uses on two machines")
NODES_OPTION: Scenario[Run] = Scenario("nodes-option", "a run on two nodes")  # given by its own options
FAILING_RANK: Scenario[Run] = Scenario("failing-rank", "what torchrun learns from a failing rank")
# With a real launcher.
SPAWNED: Scenario[RealRun] = Scenario("spawned", "the real mp.spawn", slow=True)
STARTED: Scenario[RealRun] = Scenario("started", "the real torchrun", slow=True)
KILLS: Scenario[Kills] = Scenario("kills", "kill -9 with the real torchrun", slow=True)
SOLVED: Scenario[Run] = Scenario(
    "solved", "whether it trains with the settings of the solution", slow=True
)  # its WHOLE
SPEED: Scenario[Speeds] = Scenario("speed", "the speed without the check", slow=True)
ALONE: Scenario[RealRun] = Scenario("alone", "one process that starts the other", slow=True)
SESSION: Scenario[RealRun] = Scenario("session", "a session in a Slurm job with one task", slow=True)
TASKS: Scenario[RealRun] = Scenario("tasks", "two tasks of srun", slow=True)
# Of a sharded language model.
CHECKPOINT: Scenario[Checkpoint] = Scenario("checkpoint", "the checkpoint")
ONE_PROCESS_TEXT: Scenario[Run] = Scenario("one-process-text", "whether one process has the same losses")
RESTARTED: Scenario[Restarted] = Scenario("restarted", "second starts with the same and other numbers of processes")
EXPORTED: Scenario[Exported] = Scenario("exported", "the exported model")
OPTIONS: Scenario[OptionRuns] = Scenario("options", "the options of the program, one by one")
# Of a program that may continue with a different number of ranks.
RUNNER: Scenario[dict[str, str]] = Scenario("runner", "what the runner tells torchrun")
RESIZED: Scenario[Restarted] = Scenario("resized", "whether a different number of ranks can continue")
# Of the programs of stage 06.
BUILT_ALONE: Scenario[Run] = Scenario("built-alone", "whether one process computes the same")
BUILT_CASES: Scenario[Run] = Scenario("built-cases", "other models")
# Of the engine of DeepSpeed.
REFERENCE: Scenario[Run] = Scenario("reference", "the same training without the engine")
ENGINE_CHECKPOINT: Scenario[EngineCheckpoint] = Scenario("engine-checkpoint", "the checkpoint of the engine")
ENGINE_SPLIT: Scenario[Split] = Scenario("engine-split", "whether a second start resumes from the engine's checkpoint")
PLAIN_WEIGHTS: Scenario[PlainWeights] = Scenario("plain-weights", "the exported parameters")
UNEVEN: Scenario[Run] = Scenario("uneven", "an evaluation with different numbers of batches")
# Of job scripts, on a practice cluster.
DIRECTIVES: Scenario[list[tuple[str, str]]] = Scenario("directives", "the #SBATCH lines of the script")
REQUEST: Scenario[Request] = Scenario("request", "what the script asks Slurm for")
JOB: Scenario[Job] = Scenario("job", "the job")
JOB_ELSEWHERE: Scenario[Job] = Scenario("job-elsewhere", "the job on other nodes")  # and with a different shape
NODE_DIES: Scenario[Job] = Scenario("node-dies", "a node that fails while the job runs")
JOB_FAILS: Scenario[Job] = Scenario("job-fails", "a job in which one process fails")
TIME_OVER: Scenario[Job] = Scenario("time-over", "the time limit of the job")
REAL_JOB: Scenario[Job] = Scenario("real-job", "the job with the real training", slow=True)
