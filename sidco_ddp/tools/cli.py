"""``sidco-ddp``: one subcommand a module, each of which adds its own options."""

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from sidco_ddp import __version__
from sidco_ddp.tools import bench
from sidco_ddp.tools.report import command as report


class Parser(argparse.ArgumentParser):
    """A parser that takes no abbreviations and says what is wrong in one line."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, allow_abbrev=False, **options)  # type: ignore[arg-type, misc]

    def error(self, message: str) -> NoReturn:
        """Leave with status 2."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command."""
    parser = Parser(prog="sidco-ddp", description="Tools around sparse gradients for DistributedDataParallel.")
    parser.add_argument("--version", action="version", version=f"sidco_ddp {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", required=True, metavar="COMMAND")
    bench.add_command(commands)
    report.add_command(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    options = make_parser().parse_args(arguments)
    status: int = options.run(options)
    return status


if __name__ == "__main__":
    sys.exit(main())
