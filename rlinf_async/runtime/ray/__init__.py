"""Workers as actors of Ray, on many hosts. Only this folder imports Ray.

::

    session.py       this process's connection to Ray: its hosts, their devices, calls of its API
    reservation.py   placement groups: which bundle holds which device
    backend.py       a cluster's backend: the actor of one rank, its start, its end
    output.py        what actors print, and what is done when a process has ended
    training/        a training group as users of slime know it: plain actors, no cluster of ours
"""
