"""Functional contrastive learning: its penalty against a sum written out, and what it is of."""

import pytest
import torch
from head_cases import FEATURES
from torch import nn
from torch.nn import functional as F

from l2l_niw.errors import ArgumentError, ModelError
from l2l_niw.heads import ANP, CNP, FunctionalContrast
from l2l_niw.heads.functional_contrast import nt_xent

HEADS = {
    "cnp": lambda: CNP(FEATURES, 2, width=8, aggregate="max"),
    "bayesian": lambda: CNP(FEATURES, 2, width=8, aggregate="bayesian"),
    "anp": lambda: ANP(FEATURES, 2, width=8, heads=2, latent=False),
}
heads = pytest.mark.parametrize("name", HEADS)


def batch(*lead):
    return (
        torch.randn(*lead, 5, FEATURES),
        torch.randn(*lead, 5, 2),
        torch.randn(*lead, 4, FEATURES),
        torch.randn(*lead, 4, 2),
    )


@pytest.mark.parametrize("each", [2, 3])
def test_the_loss_is_the_formula(each, double):
    views, t = torch.randn(4, each, 6), 0.5
    losses = []
    for task in range(4):
        rest = [views[k, v] for k in range(4) if k != task for v in range(each)]
        for i in range(each):
            far = sum((F.cosine_similarity(views[task, i], other, dim=0) / t).exp() for other in rest)
            for j in range(each):
                if i != j:
                    near = (F.cosine_similarity(views[task, i], views[task, j], dim=0) / t).exp()
                    losses.append(-(near / (near + far)).log())
    torch.testing.assert_close(nt_xent(views, t), torch.stack(losses).mean())


@heads
def test_training_adds_the_penalty_and_prediction_stays(name):
    head = FunctionalContrast(HEADS[name](), weight=3.0)
    x, y, x_query, y_query = batch(6)
    trained, plain = head(x, y, x_query, y_query), head(x, y, x_query)
    torch.testing.assert_close(trained.mean, head.head(x, y, x_query).mean)
    assert plain.penalty == 0
    torch.testing.assert_close(trained.loss(y_query), plain.nll(y_query) + 3 * head.contrast(x, y, x_query, y_query))
    trained.penalty.backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in head.head.encoder.parameters())


@heads
def test_it_is_of_tasks_however_they_are_stacked_and_none_of_one_alone(name):
    head, data = FunctionalContrast(HEADS[name]()), batch(2, 3)
    flat = [part.flatten(0, 1) for part in data]
    torch.testing.assert_close(head.contrast(*data), head.contrast(*flat))
    alone = head.contrast(*(part[0] for part in flat))
    assert alone == 0
    alone.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in head.parameters())


def test_it_falls_where_tasks_are_told_apart():
    head = FunctionalContrast(HEADS["cnp"]())
    base, opt = batch(6), torch.optim.Adam(head.parameters(), 0.01)
    kind = torch.randn(6, 1, 2)
    data = base[0], kind.expand(6, 5, 2), base[2], kind.expand(6, 4, 2)
    first = head.contrast(*data).item()
    for _ in range(60):
        opt.zero_grad()
        loss = head.contrast(*data)
        loss.backward()
        opt.step()
    assert loss.item() < first / 4


def test_what_it_wraps_is_checked():
    for wrong in (nn.Linear(2, 2), CNP(FEATURES, 2, latent=True)):
        with pytest.raises(ModelError, match="head must be a CNP or an ANP with latent=False"):
            FunctionalContrast(wrong)
    with pytest.raises(ArgumentError, match="temperature"):
        FunctionalContrast(HEADS["cnp"](), temperature=0.0)
