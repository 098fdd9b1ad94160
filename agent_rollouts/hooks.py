"""The order of plugin hooks: `@hook(tryfirst=True)` before a method. Needs the extra `plugins`."""

from agent_runtime.plugins.hooks import hook

__all__ = ["hook"]
