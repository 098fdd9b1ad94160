"""A registry for one image with the routes that a pull needs: https://github.com/opencontainers/distribution-spec,
v1.1.
"""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.support.oci import Layout


class Registry:
    """Serves a layout's last image as HOST/any/name:any-tag, by plain HTTP on the loopback."""

    def __init__(self, layout: Layout) -> None:
        self.requests: list[str] = []
        blobs = layout.folder / "blobs/sha256"

        class Handler(BaseHTTPRequestHandler):
            def do_GET(handler) -> None:
                self.requests.append(handler.path)
                handler.answer(with_body=True)

            def do_HEAD(handler) -> None:
                handler.answer(with_body=False)

            def answer(handler, *, with_body: bool) -> None:
                parts = handler.path.strip("/").split("/")
                found: dict[str, Any] | None = None
                if parts[-2:-1] == ["manifests"]:
                    found = layout.manifests[-1]
                elif parts[-2:-1] == ["blobs"]:
                    found = {"digest": parts[-1], "mediaType": "application/octet-stream"}
                content = (blobs / found["digest"].removeprefix("sha256:")).read_bytes() if found else b"{}"
                handler.send_response(200)
                handler.send_header("Content-Length", str(len(content)))
                if found:
                    handler.send_header("Content-Type", found["mediaType"])
                    handler.send_header("Docker-Content-Digest", found["digest"])
                handler.end_headers()
                if with_body:
                    handler.wfile.write(content)

            def log_message(handler, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.host = f"127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def allow(self, home: Path) -> Path:
        """Write settings into a home folder so that container tools speak plain HTTP to it."""
        place = home / ".config/containers/registries.conf"
        place.parent.mkdir(parents=True)
        place.write_text(f'[[registry]]\nlocation = "{self.host}"\ninsecure = true\n')
        return home

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
