"""The rules about sharding: mistakes that they must name, and correct styles that must pass."""

from check.bank import sharded
from check.bank.case import mistake, style
from check.bank.cases import bank_tests

FSDP2 = "tests/check/referee/fsdp2_lm/train.py"
FEWER_ROWS = (
    ("make_rows(256, seed=0), make_rows(44, seed=1)", "make_rows(64, seed=0), make_rows(12, seed=1)"),
    ('"--epochs", type=int, default=3', '"--epochs", type=int, default=2'),
)

SMALL = (*FEWER_ROWS, ("dim=64, depth=2", "dim=8, depth=3"))
BLOCKS = "    for block in model.blocks:\n        fully_shard(block, mp_policy=policy)\n"
BATCH = "            loss = token_loss(model, batch.to(device))\n            loss.backward()\n"
IN_HALVES = """\
            for number, half in enumerate(batch.to(device).chunk(2)):
                model.set_requires_gradient_sync(number == 0)
                loss = token_loss(model, half)
                (loss / 2).backward()
"""

MISTAKES = (
    mistake(
        "gradients-of-the-first-batch-only",
        FSDP2,
        "last-batch-left-out",
        "The gradients are reduced after the first batch of a step, and those of the second one stay outside the shards.",
        *SMALL,
        (BATCH, IN_HALVES),
    ),
    mistake(
        "only-the-model-is-sharded",
        FSDP2,
        "gathered-as-one",
        "fully_shard is called for the model, but not for its layers.",
        *SMALL,
        (BLOCKS, ""),
    ),
    # ---- not-sharded
    mistake(
        "sharded-layers-only",
        sharded.FSDP,
        ("not-sharded", "crash", "weights-differ"),
        "Embedding and output layer stay whole in each process.",
        (sharded.ROOT, "    return model\n"),
    ),
    mistake(
        "sharded-mesh-of-one",
        sharded.FSDP,
        "not-sharded",
        "The mesh only replicates: the memory is that of DDP.",
        (
            "    mesh = init_device_mesh(device.type, (dist.get_world_size(),))\n",
            "    mesh = init_device_mesh(device.type, (dist.get_world_size(), 1), mesh_dim_names=('replicate', 'shard'))\n",
        ),
        ("        rows = -(-len(weight) // dist.get_world_size())\n", "        rows = len(weight)\n"),
        (sharded.ROWS, "        first = 0\n"),
    ),
    mistake(
        "sharded-still-ddp",
        sharded.FSDP,
        "not-sharded",
        "fully_shard() is never called.",
        (sharded.LAYERS, ""),
        (sharded.ROOT, "    return model\n"),
        (sharded.COPY, "            weight.copy_(file.get_tensor(name))\n"),
    ),
    # ---- one-group
    mistake(
        "sharded-root-only",
        sharded.FSDP,
        "one-group",
        "One group holds the whole model, so all parameters are gathered at once.",
        (sharded.LAYERS, ""),
    ),
    mistake(
        "sharded-first-layer-only",
        sharded.FSDP,
        "one-group",
        "The loop shards only the first layer.",
        (
            "    for layer in model.model.layers:\n        # One",
            "    for layer in model.model.layers[:1]:\n        # One",
        ),
    ),
    # ---- never-freed
    mistake(
        "sharded-layers-kept",
        sharded.FSDP,
        "never-freed",
        "The layers stay gathered after their forward pass, so each process holds the whole model.",
        (
            "        fully_shard(layer, mesh=mesh, mp_policy=precision(device))\n",
            "        fully_shard(layer, mesh=mesh, mp_policy=precision(device), reshard_after_forward=False)\n",
        ),
    ),
    # ---- whole-model
    mistake(
        "sharded-loads-it-whole",
        sharded.FSDP,
        "whole-model",
        "Each process loads the whole model and shards it afterwards.",
        (sharded.META, ""),
        (
            sharded.MAKE,
            sharded.MAKE.strip().replace("from_config(config", "from_pretrained(args.model").join(["    ", "\n"]),
        ),
        (sharded.EMPTY, ""),
        (sharded.LOAD, ""),
    ),
    mistake(
        "sharded-no-meta",
        sharded.FSDP,
        "whole-model",
        "The model is created on the CPU, not on the meta device.",
        (sharded.META, ""),
        (sharded.MAKE, sharded.MAKE[4:]),
    ),
    mistake(
        "sharded-reads-all-files",
        sharded.FSDP,
        "whole-model",
        "Every process reads every parameter to keep its own rows.",
        (
            '        with safe_open(files[name], framework="pt") as file:\n' + sharded.COPY,
            "        weight.to_local().copy_(whole[name][first : first + rows])\n",
        ),
        (
            "    files = weight_files(folder)\n",
            '    from safetensors import torch as st\n\n    whole = st.load_file(folder + "/model.safetensors")\n',
        ),
    ),
    # ---- buffers-empty
    mistake(
        "sharded-buffers-forgotten",
        sharded.FSDP,
        "buffers-empty",
        "The frequencies of the rotary embedding are uninitialized memory.",
        (sharded.ROTARY, ""),
    ),
    # ---- weights-not-loaded
    mistake(
        "sharded-weights-forgotten",
        sharded.FSDP,
        "weights-not-loaded",
        "After to_empty() no parameters are loaded.",
        (sharded.LOAD, ""),
    ),
    mistake(
        "sharded-rows-of-rank-0",
        sharded.FSDP,
        "weights-not-loaded",
        "Every process reads the rows of rank 0.",
        (sharded.ROWS, "        first = 0\n"),
    ),
    mistake(
        "sharded-each-inits-its-own",
        sharded.FSDP,
        ("weights-not-loaded", "buffers-empty"),
        "Random parameters replace those of the checkpoint.",
        (sharded.LOAD, "    torch.manual_seed(dist.get_rank())\n    model.init_weights()\n"),
    ),
    # ---- master-rounded
    mistake(
        "sharded-bf16-weights",
        sharded.FSDP,
        "master-rounded",
        "The model is created in bfloat16, so AdamW's small updates round to zero.",
        (sharded.MAKE, sharded.MAKE.replace("float32", "bfloat16")),
    ),
    # ---- gathers-float32
    mistake(
        "sharded-autocast-stays",
        sharded.FSDP,
        "gathers-float32",
        "autocast around a model without a policy communicates twice the bytes.",
        (sharded.POLICY, "    return MixedPrecisionPolicy()\n"),
        (
            "        loss = model(input_ids=batch, labels=batch, use_cache=False).loss  # the model shifts",
            "        with torch.autocast(device.type, torch.bfloat16):\n"
            "            loss = model(input_ids=batch, labels=batch, use_cache=False).loss  # the model shifts",
        ),
    ),
    # ---- reduce-rounded
    mistake(
        "sharded-reduces-in-bf16",
        sharded.FSDP,
        "reduce-rounded",
        "The gradients are summed in bfloat16 (before torch 2.15 also without reduce_dtype).",
        (sharded.POLICY, "    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)\n"),
    ),
    # ---- clip-local
    mistake(
        "sharded-clips-its-own-part",
        sharded.FSDP,
        "clip-local",
        "Each process clips by the norm of its own shard.",
        (
            sharded.CLIP,
            "        nn.utils.clip_grad_norm_([p.grad.to_local() for p in model.parameters()], max_norm=1.0)\n"
            "        own = [p.grad.to_local() for p in model.parameters()]\n"
            "        norm = torch.stack([part.norm() for part in own]).norm()\n"
            "        [part.mul_(min(1.0, 1.0 / norm.item())) for part in own]\n",
        ),
    ),
    # ---- clip-missing
    mistake("sharded-never-clips", sharded.FSDP, "clip-missing", "No gradients are clipped.", (sharded.CLIP, "")),
    # ---- norm-of-parts
    mistake(
        "sharded-clipped-by-the-norm-of-the-part",
        FSDP2,
        "norm-of-parts",
        "Each rank computes the norm of its own shards. It is below the limit, so only the printed norm shows it.",
        *FEWER_ROWS,
        (
            "            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()\n",
            "            norm = torch.stack([each.grad.to_local().norm() for each in model.parameters()]).norm()\n"
            "            for each in model.parameters():\n"
            "                each.grad.mul_((9.0 / norm).clamp(max=1.0))\n",
        ),
    ),
)

STYLES = (
    style(
        "gradients-reduced-after-each-batch",
        FSDP2,
        "Each batch of a step reduces its gradients to the shards, which adds them up.",
        *SMALL,
        (BATCH, IN_HALVES.replace("number == 0", "True")),
    ),
    style(
        "sharded-norm-added-up-over-the-ranks",
        FSDP2,
        "The squares of the norms of the shards are summed over the ranks.",
        *FEWER_ROWS,
        (
            "            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()\n",
            "            square = torch.stack([each.grad.to_local().square().sum() for each in model.parameters()]).sum()\n"
            "            dist.all_reduce(square)\n"
            "            norm = square.sqrt()\n"
            "            for each in model.parameters():\n"
            "                each.grad.mul_((9.0 / norm).clamp(max=1.0))\n",
        ),
    ),
    style(
        "sharded-style-no-mesh",
        sharded.FSDP,
        "fully_shard() makes the mesh itself.",
        (sharded.LAYERS, sharded.LAYERS.replace("mesh=mesh, ", "")),
        (sharded.ROOT, sharded.ROOT.replace("mesh=mesh, ", "")),
        ("    mesh = init_device_mesh(device.type, (dist.get_world_size(),))\n", ""),
    ),
    style(
        "sharded-style-layers-in-pairs",
        sharded.FSDP,
        "The embedding is a group of its own.",
        (
            sharded.ROOT,
            "    parts = [model.model.embed_tokens, model.model.norm, model.lm_head]\n"
            "    fully_shard(parts[0], mesh=mesh, mp_policy=precision(device))\n" + sharded.ROOT,
        ),
    ),
    style(
        "sharded-style-float32-scores",
        sharded.FSDP,
        "The root's policy returns float32.",
        (
            sharded.ROOT,
            "    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)\n"
            "    return fully_shard(model, mesh=mesh, mp_policy=policy)\n",
        ),
    ),
    style(
        "sharded-style-loads-by-distribute",
        sharded.FSDP,
        "The rows are converted to the parameter's type before the copy.",
        (
            sharded.COPY,
            "            part = file.get_slice(name)[first : first + rows]\n"
            "            weight.to_local().copy_(part.to(weight.dtype))\n",
        ),
    ),
    style(
        "sharded-style-dcp-reads-hugging-face",
        sharded.FSDP,
        "DCP's reader of safetensors loads the parameters.",
        (
            sharded.LOAD,
            "    import torch.distributed.checkpoint as dcp\n\n"
            "    reader = dcp.HuggingFaceStorageReader(args.model)\n"
            "    dcp.load(model.state_dict(), storage_reader=reader)\n",
        ),
    ),
    style(
        "sharded-style-norm-by-hand",
        sharded.FSDP,
        "The norm is computed over the ranks, and the gradients are scaled by it.",
        (
            sharded.CLIP,
            "        norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])\n"
            "        norm = norm.full_tensor() if hasattr(norm, 'full_tensor') else norm\n"
            "        nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)\n",
        ),
    ),
)

test_replay, test_for_real = bank_tests(__file__, MISTAKES, STYLES)
