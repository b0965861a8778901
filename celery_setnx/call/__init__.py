"""A call on its way: published, deduplicated, sent back, woken."""
