"""The programs of stage 04, and parts of their text that several mistakes and styles edit."""

STAGE = "solutions/04_model_parallel_with_fsdp"
FSDP = f"{STAGE}/exercise1_fsdp_codellama.py"
CHECKPOINT = f"{STAGE}/exercise2_sharded_checkpoint.py"
EXPORT = f"{STAGE}/exercise2_export.py"
FIT = f"{STAGE}/exercise3_fit_the_model.py"

# Parts of these programs.
LAYERS = """    for layer in model.model.layers:
        # One communication group: gathered for the forward and the backward pass of the layer, and freed after each of them.
        fully_shard(layer, mesh=mesh, mp_policy=precision(device))
"""
ROOT = "    return fully_shard(model, mesh=mesh, mp_policy=precision(device))  # the rest: embedding, final norm, output layer\n"
POLICY = "    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)\n"
META = '    with torch.device("meta"):  # shapes without memory: no process ever holds the whole model\n'
MAKE = "        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)\n"
LOAD = "    load_weights(model, args.model)\n"
EMPTY = "    model.to_empty(device=device)  # memory for this process's shards, not yet initialized\n"
ROTARY = "    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)\n"
ROWS = "        first = rows * dist.get_rank()\n"
COPY = "            weight.to_local().copy_(file.get_slice(name)[first : first + rows])\n"
OPTIMIZER = "    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.95))\n"
CLIP = "        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)\n"
SAMPLER = "    sampler = DistributedSampler(train_set, seed=SEED, drop_last=True)\n"
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
SYNC = "            model.set_requires_gradient_sync(part == args.accumulate)\n"
PART_LOSS = "            part_loss = model(input_ids=batch, labels=batch, use_cache=False).loss / args.accumulate\n"
RECOMPUTE = "            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)\n"
