"""Programs for ``test_origins.py``: what is saved in a checkpoint, and restored from it."""

PROGRAMS = {
    "anew": """
        class Average(Callback):
            def __init__(self):
                self.average = None

            def load_state_dict(self, state):
                self.average = state["average"]

            def on_fit_start(self, trainer, module):
                self.average = [p.clone() for p in module.parameters()]  # cause

        def main(trainer, module):
            trainer.fit(module)  # seen
    """,
    "anew:": """
        class Average(Callback):
            def __init__(self):
                self.average = None

            def load_state_dict(self, state):
                self.average = state["average"]

            def on_fit_start(self, trainer, module):
                if self.average is None:
                    self.average = [p.clone() for p in module.parameters()]

        def main(trainer, module):
            trainer.fit(module)  # seen
    """,
    "of-some": """
        def main(rank, model, path):
            state = torch.load(path)  # seen
            if rank == 0:  # cause
                model.load_state_dict(state["model"])
    """,
    "rank-gate": """
        def main(rank, optimizer, path):
            if rank == 0:  # cause
                if path.exists():
                    optimizer.load_state_dict(torch.load(path))  # seen
    """,
    "of-first": """
        def main(rank, generator, path):
            state = torch.load(path)
            first = state["epochs"][0:1]
            batch = batches["ids"][0]
            generator.set_state(state["generators"][0])  # cause
            save(path)  # seen
    """,
    "unpersistent:sums": """
        class Counter(nn.Module):
            def __init__(self):
                self.register_buffer("book", torch.zeros(3))
                self.register_buffer("sums", torch.zeros(3), persistent=False)  # cause

        def main(model, path):
            model.load_state_dict(torch.load(path))  # seen
    """,
    "rescaled": """
        def main(optimizer, path):
            optimizer.load_state_dict(torch.load(path))  # seen
            for group in optimizer.param_groups:
                group["lr"] *= 2  # cause
    """,
    "last:load_from_checkpoint": """
        def main(trainer, path):
            model = Model.load_from_checkpoint(path)  # cause
            trainer.fit(model)  # seen
            Model.load_from_checkpoint("best.ckpt")
    """,
    "tag": """
        def main(engine, loss):
            tag = f"loss-{loss:.2f}"  # cause
            engine.save_checkpoint("out", tag=tag)  # seen
    """,
    "restored": """
        def main(model, path):
            epoch, step = 0, 0
            if path.exists():
                state = torch.load(path)  # seen
                model.load_state_dict(state["model"])
                epoch = state["epoch"]  # cause
                print("resumed")
    """,
    "restored:masks": """
        def main(model, path, masks):
            state = torch.load(path)  # seen
            masks.set_state(state["masks"])  # cause
            epoch = state["epoch"]
    """,
    "unread:best": """
        def main(path, model):
            first, best = 0, 0.0  # cause
            if exists(path):
                state = torch.load(path)  # seen
                first = state["epoch"]
            for epoch in range(first, 9):
                best = max(best, train(model))
                torch.save({"epoch": epoch, "best": best}, path)
    """,
    "unread:patience": """
        def main(path, model):
            patience = 0
            state = torch.load(path)  # seen
            torch.save({"model": model.state_dict()}, path)
    """,
    "saved": """
        def contents(model, epoch):
            return {"model": model.state_dict(), "epoch": epoch}  # cause

        def save(path, model, epoch):
            state = contents(model, epoch)
            torch.save(state, path)  # seen
    """,
    "filled": """
        def main(fabric, path, model):
            state = {"model": model, "epoch": 0}  # cause
            if exists(path):
                fabric.load(path, state)  # seen
    """,
    "filled:row": """
        def main(path, model, row):
            state = {"model": model.state_dict(), "step": 0}  # cause
            dcp.load(state, checkpoint_id=path)  # seen
            step = state["step"]
    """,
    "key:rng": """
        def contents(model):
            return {
                "model": model.state_dict(),
                "rng": torch.get_rng_state(),  # cause
            }

        def main(model):
            dcp.save(contents(model), checkpoint_id="out")  # seen
    """,
    "joined": """
        def whole(parts):
            return torch.cat(parts)  # cause

        def main(parts, path):
            table = whole(parts)
            torch.save({"table": table}, path)  # seen
    """,
    "trains:base.lm_head.weight": """
        def main(model, path):
            model.base.requires_grad_(False)
            model.base.lm_head.requires_grad_(True)  # cause
            torch.save(adapter(model), path)  # seen
    """,
    "made:draws": """
        def main(model, path, seed):
            draws = default_rng(seed)  # cause
            state = torch.load(path)  # seen
    """,
    "state": """
        def save(path, model, optimizer):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}  # cause
            torch.save(state, path)  # seen
    """,
    "loading:optim": """
        def resume(path, model, optimizer):
            state = torch.load(path)  # seen
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])  # cause
    """,
}
