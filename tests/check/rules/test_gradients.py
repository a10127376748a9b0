"""The rules about gradients: mistakes that they must name, and correct styles that must pass."""

from check.bank import ddp, second, sharded, unaveraged, zero
from check.bank.case import mistake, style
from check.bank.cases import bank_tests

MISTAKES = (
    mistake(
        "fakes-that-are-not-detached",
        second.GAN,
        "gradients-differ",
        "The backward pass of the discriminator also goes through the generator, whose own step then has other gradients.",
        ("discriminator(fake.detach()), zeros)", "discriminator(fake), zeros)"),
        ("loss_fake.backward()", "loss_fake.backward(retain_graph=True)"),
    ),
    mistake(
        "rate-from-a-sum-of-rank-0",
        second.TAGGER,
        "weights-differ",
        "Only rank 0 gets the sums, but each rank sets its learning rate by the accuracy.",
        (second.COUNTS, second.COUNTS_TO_ONE),
        (second.EVALUATE, second.EVALUATE + second.RATE),
    ),
    mistake(
        "local-steps-from-different-parameters",
        second.TAGGER,
        "weights-differ",
        "Each rank takes three steps of its own, but no rank begins with the parameters of the others.",
        ("torch.manual_seed(SEED)", "torch.manual_seed(SEED + rank)"),
        *second.LOCAL_STEPS,
    ),
    # ---- gradients-differ
    mistake(
        "adapter-added-after-wrapping",
        second.PROGRAM,
        "gradients-differ",
        "DistributedDataParallel averages the gradients of the parameters that the model had when it was wrapped.",
        (second.WRAP, ""),
        (
            second.MODEL,
            f"{second.MODEL}{second.WRAP}"
            "    model.head = nn.Sequential(model.head, nn.Linear(vocabulary_size, vocabulary_size).to(device))\n",
        ),
    ),
    *unaveraged.MISTAKES,
    mistake(
        "no-sync-on-the-last-batch-too",
        ddp.METRICS,
        "gradients-differ",
        "no_sync() surrounds all batches, so the gradients are never averaged and the replicas diverge.",
        (ddp.NO_SYNC, "        with model.no_sync():\n"),
    ),
    # ---- clipping-differs
    mistake(
        "norm-of-a-shard",
        second.FSDP1,
        "clipping-differs",
        "The function of PyTorch for plain tensors sees the shards of the rank only.",
        ("model.clip_grad_norm_(0.25)", "nn.utils.clip_grad_norm_(model.parameters(), 0.25)"),
    ),
    # ---- models-differ
    mistake(
        "average-that-only-rank-0-updates",
        second.TAGGER,
        "models-differ",
        "Only rank 0 updates the moving average, but all ranks evaluate with theirs.",
        ("import argparse\n", "import argparse\nimport copy\n"),
        ("    model = Tagger()\n", "    model = Tagger()\n    average = copy.deepcopy(model).requires_grad_(False)\n"),
        (
            "            optimizer.step()\n",
            "            optimizer.step()\n            if rank == 0:\n                follow(average, model)\n",
        ),
        ("@torch.no_grad()\n", second.FOLLOW + "@torch.no_grad()\n"),
        ("evaluate(model, test_loader)", "evaluate(average, test_loader)"),
    ),
    mistake(
        "average-copied-before-the-broadcast",
        second.TAGGER,
        "models-differ",
        "Each rank begins with its own parameters, and the moving average is copied before DDP makes them equal.",
        ("import argparse\n", "import argparse\nimport copy\n"),
        ("torch.manual_seed(SEED)", "torch.manual_seed(SEED + rank)"),
        ("    model = Tagger()\n", "    model = Tagger()\n    average = copy.deepcopy(model).requires_grad_(False)\n"),
        (
            "            optimizer.step()\n",
            "            optimizer.step()\n"
            "            for old, new in zip(average.parameters(), model.parameters(), strict=True):\n"
            "                old.lerp_(new.detach(), 0.1)\n",
        ),
        ("evaluate(model, test_loader)", "evaluate(average, test_loader)"),
        (
            '"model": model.state_dict(), "optimizer"',
            '"model": model.state_dict(), "average": average.state_dict(), "optimizer"',
        ),
        ("load(args.checkpoint, model, optimizer)", "load(args.checkpoint, model, average, optimizer)"),
        ("def load(path, model, optimizer):", "def load(path, model, average, optimizer):"),
        (
            '    model.load_state_dict(checkpoint["model"])\n',
            '    model.load_state_dict(checkpoint["model"])\n    average.load_state_dict(checkpoint["average"])\n',
        ),
    ),
    # ---- mean-of-means
    mistake(
        "mean-of-the-tokens-of-each-rank",
        second.TAGGER,
        "mean-of-means",
        "Each rank divides by the number of its own tokens, and all ranks count the same.",
        (second.TOKEN_MEAN, ")"),
    ),
    mistake(
        "mean-of-the-squares-of-each-rank",
        second.TAGGER,
        "mean-of-means",
        "The loss is no cross entropy, and each rank takes the mean over its own tokens.",
        second.OWN_SQUARES,
    ),
    mistake(
        "world-size-forgotten",
        second.TAGGER,
        "gradient-scale",
        "The sum is divided by the tokens of all ranks, and DDP divides again by the number of processes.",
        (second.TOKEN_MEAN, second.TOKEN_MEAN.replace("* world_size ", "")),
    ),
    mistake(
        "held-out-biases-not-averaged",
        ddp.SPAWN,
        ("gradients-differ", "weights-differ"),
        "The gradients of the weights are averaged by hand, those of the biases are not.",
        (ddp.WRAPPED + "\n", "ddp_model = model  # its gradients are averaged by hand\n"),
        (
            ddp.BACKWARD,
            ddp.BACKWARD + "        for name, parameter in model.named_parameters():\n"
            '            if name.endswith("weight"):\n'
            "                dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)\n",
        ),
        held_out=True,
    ),
    mistake(
        "held-out-weights-averaged-each-epoch",
        ddp.SPAWN,
        ("gradients-differ", "weights-differ"),
        "Each process trains alone for an epoch, then the parameters are averaged: in between they differ.",
        (ddp.WRAPPED + "\n", "ddp_model = model  # averaged once an epoch: that saves traffic\n"),
        (
            "        seconds = time.perf_counter() - start\n",
            "        for parameter in model.parameters():\n"
            "            dist.all_reduce(parameter.data, dist.ReduceOp.AVG)\n"
            "        seconds = time.perf_counter() - start\n",
        ),
        held_out=True,
    ),
    mistake(
        "held-out-head-outside-ddp",
        ddp.SPAWN,
        ("gradients-differ", "weights-differ"),
        "DDP wraps all layers but the last, whose gradients are not averaged.",
        ("import torch.multiprocessing as mp\n", "import torch.multiprocessing as mp\nfrom torch import nn\n"),
        (
            ddp.WRAPPED + "\n",
            "images_to_features = nn.Sequential(model.conv1, nn.ReLU(), model.conv2, nn.ReLU(), nn.MaxPool2d(2))\n"
            "    trunk = nn.Sequential(images_to_features, nn.Flatten(), model.fc1, nn.ReLU())\n"
            "    ddp_model = nn.Sequential(DDP(trunk), model.fc2)\n",
        ),
        held_out=True,
    ),
    mistake(
        "held-out-clipped-on-rank-0",
        ddp.SPAWN,
        ("gradients-differ", "weights-differ"),
        "Only rank 0 clips the averaged gradients, so its steps differ from those of rank 1.",
        (
            ddp.STEP,
            "        if dist.get_rank() == 0:  # where the norm is watched\n"
            "            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.1)\n" + ddp.STEP,
        ),
        held_out=True,
    ),
    mistake(
        "second-not-wrapped",
        second.PROGRAM,
        ("gradients-differ", "weights-differ"),
        "The model is not wrapped: each process trains its own.",
        (second.WRAP, "    ddp_model = model\n"),
    ),
    mistake(
        "second-forward-through-module",
        second.PROGRAM,
        ("gradients-differ", "weights-differ"),
        "The forward pass goes around DDP, which then averages nothing.",
        (second.FORWARD, "        logits = ddp_model.module(inputs.to(device))\n"),
    ),
    mistake(
        "second-never-in-step",
        second.PROGRAM,
        ("gradients-differ", "weights-differ"),
        "no_sync() surrounds every forward and backward pass, so the gradients are never averaged.",
        (
            second.FORWARD + second.LOSS + second.BACKWARD,
            "        with ddp_model.no_sync():\n"
            + "".join(
                " " * 4 + line for line in (second.FORWARD + second.LOSS + second.BACKWARD).splitlines(keepends=True)
            ),
        ),
    ),
    mistake(
        "accelerate-model-unprepared",
        zero.ACCELERATE,
        ("gradients-differ", "weights-differ"),
        "The model is not prepared, so no gradients are averaged.",
        (zero.PREPARE, "    model, optimizer = model.to(device), accelerator.prepare(optimizer)"),
    ),
    # ---- weights-differ
    mistake(
        "first-weights-of-its-own",
        ddp.SPAWN,
        "weights-differ",
        "The gradients are averaged by hand, but each rank draws its own initial parameters.",
        ("torch.manual_seed(SEED)  # the same initial parameters in every run", "torch.manual_seed(SEED + rank)"),
        (ddp.WRAPPED, "ddp_model = model"),
        (
            ddp.BACKWARD,
            ddp.BACKWARD + "        for parameter in model.parameters():\n"
            "            dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)\n",
        ),
    ),
    mistake(
        "held-out-learning-rate-by-rank",
        ddp.SPAWN,
        "weights-differ",
        "The learning rate grows with the rank instead of the number of processes.",
        (ddp.OPTIMIZER, ddp.OPTIMIZER.replace("1e-3", "1e-3 * (rank + 1)")),
        held_out=True,
    ),
    mistake(
        "held-out-resumed-on-rank-0",
        ddp.TORCHRUN,
        ("weights-differ", "optimizer-lost", "resume-differs"),
        "Only rank 0 reads the checkpoint: DDP broadcasts the parameters, but rank 1's optimizer has no state.",
        (
            ddp.LOAD,
            "    # One reader is enough: DDP hands rank 0's weights to all.\n"
            "    first_epoch = load_checkpoint(args.checkpoint, model, optimizer) if rank == 0 else 0\n"
            "    first_epoch = torch.tensor(first_epoch, device=device)\n"
            "    dist.broadcast(first_epoch, src=0)\n"
            "    first_epoch = first_epoch.item()\n",
        ),
        held_out=True,
    ),
    mistake(
        "sharded-never-reduces",
        sharded.FIT,
        ("weights-differ", "differs-from-one-process", "accumulation-scale", "not-sharded", "no-learning", "crash"),
        "The gradients are never reduced.",
        (sharded.SYNC, "            model.set_requires_gradient_sync(False)\n"),
    ),
    # ---- gradient-scale
    mistake(
        "gradients-summed-by-hand",
        ddp.SPAWN,
        "gradient-scale",
        "all_reduce sums by default: without a division the gradient is world_size times too large.",
        (ddp.WRAPPED, "ddp_model = model"),
        (
            ddp.BACKWARD,
            ddp.BACKWARD + "        for parameter in model.parameters():\n"
            "            dist.all_reduce(parameter.grad)\n",
        ),
    ),
    mistake(
        "held-out-hook-that-sums",
        ddp.TORCHRUN,
        ("gradient-scale", "differs-from-one-process"),
        "DDP's communication hook sums the gradients and does not divide: they are twice as large on all ranks.",
        (ddp.WRAPPED + "\n", ddp.WRAPPED + "\n" + "    ddp_model.register_comm_hook(None, reduce_bucket)\n"),
        (
            "def train_one_epoch(",
            "def reduce_bucket(state, bucket):\n"
            '    """Reduce a bucket of gradients over all processes."""\n'
            "    work = dist.all_reduce(bucket.buffer(), async_op=True)\n"
            "    return work.get_future().then(lambda future: future.value()[0])\n\n\n"
            "def train_one_epoch(",
        ),
        held_out=True,
    ),
    mistake(
        "loss-averaged-before-backward",
        ddp.TORCHRUN,
        "gradient-scale",
        "all_reduce averages the value of the loss; its gradient is only divided.",
        (ddp.BACKWARD, "        dist.all_reduce(loss)\n        loss = loss / dist.get_world_size()\n" + ddp.BACKWARD),
    ),
    mistake(
        "local-steps-then-the-sum-of-the-parameters",
        second.TAGGER,
        "gradient-scale",
        "Each rank takes three steps of its own, and then they add up their parameters without a division.",
        *second.LOCAL_STEPS[:-1],
        (second.LOCAL_STEPS[-1][0], second.LOCAL_STEPS[-1][1].replace(second.DIVIDED, second.SUMMED)),
    ),
    mistake(
        "outer-optimizer-with-the-sum-of-the-changes",
        second.TAGGER,
        "gradient-scale",
        "Each rank takes three steps of its own, and an outer optimizer gets the sum of the changes as gradients.",
        *second.outer_steps(divided=False),
    ),
    # ---- differs-from-one-process
    mistake(
        "clipped-before-averaging",
        ddp.TORCHRUN,
        ("differs-from-one-process", "clipping-differs"),
        "Each rank clips its own gradient before the average, which one process with the whole batch does not.",
        (ddp.WRAPPED, "ddp_model = model"),
        (
            ddp.BACKWARD,
            ddp.BACKWARD + "        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n"
            "        for parameter in model.parameters():\n"
            "            dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)\n",
        ),
    ),
    # ---- buffers-overwritten
    mistake(
        "queue-of-the-own-keys",
        second.MOCO,
        "buffers-overwritten",
        "Each rank appends only its own keys to a buffer, and DDP replaces the buffer with that of rank 0.",
        ("        self.enqueue(concat_all_gather(k))\n", "        self.enqueue(k)\n"),
    ),
    # ---- buffers-differ
    mistake(
        "offset-of-each-rank",
        second.TAGGER,
        "buffers-differ",
        "Each rank subtracts a running mean of its own batches, and DDP is told not to send buffers.",
        *second.centered("mean"),
    ),
    # ---- scaled-differently
    mistake(
        "running-mean-of-each-rank",
        second.REINFORCE,
        "scaled-differently",
        "Each rank scales the observations with the mean and the variance of its own ones.",
        *second.SHORT,
        ("        dist.all_reduce(moments)\n", ""),
        ("self.count += len(obs) * dist.get_world_size()", "self.count += len(obs)"),
    ),
)

STYLES = (
    *unaveraged.STYLES,
    style(
        "copy-of-the-loss-averaged-before-backward",
        ddp.TORCHRUN,
        "The reduced value is a copy that is only for printing.",
        (
            ddp.BACKWARD,
            "        shown = loss.clone()\n        dist.all_reduce(shown)\n        shown /= 2\n" + ddp.BACKWARD,
        ),
    ),
    style("mean-of-the-squares-of-all-ranks", second.TAGGER, "Divided by the tokens of all ranks.", second.ALL_SQUARES),
    style(
        "offset-of-all-ranks",
        second.TAGGER,
        "DDP is told not to send buffers, but each rank computes the same running mean.",
        *second.centered("average(mean)"),
    ),
    style(
        "outer-optimizer-with-the-average-of-the-changes",
        second.TAGGER,
        "Each rank takes three steps of its own, and an outer optimizer gets the average of the changes as gradients.",
        *second.outer_steps(divided=True),
    ),
    style(
        "running-mean-of-all-ranks",
        second.REINFORCE,
        "All ranks scale the observations with the mean and the variance of those of all ranks, without DDP.",
        *second.SHORT,
    ),
    style(
        "local-steps",
        second.TAGGER,
        "Each rank takes three steps of its own, and then they average.",
        *second.LOCAL_STEPS,
    ),
    style(
        "warmup-on-each-rank",
        second.TAGGER,
        "Before the model is wrapped, all ranks take the same steps on the same samples.",
        (
            second.OPTIMIZER,
            second.OPTIMIZER + "    for tokens, tags in DataLoader(Sequences(32, seed=3), 8, collate_fn=padded):\n"
            "        F.cross_entropy(model(tokens).flatten(0, 1), tags.flatten()).backward()\n"
            "        optimizer.step()\n        optimizer.zero_grad()\n",
        ),
    ),
    style(
        "rate-from-a-sum-of-rank-0-that-is-sent",
        second.TAGGER,
        "Only rank 0 gets the sums, but it sends them to the other ranks.",
        (second.COUNTS, second.COUNTS_TO_ONE + "    dist.broadcast(counts, 0)\n"),
        (second.EVALUATE, second.EVALUATE + second.RATE),
    ),
    style(
        "trainer-class-and-helpers",
        ddp.SPAWN,
        "A Trainer class, helpers for the wrap and the data, no step numbers, no progress bar.",
        (ddp.TRAIN, ddp.TRAINER),
    ),
    style(
        "wrapped-model-takes-the-name",
        ddp.SPAWN,
        "model is the wrapped model, and model.module the plain one.",
        (ddp.WRAP, "    model = DDP(model)\n"),
        (ddp.TRAIN_EPOCH, ddp.TRAIN_EPOCH.replace("ddp_model", "model")),
        ("evaluate(model, test_loader, device)", "evaluate(model.module, test_loader, device)"),
        (
            "save_checkpoint(args.checkpoint, model, optimizer, epoch)",
            "save_checkpoint(args.checkpoint, model.module, optimizer, epoch)",
        ),
    ),
    style(
        "gradients-averaged-by-hand",
        ddp.SPAWN,
        "Without DDP each gradient is summed over the ranks and divided by their number.",
        (
            ddp.WRAP,
            "    for weight in model.state_dict().values():\n        dist.broadcast(weight, src=0)\n",
        ),
        (ddp.TRAIN_EPOCH, ddp.TRAIN_EPOCH.replace("ddp_model", "model")),
        (
            ddp.BACKWARD,
            ddp.BACKWARD + "        for parameter in model.parameters():\n"
            "            dist.all_reduce(parameter.grad)\n"
            "            parameter.grad /= dist.get_world_size()\n",
        ),
    ),
    style(
        "gradients-in-one-flat-tensor",
        ddp.TORCHRUN,
        "Without DDP one all_reduce averages all gradients; the seed makes the initial parameters equal.",
        (ddp.WRAP, ""),
        (ddp.TRAIN_EPOCH, ddp.TRAIN_EPOCH.replace("ddp_model", "model")),
        (
            ddp.BACKWARD,
            ddp.BACKWARD + "        gradients = [parameter.grad for parameter in model.parameters()]\n"
            "        flat = torch.cat([gradient.flatten() for gradient in gradients])\n"
            "        dist.all_reduce(flat, dist.ReduceOp.AVG)\n"
            "        lengths = [gradient.numel() for gradient in gradients]\n"
            "        for gradient, mean in zip(gradients, flat.split(lengths), strict=True):\n"
            "            gradient.copy_(mean.view_as(gradient))\n",
        ),
    ),
    style(
        "gradients-averaged-in-hooks",
        ddp.TORCHRUN,
        "Without DDP a hook of each parameter averages its gradient during backward().",
        (
            ddp.WRAP,
            "    for parameter in model.parameters():\n"
            "        dist.broadcast(parameter.data, src=0)\n"
            "        parameter.register_post_accumulate_grad_hook(average)\n",
        ),
        (ddp.TRAIN_EPOCH, ddp.TRAIN_EPOCH.replace("ddp_model", "model")),
        (
            "def train_one_epoch(",
            "def average(parameter):\n    dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)\n\n\ndef train_one_epoch(",
        ),
    ),
    style(
        "ddp-with-options",
        ddp.TORCHRUN,
        "Gradients that are views of the buckets, a static graph, and a communication hook that averages.",
        (
            ddp.WRAP,
            "    options = {'gradient_as_bucket_view': True, 'static_graph': True, 'broadcast_buffers': False}\n"
            "    ddp_model = DDP(model, bucket_cap_mb=1, **options)\n"
            "    ddp_model.register_comm_hook(None, default_hooks.allreduce_hook)\n",
        ),
        (
            "from torch.distributed.elastic.multiprocessing.errors import record\n",
            "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks\n"
            "from torch.distributed.elastic.multiprocessing.errors import record\n",
        ),
    ),
    style(
        "bfloat16-autocast",
        ddp.TORCHRUN,
        "The forward pass is in bfloat16: two processes round differently from one, but train alike.",
        (
            ddp.FORWARD,
            "        with torch.autocast(device.type, torch.bfloat16):\n"
            "            loss = F.cross_entropy(model(images), labels)\n",
        ),
    ),
)

test_replay, test_for_real = bank_tests(__file__, MISTAKES, STYLES)
