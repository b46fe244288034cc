"""A server that speaks OpenAI's chat protocol and misbehaves on demand; run in its own process.

    python chat_stub.py STEP [STEP ...]

The first request gets the first step, and so on; after the last step all get ``ok``: the longer
passage wins. Prints its port. ``GET /log`` returns what was asked, with the steps taken.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

STEPS = iter(sys.argv[1:])
LOCK = threading.Lock()
LOG: list[dict[str, Any]] = []


def verdict(prompt: str) -> str:
    first, second = re.search(r"Passage A:\n(.*)\n\nPassage B:\n(.*)\n\nReply", prompt).groups()
    return "A" if len(first) > len(second) else "B"


def completion(content: str, step: str, asked: dict[str, Any]) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "message": {"role": "assistant", "content": content},
        "finish_reason": "length" if step == "length" else "stop",
    }
    if asked.get("logprobs") and step != "nologprobs":
        tops = {"A": [-0.2, -2.0], "B": [-2.0, -0.2]}[content if content in "AB" else "A"]
        entries = [("A", tops[0]), (" B", tops[1]), ("The", -5.0), ("C", -6.0)]
        if step == "onelabel":
            entries = [e for e in entries if e[0].strip() == content or e[0] in ("The", "C")]
        if step == "nolabel":
            entries = entries[2:]
        top = [{"token": token, "logprob": value} for token, value in entries]
        choice["logprobs"] = {"content": [{**top[0], "top_logprobs": top}]}
    return {
        "model": "stub-2024-01-01",
        "choices": [choice],
        "usage": {"prompt_tokens": 50, "completion_tokens": 1},
    }


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Says nothing."""

    def do_GET(self) -> None:
        self.reply(200, json.dumps(LOG).encode())

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with LOCK:
            step = next(STEPS, "ok")
            LOG.append(
                {"step": step, "time": time.monotonic(), "path": self.path,
                 "key": self.headers.get("Authorization"), "asked": asked}
            )  # fmt: skip
        content = verdict(asked["messages"][0]["content"])
        if step.isdigit():
            headers = {"Retry-After": "1"} if step == "429" else {}
            self.reply(int(step), b'{"error": {"message": "no"}}', headers)
        elif step == "drop":
            self.close_connection = True
            self.connection.close()
        elif step == "badjson":
            self.reply(200, b'{"choices": [')
        elif step == "noform":
            self.reply(200, b'{"answer": 1}')
        else:
            if step == "slow":
                time.sleep(1.5)
            said = {
                "length": "",
                "empty": "",
                "rubbish": "I like both",
                "think": "<think>A</think>",
            }
            content = said.get(step, content) if step != "think" else said[step] + content
            self.reply(200, json.dumps(completion(content, step, asked)).encode())

    def reply(self, code: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        try:
            self.send_response(code)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        except (BrokenPipeError, ConnectionResetError):
            pass


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)  # noqa: T201  (how the test learns the port)
    server.serve_forever()
