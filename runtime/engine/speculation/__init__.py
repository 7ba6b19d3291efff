"""Speculative decoding, which leaves outputs unchanged: drafters, and the choice of the draft length.

A step computes draft tokens after a sequence's last token and samples at each of them as usual. A sample depends on
seed, choice and position alone, so the samples that equal their draft tokens, and the one after them, are those that
plain decoding gives (docs/speculation.md)."""
