"""Dockerfiles: reads them as BuildKit does, and replays them in workspaces instead of building images."""
