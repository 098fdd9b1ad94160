"""The built files of the pages (frontend/, built by `npm run build`)."""

from importlib import resources


def asset(name: str) -> str:
    """Return a built file."""
    return (resources.files("rolloutctl.viewer") / "static" / name).read_text(encoding="utf-8")
