"""Locks on Sentinels, a cluster, behind TLS, under an ACL. A suite of its own: `pytest tests/topologies`."""
