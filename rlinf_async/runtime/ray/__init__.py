"""Workers as actors of Ray, on many hosts. Only this folder imports Ray.

::

    session.py       this process's connection to Ray: its hosts, and calls of its API
    hosts.py         hosts by name, their devices, and where a rank without devices goes
    reservation.py   placement groups: which bundle holds which device
    rank_process.py  the actor: one rank's process
    reaper.py        what is done when a process has ended, also where it was killed
    call_thread.py   the thread in which Ray's API is called
    process.py       the same from here: start, kill, and how it ended
    output.py        what the actors print
    backend.py       all of it, as a cluster's backend
    training/        a training group as users of slime know it: plain actors, no cluster of ours
"""
