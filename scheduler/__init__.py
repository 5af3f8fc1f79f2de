"""The brain of rolloutd: a synchronous machine, events in, actions out.

Nothing in this package does I/O, reads a clock or rolls dice of its own: time is an argument of every call and randomness
is a seeded `random.Random` handed in. `machine.Scheduler` is the door; `docs/core.md` is the tour.
"""
