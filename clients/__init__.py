"""Clients of the server. Until there is a package of our own: the official `openai` one works."""
