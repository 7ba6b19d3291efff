"""The commands of `xserv bench`: their flags, and their reports on stdout; `program` combines them."""
