"""The functions of `cuda.bindings.driver` on emulated devices, and their queues of work."""
