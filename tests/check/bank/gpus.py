"""The program for GPUs, and parts of it that several cases edit."""

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
