"""The functions of `cuda.bindings.driver` on devices made up here, and the queues of work behind them."""
