"""The kinds of runs that a check can make of a program. A rule names those that it judges; a bench makes them."""

from dataclasses import dataclass
from typing import Generic, TypeVar

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
    slow: bool = False  # made only when all quick ones found nothing: a real launcher, a real training


@dataclass(frozen=True)
class Split:
    """A run that ended early, and the run that was started again in its folder."""

    first: Run
    second: Run


class Unavailable(Exception):
    """A bench cannot make a scenario here; the message says why, as in "not checked: MESSAGE"."""


# Of any program, with forked ranks.
WHOLE: Scenario[Run] = Scenario("whole", "the run")
SPLIT: Scenario[Split] = Scenario("split", "whether a second start resumes from the checkpoint")
# Of exercises that train for epochs.
SINGLE: Scenario[Run] = Scenario("single", "whether one process computes the same")
TWO_NODES: Scenario[Run] = Scenario("two-nodes", "which device each process takes on two machines")
NODES_OPTION: Scenario[Run] = Scenario("nodes-option", "a run on two nodes")  # which its own options name
FAILING_RANK: Scenario[Run] = Scenario("failing-rank", "what torchrun is told of a failing rank")
# With a real launcher.
SPAWNED: Scenario[RealRun] = Scenario("spawned", "the real mp.spawn", slow=True)
KILLS: Scenario[Kills] = Scenario("kills", "kill -9 with the real torchrun", slow=True)
SPEED: Scenario[Speeds] = Scenario("speed", "the speed by itself", slow=True)
ALONE: Scenario[RealRun] = Scenario("alone", "one process that starts the other", slow=True)
SESSION: Scenario[RealRun] = Scenario("session", "a session that is a Slurm job of one task", slow=True)
TASKS: Scenario[RealRun] = Scenario("tasks", "two tasks of srun", slow=True)
# Of a sharded language model.
CHECKPOINT: Scenario[Checkpoint] = Scenario("checkpoint", "the checkpoint")
ONE_PROCESS_TEXT: Scenario[Run] = Scenario("one-process-text", "whether one process has the same losses")
RESTARTED: Scenario[Restarted] = Scenario("restarted", "second starts with the same and other numbers of processes")
EXPORTED: Scenario[Exported] = Scenario("exported", "the exported model")
OPTIONS: Scenario[OptionRuns] = Scenario("options", "the program's options, one by one")
# Of DeepSpeed's engine.
REFERENCE: Scenario[Run] = Scenario("reference", "the same training without the engine")
ENGINE_CHECKPOINT: Scenario[EngineCheckpoint] = Scenario("engine-checkpoint", "the engine's checkpoint")
ENGINE_SPLIT: Scenario[Split] = Scenario("engine-split", "whether a second start resumes from the engine's checkpoint")
PLAIN_WEIGHTS: Scenario[PlainWeights] = Scenario("plain-weights", "the exported parameters")
UNEVEN: Scenario[Run] = Scenario("uneven", "an evaluation with different numbers of batches")
# Of job scripts, on a practice cluster.
DIRECTIVES: Scenario[list[tuple[str, str]]] = Scenario("directives", "the script's #SBATCH lines")
REQUEST: Scenario[Request] = Scenario("request", "what the script asks Slurm for")
JOB: Scenario[Job] = Scenario("job", "the job")
JOB_ELSEWHERE: Scenario[Job] = Scenario("job-elsewhere", "the job on other nodes")  # and in another shape
NODE_DIES: Scenario[Job] = Scenario("node-dies", "a node that dies under the job")
TIME_OVER: Scenario[Job] = Scenario("time-over", "the end of the job's time")
REAL_JOB: Scenario[Job] = Scenario("real-job", "the job with the real training", slow=True)
