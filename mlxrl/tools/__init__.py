"""Plain functions as tools: the model calls them in its reply, and reads what they return."""

from mlxrl.tools.environment import ToolEnvironment, Tools
from mlxrl.tools.parser import Parser, parser_of
from mlxrl.tools.schema import Tool, ToolError, tool_of

__all__ = ["Parser", "Tool", "ToolEnvironment", "ToolError", "Tools", "parser_of", "tool_of"]
