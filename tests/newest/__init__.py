"""A real run of newest wins, and of debounce: publishers and workers that are killed, and what must hold."""
