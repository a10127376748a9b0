"""Where to read more about an API or a term that the remedies of the rules name."""

import re

from workshop.repository import ROOT

_TORCH, _GLOSSARY = "https://docs.pytorch.org/docs/stable", "docs/glossary.md"
_DATA, _DISTRIBUTED = f"{_TORCH}/data.html#torch.utils.data", f"{_TORCH}/distributed.html"
_DDP, _FSDP = "torch.nn.parallel.DistributedDataParallel", f"{_TORCH}/distributed.fsdp.fully_shard.html"
_MODULE = f"{_TORCH}/generated/torch.nn.Module.html#torch.nn.Module"
_LIGHTNING, _SLURM = "https://lightning.ai/docs/pytorch/stable", "https://slurm.schedmd.com"

# A web address, or a path of the repository. Add an entry only if the remedy of a rule needs it.
# _NAMES leaves out paths that are not on this machine, as with the wheel "workshop-check".
PAGES: dict[str, str] = {
    "#SBATCH": f"{_SLURM}/sbatch.html",
    ".cpu()": f"{_TORCH}/generated/torch.Tensor.cpu.html",
    ".to(device)": f"{_TORCH}/generated/torch.Tensor.to.html",
    "@record": f"{_TORCH}/elastic/errors.html",
    "CUDA_VISIBLE_DEVICES": f"{_TORCH}/cuda_environment_variables.html",
    "Conv2d": f"{_TORCH}/generated/torch.nn.Conv2d.html",
    "DataLoader": f"{_DATA}.DataLoader",
    "DeepSpeed's configuration": "https://www.deepspeed.ai/docs/config-json/",
    "DistributedDataParallel": f"{_TORCH}/generated/{_DDP}.html",
    "DistributedSampler": f"{_DATA}.distributed.DistributedSampler",
    "EarlyStopping": f"{_LIGHTNING}/api/lightning.pytorch.callbacks.EarlyStopping.html",
    "GradScaler": f"{_TORCH}/amp.html#gradient-scaling",
    "IterableDataset": f"{_DATA}.IterableDataset",
    "LightningDataModule": f"{_LIGHTNING}/data/datamodule.html",
    "LightningModule": f"{_LIGHTNING}/common/lightning_module.html",
    "MASTER_ADDR": f"{_GLOSSARY}#master_addr-and-master_port",
    "MixedPrecisionPolicy": f"{_FSDP}#torch.distributed.fsdp.MixedPrecisionPolicy",
    "ModelCheckpoint": f"{_LIGHTNING}/api/lightning.pytorch.callbacks.ModelCheckpoint.html",
    "Path.cwd": "https://docs.python.org/3/library/pathlib.html#pathlib.Path.cwd",
    "SLURM_NNODES": f"{_SLURM}/sbatch.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES",
    "Subset": f"{_DATA}.Subset",
    "TCPStore": f"{_DISTRIBUTED}#torch.distributed.TCPStore",
    "Tensor.register_hook": f"{_TORCH}/generated/torch.Tensor.register_hook.html",
    "TensorDataset": f"{_DATA}.TensorDataset",
    "ThroughputMonitor": f"{_LIGHTNING}/api/lightning.pytorch.callbacks.ThroughputMonitor.html",
    "Trainer": f"{_LIGHTNING}/common/trainer.html",
    "ZeroRedundancyOptimizer": f"{_TORCH}/distributed.optim.html#torch.distributed.optim.ZeroRedundancyOptimizer",
    "accelerator": "https://huggingface.co/docs/accelerate/package_reference/accelerator",
    "accumulate": f"{_GLOSSARY}#gradient-accumulation",
    "all_gather": f"{_DISTRIBUTED}#torch.distributed.all_gather",
    "all_gather_into_tensor": f"{_DISTRIBUTED}#torch.distributed.all_gather_into_tensor",
    "all_reduce": f"{_DISTRIBUTED}#torch.distributed.all_reduce",
    "all_to_all_single": f"{_DISTRIBUTED}#torch.distributed.all_to_all_single",
    "async_op=True": f"{_DISTRIBUTED}#synchronous-and-asynchronous-collective-operations",
    "backend=": f"{_DISTRIBUTED}#torch.distributed.init_process_group",
    "barrier": f"{_DISTRIBUTED}#torch.distributed.barrier",
    "batch_isend_irecv": f"{_DISTRIBUTED}#torch.distributed.batch_isend_irecv",
    "broadcast": f"{_DISTRIBUTED}#torch.distributed.broadcast",
    "checkpoint": f"{_GLOSSARY}#checkpoint",
    "clip_grad_norm_": f"{_TORCH}/generated/torch.nn.utils.clip_grad_norm_.html",
    "clone()": f"{_TORCH}/generated/torch.Tensor.clone.html",
    "collectives": f"{_GLOSSARY}#collective",
    "compile()": f"{_MODULE}.compile",
    "context parallelism": f"{_GLOSSARY}#context-parallelism",
    "cross_entropy": f"{_TORCH}/generated/torch.nn.functional.cross_entropy.html",
    "deepspeed.initialize": "https://deepspeed.readthedocs.io/en/latest/initialize.html",
    "describe(module)": "workshop/training/modules.py",
    "destroy_process_group": f"{_DISTRIBUTED}#shutdown",
    "detach()": f"{_TORCH}/generated/torch.Tensor.detach.html",
    "empty_cache()": f"{_TORCH}/notes/cuda.html#memory-management",
    "engine.backward": "https://deepspeed.readthedocs.io/en/latest/training.html",
    "exit_with_launcher": "workshop/training/launcher.py",
    "fully_shard": _FSDP,
    "global batch": f"{_GLOSSARY}#global-batch",
    "image.convert": "https://pillow.readthedocs.io/en/stable/reference/Image.html#PIL.Image.Image.convert",
    "init_device_mesh": f"{_DISTRIBUTED}#torch.distributed.device_mesh.init_device_mesh",
    "init_process_group": f"{_DISTRIBUTED}#torch.distributed.init_process_group",
    "input_ids": "https://huggingface.co/docs/transformers/tasks/language_modeling",
    "islice": "https://docs.python.org/3/library/itertools.html#itertools.islice",
    "item()": f"{_TORCH}/notes/cuda.html#asynchronous-execution",
    "map_location": f"{_TORCH}/generated/torch.load.html",
    "meta": f"{_TORCH}/meta.html",
    "model.eval()": f"{_MODULE}.eval",
    "model.train()": f"{_MODULE}.train",
    "no_sync": f"{_TORCH}/generated/{_DDP}.html#{_DDP}.no_sync",
    "non_blocking=True": "https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html",
    "one_hot": f"{_TORCH}/generated/torch.nn.functional.one_hot.html",
    "optimizer": f"{_TORCH}/optim.html",
    "os.makedirs": "https://docs.python.org/3/library/os.html#os.makedirs",
    "os.replace": "https://docs.python.org/3/library/os.html#os.replace",
    "parallelize_module": f"{_TORCH}/distributed.tensor.parallel.html",
    "parts_of": "workshop/training/modules.py",
    "pdb": "https://docs.python.org/3/library/pdb.html",
    "pin_memory=True": "https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html",
    "random_split": f"{_DATA}.random_split",
    "rank 0": f"{_GLOSSARY}#rank",
    "reduce_scatter": f"{_DISTRIBUTED}#torch.distributed.reduce_scatter",
    "reduce_scatter_tensor": f"{_DISTRIBUTED}#torch.distributed.reduce_scatter_tensor",
    "register_forward_pre_hook": f"{_MODULE}.register_forward_pre_hook",
    "resume": f"{_GLOSSARY}#resume",
    "save_checkpoint": "https://deepspeed.readthedocs.io/en/latest/model-checkpointing.html",
    "save_pretrained": "https://huggingface.co/docs/transformers/main_classes/model#transformers.PreTrainedModel.save_pretrained",
    "saved_tensors_hooks": f"{_TORCH}/autograd.html#torch.autograd.graph.saved_tensors_hooks",
    "scaled_dot_product_attention": f"{_TORCH}/generated/torch.nn.functional.scaled_dot_product_attention.html",
    "scontrol": f"{_SLURM}/scontrol.html",
    "send_object_list": f"{_DISTRIBUTED}#torch.distributed.send_object_list",
    "set_detect_anomaly": f"{_TORCH}/autograd.html#anomaly-detection",
    "split(model, stages)": "workshop/training/pipeline.py",
    "srun": f"{_SLURM}/srun.html",
    "state_dict": "https://docs.pytorch.org/tutorials/beginner/saving_loading_models.html",
    "tensor parallelism": f"{_GLOSSARY}#tensor-parallelism",
    "to_empty": f"{_MODULE}.to_empty",
    "torch.accelerator": f"{_TORCH}/accelerator.html",
    "torch.autocast": f"{_TORCH}/amp.html#torch.autocast",
    "torch.autograd.Function": f"{_TORCH}/autograd.html#torch.autograd.Function",
    "torch.distributed.checkpoint": f"{_TORCH}/distributed.checkpoint.html",
    "torch.distributed.pipelining": f"{_TORCH}/distributed.pipelining.html",
    "torch.manual_seed": f"{_TORCH}/notes/randomness.html",
    "torch.profiler": f"{_TORCH}/profiler.html",
    "torch.utils.checkpoint": f"{_TORCH}/checkpoint.html",
    "torchrun": f"{_TORCH}/elastic/run.html",
    "traceback": "https://docs.python.org/3/tutorial/errors.html",
    "wait $!": "https://www.gnu.org/software/bash/manual/html_node/Signals.html",
    "worker_init_fn": f"{_TORCH}/data.html#data-loading-randomness",
}
_HERE = [name for name, page in PAGES.items() if "://" in page or (ROOT / page.partition("#")[0]).is_file()]
# The longest name comes first, so that it wins where several begin at the same place.
_NAMES = re.compile("|".join(rf"(?<!\w){re.escape(name)}(?!\w)" for name in sorted(_HERE, key=len, reverse=True)))


def page(fix: str) -> str:
    """Return the page of the API or term that a remedy names first; "" if it names none."""
    found = _NAMES.search(fix)
    return PAGES[found[0]] if found else ""
