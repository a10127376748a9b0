"""The rules about accelerate: mistakes that they must name, and correct styles that must pass."""

from check.bank import zero
from check.bank.case import mistake, style
from check.bank.cases import bank_tests

TEXTS = "tests/check/referee/accelerate_text/train.py"
EACH_LOSS = 'loss = F.cross_entropy(logits, batch["labels"], reduction="none")'
EACH_HIT = 'correct = (logits.argmax(-1) == batch["labels"]).float()'
MEANS = ((EACH_LOSS, EACH_LOSS.replace(', reduction="none"', "")), (EACH_HIT, EACH_HIT + ".mean()"))
EPOCHS = "    for epoch in range(start_epoch, args.epochs):\n"

MISTAKES = (
    mistake(
        "prepared-schedule-steps-once-per-process",
        TEXTS,
        "scheduled-per-process",
        "The learning rate falls twice in each epoch.",
        ("min((step + 1) / warmup, max(0.0, (total - step) / (total - warmup))))", "0.9**step)"),
        ("            schedule.step()\n            optimizer.zero_grad()", "            optimizer.zero_grad()"),
        (EPOCHS, EPOCHS + "        if epoch > start_epoch:\n            schedule.step()\n"),
    ),
    # ---- means-gathered
    mistake(
        "accelerate-gathers-means",
        TEXTS,
        "means-gathered",
        "The loss and the accuracy of each batch are gathered, but the last batch has fewer samples.",
        *MEANS,
    ),
    # ---- accelerator-idle
    mistake(
        "accelerate-optimizer-unprepared",
        zero.ACCELERATE,
        "accelerator-idle",
        "The optimizer is not given to prepare().",
        (zero.PREPARE, "    model = accelerator.prepare(model)"),
    ),
    mistake(
        "accelerate-loss-backward",
        zero.ACCELERATE,
        "accelerator-idle",
        "The program calls loss.backward() instead of accelerator.backward(loss).",
        ("        accelerator.backward(loss)", "        loss.backward()"),
    ),
    # ---- gathered-by-hand
    mistake(
        "accelerate-gathers-all",
        zero.ACCELERATE,
        ("gathered-by-hand", "metric-wrong", "evaluation-repeated"),
        "gather() keeps the samples that the loader repeated to fill the last batch.",
        (zero.GATHER, zero.GATHER.replace("gather_for_metrics", "gather")),
    ),
    # ---- saved-by-some
    mistake(
        "accelerate-rank-0-saves",
        zero.ACCELERATE,
        "saved-by-some",
        "Only rank 0 calls save_state(), so the random states of the other ranks are lost.",
        (zero.STATE, "    if accelerator.is_main_process:\n    " + zero.STATE),
    ),
    # ---- loader-by-hand
    mistake(
        "accelerate-sampler-by-hand",
        zero.ACCELERATE,
        "loader-by-hand",
        "A DistributedSampler divides the samples, and the loader is not prepared.",
        (
            zero.TRAIN,
            "    sampler = torch.utils.data.DistributedSampler(train_set, seed=SEED, drop_last=True)\n"
            "    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)\n",
        ),
        ("train_loader.set_epoch(epoch)", "sampler.set_epoch(epoch)"),
    ),
    # ---- state-by-hand
    mistake(
        "accelerate-saves-by-hand",
        zero.ACCELERATE,
        "state-by-hand",
        "torch.save() of model and optimizer leaves out the random states.",
        (
            zero.STATE,
            "    if accelerator.is_main_process:\n"
            '        os.makedirs(f"{folder}/unfinished")\n'
            '        torch.save(states(accelerator), f"{folder}/unfinished/state.pt")\n',
        ),
        (
            '    accelerator.load_state(f"{folder}/epoch-{epochs[-1]}")\n',
            '    saved = torch.load(f"{folder}/epoch-{epochs[-1]}/state.pt", weights_only=True)\n'
            "    accelerator.unwrap_model(accelerator._models[0]).load_state_dict(saved[0])\n"
            "    accelerator._optimizers[0].load_state_dict(saved[1])\n",
        ),
        (
            "def saved_epochs(",
            "def states(accelerator):\n"
            "    model = accelerator.unwrap_model(accelerator._models[0])\n"
            "    return model.state_dict(), accelerator._optimizers[0].state_dict()\n\n\n"
            "def saved_epochs(",
        ),
    ),
)

STYLES = (
    style(
        "accelerate-gathers-means-of-equal-batches",
        TEXTS,
        "All batches have the same number of samples, so the mean of their means is the mean of the samples.",
        *MEANS,
        ("make_texts(150, seed=1)", "make_texts(160, seed=1)"),
    ),
    style(
        "accelerate-all-at-once",
        zero.ACCELERATE,
        "One call of prepare() prepares everything.",
        (zero.PREPARE, "    model = model.to(device)"),
        (zero.TRAIN, "    train_loader = DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True)\n"),
        (
            zero.TEST,
            "    test_loader = DataLoader(test_set, args.batch_size)\n"
            "    model, optimizer, train_loader, test_loader = accelerator.prepare(\n"
            "        model, optimizer, train_loader, test_loader\n"
            "    )\n",
        ),
    ),
)

test_replay, test_for_real = bank_tests(__file__, MISTAKES, STYLES)
