"""The exercises: their files, their goals, and which finding belongs to which goal."""

from dataclasses import dataclass
from pathlib import Path

from workshop.repository import ROOT

KEPT = 0  # the number of the goal without a TODO: what the step before had reached still holds


@dataclass(frozen=True)
class Exercise:
    """One exercise.

    Attributes:
        name: its path in the repository; the solution has the same path under ``solutions/``.
        launch: how its processes come to be: "single" (one process), "spawn" (the script starts them), "torchrun", or
            "slurm" (a job script).
        goals: the title of each goal, by its number; ``KEPT`` has no TODO.
        kinds: for each kind of finding the goal that it belongs to; what is not named belongs to ``KEPT``.
        options: options of the check's runs.
        metric: what a goal asks to have reported: "accuracy", or a further figure of ``log.write()``; "": nothing.
        beside: the names of further files of it, in the same folder.
    """

    name: str
    launch: str
    goals: dict[int, str]
    kinds: dict[str, int]
    options: tuple[str, ...] = ()
    metric: str = ""
    beside: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        return ROOT / self.name

    @property
    def solution(self) -> Path:
        return ROOT / "solutions" / self.name

    @property
    def runner(self) -> Path | None:
        """What starts it; None: it is a job script, which sbatch takes as it is."""
        number, _, topic = self.path.stem.partition("_")
        return self.path.with_name(f"{number}_run_{topic}.sh") if self.launch != "slurm" else None

    @property
    def pairs(self) -> list[tuple[Path, Path]]:
        """Its files, each with the solution's: itself, its runner if it has one, and what lies beside it."""
        files = [self.path, *([self.runner] if self.runner else []), *map(self.path.with_name, self.beside)]
        return [(file, self.solution.with_name(file.name)) for file in files]

    def goal(self, kind: str) -> int:
        """The number of the goal that a kind of finding belongs to."""
        return self.kinds.get(kind, KEPT)


def _kinds(**goals: str) -> dict[str, int]:
    """{"a": 1, "b": 1, "c": 2} from goal1="a b", goal2="c"."""
    return {kind: int(goal.removeprefix("goal")) for goal, kinds in goals.items() for kind in kinds.split()}


PROCESSES = "no-group wrong-group hang collectives-differ two-writers several-print port-fixed"
GRADIENTS = "gradients-differ weights-differ gradient-scale snapshot-keys"
SHARES = "same-samples shares-overlap samples-missed same-order"
METRICS = "metric-wrong evaluation-missed evaluation-repeated"
RESTART = "resume-fails never-resumes epoch-repeated epoch-skipped optimizer-lost schedule-lost resume-differs"

EXERCISES = (
    Exercise(
        "01_single_gpu/exercise1_fast_single_gpu.py",
        "single",
        {
            1: "the samples are prepared once, and batches are taken from memory",
            2: "no step waits for a value from the device",
            3: "the model computes in bfloat16, where this device is fast at it",
            KEPT: "it learns as well, resumes, and is as fast as the solution (within 15 %)",
        },
        {**_kinds(goal1="data-per-sample", goal2="host-sync", goal3="precision"), "slower": KEPT},
        metric="accuracy",
    ),
    Exercise(
        "02_pytorch_ddp/exercise1_multigpu.py",
        "spawn",
        {
            1: "the processes form one group, and rank 0 alone prints and writes",
            2: "the gradients are averaged: all processes train one model",
            3: "each process trains on a share of its own, in a new order each epoch",
            4: "the figures are those of all processes",
            KEPT: "it learns, and carries on from its snapshot",
        },
        _kinds(goal1=PROCESSES, goal2=GRADIENTS, goal3=SHARES, goal4=METRICS),
        metric="accuracy",
    ),
    Exercise(
        "02_pytorch_ddp/exercise2_multigpu_torchrun.py",
        "torchrun",
        {
            1: "torchrun starts the processes, and they form one group",
            2: "each process drives the device with its number on its own machine",
            3: "a dead process is started again, a dead torchrun leaves nothing behind, the weights are the same",
            KEPT: "it averages, shares out, learns and carries on as before",
        },
        _kinds(
            goal1=PROCESSES + " address-overwritten",
            goal2="device-index",
            goal3="not-restarted orphans traceback-hidden",
        ),
        metric="accuracy",
    ),
    Exercise(
        "02_pytorch_ddp/exercise3_global_metrics.py",
        "torchrun",
        {
            1: "the macro F1 score is the one of the whole test set",
            2: "a step of several batches equals a step of one large batch, and the gradients travel once",
            KEPT: "it averages, shares out, learns and carries on as before",
        },
        _kinds(
            goal1=METRICS,
            goal2="accumulation-uneven accumulation-scale accumulation-traffic gradients-pile-up gradients-differ weights-differ "
            "gradient-scale differs-from-one-process no-training",
        ),
        metric="macro_f1",
    ),
    *(
        Exercise(
            f"02_pytorch_ddp/exercise4_find_the_bug_{bug}.py",
            "torchrun",
            {1: title, KEPT: "the rest is as right as it was"},
            _kinds(goal1=kinds),
            ("--target", "2.2") if bug == "hang" else (),  # reached by a few batches of the check's short runs
        )
        for bug, title, kinds in (
            ("hang", "all processes come to the same end", "hang collectives-differ crash"),
            ("leak", "it is validated on samples that no rank has trained on", "leak shares-overlap samples-missed"),
            (
                "accumulation",
                "a step of several batches equals a step of one large batch",
                "accumulation-uneven accumulation-scale gradients-pile-up gradients-differ weights-differ",
            ),
            ("no_learning", "it learns", "no-learning"),
            (
                "restart",
                "a run that was stopped ends with the weights of one that was not",
                RESTART,
            ),
        )
    ),
    Exercise(
        "03_pytorch_lightning/exercise1_lightning_mnist.py",
        "torchrun",
        {
            1: "a Trainer takes the steps, with the module's loss and optimizer",
            2: "it trains on all devices: one group, one model",
            3: "each sample is dealt to one process, and the accuracy is the one of the whole test set",
            4: "it saves a checkpoint after each epoch, and carries on from it exactly",
            KEPT: "it learns",
        },
        _kinds(
            goal1="trainer-idle step-missing",
            goal2=PROCESSES + " " + GRADIENTS,
            goal3=METRICS + " " + SHARES,
            goal4="no-snapshot snapshot-torn " + RESTART,
        ),
        metric="accuracy",
    ),
    Exercise(
        "03_pytorch_lightning/exercise2_lightning_cifar10.py",
        "torchrun",
        {
            1: "a ResNet-18 for images of 3 x 32 x 32, that keeps their pixels",
            2: "it computes in bfloat16, where this device is fast at it",
            3: "the learning rate makes one cycle over the steps of the run, each of as many batches as asked for",
            4: "it keeps the best checkpoint, logs, and ends when it learns no more",
            5: "it runs on several nodes, and inside a session that is a Slurm job",
            KEPT: "it averages, shares out, learns and carries on as before",
        },
        _kinds(
            goal1="wrong-images stem-shrinks",
            goal2="precision",
            goal3="schedule-flat schedule-uneven schedule-lost accumulation-uneven accumulation-scale",
            goal4="best-lost never-stops stops-too-early not-logged",
            goal5="nodes-ignored job-mistaken wrong-group",
        ),
        metric="accuracy",
    ),
    Exercise(
        "04_model_parallel_with_fsdp/exercise1_fsdp_codellama.py",
        "torchrun",
        {
            1: "every process holds a part of the model, and each layer is a group of its own",
            2: "it computes in bfloat16, where this device is fast at it; weights and sums stay float32",
            3: "no process ever holds the whole model, and all begin with the checkpoint's weights",
            KEPT: "it learns what one process learns, and clips the norm of the whole gradient",
        },
        _kinds(
            goal1="not-sharded one-group",
            goal2="precision master-rounded gathers-float32 reduce-rounded",
            goal3="whole-model weights-not-loaded buffers-empty",
        ),
    ),
    Exercise(
        "04_model_parallel_with_fsdp/exercise2_sharded_checkpoint.py",
        "torchrun",
        {
            1: "each process saves its part of weights and optimizer",
            2: "started again, with as many processes or with others, it carries on",
            3: "it trains on while a checkpoint is written",
            4: "transformers alone loads the trained model",
            KEPT: "it is sharded, and learns, as before",
        },
        _kinds(
            goal1="not-saved whole-saved",
            goal2="resume-fails never-resumes resume-differs data-repeated schedule-lost optimizer-lost reshard-fails",
            goal3="saves-waiting",
            goal4="not-exported export-differs",
        ),
        beside=("exercise2_export.py",),
    ),
    Exercise(
        "04_model_parallel_with_fsdp/exercise3_fit_the_model.py",
        "torchrun",
        {
            1: "--activation-checkpointing: the forward keeps the layers' inputs only",
            2: "--accumulate: a step of several batches equals one of a large batch, and its gradients travel once",
            3: "--keep-gathered: the backward gathers nothing again",
            4: "--offload: weights, gradients and optimizer lie in the CPU's memory",
            5: "--compile: the layers are compiled",
            KEPT: "it is sharded, and learns, as before",
        },
        _kinds(
            goal1="activations-kept",
            goal2="accumulation-uneven accumulation-scale accumulation-traffic",
            goal3="gathers-again",
            goal4="not-offloaded",
            goal5="not-compiled",
        ),
    ),
    Exercise(
        "05_deepspeed/exercise1_deepspeed.py",
        "torchrun",
        {
            1: "DeepSpeed's engine does forward, backward and step",
            2: "each process holds a part of the optimizer, and the losses are those of stage 02",
            3: "each process saves its part, and a run that is started again carries on exactly",
            4: "with ZeRO-3 all processes evaluate as often; plain PyTorch loads the weights",
            KEPT: "it shares out and learns as before",
        },
        _kinds(
            goal1="engine-idle batch-differs scaled-twice",
            goal2="optimizer-whole differs-from-ddp",
            goal3="not-saved never-resumes resume-fails resume-differs epoch-repeated epoch-skipped",
            goal4="evaluation-uneven not-exported export-differs",
        ),
        beside=("ds_config.json",),
    ),
    Exercise(
        "05_deepspeed/exercise2_accelerate.py",
        "torchrun",
        {
            1: "an Accelerator makes the group, takes the device, and averages the gradients",
            2: "its loader deals out the global batches of stage 02",
            3: "the accuracy is that of the whole test set, and each sample counts once",
            4: "it saves all that it has prepared, and a run that is started again carries on",
            KEPT: "it learns what stage 02 learns",
        },
        _kinds(
            goal1="accelerator-idle " + PROCESSES + " " + GRADIENTS,
            goal2="loader-by-hand " + SHARES,
            goal3="gathered-by-hand " + METRICS,
            goal4="state-by-hand saved-by-some no-snapshot snapshot-torn " + RESTART,
        ),
        metric="accuracy",
    ),
    Exercise(
        "slurm-multinode/exercise1_launch_ddp.sh",
        "slurm",
        {
            1: "the job asks for 2 GPUs on each of two nodes",
            2: "torchrun starts on each node of the job",
            3: "all processes meet in one group, on any nodes and in any shape",
            4: "each process has its cores",
            KEPT: "the job trains to its end",
        },
        _kinds(
            goal1="job-refused job-shape directive-ignored",
            goal2="one-node-only",
            goal3="separate-groups meeting-place port-fixed shape-fixed no-group wrong-group",
            goal4="cores-lost",
        ),
    ),
    Exercise(
        "slurm-multinode/exercise2_srun.sh",
        "slurm",
        {
            1: "Slurm starts the processes, and they form one group",
            2: "there is one task for each GPU",
            3: "each process has its cores",
            KEPT: "the job trains to its end",
        },
        _kinds(
            goal1="still-torchrun one-node-only separate-groups meeting-place port-fixed no-group wrong-group device-index",
            goal2="job-refused job-shape directive-ignored shape-fixed",
            goal3="cores-lost",
        ),
    ),
    Exercise(
        "slurm-multinode/exercise3_requeue.sh",
        "slurm",
        {
            1: "a job whose node has died starts again and carries on",
            2: "a job whose time is nearly over puts itself back into the queue",
            3: "and does so at once, while the processes run",
            KEPT: "the job trains to its end",
        },
        _kinds(goal1="not-requeued log-overwritten", goal2="no-warning", goal3="trap-late"),
    ),
)

# Scripts that are given, and can be checked too.
GIVEN = (
    Exercise(
        "01_single_gpu/single_gpu.py",
        "single",
        {KEPT: "it learns, and carries on from its snapshot"},
        {},
        metric="accuracy",
    ),
)


def find_exercise(path: Path) -> Exercise | None:
    """The exercise that a file is, by its name: the learner's, the solution, a copy elsewhere. None if it is another program."""
    return next((exercise for exercise in (*EXERCISES, *GIVEN) if path.name == exercise.path.name), None)
