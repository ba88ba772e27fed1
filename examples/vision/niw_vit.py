#!/usr/bin/env python3

"""
learn2learn's loop on the last block of a pretrained vision transformer, DINOv2's ViT-S/14, with a prototypical head and
a posterior per task. The blocks before it are frozen: what they compute of an image is kept on disk.

    python examples/vision/niw_vit.py --data ROOT
    python examples/vision/niw_vit.py --data ROOT --adapters 4       # tasks differ by low-rank adapters alone
    python examples/vision/niw_vit.py --data ROOT --method protonet  # without NIW

ROOT has CIFAR-FS, and dinov2/dinov2_vits14_11blocks_fp16.safetensors.
"""

import torch
from niw_loop import arguments
from torch import optim
from tqdm import tqdm

from l2l_niw import NIW, EpisodicModel
from l2l_niw.data import MappedTaskset, get_tasksets
from l2l_niw.data.images import data_root
from l2l_niw.errors import require
from l2l_niw.heads import NearestCentroid
from l2l_niw.metrics.calibration import scores
from l2l_niw.models import FrozenFeatures, add_adapters
from l2l_niw.vision.transformers import dinov2


def make_model(blocks, adapters):
    network = add_adapters(blocks, rank=adapters) if adapters else blocks
    return EpisodicModel(network, NearestCentroid("cosine", scale=10.0, learn_scale=True))


def fast_adapt(task, learner, adaptation_steps):
    for _ in range(adaptation_steps):
        learner.adapt(learner(task.x, task.y).nll(task.y))
    return learner


def probabilities(model, task, adaptation_steps):
    """NIW averages over networks drawn from the task's posterior, inferred from the support by the paper's Alg. 2."""
    if not isinstance(model, NIW):
        with torch.no_grad():
            return model(task.x, task.y, task.x_query).probs
    post = model.posterior(lambda net: net(task.x, task.y).nll(task.y), adaptation_steps, from_mode=True)
    with torch.no_grad():
        return post.predict(task.x, task.y, task.x_query, samples=5).probs


def main(
    method="niw",
    ways=5,
    shots=1,
    queries=5,
    meta_lr=1e-5,
    fast_lr=0.01,
    meta_batch_size=4,
    adaptation_steps=3,
    num_iterations=100,
    test_tasks=100,
    blocks=1,
    adapters=0,
    data=None,
    seed=0,
):
    require("torchmetrics", "vision")  # for the scores at the end
    torch.manual_seed(seed)
    tasksets = get_tasksets("cifarfs", ways, shots, queries, test_tasks=test_tasks, root=data, seed=seed)
    every = dinov2(data_root(data))
    features = FrozenFeatures(every[: -blocks - 1])
    train, test = MappedTaskset(tasksets.train, features), MappedTaskset(tasksets.test, features)
    model = make_model(every[-blocks - 1 :], adapters)
    if method == "niw":
        random = "*lora_*" if adapters else "backbone.*"
        model = NIW(model, lr=fast_lr, second_order="none", random=random)  # the lines that differ
    opt = optim.Adam([p for p in model.parameters() if p.requires_grad], meta_lr)

    bar = tqdm(range(num_iterations), desc=method)
    for _ in bar:
        opt.zero_grad()
        total = 0.0
        for _ in range(meta_batch_size):
            task = train.sample()
            learner = fast_adapt(task, model.clone(), adaptation_steps) if method == "niw" else model
            error = learner(task.x, task.y, task.x_query).nll(task.y_query) / meta_batch_size
            error.backward()
            total += error.item()
        opt.step()
        bar.set_postfix(loss=f"{total:.3f}")

    tasks = tqdm(test, total=test_tasks, desc="test", leave=False)
    found, labels = zip(*((probabilities(model, task, adaptation_steps), task.y_query) for task in tasks))
    results = scores(torch.cat(found), torch.cat(labels))
    print(f"{method}: " + ", ".join(f"{name} {value:.4f}" for name, value in results.items()))
    return results


if __name__ == "__main__":
    main(**vars(arguments(main, __doc__, methods=("niw", "protonet"), blocks="last blocks that are trained",
                          adapters="rank of adapters; 0 trains the blocks themselves")))  # fmt: skip
