"""A trainer that pushes its weights: `python pushing_trainer.py ADDRESS HOOK_PORT MASTER_PORT`. It uses only the
standard library, so it runs in any image.

POST /hook is `weightTransfer.push.hook`: it answers what is sent next, and where engines find the trainer's group. An
engine that joins gets the tensors on the port that it names (vllm_server/transfer.py). GET /asked lists the requests to
the hook. POST /pause {"seconds": N} pauses each transfer in the middle.
"""

import json
import math
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# Two parts, of several tensors each: an update is not one call.
PARTS: list[dict[str, list[Any]]] = [
    {
        "names": ["model.embed_tokens.weight", "lm_head.weight"],
        "dtype_names": ["bfloat16", "float32"],
        "shapes": [[1024, 64], [64, 128]],
    },
    {"names": ["model.layers.0.self_attn.qkv_proj.weight"], "dtype_names": ["bfloat16"], "shapes": [[192, 64]]},
]
ITEM_BYTES = {"bfloat16": 2, "float32": 4}


class Trainer:
    """The requests to its hook, and what it sends now."""

    def __init__(self, address: str, master_port: int) -> None:
        self.address, self.master_port = address, master_port
        self.asked: list[dict[str, Any]] = []
        self.pause_seconds = 0.0

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return the answer of the hook."""
        self.asked.append(question)
        group = {"master_address": self.address, "master_port": self.master_port}
        ranks = {server["name"]: 1 + number for number, server in enumerate(question["servers"])}
        group["world_size"] = 1 + len(ranks)
        servers = {name: {"initInfo": {**group, "rank_offset": rank}} for name, rank in ranks.items()}
        return {"updates": PARTS, "servers": servers}

    def serve_group(self) -> None:
        """Send the weights to every engine that joins, forever."""
        with socket.create_server(("0.0.0.0", self.master_port)) as server:
            while True:
                member, _ = server.accept()
                threading.Thread(target=self._send, args=(member,), daemon=True).start()

    def _send(self, member: socket.socket) -> None:
        version = int(self.asked[-1]["policy"]["version"])
        with member, member.makefile() as words:
            address = json.loads(words.readline())["address"]
            with socket.create_connection(tuple(address), timeout=30) as channel:
                sizes = [
                    ITEM_BYTES[name] * math.prod(shape)
                    for part in PARTS
                    for name, shape in zip(part["dtype_names"], part["shapes"], strict=True)
                ]
                tensors = version.to_bytes(8, "little") * (sum(sizes) // 8)
                half = len(tensors) // 2
                channel.sendall(tensors[:half])
                time.sleep(self.pause_seconds)
                channel.sendall(tensors[half:])
                channel.recv(1)  # until the engine has left the group


def handler(trainer: Trainer) -> type[BaseHTTPRequestHandler]:
    """Return the trainer's HTTP handler."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(trainer.asked)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/pause":
                trainer.pause_seconds = body["seconds"]
                self._answer({})
            else:
                self._answer(trainer.answer(body))

        def _answer(self, value: object) -> None:
            data = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    return Handler


def main() -> None:
    """Serve until killed."""
    address, hook_port, master_port = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    trainer = Trainer(address, master_port)
    threading.Thread(target=trainer.serve_group, daemon=True).start()
    ThreadingHTTPServer(("0.0.0.0", hook_port), handler(trainer)).serve_forever()


if __name__ == "__main__":
    main()
