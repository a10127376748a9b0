"""What a check says: findings, and the kinds of evidence that they rest on."""

from dataclasses import asdict, dataclass

# Each kind of finding, by what was observed (not by the line of code that caused it), and why it matters.
WHY = {
    # -- the run itself
    "crash": "the program ended with an error",
    "hang": "processes that wait for each other in different places wait for ever; on a cluster the job burns its hours",
    "endless": "the program neither moves on nor ends",
    "no-training": "a run that takes no step has trained nothing, however well it ends",
    "output-flood": "output by the megabyte hides what matters, and fills the disk",
    "outside-write": "a run that writes outside of its own folder overwrites somebody's files",
    # -- processes and devices
    "no-group": "processes that do not know each other each train a model of their own",
    "wrong-group": "the group has to hold all processes that were started, each with a rank of its own",
    "device-index": "the rank counts over all machines, the devices of a machine only over its own: the second machine fails",
    "port-fixed": "two people on one machine would collide at this port",
    "address-overwritten": "torchrun has set the address already; with another one its processes never find each other",
    "collectives-differ": "a collective needs every rank: one that calls another, or none, leaves the rest waiting",
    # -- gradients and weights
    "gradients-differ": "without averaged gradients the processes train different models, and one of them is saved",
    "weights-differ": "the replicas have to hold the same weights at all times",
    "gradient-scale": "the averaged gradient has to be that of the global batch; a multiple of it is another learning rate",
    "differs-from-one-process": "N processes that see the batches of one process should compute the same training",
    "no-learning": "weights that do not move, or a loss that does not fall, are no training",
    "wrong-parameters": "the optimizer moves weights that the model does not use",
    "gradients-pile-up": "gradients of earlier steps are still there, and are stepped along again",
    "graph-kept": "every step's graph stays in memory: the run grows until it dies",
    "accumulation-uneven": "each step has to belong to the same number of batches",
    "accumulation-scale": "the gradient of a step has to be the mean over its batches, not their sum",
    "accumulation-traffic": "gradients that travel with every batch cost the time that accumulation should save",
    # -- data
    "same-samples": "every process pays for the same work: the gradient is the same N times over",
    "shares-overlap": "samples that two ranks train on count twice, and others not at all",
    "samples-missed": "what no rank sees is not learned from",
    "same-order": "the same batches in every epoch: the model sees less variety than you pay for",
    "leak": "a model is judged on samples that it was trained on: the figure is too good",
    # -- evaluation
    "evaluation-missed": "the figure stands for fewer samples than it says",
    "evaluation-repeated": "samples that count twice shift the figure, or cost time for nothing",
    "metric-wrong": "the reported figure is not the one of all samples on all ranks",
    # -- files and output
    "two-writers": "two processes that write one file tear it sooner or later",
    "several-print": "the same line from every process drowns what matters, the more processes the more",
    "no-snapshot": "after a crash there is nothing to carry on from",
    "snapshot-torn": "a process that dies while it writes in place leaves half a file, and nothing to carry on from",
    "snapshot-keys": "the snapshot does not fit the plain model: nobody can load it without the same wrapper",
    # -- restart
    "resume-fails": "what has been saved cannot be carried on from",
    "never-resumes": "the second start begins anew: the work of the first is lost",
    "epoch-repeated": "an epoch that is trained twice gives other weights than a run that was never stopped",
    "epoch-skipped": "an epoch that is left out gives other weights than a run that was never stopped",
    "optimizer-lost": "without its state the optimizer starts cold, and the run goes another way",
    "schedule-lost": "the learning rate starts again from where the schedule began",
    "resume-differs": "a run that was interrupted should end with the weights of one that was not",
    "not-restarted": "one dead process should not end the run",
    "orphans": "workers that outlive their launcher train on and write to the snapshot that the next start writes too",
    "traceback-hidden": "without it torchrun shows that a rank failed, but not why",
    # -- one device
    "data-per-sample": "the device waits while one core prepares one sample after the other, again in every epoch",
    "host-sync": (
        "a step that asks for a value waits until the device has computed it, "
        "and the device then waits for the next step"
    ),
    "precision": "this device computes in bfloat16 several times as fast as in float32",
    "slower": "the device could do more in the same time",
    # -- jobs
    "job-refused": "a job that the scheduler does not take never runs",
    "directive-ignored": "Slurm reads #SBATCH lines only before the first command, and takes all other comments for comments",
    "job-shape": "what the job does not ask for it does not get",
    "one-node-only": "the rest of the nodes is paid for, and idle",
    "separate-groups": "processes that do not find each other each train a model of their own, or wait for ever",
    "meeting-place": "the next job runs on other nodes, and its processes look for each other where none of them is",
    "shape-fixed": "a number that Slurm knows, written into the script, is wrong as soon as somebody asks for another number",
    "cores-lost": "a GPU waits for batches that one core has to prepare, while the cores that you pay for are idle",
    "still-torchrun": "with two launchers, one of them starts as many processes as you want, and the other multiplies them",
    "not-requeued": "one node that dies ends the run: at night, or over a weekend, nobody starts it again",
    "log-overwritten": "what the first start has said, and why it ended, is lost",
    "no-warning": "at its time limit a job is killed; what it has done since the last snapshot is lost, and nobody goes on",
    "trap-late": "a shell runs its trap after the command that it waits for; at the time limit that is too late",
    # -- Lightning
    "trainer-idle": "what the Trainer does not run it neither distributes nor saves nor moves to the device",
    "step-missing": "the Trainer calls the methods of the module by their names: what is not there it cannot call",
    "wrong-images": "the model is made for images of another shape",
    "stem-shrinks": "what the stem throws away no later layer sees: of small images too little is left",
    "schedule-flat": "a rate that fits the first steps is too high for the last, or the other way round",
    "schedule-uneven": "a schedule that does not fit the run ends too early, or never comes to its end",
    "best-lost": "the last epoch is not always the best, and a model that is not kept is gone",
    "never-stops": "epochs in which nothing is learned any more are paid for",
    "stops-too-early": "the training ends while the model still learns",
    "not-logged": "afterwards nobody can see why a run went as it did",
    "nodes-ignored": "on two nodes the processes have to know of both",
    "job-mistaken": "in a Jupyter session on a cluster the program does not start, or trains alone",
    # -- sharded models
    "not-sharded": "what every process holds whole does not get smaller with more of them: the model that does not fit, will not",
    "one-group": "only a layer that is a group of its own can be gathered by itself, and freed before the next one comes",
    "whole-model": "a model that does not fit on one device cannot be loaded on one either, to be cut there",
    "buffers-empty": "to_empty() leaves what memory held before; the model then mistakes one place in the text for another",
    "weights-not-loaded": "the training begins from another model than you think, and nothing says so",
    "master-rounded": "AdamW changes a weight by a thousandth of it or less, and bfloat16 has steps of four thousandths",
    "gathers-float32": "twice the bytes travel, before each forward and each backward of every layer",
    "reduce-rounded": "a sum over many processes in bfloat16 loses the small ones among the gradients",
    "clip-local": "each process scales its part by another factor: the gradient points elsewhere, and its norm is not the limit",
    "clip-missing": "one bad batch can throw the weights far off",
    "not-saved": "after a crash there is nothing to carry on from",
    "whole-saved": "one process gathers and writes what all hold together: its memory ends, or the others wait for its disk",
    "saves-waiting": "all GPUs wait while files are written: with a large model minutes, each time",
    "data-repeated": "some samples come twice, and others never",
    "reshard-fails": "the next allocation may have another number of GPUs",
    "not-exported": "a model that only this program can read is of little use to anybody else",
    "export-differs": "what others load is not what was trained",
    "activations-kept": "what the forward keeps grows with batch and length: it is what runs out first",
    "gathers-again": "weights that are freed after the forward travel once more for the backward",
    "not-offloaded": "the device keeps what the CPU's memory could hold",
    "not-compiled": "kernels one by one read and write memory that one fused kernel would not touch",
    # -- DeepSpeed
    "engine-idle": "what does not go through the engine, ZeRO neither averages nor spreads",
    "scaled-twice": "the engine divides by the processes and the accumulated batches itself",
    "saved-by-some": "each process has a random state of its own, and perhaps a part of the optimizer",
    "batch-differs": "DeepSpeed divides what it accumulates by the batch sizes that it was told of",
    "optimizer-whole": "AdamW's moments are twice the weights, and in every process: that is what ZeRO-1 saves",
    "differs-from-ddp": "how the work is spread over processes should not change what is computed",
    "accelerator-idle": "what the Accelerator has not prepared, it neither moves to the device nor averages",
    "loader-by-hand": "a loader that it has not prepared gets no device, no even end and no place in its checkpoint",
    "gathered-by-hand": "its loaders repeat samples at the end so that all processes have as many; only it knows which",
    "state-by-hand": "random states, the loader's and each process's own part are easily forgotten",
    "evaluation-uneven": "with ZeRO-3 a forward gathers the weights from all processes: whoever takes one more waits for ever",
    # -- matters of taste
    "same-random": "every rank draws the same random numbers: the same dropout, the same augmentation",
    "random-lost": "dropout and augmentation go another way after a restart: the run is as good, and not the same",
    "batch-wasted": "a batch that is loaded and thrown away costs time, and workers that start for it cost more",
    "not-destroyed": "a group that is not destroyed can hang or warn at the end",
}

HINTS = {"same-random", "random-lost", "batch-wasted", "not-destroyed"}  # shown as hints, never as errors


@dataclass(frozen=True)
class Finding:
    """One thing that was observed.

    Attributes:
        kind: a key of ``WHY``.
        seen: what was seen, one sentence with figures.
        where: "file.py:12", or "" where no line stands for it.
        detail: more for who wants it: a traceback, stacks; may have several lines.
    """

    kind: str
    seen: str
    where: str = ""
    detail: str = ""

    def __post_init__(self):
        assert self.kind in WHY, self.kind

    @property
    def why(self) -> str:
        """Why it matters."""
        return WHY[self.kind]

    @property
    def is_error(self) -> bool:
        """Whether it keeps a goal from being met; a hint does not."""
        return self.kind not in HINTS

    def as_dict(self) -> dict:
        """The finding for ``--json``."""
        return {**asdict(self), "why": self.why, "level": "error" if self.is_error else "hint"}
