"""The rules and the dashboard of examples/monitoring, on a real Prometheus that scrapes a real worker."""
