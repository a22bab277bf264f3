"""The page of a run: ``rlinf-async view``, a server on loopback and one static page.

::

    runs       which folders are shown, and what can be said of each without an error of one
               hiding the others
    table      metrics.csv, read on from where it was read to
    spans      trace.json.gz as arrays, made by a process of its own
    kept       the list of samples, and a sample with its tokens
    graph      workers and channels, of a live run and of one that has ended
    guard      who may ask: own host, own origin, token
    server     what is asked, by path
    static/    the page: plain HTML, CSS and JavaScript, with nothing from elsewhere

Only the files of run folders are read; nothing is written, and no run is asked.
"""
