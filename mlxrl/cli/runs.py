"""`mlxrl runs`: the runs in a folder, a line each."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from mlxrl.runs.listing import HEADING, runs_in


def command(arguments: argparse.Namespace) -> int:
    """Print the runs."""
    found = runs_in(arguments.folder)
    if arguments.json:
        print(json.dumps([asdict(one) for one in found], indent=2))
    else:
        print("\n".join([HEADING, *(one.line() for one in found)]))
    return 0
