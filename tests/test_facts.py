"""What a manifest records of where a run came from."""

import hashlib
import json
import sys

from mlxrl.runs import facts
from mlxrl.types import Task


def test_digests(tmp_path, monkeypatch):
    (tmp_path / "model.safetensors").write_bytes(b"abcdef")
    (tmp_path / "notes.txt").write_bytes(b"")
    assert facts.model_digests(str(tmp_path)) == {"model.safetensors": hashlib.sha256(b"abcdef").hexdigest()}
    monkeypatch.setattr(facts, "WHOLE", 6)
    monkeypatch.setattr(facts, "HEAD", 2)
    assert facts.digest(tmp_path / "model.safetensors") == f"head:6:{hashlib.sha256(b'ab').hexdigest()}"
    assert facts.model_digests("some/model-on-the-hub") == {}
    one, two = [Task("a", {"x": 1})], [Task("a", {"x": 2})]
    assert facts.data_digest("d", one)["examples"] == 1
    assert facts.data_digest("d", one) == facts.data_digest("d", list(one))
    assert facts.data_digest("d", one)["sha256"] != facts.data_digest("d", two)["sha256"]


def test_versions_name_what_decides_a_run():
    found = facts.versions()
    assert list(found) == ["mlxrl", "mlx", "mlx-lm", "python"]
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert json.dumps(facts.device())
