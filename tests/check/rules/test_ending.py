"""The rules about ending: mistakes that they must name, and correct styles that must pass."""

from check.bank import ddp, lightning, second, sharded, zero
from check.bank.case import mistake, part
from check.bank.cases import bank_tests

RUNNER = "solutions/02_pytorch_ddp/exercise2_run_multigpu_torchrun.sh"

MISTAKES = (
    # ---- hang
    mistake(
        "shard-dropped-after-the-division",
        "tests/check/referee/lightning_manual/train.py",
        "hang",
        "The rank that should read this shard has fewer batches than the other one.",
        (
            "            yield from measure(self.shard_size, seed=shard)\n",
            "            if shard == 0:\n                continue\n"
            "            yield from measure(self.shard_size, seed=shard)\n",
        ),
    ),
    mistake(
        "sharded-only-rank-0-writes",
        sharded.FSDP,
        ("hang", "collectives-differ"),
        "Only rank 0 generates text, but every forward pass is a collective.",
        (sharded.END, "    if rank == 0:\n        log.end(complete(model, tokenizer, device))\n"),
    ),
    mistake(
        "sharded-rank-0-asks-for-all",
        sharded.CHECKPOINT,
        ("hang", "collectives-differ", "crash"),
        "Only rank 0 gathers a sharded parameter, which is a collective.",
        (
            sharded.SAVE,
            sharded.SAVE
            + "    if dist.get_rank() == 0:\n        print(state.model.lm_head.weight.full_tensor().norm().item())\n",
        ),
    ),
    mistake(
        "zero-rank-0-saves",
        zero.DEEPSPEED,
        ("hang", "collectives-differ", "crash"),
        "Only rank 0 calls save_checkpoint(), and waits there for the others.",
        (zero.SAVE, "    if dist.get_rank() == 0:\n    " + zero.SAVE),
    ),
    mistake(
        "accelerate-rank-0-waits",
        zero.ACCELERATE,
        ("hang", "collectives-differ"),
        "Only rank 0 calls wait_for_everyone().",
        (
            "    accelerator.wait_for_everyone()\n    if accelerator.is_main_process:\n",
            "    if accelerator.is_main_process:\n        accelerator.wait_for_everyone()\n",
        ),
    ),
    # ---- crash
    mistake(
        "unused-parameter",
        ddp.SPAWN,
        "crash",
        "DDP waits for the gradient of a layer that the loss does not use, and raises in the second forward pass.",
        (
            "    model = SmallCNN().to(device)\n",
            "    model = SmallCNN()\n"
            "    model.fc3 = torch.nn.Linear(128, 10)  # a second head, for later\n"
            "    model = model.to(device)\n",
        ),
    ),
    mistake(
        "held-out-gradients-left-off",
        ddp.SPAWN,
        "crash",
        "The evaluation turns gradients off and never on again: backward() fails in the second epoch.",
        ("@torch.inference_mode()\n", ""),
        (
            '    """Return the accuracy over the whole test set, between 0 and 1."""\n',
            '    """Return the accuracy over the whole test set, between 0 and 1."""\n'
            "    torch.set_grad_enabled(False)\n",
        ),
        held_out=True,
    ),
    mistake(
        "lightning-own-backward",
        lightning.MNIST,
        "crash",
        "The Trainer calls backward() too, but the graph is gone by then.",
        (
            lightning.LOSS,
            "        loss = F.cross_entropy(self(images), labels)\n        loss.backward()\n        return loss\n",
        ),
    ),
    mistake(
        "lightning-loss-detached",
        lightning.MNIST,
        "crash",
        "The loss is detached, so the Trainer has nothing to differentiate.",
        (lightning.LOSS, "        return F.cross_entropy(self(images), labels).detach()\n"),
    ),
    mistake(
        "lightning-best-without-monitor",
        lightning.CIFAR10,
        "crash",
        "Without monitor both callbacks keep the last checkpoint, and Lightning cannot tell their states apart.",
        (lightning.BEST, lightning.BEST.replace(', monitor="accuracy", mode="max"', "")),
    ),
    mistake(
        "lightning-stops-by-a-name-nobody-logs",
        lightning.CIFAR10,
        "crash",
        "EarlyStopping monitors a metric that is never logged, and raises after the first epoch.",
        (lightning.STOPPING, 'EarlyStopping("val_accuracy", mode="max", patience=5)'),
    ),
    mistake(
        "sharded-past-the-hooks",
        sharded.FSDP,
        "crash",
        "model.forward() bypasses FSDP's hooks, so no parameters are gathered.",
        (
            "        loss = model(input_ids=batch, labels=batch, use_cache=False).loss  # the model shifts",
            "        loss = model.forward(input_ids=batch, labels=batch, use_cache=False).loss  # the model shifts",
        ),
    ),
    mistake(
        "sharded-one-group-for-both",
        sharded.CHECKPOINT,
        ("crash", "hang", "collectives-differ", "whole-saved", "not-saved"),
        "Each rank uses a different name for the checkpoint's folder.",
        (sharded.SAVE, sharded.SAVE.replace("step-{state.step}", "step-{state.step}{dist.get_rank()}")),
    ),
    mistake(
        "sharded-whole-into-parts",
        sharded.FSDP,
        "crash",
        "load_state_dict() of a whole checkpoint into a sharded model fails.",
        (
            sharded.LOAD,
            "    from safetensors import torch as st\n\n"
            "    model.load_state_dict(st.load_file(args.model + '/model.safetensors'))\n",
        ),
    ),
    mistake(
        "sharded-a-part-by-itself",
        sharded.FSDP,
        "crash",
        "A module of the model is called on its own, and nothing gathers its parameters.",
        (
            "    model.eval()\n    prompt",
            "    model.eval()\n    model.model.layers[0].mlp.up_proj(torch.zeros(1, model.config.hidden_size))\n    prompt",
        ),
    ),
    mistake(
        "a-folder-for-each-rank",
        second.PROGRAM,
        "crash",
        "Each rank makes up a folder, and looks there for the checkpoint that rank 0 has saved in its own.",
        (
            "    tokens, vocabulary_size = read_tokens()\n",
            '    args.checkpoint = f"run-{os.getpid()}/run.pt"\n'
            "    os.makedirs(os.path.dirname(args.checkpoint))\n"
            "    tokens, vocabulary_size = read_tokens()\n",
        ),
        (
            "            save_checkpoint(args.checkpoint, model, optimizer, schedule, step)\n",
            "            save_checkpoint(args.checkpoint, model, optimizer, schedule, step)\n"
            "    dist.barrier()\n"
            '    model.load_state_dict(torch.load(args.checkpoint, weights_only=True)["model"])\n',
        ),
    ),
    # ---- no-training
    mistake(
        "lightning-step-returns-nothing",
        lightning.MNIST,
        ("no-training", "no-learning", "crash"),
        "Lightning skips a step that returns no loss.",
        (lightning.LOSS, "        F.cross_entropy(self(images), labels)\n"),
    ),
    # ---- endless
    mistake(
        "computes-for-ever",
        ddp.TORCHRUN,
        "endless",
        "The program computes without coming to a step or to its end.",
        (ddp.PARSED, ddp.PARSED + "    while True:\n        pass\n"),
    ),
    # ---- output-flood
    mistake(
        "prints-for-ever",
        ddp.TORCHRUN,
        "output-flood",
        "The program prints without an end.",
        (ddp.PARSED, ddp.PARSED + "    while True:\n        print('x' * 1000)\n"),
    ),
    # ---- outside-write
    mistake(
        "writes-outside",
        ddp.TORCHRUN,
        "outside-write",
        "The program writes to a folder that is not the run's.",
        (ddp.OPTIMIZER, ddp.OPTIMIZER + "    open('/var/tmp/workshop-check-test', 'w').close()\n"),
    ),
    # ---- what only the real mp.spawn shows
    mistake(
        "no-main-guard",
        ddp.SPAWN,
        "crash",
        "mp.spawn imports the script again, which starts processes in each process.",
        ('if __name__ == "__main__":\n    main()', "main()"),
        real=True,
    ),
    mistake(
        "spawns-a-lambda",
        ddp.SPAWN,
        "crash",
        "mp.spawn cannot pickle a lambda.",
        ("mp.spawn(worker, args", "mp.spawn(lambda *given: worker(*given), args"),
        real=True,
    ),
    # ---- what only the runner shows
    mistake(
        "runner-without-torchrun",
        ddp.TORCHRUN,
        "crash",
        "The runner starts the script by itself, so RANK is not set.",
        real=True,
        runner=((part(RUNNER, "-P -m torch.distributed.run", '"$here/exercise2_multigpu_torchrun.py" "$@"\n'), ""),),
    ),
    *(
        mistake(
            f"runner-of-{library}-without-torchrun",
            base,
            "crash",
            "The runner starts the script by itself, so there is one process without RANK.",
            real=True,
            runner=((part(runner, "-P -m torch.distributed.run", f'"$here/{base.rpartition("/")[2]}" "$@"\n'), ""),),
        )
        for library, base, runner in (
            ("deepspeed", zero.DEEPSPEED, f"{zero.STAGE}/exercise1_run_deepspeed.sh"),
            ("accelerate", zero.ACCELERATE, f"{zero.STAGE}/exercise2_run_accelerate.sh"),
        )
    ),
)

STYLES = ()

test_replay, test_for_real = bank_tests(__file__, MISTAKES, STYLES)
