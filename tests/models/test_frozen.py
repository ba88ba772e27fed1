"""Features that are computed once: what a module would have computed, however often and by whom it is asked for."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from l2l_niw.errors import ArgumentError, ModelError, NIWError, WriteError
from l2l_niw.models import FrozenFeatures


class Counted(nn.Module):
    """A network that knows how many inputs it has seen."""

    def __init__(self, width=4):
        super().__init__()
        self.linear, self.seen = nn.Linear(3, width), 0

    def forward(self, x):
        self.seen += len(x)
        return self.linear(x).tanh()


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))


def network(**options):
    return Counted(**options).eval()


def test_features_are_the_module_s_and_computed_once():
    module, x = network(), torch.randn(10, 3)
    features, expected = FrozenFeatures(module, batch=3), module(x)
    module.seen = 0
    found = features(x[:6])
    assert torch.equal(found, expected[:6].detach())
    assert not found.requires_grad
    assert module.seen == 6
    assert torch.equal(features(x[[7, 2, 7, 0, 9, 2]]), expected[[7, 2, 7, 0, 9, 2]].detach())
    assert module.seen == 8
    again = FrozenFeatures(module)
    assert torch.equal(again(x[:6]), found)
    assert module.seen == 8


def test_many_inputs_are_found_again():
    module, x = network(), torch.randn(1300, 3)
    features = FrozenFeatures(module)
    first = features(x)
    assert torch.equal(features(x.flip(0)), first.flip(0))
    assert module.seen == 1300


def test_what_differs_is_kept_apart():
    module, x = network(), torch.randn(4, 3)
    others = [network(), nn.Sequential(module.linear).eval()]
    paths = {FrozenFeatures(m).path for m in (module, *others)}
    paths |= {FrozenFeatures(module, torch.float16).path, FrozenFeatures(module, tag="other").path}
    assert len(paths) == 5
    flat = FrozenFeatures(nn.Flatten(0, 0).eval())
    assert flat(x.view(4, 3)).shape == (4, 3)
    assert flat(x.view(4, 3, 1)).shape == (4, 3, 1)  # the same bytes in another shape
    ids = torch.ones(4, 3, dtype=torch.int32)
    assert torch.equal(flat(ids), torch.ones(4, 3))
    assert not torch.equal(flat(ids.view(torch.float32)), torch.ones(4, 3))  # the same bytes of another type


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 0.0), (torch.float16, 1e-3), (torch.bfloat16, 1e-2)])
def test_features_are_kept_as_precisely_as_asked_for(dtype, tolerance):
    module, x = network().double(), torch.randn(4, 3, dtype=torch.float64)
    for _ in range(2):
        found = FrozenFeatures(module, dtype)(x)
        assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(found.double(), module(x).detach(), atol=tolerance, rtol=0.0)


def test_processes_may_share_a_file():
    module, x = network(), torch.randn(40, 3)
    features = FrozenFeatures(module)
    torch.save((module.state_dict(), x), features.path.parent.parent.parent / "shared.pt")
    text = (
        "import sys, torch; from torch import nn; from l2l_niw.models import FrozenFeatures\n"
        "sys.path.insert(0, 'tests/models'); from test_frozen import Counted\n"
        f"module = Counted().eval(); state, x = torch.load({str(features.path.parent.parent.parent / 'shared.pt')!r})\n"
        "module.load_state_dict(state); features = FrozenFeatures(module, batch=1)\n"
        "assert torch.equal(features(x), module(x).detach()); print(features.path)"
    )
    running = [subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate()[0].strip() for process in running] == [str(features.path)] * 2
    assert torch.equal(features(x), module(x).detach())
    assert module.seen == 40  # of the line above: the features were there


def test_a_module_that_may_change_is_refused():
    module = network()
    features = FrozenFeatures(module)
    features(torch.zeros(1, 3))
    with torch.no_grad():
        module.linear.bias.add_(1.0)
    with pytest.raises(ModelError, match="has been trained"):
        features(torch.zeros(1, 3))
    with pytest.raises(ModelError, match=r"module\.eval\(\)"):
        FrozenFeatures(module.train())


class Odd(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.outputs = outputs

    def forward(self, x):
        return self.outputs(x)


def odd(outputs):
    return Odd(outputs).eval()


ZEROS = torch.zeros(2, 3)


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda: FrozenFeatures(network), ModelError, "must be a torch.nn.Module"),
    (lambda: FrozenFeatures(network(), torch.int8), ArgumentError, "dtype must be a floating one"),
    (lambda: FrozenFeatures(network(), batch=0), ArgumentError, "batch must be"),
    (lambda: FrozenFeatures(network())([1.0]), ArgumentError, "x must be inputs"),
    (lambda: FrozenFeatures(odd(lambda x: x.sum()))(ZEROS), ModelError, "of shape .1, ...., not"),
    (lambda: FrozenFeatures(odd(lambda x: x / 0))(ZEROS), ModelError, "not finite"),
    (lambda: FrozenFeatures(odd(lambda x: x + 1e6), torch.float16)(ZEROS), ModelError, "too large"),
])  # fmt: skip
def test_what_cannot_be_kept_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_broken_file_is_named():
    features = FrozenFeatures(network())
    features.path.parent.mkdir(parents=True)
    features.path.write_bytes(b"no database at all, " * 100)
    with pytest.raises(NIWError, match="Delete it, and it is computed again"):
        features(torch.zeros(2, 3))


def test_a_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "file"))
    with pytest.raises(WriteError, match="Set TORCH_HOME"):
        FrozenFeatures(network())(torch.zeros(2, 3))
