"""Everything that the library needs from Ray, behind one door.

    session      connects this process to a cluster, or starts a local one on loopback
    cluster      the nodes that are alive and the CPUs that are free
    actors       starts, finds, calls and ends named actors
    workers      a group of Ray Train workers, from its settings to its end
    rendezvous   how the workers of one machine find each other
    gauges       numbers that Ray exports to Prometheus
    switches     environment variables that undo Ray's protection
    private      every touch of Ray's private parts

The rest of the library imports these modules instead of `ray`. A few modules are Ray code
themselves (a Ray Data pipeline, a Serve deployment, a Tune trainable) and import Ray's public
interface; tests/repo/test_layering.py lists them with the reason.
"""
