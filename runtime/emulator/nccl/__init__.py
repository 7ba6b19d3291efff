"""An emulated NCCL: collectives of emulated GPUs in several processes, each compared among all ranks."""
