"""Where episodes cannot run side by side, and what is said of data and losses that cannot be used."""

import copy
import warnings

import pytest
import torch
from episode_cases import EPISODES, STEPS, assert_equal, data, loop, mse, network, together
from torch import nn

from l2l_niw import NIW
from l2l_niw.episodes import Episodes
from l2l_niw.errors import ArgumentError, LossError
from l2l_niw.models import batch_statistics



class TestFallback:
    """Models that cannot be vmapped run in a loop, and one warning says why."""

    def models(self):
        class Branching(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(2, 1)

            def forward(self, x):
                out = self.layer(x)
                return out if out.sum() > 0 else -out

        return {
            "batch norm": nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1)),
            "branch": Branching(),
        }

    @pytest.mark.parametrize("name", ["batch norm", "branch"])
    def test_the_numbers_are_the_loops(self, name, same_draws, double):
        model, (support, query) = self.models()[name], data()
        niw, twin = NIW(model, lr=0.1), NIW(copy.deepcopy(model), lr=0.1)
        episodes = Episodes(niw, mse, steps=STEPS)
        with pytest.warns(UserWarning, match="one after another instead of side by side") as caught:
            value = episodes(support, query)
        assert len(caught) == 1
        value.backward()
        assert_equal((value.item(), [p.grad for p in niw.parameters()]), loop(twin, mse, support, query), 1e-12)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # it has been said
            episodes(support, query)
            assert episodes.posterior(support).predict(query[0], samples=2).shape == (2, EPISODES, 7, 1)
            episodes.posterior(support, elbo_steps=2)

    def test_the_reason_is_given(self):
        niw, (support, query) = NIW(self.models()["batch norm"], lr=0.1), data()
        with pytest.warns(UserWarning, match="BatchNorm writes running statistics"):
            Episodes(niw, mse)(support, query)

    def test_without_running_statistics_batch_norm_runs_side_by_side(self, same_draws, double):
        niw, (support, query) = NIW(batch_statistics(self.models()["batch norm"]), lr=0.1), data()
        assert_equal(together(niw, mse, support, query), loop(niw, mse, support, query), 1e-10)

    def test_a_traced_chain_runs_in_a_loop(self, double):
        niw = NIW(network(), lr=0.1, temperature=0.0, trace="full", precondition=False)
        support, query = data()
        with pytest.warns(UserWarning, match="trace='full'"):
            value = Episodes(niw, mse, steps=STEPS)(support, query)
        value.backward()
        gradients = [p.grad.clone() for p in niw.parameters()]
        assert_equal((value.item(), gradients), loop(niw, mse, support, query), 1e-12)

    def test_what_cannot_be_compiled_runs_side_by_side(self, monkeypatch, same_draws, double):
        def refuse(*_, **__):
            raise RuntimeError("no compiler here")

        niw, (support, query) = NIW(network(), lr=0.1), data()
        monkeypatch.setattr(torch, "compile", lambda *_, **__: refuse)
        episodes = Episodes(niw, mse, steps=STEPS, compile=True)
        with pytest.warns(UserWarning, match="not compiled: no compiler here"):
            value = episodes(support, query)
        value.backward()
        gradients = [p.grad.clone() for p in niw.parameters()]
        assert_equal((value.item(), gradients), loop(niw, mse, support, query), 1e-12)
        assert not episodes._one_by_one

    def test_running_statistics_are_the_loops(self, same_draws, double):
        model, (support, query) = self.models()["batch norm"], data()
        niw, twin = NIW(model, lr=0.1), NIW(copy.deepcopy(model), lr=0.1)
        with pytest.warns(UserWarning, match="BatchNorm"):
            Episodes(niw, mse, steps=STEPS)(support, query)
        loop(twin, mse, support, query)
        assert torch.allclose(niw.module[1].running_mean, twin.module[1].running_mean)
        assert niw.module[1].num_batches_tracked == twin.module[1].num_batches_tracked

    def test_an_error_of_the_users_is_raised(self):
        niw, (support, query) = NIW(network(), lr=0.1), data()
        episodes = Episodes(niw, lambda net, x, y: mse(net, x[..., :1], y))
        with pytest.warns(UserWarning, match="side by side"), pytest.raises(RuntimeError, match="cannot be multiplied"):
            episodes(support, query)


class TestErrors:
    @pytest.fixture
    def niw(self):
        return NIW(network(), lr=0.1)

    def test_data_that_are_no_batch(self, niw):
        support, query = data()
        with pytest.raises(ArgumentError, match="support must be a tuple of tensors"):
            Episodes(niw, mse)(support[0], query)
        with pytest.raises(ArgumentError, match="same number of episodes"):
            Episodes(niw, mse)([t[:2] for t in support], query)
        with pytest.raises(ArgumentError, match="one at least"):
            Episodes(niw, mse)([t[:0] for t in support], [t[:0] for t in query])

    def test_losses_that_cannot_be_used(self, niw):
        support, query = data()
        for loss, message in (
            (lambda net, x, y: (net(x) - y).square(), "must be a scalar"),
            (lambda net, x, y: y.mean(), "does not depend on its network"),
            (lambda net, x, y: net(x).detach().mean(), "does not depend on its network"),
            (lambda net, x, y: mse(net, x, y) / 0.0, "support loss of episode 0 is inf"),
        ):
            with pytest.raises(LossError, match=message):
                Episodes(niw, loss)(support, query)
        with pytest.raises(LossError, match="query loss of episode 0 is inf"):
            Episodes(niw, mse, lambda net, x, y: mse(net, x, y) / 0.0)(support, query)

    def test_unused_and_frozen_parameters(self, niw, double):
        class Spare(nn.Module):
            def __init__(self):
                super().__init__()
                self.used, self.spare = nn.Linear(2, 1), nn.Linear(2, 1)

            def forward(self, x):
                return self.used(x)

        support, query = data()
        model = Spare()
        with pytest.raises(LossError, match="'spare.weight'"):
            Episodes(NIW(model, lr=0.1), mse)(support, query)
        generous = NIW(model, lr=0.1, allow_unused=True)
        post = Episodes(generous, mse).posterior(support)
        assert torch.equal(post.mean["spare.weight"][1], model.spare.weight)
        model.spare.requires_grad_(False)
        with pytest.raises(ArgumentError, match="requires_grad=False"):
            Episodes(NIW(model, lr=0.1), mse)(support, query)
        Episodes(NIW(model, lr=0.1, allow_nograd=True), mse)(support, query).backward()
        assert model.spare.weight.grad is None

    def test_options_out_of_their_domain(self, niw):
        for options, name in (({"steps": 0}, "steps"), ({"memory": 0}, "memory")):
            with pytest.raises(ArgumentError, match=name):
                Episodes(niw, mse, **options)
        with pytest.raises(ArgumentError, match="elbo_steps"):
            Episodes(niw, mse).posterior(data()[0], elbo_steps=-1)
