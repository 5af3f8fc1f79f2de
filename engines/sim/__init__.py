"""The simulated engine: timing, cache and tokens of a server without a GPU, as a process or inside a simulation."""
