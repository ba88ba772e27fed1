"""A run: a folder with its config, its log, its checkpoint and, once tested, its scores and plots."""

import csv
import io
import json
import time
from pathlib import Path
from typing import Any, Dict, Iterable, List, Optional, Tuple, Union

import numpy as np
import torch
from torch import Tensor, optim
from torch.nn.utils import clip_grad_norm_

from l2l_niw.data import Tasksets
from l2l_niw.data._numbered import NumberedEpisodes
from l2l_niw.errors import ArgumentError, CheckpointError, LossError, NoTemperatureError, require
from l2l_niw.metrics import calibration
from l2l_niw.models.checkpoints import read_state
from l2l_niw.utils._checks import check_number
from l2l_niw.utils._files import folder_of, locked, replacing, write
from l2l_niw.utils._process import machine, peak_memory, postponed_interrupt
from l2l_niw.vision.config import Config
from l2l_niw.vision.loops import Method
from l2l_niw.vision.methods import METHODS, build, complete
from l2l_niw.vision.pretraining import load_start
from l2l_niw.vision.tasks import tasksets_of

SAVE_EVERY = 60.0  # seconds
CLIP = 5.0  # length of a meta-batch's gradient: usually 2 to 4, of methods with inner steps now and then a hundred
COUNTERS = ("done", "seconds", "memory", "log", "recent")  # of a training, saved beside its tensors
COLUMNS = ("iteration", "seconds", "loss", "accuracy", "validation_accuracy", "validation_nll")


class Training:
    """
    **Description**

    A method in training, with all that a checkpoint holds.

    **Arguments**

    * **method** (Method) - With its initial weights.
    * **config** (Config) - As `complete` returns it.
    """

    def __init__(self, method: Method, config: Config):
        self.method, self.config = method, config
        self.parameters = list(method.module.parameters())
        self.opt = optim.Adam(method.groups(config.lr))  # type: ignore[arg-type]
        self.schedule = optim.lr_scheduler.CosineAnnealingLR(self.opt, config.iterations)
        self.done, self.seconds, self.memory = 0, 0.0, 0.0
        self.log: List[Dict[str, float]] = []
        self.recent: List[Tuple[float, float]] = []  # losses and accuracies since the last validation round

    def step(self, tasks: NumberedEpisodes) -> None:
        """One step of Adam, on a meta-batch of tasks."""
        self.opt.zero_grad()
        members = self.method.members
        each = self.config.meta_batch
        if METHODS[self.config.method].shares_tasks:
            each //= len(members)
        size = each * len(members)
        for number in range(self.done * size, (self.done + 1) * size):
            task = tasks[number]
            loss, outputs = members[number % len(members)].loss(task)
            loss.backward()
            right = (outputs.detach().argmax(-1) == task.y_query).double().mean().item()
            self.recent.append((loss.item(), right))
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        for gradient in gradients:
            gradient.div_(each)
        if not all(gradient.isfinite().all() for gradient in gradients):
            raise LossError(f"iteration {self.done}: a gradient is not finite. Lower lr or inner_lr.")
        for member in members:
            clip_grad_norm_(member.module.parameters(), CLIP)
        self.opt.step()
        self.schedule.step()
        self.done += 1

    def validate(self, tasks: NumberedEpisodes) -> Dict[str, float]:
        """A validation round: one line of the log."""
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
        """Writes checkpoint.pt and log.csv."""
        self.memory = max(peak_memory(), self.memory)  # nan stays nan
        state = {
            "module": self.method.module.state_dict(),
            "opt": self.opt.state_dict(),
            "schedule": self.schedule.state_dict(),
            "random": torch.get_rng_state(),
            **{name: getattr(self, name) for name in COUNTERS},
        }
        with replacing(folder / "checkpoint.pt") as file:
            torch.save(state, file)
        self.save_log(folder)

    def save_log(self, folder: Path) -> None:
        """Writes log.csv, unless it is as it should be."""
        text, path = io.StringIO(newline=""), folder / "log.csv"
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.log)
        if not path.exists() or path.read_bytes() != text.getvalue().encode():
            write(path, text.getvalue())

    def restore(self, folder: Path) -> None:
        """Takes everything from checkpoint.pt."""
        path, remedy = folder / "checkpoint.pt", "Delete it to train anew, or choose another folder."
        state = read_state(path, ("module", "opt", "schedule", "random", *COUNTERS), remedy)
        wrong = [name for name in COUNTERS if not isinstance(state[name], type(getattr(self, name)))]
        if wrong:
            raise CheckpointError(f"{path}: {', '.join(wrong)} cannot be those of a run. {remedy}")
        try:
            self.method.module.load_state_dict(state["module"])
        except (RuntimeError, TypeError) as error:
            raise CheckpointError(f"{path} is of another network than config.json says. {remedy}") from error
        try:
            self.opt.load_state_dict(state["opt"])
            self.schedule.load_state_dict(state["schedule"])
            torch.set_rng_state(state["random"])
        except Exception as error:  # torch's own are of many kinds
            raise CheckpointError(f"{path} holds no state of Adam or of the random numbers. {remedy}") from error
        for name in COUNTERS:
            setattr(self, name, state[name])


def read_log(folder: Path) -> List[Dict[str, float]]:
    """A run's validation rounds so far."""
    path = folder / "log.csv"
    if not path.exists():
        return []
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            if tuple(reader.fieldnames or ()) != COLUMNS:
                raise ValueError(f"its columns are not {', '.join(COLUMNS)}")
            return [{name: float(line[name]) for name in COLUMNS} for line in reader]
    except (TypeError, ValueError, csv.Error) as error:
        raise CheckpointError(
            f"{path} cannot be read as a run's log: {error}. Train the run with the same command again: it writes the "
            "log from checkpoint.pt."
        ) from error


def predictions(
    method: Method, tasks: NumberedEpisodes, count: int, title: Optional[str] = None
) -> Tuple[Tensor, Tensor]:
    """Probabilities of the first `count` tasks, (tasks, m, ways), and labels, (tasks, m)."""
    numbers: Iterable[int] = range(count)
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


def fitted_temperature(probabilities: Tensor, y: Tensor) -> Optional[float]:
    """What temperature scaling finds on the queries of tasks; None where all are right, or no better than chance."""
    try:
        return calibration.fit_temperature(probabilities.flatten(0, 1), y.flatten())
    except NoTemperatureError:
        return None


def train(
    config: Config, folder: Union[str, Path], root: Union[str, Path, None] = None, download: bool = False
) -> List[Dict[str, float]]:
    """
    **Description**

    Trains a method and returns the log. A run that was stopped, by Ctrl-C or otherwise, resumes from its checkpoint and
    ends with the same weights as one that was not. One process at a time trains in a folder.

    **Arguments**

    * **config** (Config) - What to train.
    * **folder** (str) - Of the run. One that holds a run with another config is refused.
    * **root** (str, *optional*, default=None) - Folder of the data; the variable L2L_NIW_DATA by default.
    * **download** (bool, *optional*, default=False) - Whether learn2learn may download what is not there.
    """
    config, folder = complete(config), folder_of("folder", folder)
    tasksets = tasksets_of(config, root, download)
    training = Training(build(config), config)
    config.check(folder)
    with locked(folder / ".lock"):
        config.save(folder)
        if (folder / "checkpoint.pt").exists():
            training.restore(folder)
        elif config.is_pretrained:
            for component, backbone in enumerate(training.method.backbones):
                load_start(backbone, config, root, download, component)
        if training.done < config.iterations:
            run_training(training, tasksets, folder)
        else:
            training.save_log(folder)
    return training.log


def run_training(training: Training, tasksets: Tasksets, folder: Path) -> None:
    """All iterations that are left, with validation rounds and checkpoints; Ctrl-C ends it after one of them."""
    config = training.config
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
                line = training.validate(tasksets.validation)
                began += time.perf_counter() - pause  # not counted as training
                shown["validation"] = f"{100 * line['validation_accuracy']:.1f}%"
            bar.set_postfix(shown, refresh=False)
            if training.done in marks or time.perf_counter() - saved > SAVE_EVERY:
                saved = time.perf_counter()
                training.save(folder)
        training.save(folder)
    if training.done < config.iterations:
        raise KeyboardInterrupt


def trained(folder: Path) -> Training:
    """The finished training of a run's folder."""
    config = complete(Config.load(folder))
    training = Training(build(config), config)
    if (folder / "checkpoint.pt").exists():
        training.restore(folder)
    if training.done < config.iterations:
        raise CheckpointError(
            f"{folder} is trained for {training.done} of {config.iterations} iterations: resume its training first."
        )
    return training


def evaluate(
    folder: Union[str, Path], root: Union[str, Path, None] = None, samples: Optional[int] = None
) -> Dict[str, Any]:
    """
    **Description**

    Scores a trained run on its test tasks: accuracy with its 95% interval over tasks, ECE, NLL, Brier score, and ECE
    and NLL after temperature scaling, fitted on validation tasks (None where no temperature is best). Writes
    metrics.json, tasks.npz and a reliability diagram, and log.csv again if it is missing or broken.

    **Arguments**

    * **folder** (str) - Of the run.
    * **root** (str, *optional*, default=None) - Folder of the data; the variable L2L_NIW_DATA by default.
    * **samples** (int, *optional*, default=None) - Posterior samples per prediction, the config's by default. With
        another number the files are called metrics-samples-N and so on, beside the run's own.
    """
    require("torchmetrics", "vision")  # before all predictions are made, rather than after
    require("matplotlib", "examples")
    folder = folder_of("folder", folder)
    training = trained(folder)
    with locked(folder / ".lock"):
        training.save_log(folder)
        return score(training, folder, root, samples)


def score(
    training: Training, folder: Path, root: Union[str, Path, None] = None, samples: Optional[int] = None
) -> Dict[str, Any]:
    """What `evaluate` does with a training that is finished."""
    method, config, name = training.method, training.config, ""
    if samples is not None:
        check_number("samples", samples, 1, whole=True)
        if config.temperature is None:
            raise ArgumentError(f"samples: {config.method} has no posterior to sample from.")
        method.samples, name = samples, f"-samples-{samples}"
    tasksets, title = tasksets_of(config, root), f"{config.method}, seed {config.seed}"
    torch.manual_seed(config.seed)
    validation, y = predictions(method, tasksets.validation, config.scaling_tasks, f"{title}: validation")
    temperature = fitted_temperature(validation, y)
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
    arrays = {**diagram._asdict(), "accuracy_by_bin": diagram.accuracy, "accuracy": accuracy, "nll": nll}
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)
    write(folder / f"tasks{name}.npz", content.getvalue())
    calibration.plot_reliability({title: diagram}, folder / f"reliability{name}.png")
    write(folder / f"metrics{name}.json", json.dumps(metrics, indent=1) + "\n")  # last: it says that all is there
    return metrics
