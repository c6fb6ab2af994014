"""A local MCP server over stdio, with one tool. Run by `mcp_app.py`."""

from mcp.server import MCPServer

server = MCPServer("eyes")


@server.tool()
def look(at: str) -> str:
    """Look at something."""
    if at == "void":
        raise ValueError("there is nothing")
    return f"the {at} is blue"


if __name__ == "__main__":
    server.run()
