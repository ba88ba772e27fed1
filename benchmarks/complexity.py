#!/usr/bin/env python3

"""
What an episode costs, by method, network and number of inner steps: the paper's Fig. 2 and Table 8.

    python benchmarks/complexity.py                          # every network and method; about two hours
    python benchmarks/complexity.py --networks sine-line conv-4 --rounds 2
    python benchmarks/complexity.py --report                 # the tables of what has been measured

Every cell is measured in a process of its own; cells take turns, round by round, so that a busy moment of the machine
falls on all of them. Results are written as they come, and a stopped run goes on where it was. The tables show medians
over rounds with their range, and ratios to ProtoNet and to 1-step MAML of the same run.
"""

import argparse
import itertools
import json
import statistics
import time
from pathlib import Path

import torch
from processes import in_own_process, machine, peak_memory
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

from l2l_niw import NIW, EpisodicModel
from l2l_niw.episodes import Episodes
from l2l_niw.heads import NearestCentroid
from l2l_niw.models import MLP, PoseEncoder, batch_statistics, timm_backbone

import learn2learn as l2l  # after l2l_niw, which lets it be imported on CPU-only builds

RESULTS = Path(__file__).parent / "results" / "complexity"


class Readout(nn.Module):
    """A backbone with a linear layer, for methods that adapt one."""

    def __init__(self, backbone, width, outputs):
        super().__init__()
        self.backbone, self.out = backbone, nn.Linear(width, outputs)

    def forward(self, x):
        return self.out(self.backbone(x).flatten(1))


def images(size, channels=3, ways=5, shots=1, queries=15):
    y = torch.arange(ways)
    support = torch.randn(ways * shots, channels, size, size), y.repeat(shots)
    return support, (torch.randn(ways * queries, channels, size, size), y.repeat(queries))


def points(inputs, targets, shots, queries):
    return tuple((torch.randn(n, *inputs), torch.randn(n, targets)) for n in (shots, queries))


# name: (network, its features' width, one episode's data, loss)
NETWORKS = {
    "sine-line": (lambda: MLP(1, (40, 40), activate_last=True), 40, lambda: points((1,), 1, 5, 45), F.mse_loss),
    "conv-4": (
        lambda: l2l.vision.models.CNN4Backbone(hidden_size=32, channels=3, max_pool=True),
        800, lambda: images(84), F.cross_entropy,
    ),
    "pose": (lambda: PoseEncoder(), 64, lambda: points((1, 128, 128), 2, 15, 15), F.mse_loss),
    "resnet-18": (lambda: timm_backbone("resnet18"), 512, lambda: images(84, queries=5), F.cross_entropy),
    "vit-small": (
        lambda: timm_backbone("dino-small", img_size=80), 384, lambda: images(80, queries=5), F.cross_entropy,
    ),
}  # fmt: skip
STEPS = (1, 3, 5)
METHODS = [
    "protonet",
    *(f"{m}-{k}" for m in ("maml", "higher", "fo-maml") for k in STEPS),
    "reptile-5",
    *(f"niw-{k}" for k in (1, 2, 5, 50)),
    *(f"niw-paper-{k}" for k in (2, 5)),
    *(f"niw-batch-{k}" for k in (2, 5)),
    "niw-compiled-5",
]
SINE_LINE_BATCH = 32


def protonet_of(network):
    backbone, _, _, loss = NETWORKS[network]
    if loss is F.mse_loss:  # no classes: the cost of one forward and backward of support and query
        model = Readout(backbone(), NETWORKS[network][1], NETWORKS[network][2]()[0][1].shape[-1])

        def run(support, query):
            (loss(model(support[0]), support[1]) + loss(model(query[0]), query[1])).backward()

        return model, run
    model = EpisodicModel(backbone(), NearestCentroid("cosine", 10.0))
    return model, lambda support, query: model(*support, query[0]).nll(query[1]).backward()


def readout_of(network):
    backbone, width, data, loss = NETWORKS[network]
    (_, y), _ = data()
    return Readout(backbone(), width, y.shape[-1] if loss is F.mse_loss else int(y.max()) + 1)


def prepare(network, method):
    """What is trained, and a function that runs one episode or a batch of them, gradients included."""
    name, _, steps = method.rpartition("-")
    if method == "protonet":
        return *protonet_of(network), 1
    loss, steps, model = NETWORKS[network][3], int(steps), readout_of(network)
    if name.startswith("niw"):
        return niw_of(network, name, steps, model, loss)
    if name == "higher":
        return model, higher_of(model, steps, loss), 1
    maml = l2l.algorithms.MAML(model, lr=0.01, first_order=name != "maml")

    def run(support, query):
        learner = maml.clone()
        for _ in range(steps):
            learner.adapt(loss(learner(support[0]), support[1]))
        if name == "reptile":
            for p, q in zip(model.parameters(), learner.parameters()):
                p.grad = p.detach() - q.detach()
        else:
            loss(learner(query[0]), query[1]).backward()

    return maml, run, 1


def higher_of(model, steps, loss):
    import higher

    inner = torch.optim.SGD(model.parameters(), 0.01)

    def run(support, query):
        with higher.innerloop_ctx(model, inner, copy_initial_weights=False) as (learner, optimiser):
            for _ in range(steps):
                optimiser.step(loss(learner(support[0]), support[1]))
            loss(learner(query[0]), query[1]).backward()

    return run


def niw_of(network, name, steps, model, loss):
    burn_in = min(2, steps - 1)
    if name in ("niw-batch", "niw-compiled"):
        size = SINE_LINE_BATCH if network == "sine-line" else 4
        niw = NIW(batch_statistics(model), lr=0.01, burn_in=burn_in)
        episodes = Episodes(
            niw, lambda net, x, y: loss(net(x), y), steps=steps, memory=2**32, compile=name == "niw-compiled"
        )

        def run_batch(support, query):
            batch = ([t.expand(size, *t.shape).contiguous() for t in part] for part in (support, query))
            episodes(*batch).backward()

        return niw, run_batch, size
    if name == "niw-paper":  # chains on support and query, and the objective on both
        niw = NIW(model, lr=0.01, burn_in=burn_in, trace="none", precondition=False, auto_kl=False)

        def run_paper(support, query):
            x, y = (torch.cat(pair) for pair in zip(support, query))
            learner = niw.clone()
            for _ in range(steps):
                learner.adapt(loss(learner(x), y))
            post = learner.posterior()
            learner.objective(loss(post.network(post.rsample())(x), y), n=len(x)).backward()

        return niw, run_paper, 1
    niw = NIW(model, lr=0.01, burn_in=burn_in)

    def run(support, query):
        learner = niw.clone()
        for _ in range(steps):
            learner.adapt(loss(learner(support[0]), support[1]))
        loss(learner(query[0]), query[1]).backward()

    return niw, run, 1


def measure(network, method, seconds):
    """Median seconds of an episode with its optimiser step, and the process's peak memory in MB."""
    before = peak_memory()
    torch.manual_seed(0)
    trained, run, size = prepare(network, method)
    support, query = NETWORKS[network][2]()
    opt = torch.optim.SGD(trained.parameters(), 1e-4)
    times, began = [], time.perf_counter()
    for count in itertools.count():
        start = time.perf_counter()
        opt.zero_grad()
        run(support, query)
        opt.step()
        times.append(time.perf_counter() - start)
        if count == 1:
            began = time.perf_counter()  # the first two warm up, or compile
        if count >= 4 and time.perf_counter() - began > seconds:
            break
    peak = peak_memory()
    return {"seconds": statistics.median(times[2:]) / size, "peak": peak, "own": peak - before, "runs": len(times) - 2}


def cells(args):
    for network in args.networks:
        for method in args.methods:
            if method == "niw-compiled-5" and network != "sine-line":
                continue  # compilers help where time passes between operations
            yield network, method


def run(args):
    args.results.mkdir(parents=True, exist_ok=True)
    wanted = [(r, *cell) for r in range(args.rounds) for cell in cells(args)]
    for r, network, method in tqdm(wanted, desc="measurements"):
        path = args.results / f"{network}_{method}_{args.threads}threads.json"
        done = json.loads(path.read_text()) if path.exists() else []
        if len(done) > r:
            continue
        done.append(in_own_process(__file__, args.threads, measure=f"{network}/{method}", seconds=args.seconds))
        path.write_text(json.dumps(done))


def table(results, network, threads):
    """Markdown for one network from {method: measurements}."""
    medians = {m: {k: statistics.median(r[k] for r in rounds) for k in rounds[0]} for m, rounds in results.items()}
    rows = [
        f"### {network}, {threads} thread(s)\n",
        "| method | ms an episode (range) | / ProtoNet | / 1-step MAML | peak MB | / ProtoNet | / 1-step MAML |",
        "|---|---|---|---|---|---|---|",
    ]
    for method, m in medians.items():
        times = [1000 * r["seconds"] for r in results[method]]
        time_ratios, memory_ratios = (
            [f"{m[key] / medians[base][key]:.2f}" if base in medians else "" for base in ("protonet", "maml-1")]
            for key in ("seconds", "own")
        )
        spread = f"{1000 * m['seconds']:.2f} ({min(times):.2f} to {max(times):.2f})"
        rows.append(f"| {' | '.join([method, spread, *time_ratios, format(m['own'], '.0f'), *memory_ratios])} |")
    return "\n".join(rows)


def report(args):
    parts = []
    for threads, network in itertools.product((1, 2), NETWORKS):
        found = {}
        for method in METHODS:
            path = args.results / f"{network}_{method}_{threads}threads.json"
            if path.exists():
                found[method] = json.loads(path.read_text())
        if found:
            parts.append(table(found, network, threads))
    text = "# What an episode costs\n\n" + "\n\n".join(parts)
    text += (
        "\n\nPeak memory is that of the process without its imports. A batched or compiled row is a batch of episodes, "
        f"divided by their number ({SINE_LINE_BATCH} for sine-line, 4 for others). {machine()}.\n"
    )
    (args.results / "README.md").write_text(text)
    print(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS), help="which networks")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, help="which methods")
    parser.add_argument("--rounds", type=int, default=3, help="how often each cell has its turn")
    parser.add_argument("--seconds", type=float, default=3.0, help="how long a cell is measured, once warm")
    parser.add_argument("--threads", type=int, default=1, help="threads that torch may use")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where results are written")
    parser.add_argument("--report", action="store_true", help="only write the tables of what has been measured")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.measure:
        print(json.dumps(measure(*args.measure.split("/"), args.seconds)))
        return
    if not args.report:
        run(args)
    report(args)


if __name__ == "__main__":
    main()
