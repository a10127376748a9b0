"""Train with ZeRO of DeepSpeed: stage 1 shards the optimizer state, stage 2 also the gradients, and stage 3 also the parameters.

Run it:  torchrun --standalone --nproc-per-node=2 strategies/zero.py --stage 1 --steps 20
"""

from workshop.training.deepspeed import require_deepspeed

require_deepspeed()

import deepspeed
import torch
import torch.distributed as dist

from workshop.training.strategies import (
    SEQUENCES,
    Report,
    choose_device,
    load_batches,
    load_model,
    loss_of,
    parse_arguments,
)


def main():
    args = parse_arguments(__doc__, options)
    device = choose_device()
    dist.init_process_group(dist.get_default_backend_for_device(device))
    train(device, args)
    dist.destroy_process_group()


def options(parser):
    parser.add_argument("--stage", type=int, choices=[1, 2, 3], default=1, help="stage of ZeRO")


def train(device, args):
    model = load_model(args).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = {
        "train_micro_batch_size_per_gpu": SEQUENCES // dist.get_world_size(),
        "gradient_clipping": 0.0,  # switch off gradient clipping; the default is 1.0
        "zero_optimization": {
            "stage": args.stage,
            "reduce_bucket_size": 2**20,  # gradients per message; the default, 500 million, needs a much larger buffer
            "stage3_max_live_parameters": 0,  # free the parameters of each layer after its use, as in a large model
            "stage3_max_reuse_distance": 0,
        },
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    report = Report(args, device)
    for batch in load_batches(args, dist.get_rank(), dist.get_world_size()):
        loss = loss_of(engine, batch.to(device))
        engine.backward(loss)
        engine.step()
        report.step(loss)
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        report.end(engine.module.state_dict())


if __name__ == "__main__":
    main()
