"""Names, text and tool calls of the OpenAI API.

Pure functions over text: no HTTP, no grpc, no stubs.
"""
