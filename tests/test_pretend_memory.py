"""The memory of pretended GPUs: until when bytes count, and what optimizers need for a step."""

from test_pretend import pretended


def test_the_bytes_of_each_gpu_are_counted_until_they_are_freed(tmp_path):
    pretended(
        """
        x = torch.zeros(1000, 1000, device="cuda:1")
        assert (torch.cuda.memory_allocated(0), torch.cuda.memory_allocated(1)) == (0, 4_000_256)  # in pieces of 512 bytes
        view = x[0]
        del x
        assert torch.cuda.memory_allocated(1) == 4_000_256
        del view
        assert torch.cuda.memory_allocated(1) == 0 and torch.cuda.max_memory_allocated(1) == 4_000_256
        torch.cuda.reset_peak_memory_stats(1)
        assert torch.cuda.max_memory_allocated(1) == 0
        """,
        tmp_path,
    )


def test_an_optimizer_and_the_clipping_of_gradients_use_foreach_as_on_a_gpu(tmp_path):
    """DTensor finds out shapes with fake tensors, which take no memory of the GPU."""
    pretended(
        """
        import os
        import torch.distributed as dist
        from torch.distributed.fsdp import fully_shard
        from torch.utils._python_dispatch import TorchDispatchMode

        class Names(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                names.add(function.overloadpacket.__name__)
                return function(*args, **(kwargs or {}))

        names = set()
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        for shard in (lambda model: model, fully_shard):
            model = shard(torch.nn.Linear(512, 512, bias=False, device="cuda"))
            optimizer = torch.optim.AdamW(model.parameters())
            for step in range(2):
                model(torch.ones(2, 512, device="cuda")).sum().backward()
                kept, names = torch.cuda.memory_allocated(), set()
                torch.cuda.reset_peak_memory_stats()
                with Names():
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                assert {"_foreach_norm", "_foreach_addcdiv_"} <= names, names
                # The first step also makes the optimizer state, which is as large as two models.
                most = (3.1, 1.1)[step] * 4 * 512 * 512
                assert torch.cuda.max_memory_allocated() - kept <= most, torch.cuda.max_memory_allocated() - kept
            del model, optimizer
        dist.destroy_process_group()
        """,
        tmp_path,
    )
