"""Measurements in processes of their own, so that none sees another's memory or caches."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from tqdm import tqdm


def timed(run, seconds, warm=1, least=3):
    """Seconds of each run, once warm: `least` at least, and as many as fit."""
    for _ in range(warm):
        run()
    times, began = [], time.perf_counter()
    while len(times) < least or time.perf_counter() - began < seconds:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return times


def in_own_process(script, threads, variables=None, **options):
    """
    Runs a script with --name value for each option, and environment variables if given, and returns the JSON on the
    last line that it prints.
    """
    command = [sys.executable, "-W", "ignore", str(script), "--threads", str(threads)]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), **(variables or {})}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def in_turns(script, names, rounds, threads, **options):
    """{name: its measurements}. All take their turn, round by round, so that a busy moment falls on every one."""
    results = {name: [] for name in names}
    for name in tqdm([name for _ in range(rounds) for name in names], desc="measurements"):
        results[name].append(in_own_process(script, threads, measure=name, **options))
    return results


def publish(text, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    print(text)


def command():
    """How this run was started, for its results."""
    return f"Command: `{' '.join(['python', 'benchmarks/' + Path(sys.argv[0]).name, *sys.argv[1:]])}`."
