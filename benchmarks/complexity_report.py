"""Tables, goals and plots of what `complexity.py` has measured."""

import json
import statistics
from collections import defaultdict

from complexity_cells import BATCH, HIDDEN, METHODS, NETWORKS
from processes import publish

from l2l_niw.utils._process import machine

SMALL = ("sine-line", "mlp-256")
LARGE = ("resnet-18", "vit-small")
HELD = [
    network for network in NETWORKS if network not in (*SMALL, *HIDDEN)
]  # whose memory is more than that of loaded code
LINES = {
    "maml": ("MAML (learn2learn)", "C0"),
    "higher": ("MAML (higher)", "C1"),
    "fo-maml": ("first-order MAML", "C2"),
    "niw": ("NIW", "C3"),
    "fo-niw": ("NIW, first order", "C5"),
}


def load(results):
    """{threads: {cell: its measurements}}."""
    found = {}
    for path in sorted(results.glob("*-threads.jsonl")):
        cells = found[int(path.name.split("-")[0])] = defaultdict(list)
        for line in path.read_text().splitlines():
            measured = json.loads(line)
            cells[measured["cell"]].append(measured)
    return found


def median(cells, cell, key):
    """A cell's median over rounds, or None where it has not been measured."""
    return statistics.median(m[key] for m in cells[cell]) if cell in cells else None


def ratio(a, b, digits=2):
    return "" if a is None or b is None else f"{a / b:.{digits}f}"


def table(cells, network):
    """Markdown for one network: every method's time and memory."""
    rows = [
        "| method | ms per episode (range) | / ProtoNet | / 1-step MAML | peak MB | / ProtoNet | / 1-step MAML |",
        "|---|---|---|---|---|---|---|",
    ]
    for method in METHODS:
        time, memory = f"time/{network}/{method}", f"memory/{network}/{method}"
        if time not in cells and memory not in cells:
            continue
        columns = [method]
        for cell, key in ((time, "seconds"), (memory, "own")):
            value = median(cells, cell, key)
            scale, digits = (1000, 2) if key == "seconds" else (1, 1)
            values = [scale * m[key] for m in cells.get(cell, [])]
            spread = f" ({min(values):.2f} to {max(values):.2f})" if len(values) > 1 else ""
            columns.append("" if value is None else f"{scale * value:.{digits}f}{spread}")
            kind = cell.split("/")[0]
            bases = [median(cells, f"{kind}/{network}/{base}", key) for base in ("protonet", "maml-1")]
            columns += [ratio(value, base) for base in bases]
        rows.append(f"| {' | '.join(columns)} |")
    return "\n".join(rows)


def goals(cells):
    """Markdown: each goal with what was measured, by network."""

    def pair(kind, network, ours, theirs, times=1):
        key = "seconds" if kind == "time" else "own"
        a, b = (median(cells, f"{kind}/{network}/{method}", key) for method in (ours, theirs))
        return None if a is None or b is None else a / (times * b)

    def by_network(networks, *arguments):
        return {network: pair(arguments[0], network, *arguments[1:]) for network in networks}

    rows = [
        ("NIW / MAML, 5 steps: time", 1.0, by_network(SMALL, "time", "niw-5", "maml-5")),
        ("NIW / first-order MAML, 5 steps: time", 1.6, by_network(SMALL, "time", "niw-5", "fo-maml-5")),
        ("the same", 1.0, by_network(["conv-4"], "time", "niw-5", "fo-maml-5")),
        ("the same", 1.25, by_network(LARGE, "time", "niw-5", "fo-maml-5")),
        ("the same: memory", 2.0, by_network(LARGE, "memory", "niw-5", "fo-maml-5")),
        ("NIW / MAML, 5 steps: memory", 0.75, by_network([*LARGE, "resnet-18-15"], "memory", "niw-5", "maml-5")),
        ("NIW, 5 steps / MAML, 1 step: memory", 1.1, by_network(["resnet-18-15"], "memory", "niw-5", "maml-1")),
        ("NIW, 50 steps / 1 step: memory", 1.01, by_network(HELD, "memory", "niw-50", "niw-1")),
    ]
    flat = by_network(HELD, "memory", "niw-rank-last-50", "niw-rank-last-1")
    rows.append(("NIW, rank 8, 50 steps / 1 step, the last differentiated: memory", 1.02, flat))
    sine = {"sine-line": pair("time", "sine-line", "niw-rank-3", "maml-5")}
    rows.append(("NIW, rank 8, 3 steps / MAML, 5 steps: time", 3.0, sine))
    sine = {"sine-line": pair("time", "sine-line", "maml-5", "niw-rank-batch-3")}
    rows.append(("learn2learn's 5-step MAML / NIW's batch, rank 8, 3 steps: time", -1.0, sine))
    sine = {"sine-line": pair("time", "sine-line", "niw-5", "niw-batch-5")}
    rows.append((f"NIW's loop / a batch of {BATCH['sine-line']}, 5 steps: time", -10.0, sine))
    sine = {"sine-line": pair("time", "sine-line", "maml-1", "niw-batch-5")}
    rows.append(("learn2learn's 1-step MAML / NIW's batch, 5 steps: time", -5.0, sine))
    for kind in ("time", "memory"):
        adapters = by_network(HIDDEN, kind, "niw-adapters-5", "fo-maml-5")
        rows.append((f"NIW, adapters of the last block / first-order MAML, 5 steps: {kind}", 0.5, adapters))
    predict = {
        network: statistics.median(m["loop"] / m["vectorized"] for m in cells[f"predict/{network}"])
        for network in ("omniglot", "sine-line")
        if f"predict/{network}" in cells
    }
    rows.append(("10 sampled networks, a loop / at once: time", -2.0, predict))
    rows.append(("Python functions called by `adapt`", 40.0, {"sine-line": median(cells, "calls/sine-line", "calls")}))
    lines = ["| ratio | goal | measured | |", "|---|---|---|---|"]
    for name, bound, values in rows:
        values = {k: v for k, v in values.items() if v is not None}
        if values:
            met = [v <= bound if bound > 0 else v >= -bound for v in values.values()]
            verdict = "met" if all(met) else "missed" if not any(met) else "in part"
            goal = f"{'<=' if bound > 0 else '>='} {abs(bound):.2f}"
            shown = ", ".join(f"{k} {v:.{3 if v < 1.1 else 2}f}" for k, v in values.items())
            lines.append(f"| {name} | {goal} | {shown} | {verdict} |")
    return "\n".join(lines)


def plot(found, path):
    """Time and memory against the number of inner steps, one column per network."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = [n for n in NETWORKS if n not in HIDDEN]  # of pretrained transformers one number of steps is measured
    networks = [n for n in steps if any(f"time/{n}/niw-5" in cells for cells in found.values())]
    if not networks:
        return None
    figure, axes = plt.subplots(2, len(networks), figsize=(3.2 * len(networks), 6), squeeze=False)
    cells = found[min(found)]
    for column, network in enumerate(networks):
        for row, (kind, key, scale) in enumerate((("time", "seconds", 1000), ("memory", "own", 1))):
            axis = axes[row][column]
            for line, (label, color) in LINES.items():
                points = sorted(
                    (int(method.rpartition("-")[2]), scale * median(cells, f"{kind}/{network}/{method}", key))
                    for method in METHODS
                    if method.rpartition("-")[0] == line and f"{kind}/{network}/{method}" in cells
                )
                if points:
                    axis.plot(*zip(*points), "o-", color=color, label=label, markersize=4)
            base = median(cells, f"{kind}/{network}/protonet", key)
            if base is not None:
                axis.axhline(scale * base, color="gray", linestyle=":", label="ProtoNet")
            axis.set_xscale("log")
            axis.set_xticks([1, 2, 5, 50] if kind == "memory" else [1, 2, 5])
            axis.get_xaxis().set_major_formatter(matplotlib.ticker.ScalarFormatter())
            axis.minorticks_off()
            axis.set_ylim(bottom=0)
            axis.set_title(network if row == 0 else "")
            axis.set_xlabel("inner steps" if row == 1 else "")
        axes[0][0].set_ylabel("ms per episode")
        axes[1][0].set_ylabel("peak MB")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=6, frameon=False)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def report(results):
    """Writes README.md and steps.png beside the measurements."""
    found = load(results)
    text = ["# What an episode costs", setting()]
    if found and plot(found, results / "steps.png"):
        text.append("![Time and memory against the number of inner steps, one thread](steps.png)")
    for threads, cells in found.items():
        label = f"{threads} thread{'s' if threads > 1 else ''}"
        text += [f"## Goals, {label}", goals(cells)]
        for network in NETWORKS:
            if any(cell.split("/")[1] == network for cell in cells):
                text += [f"## {network}, {label}", table(cells, network)]
    notes = results / "notes.md"
    if notes.exists():
        text.append(notes.read_text().strip())
    publish("\n\n".join(text) + "\n", results / "README.md")


def setting():
    return (
        f"Made by `python benchmarks/complexity.py`; the last section says how it was run. {machine()}. "
        "An episode is its adaptation, its meta-gradient and an SGD step; medians over rounds, each round of a cell in "
        "a process of its own. Peak memory is the process's, without its imports, with free blocks given back at once. "
        "sine-line: an MLP 40-40, 5 shots, 45 queries; mlp-256: an MLP 20-256-256-5, 5 and 75 examples; conv-4: 32 "
        "filters, 5 ways, 1 shot, 15 queries per way at 84x84; resnet-18 and vit-small: 5 queries per way, at 84x84 "
        "and 80x80; resnet-18-15: 15; pose: 15 shots and 15 queries at 128x128; dinov2: ViT-S/14 with 11 blocks, 5 "
        "queries per way at 112x112; minilm: all-MiniLM-L6-v2, 10 ways, 1 shot, 5 queries per way of 16 tokens. There "
        "niw-block is NIW on the last block, whose inputs are on disk, niw-adapters on its low-rank adapters, "
        "niw-adapters-all on those of all layers. A batched row runs 32 episodes at once "
        "on sine-line and 2 on others; its time is per episode, its memory the batch's. ProtoNet has no meaning for "
        "regression: there its row is one forward and backward of support and query. niw is NIW as it is by default; "
        "fo-niw has first_order=True."
    )
