"""Dynamic weight averaging (Liu et al., 2019): a task whose loss falls more slowly than the others gets more weight."""
import lightning as L
import torch


class TaskBalancer(L.Callback):
    """Sets pl_module.task_weights before each epoch from the mean task losses of the two epochs before it.

    The history is part of the checkpoint, so a resumed run goes on with the same weights.
    """

    def __init__(self, tasks, temperature=0.5):
        self.tasks, self.temperature = list(tasks), temperature
        self.history = []  # one list of mean task losses per finished epoch
        self.total, self.steps = None, 0

    def state_dict(self):
        return {"history": [list(losses) for losses in self.history]}

    def load_state_dict(self, state_dict):
        self.history = [list(losses) for losses in state_dict["history"]]

    def weights(self):
        if len(self.history) < 2:
            return torch.ones(len(self.tasks))
        before, last = torch.tensor(self.history[-2]), torch.tensor(self.history[-1])
        return len(self.tasks) * torch.softmax(last / before / self.temperature, dim=0)

    def on_train_epoch_start(self, trainer, pl_module):
        pl_module.task_weights = self.weights().to(pl_module.device)
        self.total, self.steps = torch.zeros(len(self.tasks), device=pl_module.device), 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.total += outputs["task_losses"]
        self.steps += 1

    def on_train_epoch_end(self, trainer, pl_module):
        losses = trainer.strategy.reduce(self.total / self.steps, reduce_op="mean")
        self.history.append(losses.tolist())


class Report(L.Callback):
    """One line per epoch, from rank 0."""

    def __init__(self, balancer):
        self.balancer = balancer

    def on_train_epoch_end(self, trainer, pl_module):
        if not trainer.is_global_zero:
            return
        losses = zip(self.balancer.tasks, self.balancer.history[-1], pl_module.task_weights.tolist())
        train = ", ".join(f"{task} {loss:.4f} (weight {weight:.3f})" for task, loss, weight in losses)
        metrics = trainer.callback_metrics
        print(f"epoch {trainer.current_epoch}: train {train} | val loss {metrics['val_loss']:.4f}, "
              f"macro F1 {metrics['val_f1']:.3f}, angle off by {metrics['val_mae']:.2f} degrees", flush=True)
