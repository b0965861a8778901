"""A model of the lock in pure Python: explored exhaustively here, compared with the scripts elsewhere."""
