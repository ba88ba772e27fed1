"""What one process of `complexity.py` measures beside whole episodes: their parts, the O(d) part by d, predictions."""

import itertools
import statistics
import time

import torch
from complexity_cells import NETWORKS, readout_of
from processes import timed
from torch import nn

from l2l_niw import NIW
from l2l_niw.chain import Chain, langevin_step, noise_variance
from l2l_niw.checks import check_step
from l2l_niw.closed_form import draw
from l2l_niw.episode import chain_precision, pull_back
from l2l_niw.models import batch_statistics

import learn2learn as l2l  # after l2l_niw, which lets it be imported on CPU-only builds


def measure_parts(network, seconds):
    """Median seconds of what a 5-step NIW episode is made of; a step's parts are of one step."""
    model, loss = readout_of(network), NETWORKS[network][3]
    (x, y), (x_query, y_query) = NETWORKS[network][2]()
    niw = NIW(model, lr=0.01)
    learner = niw.clone()
    for _ in range(5):
        learner.adapt(loss(learner(x), y))
    episode, prior, options = learner._episode, learner._prior, niw.options
    chain, flat, layout = episode.chain, prior.flat, prior.layout
    parameters = list(model.parameters())

    def backward(x, y):
        value = loss(model(x), y)
        start = time.perf_counter()
        torch.autograd.grad(value, parameters)
        return time.perf_counter() - start

    gradients = [p.detach().clone() for p in parameters]
    gradient = layout.flatten(gradients)
    noise, variance = torch.randn_like(gradient), noise_variance(0.01, options.temperature, len(x))

    def closed_form():
        a = chain_precision(options, layout, chain, None, [True], variance, episode.scale)
        a = a.clamp_(*options.precision_range)
        draw(flat.m0, flat.log_variance, chain.mean, a, options.curvature.offset(chain, a))

    def step():
        gradient = layout.flatten(gradients)
        chain.append(langevin_step(chain.theta, gradient, 0.01, 1e-4, len(x), episode.scale, noise), 2)

    def back(kl_weight):
        pull_back(options, prior, flat, chain.mean, episode.a, episode.offset, gradient, kl_weight)

    def median(run):
        return statistics.median(timed(run, seconds / 10))

    with torch.no_grad():
        found = {
            "noise": median(lambda: torch.randn_like(chain.theta)),
            "step and moments": median(step),
            "closed form and draw": median(closed_form),
            "draw's gradient": median(lambda: back(0.0)),
            "KL's gradient": max(0.0, median(lambda: back(1e-4)) - median(lambda: back(0.0))),
        }
    found["forward"] = median(lambda: loss(model(x), y))
    found["query forward"] = median(lambda: loss(model(x_query), y_query))
    found["backward"] = statistics.median([backward(x, y) for _ in range(6)][1:])
    found["query backward"] = statistics.median([backward(x_query, y_query) for _ in range(6)][1:])
    return {"d": layout.d, **found}


def measure_growth(d, seconds):
    """Median seconds of all that is O(d) in a 5-step episode, from L_0 as one vector to the meta-gradient's parts."""
    d = int(float(d))
    niw = NIW(nn.Linear(d, 1, bias=False), lr=0.01)
    options, gradients = niw.options, [torch.randn(1, d)]

    @torch.no_grad()
    def episode():
        prior = niw._prior()
        flat, layout = prior.flat, prior.layout
        scale, chain = prior.growth(), Chain(flat.m0)
        for _ in range(5):
            gradient = layout.flatten(gradients)
            chain = chain.append(langevin_step(chain.theta, gradient, 0.01, 1e-4, 5, scale, None), 2)
            check_step(layout, torch.zeros(()), gradient, chain.theta)
        a = chain_precision(options, prior.layout, chain, None, [True], 1e-6, scale).clamp_(*options.precision_range)
        offset = options.curvature.offset(chain, a)
        draw(flat.m0, flat.log_variance, chain.mean, a, offset)
        found = pull_back(options, prior, flat, chain.mean, a, offset, layout.flatten(gradients), 1e-4)
        layout.split(found.m0)

    return {"seconds": statistics.median(timed(episode, seconds, warm=2))}


def measure_prediction(network, seconds):
    """Median seconds of a prediction with 10 sampled networks, at once and one after another."""
    torch.manual_seed(0)
    if network == "omniglot":
        model, x = batch_statistics(l2l.vision.models.OmniglotCNN(20, hidden_size=64)), torch.randn(20, 1, 28, 28)
    else:
        model, x = readout_of(network), NETWORKS[network][2]()[1][0]
    posterior = NIW(model, lr=0.01).prior()
    times = {True: [], False: []}
    with torch.no_grad():
        began = time.perf_counter()
        for together in itertools.cycle(times):  # in turns
            start = time.perf_counter()
            posterior.predict(x, samples=10, together=together)
            times[together].append(time.perf_counter() - start)
            if len(times[False]) > 4 and time.perf_counter() - began > seconds:
                break
    return {"together": statistics.median(times[True][1:]), "loop": statistics.median(times[False][1:])}
