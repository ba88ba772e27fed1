"""Scores of a method's predictions, the same for every method: on the same tasks, task by task."""

import torch
from tqdm import tqdm

from l2l_niw.data import SineLine, Tasks
from l2l_niw.metrics import r_ece, reliability

VALIDATION, TEST = 1, 2  # seeds of the tasks
CHUNK = 250


def tasks_of(split, count):
    return SineLine().sample(count, torch.Generator().manual_seed({"validation": VALIDATION, "test": TEST}[split]))


@torch.no_grad()
def score(predict, tasks, seed=0, title="scoring", position=0):
    """Squared error and negative log-likelihood of every task, and the predictive's levels at all targets."""
    torch.manual_seed(seed)
    errors, nlls, levels = [], [], []
    for start in tqdm(range(0, len(tasks.x), CHUNK), desc=title, leave=False, position=position):
        part = Tasks(*(t[start : start + CHUNK] for t in tasks))
        prediction = predict(part)
        errors.append((prediction.mean - part.y_query).square().mean((1, 2)))
        nlls.append(-prediction.log_prob(part.y_query).mean(1))
        levels.append(prediction.cdf(part.y_query).flatten())
    return torch.cat(errors), torch.cat(nlls), torch.cat(levels)


def summary(errors, nlls, levels):
    return {
        "mse": errors.mean().item(),
        "nll": nlls.mean().item(),
        "r_ece": r_ece(levels),
        "reliability": reliability(levels)[1].tolist(),
    }
