"""The backward pass on pretended GPUs: what attention keeps for it, and the errors of hooks."""

import sys
import textwrap

import pytest

import runs
from test_pretend import pretended


def test_attention_keeps_no_matrix_of_weights_and_has_the_gradients_of_the_cpu(tmp_path):
    """The kernels of CUDA compute the weights again in the backward pass; activation checkpointing calls them in its hooks."""
    pretended(
        """
        from functools import partial
        from torch.nn.functional import scaled_dot_product_attention as attention
        from torch.utils.checkpoint import checkpoint

        samples, heads, length, size = 2, 4, 256, 8
        weights = 4 * samples * heads * length**2
        inputs = torch.randn(3, samples, heads, length, size)
        masks = torch.randn(length, length), torch.rand(length, length) > 0.5
        for options in ({"is_causal": True}, {"scale": 0.3}, *({"attn_mask": mask} for mask in masks)):
            for recompute in (False, True):
                results = []
                for device in ("cpu", "cuda"):
                    here = {name: each.to(device) if isinstance(each, torch.Tensor) else each for name, each in options.items()}
                    x = inputs.clone().to(device).requires_grad_()
                    call = partial(attention, **here)
                    before = torch.cuda.memory_allocated()
                    y = checkpoint(call, *x, use_reentrant=False) if recompute else call(*x)
                    kept = torch.cuda.memory_allocated() - before
                    assert device == "cpu" or kept < weights / 2, (options, recompute, kept)
                    y.pow(2).sum().backward()
                    results.append((y.detach().cpu(), x.grad.cpu()))
                torch.testing.assert_close(*results)
        with torch.inference_mode():
            torch.testing.assert_close(attention(*inputs.cuda()).cpu(), attention(*inputs))
        """,
        tmp_path,
    )


HOOKS = {
    "hook": "y = x * 2; y.register_hook(lambda gradient: 1 / 0); y.sum().backward()",
    "unpack": """
def unpack(tensor):
    return 1 / 0

with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
    y = (x * x).sum()
y.backward()
""",
}


@pytest.mark.parametrize("kind", HOOKS)
def test_the_error_of_a_hook_has_its_traceback(kind, tmp_path):
    """PyTorch loses this error, and aborts the process, if nothing keeps it."""
    file = tmp_path / "program.py"
    file.write_text(
        "import torch\nx = torch.ones(3, device='cuda', requires_grad=True)\n" + textwrap.dedent(HOOKS[kind])
    )
    done = runs.run([sys.executable, file], tmp_path, **runs.pretended(1))
    assert done.returncode == 1, done.stderr
    assert "1 / 0" in done.stderr
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")
