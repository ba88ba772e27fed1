#!/usr/bin/env python3

"""Uncertainty that is used: a mixture of NIWs that knows the unknown, abstains, and gives sets with guarantees."""

import torch
from torch.nn import functional as F

from l2l_niw import NIW
from l2l_niw.metrics import (
    aurc, auroc, conformal_threshold, coverage, entropy, fpr_at_95, label_scores, max_probability, mean_set_size,
    mutual_information, prediction_sets,
)  # fmt: skip
from l2l_niw.models import MLP

SENSORS, CAUSES = 24, 8
MIX = torch.randn(CAUSES, SENSORS, generator=torch.Generator().manual_seed(12)) / CAUSES**0.5


def sample_task(ways=5, shots=5, queries=10, unknown=0):
    """Classes in a hidden space, seen through 24 sensors; queries of unknown classes have the label -1."""
    centers = 1.5 * torch.randn(ways + unknown, CAUSES)

    def draw(each, classes):
        hidden = centers[:classes].repeat(each, 1) + 0.6 * torch.randn(classes * each, CAUSES)
        return torch.tanh(hidden @ MIX), torch.arange(classes).repeat(each)

    x, y = draw(shots, ways)
    x_query, y_query = draw(queries, ways + unknown)
    return x, y, x_query, torch.where(y_query < ways, y_query, -1)


def make_model(width):
    return torch.nn.Sequential(MLP(SENSORS, (width, width), activate_last=True), torch.nn.Linear(width, 5))


def train(niw, iterations, tasks_per_batch, steps, meta_lr):
    """MAML's loop: clones take the components in turn."""
    opt = torch.optim.Adam(niw.parameters(), meta_lr)
    for _ in range(iterations):
        opt.zero_grad()
        for _ in range(tasks_per_batch):
            x, y, x_query, y_query = sample_task()
            learner = niw.clone()
            for _ in range(steps):
                learner.adapt(F.cross_entropy(learner(x), y))
            F.cross_entropy(learner(x_query), y_query).backward()
        for p in niw.parameters():
            p.grad.data.mul_(1.0 / tasks_per_batch)
        opt.step()


def predict(niw, task, steps, samples=4):
    """Probabilities of every component's networks, (networks, n, ways), and their weights, (networks,)."""
    x, y, x_query, _ = task
    post = niw.posterior(lambda network: F.cross_entropy(network(x), y), steps=steps)
    with torch.no_grad():
        drawn = [part.predict(x_query, samples=samples).softmax(-1) for part in post.components]
    return torch.cat(drawn), post.responsibilities.repeat_interleave(samples) / samples


def average(probabilities, weights):
    return torch.einsum("s,snw->nw", weights, probabilities)


def main(
    components=3, iterations=150, tasks_per_batch=6, tasks=60, width=32, steps=3, lr=0.3, meta_lr=0.003, level=0.95,
    seed=0,
):  # fmt: skip
    torch.manual_seed(seed)
    niw = NIW([make_model(width) for _ in range(components)], lr)
    train(niw, iterations, tasks_per_batch, steps, meta_lr)
    found = {"responsibilities": niw.diagnostics()["weights"]}

    # queries of classes that the support does not have: how unlike the support is each?
    scores, is_open = {"max probability": [], "entropy": [], "mutual information": []}, []
    for _ in range(tasks):
        task = sample_task(unknown=3)
        probabilities, weights = predict(niw, task, steps)
        mean = average(probabilities, weights)
        scores["max probability"].append(max_probability(mean))
        scores["entropy"].append(entropy(mean))
        scores["mutual information"].append(mutual_information(probabilities, weights))
        is_open.append(task[3] < 0)
    is_open = torch.cat(is_open)
    for name, own in scores.items():
        own = torch.cat(own)
        found[name] = auroc(own, is_open)
        print(f"unknown classes, {name}: AUROC {found[name]:.3f}, FPR at 95% {fpr_at_95(own, is_open):.3f}")

    # abstain where unsure: the error on the queries that are left
    test = [sample_task() for _ in range(tasks)]
    means = [average(*predict(niw, task, steps)) for task in test]
    p, y = torch.cat(means), torch.cat([task[3] for task in test])
    wrong = (p.argmax(-1) != y).float()
    sure = p.amax(-1) >= p.amax(-1).median()
    found |= {"error": wrong.mean().item(), "error of the surer half": wrong[sure].mean().item()}
    print(f"error {found['error']:.3f}, on the surer half {found['error of the surer half']:.3f}, ", end="")
    print(f"AURC {aurc(p.amax(-1), wrong):.3f}")

    # sets that hold the answer 19 times of 20: the threshold comes from validation tasks, which are what is
    # exchangeable with a new one
    calibration = [sample_task() for _ in range(tasks)]
    held_out = [label_scores(average(*predict(niw, task, steps)), task[3]) for task in calibration]
    sets = prediction_sets(p, conformal_threshold(held_out, level))
    found |= {"coverage": coverage(sets, y), "set size": mean_set_size(sets)}
    print(f"sets for {level:.0%}: they hold {found['coverage']:.1%}, with {found['set size']:.2f} classes on average")
    return found


if __name__ == "__main__":
    main()
