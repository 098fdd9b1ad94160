"""Decorator for the order of plugin hooks, such as `@hook(tryfirst=True)`. Needs the extra `plugins`."""

from agent_runtime.plugins.hooks import hook

__all__ = ["hook"]
