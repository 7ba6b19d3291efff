"""Clients' pictures: found in messages, fetched if allowed, decoded in separate processes."""
