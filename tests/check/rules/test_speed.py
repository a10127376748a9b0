"""The rules about speed: mistakes that they must name, and correct styles that must pass."""

from check.bank import ddp, sharded
from check.bank.case import mistake, style
from check.bank.cases import bank_tests

SINGLE_FROM_TENSORS = """\
def train_one_epoch(model, images, labels, steps, optimizer):
    model.train()
    losses = []
    for chosen in steps:
        with torch.autocast(images.device.type, torch.bfloat16):
            loss = F.cross_entropy(model(images[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


"""

MISTAKES = (
    # ---- precision
    mistake(
        "sharded-no-policy",
        sharded.FSDP,
        "precision",
        "Without a policy everything is computed in float32.",
        (sharded.POLICY, "    return MixedPrecisionPolicy()\n"),
    ),
    # ---- data-per-sample
    mistake(
        "fast-prepares-each-sample",
        ddp.FAST,
        "data-per-sample",
        "Every sample goes through its transform again in each epoch.",
        (
            "(on_device(part, device) for part in load_dataset(args.dataset, transform))",
            "load_dataset(args.dataset, transform)",
        ),
        ("batch_size=None, sampler=torch.tensor([*train_batches], device=device)", "batch_sampler=train_batches"),
        ("batch_size=None, sampler=test_batches", "batch_sampler=test_batches"),
    ),
    # ---- host-sync
    mistake(
        "fast-asks-for-each-loss",
        ddp.FAST,
        "host-sync",
        "loss.item() waits for the device in every step.",
        ("losses[step] = loss.detach()", "losses[step] = loss.item()"),
    ),
    # ---- slower
    mistake(
        "fast-sleeps",
        ddp.FAST,
        "slower",
        "Every step sleeps for a fifth of a second.",
        ("        optimizer.step()\n", "        optimizer.step()\n        time.sleep(0.2)\n"),
        real=True,
    ),
)

STYLES = (
    style(
        "single-from-tensors-in-bfloat16",
        ddp.SINGLE,
        "Batches are picked from one tensor, the model computes in bfloat16, and no value is asked for before the epoch ends.",
        (ddp.SINGLE_DATA, ddp.STACKED),
        (
            "        sampler.generator.manual_seed(SEED + epoch)\n",
            "        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SEED + epoch))\n"
            "        steps = order.to(device).split(args.batch_size)[: len(images) // args.batch_size]\n",
        ),
        (
            "        losses = train_one_epoch(model, train_loader, optimizer, device)\n",
            "        losses = train_one_epoch(model, images, labels, steps, optimizer)\n",
        ),
        (ddp.SINGLE_TRAIN_ONE, SINGLE_FROM_TENSORS),
    ),
)

test_replay, test_for_real = bank_tests(__file__, MISTAKES, STYLES)
