"""The project's own code in a simulated world: threads, clocks, processes and a network that a seed decides.

`_world` has the scheduler, `_primitives` what real code gets instead of `threading`, `queue` and `time`,
`_network` the messages, `_runner` runs many schedules, shrinks those that fail and prints them. A protocol
is a function of a `World`. docs/simulation.md describes all of it.
"""
