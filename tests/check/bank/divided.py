"""The programs whose ranks have parts of one model, and parts of them that several cases edit."""

PIPELINE = "tests/check/programs/pipeline.py"
LAYERS = "tests/check/programs/divided_layers.py"
SAMPLER = "DistributedSampler(train_set, num_replicas=1, rank=0, seed=4)"
GATHERED = """        parts = [None, None] if rank == 0 else None
        dist.gather_object((stage.state_dict(), optimizer.state_dict()), parts)
"""
SAVED = """            stages, optimizers = zip(*parts, strict=True)
            torch.save({"stages": stages, "optimizers": optimizers, "epochs": epoch + 1}, CHECKPOINT + ".part")
"""
LOADED = """        stage.load_state_dict(saved["stages"][rank])
        optimizer.load_state_dict(saved["optimizers"][rank])
"""
