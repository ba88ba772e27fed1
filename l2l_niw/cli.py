"""Train, test and compare few-shot classifiers of images and texts, and report results."""

import argparse
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, List, Optional, get_args

from l2l_niw import __version__
from l2l_niw.errors import ArgumentError, LossError, NIWError
from l2l_niw.utils._files import folder_of

if TYPE_CHECKING:
    from l2l_niw.vision.config import Config

EXAMPLES = """\
examples:
  {prog} train --method niw --dataset cifarfs --shots 5 --data ~/data --out runs/niw
  {prog} test runs/niw --data ~/data
  {prog} compare --methods maml niw --dataset omniglot --ways 20 --data ~/data --out comparison --jobs 2
  {prog} report comparison
  {prog} report benchmarks/results/sine_line
"""


def program() -> str:
    """The command that this process was started by."""
    return "l2l-niw" if Path(sys.argv[0]).stem == "l2l-niw" else "python -m l2l_niw"


def add_config(parser: argparse.ArgumentParser, without: tuple = ()) -> None:
    """Adds an option for every field of `Config`."""
    from l2l_niw.vision.config import CHOICES, DATASETS, Config
    from l2l_niw.vision.methods import METHODS

    choices = {"method": list(METHODS), "dataset": list(DATASETS), **CHOICES}
    for field in fields(Config):
        if field.name in without:
            continue
        kind = next((t for t in get_args(field.type) if t is not type(None)), field.type)
        default = "the method's" if field.default is None else field.default
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=kind,
            default=field.default,
            choices=choices.get(field.name),
            metavar=None if field.name in choices else field.name.upper(),
            help=f"{field.metadata['help']} (default: {default})",
        )


def add_data(parser: argparse.ArgumentParser) -> None:
    """Adds the option that names the folder of the data."""
    parser.add_argument("--data", help="folder of the data (default: the environment variable L2L_NIW_DATA)")


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    from l2l_niw.vision.methods import METHODS

    parser = argparse.ArgumentParser(
        prog=program(),
        description=__doc__,
        epilog=EXAMPLES.format(prog=program()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"l2l_niw {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    train = commands.add_parser("train", help="train a method; Ctrl-C stops it, and the same command resumes it")
    add_config(train)
    train.add_argument("--out", required=True, help="folder of the run, for its config, log and checkpoint")
    train.add_argument("--download", action="store_true", help="let learn2learn download missing data")
    add_data(train)
    test = commands.add_parser("test", help="score a trained run on its test tasks: accuracy, calibration, likelihood")
    test.add_argument("run", help="folder of the run")
    test.add_argument("--samples", type=int, help="posterior samples per prediction (default: as in the run's config)")
    add_data(test)
    shift = commands.add_parser(
        "shift", help="score a trained run under shift: corrupted queries, other classes, ways and shots, unknown ones"
    )
    shift.add_argument("run", help="folder of the run")
    add_data(shift)
    compare = commands.add_parser("compare", help="train and test several methods with several seeds, and report")
    compare.add_argument("--methods", nargs="+", choices=list(METHODS), metavar="METHOD",
                         help=f"any of {', '.join(METHODS)} (default: all; *-fixed if pretrained)")  # fmt: skip
    compare.add_argument(
        "--seeds", nargs="+", type=int, default=[0, 1, 2], help="one run per method and seed (default: 0 1 2)"
    )
    compare.add_argument("--jobs", type=int, default=1, help="runs in parallel, on one thread each (default: 1)")
    compare.add_argument("--settings", type=Path, help='JSON file of options per method: {"niw": {"inner_lr": 0.1}}')
    add_config(compare, without=("method", "seed"))
    compare.add_argument("--out", required=True, help="folder of the comparison")
    add_data(compare)
    report = commands.add_parser("report", help="write table and plots of a comparison, or of the Sine-Line benchmark")
    report.add_argument("folders", nargs="+", metavar="FOLDER", help="of `compare`, or of benchmarks/sine_line.py")
    return parser


def config_of(args: argparse.Namespace) -> "Config":
    """The config that the options say."""
    from l2l_niw.vision.config import Config

    return Config(**{f.name: getattr(args, f.name) for f in fields(Config) if hasattr(args, f.name)})


def check_method_options(config: "Config") -> None:
    """Raises where an option was given that the method does not have."""
    from l2l_niw.vision.methods import METHOD_OPTIONS, METHODS

    for name in METHOD_OPTIONS:
        if getattr(config, name) is not None and getattr(METHODS[config.method], name) is None:
            raise ArgumentError(f"{config.method} has no {name.replace('_', '-')}: leave that option out.")


def run(args: argparse.Namespace) -> None:
    """Runs the command."""
    from l2l_niw.reports import report

    if args.command == "report":
        for folder in args.folders:
            print(report(folder))
        return
    from l2l_niw.vision import evaluate, train
    from l2l_niw.vision.compare import compare, read_settings
    from l2l_niw.vision.shift import evaluate_shift

    if args.command == "train":
        config = config_of(args)
        check_method_options(config)
        train(config, folder_of("--out", args.out), args.data, args.download)
        print(f"Trained. Now: {program()} test {args.out}")
    elif args.command == "test":
        for name, value in evaluate(args.run, args.data, args.samples).items():
            print(f"{name:>18}  {format(value, '.4g') if isinstance(value, (int, float)) else value}")
    elif args.command == "shift":
        columns = ("accuracy", "ece", "nll", "aurc", "coverage", "auroc")
        print(f"{'':>14}  " + "  ".join(f"{name:>8}" for name in columns))
        for name, scores in evaluate_shift(args.run, args.data).items():
            values = ("" if scores[key] is None else format(scores[key], ".4f") for key in columns)
            print(f"{name:>14}  " + "  ".join(f"{value:>8}" for value in values))
    else:
        settings = None if args.settings is None else read_settings(args.settings)
        compare(config_of(args), folder_of("--out", args.out), args.methods, args.seeds, args.data, args.jobs, settings)
        print(report(args.out))


def main(argv: Optional[List[str]] = None) -> int:
    """
    **Description**

    The command line. Errors are printed on one line, without a traceback.

    **Arguments**

    * **argv** (list, *optional*, default=None) - Arguments; those of the process by default.

    **Return**

    * (int) - The exit code: 0, or 1 for an error, 3 for a training that diverged, 130 after Ctrl-C.
    """
    from l2l_niw.vision.compare import DIVERGED

    parser = make_parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    try:
        run(args)
    except NIWError as error:
        print(f"l2l_niw: {error}", file=sys.stderr)
        return DIVERGED if isinstance(error, LossError) else 1
    except OSError as error:
        print(f"l2l_niw: {error}. Check the name, the permissions and the space on the disk.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        text = "\nStopped. The same command resumes from here, a pretraining from its last epoch; tests start over."
        print(text, file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
