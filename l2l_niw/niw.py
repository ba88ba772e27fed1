"""The wrapper: a model whose weights are random variables, with learn2learn's API."""

import math
from typing import Dict, Optional, Tuple, Union

import torch
from learn2learn.algorithms.base_learner import BaseLearner
from torch import Tensor, nn

from l2l_niw.closed_form import adapted_share
from l2l_niw.curvature import Curvature, make_curvature
from l2l_niw.errors import ArgumentError, ChainError, CheckpointError, ModelError
from l2l_niw.learner import NIWLearner
from l2l_niw.posterior import Posterior
from l2l_niw.prior import Prior
from l2l_niw.weights import Layout, check_parameters
from l2l_niw.wishart import WISHARTS, initial_degrees, lower_bound, mode, to_raw

TRACES = ("none", "first", "full")


class NIW(BaseLearner):
    def __init__(
        self,
        model: nn.Module,
        lr: float,
        first_order: bool = False,
        allow_unused: Optional[bool] = None,
        allow_nograd: bool = False,
        *,
        burn_in: int = 2,
        temperature: float = 1e-3,
        prior_precision: float = 100.0,
        n0: Optional[float] = None,
        precision_range: Tuple[float, float] = (1e-4, 1e8),
        curvature: Union[str, Curvature] = "sgld",
        wishart: str = "factorised",
        kl_weight: float = 1e-3,
        auto_kl: bool = True,
        trace: str = "none",
    ):
        super().__init__()
        check_parameters(model)
        self.module = model
        self.lr = lr
        self.first_order = first_order
        self.allow_nograd = allow_nograd
        self.allow_unused = allow_nograd if allow_unused is None else allow_unused
        self.burn_in = burn_in
        self.temperature = temperature
        self.precision_range = precision_range
        self.curvature = make_curvature(curvature)
        self.wishart = wishart
        self.kl_weight = kl_weight
        self.auto_kl = auto_kl
        self.trace = trace
        self._last_episode = None

        d = sum(p.numel() for p in model.parameters() if p.requires_grad)
        n0 = initial_degrees(wishart, d) if n0 is None else n0
        log_v0 = math.log(n0 / prior_precision)
        self._names = [name for name, _ in model.named_parameters()]
        self.log_v0 = nn.ParameterList(
            nn.Parameter(torch.full_like(p, log_v0, dtype=torch.promote_types(p.dtype, torch.float32)),
                         requires_grad=p.requires_grad)
            for p in model.parameters()
        )
        first = next(model.parameters())
        self.raw_n0 = nn.Parameter(torch.tensor(to_raw(n0, wishart, d), device=first.device))

    def clone(self, first_order=None, allow_unused=None, allow_nograd=None):
        return NIWLearner(self)

    def _prior(self) -> Prior:
        layout = Layout(self.module)
        log_v0 = dict(zip(self._names, self.log_v0))
        m0 = dict(self.module.named_parameters())
        return Prior(layout, self.wishart, [m0[n] for n in layout.names], [log_v0[n] for n in layout.names], self.raw_n0)

    def diagnostics(self):
        e, layout = self._last_episode
        with torch.no_grad():
            p0 = self._prior().precision(self._prior().flat())
            s = adapted_share(e.a, p0)
        out = {"clamped": e.clamped.float().mean().item(), "n0": self._prior().degrees(self.raw_n0).item(), "layers": {}}
        for name, a_, p_, s_, c_ in zip(layout.names, layout.split(e.a), layout.split(p0), layout.split(s), layout.split(e.clamped.float())):
            out["layers"][name] = {"A": a_.median().item(), "P0": p_.median().item(), "share": s_.mean().item(), "clamped": c_.mean().item()}
        return out
