"""Programs that share no code with the package: written from docs/protocol.md."""
