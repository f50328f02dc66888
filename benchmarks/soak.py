"""Two thousand clients that open, dribble, half-close and abort at random points, with good ones among them.

Prints the server process's threads, descriptors and memory (bytes) before and after, and how the good clients fared.
Linux only (/proc).    python -m benchmarks.soak [--clients 2000] [--model DIR]
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import re
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from benchmarks.machine import holds

DEADLINE_S = 120
BODY = json.dumps({"prompt": "Once upon a time", "max_tokens": 4, "stream": True}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
REQUESTS = [
    HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY,
    HEAD + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(BODY) + BODY + b"\r\n0\r\n\r\n",
    HEAD + b"Content-Length: 99999999999\r\n\r\n",
    HEAD + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(BODY),
    HEAD + b"X Y: z\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"\x16\x03\x01\x02\x00",
]


def bad_client(port: int, seed: int) -> None:
    """A part of a request in pieces, perhaps a look at the reply, and away."""
    dice = random.Random(seed)
    raw = dice.choice(REQUESTS)
    raw = raw[: dice.randint(0, len(raw))] if dice.random() < 0.6 else raw
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
        for _ in range(dice.randint(1, 4)):
            cut = dice.randint(0, len(raw))
            sock.sendall(raw[:cut])
            raw = raw[cut:]
        if dice.random() < 0.3:
            sock.shutdown(socket.SHUT_WR)
        if dice.random() < 0.3:
            sock.recv(100)
        if dice.random() < 0.3:
            # With a linger time of 0 closing sends a reset.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")


def good_client(port: int) -> int:
    """One request that must be answered; gives its status."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    try:
        connection.request("POST", "/v1/completions", json.dumps({"prompt": "Hello", "max_tokens": 2}))
        response = connection.getresponse()
        response.read()
        return response.status
    finally:
        connection.close()


def settle(pid: int, before: dict[str, int]) -> dict[str, int]:
    """Until nothing more is given back, or the time is up."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        now = holds(pid)
        if now["threads"] <= before["threads"] and now["descriptors"] <= before["descriptors"]:
            break
        time.sleep(0.2)
    return holds(pid)


def soak(pid: int, port: int, n_clients: int) -> None:
    for _ in range(20):
        good_client(port)
    before = holds(pid)
    started = time.monotonic()
    with ThreadPoolExecutor(64) as pool:
        jobs = [
            pool.submit(good_client, port) if i % 20 == 0 else pool.submit(bad_client, port, i)
            for i in range(n_clients)
        ]
        statuses = [job.result() for job in jobs]
    good = [status for status in statuses if status is not None]
    after = settle(pid, before)
    seconds = time.monotonic() - started
    print(f"{n_clients} clients in {seconds:.0f} s; good ones answered: {good.count(200)} of {len(good)}")
    for name, value in before.items():
        print(f"{name:12} before {value:12} after {after[name]:12}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=2000)
    parser.add_argument("--model", help="default: the demo model")
    args = parser.parse_args()
    which = ["--model", args.model] if args.model else ["--demo"]
    command = [sys.executable, "-m", "mlx_serve", *which, "--port", "0", "--head-timeout", "5", "--body-timeout", "5"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        ready = next(line for line in server.stderr if "ready:" in line)
        port = int(re.search(r":(\d+)/v1", ready)[1])
        threading.Thread(target=server.stderr.read, daemon=True).start()
        soak(server.pid, port, args.clients)
    finally:
        server.terminate()
        server.wait(DEADLINE_S)


if __name__ == "__main__":
    main()
