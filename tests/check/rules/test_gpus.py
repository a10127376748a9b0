"""The rules about GPUs: mistakes that they must name, and correct styles that must pass. All run on pretended GPUs."""

from check.bank.case import mistake, style
from check.bank.cases import bank_tests

GPUS = "tests/check/programs/gpu_classifier.py"
COPY = "x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)"
LOSS = "                loss = nn.functional.cross_entropy(ddp_model(x), y)\n"
AUTOCAST = '            with torch.autocast("cuda", dtype=torch.bfloat16):\n'
SET_DEVICE = "    torch.cuda.set_device(local_rank)\n"
DEVICE = '    device = torch.device("cuda", local_rank)\n'
GROUP = '    dist.init_process_group("nccl")\n'
STEP = "            optimizer.step()\n"
LOADER = "loader = DataLoader(train_set, batch_size=16, sampler=sampler, pin_memory=True)"
WRAP = "DistributedDataParallel(model, device_ids=[local_rank])"
BEFORE_LOOP = "    for epoch in range(first_epoch, EPOCHS):\n"
SEED = "    torch.manual_seed(1)\n"
EPOCH_SEED = "        torch.manual_seed(100 * epoch + rank)\n"
LOAD = 'torch.load(CHECKPOINT, map_location="cpu")'
ADAMW = "optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)"

MISTAKES = (
    # ---- two-devices
    mistake(
        "labels-left-on-the-cpu",
        GPUS,
        "two-devices",
        "Only the inputs are moved to the GPU.",
        (COPY, "x = x.to(device, non_blocking=True)"),
    ),
    mistake(
        "batch-left-on-the-cpu",
        GPUS,
        "two-devices",
        "to() returns a new tensor, which the program drops.",
        (COPY, "x.to(device), y.to(device)"),
    ),
    mistake(
        "weights-made-in-forward",
        GPUS,
        "two-devices",
        "A tensor that forward() creates is on the CPU unless it gets the device of its input.",
        ("torch.linspace(0.5, 1.5, 16, device=x.device)", "torch.linspace(0.5, 1.5, 16)"),
    ),
    mistake(
        "metric-on-the-cpu",
        GPUS,
        "two-devices",
        "The evaluation compares with labels that stay on the CPU.",
        ("            x, y = x.to(device), y.to(device)\n", "            x = x.to(device)\n"),
    ),
    mistake(
        "sum-on-the-cpu",
        GPUS,
        "two-devices",
        "A sum on the CPU cannot take numbers from the GPU without item().",
        ("counts = torch.zeros(2, device=device)", "counts = torch.zeros(2)"),
    ),
    mistake(
        "constant-is-no-buffer",
        GPUS,
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
        GPUS,
        "two-devices",
        "Adagrad creates its state at once, here on the CPU, before the model moves to the GPU.",
        ("model = Classifier().to(device)", "model = Classifier()"),
        (ADAMW, "optimizer = torch.optim.Adagrad(model.parameters(), lr=3e-2)\n    model.to(device)"),
    ),
    mistake(
        "ema-on-the-cpu",
        GPUS,
        "two-devices",
        "The moving average of the parameters was created before the model moved.",
        (
            "model = Classifier().to(device)",
            "model = Classifier()\n    average = [p.detach().clone() for p in model.parameters()]",
        ),
        (ADAMW, "model.to(device)\n    " + ADAMW),
        (
            STEP,
            STEP
            + "            for old, new in zip(average, model.parameters()):\n                old.lerp_(new.detach(), 0.1)\n",
        ),
    ),
    mistake(
        "device-ids-of-rank-0",
        GPUS,
        ("two-devices", "gpu-refused"),
        "DDP moves the inputs of every rank to GPU 0.",
        (WRAP, "DistributedDataParallel(model, device_ids=[0])"),
    ),
    # ---- gpu-refused
    mistake(
        "model-left-on-the-cpu",
        GPUS,
        "gpu-refused",
        "With device_ids, DDP needs a model on a GPU.",
        ("model = Classifier().to(device)", "model = Classifier()"),
    ),
    mistake(
        "numpy-of-a-gpu-tensor",
        GPUS,
        "gpu-refused",
        "NumPy cannot read the memory of a GPU.",
        ("correct, total = counts.tolist()", "correct, total = counts.numpy()"),
    ),
    mistake(
        "generator-of-the-cpu",
        GPUS,
        "gpu-refused",
        "Noise on the GPU needs a generator of the GPU.",
        (EPOCH_SEED, EPOCH_SEED + "        noise = torch.Generator().manual_seed(100 * epoch + rank)\n"),
        (COPY, COPY + "\n            x = x + 0.01 * torch.randn(x.shape, device=device, generator=noise)"),
    ),
    mistake(
        "worker-uses-the-gpu",
        GPUS,
        "gpu-refused",
        "The workers of a DataLoader are forked, and CUDA does not work in a fork of a process that uses it.",
        (
            LOADER,
            "to_gpu = lambda batch: [torch.stack([b[0] for b in batch]).to(device), torch.stack([b[1] for b in batch])]\n"
            "    loader = DataLoader(train_set, 16, sampler=sampler, num_workers=1, collate_fn=to_gpu)",
        ),
    ),
    # ---- nccl-on-cpu
    mistake(
        "sum-of-a-cpu-tensor",
        GPUS,
        "nccl-on-cpu",
        "The counts are collected on the CPU, and NCCL cannot send them.",
        ("counts = torch.zeros(2, device=device)", "counts = torch.zeros(2)"),
        ("(model(x).argmax(1) == y).sum()", "(model(x).argmax(1) == y).sum().item()"),
    ),
    mistake(
        "broadcast-of-a-flag",
        GPUS,
        "nccl-on-cpu",
        "Rank 0 tells the others whether a checkpoint exists, in a tensor on the CPU.",
        (SEED, "    flag = torch.tensor([os.path.exists(CHECKPOINT)])\n    dist.broadcast(flag, src=0)\n" + SEED),
    ),
    # ---- device-shared, device-index, gpu-unused
    mistake(
        "no-set-device",
        GPUS,
        ("device-index", "device-shared"),
        'Without set_device, "cuda" is GPU 0 in every process.',
        (SET_DEVICE, ""),
        (DEVICE, '    device = torch.device("cuda")\n'),
        (WRAP, "DistributedDataParallel(model)"),
    ),
    mistake(
        "cuda-0-in-every-rank",
        GPUS,
        ("device-index", "device-shared"),
        "The GPU is written into the program.",
        (SET_DEVICE, ""),
        (DEVICE, '    device = torch.device("cuda:0")\n'),
        (WRAP, "DistributedDataParallel(model, device_ids=[0])"),
    ),
    mistake(
        "set-device-by-rank",
        GPUS,
        "device-index",
        "On a second node the ranks begin at 2, but the GPUs at 0.",
        (SET_DEVICE, "    torch.cuda.set_device(rank)\n"),
        (DEVICE, '    device = torch.device("cuda", rank)\n'),
        (WRAP, "DistributedDataParallel(model, device_ids=[rank])"),
    ),
    mistake(
        "gpu-numbers-begin-at-1",
        GPUS,
        "device-index",
        "The number of a GPU begins at 0, so the last process asks for a GPU that does not exist.",
        (SET_DEVICE, "    torch.cuda.set_device(local_rank + 1)\n"),
        (DEVICE, '    device = torch.device("cuda", local_rank + 1)\n'),
        (WRAP, "DistributedDataParallel(model, device_ids=[local_rank + 1])"),
    ),
    mistake(
        "cpu-beside-gpus",
        GPUS,
        ("gpu-unused", "device-index"),
        "With more processes in the job than GPUs on the node, the program trains on the CPU without a word.",
        (SET_DEVICE, "    enough = torch.cuda.device_count() >= world_size\n"),
        (DEVICE, '    device = torch.device("cuda", local_rank) if enough else torch.device("cpu")\n'),
        (GROUP, '    dist.init_process_group("nccl" if enough else "gloo")\n'),
        (WRAP, "DistributedDataParallel(model)"),
    ),
    # ---- loaded-elsewhere
    mistake(
        "checkpoint-on-gpu-0",
        GPUS,
        "loaded-elsewhere",
        "Without map_location each rank loads the tensors onto the GPU that saved them: GPU 0.",
        (LOAD, "torch.load(CHECKPOINT)"),
    ),
    # ---- barrier-before-gpu
    mistake(
        "barrier-before-set-device",
        GPUS,
        "barrier-before-gpu",
        "NCCL guesses the GPU of the barrier.",
        (SET_DEVICE, ""),
        (GROUP, GROUP + "    dist.barrier()\n" + SET_DEVICE),
    ),
    # ---- autocast-elsewhere
    mistake(
        "autocast-of-the-cpu",
        GPUS,
        "autocast-elsewhere",
        "Autocast of the CPU does not change operations on a GPU.",
        (AUTOCAST, AUTOCAST.replace('"cuda"', '"cpu"')),
    ),
    # ---- memory-grows
    mistake(
        "outputs-kept",
        GPUS,
        "memory-grows",
        "The outputs of every step stay on the GPU.",
        (BEFORE_LOOP, "    history = []\n" + BEFORE_LOOP),
        (LOSS, "                out = ddp_model(x)\n                loss = nn.functional.cross_entropy(out, y)\n"),
        (STEP, STEP + "            history.append(out)\n"),
    ),
    mistake(
        "losses-kept-with-their-graph",
        GPUS,
        "memory-grows",
        "A list of losses keeps a tensor, and its graph, for every step of the training.",
        (BEFORE_LOOP, "    history = []\n" + BEFORE_LOOP),
        (STEP, STEP + "            history.append(loss)\n"),
    ),
    # ---- gpu-not-seeded
    mistake(
        "one-gpu-seeded",
        GPUS,
        "gpu-not-seeded",
        "torch.cuda.manual_seed seeds the current GPU, which is GPU 0 before set_device.",
        (SET_DEVICE, "    torch.cuda.manual_seed(1)\n" + SET_DEVICE),
        (SEED, ""),
        (EPOCH_SEED, ""),
    ),
    # ---- hints
    mistake(
        "item-in-every-step",
        GPUS,
        "step-waits",
        "Each step waits for the value of the loss.",
        ("total += loss.detach()", "total += loss.item()"),
    ),
    mistake(
        "synchronize-in-every-step",
        GPUS,
        "step-waits",
        "Each step waits for all work of the GPU.",
        (STEP, STEP + "            torch.cuda.synchronize()\n"),
    ),
    mistake(
        "cache-emptied-in-every-step",
        GPUS,
        "cache-emptied",
        "The memory goes back to the driver after each step.",
        (STEP, STEP + "            torch.cuda.empty_cache()\n"),
    ),
    mistake(
        "non-blocking-from-pageable-memory",
        GPUS,
        "copy-not-pinned",
        "The loader does not pin the memory of its batches.",
        (", pin_memory=True", ""),
    ),
    mistake(
        "pinned-and-blocking",
        GPUS,
        "copy-blocks",
        "The loader pins the memory, but the copies wait.",
        (COPY, "x, y = x.to(device), y.to(device)  # the batch"),
    ),
    mistake(
        "scaler-with-bfloat16",
        GPUS,
        "scaler-unneeded",
        "A GradScaler is for float16.",
        (BEFORE_LOOP, '    scaler = torch.amp.GradScaler("cuda")\n' + BEFORE_LOOP),
        (
            "            loss.backward()\n            optimizer.step()\n",
            "            scaler.scale(loss).backward()\n            scaler.step(optimizer)\n            scaler.update()\n",
        ),
    ),
)

STYLES = (
    style("gpu-program-as-it-is", GPUS, "The program itself."),
    style(
        "accelerator-api",
        GPUS,
        "The functions of torch.accelerator.",
        (SET_DEVICE, "    torch.accelerator.set_device_index(local_rank)\n"),
        (DEVICE, "    device = torch.accelerator.current_accelerator()\n"),
        (WRAP, "DistributedDataParallel(model)"),
    ),
    style(
        "current-device",
        GPUS,
        'After set_device, "cuda" is the GPU of the process.',
        (DEVICE, '    device = torch.device("cuda")\n'),
    ),
    style(
        "tensor-cuda",
        GPUS,
        "Tensor.cuda() and Module.cuda().",
        (COPY, "x, y = x.cuda(non_blocking=True), y.cuda(local_rank, non_blocking=True)"),
        ("model = Classifier().to(device)", "model = Classifier().cuda()"),
    ),
    style(
        "device-number",
        GPUS,
        "The device is only a number.",
        (DEVICE, "    device = local_rank\n"),
        (AUTOCAST, AUTOCAST),
    ),
    style(
        "remainder-of-the-rank",
        GPUS,
        "The GPU is the remainder of the rank, on nodes with the same number of GPUs.",
        (SET_DEVICE, "    local_rank = rank % torch.cuda.device_count()\n" + SET_DEVICE),
    ),
    style(
        "one-visible-gpu",
        GPUS,
        "Each process hides the GPUs of the others, so its own has the number 0.",
        (SET_DEVICE, '    os.environ["CUDA_VISIBLE_DEVICES"] = str(local_rank)\n    local_rank = 0\n' + SET_DEVICE),
    ),
    style(
        "group-knows-its-gpu",
        GPUS,
        "The group gets the GPU, and a barrier comes after it.",
        (GROUP, '    dist.init_process_group("nccl", device_id=device)\n    dist.barrier()\n'),
    ),
    style(
        "both-backends",
        GPUS,
        "gloo for tensors on the CPU, NCCL for those on GPUs.",
        (GROUP, '    dist.init_process_group("cpu:gloo,cuda:nccl")\n'),
        ("counts = torch.zeros(2, device=device)", "counts = torch.zeros(2)"),
        ("(model(x).argmax(1) == y).sum()", "(model(x).argmax(1) == y).sum().item()"),
    ),
    style(
        "map-location-of-the-rank",
        GPUS,
        "The checkpoint goes to the GPU of the rank.",
        (LOAD, 'torch.load(CHECKPOINT, map_location={"cuda:0": f"cuda:{local_rank}"})'),
    ),
    style(
        "map-location-device", GPUS, "The same, with the device.", (LOAD, "torch.load(CHECKPOINT, map_location=device)")
    ),
    style(
        "float16-with-scaler",
        GPUS,
        "float16 needs a GradScaler.",
        (AUTOCAST, AUTOCAST.replace("bfloat16", "float16")),
        (BEFORE_LOOP, '    scaler = torch.amp.GradScaler("cuda")\n' + BEFORE_LOOP),
        (
            "            loss.backward()\n            optimizer.step()\n",
            "            scaler.scale(loss).backward()\n            scaler.step(optimizer)\n            scaler.update()\n",
        ),
    ),
    style(
        "loss-read-now-and-then",
        GPUS,
        "The loss is read in every fourth step.",
        (
            "        for x, y in loader:\n",
            "        for step, (x, y) in enumerate(loader):\n",
        ),
        (STEP, STEP + "            if step % 4 == 0 and rank == 0:\n                print(loss.item())\n"),
    ),
    style(
        "data-on-the-gpu",
        GPUS,
        "All points are on the GPU before training.",
        (
            LOADER,
            "train_set = TensorDataset(*(each.to(device) for each in train_set.tensors))\n"
            "    loader = DataLoader(train_set, batch_size=16, sampler=sampler)",
        ),
        (COPY, "x = x + 0"),
    ),
    style(
        "losses-in-a-tensor",
        GPUS,
        "The losses of an epoch are in one tensor on the GPU.",
        ("total = torch.zeros((), device=device)", "losses = torch.zeros(len(loader), device=device)"),
        ("        for x, y in loader:\n", "        for step, (x, y) in enumerate(loader):\n"),
        ("total += loss.detach()", "losses[step] = loss.detach()"),
        ("        dist.all_reduce(total)\n", "        total = losses.sum()\n        dist.all_reduce(total)\n"),
    ),
    style(
        "copies-in-a-second-stream",
        GPUS,
        "The batches are copied in a stream of their own.",
        (BEFORE_LOOP, "    copies = torch.cuda.Stream()\n" + BEFORE_LOOP),
        (
            COPY,
            "with torch.cuda.stream(copies):\n                "
            + COPY
            + "\n            torch.cuda.current_stream().wait_stream(copies)",
        ),
    ),
    style(
        "device-of-the-context",
        GPUS,
        "The model is created under torch.device.",
        ("model = Classifier().to(device)", "with torch.device(device):\n        model = Classifier()"),
    ),
)

test_replay, test_for_real = bank_tests(__file__, MISTAKES, STYLES)
