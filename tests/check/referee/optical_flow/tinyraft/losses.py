import torch


def sequence_loss(predictions, flow, valid, gamma, max_flow):
    """L1 distance of every prediction of the sequence, later ones weighted more. The mean runs over all pixels."""
    valid = (valid & (flow.norm(dim=1) < max_flow))[:, None]
    loss = 0.0
    for i, prediction in enumerate(predictions):
        weight = gamma ** (len(predictions) - 1 - i)
        loss = loss + weight * (valid * (prediction.float() - flow).abs()).mean()
    return loss


def endpoint_sums(prediction, flow, valid):
    """Sum of the end-point errors, number of pixels with less than one pixel of error, number of valid pixels."""
    error = (prediction.float() - flow).norm(dim=1)[valid].double()
    return torch.stack([error.sum(), (error < 1.0).double().sum(), valid.double().sum()])
