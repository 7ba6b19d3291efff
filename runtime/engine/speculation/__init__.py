"""Speculative decoding that changes nothing but the time: who proposes tokens, and how many are tried.

A step computes proposals behind a sequence's last token and draws at every one of them as usual. A draw depends on
seed, choice and position alone, so the draws that equal their proposals, and the one behind them, are those that would
have come without (docs/speculation.md)."""
