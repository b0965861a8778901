"""All that must hold before a release is uploaded: `make release-check`."""
