#!/usr/bin/env python3

"""
Few-shot pose estimation: which way does an object face that was never seen before? learn2learn's loop with a ridge head
or a neural process on a small convolutional network, as it stands and under NIW, with a posterior for every object.

    python examples/pose/niw_pose.py --quick                  # simple shapes, about a minute, no data needed
    python examples/pose/niw_pose.py --data ROOT              # furniture: ROOT has furniture/sh3d_meshes.npz
    python examples/pose/niw_pose.py --data ROOT --head anp
"""

import argparse
import sys

import torch
from torch import optim
from tqdm import tqdm

from l2l_niw import NIW, EpisodicModel
from l2l_niw.data.pose import AugmentedTaskset, azimuth_tasksets, furniture, primitives, screen
from l2l_niw.errors import NIWError
from l2l_niw.heads import ANP, CNP, BayesianRidge, LeaveOneOut
from l2l_niw.metrics import angular_error, projected_normal
from l2l_niw.models import PoseEncoder

HEADS = {
    "ridge": lambda: BayesianRidge(noise=0.3, prior_scale=0.3),
    "cnp": lambda: LeaveOneOut(CNP(64, targets=2, aggregate="max")),
    "anp": lambda: LeaveOneOut(ANP(64, targets=2, latent=False)),
}


def fast_adapt(task, learner, adaptation_steps):
    for _ in range(adaptation_steps):
        learner.adapt(learner(task.x, task.y).nll(task.y))
    return learner


def predict(model, task, adaptation_steps):
    """NIW averages over networks drawn from the object's posterior, inferred from its views by the paper's Alg. 2."""
    if not isinstance(model, NIW):
        with torch.no_grad():
            return model(task.x, task.y, task.x_query)
    post = model.posterior(lambda net: net(task.x, task.y).nll(task.y), adaptation_steps, from_mode=True)
    with torch.no_grad():
        return post.predict(task.x, task.y, task.x_query, samples=5)


def scores(model, tasks, adaptation_steps):
    """Means over queries: degrees between prediction and truth, and -log p of the angle, in nats per radian."""
    errors, nlls = [], []
    for task in tasks:
        found = predict(model, task, adaptation_steps)
        parts = found.tensors() if isinstance(model, NIW) else (part.unsqueeze(-2) for part in found.tensors())
        errors.append(angular_error(found.mean, task.y_query))
        nlls.append(-projected_normal(task.y_query, *parts))
    return {"degrees": torch.cat(errors).mean().item(), "nll": torch.cat(nlls).mean().item()}


def train(method, tasksets, head, size, meta_lr, fast_lr, meta_batch_size, adaptation_steps, num_iterations):
    model = EpisodicModel(PoseEncoder(64, channels=1, size=size), HEADS[head]())
    if method == "niw":
        random = ["backbone.out.*", "head.*"]
        model = NIW(
            model, lr=fast_lr, second_order="none", random=random, prior_precision=400.0
        )  # the lines that differ
    opt = optim.Adam(model.parameters(), meta_lr)
    bar = tqdm(range(num_iterations), desc=method)
    for _ in bar:
        opt.zero_grad()
        total = 0.0
        for _ in range(meta_batch_size):
            task = tasksets.train.sample()
            learner = fast_adapt(task, model.clone(), adaptation_steps) if method == "niw" else model
            error = learner(task.x, task.y, task.x_query).nll(task.y_query) / meta_batch_size
            error.backward()
            total += error.item()
        opt.step()
        bar.set_postfix(loss=f"{total:.3f}")
    return model


def main(
    head="ridge",
    methods=("plain", "niw"),
    shots=15,
    queries=15,
    size=64,
    meta_lr=0.001,
    fast_lr=0.01,
    meta_batch_size=10,
    adaptation_steps=3,
    num_iterations=500,
    test_tasks=100,
    data=None,
    quick=False,
    seed=0,
):
    if quick:
        size, meta_batch_size, num_iterations, test_tasks = min(size, 32), 4, min(num_iterations, 250), 50
    objects = primitives(8) if quick else screen(furniture(data)).kept
    results = {}
    for method in methods:
        torch.manual_seed(seed)
        tasksets = azimuth_tasksets(objects, (min(3, shots), shots), queries, size, test_tasks=test_tasks, seed=seed)
        tasksets = tasksets._replace(train=AugmentedTaskset(tasksets.train, seed=seed))
        settings = head, size, meta_lr, fast_lr, meta_batch_size, adaptation_steps, num_iterations
        model = train(method, tasksets, *settings)
        for name in ("test", "cross"):
            tasks = tqdm(getattr(tasksets, name), total=test_tasks, desc=name, leave=False)
            found = results[method, name] = scores(model, tasks, adaptation_steps)
            what = "new objects" if name == "test" else "new categories"
            print(f"{method:6s}{what:16s}{found['degrees']:6.1f} degrees, NLL {found['nll']:6.2f}")
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", choices=HEADS, default="ridge", help="on the network (default: ridge)")
    parser.add_argument("--methods", nargs="+", choices=("plain", "niw"), default=("plain", "niw"), help="both")
    parser.add_argument("--shots", type=int, default=15, help="views of a new object whose azimuth is known (15)")
    parser.add_argument("--fast-lr", type=float, default=0.01, help="of the inner steps (0.01)")
    parser.add_argument("--num-iterations", type=int, default=500, help="batches of training (500)")
    parser.add_argument("--data", help="folder of the furniture's folder, or the variable L2L_NIW_DATA")
    parser.add_argument("--quick", action="store_true", help="small views of simple shapes, and less training")
    parser.add_argument("--seed", type=int, default=0, help="makes a run repeatable (0)")
    try:
        main(**vars(parser.parse_args()))
    except NIWError as error:
        sys.exit(f"niw_pose.py: {error}")
