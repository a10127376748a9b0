"""The rules about a changing number of ranks: mistakes that they must name, and correct styles that must pass."""

from check.bank.case import mistake, style
from check.bank.cases import bank_tests
from check.bank.elastic import AGAIN, BATCHES, ELASTIC, ENDPOINT, ID, LOSS, MEAN, RANGE, REST, STEP

MISTAKES = (
    # ---- what the runner tells torchrun
    mistake(
        "elastic-two-nodes-exactly",
        ELASTIC,
        "nodes-fixed",
        "torchrun waits for two nodes.",
        runner=((RANGE, "--nnodes=2"),),
    ),
    mistake(
        "elastic-at-least-two-nodes",
        ELASTIC,
        "nodes-fixed",
        "One node that is left cannot continue alone.",
        runner=((RANGE, "--nnodes=2:3"),),
    ),
    mistake(
        "elastic-id-of-the-process",
        ELASTIC,
        "nodes-apart",
        "Each start of the runner has its own id, so the nodes do not meet.",
        runner=((ID, "--rdzv-id=$$"),),
    ),
    mistake(
        "elastic-endpoint-is-fixed",
        ELASTIC,
        "nodes-apart",
        "Each node meets only itself.",
        runner=((ENDPOINT, "--rdzv-endpoint=localhost:29400"),),
    ),
    # ---- the global batch
    mistake(
        "elastic-batch-per-rank",
        ELASTIC,
        "batch-follows-ranks",
        "The global batch grows with the number of ranks.",
        (BATCHES, "    batch_size = batch_size * dist.get_world_size()\n" + BATCHES),
    ),
    mistake(
        "elastic-parts-rounded-down",
        ELASTIC,
        "batch-follows-ranks",
        "With three ranks, each gets three of ten samples, and one is left out.",
        (
            "[batch[rank::world_size].tolist()",
            "[batch[rank::world_size].tolist()[: args.batch_size // world_size]",
        ),
    ),
    mistake(
        "elastic-parts-not-weighted",
        ELASTIC,
        "parts-unweighted",
        "DDP averages the means of parts of different sizes.",
        (LOSS, MEAN),
    ),
    mistake(
        "elastic-sum-divided-by-ddp",
        ELASTIC,
        "parts-unweighted",
        "DDP divides by the number of ranks, so the gradient shrinks with it.",
        ("loss * world_size / args.batch_size", "loss / args.batch_size"),
    ),
    mistake(
        "elastic-rate-scaled",
        ELASTIC,
        "rate-follows-ranks",
        "The learning rate follows the number of ranks, but the global batch does not.",
        (
            STEP,
            STEP + "    for group in optimizer.param_groups:\n        group['lr'] = args.learning_rate * world_size\n",
        ),
    ),
    # ---- the rest of the epoch
    mistake(
        "elastic-epoch-again",
        ELASTIC,
        "rest-misdealt",
        "The epoch begins again, so its first samples are trained on twice.",
        (STEP, "    first_step = 0\n"),
    ),
    mistake(
        "elastic-every-epoch-cut",
        ELASTIC,
        "rest-misdealt",
        "The later epochs also begin at the step of the checkpoint.",
        (AGAIN, ""),
    ),
    mistake(
        "elastic-counts-the-rest",
        ELASTIC,
        "saves-elsewhere",
        "After a restart, the end of an epoch is taken to come after as many steps as are left, so it saves elsewhere.",
        (
            "args.batch_size)\n        parts = [batch[rank::world_size].tolist() for batch in batches[first_step:]]\n",
            "args.batch_size)[first_step:]\n        parts = [batch[rank::world_size].tolist() for batch in batches]\n",
        ),
    ),
    mistake(
        "elastic-epoch-given-up",
        ELASTIC,
        "rest-misdealt",
        "The rest of the epoch is left out.",
        (
            '    first_epoch = checkpoint["epoch"]\n',
            '    first_epoch = checkpoint["epoch"] + (checkpoint["step"] > 0)\n',
        ),
        (STEP, "    first_step = 0\n"),
    ),
    mistake(
        "elastic-other-order",
        ELASTIC,
        "rest-misdealt",
        "The order depends on the number of ranks, so the rest of the epoch contains samples from before.",
        ("manual_seed(SEED + epoch)", "manual_seed(SEED + epoch + 100 * dist.get_world_size())"),
    ),
)

STYLES = (
    style(
        "elastic-solution-with-its-runner",
        ELASTIC,
        "The solution and its runner.",
        runner=(("--rdzv-conf=last_call_timeout=5", "--rdzv-conf last_call_timeout=5"),),
    ),
    style(
        "elastic-runner-with-spaces",
        ELASTIC,
        "Options with spaces, underscores and other values.",
        runner=(
            (RANGE, "--nnodes 1:8"),
            (ID, "--rdzv_id job-7"),
            (ENDPOINT, '--rdzv_endpoint "$ENDPOINT"'),
            ("--max-restarts=100", "--max_restarts 20"),
        ),
    ),
    style(
        "elastic-contiguous-parts",
        ELASTIC,
        "Each rank gets a contiguous part of the global batch.",
        ("[batch[rank::world_size].tolist()", "[batch.tensor_split(world_size)[rank].tolist()"),
    ),
    style(
        "elastic-weighted-mean",
        ELASTIC,
        "The mean of the rank, weighted with its share of the global batch.",
        (LOSS, "labels.to(device))\n            loss = loss * len(labels) * world_size / args.batch_size\n"),
    ),
    style(
        "elastic-divided-after-backward",
        ELASTIC,
        "The sum is scaled in the gradients.",
        ("            loss = loss * world_size / args.batch_size\n", ""),
        (
            "            loss.backward()\n",
            "            loss.backward()\n            for weight in model.parameters():\n"
            "                weight.grad *= world_size / args.batch_size\n",
        ),
    ),
    style(
        "elastic-position-in-samples",
        ELASTIC,
        "The checkpoint counts samples, and the rest is shuffled by slicing the order.",
        ('"epoch": epoch, "step": step}', '"epoch": epoch, "step": step, "samples": step * 10}'),
        (STEP, '    first_step = checkpoint.get("samples", 0) // args.batch_size\n'),
    ),
    style(
        "elastic-one-loader-for-all-epochs",
        ELASTIC,
        "A list of all steps of all epochs, of which the finished ones are skipped.",
        (REST, "batches]\n        parts = parts[first_step:]\n"),
    ),
    style(
        "elastic-rank-0-sends-the-checkpoint",
        ELASTIC,
        "Rank 0 reads the file, and sends it to the others.",
        (
            '    checkpoint = torch.load(path, map_location="cpu", weights_only=True)\n',
            '    sent = [torch.load(path, map_location="cpu", weights_only=True) if dist.get_rank() == 0 else None]\n'
            "    dist.broadcast_object_list(sent, src=0)\n    checkpoint = sent[0]\n",
        ),
    ),
)

test_replay, test_for_real = bank_tests(__file__, MISTAKES, STYLES)
