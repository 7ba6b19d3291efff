"""The commands behind `xserv bench`: their flags, and their reports on stdout; `program` puts them together."""
