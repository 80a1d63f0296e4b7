from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parents[1] / "examples"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import mlxrl.algo
import mlxrl.policy
import mlxrl.types
import shapes

signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell ignores in what it runs in the background

WATCHED = sum(map(shapes.watch, (mlxrl.types, mlxrl.algo, mlxrl.policy)))
