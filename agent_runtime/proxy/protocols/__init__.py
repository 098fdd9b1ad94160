"""Translations between client APIs and the internal chat format: JSON objects in, JSON objects and SSE out."""
