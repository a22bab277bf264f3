"""What a run shows while it goes on, and the files that it leaves.

::

    run_folder      where all of it is kept             files           written whole or not at all
    run_lock        which process keeps it              status          the same seen by another one
    metrics         rows of numbers: CSV and sinks      trace           spans of workers, in a file
    progress        the live view                       pictures        timeline, learning curve
    summary         the result of the run               video           the policy in its env
    samples         what the model said, and what it got for it

Workers trace and never draw: names are imported from their own modules, so that nothing that draws
comes with them.
"""
