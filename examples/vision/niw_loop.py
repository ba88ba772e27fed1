"""The loop of `niw_omniglot.py` and `niw_cifarfs.py`: learn2learn's, with progress and a calibrated end."""

import argparse
import inspect

import torch
from torch import nn, optim
from tqdm import tqdm

from l2l_niw import NIW
from l2l_niw.metrics.calibration import scores
from l2l_niw.data import get_tasksets
from l2l_niw.errors import require

import learn2learn as l2l  # after l2l_niw, which lets it be imported on CPU-only builds


def fast_adapt(task, learner, loss, adaptation_steps):
    for _ in range(adaptation_steps):
        learner.adapt(loss(learner(task.x), task.y))
    return learner


def probabilities(learner, x, samples=10):
    """NIW averages over networks, MAML has one."""
    with torch.no_grad():
        if hasattr(learner, "posterior"):
            return learner.posterior().predict(x, samples=samples).softmax(-1).mean(0)
        return learner(x).softmax(-1)


def main(
    dataset,
    model,
    method="niw",
    ways=5,
    shots=1,
    queries=5,
    meta_lr=0.003,
    fast_lr=0.1,
    meta_batch_size=8,
    adaptation_steps=5,
    num_iterations=1500,
    test_tasks=500,
    data=None,
    seed=0,
):
    require("torchmetrics", "vision")  # for the scores at the end
    tasksets = get_tasksets(dataset, ways, shots, queries, test_tasks=test_tasks, root=data, seed=seed)
    if method == "maml":
        maml = l2l.algorithms.MAML(model, lr=fast_lr)
    else:
        maml = NIW(model, lr=fast_lr)  # the line that differs
    opt = optim.Adam(maml.parameters(), meta_lr)
    loss = nn.CrossEntropyLoss(reduction="mean")

    bar = tqdm(range(num_iterations), desc=method)
    for _ in bar:
        opt.zero_grad()
        total = 0.0
        for _ in range(meta_batch_size):
            task = tasksets.train.sample()
            error = loss(fast_adapt(task, maml.clone(), loss, adaptation_steps)(task.x_query), task.y_query)
            error.backward()
            total += error.item() / meta_batch_size
        for p in maml.parameters():
            p.grad.data.mul_(1.0 / meta_batch_size)
        opt.step()
        bar.set_postfix(loss=f"{total:.3f}")

    found, labels = [], []
    for task in tqdm(tasksets.test, total=test_tasks, desc="test", leave=False):
        found.append(probabilities(fast_adapt(task, maml.clone(), loss, adaptation_steps), task.x_query))
        labels.append(task.y_query)
    results = scores(torch.cat(found), torch.cat(labels))
    print(f"{method}: " + ", ".join(f"{name} {value:.4f}" for name, value in results.items()))
    return results


def arguments(run, description, methods=("niw", "maml"), **more):
    """A command line for a script's main, whose defaults it shows; `more` are help texts of its own arguments."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    defaults = {name: p.default for name, p in inspect.signature(run).parameters.items()}
    parser.add_argument("--method", choices=methods, default=methods[0], help="the line that differs")
    parser.add_argument("--data", help="folder of the data, or the variable L2L_NIW_DATA")
    helps = {
        "ways": "classes per task",
        "shots": "support images per class",
        "fast_lr": "of the inner steps",
        "num_iterations": "batches of training",
        "seed": "makes a run repeatable",
        **more,
    }
    for name, text in helps.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(defaults[name]), default=defaults[name], help=text)
    return parser.parse_args()
