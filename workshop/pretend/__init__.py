"""Pretended GPUs: a program sees as many CUDA GPUs as it asks for, and computes on the CPU.

A tensor on a pretended GPU wraps a tensor on the CPU. Each operation first makes the checks that CUDA would make, and then
computes with the tensor inside. The results, the losses and the bytes on each device are real. Speed, overlap, races, memory
that runs out, kernels and ``torch.compile`` are not.
"""
