"""Episodes with tools: calls are executed and answered until a reply has none."""

from __future__ import annotations

import inspect
import json
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from mlxrl.awaiting import Late, begin
from mlxrl.checked import SettingError, checked_value
from mlxrl.errors import brief, exception_line, message_of, place_of
from mlxrl.messages import ROLES
from mlxrl.settings import LONGEST
from mlxrl.tools.calls import Parser, Tool, ToolCall, ToolError, parser_of, tool_calls, tool_of
from mlxrl.types import Feedback, Message, Task

Outcome = Literal["answered", "raised", "late", "malformed", "unknown", "arguments", "converted"]
INVALID: frozenset[Outcome] = frozenset({"malformed", "unknown", "arguments"})


@dataclass(eq=False)
class Tools:
    """A factory of environments in which the model may call functions: `environment=Tools([add])`.

    A reply is answered by a message for every call in it; a reply without a call ends the episode. The message is what
    the function returns, or the message of what it raises. A call that cannot be read, of an unknown function or with
    wrong arguments makes the turn invalid. The reward is that of the reward functions.

    The functions run in threads of this process and with its rights, and have to check their arguments themselves.
    Nothing else that the model wrote is executed.

    Args:
        functions: see `tool_of`.
        parser: the format of calls, a name of `mlx_lm.tool_parsers`; None for the model's own.
        offered: whether the chat template describes the tools to the model; else the prompts have to.
        parallel: let a reply continue after its first call, so that it may have several; else the closing tag of a
            call ends it, where the format has one.
        role: of the messages that answer.
        timeout: seconds of a call; one that is async is cancelled then. Those of a reply run one after the other,
            within the rollout's own timeout.
    Raises:
        UserError: a function cannot be described to a model.

    counts: the number of calls by their outcome, over all episodes so far; "converted" are those besides, whose
    arguments were texts of what the function wants, as "3" for 3.
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
        if self.role not in ROLES:
            raise ToolError("tools", "role", f"wanted one of {', '.join(ROLES)}, got {brief(self.role)}")
        if callable(self.functions):
            name = getattr(self.functions, "__name__", type(self.functions).__name__)
            raise ToolError("tools", f"wanted a list of functions, got a function; write Tools([{name}])")
        if not isinstance(self.functions, list | tuple):
            raise ToolError("tools", f"wanted a list of functions, got {brief(self.functions)}")
        tools = [tool_of(function) for function in self.functions]
        if not tools:
            raise ToolError("tools", "wanted at least one function, got none")
        self.tools = {tool.name: tool for tool in tools}
        if len(self.tools) < len(tools):
            names = ", ".join(tool.name for tool in tools)
            raise ToolError("tools", f"wanted functions of different names, got {names}")
        self.schemas = [dict(tool.schema) for tool in self.tools.values()]
        self.format = given if isinstance(given, Parser) else None

    def prepare(self, tokenizer: Any) -> None:
        """Find the format of the model's calls, before the episodes of a rollout.

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
        if self.format is None:
            raise ToolError("tools", "how the model writes calls is not known; call prepare(tokenizer) first")
        return ToolEnvironment(self, self.format)


class ToolEnvironment:
    """An episode with tools: `tools` are the schemas for the chat template, `stop` is the closing tag of a call."""

    special_tokens = True  # the marks of a call may be special tokens
    thinking = False  # told before each reply

    def __init__(self, factory: Tools, parser: Parser) -> None:
        self.factory, self.parser = factory, parser
        self.tools = factory.schemas if factory.offered else []
        self.stop = (parser.end,) if parser.end and not factory.parallel else ()

    def reset(self, task: Task) -> str | Sequence[Message] | Sequence[int]:
        """The task's prompt."""
        return task.prompt

    def step(self, reply: str) -> Feedback:
        """Execute the calls of a reply, one after the other."""
        calls = tool_calls(reply, self.parser, self.factory.schemas, self.thinking)
        if not calls:
            return Feedback(done=True)
        texts, outcomes, faults = zip(*map(self._answer, calls), strict=True)
        with self.factory.lock:
            self.factory.counts.update(outcomes)
        messages = tuple(
            {"role": self.factory.role, "name": _encodable(call.name), "content": _encodable(text)}
            for call, text in zip(calls, texts, strict=True)
        )
        fault = next(filter(None, faults), "")
        return Feedback(messages, invalid=not INVALID.isdisjoint(outcomes), fault=fault)

    def _answer(self, call: ToolCall) -> tuple[str, Outcome, str]:
        """The message for a call, its outcome, and how the function failed."""
        tools = self.factory.tools
        if call.fault:
            return f"error: {call.fault}", "malformed", ""
        if call.name not in tools:
            return f"error: unknown function {call.name!r}; there are {', '.join(tools)}", "unknown", ""
        given = tools[call.name].readable(call.arguments or {})
        try:
            arguments = tools[call.name].arguments(given)
        except SettingError as error:
            return f"error: {error}", "arguments", ""
        if given != call.arguments:
            with self.factory.lock:
                self.factory.counts["converted"] += 1
        return _executed(tools[call.name], arguments, self.factory.timeout)


def _executed(tool: Tool, arguments: Mapping[str, Any], timeout: float) -> tuple[str, Outcome, str]:
    """What a function returned, as text or JSON, or the message of what it raised, within so many seconds.

    One that takes longer continues in its daemon thread, which does not keep the process alive.
    """
    late = f"{tool.name}: no answer in {timeout:g} s"
    found: list[tuple[str, Outcome, str]] = []

    def run() -> None:
        try:
            value = _called(tool, arguments, timeout)
            text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
            found.append((text, "answered", ""))
        except Late:
            found.append((f"error: {late}", "late", late))
        except BaseException as error:  # noqa: BLE001  (what a tool raises is what the model reads)
            line = f"{tool.name}: {exception_line(error)}{place_of(error)}"
            found.append((f"error: {message_of(error)}", "raised", line))

    thread = threading.Thread(target=run, daemon=True, name=f"tool {tool.name}")
    thread.start()
    thread.join(timeout)
    return found[0] if found else (f"error: {late}", "late", late)


def _called(tool: Tool, arguments: Mapping[str, Any], timeout: float) -> Any:
    """What a function returned; where it is async, what that gives."""
    value = tool.function(**arguments)
    if not inspect.isawaitable(value):
        return value
    found, error = begin(tool.name, lambda: value, timeout)()
    if error is not None:
        raise error
    return found


def _encodable(text: str) -> str:
    """A text that a tokenizer can read: lone surrogates become question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")
