"""Barriers, mbarriers, clusters, and the control flow of a warp."""
