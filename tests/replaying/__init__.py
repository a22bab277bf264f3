"""Tests of replays: one worker of a recorded run, played again alone."""
