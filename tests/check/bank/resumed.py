"""Programs of the referee, made shorter, whose second start lacks a part of the state."""

from check.bank import ddp, second
from check.bank.case import mistake, style

VIT = "tests/check/referee/fsdp2_vit/train.py"
PINN = "tests/check/referee/pinn_lbfgs/train.py"
TABLE = "tests/check/referee/sharded_embedding/train.py"
STREAM = "tests/check/referee/streaming_text_2/train.py"
ZERO1 = "tests/check/referee/zero1_by_hand/train.py"

VIT_SHORT = (
    ('"--epochs", type=int, default=4', '"--epochs", type=int, default=2'),
    ("Shapes(1024, ", "Shapes(256, "),
    ("Shapes(301, ", "Shapes(32, "),
)
PINN_SHORT = (
    ('"--rounds", type=int, default=5', '"--rounds", type=int, default=2'),
    ('"--iterations", type=int, default=30', '"--iterations", type=int, default=8'),
    ("default=1200", "default=120"),
)

CENTERED = """
class Centered(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.center = torch.zeros(10)

    def forward(self, outputs, labels):
        self.center = 0.9 * self.center + 0.1 * outputs.detach().mean(dim=0)
        return F.cross_entropy(outputs - self.center, labels)


def parse_arguments():
"""
SUBTRACTED = (
    ("\ndef parse_arguments():\n", CENTERED),
    ("    optimizer = torch.optim", "    model.criterion = Centered().to(device)\n    optimizer = torch.optim"),
    (ddp.LOSS, "loss = model.criterion(model(images), labels)"),
)

OPTIMIZER_LOADED = '    optimizer.load_state_dict(checkpoint["optimizer"])'
AVERAGE = (
    "average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))"
)
EVALUATED = "        accuracy = evaluate(model, test_loader)\n"
SWAPPED = """\
        trained = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(average.module.state_dict())
"""
REPLACED = '            os.replace(args.checkpoint + ".tmp", args.checkpoint)\n'

MISTAKES = (
    mistake(
        "resume-fails-beside-names-of-the-wrapper",
        second.TAGGER,
        "resume-fails",
        "The program knows the names that it saves; its second start fails because a method does not exist.",
        ('"model": model.state_dict()', '"model": ddp_model.state_dict()'),
        (
            'model.load_state_dict(checkpoint["model"])\n',
            'model.load_state_dict({name.removeprefix("module."): value for name, value in checkpoint["model"].items()})\n'
            "    model.restored()\n",
        ),
    ),
    mistake(
        "adagrad-loaded-on-rank-0",
        second.TAGGER,
        ("optimizer-lost", "resume-differs"),
        "Only rank 0 loads the sums of Adagrad, so the ranks take different steps with the same gradients.",
        ("AdamW(", "Adagrad("),
        (OPTIMIZER_LOADED, f"    if dist.get_rank() == 0:\n    {OPTIMIZER_LOADED}"),
    ),
    mistake(
        "saved-while-averaged-parameters-are-in-the-model",
        second.TAGGER,
        "resume-differs",
        "The checkpoint contains the averaged parameters in place of the trained ones.",
        ("    ddp_model = ", f"    {AVERAGE}\n    ddp_model = "),
        (
            "            optimizer.step()\n",
            "            optimizer.step()\n            average.update_parameters(model)\n",
        ),
        (EVALUATED, f"{SWAPPED}{EVALUATED}"),
        (REPLACED, f"{REPLACED}        model.load_state_dict(trained)\n"),
    ),
    mistake(
        "slow-copy-of-the-model-is-not-saved",
        second.TAGGER,
        "resume-differs",
        "The model learns from its own average, which begins again with the first parameters.",
        (second.OPTIMIZER, second.OPTIMIZER + "    slow = copy.deepcopy(model)\n"),
        ("import argparse\n", "import argparse\nimport copy\n"),
        (
            "            loss.backward()\n            optimizer.step()\n",
            "            with torch.no_grad():\n"
            "                wanted = slow(tokens)\n"
            "            (loss + F.mse_loss(logits, wanted)).backward()\n"
            "            optimizer.step()\n"
            "            with torch.no_grad():\n"
            "                for own, new in zip(slow.parameters(), model.parameters(), strict=True):\n"
            "                    own.lerp_(new, 0.3)\n",
        ),
    ),
    mistake(
        "teacher-made-of-the-loaded-model",
        second.TAGGER,
        "resume-differs",
        "The teacher has the first parameters of the model, and after a second start those of the checkpoint.",
        ("Sequences(96, seed=1)", "Sequences(32, seed=1)"),
        (
            "    ddp_model = ",
            "    teacher = Tagger()\n    teacher.load_state_dict(model.state_dict())\n    ddp_model = ",
        ),
        (
            "            loss.backward()\n",
            "            with torch.no_grad():\n"
            "                wanted = teacher(tokens)\n"
            "            (loss + F.mse_loss(logits, wanted)).backward()\n",
        ),
    ),
    mistake(
        "running-mean-is-no-buffer",
        ddp.SINGLE,
        "resume-differs",
        "The loss keeps a running mean in an attribute, which the state_dict() of the model does not contain.",
        *SUBTRACTED,
    ),
    mistake(
        "one-key-for-the-random-states",
        VIT,
        "resume-differs",
        "Each rank saves its random state under the same key, and DCP keeps that of one rank.",
        *VIT_SHORT,
        ('f"rng_{rank}": torch.get_rng_state()', '"rng": torch.get_rng_state()'),
        ('torch.set_rng_state(state[f"rng_{rank}"])', 'torch.set_rng_state(state["rng"])'),
    ),
    mistake(
        "points-of-rank-0-for-all",
        PINN,
        "resume-differs",
        "The checkpoint has the points of rank 0, and all ranks continue with these.",
        *PINN_SHORT,
        ('points = state["points"][rank]', 'points = state["points"]'),
        ('"points": of_all, "round"', '"points": points, "round"'),
    ),
    mistake(
        "rows-in-the-order-of-the-ranks",
        TABLE,
        "resume-differs",
        "The table is saved in a different order than it is loaded.",
        ('"--epochs", type=int, default=6', '"--epochs", type=int, default=2'),
        ("16384, seed=1), Clicks(sizes, 4096", "2048, seed=1), Clicks(sizes, 256"),
        ("torch.stack(parts, dim=1).flatten(0, 1)[", "torch.cat(parts)["),
    ),
    mistake(
        "workers-before-the-load",
        STREAM,
        "resume-differs",
        "The workers of the loader start before the checkpoint is loaded, with a copy of the stream at its beginning.",
        ('"--steps", type=int, default=80', '"--steps", type=int, default=40'),
        ("    loader = DataLoader(", "    batches = iter(DataLoader("),
        ("num_workers=2)\n", "num_workers=2))\n"),
        ("    batches = iter(loader)\n", ""),
    ),
    mistake(
        "master-parameters-not-saved",
        ZERO1,
        "resume-differs",
        "The checkpoint lacks the float32 parameters, which replace the loaded ones in the first step.",
        ("make_windows(8192, 1)", "make_windows(2048, 1)"),
        ('"master": self.master, ', ""),
        ('        self.master.copy_(state["master"])\n', ""),
    ),
)

STYLES = (
    style(
        "running-mean-in-a-buffer",
        ddp.SINGLE,
        "The loss keeps a running mean in a buffer, which is saved with the model.",
        *SUBTRACTED,
        ("        self.center = torch.zeros(10)\n", '        self.register_buffer("center", torch.zeros(10))\n'),
        (
            "    check_arguments(parser, args, SmallCNN(), world_size=1)\n",
            "    model = SmallCNN()\n    model.criterion = Centered()\n    check_arguments(parser, args, model, world_size=1)\n",
        ),
    ),
    style("a-key-for-each-rank", VIT, "Each rank saves its random state under a key of its own.", *VIT_SHORT),
    style("points-of-each-rank", PINN, "The checkpoint has the points of all ranks.", *PINN_SHORT),
)
