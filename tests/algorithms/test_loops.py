"""Loops written for learn2learn's MAML, in which only the constructor was changed."""

import learn2learn as l2l
import pytest
import torch
from torch import nn, optim

from l2l_niw import NIW

WAYS, SHOTS = 5, 1


def mini_tasks():
    """A task dataset of learn2learn's over random 84x84 images."""
    images = torch.randn(8 * 6, 3, 84, 84)
    labels = torch.arange(8).repeat_interleave(6)
    dataset = l2l.data.MetaDataset(torch.utils.data.TensorDataset(images, labels))
    transforms = [
        l2l.data.transforms.FusedNWaysKShots(dataset, n=WAYS, k=2 * SHOTS),
        l2l.data.transforms.LoadData(dataset),
        l2l.data.transforms.RemapLabels(dataset),
        l2l.data.transforms.ConsecutiveLabels(dataset),
    ]
    return l2l.data.Taskset(dataset, task_transforms=transforms)


def split(batch):
    data, labels = batch
    mask = torch.zeros(len(data), dtype=torch.bool)
    mask[torch.arange(SHOTS * WAYS) * 2] = True
    return data[mask], labels[mask], data[~mask], labels[~mask]


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize(
    "options",
    [{}, {"wishart": "full"}, {"curvature": "ggn"}, {"second_order": "none"}, {"inference": "closed_form"}],
    ids=str,
)
def test_the_vision_loop_gives_every_parameter_its_gradient(steps, options):
    meta_batch = 2
    model = l2l.vision.models.MiniImagenetCNN(WAYS, hidden_size=8)
    tasks = mini_tasks()
    maml = NIW(model, lr=0.5, first_order=False, **options)
    opt = optim.Adam(maml.parameters(), 0.003)
    loss = nn.CrossEntropyLoss(reduction="mean")

    opt.zero_grad()
    for _ in range(meta_batch):
        learner = maml.clone()
        x, y, x_query, y_query = split(tasks.sample())
        for _ in range(steps):
            learner.adapt(loss(learner(x), y))
        predictions = learner(x_query)
        assert predictions.shape == (WAYS * SHOTS, WAYS)
        loss(predictions, y_query).backward()
    before = {name: p.detach().clone() for name, p in maml.named_parameters()}
    for name, p in maml.named_parameters():
        assert p.grad is not None, name
        assert torch.isfinite(p.grad).all(), name
        # a convolution's bias is cancelled by the BatchNorm behind it: its query gradient is rounding
        assert p.grad.abs().max() > 0, name
        p.grad.data.mul_(1.0 / meta_batch)
    opt.step()
    for name, p in maml.named_parameters():
        if p.grad.abs().max() > 1e-8:  # Adam's epsilon
            assert not torch.equal(p, before[name]), name


class SineModel(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.hidden1 = nn.Linear(1, dim)
        self.hidden2 = nn.Linear(dim, dim)
        self.hidden3 = nn.Linear(dim, 1)

    def forward(self, x):
        return self.hidden3(self.hidden2(self.hidden1(x).relu()).relu())


@pytest.mark.slow
def test_the_sine_loop_gives_every_parameter_its_gradient_and_learns():
    model = SineModel(16)
    maml = NIW(model, lr=0.01, first_order=False, allow_unused=True)
    opt = optim.Adam(maml.parameters(), 0.003)
    loss = nn.MSELoss(reduction="mean")
    history = []
    for _ in range(150):
        total = 0.0
        for _ in range(4):
            learner = maml.clone()
            x = torch.rand(20, 1) * 10 - 5
            y = (0.1 + 4.9 * torch.rand(1)) * torch.sin(x + torch.pi * torch.rand(1))
            for _ in range(5):
                learner.adapt(loss(learner(x[::2]), y[::2]))
            total = total + loss(learner(x[1::2]), y[1::2])
        total = total / 4
        opt.zero_grad()
        total.backward()
        for name, p in maml.named_parameters():
            assert torch.isfinite(p.grad).all(), name
            assert p.grad.abs().max() > 0, name
        opt.step()
        history.append(total.item())
    assert sum(history[-30:]) < 0.9 * sum(history[:30])
