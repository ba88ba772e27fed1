"""`python -m l2l_niw`: train, test and compare few-shot classifiers, and report results."""

import argparse
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, List, Optional, get_args

from l2l_niw.errors import ArgumentError, LossError, NIWError

EPILOG = """\
  python -m l2l_niw train --method niw --dataset cifarfs --shots 5 --data ~/data --out runs/niw
  python -m l2l_niw test runs/niw --data ~/data
  python -m l2l_niw compare --methods maml niw --dataset omniglot --ways 20 --data ~/data --out comparison --jobs 2
  python -m l2l_niw report comparison
  python -m l2l_niw report benchmarks/results/sine_line
"""


def add_config(parser: argparse.ArgumentParser, without: tuple = ()) -> None:
    """An option for every field of `Config`."""
    from l2l_niw.vision.backbone import SHAPES
    from l2l_niw.vision.config import Config
    from l2l_niw.vision.methods import METHODS

    choices = {"method": list(METHODS), "dataset": list(SHAPES)}
    for field in fields(Config):
        if field.name in without:
            continue
        kind = next((t for t in get_args(field.type) if t is not type(None)), field.type)
        default = "the method's own" if field.default is None else field.default
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=kind,
            default=field.default,
            choices=choices.get(field.name),
            metavar=None if field.name in choices else field.name.upper(),
            help=f"{field.metadata['help']} (default: {default})",
        )


def add_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", help="folder of the data (default: the variable L2L_NIW_DATA)")


def make_parser() -> argparse.ArgumentParser:
    from l2l_niw.vision.methods import METHODS

    parser = argparse.ArgumentParser(
        prog="python -m l2l_niw",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    train = commands.add_parser("train", help="train a method; Ctrl-C stops it, the same command resumes")
    add_config(train)
    train.add_argument("--out", required=True, help="folder of the run: config, log, checkpoint")
    train.add_argument("--download", action="store_true", help="let learn2learn download data that are not there")
    add_data(train)
    test = commands.add_parser("test", help="score a trained run: accuracy, calibration, likelihood, with plots")
    test.add_argument("run", help="its folder")
    test.add_argument("--samples", type=int, help="networks of a prediction (default: as in training's config)")
    add_data(test)
    compare = commands.add_parser("compare", help="train and test several methods and seeds, and report")
    compare.add_argument("--methods", nargs="+", choices=list(METHODS), metavar="METHOD",
                         help=f"which of {', '.join(METHODS)} (default: all; *-fixed if pretrained)")  # fmt: skip
    compare.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="default: 0 1 2")
    compare.add_argument("--jobs", type=int, default=1, help="runs at a time, each on one thread (default: 1)")
    compare.add_argument("--settings", type=Path, help='JSON file with methods\' own: {"niw": {"inner_lr": 0.1}}')
    add_config(compare, without=("method", "seed"))
    compare.add_argument("--out", required=True, help="folder of the comparison")
    add_data(compare)
    report = commands.add_parser("report", help="table and plots of a comparison, or of the Sine-Line benchmark")
    report.add_argument("folders", nargs="+", metavar="FOLDER", help="results of `compare` or benchmarks/sine_line.py")
    return parser


def config_of(args: argparse.Namespace) -> Any:
    from l2l_niw.vision.config import Config

    return Config(**{f.name: getattr(args, f.name) for f in fields(Config) if hasattr(args, f.name)})


def check_own(config: Any) -> None:
    """What was asked for must be the method's, where it is asked for of one."""
    from l2l_niw.vision.methods import METHODS, OWN

    for name in OWN:
        if getattr(config, name) is not None and getattr(METHODS[config.method], name) is None:
            raise ArgumentError(f"{config.method} has no {name.replace('_', '-')}: leave that option out.")


def run(args: argparse.Namespace) -> None:
    from l2l_niw.reports import report

    if args.command == "report":
        for folder in args.folders:
            print(report(folder))
        return
    from l2l_niw.vision import evaluate, train
    from l2l_niw.vision.compare import compare, read_settings

    if args.command == "train":
        config = config_of(args)
        check_own(config)
        train(config, args.out, args.data, args.download)
        print(f"Trained. Now: python -m l2l_niw test {args.out}")
    elif args.command == "test":
        for name, value in evaluate(args.run, args.data, args.samples).items():
            print(f"{name:>18}  {format(value, '.4g') if isinstance(value, (int, float)) else value}")
    else:
        settings = None if args.settings is None else read_settings(args.settings)
        compare(config_of(args), args.out, args.methods, args.seeds, args.data, args.jobs, settings)
        print(report(args.out))


def main(argv: Optional[List[str]] = None) -> int:
    from l2l_niw.vision.compare import DIVERGED

    args = make_parser().parse_args(argv)
    try:
        run(args)
    except NIWError as error:
        print(f"l2l_niw: {error}", file=sys.stderr)
        return DIVERGED if isinstance(error, LossError) else 1
    except KeyboardInterrupt:
        text = "\nStopped. The same command goes on with the training from here; a pretraining or a test begins again."
        print(text, file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
