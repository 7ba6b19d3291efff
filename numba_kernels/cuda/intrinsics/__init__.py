"""PTX instructions as Numba intrinsics, one file a family of instructions; `asm.instruction` makes them all."""
