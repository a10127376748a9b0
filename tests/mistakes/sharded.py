"""Mistaken versions of stage 04's solutions, and correct ones in other styles, as in bank.py and correct.py.

P61 to P68 are FSDP's in the catalogue of public threads.
"""

from mistakes.bank import Mistake

STAGE = "solutions/04_model_parallel_with_fsdp"
FSDP = f"{STAGE}/exercise1_fsdp_codellama.py"
CHECKPOINT = f"{STAGE}/exercise2_sharded_checkpoint.py"
EXPORT = f"{STAGE}/exercise2_export.py"
FIT = f"{STAGE}/exercise3_fit_the_model.py"

# Lines of the solutions that several versions edit.
LAYERS = """    for layer in model.model.layers:
        # A group: gathered for its forward and for its backward, freed when they are done.
        fully_shard(layer, mesh=mesh, mp_policy=precision(device))
"""
ROOT = (
    "    return fully_shard(model, mesh=mesh, mp_policy=precision(device))  # the rest: embedding, last norm, scores\n"
)
POLICY = "    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)\n"
META = '    with torch.device("meta"):  # shapes without memory: no process ever holds the whole model\n'
MAKE = "        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)\n"
LOAD = "    load_weights(model, args.model)\n"
EMPTY = "    model.to_empty(device=device)  # memory for this process's part, with anything in it\n"
ROTARY = "    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)\n"
ROWS = "        first = rows * dist.get_rank()\n"
COPY = "            weight.to_local().copy_(file.get_slice(name)[first : first + rows])\n"
OPTIMIZER = "    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.95))\n"
CLIP = "        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)\n"
SAMPLER = "    sampler = DistributedSampler(train_set, seed=SEED, drop_last=True)\n"
LOADER = "    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)\n"
END = "    log.end(complete(model, tokenizer, device))\n"
ZERO = "        optimizer.zero_grad()\n"
SAVE = (
    '    state.saving = dcp.async_save({"state": state}, checkpoint_id=f"{run}/step-{state.step}", '
    "process_group=state.group)\n"
)
STATE = '        return {"model": model, "optimizer": optimizer, "schedule": self.schedule.state_dict(), "step": self.step}\n'
READ = '        dcp.load({"state": {"model": weights}}, checkpoint_id=checkpoint, no_dist=True)\n'
SCHEDULE = '        self.schedule.load_state_dict(state["schedule"])\n'
STEP = '        self.step = state["step"]\n'
GATHER = "        dcp.load("
SYNC = "            model.set_requires_gradient_sync(part == args.accumulate)\n"
PART_LOSS = "            part_loss = model(input_ids=batch, labels=batch, use_cache=False).loss / args.accumulate\n"
RECOMPUTE = "            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)\n"


def _version(base: str, name: str, kinds: str, note: str, *edits: tuple[str, str]) -> Mistake:
    return Mistake(f"sharded-{name}", base, edits, tuple(kinds.split()), note)


SHARDED = (
    # ---- exercise 1: what is cut
    _version(FSDP, "root-only", "one-group", "P67: one group: all weights are gathered at once", (LAYERS, "")),
    _version(
        FSDP,
        "layers-only",
        "not-sharded crash weights-differ",
        "embedding and scores stay whole in each process",
        (ROOT, "    return model\n"),
    ),
    _version(
        FSDP,
        "first-layer-only",
        "one-group",
        "the loop shards the first layer only",
        ("    for layer in model.model.layers:\n        # A", "    for layer in model.model.layers[:1]:\n        # A"),
    ),
    _version(
        FSDP,
        "mesh-of-one",
        "not-sharded",
        "a mesh that only replicates: the memory of DDP",
        (
            "    mesh = init_device_mesh(device.type, (dist.get_world_size(),))\n",
            "    mesh = init_device_mesh(device.type, (dist.get_world_size(), 1), mesh_dim_names=('replicate', 'shard'))\n",
        ),
        ("        rows = -(-len(weight) // dist.get_world_size())\n", "        rows = len(weight)\n"),
        (ROWS, "        first = 0\n"),
    ),
    _version(
        FSDP,
        "still-ddp",
        "not-sharded",
        "fully_shard was never called",
        (LAYERS, ""),
        (ROOT, "    return model\n"),
        (COPY, "            weight.copy_(file.get_tensor(name))\n"),
    ),
    # ---- exercise 1: what it is computed with
    _version(
        FSDP, "no-policy", "precision", "no policy: all in float32", (POLICY, "    return MixedPrecisionPolicy()\n")
    ),
    _version(
        FSDP,
        "autocast-stays",
        "gathers-float32",
        "autocast around a model without a policy: twice the bytes travel",
        (POLICY, "    return MixedPrecisionPolicy()\n"),
        (
            "        loss = model(input_ids=batch, labels=batch, use_cache=False).loss  # it shifts",
            "        with torch.autocast(device.type, torch.bfloat16):\n"
            "            loss = model(input_ids=batch, labels=batch, use_cache=False).loss  # it shifts",
        ),
    ),
    _version(
        FSDP,
        "reduces-in-bf16",
        "reduce-rounded",
        "the gradients are summed in bfloat16 (before torch 2.15 also without reduce_dtype)",
        (POLICY, "    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)\n"),
    ),
    _version(
        FSDP,
        "bf16-weights",
        "master-rounded",
        "the model is made in bfloat16, and AdamW's steps vanish",
        (MAKE, MAKE.replace("float32", "bfloat16")),
    ),
    # ---- exercise 1: where the weights come from
    _version(
        FSDP,
        "loads-it-whole",
        "whole-model",
        "P65: each process loads the model, and cuts it then",
        (META, ""),
        (MAKE, MAKE.strip().replace("from_config(config", "from_pretrained(args.model").join(["    ", "\n"])),
        (EMPTY, ""),
        (LOAD, ""),
    ),
    _version(
        FSDP,
        "no-meta",
        "whole-model",
        "made on the CPU, not on the meta device",
        (META, ""),
        (MAKE, MAKE[4:]),
    ),
    _version(
        FSDP,
        "reads-all-files",
        "whole-model",
        "every process reads every weight to keep its rows",
        (
            '        with safe_open(files[name], framework="pt") as file:\n' + COPY,
            "        weight.to_local().copy_(whole[name][first : first + rows])\n",
        ),
        (
            "    files = weight_files(folder)\n",
            '    from safetensors import torch as st\n\n    whole = st.load_file(folder + "/model.safetensors")\n',
        ),
    ),
    _version(FSDP, "weights-forgotten", "weights-not-loaded", "to_empty, and nothing is read", (LOAD, "")),
    _version(
        FSDP,
        "rows-of-rank-0",
        "weights-not-loaded",
        "every process reads the rows of rank 0",
        (ROWS, "        first = 0\n"),
    ),
    _version(
        FSDP,
        "each-inits-its-own",
        "weights-not-loaded buffers-empty",
        "P64: random weights in place of the checkpoint's",
        (LOAD, "    torch.manual_seed(dist.get_rank())\n    model.init_weights()\n"),
    ),
    _version(
        FSDP,
        "buffers-forgotten",
        "buffers-empty",
        "the rotary embedding's frequencies are whatever was there",
        (ROTARY, ""),
    ),
    # ---- exercise 1: the training
    _version(
        FSDP,
        "clips-its-own-part",
        "clip-local",
        "P68's cousin: each process clips the norm of its own part",
        (
            CLIP,
            "        nn.utils.clip_grad_norm_([p.grad.to_local() for p in model.parameters()], max_norm=1.0)\n"
            "        own = [p.grad.to_local() for p in model.parameters()]\n"
            "        norm = torch.stack([part.norm() for part in own]).norm()\n"
            "        [part.mul_(min(1.0, 1.0 / norm.item())) for part in own]\n",
        ),
    ),
    _version(FSDP, "never-clips", "clip-missing", "nothing is clipped", (CLIP, "")),
    _version(
        FSDP,
        "optimizer-first",
        "wrong-parameters no-learning crash",
        "the optimizer holds the parameters of before they were cut",
        ("    model = load_model(args, device)\n", ""),
        (
            OPTIMIZER,
            "    whole = AutoModelForCausalLM.from_pretrained(args.model, local_files_only=True)\n"
            "    optimizer = torch.optim.AdamW(whole.parameters(), lr=args.learning_rate, betas=(0.9, 0.95))\n"
            "    model = load_model(args, device)\n",
        ),
    ),
    _version(
        FSDP,
        "same-text-everywhere",
        "same-samples",
        "P61: every process trains on the same sequences",
        (SAMPLER, "    sampler = DistributedSampler(train_set, num_replicas=1, rank=0, seed=SEED, drop_last=True)\n"),
    ),
    _version(
        FSDP,
        "only-rank-0-writes",
        "hang collectives-differ",
        "rank 0 alone generates: every forward is a collective",
        (END, "    if rank == 0:\n        log.end(complete(model, tokenizer, device))\n"),
    ),
    _version(FSDP, "gradients-stay", "gradients-pile-up", "zero_grad is forgotten", (ZERO, "")),
    _version(
        FSDP,
        "past-the-hooks",
        "crash",
        "model.forward() in place of model(): FSDP's hooks gather nothing",
        (
            "        loss = model(input_ids=batch, labels=batch, use_cache=False).loss  # it shifts",
            "        loss = model.forward(input_ids=batch, labels=batch, use_cache=False).loss  # it shifts",
        ),
    ),
    # ---- exercise 2
    _version(
        CHECKPOINT,
        "rank-0-gathers",
        "whole-saved",
        "rank 0 gathers the whole state and writes one file",
        (
            SAVE,
            "    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict\n"
            "    full = get_model_state_dict(state.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))\n"
            "    if dist.get_rank() == 0:\n"
            "        os.makedirs(run, exist_ok=True)\n"
            "        torch.save(full, f'{run}/model.pt')\n",
        ),
    ),
    _version(
        CHECKPOINT,
        "everybody-saves-the-same-file",
        "two-writers whole-saved not-saved",
        "every process writes its part to one file",
        (
            SAVE,
            "    os.makedirs(run, exist_ok=True)\n    torch.save(state.model.state_dict(), f'{run}/model.pt')\n",
        ),
    ),
    _version(
        CHECKPOINT,
        "without-the-optimizer",
        "optimizer-lost resume-fails",
        "the optimizer's state is not saved",
        (STATE, STATE.replace('"optimizer": optimizer, ', "")),
        (', optim_state_dict=state["optimizer"]', ", optim_state_dict={}"),
    ),
    _version(
        CHECKPOINT,
        "without-the-schedule",
        "schedule-lost",
        "the schedule starts anew",
        (SCHEDULE, ""),
    ),
    _version(
        CHECKPOINT,
        "step-not-restored",
        "never-resumes resume-fails",
        "the weights come back, and all steps are taken again",
        (STEP, ""),
    ),
    _version(
        CHECKPOINT,
        "batches-from-the-start",
        "data-repeated",
        "the continued run begins with the first batches again",
        ("islice(batches(train_loader, sampler), state.step, None)", "batches(train_loader, sampler)"),
    ),
    _version(
        CHECKPOINT,
        "loads-into-nothing",
        "resume-differs optimizer-lost schedule-lost",
        "what DCP brings is not given to model and optimizer (it fills tensors in place, but not the learning rate)",
        (
            '        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], '
            'optim_state_dict=state["optimizer"])\n',
            "",
        ),
    ),
    _version(
        CHECKPOINT,
        "waits-for-the-disk",
        "saves-waiting",
        "dcp.save: nobody trains meanwhile",
        (SAVE, '    dcp.save({"state": state}, checkpoint_id=f"{run}/step-{state.step}")\n'),
    ),
    _version(
        CHECKPOINT,
        "one-group-for-both",
        "crash hang collectives-differ whole-saved not-saved",
        "every rank has a name of its own for the folder",
        (SAVE, SAVE.replace("step-{state.step}", "step-{state.step}{dist.get_rank()}")),
    ),
    _version(
        EXPORT,
        "export-without-config",
        "not-exported",
        "no configuration in the folder",
        ("    model.config.save_pretrained(folder)\n", ""),
    ),
    _version(
        EXPORT,
        "export-without-index",
        "not-exported",
        "nobody can tell which weight is in which file",
        ('        json.dump({"metadata": {}, "weight_map": files}, index)\n', '        index.write("{}")\n'),
    ),
    _version(
        EXPORT,
        "exports-nothing-read",
        "export-differs",
        "memory is made for the weights, and written with whatever was in it",
        (READ, ""),
    ),
    _version(
        EXPORT,
        "exports-the-beginning",
        "export-differs",
        "the weights that the training began with",
        (
            '    with torch.device("meta"):  # names and shapes, without memory\n' + MAKE,
            "    model = AutoModelForCausalLM.from_pretrained(args.model)\n",
        ),
        ("torch.empty(shapes[name].shape)", "shapes[name].contiguous()"),
        (READ, ""),
    ),
    _version(
        EXPORT,
        "asks-for-other-names",
        "not-exported",
        "the checkpoint has the weights under the names that they were saved with",
        ('{"state": {"model": weights}}', '{"model": weights}'),
    ),
    # ---- exercise 3
    _version(
        FIT,
        "checkpoints-nothing",
        "activations-kept",
        "the option is there, and changes nothing",
        (RECOMPUTE, "            layer.requires_grad_(True)\n"),
    ),
    _version(FIT, "reduces-every-batch", "accumulation-traffic", "gradients travel with each batch", (SYNC, "")),
    _version(
        FIT,
        "never-reduces",
        "weights-differ differs-from-one-process accumulation-scale not-sharded no-learning crash",
        "gradients never travel",
        (SYNC, "            model.set_requires_gradient_sync(False)\n"),
    ),
    _version(
        FIT,
        "sum-of-the-batches",
        "accumulation-scale",
        "the loss is not divided by the batches",
        (PART_LOSS, PART_LOSS.replace(" / args.accumulate", "")),
    ),
    _version(
        FIT,
        "frees-anyway",
        "gathers-again",
        "--keep-gathered is turned round",
        ("reshard_after_forward=not args.keep_gathered", "reshard_after_forward=True"),
    ),
    _version(
        FIT,
        "offloads-the-root-only",
        "not-offloaded",
        "the layers stay on the device",
        ("fully_shard(layer, **options, ", "fully_shard(layer, mesh=mesh, mp_policy=precision(device), "),
    ),
    _version(
        FIT,
        "compiles-nothing",
        "not-compiled",
        "--compile is read, and forgotten",
        ("            layer.compile()\n", "            pass\n"),
    ),
)

# What the catalogue has beside those.
SHARDED += (
    _version(
        CHECKPOINT,
        "rank-0-asks-for-all",
        "hang collectives-differ crash",
        "P63: what is spread is gathered on rank 0 alone",
        (
            SAVE,
            SAVE
            + "    if dist.get_rank() == 0:\n        print(state.model.lm_head.weight.full_tensor().norm().item())\n",
        ),
    ),
    _version(
        FSDP,
        "whole-into-parts",
        "crash",
        "P62: load_state_dict of a whole checkpoint into a model that is cut",
        (
            LOAD,
            "    from safetensors import torch as st\n\n"
            "    model.load_state_dict(st.load_file(args.model + '/model.safetensors'))\n",
        ),
    ),
    _version(
        FSDP,
        "a-part-by-itself",
        "crash",
        "P66: a module of the model is called by itself, and nobody gathers it",
        (
            "    model.eval()\n    prompt",
            "    model.eval()\n    model.model.layers[0].mlp.up_proj(torch.zeros(1, model.config.hidden_size))\n    prompt",
        ),
    ),
)

SHARDED_CORRECT = (
    _version(
        FSDP,
        "style-no-mesh",
        "",
        "fully_shard makes the mesh itself",
        (LAYERS, LAYERS.replace("mesh=mesh, ", "")),
        (ROOT, ROOT.replace("mesh=mesh, ", "")),
        ("    mesh = init_device_mesh(device.type, (dist.get_world_size(),))\n", ""),
    ),
    _version(
        FSDP,
        "style-layers-in-pairs",
        "",
        "the root's group is made of a list of modules",
        (
            ROOT,
            "    parts = [model.model.embed_tokens, model.model.norm, model.lm_head]\n"
            "    fully_shard(parts[0], mesh=mesh, mp_policy=precision(device))\n" + ROOT,
        ),
    ),
    _version(
        FSDP,
        "style-float32-scores",
        "",
        "the scores of the whole model come out in float32",
        (
            ROOT,
            "    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)\n"
            "    return fully_shard(model, mesh=mesh, mp_policy=policy)\n",
        ),
    ),
    _version(
        FSDP,
        "style-loads-by-distribute",
        "",
        "set_model_state_dict with tensors that are cut here",
        (
            COPY,
            "            part = file.get_slice(name)[first : first + rows]\n"
            "            weight.to_local().copy_(part.to(weight.dtype))\n",
        ),
    ),
    _version(
        FSDP,
        "style-dcp-reads-hugging-face",
        "",
        "DCP's reader of safetensors",
        (
            LOAD,
            "    import torch.distributed.checkpoint as dcp\n\n"
            "    reader = dcp.HuggingFaceStorageReader(args.model)\n"
            "    dcp.load(model.state_dict(), storage_reader=reader)\n",
        ),
    ),
    _version(
        FSDP,
        "style-norm-by-hand",
        "",
        "the norm as a sum over the processes",
        (
            CLIP,
            "        norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])\n"
            "        norm = norm.full_tensor() if hasattr(norm, 'full_tensor') else norm\n"
            "        nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)\n",
        ),
    ),
    _version(
        FSDP,
        "style-batches-from-memory",
        "",
        "no DataLoader: rows of one tensor",
        (
            "def batches(loader, sampler):\n",
            "def batches(loader, sampler):\n    yield from from_memory(loader, sampler)\n\n\n"
            "def from_memory(loader, sampler):\n",
        ),
    ),
    _version(
        CHECKPOINT,
        "style-app-state-as-dict",
        "",
        "state_dict() of DCP's own, with the step as a tensor",
        (STATE, STATE.replace('"step": self.step', '"step": torch.tensor(self.step)')),
        (STEP, '        self.step = int(state["step"])\n'),
    ),
    _version(
        CHECKPOINT,
        "style-waits-at-the-end-of-each",
        "",
        "another thread is waited for before the next report",
        (
            "            state.step = step\n            save(state, args.folder)\n",
            "            state.step = int(step)\n            save(state, args.folder)\n",
        ),
    ),
    _version(
        FIT,
        "style-checkpoint-wrapper",
        "",
        "torch's wrapper for activation checkpointing",
        (
            RECOMPUTE,
            "            layer.gradient_checkpointing = True\n"
            "            layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)\n",
        ),
    ),
    _version(
        FIT,
        "style-compiles-forward",
        "",
        "the layer's forward, compiled",
        ("            layer.compile()\n", "            layer.forward = torch.compile(layer.forward)\n"),
    ),
    _version(
        FIT,
        "style-last-backward",
        "",
        "the last backward is announced too",
        (SYNC, SYNC + "            model.set_is_last_backward(part == args.accumulate)\n"),
    ),
)
