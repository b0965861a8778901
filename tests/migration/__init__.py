"""The old lock and ours side by side on one Redis, as the migration pages of docs/ say: an own invocation."""
