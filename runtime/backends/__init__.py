"""What stands behind `runtime.ops`: the same operations on each kind of device, with their checks."""
