"""Which networks of a prediction run at once."""

import pytest
import torch
from torch import nn

from l2l_niw.inference import gaussian
from l2l_niw.inference.gaussian import GaussianWeights

NETWORKS = {
    "small": (nn.Linear(3, 2), (4, 3), True),
    "large": (nn.Sequential(nn.Linear(3, 400), nn.Linear(400, 400)), (4, 3), False),
    "convolution": (nn.Conv1d(3, 2, 1), (4, 3, 5), False),
}


@pytest.mark.parametrize("kind", NETWORKS)
def test_small_networks_without_convolutions_run_at_once_on_a_cpu(kind, monkeypatch):
    net, shape, at_once = NETWORKS[kind]
    names, mean = zip(*((name, p.detach()) for name, p in net.named_parameters()))
    post, x, seen = GaussianWeights(net, names, mean, [torch.full_like(m, 1e-4) for m in mean]), torch.randn(shape), []
    run = gaussian.run_networks
    monkeypatch.setattr(gaussian, "run_networks", lambda *args: seen.append(args[4]) or run(*args))
    found = post.predict(x, samples=3)
    assert set(seen) == {at_once}
    torch.manual_seed(1)
    both = [post.predict(x, samples=100, vectorize=vectorize).mean(0) for vectorize in (True, False)]
    torch.testing.assert_close(*both, atol=0.1, rtol=0.0)
    assert found.shape == (3, *net(x).shape)
    assert len({tuple(own.flatten().tolist()) for own in found}) == 3
