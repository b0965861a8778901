"""Makes no table: only the permissions."""
