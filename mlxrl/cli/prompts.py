"""How long a run's prompts are, before its tokenizer is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlxrl.cli import compose
from mlxrl.config import Config
from mlxrl.policy.files import read_table, read_text
from mlxrl.policy.shapes import AGAIN
from mlxrl.types import Task

CHARACTERS = 3  # of a token, where there is no tokenizer to ask
TEMPLATE = 24  # tokens that a chat template adds


def longest_prompt(settings: Config, rows: Sequence[Task], folder: Path | None) -> tuple[int, str]:
    """Tokens of the longest of the first prompts, and how they were counted."""
    rows = rows[: compose.RENDERED]
    longest = max(rows, key=lambda row: len(_text(row)), default=Task(""))
    seen = f"the longest of {len(rows):,} prompts"
    if (found := _language(settings.model.id, folder)) is None:
        return len(_text(longest)) // CHARACTERS + 1 + TEMPLATE, f"{seen}, at {CHARACTERS} characters a token"
    tokenizer, template = found
    text, more = _templated(template, longest)
    text = text.encode("utf-8", "replace").decode("utf-8")  # a run says what is wrong with halves of characters
    return len(tokenizer.encode(text).ids) + more, f"{seen}, by the model's tokenizer"


def _language(id: str, folder: Path | None) -> tuple[Any, str | None] | None:
    """A model's tokenizer and chat template, None where its files are not here."""
    if id.endswith(".gguf"):
        from mlxrl.policy import gguf

        tokenizer: Any = gguf.tokenizer_of(gguf.header(Path(id).expanduser()))
        return tokenizer._tokenizer.backend_tokenizer, tokenizer.chat_template
    path = folder / "tokenizer.json" if folder else None
    if path is None or not path.is_file():
        return None
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path)), _template(path.parent)
    except ValueError:
        raise
    except Exception as error:  # it raises bare ones
        raise ValueError(f"{path}: not a tokenizer: {error}; {AGAIN}") from error


def _text(row: Task) -> str:
    if isinstance(row.prompt, str):
        return row.prompt
    return "\n".join(str(message.get("content", "")) for message in row.prompt)


def _template(folder: Path) -> str | None:
    """The chat template in a model's folder."""
    path, settings = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    if path.is_file():
        return read_text(path)
    return read_table(settings).get("chat_template") if settings.is_file() else None


def _templated(template: str | None, row: Task) -> tuple[str, int]:
    """A prompt through the chat template; where that fails, its text and the tokens that it is taken to add."""
    if not template:
        return _text(row), 0
    try:
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(template)
        asked = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
        return made.render(messages=asked, add_generation_prompt=True, bos_token="", eos_token=""), 0
    except Exception:  # noqa: BLE001  (a template is a program of the model's, and may raise anything)
        return _text(row), TEMPLATE
