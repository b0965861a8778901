"""The soak: raw lock processes under kill -9, stops, cuts and flushes, and a checker of their history."""
