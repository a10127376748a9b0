"""Fine-tune a language model for code with ZeRO-3: each process stores a shard of parameters, gradients and optimizer state.
It is finetune_ddp.py of stage 04 with DeepSpeed's engine. Compare it with FSDP in exercise1_fsdp_codellama.py of stage 04.

One process:  torchrun --standalone --nproc-per-node=1 05_deepspeed/zero_codellama.py
N processes:  torchrun --standalone --nproc-per-node=2 05_deepspeed/zero_codellama.py --steps 40
Slurm:        srun --ntasks=1 --gpus=4 --cpus-per-task=32 torchrun --standalone --nproc-per-node=4 zero_codellama.py
"""

import os
import time

from workshop.training.deepspeed import require_deepspeed
from workshop.training.launcher import exit_with_launcher

exit_with_launcher()  # this process must end if torchrun is killed (kill -9); before the slow imports
require_deepspeed()  # ends with one line if DeepSpeed is missing; selects the CPU on a machine without a GPU

import deepspeed
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, DistributedSampler, Subset
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.integrations import HfDeepSpeedConfig

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
    parser.add_argument("--folder", default="runs/zero_codellama", help="folder for the results of the run")
    args = parser.parse_args()
    check_finetuning(parser, args, "zero3")
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
    config = configuration(device, args)
    # While this object exists, from_pretrained() shards each parameter over the processes.
    for_transformers = HfDeepSpeedConfig(config)  # noqa: F841
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, local_files_only=True)
    # The weight decay is PyTorch's default, 0.01, which is small. Most language models are trained with these betas.
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.95))
    # The learning rate rises during the first 15 % of the steps and then falls, both along a cosine.
    schedule = OneCycleLR(optimizer, args.learning_rate, args.steps, pct_start=0.15, cycle_momentum=False)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)
    log = TrainingLog(args, device)

    train_set, validation_set = load_blocks(args.data, tokenizer, args.sequence_length, args.skip_broken)
    sampler = DistributedSampler(train_set, seed=SEED, drop_last=True)
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)
    count = max(1, min(len(validation_set), 64) // world_size) * world_size  # the same number for each process
    validation_loader = DataLoader(Subset(validation_set, range(rank, count, world_size)), args.batch_size)

    validation_loss = evaluate(engine, validation_loader, device)
    log.begin(validation_loss, complete(engine, tokenizer, device))
    losses, start = [], time.perf_counter()
    for step, batch in zip(range(1, args.steps + 1), batches(train_loader, sampler), strict=False):
        batch = batch.to(device)
        engine.train()
        loss = engine(input_ids=batch, labels=batch, use_cache=False).loss  # the model shifts the labels itself
        engine.backward(loss)
        engine.step()  # clips the gradients, updates parameters and learning rate, and sets the gradients to zero
        losses.append(loss.detach())

        if step % REPORT_EVERY == 0 or step == args.steps:
            losses = torch.stack(losses)
            dist.all_reduce(losses, dist.ReduceOp.AVG)
            losses = losses.tolist()  # waits for the device
            seconds = time.perf_counter() - start
            log.write(step, losses, evaluate(engine, validation_loader, device), seconds)
            losses, start = [], time.perf_counter()
    log.end(complete(engine, tokenizer, device))


def configuration(device, args):
    """Return the configuration of DeepSpeed, with the precision and the clipping that finetune_ddp.py has in its loop."""
    return {
        "train_micro_batch_size_per_gpu": args.batch_size,
        "gradient_clipping": 1.0,
        "torch_autocast": {"enabled": bf16_is_fast(device), "dtype": "bfloat16"},
        "zero_optimization": {"stage": 3},
    }


def batches(loader, sampler):
    """Yield batches without end: the batches of one epoch after those of the previous one."""
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


@torch.no_grad()
def evaluate(engine, loader, device):
    """Return the mean loss per token over the sequences of all processes."""
    engine.eval()
    losses = torch.zeros(2, device=device)
    for batch in loader:
        batch = batch.to(device)
        loss = engine(input_ids=batch, labels=batch, use_cache=False).loss
        losses += torch.stack([loss * len(batch), torch.full_like(loss, len(batch))])
    dist.all_reduce(losses)
    total, sequences = losses.tolist()
    return total / sequences


@torch.no_grad()
def complete(engine, tokenizer, device):
    """Return the prompt and the text with which the model completes it."""
    engine.eval()
    prompt = tokenizer(PROMPT, return_tensors="pt").to(device)
    tokens = engine.module.generate(**prompt, max_new_tokens=40, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    return tokenizer.decode(tokens[0])


if __name__ == "__main__":
    main()
