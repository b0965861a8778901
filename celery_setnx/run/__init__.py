"""A call in a worker: it acquires its lock, runs, or waits."""
