"""The rules about learning: mistakes that they must name, and correct styles that must pass."""

from check.bank import ddp, gpus, lightning, second, sharded
from check.bank.case import mistake, style
from check.bank.cases import bank_tests

NO_LEARNING = "solutions/02_pytorch_ddp/exercise4_find_the_bug_no_learning.py"

# Activation checkpointing of the first layer, whose input needs no gradient.
IMPORTED = "from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset\n"
IMPORTS = (IMPORTED, "from torch.utils.checkpoint import checkpoint\n" + IMPORTED)
UNUSED = ("device_ids=[local_rank])", "device_ids=[local_rank], find_unused_parameters=True)")
HIDDEN = "self.hidden(x).relu()"
DROPPED = "lambda x: self.hidden(torch.dropout(x, 0.5, True))"

GAN = "tests/check/referee/gan/train.py"
FEWER_IMAGES = (
    ("rings(768, args.seed)", "rings(192, args.seed)"),
    ('"--epochs", type=int, default=4', '"--epochs", type=int, default=2'),
)
CLEAR = '            optimizers["discriminator"].zero_grad()\n'
FROZEN = "            discriminator.requires_grad_(False)\n"
FEWER_POINTS = (gpus.SETS, gpus.SETS.replace("384", "128"))
# The whole model of the program for GPUs in bfloat16, with a layer whose weights begin with 1.
NORM = ("nn.Dropout(0.1)", "nn.Sequential(nn.LayerNorm(64), nn.Dropout(0.1))")
IN_BFLOAT16 = ("model = Classifier().to(device)", "model = Classifier().to(device, torch.bfloat16)")
INPUTS = (
    ("x, y = x.to(device), y.to(device)", "x, y = x.to(device, torch.bfloat16), y.to(device)"),
    ("16, device=x.device)", "16, device=x.device, dtype=x.dtype)"),
)

MISTAKES = (
    mistake(
        "whole-model-in-bfloat16",
        gpus.GPUS,
        "steps-rounded-away",
        "The weights of the norm begin with 1, and steps of 0.001 round to zero.",
        FEWER_POINTS,
        NORM,
        IN_BFLOAT16,
        *INPUTS,
        (gpus.ADAMW, gpus.ADAMW.replace("3e-3", "1e-3")),
    ),
    mistake(
        "discriminator-cleared-after-its-step",
        GAN,
        "gradients-mixed",
        "The backward pass of the generator leaves gradients in the discriminator, and nothing clears them.",
        *FEWER_IMAGES,
        (CLEAR + "            with", "            with"),
        (
            '            optimizers["discriminator"].step()\n',
            '            optimizers["discriminator"].step()\n' + CLEAR,
        ),
        (FROZEN, ""),
    ),
    mistake(
        "reentrant-checkpoint-of-the-first-layer",
        gpus.GPUS,
        "checkpointed-without-gradients",
        "The input of the first layer needs no gradient, so reentrant checkpointing gives its parameters none.",
        IMPORTS,
        UNUSED,
        (HIDDEN, "checkpoint(self.hidden, x, use_reentrant=True).relu()"),
    ),
    mistake(
        "checkpoint-without-the-random-state",
        gpus.GPUS,
        "recomputed-at-random",
        "The recomputation draws other dropout masks than the forward pass.",
        IMPORTS,
        (
            HIDDEN,
            f"checkpoint({DROPPED}, x, use_reentrant=False, preserve_rng_state=False).relu()",
        ),
    ),
    mistake(
        "norms-not-initialized-after-to-empty",
        "tests/check/referee/fsdp2_finetune/finetune.py",
        "never-initialized",
        "Only the matrices are initialized; the weights of the norms are what the memory contained.",
        (
            "    weights = torch.load(args.pretrained",
            "    for parameter in model.parameters():\n"
            "        if parameter.dim() > 1:\n"
            "            torch.nn.init.normal_(parameter, std=0.05)\n"
            "    return model\n"
            "    weights = torch.load(args.pretrained",
        ),
    ),
    mistake(
        "sigmoid-twice",
        NO_LEARNING,
        "loss-of-probabilities",
        "The loss applies the sigmoid itself, so it is applied twice.",
        (
            "loss = F.binary_cross_entropy_with_logits(outputs, is_odd)",
            "loss = F.binary_cross_entropy_with_logits(outputs.sigmoid(), is_odd)",
        ),
        held_out=True,
    ),
    mistake(
        "labels-shifted-twice",
        sharded.FSDP,
        "labels-shifted",
        "The model shifts the labels itself, so it learns to predict the token after the next one.",
        (
            "loss = model(input_ids=batch, labels=batch, use_cache=False).loss  # the model shifts the labels itself",
            "loss = model(input_ids=batch[:, :-1], labels=batch[:, 1:], use_cache=False).loss",
        ),
        held_out=True,
    ),
    # ---- no-learning
    mistake(
        "zero-grad-after-backward",
        ddp.SINGLE,
        "no-learning",
        "The gradients are cleared just before the step, so the parameters never move.",
        ("        optimizer.zero_grad()\n", ""),
        (ddp.BACKWARD, ddp.BACKWARD + "        optimizer.zero_grad()\n"),
    ),
    # ---- wrong-parameters
    mistake(
        "optimizer-of-another-model",
        ddp.SINGLE,
        ("wrong-parameters", "no-learning"),
        "The optimizer holds the parameters of an unused model, so the loss does not move.",
        (ddp.OPTIMIZER, ddp.OPTIMIZER.replace("model.parameters()", "SmallCNN().parameters()")),
    ),
    mistake(
        "held-out-optimizer-of-a-copy",
        ddp.SPAWN,
        ("wrong-parameters", "no-learning"),
        "The optimizer gets the parameters of a copy that was kept for comparison.",
        ("import os\n", "import copy\nimport os\n"),
        (
            ddp.OPTIMIZER,
            "    untrained = copy.deepcopy(model)  # to compare with later\n"
            "    optimizer = torch.optim.AdamW(untrained.parameters(), lr=1e-3)\n",
        ),
        held_out=True,
    ),
    mistake(
        "held-out-parameters-replaced-on-resume",
        ddp.TORCHRUN,
        ("wrong-parameters", "no-learning", "resume-differs"),
        "With assign=True a resumed model gets new parameters, while the optimizer holds the old ones.",
        ('load_state_dict(checkpoint["model"])', 'load_state_dict(checkpoint["model"], assign=True)'),
        held_out=True,
    ),
    mistake(
        "second-optimizer-of-another-model",
        second.PROGRAM,
        ("wrong-parameters", "no-learning"),
        "The optimizer holds the parameters of a model other than the one that is trained.",
        (
            second.MODEL + second.OPTIMIZER,
            second.OPTIMIZER.replace("model.", "NextCharacter(vocabulary_size).to(device).") + second.MODEL,
        ),
    ),
    # ---- parameters-forgotten
    mistake(
        "head-replaced-after-the-optimizer",
        second.PROGRAM,
        "parameters-forgotten",
        "The last layer is replaced after the optimizer was created, so it never changes.",
        (
            second.OPTIMIZER,
            second.OPTIMIZER + "    model.head = nn.Linear(model.head.in_features, vocabulary_size).to(device)\n",
        ),
    ),
    mistake(
        "lightning-optimizer-of-another-model",
        lightning.MNIST,
        ("wrong-parameters", "no-learning"),
        "The optimizer holds the parameters of an unused model.",
        (
            lightning.OPTIMIZER,
            "        self.other = [SmallCNN()]\n        return torch.optim.AdamW(self.other[0].parameters(), lr=1e-3)\n",
        ),
    ),
    mistake(
        "sharded-optimizer-first",
        sharded.FSDP,
        ("wrong-parameters", "no-learning", "crash"),
        "The optimizer holds the parameters from before they were sharded.",
        ("    model = load_model(args, device)\n", ""),
        (
            sharded.OPTIMIZER,
            "    whole = AutoModelForCausalLM.from_pretrained(args.model, local_files_only=True)\n"
            "    optimizer = torch.optim.AdamW(whole.parameters(), lr=args.learning_rate, betas=(0.9, 0.95))\n"
            "    model = load_model(args, device)\n",
        ),
    ),
    # ---- gradients-pile-up
    mistake(
        "zero-grad-missing",
        ddp.SINGLE,
        "gradients-pile-up",
        "Each step uses the gradients of all earlier steps as well.",
        ("        optimizer.zero_grad()\n", ""),
    ),
    mistake(
        "second-gradients-not-zeroed",
        second.PROGRAM,
        "gradients-pile-up",
        "The gradients are never cleared: each step uses those of the earlier steps as well.",
        (second.ZERO, ""),
    ),
    mistake(
        "lightning-manual-without-zero-grad",
        lightning.MNIST,
        "gradients-pile-up",
        "With automatic_optimization off the Trainer does not clear the gradients.",
        (
            "        self.model = SmallCNN()\n",
            "        self.model = SmallCNN()\n        self.automatic_optimization = False\n",
        ),
        (
            lightning.LOSS,
            "        loss = F.cross_entropy(self(images), labels)\n        self.manual_backward(loss)\n"
            "        self.optimizers().step()\n        return loss\n",
        ),
    ),
    mistake("sharded-gradients-stay", sharded.FSDP, "gradients-pile-up", "zero_grad() is missing.", (sharded.ZERO, "")),
    # ---- graph-kept
    mistake(
        "loss-kept-with-its-graph",
        ddp.SINGLE,
        "graph-kept",
        "The tensor of losses becomes part of the graph, and keeps the graph of every step.",
        ("losses[step] = loss.item()", "losses[step] = loss"),
    ),
    mistake(
        "held-out-losses-keep-graphs",
        ddp.SINGLE,
        "graph-kept",
        "The loss goes into the tensor of losses with its graph, so all graphs of an epoch stay in memory.",
        ("        losses[step] = loss.item()\n", "        losses[step] = loss\n"),
        held_out=True,
    ),
)

MISTAKES += (
    mistake(
        "loss-of-nothing",
        gpus.GPUS,
        "loss-not-finite",
        "From the third batch on, the loss is the mean over no values.",
        (gpus.LOSS, gpus.LOSS.replace("(x), y", "(x)[:left], y[:left]")),
        (
            "        for x, y in loader:\n            x, y",
            "        for number, (x, y) in enumerate(loader):\n"
            "            left = len(x) if number < 2 else 0\n            x, y",
        ),
    ),
)

STYLES = (
    style(
        "whole-model-in-bfloat16-with-large-steps",
        gpus.GPUS,
        "The model is in bfloat16, but its steps are large enough, as with SGD and a high learning rate.",
        FEWER_POINTS,
        IN_BFLOAT16,
        *INPUTS,
        (gpus.ADAMW, "optimizer = torch.optim.SGD(model.parameters(), lr=0.5)"),
    ),
    style(
        "discriminator-cleared-after-the-generator",
        GAN,
        "The backward pass of the generator leaves gradients in the discriminator, which are cleared at the end.",
        *FEWER_IMAGES,
        (CLEAR + "            with", "            with"),
        (FROZEN, ""),
        ("            discriminator.requires_grad_(True)\n", CLEAR),
    ),
    style(
        "checkpoint-of-the-first-layer",
        gpus.GPUS,
        "Without reentrance, checkpointing needs no input with a gradient.",
        IMPORTS,
        (HIDDEN, "checkpoint(self.hidden, x, use_reentrant=False).relu()"),
    ),
    style(
        "zero-grad-last-and-loss-now-and-then",
        ddp.TORCHRUN,
        "zero_grad() fills with zeros at the end of the step, and one step in ten calls loss.item().",
        (
            ddp.BATCH,
            "        images, labels = images.to(device), labels.to(device)\n"
            + ddp.FORWARD
            + ddp.BACKWARD
            + ddp.STEP
            + "        optimizer.zero_grad(set_to_none=False)\n"
            "        losses[step] = loss.detach()\n"
            "        if step % 10 == 0 and dist.get_rank() == 0:\n"
            '            tqdm.write(f"step {step} | loss of rank 0 {loss.item():.4f}")\n',
        ),
    ),
    style(
        "lightning-style-returns-a-dict",
        lightning.MNIST,
        "training_step() returns a dictionary.",
        (lightning.LOSS, '        return {"loss": F.cross_entropy(self(images), labels)}\n'),
    ),
    style(
        "lightning-style-optimizer-in-a-dict",
        lightning.MNIST,
        "configure_optimizers() returns a dictionary.",
        (lightning.OPTIMIZER, '        return {"optimizer": torch.optim.AdamW(self.parameters(), lr=1e-3)}\n'),
    ),
    style(
        "lightning-style-logs-the-loss",
        lightning.MNIST,
        "The loss is logged per step and per epoch.",
        (
            lightning.LOSS,
            "        loss = F.cross_entropy(self(images), labels)\n"
            '        self.log("train_loss", loss, on_step=True, on_epoch=True)\n        return loss\n',
        ),
    ),
    style(
        "lightning-style-manual-optimization",
        lightning.MNIST,
        "The module runs backward and step itself.",
        (
            "        self.model = SmallCNN()\n",
            "        self.model = SmallCNN()\n        self.automatic_optimization = False\n",
        ),
        (
            lightning.LOSS,
            "        optimizer = self.optimizers()\n        optimizer.zero_grad()\n"
            "        loss = F.cross_entropy(self(images), labels)\n"
            "        self.manual_backward(loss)\n        optimizer.step()\n        return loss\n",
        ),
    ),
    style(
        "emptied-tensor",
        ddp.TORCHRUN,
        "A tensor that the garbage collector has emptied, but that something still holds: it has no graph to ask for.",
        (
            "    torch.manual_seed(SEED)  # the same initial parameters in every run\n",
            "    torch.manual_seed(SEED)\n    emptied = torch.ones(1)\n    import ctypes\n"
            "    # PyTypeObject.tp_clear, which Python's collector calls\n"
            "    clear = ctypes.c_void_p.from_address(id(torch.Tensor) + 192).value\n"
            "    ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object)(clear)(emptied)\n",
        ),
    ),
)

test_replay, test_for_real = bank_tests(__file__, MISTAKES, STYLES)
