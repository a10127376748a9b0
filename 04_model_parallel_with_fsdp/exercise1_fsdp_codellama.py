"""Exercise 1: from DDP to FSDP. Each rank stores a shard of the model, and gathers a layer only to compute it.
This program is finetune_ddp.py with three TODOs, and it works as delivered and after each TODO.
Do the TODOs in order, and the steps of each TODO in the order of their letters. Run and check it after each TODO.

Run it:    04_model_parallel_with_fsdp/exercise1_run_fsdp_codellama.sh --steps 40
Check it:  ./workshop.sh check 04_model_parallel_with_fsdp/exercise1_fsdp_codellama.py
"""

import os
import time

from workshop.training.launcher import exit_with_launcher

exit_with_launcher()  # this process must end if torchrun is killed (kill -9); before the slow imports

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP  # TODO 1, step e: delete this import.
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, DistributedSampler, Subset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from workshop.data.code import load_blocks
from workshop.data.codellama import weight_files
from workshop.tensors import bf16_is_fast
from workshop.training.arguments import ArgumentParser, positive_float, positive_int
from workshop.training.finetuning import TrainingLog, check_finetuning

SEED = 42
PROMPT = "class Reader:\n    def __init__(self, path):\n"
REPORT_EVERY = 20  # steps


@record  # torchrun then shows the traceback of the rank that failed first
def main():
    args = parse_arguments()
    device = choose_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(dist.get_default_backend_for_device(device))
    try:
        train(device, args)
    finally:
        dist.destroy_process_group()


def parse_arguments():
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny-codellama", help="or codellama (fetch it first), or a folder")
    parser.add_argument(
        "--data", default="stdlib", help='or chess (fetch it first), or a file of JSON lines with a "text"'
    )
    parser.add_argument("--skip-broken", action="store_true", help='skip lines that are not JSON with a "text"')
    parser.add_argument("--steps", type=positive_int, default=150)
    parser.add_argument("--batch-size", type=positive_int, default=4, help="sequences per batch and process")
    parser.add_argument("--sequence-length", type=positive_int, default=128, help="tokens per sequence")
    parser.add_argument("--learning-rate", type=positive_float, default=3e-3, help="the peak; use 2e-5 for codellama")
    parser.add_argument("--folder", default="runs/fsdp_codellama", help="folder for the results of the run")
    args = parser.parse_args()
    check_finetuning(parser, args, "fsdp")
    return args


def choose_device(local_rank):
    # In a CUDA build, current_accelerator() returns "cuda" even without a GPU, so ask is_available() first.
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    torch.accelerator.set_device_index(local_rank % torch.accelerator.device_count())  # 0 if only one GPU is visible
    return torch.accelerator.current_accelerator()


def train(device, args):
    torch.manual_seed(SEED)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tokenizer = AutoTokenizer.from_pretrained(args.model, local_files_only=True)
    model = load_model(args, device)
    # The weight decay is PyTorch's default, 0.01, which is small. Most language models are trained with these betas.
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.95))
    # The learning rate rises during the first 15 % of the steps and then falls, both along a cosine.
    schedule = OneCycleLR(optimizer, args.learning_rate, args.steps, pct_start=0.15, cycle_momentum=False)
    log = TrainingLog(args, device)

    train_set, validation_set = load_blocks(args.data, tokenizer, args.sequence_length, args.skip_broken)
    sampler = DistributedSampler(train_set, seed=SEED, drop_last=True)
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)
    count = max(1, min(len(validation_set), 64) // world_size) * world_size  # the same number for each process
    validation_loader = DataLoader(Subset(validation_set, range(rank, count, world_size)), args.batch_size)

    validation_loss = evaluate(model, validation_loader, device)
    log.begin(validation_loss, complete(model, tokenizer, device))
    losses, start = [], time.perf_counter()
    for step, batch in zip(range(1, args.steps + 1), batches(train_loader, sampler), strict=False):
        batch = batch.to(device)
        model.train()
        # TODO 2, step b (step a is in precision): the policy replaces autocast, so compute the loss without the with statement.
        with autocast(device):
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss  # the model shifts the labels itself
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

        if step % REPORT_EVERY == 0 or step == args.steps:
            losses = torch.stack(losses)
            dist.all_reduce(losses, dist.ReduceOp.AVG)
            losses = losses.tolist()  # waits for the device
            seconds = time.perf_counter() - start
            log.write(step, losses, evaluate(model, validation_loader, device), seconds)
            losses, start = [], time.perf_counter()
    log.end(complete(model, tokenizer, device))


def load_model(args, device):
    """Return the model in float32, whatever the data type of its files: AdamW's small updates would round to zero in bfloat16."""
    # TODO 3, step a: from_pretrained() puts the whole model into the memory of every process: 27 GB for CodeLlama-7b in
    # float32. Create the model on the meta device instead, from its configuration, in float32. It then has no memory yet.
    # Look up: torch.device("meta") as a context manager; AutoConfig.from_pretrained, AutoModelForCausalLM.from_config
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, local_files_only=True).to(device)
    model = distribute(model, device)
    # TODO 3, step b: allocate memory for the shards of this rank, on the device. It contains arbitrary values.
    # Look up: torch.nn.Module.to_empty
    # Step c: the buffers of the rotary embedding also contain arbitrary values now, and no file contains the right ones. Create
    # this module again from the configuration. If you forget it, the model confuses the positions, and you see no error.
    # Look up: model.model.rotary_emb
    # Step d: call load_weights(), which fills the shards. Step e is in that function.
    return model


def distribute(model, device):
    # TODO 1, step a: FSDP needs to know which ranks share the model. Create a mesh of all ranks, with one dimension.
    # Look up: torch.distributed.device_mesh.init_device_mesh
    # Step b: make each layer a communication group of its own, so that a rank gathers only one layer at a time. Use the mesh
    # and the policy of precision().
    # Look up: torch.distributed.fsdp.fully_shard, its arguments mesh and mp_policy; model.model.layers
    # Step c: make the rest of the model the last group, in the same way: embedding, last norm and output layer. Return the model.
    """Wrap the model in DDP: each process has the same parameters, and backward() averages the gradients."""
    return DDP(model)


def precision(device):
    """Return the data types for computation and communication. The shards themselves stay in float32."""
    # TODO 2, step a: let FSDP gather the parameters and compute in bfloat16 if the device is fast in it. The all-gathers then
    # communicate half the bytes. Always sum the gradients in float32, because a sum in bfloat16 loses small gradients.
    # Look up: MixedPrecisionPolicy, its arguments param_dtype and reduce_dtype; bf16_is_fast in workshop/tensors.py
    return MixedPrecisionPolicy()


# TODO 2, step d: delete this function.
def autocast(device):
    return torch.autocast(device.type, torch.bfloat16, enabled=bf16_is_fast(device))


@torch.no_grad()
def load_weights(model, folder):
    """Read only this process's rows of each parameter."""
    files = weight_files(folder)
    for name, weight in model.named_parameters():
        # TODO 3, step e: fully_shard has divided the rows of each parameter among the ranks, as torch.chunk would. Read only
        # the rows of this rank from the file, and copy them into its shard.
        # Look up: torch.chunk; safe_open and get_slice of safetensors; to_local of a DTensor
        pass


def batches(loader, sampler):
    """Yield batches without end: the batches of one epoch after those of the previous one."""
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


@torch.no_grad()
def evaluate(model, loader, device):
    """Return the mean loss per token over the sequences of all processes."""
    model.eval()
    losses = torch.zeros(2, device=device)
    for batch in loader:
        batch = batch.to(device)
        # TODO 2, step c: do the same here.
        with autocast(device):
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        losses += torch.stack([loss * len(batch), torch.full_like(loss, len(batch))])
    dist.all_reduce(losses)
    total, sequences = losses.tolist()
    return total / sequences


@torch.no_grad()
def complete(model, tokenizer, device):
    """Return the prompt and the text with which the model completes it."""
    model.eval()
    prompt = tokenizer(PROMPT, return_tensors="pt").to(device)
    # TODO 1, step d: fully_shard puts no wrapper around the model, so call generate() of the model itself.
    tokens = model.module.generate(**prompt, max_new_tokens=40, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    return tokenizer.decode(tokens[0])


if __name__ == "__main__":
    main()
