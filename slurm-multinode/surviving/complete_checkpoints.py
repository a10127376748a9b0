"""Write distributed checkpoints so that a kill at any moment loses none that was complete, and load only complete ones.

checkpoint_steps.py uses this file. It needs only PyTorch, so you can copy it.
"""

import secrets
import shutil
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp


class Checkpoints:
    """Save and load checkpoints in a folder. A checkpoint gets its name, such as step-0000008, when it is complete."""

    def __init__(self, folder, state):
        self.folder, self.state, self.saving, self.complete = Path(folder), state, None, 0
        self.group = dist.new_group(backend="gloo")  # its own group: async_save communicates in it during training

    def load(self):
        """Load the newest complete checkpoint. Rank 0 chooses it, so that all ranks load the same one."""
        # Each start uses its own temporary names: if an earlier start still runs, the two never write to the same folder.
        choice = [None, secrets.token_hex(4)]
        if dist.get_rank() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            newest_first = sorted(self.folder.glob("step-*[0-9]"), reverse=True)  # the clock plays no role
            problems = {path: problem_of(path) for path in newest_first}
            choice[0] = next((path for path in newest_first if not problems[path]), None)
            for path in newest_first[: newest_first.index(choice[0]) if choice[0] else None]:
                print(f"{path} is not complete and is not loaded: {problems[path]}", flush=True)
        dist.broadcast_object_list(choice, group=self.group)
        newest, self.token = choice
        if newest:
            dcp.load({"state": self.state}, checkpoint_id=newest, process_group=self.group)
            self.complete = self.state.step

    def save(self):
        """Copy the state, which is fast, and let a thread write the copy while the training continues."""
        self.finish()  # only one save at a time
        self.writer = AtomicWriter(self.folder, self.state.step, self.token)
        self.saving = dcp.async_save({"state": self.state}, storage_writer=self.writer, process_group=self.group)

    def finish(self):
        """Wait for the last save. If it failed, for example because the disk is full, the checkpoint before it remains."""
        try:
            if self.saving:
                self.saving.result()
                self.complete = self.writer.step
        except dcp.CheckpointException as error:  # the same on all ranks
            if dist.get_rank() == 0:
                free = shutil.disk_usage(self.folder).free / 10**6
                shutil.rmtree(self.writer.path, ignore_errors=True)
                reasons = "; ".join(str(reason) for reason, _ in error.failures.values())
                print(
                    f"the checkpoint of step {self.writer.step} was not saved ({free:,.0f} MB free): {reasons}",
                    flush=True,
                )
        self.saving = None

    def close(self):
        """Save the last step, unless its checkpoint exists."""
        self.finish()
        if self.complete < self.state.step:
            self.save()
            self.finish()
        if self.complete < self.state.step:
            raise SystemExit(f"the last checkpoint was not saved; the next start resumes from step {self.complete}")


class AtomicWriter(dcp.FileSystemWriter):
    """Let all ranks write to a folder with a temporary name, and rename it when all files are complete."""

    def __init__(self, folder, step, token):
        self.step, self.final = step, folder / f"step-{step:07d}"
        super().__init__(folder / f"{self.final.name}.{token}.tmp")

    def finish(self, metadata, results):
        """Complete a checkpoint. DCP calls this on rank 0, after all ranks have written their files."""
        super().finish(metadata, results)
        if problem := problem_of(self.path):  # for example, the nodes do not share this folder
            raise OSError(problem)
        if self.final.exists() and problem_of(self.final):
            shutil.rmtree(self.final)
        try:
            self.path.rename(self.final)  # atomic
        except OSError:
            if problem_of(self.final):
                raise
            shutil.rmtree(self.path)  # a different start of this training has saved the same step
        self.delete_older()

    def delete_older(self):
        """Keep this checkpoint and the one before it, in case this one gets damaged; also delete what killed starts have left."""
        length = len(self.final.name)
        older = [path for path in self.final.parent.glob("step-*") if path.name[:length] <= self.final.name]
        complete = sorted(path for path in older if len(path.name) == length and not problem_of(path))
        for path in older:
            if path not in complete[-2:]:
                shutil.rmtree(path, ignore_errors=True)


def problem_of(checkpoint):
    """Return why a checkpoint is not complete, or None if it is."""
    try:
        for part in dcp.FileSystemReader(checkpoint).read_metadata().storage_data.values():
            if (checkpoint / part.relative_path).stat().st_size < part.offset + part.length:
                return f"{part.relative_path} is too short"
    except Exception as error:  # what it raises on a damaged file differs from version to version
        return f"{type(error).__name__}: {error}"
