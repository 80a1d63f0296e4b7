"""How long a run's prompts are, before its tokenizer is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mlxrl.cli import compose
from mlxrl.config import Config
from mlxrl.policy.files import read_table, read_text
from mlxrl.policy.shapes import AGAIN
from mlxrl.types import Task

CHARACTERS = 3  # of a token, where there is no tokenizer to ask
TEMPLATE = 24  # tokens that a chat template adds


def longest_prompt(settings: Config, rows: Sequence[Task], folder: Path | None) -> tuple[int, str]:
    """Tokens of the longest of the first prompts, and how they were counted."""
    texts = [_text(row) for row in rows[: compose.RENDERED]]
    longest = max(texts, key=len, default="")
    seen = f"the longest of {len(texts):,} prompts"
    path = folder / "tokenizer.json" if folder else None
    if path is not None and path.is_file():
        from tokenizers import Tokenizer

        text, more = _templated(path.parent, longest)
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # it raises bare ones
            raise ValueError(f"{path}: not a tokenizer: {error}; {AGAIN}") from error
        text = text.encode("utf-8", "replace").decode("utf-8")  # a run says what is wrong with halves of characters
        return len(tokenizer.encode(text).ids) + more, f"{seen}, by the model's tokenizer"
    return len(longest) // CHARACTERS + 1 + TEMPLATE, f"{seen}, at {CHARACTERS} characters a token"


def _text(row: Task) -> str:
    if isinstance(row.prompt, str):
        return row.prompt
    return "\n".join(str(message.get("content", "")) for message in row.prompt)


def _templated(folder: Path, text: str) -> tuple[str, int]:
    """A text through the chat template; where that cannot be read, the text and the tokens it is taken to add."""
    path, settings = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    source = read_text(path) if path.is_file() else None
    if source is None and settings.is_file():
        source = read_table(settings).get("chat_template")
    if not source:
        return text, 0
    try:
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(source)
        asked = [{"role": "user", "content": text}]
        return template.render(messages=asked, add_generation_prompt=True, bos_token="", eos_token=""), 0
    except Exception:  # noqa: BLE001  (a template is a program of the model's, and may raise anything)
        return text, TEMPLATE
