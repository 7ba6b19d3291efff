"""The places whose memory models take: the host, and each GPU by its name ("cuda:0")."""

HOST = "cpu"
"""The place of models on processors and emulated devices."""
