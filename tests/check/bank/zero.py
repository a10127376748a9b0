"""The programs of stage 05, and parts of their text that several mistakes and styles edit."""

STAGE = "solutions/05_deepspeed"
DEEPSPEED = f"{STAGE}/exercise1_deepspeed.py"
ACCELERATE = f"{STAGE}/exercise2_accelerate.py"

# Parts of these programs.
CONFIG = "    args.config = check_zero(parser, args)  # the content of the file, with this --batch-size\n"
FILE = 'os.path.join(os.path.dirname(os.path.abspath(__file__)), "ds_config.json")'
ENGINE = "    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=args.config)\n"
BACKWARD = "        engine.backward(loss)"
STEP = "        engine.step()"
SAVE = '    engine.save_checkpoint(folder, tag=f"epoch-{epoch}", client_state={"epoch": epoch})\n'
LOAD = "    _, state = engine.load_checkpoint(folder)\n"
EXPORT = "        weights = get_fp32_state_dict_from_zero_checkpoint(args.folder)"
PREPARE = "    model, optimizer = accelerator.prepare(model, optimizer)"
GATHER = "        right.append(accelerator.gather_for_metrics(hits))"
STATE = '    accelerator.save_state(f"{folder}/unfinished")\n'
TRAIN = "    train_loader = accelerator.prepare(DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True))\n"
TEST = "    test_loader = accelerator.prepare(DataLoader(test_set, args.batch_size))\n"


def config(key: str, value: str) -> tuple[str, str]:
    """Return an edit that sets an entry of the configuration."""
    return CONFIG, f"{CONFIG}    args.config[{key!r}] = {value}\n"
