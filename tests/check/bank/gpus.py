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
WRAPPED = "    ddp_model = DistributedDataParallel(model, device_ids=[local_rank])\n"
BACKWARD = "            loss.backward()\n            optimizer.step()\n"
SAVED = 'state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epochs": epoch + 1}'
LOADED = '        model.load_state_dict(saved["model"])\n'
SETS = "    train_set, test_set = points(384, 2), points(100, 3)\n"
HALF = ("dtype=torch.bfloat16", "dtype=torch.float16")
# With a large scale, the first steps have infinite gradients, and the scaler skips them.
SCALER = (
    ADAMW + "\n",
    ADAMW + '\n    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**22)\n',
)
SCALER_SAVED = (SAVED, SAVED.replace("}", ', "scaler": scaler.state_dict()}'))
SCALER_LOADED = (LOADED, LOADED + '        scaler.load_state_dict(saved["scaler"])\n')


def scaled(*between: str) -> tuple[str, str]:
    """Return the edit that takes steps with a GradScaler; ``between``: lines between backward() and the step."""
    lines = ["scaler.scale(loss).backward()", *between, "scaler.step(optimizer)", "scaler.update()"]
    return BACKWARD, "".join(f"            {line}\n" for line in lines)


AVERAGED = """\
            with torch.no_grad():
                for old, new in zip(average.parameters(), model.parameters(), strict=True):
                    old.lerp_(new, 0.2)
"""
