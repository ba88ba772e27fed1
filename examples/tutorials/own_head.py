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


def main(iterations=80, tasks_per_batch=4, test_tasks=60, steps=3, lr=0.05, meta_lr=0.003, seed=0):
    torch.manual_seed(seed)
    # without a query each support example is predicted from the others: attention to itself would say nothing
    model = EpisodicModel(MLP(16, (32, 32)), LeaveOneOut(Matching()))
    niw = NIW(model, lr=lr, second_order="none")
    opt = torch.optim.Adam(niw.parameters(), meta_lr)
    losses = []
    for _ in range(iterations):
        opt.zero_grad()
        total = 0.0
        for _ in range(tasks_per_batch):
            x, y, x_query, y_query = sample_task()
            learner = niw.clone()
            for _ in range(steps):
                learner.adapt(learner(x, y).nll(y))
            loss = learner(x, y, x_query, y_query).loss(y_query)
            loss.backward()
            total += loss.item() / tasks_per_batch
        for p in niw.parameters():
            p.grad.data.mul_(1.0 / tasks_per_batch)
        opt.step()
        losses.append(total)

    correct = []
    for _ in range(test_tasks):
        x, y, x_query, y_query = sample_task()
        learner = niw.clone()
        for _ in range(steps):
            learner.adapt(learner(x, y).nll(y))
        prediction = learner.posterior().predict(x, y, x_query, samples=10)
        correct.append((prediction.mode == y_query).float().mean().item())
    tenth = max(iterations // 10, 1)
    first, last, accuracy = sum(losses[:tenth]) / tenth, sum(losses[-tenth:]) / tenth, sum(correct) / test_tasks
    print(f"query loss {first:.3f} -> {last:.3f}, accuracy on new tasks {100 * accuracy:.1f}%")
    return {"first": first, "last": last, "accuracy": accuracy}


if __name__ == "__main__":
    main()
