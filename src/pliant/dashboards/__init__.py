"""Dashboards for Grafana and rules for Prometheus, as data; `pliant dashboards` writes them as files."""
