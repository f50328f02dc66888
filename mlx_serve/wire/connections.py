"""All connections and running requests: the one place where the threads of the HTTP side meet.

Every connection has an entry here from accept to close. The roster drains, limits the number of connections, and ends
them at shutdown. A connection that waits for its client, and not for the server, can be evicted. Must not know HTTP.
"""

from __future__ import annotations

import threading
import time
from typing import Literal, TypeAlias

from mlx_serve.wire.channel import Channel, hang_up

# Idle: until the first byte of a request. Head, body: being read. Running: until the reply has ended. Lingering: the
# connection's last reply is sent, and the client has not closed yet.
State: TypeAlias = Literal["idle", "head", "body", "running", "lingering"]

# A connection younger than this, without a whole request, is most likely about to send one.
_MIN_WAIT_S = 1.0
# A client takes a reply too slowly to keep its place below this many bytes a second, after this many seconds.
_MIN_WRITE_S = 5.0
_SLOW_BYTES_PER_S = 10_000


class RosterEntry:
    """A connection's place in the roster. ``since`` is when its state last changed."""

    __slots__ = ("_n_read_before", "channel", "since", "state", "thread")

    def __init__(self, channel: Channel, thread: threading.Thread) -> None:
        self.channel = channel
        self.thread = thread
        self.enter("idle")

    def enter(self, state: State) -> None:
        self.state: State = state
        self.since = time.monotonic()
        self._n_read_before = self.channel.n_read

    def rank(self, now: float) -> tuple[int, float, float] | None:
        """The place with the lowest rank is evicted first; None: this place cannot be evicted.

        Evicting a lingering connection loses nothing but a polite end. Of clients that send, the slowest is the most
        likely never to finish. A running request is evicted only if its client hardly takes the reply.
        """
        age_s = now - self.since
        if self.state == "lingering":
            return 0, 0.0, self.since
        if self.state == "running":
            pace = self.channel.write_pace(now, _MIN_WRITE_S)
            return None if pace is None or pace >= _SLOW_BYTES_PER_S else (2, pace, self.since)
        if age_s < _MIN_WAIT_S:
            return None
        return 1, (self.channel.n_read - self._n_read_before) / max(age_s, 0.001), self.since


class Roster:
    def __init__(self, max_connections: int) -> None:
        self._max_connections = max_connections
        self._changed = threading.Condition()
        self._places: dict[Channel, RosterEntry] = {}
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

    def enter(self, channel: Channel, thread: threading.Thread) -> bool:
        """False when all places are taken by connections that must stay; otherwise another one may be evicted."""
        with self._changed:
            if len(self._places) >= self._max_connections and not self._evict():
                return False
            self._leaving = {leaving for leaving in self._leaving if leaving.is_alive()}
            self._places[channel] = RosterEntry(channel, thread)
            return True

    def leave(self, channel: Channel) -> None:
        with self._changed:
            if place := self._places.pop(channel, None):
                self._leaving.add(place.thread)

    def rest(self, channel: Channel) -> bool:
        """The connection has had a reply and waits for its next request; False when it should close instead."""
        with self._changed:
            if channel not in self._places or self._draining:
                return False
            self._places[channel].enter("idle")
            return True

    def stage(self, channel: Channel, state: State) -> None:
        """Sets what the connection waits for from now on."""
        with self._changed:
            if place := self._places.get(channel):
                place.enter(state)

    def begin(self, channel: Channel) -> None:
        """A request's head is complete; a drain waits for the request until ``end``."""
        with self._changed:
            self._n_running += 1
        self.stage(channel, "running")

    def end(self) -> None:
        with self._changed:
            self._n_running -= 1
            self._changed.notify_all()

    def drain(self, timeout_s: float) -> bool:
        """Refuses new requests from now on, and waits for the running ones."""
        with self._changed:
            self._draining = True
            for place in self._places.values():
                if place.state == "idle":
                    hang_up(place.channel.sock)
            return self._changed.wait_for(lambda: self._n_running == 0, timeout_s)

    def hang_up_all(self) -> None:
        with self._changed:
            self._draining = True
            for place in self._places.values():
                hang_up(place.channel.sock)

    def join(self, timeout_s: float) -> bool:
        """Waits for the threads of all connections, including threads that have left and are about to end."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            threads = {place.thread for place in self._places.values()} | self._leaving
        running = [thread for thread in threads if thread.is_alive() and thread is not threading.current_thread()]
        for thread in running:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in running)

    def evict(self) -> bool:
        """Frees a place by ending the connection with the lowest rank, if any may be ended."""
        with self._changed:
            return self._evict()

    def _evict(self) -> bool:
        now = time.monotonic()
        ranked = [(rank, place) for place in self._places.values() if (rank := place.rank(now)) is not None]
        if not ranked:
            return False
        _, place = min(ranked, key=lambda entry: entry[0])
        place.channel.evict()
        del self._places[place.channel]
        self._leaving.add(place.thread)
        return True
