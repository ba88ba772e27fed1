#!/usr/bin/env python3

"""
ProtoNet beside NIW with ProtoNet's head: the same network, the same tasks, with and without a posterior for each task.

    python examples/vision/protonet_vs_niw.py --data ROOT --out protonet_vs_niw

Trains both, one after the other, and writes a table and reliability diagrams. A stopped run resumes.
"""

import argparse

from l2l_niw.reports import report
from l2l_niw.vision import Config
from l2l_niw.vision.compare import compare


def main(dataset="cifarfs", ways=5, shots=1, iterations=1000, data=None, out="protonet_vs_niw", seeds=(0,), **options):
    config = Config(dataset=dataset, ways=ways, shots=shots, iterations=iterations, **options)
    compare(config, out, ["protonet", "niw-ncc"], seeds, data)
    text = report(out)
    print(text)
    return text


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="cifarfs", help="omniglot, cifarfs, fc100, ... (default: cifarfs)")
    parser.add_argument("--ways", type=int, default=5, help="classes per task (default: 5)")
    parser.add_argument("--shots", type=int, default=1, help="support images per class (default: 1)")
    parser.add_argument("--iterations", type=int, default=1000, help="batches of training (default: 1000)")
    parser.add_argument("--data", help="folder of the data, or the variable L2L_NIW_DATA")
    parser.add_argument("--out", default="protonet_vs_niw", help="folder of the results")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="default: 0")
    main(**vars(parser.parse_args()))
