"""`mlxrl cancel`: ask a run to end."""

from __future__ import annotations

import argparse

from mlxrl.errors import UserError
from mlxrl.runs.folder import near, run_folder


def command(arguments: argparse.Namespace) -> int:
    """Ask a run to end after its present step, with its adapter and a checkpoint saved."""
    folder = run_folder(arguments.run)
    if not folder.is_locked():
        raise UserError(near(folder.path), f"the run is {folder.state()}; wanted one under way")
    folder.ask_to_cancel()
    print(f"{near(folder.path)}: asked to end after its present step")
    return 0
