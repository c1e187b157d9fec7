"""Names in the table of a channel: its participants and its keys. Records are only added; all under the lock."""

from __future__ import annotations

from typing import Protocol

from rlplace.comm import channel_errors
from rlplace.comm.channel import ChannelSpec
from rlplace.comm.table import (
    K_LENGTH,
    K_NAME,
    KEY_WORDS,
    KEYS,
    MAX_NAME_BYTES,
    P_LENGTH,
    P_NAME,
    P_PROCESS,
    PARTICIPANT_WORDS,
    PARTICIPANTS,
    Layout,
)


class Memory(Protocol):
    """The table of one channel: the same bytes as integers, as reals and as bytes."""

    spec: ChannelSpec
    layout: Layout
    words: memoryview
    reals: memoryview[float]
    data: memoryview


class Names:
    """What this process has read of the names so far, and its own."""

    def __init__(self, memory: Memory, process: int) -> None:
        self.spec, self.memory, self.words = memory.spec, memory, memory.words
        self._process = process
        self._mine: dict[str, int] = {}  # participants of this process, by name
        self._keys: dict[str, int] = {}  # by name
        self._names: dict[int, str] = {}  # of participants and keys

    def participant(self, name: str) -> int:
        """This process' participant of that name; a name in two processes is two participants."""
        mine = self._mine.get(name)
        if mine is None:
            words, layout = self.words, self.memory.layout
            mine = next((p for p, n in self.participants().items() if n == name and self._is_mine(p)), 0)
            if not mine:
                if words[PARTICIPANTS] == self.spec.participants:
                    raise channel_errors.crowded(self.spec, name, "names")
                mine = layout.participants + words[PARTICIPANTS] * PARTICIPANT_WORDS
                self._write_name(mine + P_LENGTH, mine + P_NAME, name, name)
                words[mine + P_PROCESS] = self._process
                words[PARTICIPANTS] += 1
            self._mine[name] = mine
        return mine

    def participants(self) -> dict[int, str]:
        """Every participant and its name, in the order in which they came."""
        return self._read_names(self.memory.layout.participants, PARTICIPANTS, PARTICIPANT_WORDS, P_LENGTH, P_NAME)

    def of(self, process: int) -> str:
        """The names of a process, for error texts."""
        return ", ".join(name for p, name in self.participants().items() if self.words[p + P_PROCESS] == process)

    def _is_mine(self, participant: int) -> bool:
        return bool(self.words[participant + P_PROCESS] == self._process)

    def key(self, name: str, owner: str) -> int:
        """The record of a key; a new one for a key that was not used before."""
        known = self._keys.get(name)
        if known is not None:
            return known
        words, layout = self.words, self.memory.layout
        self._keys.update((known, key) for key, known in self.keys().items())
        if name not in self._keys:
            if words[KEYS] == layout.key_count:
                raise channel_errors.crowded(self.spec, owner, "keys")
            key = layout.keys + words[KEYS] * KEY_WORDS
            self._write_name(key + K_LENGTH, key + K_NAME, name, owner)
            words[KEYS] += 1
            self._keys[name] = key
        return self._keys[name]

    def keys(self) -> dict[int, str]:
        return self._read_names(self.memory.layout.keys, KEYS, KEY_WORDS, K_LENGTH, K_NAME)

    def _read_names(self, first: int, used: int, size: int, length: int, text: int) -> dict[int, str]:
        names = self._names
        found = {}
        for record in range(first, first + self.words[used] * size, size):
            if record not in names:
                at = (record + text) * 8
                names[record] = str(self.memory.data[at : at + self.words[record + length]], "utf-8", "surrogatepass")
            found[record] = names[record]
        return found

    def _write_name(self, length: int, text: int, name: str, owner: str) -> None:
        encoded = name.encode("utf-8", "surrogatepass")
        if len(encoded) > MAX_NAME_BYTES:
            raise channel_errors.name_too_long(self.spec, owner, name, MAX_NAME_BYTES)
        self.words[length] = len(encoded)
        self.memory.data[text * 8 : text * 8 + len(encoded)] = encoded
