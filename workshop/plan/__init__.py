"""Plan a training: which layout on which GPUs, how fast, how long and what it costs, with the error of the prediction."""
