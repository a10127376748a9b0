"""All settings in one dataclass; every field is also a command-line option."""
import argparse
from dataclasses import dataclass, fields


@dataclass
class Config:
    # data
    length: int = 1300
    channels: int = 4
    train_part: float = 0.65
    val_part: float = 0.15
    # windows and patches
    context: int = 96
    horizon: int = 16
    patch: int = 16
    stride: int = 8
    # model
    dim: int = 24
    heads: int = 2
    layers: int = 2
    dropout: float = 0.1
    # training
    epochs: int = 14
    batch_size: int = 32
    lr: float = 1e-2
    weight_decay: float = 1e-3
    clip: float = 1.0
    plateau_factor: float = 0.5
    plateau_patience: int = 0
    stop_patience: int = 2
    min_delta: float = 4e-3
    # the run
    seed: int = 5
    out: str = "runs/patchcast"
    resume: bool = False
    epochs_per_job: int = 0  # leave after so many epochs (0: no limit); --resume goes on


def parse_config(argv=None):
    parser = argparse.ArgumentParser(prog="patchcast.train", description=__doc__)
    for field in fields(Config):
        option = "--" + field.name.replace("_", "-")
        if field.type in (bool, "bool"):
            parser.add_argument(option, action="store_true", default=field.default)
        else:
            parser.add_argument(option, type=type(field.default), default=field.default)
    return Config(**vars(parser.parse_args(argv)))
