"""Tool calls: how each family of models writes them. `table.py` lists the notations, each with what reads it out of an
answer and what a forced call has to look like; `parser.py` reads any of them from a stream, `grammar.py` makes the
grammar that forces one, `told.py` tells tools to models whose template does not.
"""
