"""`mlxrl verify`: whether what a handoff.json says is what is here."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from mlxrl.runs.verify import verify
from mlxrl.text import safe


def command(arguments: argparse.Namespace) -> int:
    """Print how each part compares; 1 where one differs."""
    parts = verify(arguments.name)
    if arguments.json:
        print(json.dumps([asdict(part) for part in parts], indent=2))
    else:
        print("\n".join(safe(f"{part.name:<12}{part.outcome:<20}{part.detail}") for part in parts))
    return int(any(part.outcome == "differs" for part in parts))
