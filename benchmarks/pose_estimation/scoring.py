"""Scores of a method's predictions, task by task, the same for every method and on the same tasks."""

import torch
from torch import Tensor

from l2l_niw.errors import LossError
from l2l_niw.metrics import density_rank, r_ece

CHUNK = 10  # tasks at a time
SAMPLES = 99  # of a predictive, for the ranks of its density
LEVEL = 0.9


def encoded(space, tasks):
    """Tasks as networks are given them: images from -1 to 1."""
    x, x_query = (2 * images - 1 for images in (tasks.x, tasks.x_query))
    return tasks._replace(x=x, y=space.encode(tasks.y), x_query=x_query, y_query=space.encode(tasks.y_query))


def score(predict, taskset, space, count, seed=0):
    """
    Arrays of the first `count` tasks: errors by title, (errors, tasks), negative log-likelihoods, (tasks,), and of how
    many samples the density is above the target's, (tasks, queries).
    """
    torch.manual_seed(seed)
    taskset.position, found = 0, []
    for start in range(0, count, CHUNK):
        tasks = taskset.batch(min(CHUNK, count - start))
        found.append(score_batch(predict(encoded(space, tasks)), tasks.y_query, space))
    errors, nll, rank = zip(*found)
    return {"errors": torch.cat(errors, 1).numpy(), "nll": torch.cat(nll).numpy(), "rank": torch.cat(rank).numpy()}


@torch.no_grad()
def score_batch(prediction, y, space) -> tuple[Tensor, Tensor, Tensor]:
    if not all(part.isfinite().all() for part in prediction):
        raise LossError("predictions are not finite: the training has diverged. Lower lr or inner_lr.")
    point = space.decode(prediction.mean())
    errors = torch.stack([error(point, y.double()).mean(-1) for error in space.errors.values()])
    density = lambda pose: space.log_density(prediction, pose)  # noqa: E731
    rank = density_rank(density, space.decode(prediction.sample(SAMPLES)), y)
    return errors.float(), -density(y).mean(-1).float(), rank.to(torch.uint8)


def levels(rank):
    """The share of the predictive in the smallest region that a target is in."""
    return (torch.as_tensor(rank).double() + 1) / (SAMPLES + 1)


def calibration(rank):
    """How often targets are in the region of the highest density that has 90% of the predictive, and R-ECE of all."""
    found = levels(rank)
    return {"coverage": (found <= LEVEL + 1e-9).double().mean().item(), "r_ece": r_ece(found)}
