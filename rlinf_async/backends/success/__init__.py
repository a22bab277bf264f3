"""A classifier of success: whether what an environment shows is the task solved, learnt from
recorded episodes that say whether they have succeeded.

::

    classifier.py  its folder, and what it says of observations. No torch: env workers ask it
    training.py    learns it, and measures it on episodes that it has not learnt from
"""
