"""The HTTP side: OpenAI's routes, their validation, errors and event streams."""
