"""The checkers of order: between the warps of a launch, and between streams."""
