"""Export a sharded checkpoint as a model that plain transformers loads, with one safetensors file per layer.
One process is enough, on any machine. It reads the newest checkpoint, one layer at a time.

Run it:  python solutions/04_model_parallel_with_fsdp/exercise2_export.py --folder runs/sharded_checkpoint
"""

import json
import os
import warnings
from itertools import groupby

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from workshop.training.arguments import ArgumentParser
from workshop.training.finetuning import check_export, newest_checkpoint

# DCP warns that torch.distributed is not initialized. This is intended, because the export runs in one process.
warnings.filterwarnings("ignore", message="torch.distributed is")


def main():
    args = parse_arguments()
    config = AutoConfig.from_pretrained(args.model, local_files_only=True)
    with torch.device("meta"):  # names and shapes, but no memory
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(args.model, local_files_only=True)
    export(model, tokenizer, newest_checkpoint(args.folder), args.export)


def parse_arguments():
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model",
        default="tiny-codellama",
        help="model that the training started from: its configuration and tokenizer are used",
    )
    parser.add_argument(
        "--folder", default="runs/sharded_checkpoint", help="folder with the checkpoints of the training"
    )
    parser.add_argument("--export", default="runs/exported", help="folder for the trained model")
    args = parser.parse_args()
    check_export(parser, args)
    return args


def export(model, tokenizer, checkpoint, folder):
    """Assemble and write one layer at a time, and record which parameter is in which file."""
    os.makedirs(folder, exist_ok=True)
    shapes, files = model.state_dict(), {}
    for layer, names in groupby(shapes, lambda name: ".".join(name.split(".")[:3])):
        weights = {name: torch.empty(shapes[name].shape) for name in names}
        # dcp.load reads only the requested tensors, whatever the number of shards. The keys are those of TrainingState in the
        # training program.
        dcp.load({"state": {"model": weights}}, checkpoint_id=checkpoint, no_dist=True)
        save_file(weights, f"{folder}/{layer}.safetensors", metadata={"format": "pt"})
        files |= dict.fromkeys(weights, f"{layer}.safetensors")
    with open(f"{folder}/model.safetensors.index.json", "w") as index:
        json.dump({"metadata": {}, "weight_map": files}, index)
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"{checkpoint} is now a model for transformers: {folder}")


if __name__ == "__main__":
    main()
