"""Tables, goals and plots of what `complexity.py` has measured."""

import json
import statistics
from collections import defaultdict

from complexity_cells import BATCH, METHODS, NETWORKS
from processes import publish

from l2l_niw.process import machine

LARGER = [network for network in NETWORKS if network not in ("sine-line", "pose")]
HELD = [network for network in NETWORKS if network != "sine-line"]  # whose memory is more than that of loaded code
STEP = ("forward", "backward", "noise", "step and moments")
ONCE = ("closed form and draw", "query forward", "query backward", "draw's gradient", "KL's gradient")
DENSE = ("noise", "step and moments", "closed form and draw", "draw's gradient", "KL's gradient")
LINES = {
    "maml": ("MAML (learn2learn)", "C0"),
    "higher": ("MAML (higher)", "C1"),
    "fo-maml": ("first-order MAML", "C2"),
    "niw-readout": ("NIW", "C3"),
    "niw": ("NIW, first order", "C5"),
    "niw-paper": ("NIW, chain on support and query", "C4"),
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
        "| method | ms an episode (range) | / ProtoNet | / 1-step MAML | peak MB | / ProtoNet | / 1-step MAML |",
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
        ("first-order NIW / first-order MAML, 5 steps: time", 1.10, by_network(NETWORKS, "time", "niw-5", "fo-maml-5")),
        ("the same: memory", 1.05, by_network(HELD, "memory", "niw-5", "fo-maml-5")),
        ("first-order NIW / second-order MAML, 5 steps: time", 0.85, by_network(NETWORKS, "time", "niw-5", "maml-5")),
        ("the same: memory", 0.75, by_network(HELD, "memory", "niw-5", "maml-5")),
        ("NIW / second-order MAML, 5 steps: time", 0.85, by_network(NETWORKS, "time", "niw-readout-5", "maml-5")),
        ("the same: memory", 0.75, by_network(HELD, "memory", "niw-readout-5", "maml-5")),
        ("first-order NIW, 50 steps / 1 step: memory", 1.02, by_network(HELD, "memory", "niw-50", "niw-1")),
        ("first-order NIW, 50 steps / 5 steps: memory", 1.02, by_network(HELD, "memory", "niw-50", "niw-5")),
        ("NIW, 50 steps / 1 step: memory", 1.02, by_network(HELD, "memory", "niw-readout-50", "niw-readout-1")),
        ("NIW, 50 steps / 5 steps: memory", 1.02, by_network(HELD, "memory", "niw-readout-50", "niw-readout-5")),
        ("chain on support and query, 2 steps / 3 ProtoNets: time", 1.10,
         by_network(LARGER, "time", "niw-paper-2", "protonet", 3)),
        ("chain on support and query, 5 steps / 6 ProtoNets: time", 1.10,
         by_network(LARGER, "time", "niw-paper-5", "protonet", 6)),
    ]  # fmt: skip
    sine = {
        "loop / batch": pair("time", "sine-line", "niw-5", "niw-batch-5"),
        "loop / compiled batch": pair("time", "sine-line", "niw-5", "niw-compiled-5"),
    }
    rows.append((f"NIW's loop / a batch of {BATCH['sine-line']}: time", -15.0, sine))
    sine = {
        "MAML / batch": pair("time", "sine-line", "maml-1", "niw-batch-5"),
        "MAML / compiled batch": pair("time", "sine-line", "maml-1", "niw-compiled-5"),
    }
    rows.append(("learn2learn's 1-step MAML / NIW's batch, 5 steps: time", -10.0, sine))
    predict = {
        network: statistics.median(m["loop"] / m["together"] for m in cells[f"predict/{network}"])
        for network in ("omniglot", "sine-line")
        if f"predict/{network}" in cells
    }
    rows.append(("10 sampled networks, a loop / at once: time", -2.0, predict))
    seconds = {d: median(cells, f"growth/{d}", "seconds") for d in ("1e4", "1e5", "1e6", "1e7")}
    if None not in seconds.values():
        growth = {f"from {d}": seconds["1e7"] / seconds[d] * float(d) / 1e7 for d in ("1e4", "1e5", "1e6")}
        rows.append(("O(d) part, to d = 1e7, / proportional", 1.3, growth))
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


def parts(cells):
    """Markdown: what a 5-step episode is made of, and how much of it is O(d)."""
    rows = [
        f"| network | d | {' | '.join(STEP + ONCE)} | O(d) share |",
        f"|---|---|{'---|' * len(STEP + ONCE)}---|",
    ]
    for network in NETWORKS:
        if f"parts/{network}" in cells:
            ms = {name: 1000 * median(cells, f"parts/{network}", name) for name in STEP + ONCE}
            whole = {name: ms[name] * (5 if name in STEP else 1) for name in ms}
            share = sum(whole[name] for name in DENSE) / sum(whole.values())
            shown = " | ".join(f"{ms[name]:.3g}" for name in STEP + ONCE)
            rows.append(f"| {network} | {cells[f'parts/{network}'][0]['d']} | {shown} | {100 * share:.0f}% |")
    return "\n".join(rows)


def growth(cells):
    """Markdown: the O(d) part by d."""
    found = {cell.split("/")[1]: median(cells, cell, "seconds") for cell in cells if cell.startswith("growth/")}
    rows = ["| d | ms | ns a weight |", "|---|---|---|"]
    rows += [f"| {d} | {1000 * s:.3g} | {1e9 * s / float(d):.1f} |" for d, s in sorted(found.items())]
    return "\n".join(rows)


def plot(found, path):
    """Time and memory against the number of inner steps, a column a network."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    networks = [n for n in NETWORKS if any(f"time/{n}/niw-5" in cells for cells in found.values())]
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
        axes[0][0].set_ylabel("ms an episode")
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
        if any(cell.startswith("parts/") for cell in cells):
            text += [f"## What a 5-step NIW episode is made of, {label}, in ms", parts(cells)]
        if any(cell.startswith("growth/") for cell in cells):
            text += [f"## All that is O(d) in a 5-step episode, {label}", growth(cells)]
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
        "Conv-4 has 32 filters; conv-4: 5 ways, 1 shot, 15 queries at 84x84; resnet-18 and vit-small: 5 queries a way, "
        "at 84x84 and 80x80; pose: 15 shots and 15 queries at 128x128; sine-line: an MLP 40-40, 5 shots, 45 queries. "
        "A batched row runs 32 episodes at once on sine-line and 2 on others; its time is one episode's, its memory "
        "the batch's. ProtoNet has no meaning for regression: there its row is one forward and backward of support "
        "and query. niw-paper takes its chain and its objective on support and query, as the paper does; the others "
        "take the chain on the support, as MAML. niw-readout is NIW as it is by default, with the readout's second "
        "derivatives; the other niw rows are of first order."
    )
