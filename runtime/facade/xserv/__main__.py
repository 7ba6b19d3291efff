"""``python -m xserv``: the command ``xserv``."""

from xserv.command import main

main()
