"""An emulated GPU: it executes PTX text on the CPU, exactly, and checks every access (docs/architecture.md)."""
