#!/usr/bin/env python3

"""
Where an episode's time goes: torch.profiler's view, by operation, and cProfile's, by function.

    python benchmarks/complexity_profile.py sine-line/niw-5 sine-line/fo-maml-5

Writes one text per cell of `complexity.py` under benchmarks/results/complexity/profiles/, once warm.
Profilers slow an episode down, small operations most: compare shares, not seconds.
"""

import argparse
import cProfile
import io
import pstats
import warnings

import torch
from complexity import RESULTS
from complexity_cells import METHODS, NETWORKS, episode_of
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm


def by_operation(episode, repeats, rows=18):
    with profile(activities=[ProfilerActivity.CPU]) as found:
        for _ in range(repeats):
            episode()
    return found.key_averages().table(sort_by="self_cpu_time_total", row_limit=rows, max_name_column_width=45)


def by_function(episode, repeats, rows=18):
    found, text = cProfile.Profile(), io.StringIO()
    found.enable()
    for _ in range(repeats):
        episode()
    found.disable()
    pstats.Stats(found, stream=text).strip_dirs().sort_stats("tottime").print_stats(rows)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines() if line.strip())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choices = [f"{network}/{method}" for network in NETWORKS for method in METHODS]
    parser.add_argument("cells", nargs="+", metavar="NETWORK/METHOD", choices=choices, help="such as conv-4/niw-5")
    parser.add_argument("--repeats", type=int, default=None, help="episodes; 100 on sine-line, 1 on others")
    parser.add_argument("--threads", type=int, default=1, help="threads that torch may use")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(args.threads)
    folder = RESULTS / "profiles"
    folder.mkdir(parents=True, exist_ok=True)
    for cell in tqdm(args.cells, desc="cells"):
        network, method = cell.split("/")
        repeats = args.repeats or (100 if network == "sine-line" else 1)
        episode, _ = episode_of(network, method)
        for _ in range(3 if network == "sine-line" else 1):
            episode()
        head = f"{cell}, {args.threads} thread(s), {repeats} episode(s), torch {torch.__version__}"
        text = "\n\n".join([head, by_operation(episode, repeats), by_function(episode, repeats)])
        (folder / f"{network}_{method}.txt").write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n")


if __name__ == "__main__":
    main()
