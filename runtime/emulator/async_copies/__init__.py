"""Copies that land later: cp.async, bulk copies and TMA, with their queues, tensor maps and proxies."""
