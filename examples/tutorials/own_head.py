#!/usr/bin/env python3

"""Your own head: Matching Networks' attention over the support, in one method. Synthetic classes, no download."""

import torch
from torch.nn import functional as F

from l2l_niw import NIW, EpisodicModel
from l2l_niw.heads import Head, LeaveOneOut
from l2l_niw.heads.base import Positive
from l2l_niw.heads.predictions import Classes
from l2l_niw.models import MLP


class Matching(Head):
    """
    **Description**

    A class is as probable as the attention that a query pays to its support examples: the softmax, over the support,
    of scaled cosines between features.

    **Arguments**

    * **scale** (float, *optional*, default=10.0) - What cosines are multiplied by; learned, in log.

    **References**

    1. Vinyals et al. 2016. "Matching Networks for One Shot Learning." NeurIPS.
    """

    task = "classification"

    def __init__(self, scale=10.0):
        super().__init__()
        self.scale = Positive("scale", scale, learned=True)

    def predict(self, support, y, query, query_y):
        similarity = F.normalize(query, dim=-1) @ F.normalize(support, dim=-1).mT  # (..., m, n)
        attention = F.log_softmax(self.scale() * similarity, -1).unsqueeze(-1)  # (..., m, n, 1)
        members = y.onehot.unsqueeze(-3)  # (..., 1, n, ways)
        logits = attention.masked_fill(~members, -1e9).logsumexp(-2)  # (..., m, ways)
        return Classes(logits, y)


def sample_task(ways=5, shots=3, queries=10, sensors=16):
    """Gaussian classes that rotate with the task."""
    centers, turn = torch.randn(ways, sensors), torch.linalg.qr(torch.randn(sensors, sensors))[0]

    def draw(each):
        points = centers.repeat(each, 1) + 1.3 * torch.randn(ways * each, sensors)
        return points @ turn, torch.arange(ways).repeat(each)

    return *draw(shots), *draw(queries)


def predict(niw, task, steps, samples=10):
    """The query's prediction: the average over networks of the task's posterior."""
    x, y, x_query, _ = task
    learner = niw.clone()
    for _ in range(steps):
        learner.adapt(learner(x, y).nll(y))
    with torch.no_grad():
        return learner.posterior().predict(x, y, x_query, samples=samples)


def score(niw, tasks, steps):
    """Mean NLL and accuracy over tasks."""
    predictions = [predict(niw, task, steps) for task in tasks]
    nll = sum(p.nll(task[3]).item() for p, task in zip(predictions, tasks)) / len(tasks)
    accuracy = sum((p.mode == task[3]).float().mean().item() for p, task in zip(predictions, tasks)) / len(tasks)
    return {"nll": nll, "accuracy": accuracy}


def main(iterations=80, tasks_per_batch=4, test_tasks=60, steps=3, lr=0.05, meta_lr=0.003, seed=0):
    torch.manual_seed(seed)
    # without a query each support example is predicted from the others: attention to itself would say nothing
    model = EpisodicModel(MLP(16, (32, 32)), LeaveOneOut(Matching()))
    niw = NIW(model, lr=lr, second_order="none")
    test = [sample_task() for _ in range(test_tasks)]
    before = score(niw, test, steps)

    opt = torch.optim.Adam(niw.parameters(), meta_lr)
    for _ in range(iterations):
        opt.zero_grad()
        for _ in range(tasks_per_batch):
            x, y, x_query, y_query = sample_task()
            learner = niw.clone()
            for _ in range(steps):
                learner.adapt(learner(x, y).nll(y))
            learner(x, y, x_query, y_query).loss(y_query).backward()
        for p in niw.parameters():
            p.grad.data.mul_(1.0 / tasks_per_batch)
        opt.step()

    after = score(niw, test, steps)
    for when, found in (("before", before), ("after", after)):
        print(f"{when:6s} training: NLL {found['nll']:.3f}, accuracy {100 * found['accuracy']:.1f}%")
    return {"before": before, "after": after}


if __name__ == "__main__":
    main()
