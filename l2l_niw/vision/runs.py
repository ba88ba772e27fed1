"""A run: a folder with its config, its log, its checkpoint and, once tested, its scores and plots."""

import csv
import io
import json
import time
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple, Union

import numpy as np
import torch
from torch import Tensor, optim

from l2l_niw.data import ImageTaskset, Tasksets, get_tasksets
from l2l_niw.errors import ArgumentError, CheckpointError, LossError, NoTemperatureError, require
from l2l_niw.metrics import calibration
from l2l_niw.utils._checks import check_number
from l2l_niw.utils._files import write
from l2l_niw.utils._process import machine, peak_memory, postponed_interrupt
from l2l_niw.vision.backbone import start_of
from l2l_niw.vision.config import Config
from l2l_niw.vision.loops import Method
from l2l_niw.vision.methods import build, complete

SAVE_EVERY = 60.0  # seconds
KEPT = ("done", "seconds", "memory", "log", "recent")  # of a training, beside its tensors
COLUMNS = ("iteration", "seconds", "loss", "accuracy", "validation_accuracy", "validation_nll")


def tasksets_of(config: Config, root: Union[str, Path, None], download: bool = False) -> Tasksets:
    return get_tasksets(
        config.dataset,
        config.ways,
        config.shots,
        config.queries,
        train_queries=config.train_queries,
        test_tasks=max(config.test_tasks, config.validation_tasks, config.scaling_tasks),
        root=root,
        seed=config.seed,
        download=download,
    )


class Training:
    """
    **Description**

    A method in training: what goes into a checkpoint, and comes out of it.

    **Arguments**

    * **method** (Method) - At its start.
    * **config** (Config) - Complete.
    """

    def __init__(self, method: Method, config: Config):
        self.method, self.config = method, config
        self.parameters = list(method.module.parameters())
        self.opt = optim.Adam(self.parameters, config.lr)  # type: ignore[arg-type]
        self.schedule = optim.lr_scheduler.CosineAnnealingLR(self.opt, config.iterations)
        self.done, self.seconds, self.memory = 0, 0.0, 0.0
        self.log: List[Dict[str, float]] = []
        self.recent: List[Tuple[float, float]] = []

    def step(self, tasks: ImageTaskset) -> None:
        """One batch of tasks."""
        self.opt.zero_grad()
        size = self.config.meta_batch
        for number in range(self.done * size, (self.done + 1) * size):
            task = tasks[number]
            loss, outputs = self.method.loss(task)
            loss.backward()
            right = (outputs.detach().argmax(-1) == task.y_query).double().mean().item()
            self.recent.append((loss.item(), right))
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        for gradient in gradients:
            gradient.div_(size)
        if not all(gradient.isfinite().all() for gradient in gradients):
            raise LossError(f"iteration {self.done}: a gradient is not finite. Lower lr or inner_lr.")
        self.opt.step()
        self.schedule.step()
        self.done += 1

    def look(self, tasks: ImageTaskset) -> Dict[str, float]:
        """A line of the log."""
        probabilities, y = (
            part.flatten(0, 1) for part in predictions(self.method, tasks, self.config.validation_tasks)
        )
        loss, accuracy = np.mean(self.recent, 0)
        self.recent = []
        scores = calibration.accuracy(probabilities, y), calibration.nll(probabilities, y)
        values = (self.done, self.seconds, loss, accuracy, *scores)
        line = dict(zip(COLUMNS, map(float, values)), iteration=self.done)
        self.log.append(line)
        return line

    def save(self, folder: Path) -> None:
        self.memory = max(peak_memory(), self.memory)  # nan stays nan
        state = {
            "module": self.method.module.state_dict(),
            "opt": self.opt.state_dict(),
            "schedule": self.schedule.state_dict(),
            "random": torch.get_rng_state(),
            **{name: getattr(self, name) for name in KEPT},
        }
        new = folder / "checkpoint.new"
        torch.save(state, new)
        new.replace(folder / "checkpoint.pt")  # at once, so that a stop leaves the old one or the new one
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.log)
        write(folder / "log.csv", text.getvalue())

    def restore(self, folder: Path) -> None:
        try:
            state = torch.load(folder / "checkpoint.pt", weights_only=True)
        except Exception as error:  # torch's own are of many kinds
            raise CheckpointError(f"{folder / 'checkpoint.pt'} cannot be read: {error}") from error
        try:
            self.method.module.load_state_dict(state["module"])
        except RuntimeError as error:
            raise CheckpointError(f"{folder}: the checkpoint is of another network than config.json says.") from error
        self.opt.load_state_dict(state["opt"])
        self.schedule.load_state_dict(state["schedule"])
        torch.set_rng_state(state["random"])
        for name in KEPT:
            setattr(self, name, state[name])


def read_log(folder: Path) -> List[Dict[str, float]]:
    """A run's looks at the validation tasks so far."""
    path = folder / "log.csv"
    if not path.exists():
        return []
    try:
        with path.open(newline="") as file:
            return [{name: float(value) for name, value in line.items()} for line in csv.DictReader(file)]
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read as a run's log: {error}. Delete it; training writes it anew, from the checkpoint."
        ) from error


def predictions(method: Method, tasks: ImageTaskset, count: int, title: Optional[str] = None) -> Tuple[Tensor, Tensor]:
    """Probabilities of the first tasks, (tasks, m, ways), and labels, (tasks, m)."""
    numbers = range(count)
    if title is not None:
        numbers = require("tqdm", "examples").tqdm(numbers, desc=title, leave=False)
    found, labels = [], []
    for number in numbers:
        task = tasks[number]
        logs = method.log_probabilities(task)
        if logs.isnan().any():
            raise LossError(f"task {number}: predictions are nan, the training has diverged. Lower lr or inner_lr.")
        found.append(logs.double().exp())  # of which float32 would lose the small ones
        labels.append(task.y_query)
    return torch.stack(found), torch.stack(labels)


def train(
    config: Config, folder: Union[str, Path], root: Union[str, Path, None] = None, download: bool = False
) -> List[Dict[str, float]]:
    """
    **Description**

    Trains a method and returns the log. A run that was stopped, by Ctrl-C or otherwise, goes on from its checkpoint and
    comes to the same weights as one that was not.

    **Arguments**

    * **config** (Config) - What to train.
    * **folder** (str) - Of the run. One that holds a run with another config is refused.
    * **root** (str, *optional*, default=None) - Folder of the data; what the variable L2L_NIW_DATA says by default.
    * **download** (bool, *optional*, default=False) - Whether learn2learn may download what is not there.
    """
    config, folder = complete(config), Path(folder)
    tasksets = tasksets_of(config, root, download)
    training = Training(build(config), config)
    config.save(folder)
    if (folder / "checkpoint.pt").exists():
        training.restore(folder)
        if training.done == config.iterations:
            return training.log
    elif config.pretraining:
        training.method.backbone.load_state_dict(start_of(config, root, download))
    tqdm = require("tqdm", "examples").tqdm
    bar = tqdm(total=config.iterations, initial=training.done, desc=f"{config.method}, seed {config.seed}")
    marks = {round(config.iterations * (k + 1) / config.validations) for k in range(config.validations)}
    began = saved = time.perf_counter()
    began -= training.seconds
    shown: Dict[str, str] = {}
    with postponed_interrupt() as asked, bar:
        while training.done < config.iterations and not asked["stop"]:
            training.step(tasksets.train)
            training.seconds = time.perf_counter() - began
            bar.update()
            loss, accuracy = np.mean(training.recent[-50:], 0)
            shown |= {"loss": f"{loss:.3f}", "accuracy": f"{100 * accuracy:.1f}%"}
            if training.done in marks:
                pause = time.perf_counter()
                line = training.look(tasksets.validation)
                began += time.perf_counter() - pause  # a look is no training
                shown["validation"] = f"{100 * line['validation_accuracy']:.1f}%"
            bar.set_postfix(shown, refresh=False)
            if training.done in marks or time.perf_counter() - saved > SAVE_EVERY:
                saved = time.perf_counter()
                training.save(folder)
        training.save(folder)
    if training.done < config.iterations:
        raise KeyboardInterrupt
    return training.log


def trained(folder: Path) -> Training:
    """The training that a folder holds, at its end."""
    config = Config.load(folder)
    training = Training(build(config), config)
    if (folder / "checkpoint.pt").exists():
        training.restore(folder)
    if training.done < config.iterations:
        raise CheckpointError(
            f"{folder} is trained for {training.done} of {config.iterations} iterations: go on with its training first."
        )
    return training


def evaluate(
    folder: Union[str, Path], root: Union[str, Path, None] = None, samples: Optional[int] = None
) -> Dict[str, Any]:
    """
    **Description**

    Scores a trained run on its test tasks: accuracy with its 95% interval over tasks, ECE, NLL, Brier score, and ECE
    and NLL after temperature scaling, fitted on validation tasks (None where no temperature is best). Writes
    metrics.json, tasks.npz and a reliability diagram.

    **Arguments**

    * **folder** (str) - Of the run.
    * **root** (str, *optional*, default=None) - Folder of the data; what the variable L2L_NIW_DATA says by default.
    * **samples** (int, *optional*, default=None) - Networks of a prediction, where they are not to be the config's. The
        run's own scores are left alone: the files are then called metrics-samples-N and so on.
    """
    require("torchmetrics", "vision")  # before all predictions are made, rather than after
    require("matplotlib", "examples")
    folder = Path(folder)
    training = trained(folder)
    method, config, name = training.method, training.config, ""
    if samples is not None:
        check_number("samples", samples, 1, whole=True)
        if config.temperature is None:
            raise ArgumentError(f"samples: {config.method} has no posterior to sample networks from.")
        method.samples, name = samples, f"-samples-{samples}"
    tasksets, title = tasksets_of(config, root), f"{config.method}, seed {config.seed}"
    torch.manual_seed(config.seed)
    validation, y = predictions(method, tasksets.validation, config.scaling_tasks, f"{title}: validation")
    try:
        temperature = calibration.fit_temperature(validation.flatten(0, 1), y.flatten())
    except NoTemperatureError:  # all right, or no better than chance
        temperature = None
    found, y = predictions(method, tasksets.test, config.test_tasks, f"{title}: test")
    accuracy = (found.argmax(-1) == y).double().mean(1)
    nll = -found.gather(2, y.unsqueeze(2)).squeeze(2).log().mean(1)
    metrics = {
        **dict.fromkeys(("ece_ts", "nll_ts", "temperature")),
        **calibration.scores(found.flatten(0, 1), y.flatten(), temperature),
        "accuracy_interval": 1.96 * accuracy.std().item() / len(accuracy) ** 0.5,
        "samples": None if config.temperature is None else method.samples,
        "seconds": training.seconds,
        "memory": training.memory,
        "machine": machine(),
        "trained": sum(p.numel() for p in training.parameters if p in training.opt.state),  # what ever had a gradient
    }
    diagram = calibration.reliability(found.flatten(0, 1), y.flatten())
    kept = {**diagram._asdict(), "accuracy_by_bin": diagram.accuracy, "accuracy": accuracy, "nll": nll}
    np.savez_compressed(folder / f"tasks{name}.npz", **kept)
    calibration.plot_reliability({title: diagram}, folder / f"reliability{name}.png")
    write(folder / f"metrics{name}.json", json.dumps(metrics, indent=1) + "\n")  # last: it says that all is there
    return metrics
