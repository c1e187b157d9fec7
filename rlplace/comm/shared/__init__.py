"""The way between processes of one node: state and data in shared memory, wake-ups through sockets, no server."""
