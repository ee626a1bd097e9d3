"""Clusters: the programs that tests start are no tests."""

collect_ignore_glob = ["programs/*"]
