"""Fit y = 3x with several processes: this is the smallest complete program with DistributedDataParallel.

Run it:    torchrun --nproc-per-node=2 02_pytorch_ddp/minimal_ddp.py
Check it:  ./workshop.sh check 02_pytorch_ddp/minimal_ddp.py
"""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.manual_seed(0)
device = torch.device("cpu")
if torch.accelerator.is_available():  # otherwise use the CPU
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]) % torch.accelerator.device_count())
    device = torch.accelerator.current_accelerator()
backend = dist.get_default_backend_for_device(device)  # "nccl" for GPUs, "gloo" for the CPU
dist.init_process_group(backend)  # reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
rank, world_size = dist.get_rank(), dist.get_world_size()

x = torch.arange(32).unsqueeze(1) / 32
data = TensorDataset(x, 3 * x)
sampler = DistributedSampler(data)  # gives each rank a different part of the 32 samples
loader = DataLoader(data, batch_size=4, sampler=sampler)
model = DDP(torch.nn.Linear(1, 1).to(device))  # backward() averages the gradients over all ranks
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

for epoch in range(30):
    sampler.set_epoch(epoch)  # a different order in each epoch
    for inputs, targets in loader:
        loss = torch.nn.functional.mse_loss(model(inputs.to(device)), targets.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

samples = (32 * inputs).int().flatten().tolist()
text = f"rank {rank} of {world_size} on {device}: weight {model.module.weight.item():.4f}, last batch {samples}\n"
print(text, end="", flush=True)  # one write, so that the lines of two ranks do not mix
dist.destroy_process_group()
