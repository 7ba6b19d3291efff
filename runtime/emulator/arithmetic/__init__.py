"""Instructions that only compute: on integers, bits, floats, and between the lanes of a warp."""
