"""Names in shared memory: who takes part in a channel, and its keys. All under the channel's lock."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator

from rlplace.comm.channel import ChannelSpec
from rlplace.comm.shared import limits
from rlplace.comm.shared.layout import (
    K_BUCKET,
    K_DEPTH,
    K_GETTERS,
    K_LENGTH,
    K_NAME,
    K_NEXT,
    K_PUTTERS,
    K_RESERVED,
    K_SERIAL,
    K_WEIGHT,
    KEY_HAND,
    KEY_SERIALS,
    KEY_WORDS,
    KEYS_USED,
    MAX_NAME_BYTES,
    P_LEFT,
    P_LENGTH,
    P_NAME,
    P_PROCESS,
    PARTICIPANT_WORDS,
    PARTICIPANTS,
)
from rlplace.comm.shared.memory import ChannelMemory

_KNOWN_KEYS = 4096  # that a process remembers
_SOON = 8  # records looked at before an unused one is taken


class Participants:
    """The names under which processes use the channel; a name in two processes is two participants."""

    def __init__(self, memory: ChannelMemory, process: int) -> None:
        self._memory = memory
        self._words = memory.words
        self._first = memory.layout.participants
        self._process = process
        self._mine: dict[str, int] = {}
        self._names: dict[int, str] = {}  # what was read so far: records are only added
        self._by_name: dict[str, list[int]] = {}  # the same

    def of(self, name: str) -> int:
        """This process' participant of that name."""
        mine = self._mine.get(name)
        if mine is None:
            words = self._words
            here = (p for p in self.named(name) if words[p + P_PROCESS] == self._process)
            mine = self._mine[name] = next(here, 0) or self._add(name)
        return mine

    def all(self) -> dict[int, str]:
        """Every participant and its name, in the order in which they came."""
        words, first = self._words, self._first
        for number in range(len(self._names), words[PARTICIPANTS]):
            participant = first + number * PARTICIPANT_WORDS
            at = (participant + P_NAME) * 8
            text = self._memory.data[at : at + words[participant + P_LENGTH]]
            name = self._names[participant] = str(text, "utf-8", "surrogatepass")
            self._by_name.setdefault(name, []).append(participant)
        return self._names

    def name(self, participant: int) -> str:
        return self.all()[participant]

    def named(self, name: str) -> list[int]:
        """The participants of that name in all processes."""
        self.all()
        return self._by_name.get(name, [])

    def names_of(self, process: int) -> str:
        """Who a process is, for people."""
        return ", ".join(name for p, name in self.all().items() if self._words[p + P_PROCESS] == process)

    def _add(self, name: str) -> int:
        words, spec = self._words, self._memory.spec
        if words[PARTICIPANTS] == spec.participants:
            raise limits.crowded(spec, name, "names")
        encoded = _encode(spec, name, name)
        left = any(words[p + P_LEFT] for p in self.named(name))
        participant = self._first + words[PARTICIPANTS] * PARTICIPANT_WORDS
        words[participant + P_PROCESS] = self._process
        words[participant + P_LENGTH] = len(encoded)
        words[participant + P_LEFT] = left
        at = (participant + P_NAME) * 8
        self._memory.data[at : at + len(encoded)] = encoded
        words[PARTICIPANTS] += 1
        return participant


class Keys:
    """A hash table of the keys in use. A key that holds nothing and nobody gives its record to the next new one."""

    def __init__(self, memory: ChannelMemory) -> None:
        self._memory = memory
        self._words = memory.words
        self._first = memory.layout.keys
        self._known: dict[str, tuple[int, int]] = {}  # record and its serial

    def of(self, name: str, owner: str) -> int:
        """The record of the key; a new one where there is none."""
        known = self._known.get(name)
        if known is not None and self._words[known[0] + K_SERIAL] == known[1]:
            return known[0]
        key = self._find_or_add(_encode(self._memory.spec, owner, name))
        if len(self._known) >= _KNOWN_KEYS:
            self._known.clear()
        self._known[name] = key, self._words[key + K_SERIAL]
        return key

    def all(self) -> Iterator[int]:
        return iter(range(self._first, self._first + self._words[KEYS_USED] * KEY_WORDS, KEY_WORDS))

    def name(self, key: int) -> str:
        return str(self._text(key), "utf-8", "surrogatepass")

    def _text(self, key: int) -> memoryview:
        at = (key + K_NAME) * 8
        return self._memory.data[at : at + self._words[key + K_LENGTH]]

    def _find_or_add(self, encoded: bytes) -> int:
        words = self._words
        bucket = self._memory.layout.buckets + zlib.crc32(encoded) % self._memory.layout.bucket_count
        key = words[bucket]
        while key:
            if self._text(key) == encoded:
                return key
            key = words[key + K_NEXT]
        key = self._idle()
        words[KEY_SERIALS] += 1
        words[key + K_SERIAL] = words[KEY_SERIALS]
        words[key + K_LENGTH] = len(encoded)
        at = (key + K_NAME) * 8
        self._memory.data[at : at + len(encoded)] = encoded
        self._memory.reals[key + K_WEIGHT] = 0.0
        words[key + K_BUCKET] = bucket
        words[key + K_NEXT] = words[bucket]
        words[bucket] = key
        return key

    def _idle(self) -> int:
        """A record that nobody needs, out of its bucket. Old keys go first, as long as one is found soon."""
        words = self._words
        used, key = words[KEYS_USED], words[KEY_HAND] or self._first
        for tries in itertools.count():
            if tries >= min(used, _SOON) and used < self._memory.layout.key_count:
                words[KEYS_USED] += 1
                return self._first + used * KEY_WORDS
            following = key + KEY_WORDS
            words[KEY_HAND] = following if following < self._first + used * KEY_WORDS else self._first
            if not any(words[key + count] for count in (K_DEPTH, K_GETTERS, K_PUTTERS, K_RESERVED)):
                break
            key = words[KEY_HAND]
        self._unlink(key)
        return key

    def _unlink(self, key: int) -> None:
        words = self._words
        link = words[key + K_BUCKET]
        while words[link] != key:
            link = words[link] + K_NEXT
        words[link] = words[key + K_NEXT]


def _encode(spec: ChannelSpec, owner: str, name: str) -> bytes:
    encoded = name.encode("utf-8", "surrogatepass")
    if len(encoded) > MAX_NAME_BYTES:
        raise limits.name_too_long(spec, owner, name, MAX_NAME_BYTES)
    return encoded
