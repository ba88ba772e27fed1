#!/usr/bin/env python3

"""
What NIW's episode costs on the small MLP of `complexity.py` if nothing is left but its arithmetic: no wrapper, no
checks, any loss or any model but this one. It is the least that the wrapper's time can come to in Python.

    python benchmarks/lower_bound.py

Prints the median ms per episode, 5 inner steps, of first-order MAML and MAML (learn2learn's) and of both bare loops:
first order, and with the last layer's second derivatives. All weights are one vector, so that a step is a handful of
operations.
"""

import argparse
import statistics

import torch
from complexity_cells import episode_of
from processes import timed
from torch import nn
from torch.nn import functional as F

LR, NOISE, SHRINKAGE, KL_WEIGHT, STEPS = 0.01, 1e-3, 1e-3, 1e-4, 5


class Weights(torch.autograd.Function):
    """The iterate as a function of m_0, log V_0 and, for the last layer, of its earlier steps; the KL comes along."""

    @staticmethod
    def forward(ctx, state, m0, log_variance, *last_layer):
        ctx.state = state
        return tuple(t.detach() for t in unflatten(state["theta"], state["shapes"]))

    @staticmethod
    def backward(ctx, *gradients):
        state, kept = ctx.state, len(ctx.needs_input_grad) - 3
        if not state["query"]:  # an inner step's: only the last layer's graph leads here
            return None, None, None, *gradients[len(gradients) - kept :]
        g = torch.cat([t.reshape(-1) for t in gradients])
        distance, precision = state["theta"] - state["m0"], 1 / state["scale"]
        in_variance = (g * state["sensitivity"]).add_(precision * distance.square() + precision - 1, alpha=-KL_WEIGHT)
        if kept:
            g[-sum(t.numel() for t in gradients[-kept:]) :] = 0.0
        return None, g, in_variance, *(gradients[-kept:] if kept else ())


def unflatten(vector, shapes):
    return [t.view(s) for t, s in zip(vector.split([s.numel() for s in shapes]), shapes)]


def bare_episode(second_order):
    """One episode with its meta-gradient and an SGD step."""
    layers = nn.ModuleList([nn.Linear(1, 40), nn.Linear(40, 40), nn.Linear(40, 1)])
    weights = list(layers.parameters())
    shapes, log_variance = [w.shape for w in weights], [nn.Parameter(torch.zeros_like(w)) for w in weights]
    opt = torch.optim.SGD([*weights, *log_variance], 1e-4)
    (x, y), (x_query, y_query) = ((torch.randn(n, 1), torch.randn(n, 1)) for n in (5, 45))

    def features(x, w):
        return torch.relu(F.linear(torch.relu(F.linear(x, w[0], w[1])), w[2], w[3]))

    def episode():
        opt.zero_grad()
        m0, v = (torch.cat([t.reshape(-1) for t in column]) for column in (weights, log_variance))
        with torch.no_grad():
            scale = v.exp()
            noise_scale, rate = scale.sqrt() * NOISE, scale * -LR
        theta, sensitivity, roots = m0.detach(), torch.zeros_like(rate), weights[-2:] if second_order else []
        last_rates, first, leaves = unflatten(rate, shapes)[-2:], None, []

        def state(query):
            names = {"theta": theta, "sensitivity": sensitivity, "m0": m0.detach(), "scale": scale}
            return {**names, "shapes": shapes, "query": query}

        w = Weights.apply(state(False), m0, v, *roots)
        for step in range(STEPS):
            phi = features(x, w)
            if second_order:
                leaves.append(phi.detach().requires_grad_())
                loss = F.mse_loss(F.linear(leaves[-1], w[4], w[5]), y)
                *last, back = torch.autograd.grad(loss, [w[4], w[5], leaves[-1]], create_graph=True)
                body = torch.autograd.grad(phi, w[:4], back.detach(), retain_graph=step == 0)
                first, gradients = first if step else phi, [*body, *last]
                roots = [torch.addcmul(r, g, s) for r, g, s in zip(roots, last, last_rates)]
            else:
                gradients = torch.autograd.grad(F.mse_loss(F.linear(phi, w[4], w[5]), y), w)
            with torch.no_grad():
                g = torch.cat([t.reshape(-1) for t in gradients])
                moved, noise = g * rate, torch.randn_like(g) * noise_scale
                theta = (theta + moved).add_(noise).lerp_(m0.detach(), SHRINKAGE)
                sensitivity = (sensitivity + moved).add_(noise, alpha=0.5).mul_(1 - SHRINKAGE)
            w = Weights.apply(state(step == STEPS - 1), m0, v, *roots)
        F.mse_loss(F.linear(features(x_query, w), w[4], w[5]), y_query).backward()
        if second_order:
            first.backward(sum(leaf.grad for leaf in leaves[1:]) + leaves[0].grad)
        opt.step()

    return episode


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="how long each is measured, once warm")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = {
        "first-order MAML": episode_of("sine-line", "fo-maml-5")[0],
        "MAML": episode_of("sine-line", "maml-5")[0],
        "bare NIW, first order": bare_episode(False),
        "bare NIW, last layer's second derivatives": bare_episode(True),
        "NIW, first order": episode_of("sine-line", "fo-niw-5")[0],
        "NIW": episode_of("sine-line", "niw-5")[0],
    }
    for name, episode in rows.items():
        print(f"{name:<42} {1000 * statistics.median(timed(episode, args.seconds, warm=50)):.2f} ms")


if __name__ == "__main__":
    main()
