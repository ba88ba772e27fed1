import l2l_niw  # noqa: F401  before learn2learn, which needs its help on CPU-only builds

import numpy as np
import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)  # small tensors: a second thread costs more than it brings

settings.register_profile("l2l_niw", deadline=None, derandomize=True)
settings.load_profile("l2l_niw")


def pytest_configure(config):
    config.addinivalue_line("filterwarnings", "ignore:.* classes instead of")  # drawn data sets have few


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory):
    """What is kept in torch's cache does not outlive the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_HOME", str(tmp_path_factory.mktemp("torch")))
        yield


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def double():
    """Float64 for the tests that prove mathematics."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def same_draws(monkeypatch):
    """Every randn_like gives the same numbers for the same last dimensions, by no random operation that vmap sees."""

    def fixed(t, **_):
        shape = t.shape[-1:] if t.shape[-1] > 20 else t.shape
        noise = torch.as_tensor(np.random.default_rng(sum(shape)).standard_normal(shape))
        return noise.to(t.dtype).expand(t.shape)

    monkeypatch.setattr(torch, "randn_like", fixed)
