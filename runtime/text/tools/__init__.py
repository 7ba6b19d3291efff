"""Tool calls in the notation of each family of models. `table.py` lists the notations, each with its reader and the
form of a forced call, and parses any of them from a stream; `grammar.py` makes the grammar that forces one,
`tool_prompt.py` describes tools to models whose template does not.
"""
