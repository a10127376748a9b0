"""The training of one_process.py by DeepSpeed's ZeRO: stage 1 spreads the moments, 2 the gradients too, 3 the weights as well.

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
    parser.add_argument("--stage", type=int, choices=[1, 2, 3], default=1, help="of ZeRO")


def train(device, args):
    model = load_model(args).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = {
        "train_micro_batch_size_per_gpu": SEQUENCES // dist.get_world_size(),
        "gradient_clipping": 0.0,  # DeepSpeed's default is 1
        "zero_optimization": {
            "stage": args.stage,
            "reduce_bucket_size": 2**20,  # gradients in a message; the default makes room for 500 million of them
            "stage3_max_live_parameters": 0,  # each layer's weights are freed at once, as those of a large model are
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
