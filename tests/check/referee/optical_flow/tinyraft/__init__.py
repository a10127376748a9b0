from .data import FlowPairs
from .losses import endpoint_sums, sequence_loss
from .model import TinyRAFT

__all__ = ["FlowPairs", "TinyRAFT", "endpoint_sums", "sequence_loss"]
