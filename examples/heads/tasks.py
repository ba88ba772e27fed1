"""Tasks that need no download, made on the fly."""

import torch

WORLD = torch.Generator().manual_seed(12)
MIX = torch.randn(8, 24, generator=WORLD) / 8**0.5  # how hidden causes show in what is seen, in every task


def noisy_causes(ways=5, shots=5, queries=10):
    """
    Classes are points in a space of 8 hidden causes, seen through a fixed nonlinear mix of 24 sensors. What differs
    between tasks is which causes are noise: a good metric for one task is a bad one for another. Labels are any
    integers.
    """
    centers, noise = torch.randn(ways, 8), 0.2 + 1.3 * torch.rand(8).pow(2)
    labels = torch.randperm(100)[:ways]

    def draw(each):
        hidden = centers.repeat(each, 1) + noise * torch.randn(ways * each, 8)
        return torch.tanh(hidden @ MIX), labels.repeat(each)

    return *draw(shots), *draw(queries)


def sines_and_lines(shots=10, queries=20):
    """Half of the tasks are A sin(x + phi), half a x + b; every y has noise of 0.3."""
    x = 10 * torch.rand(shots + queries, 1) - 5
    if torch.rand(()) < 0.5:
        y = (0.1 + 4.9 * torch.rand(1)) * torch.sin(x + torch.pi * torch.rand(1))
    else:
        a, b = 6 * torch.rand(2) - 3
        y = a * x + b
    y = y + 0.3 * torch.randn_like(y)
    return x[:shots], y[:shots], x[shots:], y[shots:]
