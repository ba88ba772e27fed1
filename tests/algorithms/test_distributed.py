"""Several processes: gradients of every parameter can be averaged, as DDP does, to those of one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from l2l_niw import NIW

WORLD = 2


def gradients_of_task(task, components):
    """L_0's gradient from one task, the same in whichever process it is computed; of a mixture, one per component."""
    torch.manual_seed(0)
    niw = NIW(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), lr=0.2, components=components)
    torch.manual_seed(100 + task)
    for _ in range(components):
        x, x_query = torch.randn(5, 3), torch.randn(9, 3)
        learner = niw.clone()
        for _ in range(4):
            learner.adapt(learner(x).square().mean())
        learner(x_query).square().mean().backward()
    return niw, [p.grad for p in niw.parameters()]


def work(rank, folder, components):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    niw, gradients = gradients_of_task(rank, components)
    for g in gradients:
        dist.all_reduce(g)
        g.div_(WORLD)
    torch.save([p.grad for p in niw.parameters()], f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("components", [1, 3])
def test_averaged_gradients_equal_those_of_one_process(components, tmp_path):
    given = str(tmp_path), components
    torch.multiprocessing.start_processes(work, args=given, nprocs=WORLD, start_method="fork")
    alone = [gradients_of_task(task, components)[1] for task in range(WORLD)]
    for rank in range(WORLD):
        together = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        for got, *parts in zip(together, *alone):
            assert torch.allclose(got, sum(parts) / WORLD, rtol=1e-5, atol=1e-9)
