"""Fine-tune a language model for code with DDP: each process stores all parameters, gradients and optimizer states.
It computes in bfloat16 if the device is fast in it, clips the gradients, warms up the learning rate, and writes a completion of
a prompt before and after the training.

One process:  torchrun --standalone --nproc-per-node=1 04_model_parallel_with_fsdp/finetune_ddp.py
N processes:  torchrun --standalone --nproc-per-node=2 04_model_parallel_with_fsdp/finetune_ddp.py
Slurm:        srun --ntasks=1 --gpus=4 --cpus-per-task=32 04_model_parallel_with_fsdp/run_finetune_ddp.sh --model codellama
"""

import os
import time

from workshop.training.launcher import exit_with_launcher

exit_with_launcher()  # this process must end if torchrun is killed (kill -9); before the slow imports

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, DistributedSampler, Subset
from transformers import AutoModelForCausalLM, AutoTokenizer

from workshop.data.code import load_blocks
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
    parser.add_argument("--folder", default="runs/finetune_ddp", help="folder for the results of the run")
    args = parser.parse_args()
    check_finetuning(parser, args)
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
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, local_files_only=True).to(device)
    model = distribute(model, device)
    return model


def distribute(model, device):
    """Wrap the model in DDP: each process has the same parameters, and backward() averages the gradients."""
    return DDP(model)


def autocast(device):
    return torch.autocast(device.type, torch.bfloat16, enabled=bf16_is_fast(device))


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
    tokens = model.module.generate(**prompt, max_new_tokens=40, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    return tokenizer.decode(tokens[0])


if __name__ == "__main__":
    main()
