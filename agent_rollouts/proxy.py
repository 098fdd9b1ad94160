"""The session proxy inside your own server: sessions whose model calls are recorded."""

from agent_runtime.proxy.app import serving
from agent_runtime.proxy.handler import Handler
from agent_runtime.proxy.keys import digest, new_key
from agent_runtime.proxy.session import SessionSettings
from agent_runtime.proxy.sessions import LocalSessions

__all__ = ["Handler", "LocalSessions", "SessionSettings", "digest", "new_key", "serving"]
