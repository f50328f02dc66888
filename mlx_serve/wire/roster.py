"""Who is connected and what runs: the one place where the threads of the HTTP side meet.

Every connection has a Place here from accept to close. Draining, the limit on connections and shutting down are
questions to the roster. Must not know HTTP.
"""

from __future__ import annotations

import socket
import threading
import time
from typing import Literal, TypeAlias

from mlx_serve.wire.channel import hang_up

State: TypeAlias = Literal["idle", "reading", "running"]

# Younger than this, a connection without a request is most likely just about to send one.
_MIN_IDLE_S = 1.0


class Place:
    """A connection's entry: idle until the first byte of a request, running from the end of its head to that of its
    reply. ``since`` is when that last changed.
    """

    __slots__ = ("since", "sock", "state", "thread")

    def __init__(self, sock: socket.socket, thread: threading.Thread) -> None:
        self.sock = sock
        self.thread = thread
        self.state: State = "idle"
        self.since = time.monotonic()


class Roster:
    def __init__(self, max_connections: int) -> None:
        self._max_connections = max_connections
        self._changed = threading.Condition()
        self._places: dict[socket.socket, Place] = {}
        self._leaving: set[threading.Thread] = set()
        self._n_running = 0
        self._draining = False

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def n_connections(self) -> int:
        with self._changed:
            return len(self._places)

    def enter(self, sock: socket.socket, thread: threading.Thread) -> bool:
        """False when it is full of connections with a request; one without gives way."""
        with self._changed:
            if len(self._places) >= self._max_connections and not self._evict():
                return False
            self._leaving = {leaving for leaving in self._leaving if leaving.is_alive()}
            self._places[sock] = Place(sock, thread)
            return True

    def leave(self, sock: socket.socket) -> None:
        with self._changed:
            if place := self._places.pop(sock, None):
                self._leaving.add(place.thread)

    def rest(self, sock: socket.socket) -> bool:
        """The connection, which has had a reply, now waits for another request; False when it should not."""
        with self._changed:
            if sock not in self._places or self._draining:
                return False
            self._set(sock, "idle")
            return True

    def wake(self, sock: socket.socket) -> None:
        """The first byte of a request is here."""
        with self._changed:
            self._set(sock, "reading")

    def begin(self, sock: socket.socket) -> None:
        with self._changed:
            self._set(sock, "running")
            self._n_running += 1

    def end(self) -> None:
        with self._changed:
            self._n_running -= 1
            self._changed.notify_all()

    def drain(self, timeout_s: float) -> bool:
        """No new requests from now on; waits for those that run."""
        with self._changed:
            self._draining = True
            for place in self._places.values():
                if place.state == "idle":
                    hang_up(place.sock)
            return self._changed.wait_for(lambda: self._n_running == 0, timeout_s)

    def hang_up_all(self) -> None:
        with self._changed:
            self._draining = True
            for place in self._places.values():
                hang_up(place.sock)

    def join(self, timeout_s: float) -> bool:
        """Waits for the threads of all connections; those that have left are about to end too."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            threads = {place.thread for place in self._places.values()} | self._leaving
        running = [thread for thread in threads if thread.is_alive() and thread is not threading.current_thread()]
        for thread in running:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in running)

    def _set(self, sock: socket.socket, state: State) -> None:
        if place := self._places.get(sock):
            place.state = state
            place.since = time.monotonic()

    def _evict(self) -> bool:
        """Hangs up the connection that has been idle, or on the same head, for the longest time: neither idle clients
        nor a crowd of heads that never end must keep a request out.
        """
        without = [place for place in self._places.values() if place.state != "running"]
        place = min(without, key=lambda place: place.since, default=None)
        if place is None or time.monotonic() - place.since < _MIN_IDLE_S:
            return False
        hang_up(place.sock)
        del self._places[place.sock]
        self._leaving.add(place.thread)
        return True
