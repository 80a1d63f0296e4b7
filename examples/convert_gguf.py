"""A llama `.gguf` file as an mlx-lm folder, for mlx_lm.generate, fuse and convert, and for an adapter trained on it.

python examples/convert_gguf.py model.gguf folder
"""

from __future__ import annotations

import argparse
from pathlib import Path

import mlx.core as mx

from mlxrl.errors import UserError
from mlxrl.policy import gguf

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16, "packed": None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="packed keeps the 4 or 8 bits of the file")
    given = parser.parse_args()
    try:
        gguf.save_folder(*gguf.read(given.file, DTYPES[given.dtype]), given.folder)
    except UserError as error:
        raise SystemExit(f"convert_gguf: {error}") from None
    print(f"wrote {given.folder}")


if __name__ == "__main__":
    main()
