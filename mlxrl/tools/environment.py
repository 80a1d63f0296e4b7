"""Episodes with tools: calls are executed and answered until a reply has none."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from mlxrl.checked import SettingError, checked_value
from mlxrl.errors import brief, message_of
from mlxrl.settings import LONGEST
from mlxrl.tools.parser import Parser, ToolCall, parser_of, tool_calls
from mlxrl.tools.schema import Tool, ToolError, tool_of
from mlxrl.types import Feedback, Message, Task

Outcome = Literal["answered", "raised", "late", "malformed", "unknown", "arguments"]
INVALID: frozenset[Outcome] = frozenset({"malformed", "unknown", "arguments"})


@dataclass(eq=False)
class Tools:
    """A factory of environments in which the model may call functions: `environment=Tools([add])`.

    A reply that calls is answered by a message for every call; a reply without a call ends the episode. What a function
    returns is an observation, and so is what it raises: its message and nothing else. A call that cannot be read, of
    an unknown function or with wrong arguments makes the turn invalid. The reward is that of the reward functions.

    The functions run in threads of this process and with its rights: what they do with their arguments is theirs to
    bound. Nothing that the model wrote is executed here.

    Args:
        functions: see `schema.tool_of`.
        parser: the format of calls, a name of `mlx_lm.tool_parsers`; None for the model's own.
        offered: whether the chat template describes the tools to the model; else the prompts have to.
        parallel: let a reply continue after its first call, so that it may hold several; else the closing tag of a
            call ends it, where the format has one.
        role: of the messages that answer.
        timeout: seconds of a call. Those of a reply run one after the other, within the rollout's own timeout.
    Raises:
        UserError: one line that says which function cannot be described to a model, and why.

    schemas: of the functions. counts: how often calls came out in which way, over all episodes so far.
    """

    functions: Sequence[Callable[..., Any]]
    _: KW_ONLY
    parser: str | Parser | None = None
    offered: bool = True
    parallel: bool = False
    role: str = "tool"
    timeout: float = 10.0
    counts: Counter[Outcome] = field(init=False, default_factory=Counter[Outcome])
    lock: threading.Lock = field(init=False, default_factory=threading.Lock)
    earns: ClassVar[bool] = False  # a run without reward functions is refused

    def __post_init__(self) -> None:
        given: Any = self.parser  # whatever its hint says
        if not isinstance(given, str | Parser | None):
            raise ToolError("tools", "parser", f"wanted a name of mlx_lm.tool_parsers or a Parser, got {brief(given)}")
        self.timeout = checked_value("tools", "timeout", Annotated[float, Meta(gt=0, le=LONGEST)], self.timeout)
        self.tools = _by_name(self.functions)
        self.schemas = [dict(tool.schema) for tool in self.tools.values()]
        self.format = given if isinstance(given, Parser) else None

    def prepare(self, tokenizer: Any) -> None:
        """Find out how the model writes calls; a rollout calls this before its episodes.

        Raises:
            ToolError: mlx-lm knows no format for it, or its chat template does not describe tools.
        """
        if not isinstance(self.parser, Parser):
            self.format = parser_of(tokenizer, self.parser)
        template = getattr(tokenizer, "chat_template", None)
        if self.offered and isinstance(template, str) and "tools" not in template:
            wanted = "Tools(functions, offered=False, parser=...), and prompts that do"
            raise ToolError("tools", f"the chat template of this model does not describe tools; wanted {wanted}")

    def __call__(self) -> ToolEnvironment:
        """The environment of an episode."""
        if self.format is None:
            raise ToolError("tools", "how the model writes calls is not known; call prepare(tokenizer) first")
        return ToolEnvironment(self, self.format)


def _by_name(functions: Sequence[Callable[..., Any]]) -> dict[str, Tool]:
    if callable(functions):
        name = getattr(functions, "__name__", type(functions).__name__)
        raise ToolError("tools", f"wanted a list of functions, got a function; write Tools([{name}])")
    tools = [tool_of(function) for function in functions]
    if not tools:
        raise ToolError("tools", "wanted at least one function, got none")
    if len({tool.name for tool in tools}) < len(tools):
        raise ToolError("tools", f"wanted functions of different names, got {', '.join(tool.name for tool in tools)}")
    return {tool.name: tool for tool in tools}


class ToolEnvironment:
    """An episode with tools: `tools` are the schemas for the chat template, `stop` is the closing tag of a call."""

    special_tokens = True  # the marks of a call may be special tokens

    def __init__(self, factory: Tools, parser: Parser) -> None:
        self.factory, self.parser = factory, parser
        self.tools = factory.schemas if factory.offered else []
        self.stop = (parser.end,) if parser.end and not factory.parallel else ()

    def reset(self, task: Task) -> str | Sequence[Message]:
        """The task's prompt."""
        return task.prompt

    def step(self, reply: str) -> Feedback:
        """Execute the calls of a reply, one after the other."""
        calls = tool_calls(reply, self.parser, self.factory.schemas)
        if not calls:
            return Feedback(done=True)
        texts, outcomes = zip(*map(self._answer, calls), strict=True)
        with self.factory.lock:
            self.factory.counts.update(outcomes)
        messages = tuple(
            {"role": self.factory.role, "name": _encodable(call.name), "content": _encodable(text)}
            for call, text in zip(calls, texts, strict=True)
        )
        return Feedback(messages, invalid=not INVALID.isdisjoint(outcomes))

    def _answer(self, call: ToolCall) -> tuple[str, Outcome]:
        tools = self.factory.tools
        if call.fault:
            return f"error: {call.fault}", "malformed"
        if call.name not in tools:
            return f"error: unknown function {call.name!r}; there are {', '.join(tools)}", "unknown"
        try:
            arguments = tools[call.name].arguments(call.arguments or {})
        except SettingError as error:
            return f"error: {error}", "arguments"
        return _executed(tools[call.name], arguments, self.factory.timeout)


def _executed(tool: Tool, arguments: Mapping[str, Any], timeout: float) -> tuple[str, Outcome]:
    """What a function returned as text, or the message of what it raised, within so many seconds.

    One that takes longer is left running in its thread, which does not keep the process.
    """
    found: list[tuple[str, Outcome]] = []

    def run() -> None:
        try:
            found.append((_text_of(tool.function(**arguments)), "answered"))
        except BaseException as error:  # noqa: BLE001  (what a tool raises is what the model reads)
            found.append((f"error: {message_of(error)}", "raised"))

    thread = threading.Thread(target=run, daemon=True, name=f"tool {tool.name}")
    thread.start()
    thread.join(timeout)
    return found[0] if found else (f"error: {tool.name}: no answer in {timeout:g} s", "late")


def _text_of(value: Any) -> str:
    """A text as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def _encodable(text: str) -> str:
    """A text that a tokenizer can read: halves of characters become question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")
