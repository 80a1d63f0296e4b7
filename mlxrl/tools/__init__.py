"""Plain functions as tools: the model calls them in its reply, and reads what they return."""

from mlxrl.tools.calls import Parser, Tool, ToolError, parser_of, tool_of
from mlxrl.tools.environment import ToolEnvironment, Tools

__all__ = ["Parser", "Tool", "ToolEnvironment", "ToolError", "Tools", "parser_of", "tool_of"]
