"""`mlxrl export`: an adapter in the format of another library."""

from __future__ import annotations

import argparse

from mlxrl.text import safe


def command(arguments: argparse.Namespace) -> int:
    """Write an adapter in PEFT's format."""
    from mlxrl.cli.main import require_backend

    require_backend()
    from mlxrl.policy import adapter_folder, peft_format
    from mlxrl.policy.fused_folder import new_folder

    folder = new_folder(arguments.output, arguments.adapter)
    saved = adapter_folder.read(arguments.adapter)
    source = arguments.model or saved.source
    peft_format.save(saved.lora, saved.weights, source, folder)
    print(f"{safe(arguments.output)}: PEFT, rank {saved.lora.rank}, of {safe(source or 'a model that is not named')}")
    return 0
