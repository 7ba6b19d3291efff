"""SentencePiece's parts that BPE does not have: the Unigram model, and tables that replace characters."""
