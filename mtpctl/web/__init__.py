"""Shared code of mtpctl's web servers: the middleware that checks requests, JSON parsing, metrics, and the server itself."""
