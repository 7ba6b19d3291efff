"""PTX text → LLVM IR → machine code; the registry of what each opcode becomes, and of the compiled operations."""
