"""PTX text → LLVM IR → machine code; the registries of opcodes' translations and of the compiled operations."""
