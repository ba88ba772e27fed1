"""Training, the same for every method: batches of fresh tasks, Adam, a cosine schedule, clipped gradients."""

import time

import torch
from torch import optim
from tqdm import tqdm

from l2l_niw.data import SineLine

TASKS, POINTS = 20, 50  # tasks per batch, points of the training curve
CLIP = 1.0  # the norm of a group's gradient
SAVE_EVERY = 60.0  # seconds


def train(method, lr, budget, seed, checkpoint=None, title="", position=0):
    """
    **Description**

    Trains a method in place and returns its curve, mean query losses over equal parts of the budget, and the seconds
    it took. With a `checkpoint` path, a stopped run resumes where it was.
    """
    groups = method.groups(lr)
    opt = optim.Adam(groups)
    schedule = optim.lr_scheduler.CosineAnnealingLR(opt, budget)
    generator = torch.Generator().manual_seed(10_000 + seed)
    done, losses, seconds = 0, [], 0.0
    if checkpoint is not None and checkpoint.exists():
        done, losses, seconds = restore(torch.load(checkpoint), groups, opt, schedule, generator)
    family, began = SineLine(), time.perf_counter() - seconds
    saved = time.perf_counter()
    bar = tqdm(range(done, budget), desc=title, initial=done, total=budget, mininterval=1.0, position=position)
    for batch in bar:
        opt.zero_grad()
        losses.append(method.backward(family.sample(TASKS, generator)))
        for group in groups:
            torch.nn.utils.clip_grad_norm_(group["params"], CLIP, error_if_nonfinite=True)
        opt.step()
        schedule.step()
        if batch % 100 == 99:
            bar.set_postfix(nll=f"{sum(losses[-500:]) / len(losses[-500:]):.3f}")
        if checkpoint is not None and time.perf_counter() - saved > SAVE_EVERY:
            saved = time.perf_counter()
            save(checkpoint, batch + 1, losses, saved - began, groups, opt, schedule, generator)
    if checkpoint is not None:
        checkpoint.unlink(missing_ok=True)
    parts = torch.tensor(losses).tensor_split(min(POINTS, len(losses)))
    return [part.mean().item() for part in parts], time.perf_counter() - began


def tensors_of(groups):
    return [tensor for group in groups for tensor in group["params"]]


@torch.no_grad()
def start_again(method, fresh):
    """A method with a fresh one's numbers: to compile takes a minute, so a process does it once for all seeds."""
    for old, new in zip(tensors_of(method.groups(0.0)), tensors_of(fresh.groups(0.0))):
        old.copy_(new)
    return method


def save(path, done, losses, seconds, groups, opt, schedule, generator):
    state = {
        "done": done,
        "losses": losses,
        "seconds": seconds,
        "tensors": [t.detach() for t in tensors_of(groups)],
        "opt": opt.state_dict(),
        "schedule": schedule.state_dict(),
        "generator": generator.get_state(),
        "random": torch.get_rng_state(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    torch.save(state, new)
    new.replace(path)  # at once, so that a stop leaves the old one or the new one


def restore(state, groups, opt, schedule, generator):
    with torch.no_grad():
        for tensor, value in zip(tensors_of(groups), state["tensors"]):
            tensor.copy_(value)
    opt.load_state_dict(state["opt"])
    schedule.load_state_dict(state["schedule"])
    generator.set_state(state["generator"])
    torch.set_rng_state(state["random"])
    return state["done"], state["losses"], state["seconds"]
