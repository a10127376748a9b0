"""Exercise 2, TODO 4: turn a sharded checkpoint into a model that plain transformers loads.
One process is enough, on any machine. It reads the newest checkpoint, one layer at a time.

Run it:    python 04_model_parallel_with_fsdp/exercise2_export.py --folder runs/sharded_checkpoint
Check it:  ./workshop.sh check 04_model_parallel_with_fsdp/exercise2_sharded_checkpoint.py
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
    # TODO 4, step a: write one file per layer, because the whole model may not fit into memory. model.state_dict() has the names
    # and shapes of all parameters, layer by layer. Divide the names into one group per layer.
    # Look up: itertools.groupby
    # Step b: for each group, create empty tensors, let DCP fill them from the checkpoint, and save them to a file.
    # Look up: torch.distributed.checkpoint.load, its argument no_dist; safetensors.torch.save_file
    # Step c: write the index, model.safetensors.index.json. Its "weight_map" says which parameter is in which file.
    # Step d: transformers also needs the configuration, the generation configuration and the tokenizer. Save them to the folder.
    # Look up: save_pretrained


if __name__ == "__main__":
    main()
