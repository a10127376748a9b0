"""``workshop simulate``: one training step as one rank of many, with fake tensors and a fake process group."""
