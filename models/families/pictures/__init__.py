"""Families that read pictures: a tower beside a decoder."""
