"""The snippets of examples/deploy and docker-compose.yml, read by their own tools."""
