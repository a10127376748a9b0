"""The rules about GPUs: mistakes that they must name, and correct styles that must pass. All run on pretended GPUs."""

from check.bank import ddp, gpus
from check.bank.case import mistake, style
from check.bank.cases import bank_tests

MISTAKES = (
    # ---- gpu-hidden
    mistake(
        "one-visible-gpu-for-all-ranks",
        gpus.GPUS,
        "gpu-hidden",
        "The program makes only GPU 0 visible, and each rank asks for the GPU of its local rank.",
        ("import torch\n", 'os.environ["CUDA_VISIBLE_DEVICES"] = "0"\n\nimport torch\n'),
    ),
    # ---- gpu-of-two-ranks
    mistake(
        "objects-through-gpu-0",
        gpus.GPUS,
        "gpu-of-two-ranks",
        "The tensors are on the GPU of the rank, but objects go through the current GPU, which is GPU 0 on both ranks.",
        (gpus.SET_DEVICE, ""),
        (gpus.GROUP, gpus.GROUP + "    dist.all_gather_object([None] * world_size, rank)\n"),
    ),
    mistake(
        "no-set-device",
        gpus.GPUS,
        "gpu-of-two-ranks",
        'Without set_device, "cuda" is GPU 0 in every process.',
        (gpus.SET_DEVICE, ""),
        (gpus.DEVICE, '    device = torch.device("cuda")\n'),
        (gpus.WRAP, "DistributedDataParallel(model)"),
    ),
    mistake(
        "cuda-0-in-every-rank",
        gpus.GPUS,
        "gpu-of-two-ranks",
        "The GPU is written into the program.",
        (gpus.SET_DEVICE, ""),
        (gpus.DEVICE, '    device = torch.device("cuda:0")\n'),
        (gpus.WRAP, "DistributedDataParallel(model, device_ids=[0])"),
    ),
    mistake(
        "figures-added-up-on-gpu-0",
        gpus.GPUS,
        "gpu-of-two-ranks",
        "The counts of the evaluation are on GPU 0 on both ranks, and a collective adds them up.",
        ("counts = torch.zeros(2, device=device)", 'counts = torch.zeros(2, device="cuda:0")'),
        (
            "            counts[0] += (model(x).argmax(1) == y).sum()\n",
            "            counts[0] += (model(x).argmax(1) == y).sum().item()\n",
        ),
    ),
    # ---- two-devices
    mistake(
        "labels-left-on-the-cpu",
        gpus.GPUS,
        "two-devices",
        "Only the inputs are moved to the GPU.",
        (gpus.COPY, "x = x.to(device, non_blocking=True)"),
    ),
    mistake(
        "batch-left-on-the-cpu",
        gpus.GPUS,
        "two-devices",
        "to() returns a new tensor, which the program drops.",
        (gpus.COPY, "x.to(device), y.to(device)"),
    ),
    mistake(
        "weights-made-in-forward",
        gpus.GPUS,
        "two-devices",
        "A tensor that forward() creates is on the CPU unless it gets the device of its input.",
        ("torch.linspace(0.5, 1.5, 16, device=x.device)", "torch.linspace(0.5, 1.5, 16)"),
    ),
    mistake(
        "metric-on-the-cpu",
        gpus.GPUS,
        "two-devices",
        "The evaluation compares with labels that stay on the CPU.",
        ("            x, y = x.to(device), y.to(device)\n", "            x = x.to(device)\n"),
    ),
    mistake(
        "sum-on-the-cpu",
        gpus.GPUS,
        "two-devices",
        "A sum on the CPU cannot take numbers from the GPU without item().",
        ("counts = torch.zeros(2, device=device)", "counts = torch.zeros(2)"),
    ),
    mistake(
        "constant-is-no-buffer",
        gpus.GPUS,
        "two-devices",
        "A tensor that is an attribute and not a buffer does not move with the model.",
        (
            "        self.output = nn.Linear(64, 4)\n",
            "        self.output = nn.Linear(64, 4)\n        self.scale = torch.linspace(0.5, 1.5, 16)\n",
        ),
        ("torch.linspace(0.5, 1.5, 16, device=x.device)", "self.scale"),
    ),
    mistake(
        "state-made-before-the-move",
        gpus.GPUS,
        "two-devices",
        "Adagrad creates its state at once, here on the CPU, before the model moves to the GPU.",
        ("model = Classifier().to(device)", "model = Classifier()"),
        (gpus.ADAMW, "optimizer = torch.optim.Adagrad(model.parameters(), lr=3e-2)\n    model.to(device)"),
    ),
    mistake(
        "ema-on-the-cpu",
        gpus.GPUS,
        "two-devices",
        "The moving average of the parameters was created before the model moved.",
        (
            "model = Classifier().to(device)",
            "model = Classifier()\n    average = [p.detach().clone() for p in model.parameters()]",
        ),
        (gpus.ADAMW, "model.to(device)\n    " + gpus.ADAMW),
        (
            gpus.STEP,
            gpus.STEP
            + "            for old, new in zip(average, model.parameters()):\n                old.lerp_(new.detach(), 0.1)\n",
        ),
    ),
    mistake(
        "device-ids-of-rank-0",
        gpus.GPUS,
        ("two-devices", "gpu-refused"),
        "DDP moves the inputs of every rank to GPU 0.",
        (gpus.WRAP, "DistributedDataParallel(model, device_ids=[0])"),
    ),
    # ---- gpu-refused
    mistake(
        "model-left-on-the-cpu",
        gpus.GPUS,
        "gpu-refused",
        "With device_ids, DDP needs a model on a GPU.",
        ("model = Classifier().to(device)", "model = Classifier()"),
    ),
    mistake(
        "numpy-of-a-gpu-tensor",
        gpus.GPUS,
        "gpu-refused",
        "NumPy cannot read the memory of a GPU.",
        ("correct, total = counts.tolist()", "correct, total = counts.numpy()"),
    ),
    mistake(
        "generator-of-the-cpu",
        gpus.GPUS,
        "gpu-refused",
        "Noise on the GPU needs a generator of the GPU.",
        (gpus.EPOCH_SEED, gpus.EPOCH_SEED + "        noise = torch.Generator().manual_seed(100 * epoch + rank)\n"),
        (gpus.COPY, gpus.COPY + "\n            x = x + 0.01 * torch.randn(x.shape, device=device, generator=noise)"),
    ),
    mistake(
        "worker-uses-the-gpu",
        gpus.GPUS,
        "gpu-refused",
        "The workers of a DataLoader are forked, and CUDA does not work in a fork of a process that uses it.",
        (
            gpus.LOADER,
            "to_gpu = lambda batch: [torch.stack([b[0] for b in batch]).to(device), torch.stack([b[1] for b in batch])]\n"
            "    loader = DataLoader(train_set, 16, sampler=sampler, num_workers=1, collate_fn=to_gpu)",
        ),
    ),
    # ---- nccl-on-cpu
    mistake(
        "sum-of-a-cpu-tensor",
        gpus.GPUS,
        "nccl-on-cpu",
        "The counts are collected on the CPU, and NCCL cannot send them.",
        ("counts = torch.zeros(2, device=device)", "counts = torch.zeros(2)"),
        ("(model(x).argmax(1) == y).sum()", "(model(x).argmax(1) == y).sum().item()"),
    ),
    mistake(
        "broadcast-of-a-flag",
        gpus.GPUS,
        "nccl-on-cpu",
        "Rank 0 tells the others whether a checkpoint exists, in a tensor on the CPU.",
        (
            gpus.SEED,
            "    flag = torch.tensor([os.path.exists(CHECKPOINT)])\n    dist.broadcast(flag, src=0)\n" + gpus.SEED,
        ),
    ),
    # ---- gpu-unused
    mistake(
        "cpu-beside-gpus",
        gpus.GPUS,
        ("gpu-unused", "device-index"),
        "With more processes in the job than GPUs on the node, the program trains on the CPU and does not say so.",
        (gpus.SET_DEVICE, "    enough = torch.cuda.device_count() >= world_size\n"),
        (gpus.DEVICE, '    device = torch.device("cuda", local_rank) if enough else torch.device("cpu")\n'),
        (gpus.GROUP, '    dist.init_process_group("nccl" if enough else "gloo")\n'),
        (gpus.WRAP, "DistributedDataParallel(model)"),
    ),
    # ---- loaded-elsewhere
    mistake(
        "checkpoint-on-gpu-0",
        gpus.GPUS,
        "loaded-elsewhere",
        "Without map_location each rank loads the tensors onto the GPU that saved them: GPU 0.",
        (gpus.LOAD, "torch.load(CHECKPOINT)"),
    ),
    # ---- barrier-before-gpu
    mistake(
        "barrier-before-set-device",
        gpus.GPUS,
        "barrier-before-gpu",
        "NCCL guesses the GPU of the barrier.",
        (gpus.SET_DEVICE, ""),
        (gpus.GROUP, gpus.GROUP + "    dist.barrier()\n" + gpus.SET_DEVICE),
    ),
    # ---- autocast-elsewhere
    mistake(
        "autocast-of-the-cpu",
        gpus.GPUS,
        "autocast-elsewhere",
        "Autocast of the CPU does not change operations on a GPU.",
        (gpus.AUTOCAST, gpus.AUTOCAST.replace('"cuda"', '"cpu"')),
    ),
    # ---- memory-grows
    mistake(
        "outputs-kept",
        gpus.GPUS,
        "memory-grows",
        "The outputs of every step stay on the GPU.",
        (gpus.BEFORE_LOOP, "    history = []\n" + gpus.BEFORE_LOOP),
        (gpus.LOSS, "                out = ddp_model(x)\n                loss = nn.functional.cross_entropy(out, y)\n"),
        (gpus.STEP, gpus.STEP + "            history.append(out)\n"),
    ),
    mistake(
        "losses-kept-with-their-graph",
        gpus.GPUS,
        "memory-grows",
        "A list of losses keeps a tensor, and its graph, for every step of the training.",
        (gpus.BEFORE_LOOP, "    history = []\n" + gpus.BEFORE_LOOP),
        (gpus.STEP, gpus.STEP + "            history.append(loss)\n"),
    ),
    # ---- gpu-not-seeded
    mistake(
        "one-gpu-seeded",
        gpus.GPUS,
        "gpu-not-seeded",
        "torch.cuda.manual_seed seeds the current GPU, which is GPU 0 before set_device.",
        (gpus.SET_DEVICE, "    torch.cuda.manual_seed(1)\n" + gpus.SET_DEVICE),
        (gpus.SEED, ""),
        (gpus.EPOCH_SEED, ""),
    ),
    # ---- step-copies, step-waits in the exercise of stage 01
    mistake(
        "fast-indices-in-lists",
        ddp.FAST,
        "step-copies",
        "Indexing with a list copies the list to the GPU, twice in each step.",
        ("sampler=torch.tensor([*train_batches], device=device)", "sampler=train_batches"),
    ),
    mistake(
        "fast-batches-copied",
        ddp.FAST,
        "step-copies",
        "All samples are prepared once, but on the CPU, so each step copies its batch.",
        ("return TensorDataset(images.to(device), labels.to(device))", "return TensorDataset(images, labels)"),
        ("sampler=torch.tensor([*train_batches], device=device)", "sampler=torch.tensor([*train_batches])"),
        ("torch.arange(len(test_set), device=device)", "torch.arange(len(test_set))"),
    ),
    mistake(
        "fast-asks-whether-the-loss-is-finite",
        ddp.FAST,
        ("step-waits", "host-sync"),
        "The if statement waits for the device in every step.",
        (
            "        loss.backward()\n",
            "        if not torch.isfinite(loss):\n            break\n        loss.backward()\n",
        ),
    ),
    # ---- hints
    mistake(
        "item-in-every-step",
        gpus.GPUS,
        "step-waits",
        "Each step waits for the value of the loss.",
        ("total += loss.detach()", "total += loss.item()"),
    ),
    mistake(
        "synchronize-in-every-step",
        gpus.GPUS,
        "step-waits",
        "Each step waits for all work of the GPU.",
        (gpus.STEP, gpus.STEP + "            torch.cuda.synchronize()\n"),
    ),
    mistake(
        "cache-emptied-in-every-step",
        gpus.GPUS,
        "cache-emptied",
        "The memory goes back to the driver after each step.",
        (gpus.STEP, gpus.STEP + "            torch.cuda.empty_cache()\n"),
    ),
    mistake(
        "non-blocking-from-pageable-memory",
        gpus.GPUS,
        "copy-not-pinned",
        "The loader does not pin the memory of its batches.",
        (", pin_memory=True", ""),
    ),
    mistake(
        "pinned-and-blocking",
        gpus.GPUS,
        "copy-blocks",
        "The loader pins the memory, but the copies wait.",
        (gpus.COPY, "x, y = x.to(device), y.to(device)  # the batch"),
    ),
    mistake(
        "scaler-with-bfloat16",
        gpus.GPUS,
        "scaler-unneeded",
        "A GradScaler is for float16.",
        (gpus.BEFORE_LOOP, '    scaler = torch.amp.GradScaler("cuda")\n' + gpus.BEFORE_LOOP),
        (
            "            loss.backward()\n            optimizer.step()\n",
            "            scaler.scale(loss).backward()\n            scaler.step(optimizer)\n            scaler.update()\n",
        ),
    ),
)

STYLES = (
    style("gpu-program-as-it-is", gpus.GPUS, "The program itself."),
    style(
        "fast-indices-moved-together",
        ddp.FAST,
        "The indices of an epoch are moved to the device in one tensor.",
        ("sampler=torch.tensor([*train_batches], device=device)", "sampler=torch.tensor([*train_batches]).to(device)"),
    ),
    style(
        "losses-in-a-list",
        gpus.GPUS,
        "The detached losses of an epoch are in a list, and their sum is read at its end.",
        ("total = torch.zeros((), device=device)", "losses = []"),
        ("total += loss.detach()", "losses.append(loss.detach())"),
        (
            "        dist.all_reduce(total)\n",
            "        total = torch.stack(losses).sum()\n        dist.all_reduce(total)\n",
        ),
    ),
    style(
        "barrier-of-a-group-with-its-gpu",
        gpus.GPUS,
        "The group gets the GPU, so the program needs no set_device.",
        (gpus.SET_DEVICE, ""),
        (gpus.GROUP, '    dist.init_process_group("nccl", device_id=device)\n    dist.barrier()\n'),
        (gpus.LOAD, "torch.load(CHECKPOINT, map_location=device)"),
    ),
    style(
        "cpu-by-its-own-choice",
        gpus.GPUS,
        "The program trains on the CPU unless the user asks for GPUs.",
        (gpus.SET_DEVICE, ""),
        (
            gpus.DEVICE,
            '    device = torch.device("cuda", local_rank) if os.environ.get("USE_GPU") else torch.device("cpu")\n',
        ),
        (gpus.GROUP, '    dist.init_process_group("gloo")\n'),
        (gpus.WRAP, "DistributedDataParallel(model)"),
    ),
    style(
        "accelerator-api",
        gpus.GPUS,
        "The functions of torch.accelerator.",
        (gpus.SET_DEVICE, "    torch.accelerator.set_device_index(local_rank)\n"),
        (gpus.DEVICE, "    device = torch.accelerator.current_accelerator()\n"),
        (gpus.WRAP, "DistributedDataParallel(model)"),
    ),
    style(
        "current-device",
        gpus.GPUS,
        'After set_device, "cuda" is the GPU of the process.',
        (gpus.DEVICE, '    device = torch.device("cuda")\n'),
    ),
    style(
        "tensor-cuda",
        gpus.GPUS,
        "Tensor.cuda() and Module.cuda().",
        (gpus.COPY, "x, y = x.cuda(non_blocking=True), y.cuda(local_rank, non_blocking=True)"),
        ("model = Classifier().to(device)", "model = Classifier().cuda()"),
    ),
    style(
        "device-number",
        gpus.GPUS,
        "The device is only a number.",
        (gpus.DEVICE, "    device = local_rank\n"),
        (gpus.AUTOCAST, gpus.AUTOCAST),
    ),
    style(
        "remainder-of-the-rank",
        gpus.GPUS,
        "The GPU is the remainder of the rank, on nodes with the same number of GPUs.",
        (gpus.SET_DEVICE, "    local_rank = rank % torch.cuda.device_count()\n" + gpus.SET_DEVICE),
    ),
    style(
        "one-visible-gpu",
        gpus.GPUS,
        "Each process hides the GPUs of the others, so its own has the number 0.",
        (
            gpus.SET_DEVICE,
            '    os.environ["CUDA_VISIBLE_DEVICES"] = str(local_rank)\n    local_rank = 0\n' + gpus.SET_DEVICE,
        ),
    ),
    style(
        "group-knows-its-gpu",
        gpus.GPUS,
        "The group gets the GPU, and a barrier comes after it.",
        (gpus.GROUP, '    dist.init_process_group("nccl", device_id=device)\n    dist.barrier()\n'),
    ),
    style(
        "both-backends",
        gpus.GPUS,
        "gloo for tensors on the CPU, NCCL for those on GPUs.",
        (gpus.GROUP, '    dist.init_process_group("cpu:gloo,cuda:nccl")\n'),
        ("counts = torch.zeros(2, device=device)", "counts = torch.zeros(2)"),
        ("(model(x).argmax(1) == y).sum()", "(model(x).argmax(1) == y).sum().item()"),
    ),
    style(
        "map-location-of-the-rank",
        gpus.GPUS,
        "The checkpoint goes to the GPU of the rank.",
        (gpus.LOAD, 'torch.load(CHECKPOINT, map_location={"cuda:0": f"cuda:{local_rank}"})'),
    ),
    style(
        "map-location-device",
        gpus.GPUS,
        "The same, with the device.",
        (gpus.LOAD, "torch.load(CHECKPOINT, map_location=device)"),
    ),
    style(
        "float16-with-scaler",
        gpus.GPUS,
        "float16 needs a GradScaler.",
        (gpus.AUTOCAST, gpus.AUTOCAST.replace("bfloat16", "float16")),
        (gpus.BEFORE_LOOP, '    scaler = torch.amp.GradScaler("cuda")\n' + gpus.BEFORE_LOOP),
        (
            "            loss.backward()\n            optimizer.step()\n",
            "            scaler.scale(loss).backward()\n            scaler.step(optimizer)\n            scaler.update()\n",
        ),
    ),
    style(
        "loss-read-now-and-then",
        gpus.GPUS,
        "The loss is read in every fourth step.",
        (
            "        for x, y in loader:\n",
            "        for step, (x, y) in enumerate(loader):\n",
        ),
        (gpus.STEP, gpus.STEP + "            if step % 4 == 0 and rank == 0:\n                print(loss.item())\n"),
    ),
    style(
        "data-on-the-gpu",
        gpus.GPUS,
        "All points are on the GPU before training.",
        (
            gpus.LOADER,
            "train_set = TensorDataset(*(each.to(device) for each in train_set.tensors))\n"
            "    loader = DataLoader(train_set, batch_size=16, sampler=sampler)",
        ),
        (gpus.COPY, "x = x + 0"),
    ),
    style(
        "losses-in-a-tensor",
        gpus.GPUS,
        "The losses of an epoch are in one tensor on the GPU.",
        ("total = torch.zeros((), device=device)", "losses = torch.zeros(len(loader), device=device)"),
        ("        for x, y in loader:\n", "        for step, (x, y) in enumerate(loader):\n"),
        ("total += loss.detach()", "losses[step] = loss.detach()"),
        ("        dist.all_reduce(total)\n", "        total = losses.sum()\n        dist.all_reduce(total)\n"),
    ),
    style(
        "copies-in-a-second-stream",
        gpus.GPUS,
        "The batches are copied in a stream of their own.",
        (gpus.BEFORE_LOOP, "    copies = torch.cuda.Stream()\n" + gpus.BEFORE_LOOP),
        (
            gpus.COPY,
            "with torch.cuda.stream(copies):\n                "
            + gpus.COPY
            + "\n            torch.cuda.current_stream().wait_stream(copies)",
        ),
    ),
    style(
        "device-of-the-context",
        gpus.GPUS,
        "The model is created under torch.device.",
        ("model = Classifier().to(device)", "with torch.device(device):\n        model = Classifier()"),
    ),
)

test_replay, test_for_real = bank_tests(__file__, MISTAKES, STYLES)
