"""Plays llama-server: `server.py BEHAVIOUR --port N --parallel N ...`. Started as `serve.command`."""

import json
import os
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

BEHAVIOUR, FLAGS = sys.argv[1], dict(zip(sys.argv[2:], sys.argv[3:], strict=False))
PORT, SLOTS = int(FLAGS["--port"]), int(FLAGS.get("--parallel", 4))
PLACES = threading.Semaphore(SLOTS)
STARTED = Path(f"started-{BEHAVIOUR}")
SCALE = {"known": 1.0, "brief": 0.1}.get(BEHAVIOUR, 0.0)
FIRST_S, REST_S = (SCALE * seconds for seconds in {1: (0.2, 1.3), 2: (0.2, 0.9)}.get(SLOTS, (0.8, 0.0)))
"""Seconds to the first token and after it: more slots answer faster in all, and four begin late."""


class Handler(BaseHTTPRequestHandler):
    answered = scrapes = 0

    def log_message(self, *_: object) -> None:
        if BEHAVIOUR == "talks":  # one word of 200,000 letters for each request
            print("x" * 200_000, flush=True)

    def plain(self, data: object, status: int = 200) -> None:
        body = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        slots = SLOTS + 1 if BEHAVIOUR == "other_slots" else SLOTS
        if BEHAVIOUR == "mute":
            time.sleep(60)
        if BEHAVIOUR == "exits" and self.path == "/v1/models":  # it has been healthy
            os._exit(0)
        if self.path == "/health":
            self.plain({"status": "ok"}, 503 if BEHAVIOUR == "never_healthy" else 200)
        elif self.path == "/props":
            self.plain({"total_slots": slots, "default_generation_settings": {"n_ctx": 512}})
        elif self.path == "/v1/models":
            self.plain({"data": [{"id": "played"}]})
        elif self.path == "/metrics" and BEHAVIOUR == "talks":
            Handler.scrapes += 1
            name, count = "llamacpp:spec_decode_num_accepted_tokens_total", 1e6 / Handler.scrapes  # it only falls
            text = f"{name} {count}\n{name.replace('accepted', 'draft')} {Handler.scrapes}\nx{{ NaN\n\0"
            self.wfile.write(f"HTTP/1.0 200 OK\r\n\r\n{text}{'y' * (1 << 24)}".encode())
        else:
            self.plain({}, 404)

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with open("requests.jsonl", "a") as file:
            file.write(json.dumps({"prompt": request["prompt"], "model": request["model"], "port": PORT}) + "\n")
        Handler.answered += 1
        if BEHAVIOUR == "dies" and Handler.answered > 6:
            print("RuntimeError: the engine exploded\nsee above", flush=True)
            os._exit(3)
        if BEHAVIOUR == "slow":
            time.sleep(60)
        if BEHAVIOUR == "busy":
            self.send_response(503)
            self.send_header("Retry-After", "1")
            self.end_headers()
            return self.wfile.write(b"overloaded") and None
        if BEHAVIOUR == "refuses":
            return self.plain({"error": {"message": "exceed_context_size_error: 700 of 512"}}, 400)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        if BEHAVIOUR == "garbage":
            return self.line("\x00\x01 neither this { nor that")
        if BEHAVIOUR == "out_of_memory_later":
            print("ggml: failed to allocate CUDA0 buffer", flush=True)
            return self.line({"error": {"message": "compute error"}})
        if BEHAVIOUR == "queues":  # SLOTS requests at once, each 0.1 s
            with PLACES:
                time.sleep(0.1)
        return self.stream(request["max_tokens"], len(request["prompt"]))

    def stream(self, wanted: int, prompt: int) -> None:
        tokens = wanted // 2 if BEHAVIOUR == "cuts" else wanted
        time.sleep(FIRST_S)
        for _ in range(tokens // 2):  # two tokens in a piece
            self.line({"choices": [{"index": 0, "text": "a b", "finish_reason": None}]})
            time.sleep(0.001 + REST_S / (tokens // 2))
        self.line({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
        self.line({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": tokens}})
        self.line("[DONE]")

    def line(self, event: object) -> None:
        self.wfile.write(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode())


def serve() -> None:
    ThreadingHTTPServer.daemon_threads = True
    ThreadingHTTPServer.request_queue_size = 64
    if BEHAVIOUR == "ipv6_only":
        ThreadingHTTPServer.address_family = socket.AF_INET6
    ThreadingHTTPServer(("::1" if BEHAVIOUR == "ipv6_only" else "127.0.0.1", PORT), Handler).serve_forever()


def listen_in_other_process() -> None:
    """Leave a process that is no child of this one on the port, and return when it listens."""
    read, write = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            server = ThreadingHTTPServer(("127.0.0.1", PORT), Handler)
            os.write(write, b".")
            server.serve_forever()
        os._exit(0)
    os.read(read, 1)


Path(f"environment-{PORT}.json").write_text(
    json.dumps({"pid": os.getpid(), "cores": sorted(os.sched_getaffinity(0)), **os.environ})
)
first = not STARTED.exists()
STARTED.touch()
if BEHAVIOUR == "crashes":
    print("INFO: loading\nWARNING: an Error that is harmless\nValueError: 16 is no multiple of 32")
    sys.exit("RuntimeError: initialization failed. See root cause above.")
if BEHAVIOUR == "out_of_memory":
    sys.exit("ggml_backend_cuda_buffer_type_alloc_buffer: cudaMalloc failed: out of memory\nfailed to load model")
if BEHAVIOUR == "port_taken" and first:
    listen_in_other_process()
    sys.exit("couldn't bind HTTP server socket")
if BEHAVIOUR == "stale":
    listen_in_other_process()
    time.sleep(60)
if BEHAVIOUR == "has_children" and os.fork() == 0:
    os.setsid()
    Path("child.pid").write_text(str(os.getpid()))
    time.sleep(600)
    os._exit(0)
serve()
