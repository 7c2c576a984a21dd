"""A judge that is played, for tiny.yaml beside it: no model, but a rule behind the endpoint of one.

    python examples/llm-judge/played_judge.py [PORT]

It finds the sections of the question as a real judge would, counts at how many places the response has the character of
the reference answer, and says so in a sentence with a score from 0 to 10 in its last line. Standard library only.
"""

from __future__ import annotations

import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SECTION = re.compile(r"\[(\w+) ([0-9a-f]{16})\]\n(.*?)\n\[/\1 \2\]", re.DOTALL)


def verdict(question: str) -> str:
    """What is said of the response in a question."""
    told = {name: text for name, _, text in SECTION.findall(question)}
    answer, response = told["answer"], told["response"]
    right = sum(said == wanted for said, wanted in zip(response, answer, strict=False))
    score = 10 * right / max(len(answer), len(response))
    return f"{right} of {len(answer)} characters are where they should be.\nScore: {score:.2f}"


class Endpoint(BaseHTTPRequestHandler):
    """POST /v1/chat/completions, as far as a judge needs it."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        said = verdict(body["messages"][-1]["content"])
        message = {"role": "assistant", "content": said}
        words = sum(len(message["content"].split()) for message in body["messages"])
        usage = {"prompt_tokens": words, "completion_tokens": len(said.split())}
        usage["total_tokens"] = sum(usage.values())
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        answer = {"object": "chat.completion", "model": body["model"], "choices": [choice], "usage": usage}
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Thousands of questions are not worth a line each."""


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 8765
    print(f"a played judge at http://127.0.0.1:{port}/v1", flush=True)
    Server(("127.0.0.1", port), Endpoint).serve_forever()
