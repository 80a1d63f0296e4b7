"""`mlxrl show`: one run, its rewards, evaluations and last samples."""

from __future__ import annotations

import argparse

from mlxrl.runs.folder import run_folder
from mlxrl.runs.listing import described


def command(arguments: argparse.Namespace) -> int:
    """Print the run."""
    print("\n".join(described(run_folder(arguments.run))))
    return 0
