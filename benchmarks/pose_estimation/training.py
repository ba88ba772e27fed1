"""Training, the same for every method: Adam, a cosine schedule, clipped gradients, and checkpoints to resume from."""

import time

import torch
from torch import optim
from tqdm import tqdm

from l2l_niw.errors import LossError
from l2l_niw.models.checkpoints import read_state
from l2l_niw.utils._files import replacing
from l2l_niw.utils._process import postponed_interrupt
from pose_estimation.scoring import encoded, score

CLIP = 5.0  # the norm of a group's gradient
SAVE_EVERY = 60.0  # seconds
STATE = ("done", "seconds", "losses", "log", "module", "opt", "schedule", "random")  # of a checkpoint


class Training:
    """
    **Description**

    A method in training, with all that a checkpoint holds.

    **Arguments**

    * **method** (Plain) - With its initial weights.
    * **column** (Column) - Its tasks, and how many batches of them.
    * **lr** (float) - Of the method's groups.
    """

    def __init__(self, method, column, lr):
        self.method, self.column = method, column
        self.opt = optim.Adam(method.groups(lr))
        self.schedule = optim.lr_scheduler.CosineAnnealingLR(self.opt, column.batches)
        self.done, self.seconds, self.losses, self.log = 0, 0.0, [], []

    def step(self, tasks):
        """One step of Adam, on a batch of tasks."""
        self.opt.zero_grad()
        self.losses.append(self.method.backward(encoded(self.column.space, tasks)))
        for group in self.opt.param_groups:
            norm = torch.nn.utils.clip_grad_norm_(group["params"], CLIP)
            if not norm.isfinite():
                raise LossError(f"batch {self.done}: a gradient is not finite. Lower lr or inner_lr.")
        self.opt.step()
        self.schedule.step()
        self.done += 1

    def validate(self, taskset):
        """A validation round: a line of the log. Training's random numbers go on as if there had been none."""
        state = torch.get_rng_state()
        found = score(self.method.predict, taskset, self.column.space, self.column.validation_tasks)
        torch.set_rng_state(state)
        loss = sum(self.losses) / len(self.losses)
        error, nll = float(found["errors"][0].mean()), float(found["nll"].mean())
        self.losses = []
        self.log.append({"batch": self.done, "seconds": self.seconds, "loss": loss, "error": error, "nll": nll})

    def save(self, path):
        """Writes the checkpoint."""
        parts = self.method.module, self.opt, self.schedule
        states = (part.state_dict() for part in parts)
        values = self.done, self.seconds, self.losses, self.log, *states, torch.get_rng_state()
        with replacing(path) as file:
            torch.save(dict(zip(STATE, values)), file)

    def restore(self, path):
        """Takes everything from a checkpoint."""
        state = read_state(path, STATE, "Delete it to train anew.")
        for part, name in ((self.method.module, "module"), (self.opt, "opt"), (self.schedule, "schedule")):
            part.load_state_dict(state[name])
        torch.set_rng_state(state["random"])
        self.done, self.seconds, self.losses, self.log = (state[name] for name in STATE[:4])


def train(training, tasksets, path, title):
    """All batches that are left, with validation rounds and checkpoints; Ctrl-C ends it after one of them."""
    column = training.column
    if path.exists():
        training.restore(path)
    marks = {round(column.batches * (k + 1) / column.validations) for k in range(column.validations)}
    tasksets.train.position = training.done * column.meta_batch
    saved = time.perf_counter()
    began = saved - training.seconds
    bar = tqdm(total=column.batches, initial=training.done, desc=title, mininterval=1.0)
    with postponed_interrupt() as asked, bar:
        while training.done < column.batches:
            training.step(tasksets.train.batch(column.meta_batch))
            training.seconds = time.perf_counter() - began
            bar.update()
            if training.done in marks:
                training.validate(tasksets.validation)
                bar.set_postfix(error=f"{training.log[-1]['error']:.2f}", nll=f"{training.log[-1]['nll']:.2f}")
            if asked["stop"] or training.done == column.batches or time.perf_counter() - saved > SAVE_EVERY:
                saved = time.perf_counter()
                training.save(path)
            if asked["stop"]:
                raise KeyboardInterrupt
