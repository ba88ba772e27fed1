#!/usr/bin/env python3

"""
The swap: learn2learn's MAML loop on Omniglot, in which only the constructor differs.

    python benchmarks/swap.py --data ROOT                    # every method, three seeds
    python benchmarks/swap.py --data ROOT --methods NIW      # one method
    python benchmarks/swap.py --report                       # the table from what has been run

A run that was stopped resumes where it was; a finished one is not run again. Finished runs are packed into
runs.jsonl, from which the table can be made again and which counts as done.
"""

import argparse
import json
import os
import platform
import random
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn, optim
from tqdm import tqdm

from l2l_niw import NIW
from l2l_niw.data.images import read_folders
from l2l_niw.errors import CheckpointError, NIWError
from l2l_niw.inference.mixture import MixtureWeights
from l2l_niw.metrics import calibration
from l2l_niw.models.checkpoints import read_state
from l2l_niw.reports._packed import REMEDY, check_keys, check_numbers, read_lines, write_lines
from l2l_niw.utils._files import locked, make_folder, read_json, replacing, write

import learn2learn as l2l  # after l2l_niw, which lets it be imported on CPU-only builds

RESULTS, FILE = Path(__file__).parent / "results" / "swap", "runs.jsonl"
CONFIG = {
    "ways": 5,
    "shots": 1,
    "queries": 5,
    "filters": 32,
    "steps": 5,
    "fast_lr": 0.4,
    "meta_lr": 0.003,
    "meta_batch": 8,
    "iterations": 1500,
    "test_tasks": 2000,
    "test_seed": 12345,
    "samples": 10,
}
STATE = ("wrapper", "opt", "log", "config", "seconds", "iteration", "random", "numpy", "torch")  # of a checkpoint
MAX_SEED = 2**32 - 1  # numpy's
MISSING = """\
No Omniglot under {root}: looked for {folder}/<alphabet>/<character>/*.png.
Get it with either of
    python -c "import l2l_niw, torchvision.datasets as d; \
[d.Omniglot('{root}', background=b, download=True) for b in (True, False)]"
    or unpack images_background.zip and images_evaluation.zip of github.com/brendenlake/omniglot there,
then call this script with --data {root} (or set L2L_NIW_DATA)."""

METHODS = {
    "MAML": lambda model, lr: l2l.algorithms.MAML(model, lr=lr),
    "FO-MAML": lambda model, lr: l2l.algorithms.MAML(model, lr=lr, first_order=True),
    "FO-NIW": lambda model, lr: NIW(model, lr=lr, first_order=True),
    "NIW": lambda model, lr: NIW(model, lr=lr),
    "NIW-3-equal": lambda models, lr: NIW(models, lr=lr),
    "NIW-3": lambda models, lr: NIW(models, lr=lr),
}
COMPONENTS = {"NIW-3-equal": 3, "NIW-3": 3}  # of a mixture, which clones take in turn
TIMES = {"NIW-3": 3}  # as many iterations: so many tasks for each component as the other methods have


def copy_afresh(model, config):
    """Another network of the same architecture, with initial weights of its own."""
    return type(model)(config["ways"], hidden_size=config["filters"])


def load_characters(root, part):
    """Every drawing of one half of Omniglot: ink of shape (drawings, 1, 28, 28), and labels."""
    folder = Path(root) / "omniglot-py" / f"images_{part}"
    characters = sorted(p for p in folder.glob("*/*") if p.is_dir())
    if not characters:
        sys.exit(MISSING.format(root=root, folder=folder))
    images = read_folders(characters, size=28, grey=True)
    return 1.0 - images.pixels.float() / 255.0, images.labels


def taskset(data, ways, shots, queries):
    """learn2learn's task dataset over drawings held in memory."""
    dataset = l2l.data.MetaDataset(torch.utils.data.TensorDataset(*data))
    transforms = [
        l2l.data.transforms.NWays(dataset, n=ways),
        l2l.data.transforms.KShots(dataset, k=shots + queries),
        l2l.data.transforms.LoadData(dataset),
        l2l.data.transforms.RemapLabels(dataset),
        l2l.data.transforms.ConsecutiveLabels(dataset),
    ]
    return l2l.data.Taskset(dataset, task_transforms=transforms)


def split(task, ways, shots, queries):
    """Support and query of one task, whose classes come one after the other."""
    x, y = task
    support = torch.arange(ways * (shots + queries)).reshape(ways, -1)[:, :shots].flatten()
    rest = torch.arange(ways * (shots + queries)).reshape(ways, -1)[:, shots:].flatten()
    return x[support], y[support], x[rest], y[rest]


def fast_adapt(task, learner, loss, steps, ways, shots, queries):
    """learn2learn's inner loop."""
    x_support, y_support, x_query, y_query = split(task, ways, shots, queries)
    for _ in range(steps):
        learner.adapt(loss(learner(x_support), y_support))
    predictions = learner(x_query)
    return loss(predictions, y_query), l2l.utils.accuracy(predictions, y_query)


def predict(wrapper, task, loss, config):
    """Predictive probabilities on the query: of one network, or averaged over posterior samples."""
    shape = config["ways"], config["shots"], config["queries"]
    x_support, y_support, x_query, y_query = split(task, *shape)
    if isinstance(wrapper, NIW):
        post = wrapper.posterior(lambda network: loss(network(x_support), y_support), steps=config["steps"])
        with torch.no_grad():
            return predictive(post, x_query, config["samples"]), y_query
    learner = wrapper.clone()
    for _ in range(config["steps"]):
        learner.adapt(loss(learner(x_support), y_support))
    with torch.no_grad():
        return learner(x_query).softmax(-1), y_query


def predictive(post, x, samples):
    """Probabilities averaged over posterior samples, of every component by its responsibility."""
    if not isinstance(post, MixtureWeights):
        return post.predict(x, samples=samples).softmax(-1).mean(0)
    return sum(r * predictive(part, x, samples) for r, part in zip(post.responsibilities, post.components))


def evaluate(wrapper, tasks, loss, config):
    """
    Accuracy with its 95% interval over tasks, ECE (20 bins), NLL and Brier score. The ECE is torchmetrics' own, which
    gives a probability of exactly 1 its own bin.
    """
    from torchmetrics.functional.classification import multiclass_calibration_error

    seed_everything(config["test_seed"])
    probabilities, labels = [], []
    for _ in tqdm(range(config["test_tasks"]), desc="test", leave=False):
        p, y = predict(wrapper, tasks.sample(), loss, config)
        probabilities.append(p)
        labels.append(y)
    per_task = torch.stack([(p.argmax(-1) == y).float().mean() for p, y in zip(probabilities, labels)])
    p, y = torch.cat(probabilities), torch.cat(labels)
    return {
        "accuracy": per_task.mean().item(),
        "accuracy_ci": 1.96 * per_task.std().item() / len(per_task) ** 0.5,
        "ece": multiclass_calibration_error(p, y, config["ways"], n_bins=20).item(),
        "confidence": p.amax(-1).mean().item(),
        "nll": calibration.nll(p, y),
        "brier": calibration.brier(p, y),
    }


def seed_everything(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def train(method, seed, tasks, config, checkpoint, every=100):
    """learn2learn's outer loop, from the last checkpoint on; returns the wrapper and its log."""
    seed_everything(seed)
    models = [l2l.vision.models.OmniglotCNN(config["ways"], hidden_size=config["filters"])]
    models += [copy_afresh(models[0], config) for _ in range(COMPONENTS.get(method, 1) - 1)]
    wrapper = METHODS[method](models if len(models) > 1 else models[0], config["fast_lr"])
    iterations = config["iterations"] * TIMES.get(method, 1)
    opt = optim.Adam(wrapper.parameters(), config["meta_lr"])
    loss = nn.CrossEntropyLoss(reduction="mean")
    shape = config["ways"], config["shots"], config["queries"]
    log, seconds, start = [], 0.0, 0
    if checkpoint.exists():
        state = read_state(checkpoint, STATE, "Delete it to train anew.")
        longer = {**state["config"], "iterations": config["iterations"]}  # is no other training
        if longer != config or state["iteration"] > iterations:
            sys.exit(f"{checkpoint} is of another budget; move it away, or give another --results.")
        wrapper.load_state_dict(state["wrapper"])
        opt.load_state_dict(state["opt"])
        log, seconds, start = state["log"], state["seconds"], state["iteration"]
        random.setstate(state["random"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])

    bar = tqdm(
        range(start, iterations),
        initial=start,
        total=iterations,
        desc=f"{method} seed {seed}",
        mininterval=5,
    )
    for iteration in bar:
        began = time.perf_counter()
        opt.zero_grad()
        error, accuracy = 0.0, 0.0
        for _ in range(config["meta_batch"]):
            learner = wrapper.clone()
            task_error, task_accuracy = fast_adapt(tasks.sample(), learner, loss, config["steps"], *shape)
            task_error.backward()
            error += task_error.item() / config["meta_batch"]
            accuracy += task_accuracy.item() / config["meta_batch"]
        for p in wrapper.parameters():
            p.grad.data.mul_(1.0 / config["meta_batch"])
        opt.step()
        seconds += time.perf_counter() - began
        log.append((round(error, 4), round(accuracy, 4)))
        bar.set_postfix(loss=f"{np.mean(log[-50:], 0)[0]:.3f}", acc=f"{np.mean(log[-50:], 0)[1]:.3f}")
        if (iteration + 1) % every == 0:
            generator, words, *rest = np.random.get_state()
            numpy_state = (generator, words.tolist(), *rest)  # as plain numbers, which weights_only reads
            values = (wrapper.state_dict(), opt.state_dict(), log, config, seconds, iteration + 1)
            values += (random.getstate(), numpy_state, torch.get_rng_state())
            with replacing(checkpoint) as file:
                torch.save(dict(zip(STATE, values)), file)
    return wrapper, loss, log, seconds


def run(method, seed, root, config, results):
    """Trains and scores one method with one seed, unless its result is there already."""
    found = load_runs(results).get((method, seed))
    if found is not None:
        if found["config"] != config:
            sys.exit(f"{results}: {method}-{seed} was run with another budget; give another --results.")
        return
    make_folder(results)
    with locked(results / f"{method}-{seed}.lock"):
        train_and_test(method, seed, root, config, results)


def train_and_test(method, seed, root, config, results):
    """What `run` does where there is no result yet."""
    path, checkpoint = results / f"{method}-{seed}.json", results / f"{method}-{seed}.pt"
    shape = config["ways"], config["shots"], config["queries"]
    train_tasks = taskset(load_characters(root, "background"), *shape)
    test_tasks = taskset(load_characters(root, "evaluation"), *shape)
    wrapper, loss, log, seconds = train(method, seed, train_tasks, config, checkpoint)
    result = {
        "method": method,
        "seed": seed,
        "config": config,
        "seconds": round(seconds, 1),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} thread, "
        f"torch {torch.__version__}",
        "test": evaluate(wrapper, test_tasks, loss, config),
        "curve": [list(np.round(np.mean(log[i : i + 50], 0), 4)) for i in range(0, len(log), 50)],
    }
    if isinstance(wrapper, NIW):
        result["diagnostics"] = wrapper.diagnostics()
    write(path, json.dumps(result, indent=1))
    checkpoint.unlink(missing_ok=True)
    print(method, seed, result["test"])


def load_runs(results):
    """{(method, seed): run}, in the order of `METHODS`. A run's own file wins over what was packed of it."""
    found = [(results / FILE, run) for run in read_lines(results / FILE)]
    for path in results.glob("*-[0-9]*.json"):
        found.append((path, read_json(path, "Delete it, and run it anew.")))
    for path, run in found:
        check_keys(path, run, ("method", "seed", "config", "seconds", "machine", "test"), REMEDY)
        check_numbers(path, run["test"], ("accuracy", "ece", "nll", "brier"), REMEDY)
        if run["method"] not in METHODS:
            raise CheckpointError(f"{path}: there is no method {run['method']!r}. {REMEDY}")
    runs = {(run["method"], run["seed"]): run for _, run in found}
    return {key: runs[key] for key in sorted(runs, key=lambda key: (list(METHODS).index(key[0]), key[1]))}


def runs_by_method(results):
    found = {method: [] for method in METHODS}
    for (method, _), run in load_runs(results).items():
        found[method].append(run)
    return found


def table(results):
    """Markdown: means over seeds, with the standard error of the mean."""
    rows = ["| method | seeds | accuracy % | ECE % | NLL | Brier | training, s |", "|---|---|---|---|---|---|---|"]
    for method, runs in runs_by_method(results).items():
        if not runs:
            continue
        cells = []
        for key, scale, digits in (("accuracy", 100, 2), ("ece", 100, 2), ("nll", 1, 3), ("brier", 1, 3)):
            values = scale * np.array([r["test"][key] for r in runs])
            error = f" ± {values.std(ddof=1) / len(values) ** 0.5:.{digits}f}" if len(values) > 1 else ""
            cells.append(f"{values.mean():.{digits}f}{error}")
        seconds = np.mean([r["seconds"] for r in runs])
        rows.append(f"| {method} | {len(runs)} | {' | '.join(cells)} | {seconds:.0f} |")
    return "\n".join(rows)


def verdict(results):
    """The two questions that the benchmark asks, answered once every method has run with the same seeds."""
    mean, found = {}, runs_by_method(results)
    if not all(found.values()) or len({len(own) for own in found.values()}) > 1:
        return "Not every method has run with every seed yet."
    for method, own in found.items():
        mean[method] = {key: np.mean([run["test"][key] for run in own]) for key in ("accuracy", "ece", "nll")}
    first, second = (100 * (mean["NIW"]["accuracy"] - mean[name]["accuracy"]) for name in ("FO-MAML", "MAML"))
    ratio = mean["NIW"]["ece"] / mean["MAML"]["ece"]
    return (
        f"NIW's accuracy is {first:+.2f} points from first-order MAML's and {second:+.2f} from MAML's (asked for: "
        f"0 or more); its ECE is {ratio:.2f} times MAML's (asked for: 0.50 or less). "
        + " ".join(
            f"{method}: accuracy {100 * (mean[method]['accuracy'] - mean['MAML']['accuracy']):+.2f} points, "
            f"NLL {mean[method]['nll'] - mean['MAML']['nll']:+.3f} from MAML's."
            for method in COMPONENTS
        )
    )


def report(results):
    """Prints the table, and writes it beside the runs with the budget and the machine."""
    runs = list(load_runs(results).values())
    if not runs:
        sys.exit(f"Nothing has been run yet under {results}; call this script with --data ROOT first.")
    for run in runs:
        if run["config"] != runs[0]["config"]:
            sys.exit(
                f"{results} cannot be one table: {runs[0]['method']}-{runs[0]['seed']} and {run['method']}-"
                f"{run['seed']} are of other budgets. Move one of them away."
            )
    budget = ", ".join(f"{k} {v}" for k, v in runs[0]["config"].items())
    text = (
        "# The swap: one MAML loop on Omniglot, only the constructor differs\n\n"
        f"{table(results)}\n\n"
        "Mean and standard error over seeds, on characters never seen in training. MAML and FO-MAML predict with "
        "their adapted network, NIW with the average over its posterior samples; FO-NIW has first_order=True. NIW-3 is "
        "a mixture of three components, which clones take in turn in the same loop: each has seen as many tasks as the "
        "other methods' network has, or, NIW-3-equal, a third of them. "
        "Seconds are wall-clock, and rows were run on other machines, beside other work: `benchmarks/complexity.py` is "
        "what compares costs.\n\n"
        f"{verdict(results)}\n\n"
        f"Budget, the same for all: {budget}.\n\n"
        f"Machine: {runs[0]['machine']}. Command: `python benchmarks/swap.py --data ROOT`.\n"
    )
    write(results / "README.md", text)
    print(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=os.environ.get("L2L_NIW_DATA"), help="folder that holds omniglot-py/")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS), help="which to run")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="one run of each method per seed")
    parser.add_argument("--iterations", type=int, default=CONFIG["iterations"], help="meta-batches of training")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where runs are written")
    parser.add_argument("--threads", type=int, default=1, help="threads that torch may use")
    parser.add_argument("--report", action="store_true", help="only print the table of finished runs")
    args = parser.parse_args()
    if not all(0 <= seed <= MAX_SEED for seed in args.seeds):
        parser.error(f"--seeds must be from 0 to {MAX_SEED}, got {args.seeds}.")
    try:
        run_all(args)
    except NIWError as error:
        sys.exit(f"swap.py: {error}")


def run_all(args):
    """Runs what was asked for, and reports."""
    if not args.report:
        if args.data is None:
            sys.exit(MISSING.format(root="ROOT", folder="ROOT/omniglot-py/images_background"))
        torch.set_num_threads(args.threads)
        config = {**CONFIG, "iterations": args.iterations}
        for seed in args.seeds:
            for method in args.methods:
                run(method, seed, args.data, config, args.results)
        write_lines(args.results / FILE, load_runs(args.results).values())
    report(args.results)


if __name__ == "__main__":
    try:
        main()
    except NIWError as error:
        sys.exit(f"{Path(__file__).name}: {error}")
