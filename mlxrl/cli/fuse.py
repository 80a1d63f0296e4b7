"""`mlxrl fuse`: an adapter into its model."""

from __future__ import annotations

import argparse

from mlxrl.errors import UserError
from mlxrl.files import expanded
from mlxrl.settings import Dtype, Model
from mlxrl.text import safe, size
from mlxrl.toml import parsed


def command(arguments: argparse.Namespace) -> int:
    """Write a model with an adapter in its weights, and print what of the adapter's effect it has."""
    from mlxrl.cli.main import require_backend

    id, adapter, dtype = _source(arguments)
    require_backend()
    from mlxrl.policy.fused_folder import fuse

    print(f"fusing {safe(adapter)} into {safe(id)}")
    made = fuse(
        id, adapter, arguments.output, dtype=dtype, quantised=arguments.quantised, force=arguments.force,
        gguf_file=arguments.gguf,
    )  # fmt: skip
    what = "changed layers packed again, the rest in" if arguments.quantised else "weights in"
    print(f"  adapter   changes the logits by {made.effect:.3g}, which are {made.logits:.3g} (root mean squares)")
    print(f"  error     {made.lost:.2%} of that change; of the change of the weights {made.lost_in_weights:.2%}")
    if arguments.gguf:
        print(f"  gguf      {safe(arguments.gguf)}")
    print(f"  model     {safe(arguments.output)}: {what} {str(made.dtype).rpartition('.')[2]}, {size(made.size)}")
    return 0


def _source(arguments: argparse.Namespace) -> tuple[str, str, Dtype | None]:
    """The model, its adapter, and the type of the weights, of which a run knows all three."""
    given = [name for name in ("model", "adapter") if getattr(arguments, name)]
    if arguments.run is None:
        if len(given) < 2:
            raise UserError("fuse", "wanted --model and --adapter, or --run with the folder of a run")
        return arguments.model, arguments.adapter, arguments.dtype
    if given:
        raise UserError("fuse", f"--{given[0]} has no effect beside --run; leave one of them out")
    file = expanded(arguments.run) / "config.toml"
    try:
        model = Model(**parsed(file)["model"])  # alone: the run's data may be elsewhere by now
    except UserError as error:
        raise error.within("run") from None
    except (KeyError, TypeError) as error:
        raise UserError("run", str(file), "no table [model]; wanted the folder of a run") from error
    return model.id, str(file.with_name("adapters")), arguments.dtype or model.dtype
