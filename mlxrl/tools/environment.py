"""Episodes with tools: calls are executed and answered until a reply has none."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from mlxrl.tools.calls import Asked, Parser, calls_in, parser_of
from mlxrl.tools.schema import ArgumentError, Tool, tool_of
from mlxrl.types import Feedback, Message, Task

Outcome = Literal["answered", "raised", "late", "malformed", "unknown", "arguments"]
LONGEST = 1e6  # seconds of a call
INVALID: frozenset[Outcome] = frozenset({"malformed", "unknown", "arguments"})


class Tools:
    """A factory of environments in which the model may call functions: `rollout(..., environment=Tools([add]))`.

    A reply that calls is answered by a message for every call; a reply without a call ends the episode. What a function
    returns is an observation, and so is what it raises: its message and nothing else. A call that cannot be read, of
    an unknown function or with wrong arguments makes the turn invalid. The reward is that of the reward functions.

    The functions run in threads of this process and with its rights: what they do with their arguments is theirs to
    bound. Nothing that the model wrote is executed here.
    """

    earns = False  # a run without reward functions is refused

    def __init__(
        self,
        functions: Sequence[Callable[..., Any]],
        *,
        parser: str | Parser | None = None,
        offered: bool = True,
        parallel: bool = False,
        role: str = "tool",
        timeout: float = 10.0,
    ) -> None:
        """Make the schemas of the functions, see `schema.tool_of`.

        Args:
            parser: the format of calls, a name of `mlx_lm.tool_parsers`; None for the model's own.
            offered: whether the chat template tells the model of the tools; else the prompts have to.
            parallel: let a reply go on behind its first call, so that it may hold several; else the closing tag of a
                call ends it, where the format has one.
            role: of the messages that answer.
            timeout: seconds of a call. Those of a reply run one after the other, within the rollout's own timeout.
        Raises:
            ValueError: one line that says which function cannot be told to a model, and why.
        """
        given: Any = {"parser": parser, "timeout": timeout}  # whatever their hints say
        if callable(functions):
            name = getattr(functions, "__name__", type(functions).__name__)
            raise ValueError(f"tools: wanted a list of functions, got a function; write Tools([{name}])")
        if not isinstance(given["parser"], str | Parser | None):
            raise ValueError(f"tools: parser: wanted a name of mlx_lm.tool_parsers or a Parser, got {parser!r}")
        if not isinstance(given["timeout"], int | float) or not 0 < timeout <= LONGEST:
            raise ValueError(f"tools: timeout: wanted more than 0 seconds, at most {LONGEST:g}, got {timeout!r}")
        tools = [tool_of(function) for function in functions]
        if not tools:
            raise ValueError("tools: wanted at least one function, got none")
        self.known = {tool.name: tool for tool in tools}
        if len(self.known) < len(tools):
            raise ValueError(
                f"tools: wanted functions of different names, got {', '.join(tool.name for tool in tools)}"
            )
        self.parser = parser if isinstance(parser, Parser) else None
        self.format = parser if isinstance(parser, str) else None
        self.offered, self.parallel, self.role, self.timeout = offered, parallel, role, timeout
        self.schemas = [dict(tool.schema) for tool in tools]
        self._counts, self._lock = Counter[Outcome](), threading.Lock()

    @property
    def counts(self) -> dict[Outcome, int]:
        """How often calls came out in which way, over all episodes so far."""
        with self._lock:
            return dict(self._counts)

    def count(self, outcome: Outcome) -> None:
        """One more call came out so."""
        with self._lock:
            self._counts[outcome] += 1

    def prepare(self, tokenizer: Any) -> None:
        """Find out how the model writes calls; a rollout calls this before its episodes.

        Raises:
            ValueError: mlx-lm knows no format for it, or its chat template does not tell of tools.
        """
        if self.format is not None or self.parser is None:
            self.parser = parser_of(tokenizer, self.format)
        template = getattr(tokenizer, "chat_template", None)
        if self.offered and isinstance(template, str) and "tools" not in template:
            raise ValueError(
                "tools: the chat template of this model does not tell it of tools; wanted Tools(functions, "
                "offered=False, parser=...), and prompts that do"
            )

    def __call__(self) -> ToolEnvironment:
        """The environment of an episode."""
        if self.parser is None:
            raise ValueError("tools: how the model writes calls is not known; call prepare(tokenizer) first")
        return ToolEnvironment(self, self.parser)


class ToolEnvironment:
    """An episode with tools.

    tools: the schemas that the chat template is given; stop: the closing tag of a call.
    """

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
        calls = calls_in(reply, self.parser, self.factory.schemas)
        if not calls:
            return Feedback(done=True)
        answers = [self._answer(call) for call in calls]
        for _, outcome in answers:
            self.factory.count(outcome)
        messages = tuple(
            {"role": self.factory.role, "name": legible(call.name), "content": legible(text)}
            for call, (text, _) in zip(calls, answers, strict=True)
        )
        return Feedback(messages, invalid=any(outcome in INVALID for _, outcome in answers))

    def _answer(self, call: Asked) -> tuple[str, Outcome]:
        known = self.factory.known
        if call.fault:
            return f"error: {call.fault}", "malformed"
        if call.name not in known:
            return f"error: unknown function {call.name!r}; there are {', '.join(known)}", "unknown"
        try:
            arguments = known[call.name].arguments(call.arguments or {})
        except ArgumentError as error:
            return f"error: {error}", "arguments"
        return executed(known[call.name], arguments, self.factory.timeout)


def executed(tool: Tool, arguments: Mapping[str, Any], timeout: float) -> tuple[str, Outcome]:
    """What a function returned as text, or the message of what it raised, within so many seconds.

    One that takes longer is left behind in its thread, which does not keep the process.
    """
    found: list[tuple[str, Outcome]] = []

    def run() -> None:
        try:
            found.append((text_of(tool.function(**arguments)), "answered"))
        except BaseException as error:  # noqa: BLE001  (what a tool raises is what the model reads)
            found.append((f"error: {message_of(error)}", "raised"))

    thread = threading.Thread(target=run, daemon=True, name=f"tool {tool.name}")
    thread.start()
    thread.join(timeout)
    return found[0] if found else (f"error: {tool.name}: no answer in {timeout:g} s", "late")


def message_of(error: BaseException) -> str:
    """What an exception says, or its kind where it does not."""
    try:
        return str(error) or type(error).__name__
    except BaseException:  # noqa: BLE001  (the tool's own code)
        return type(error).__name__


def legible(text: str) -> str:
    """A text that a tokenizer can read: halves of characters become question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")


def text_of(value: Any) -> str:
    """A text as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
