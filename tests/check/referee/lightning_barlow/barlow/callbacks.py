"""Averaged weights for validation, and one line per epoch from rank 0."""
import lightning.pytorch as L
import torch


class AveragedWeights(L.Callback):
    """Exponential moving average of the parameters; validation runs with it. Kept in the checkpoint."""

    def __init__(self, decay=0.95):
        self.decay = decay
        self.average = None
        self.raw = None

    def on_train_start(self, trainer, module):
        if self.average is None:
            self.average = [p.detach().clone() for p in module.parameters()]
        self.average = [a.to(module.device) for a in self.average]

    @torch.no_grad()
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        for average, parameter in zip(self.average, module.parameters()):
            average.lerp_(parameter, 1 - self.decay)

    @torch.no_grad()
    def on_validation_start(self, trainer, module):
        if self.average is not None:
            self.raw = [p.detach().clone() for p in module.parameters()]
            for parameter, average in zip(module.parameters(), self.average):
                parameter.copy_(average)

    @torch.no_grad()
    def on_validation_end(self, trainer, module):
        if self.raw is not None:
            for parameter, raw in zip(module.parameters(), self.raw):
                parameter.copy_(raw)
            self.raw = None

    def state_dict(self):
        return {"average": self.average}

    def load_state_dict(self, state):
        self.average = state["average"]


class EpochLine(L.Callback):
    def on_train_epoch_end(self, trainer, module):
        if trainer.is_global_zero:
            values = {name: value.item() for name, value in trainer.callback_metrics.items()}
            lr = trainer.optimizers[0].param_groups[0]["lr"]
            print(f"epoch {trainer.current_epoch}: barlow {values['train/barlow']:.3f}, probe {values['train/probe']:.3f}, "
                  f"val loss {values['val/loss']:.3f}, val accuracy {values['val/accuracy']:.2%}, lr {lr:.2e}", flush=True)
