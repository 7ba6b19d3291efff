"""The emulated GPU, being built: so far `ptx.py`, which parses PTX text. Nothing executes it yet."""
