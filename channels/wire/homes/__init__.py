"""Queues that live with a worker, and not with the process that owns the cluster.

::

    maker (owns the cluster)      home (a worker)               user (another worker)
      create  ------------------> Queue
      open an end, as -5 -------> end -5 of the maker
      EndRef(-5, home) --------------------- a call ----------> adopt -5
                                  end 12, the same  <---------- puts, gets, closes

Invariants:

* an end is open as soon as the home is told of it, by whoever made the channel: its user only takes
  it over. What the maker opens in one turn of its loop is told in one message, so a channel does
  not seem to have ended while some of these ends are on their way;
* closed by the maker or by its user, it is closed; the loss of the user's connection does not close
  it, because the user's next life adopts it again;
* an end that its user asks for before the maker has told of it is waited for;
* with the home everything is lost that is queued there: every use raises `HomeLost`.
"""
