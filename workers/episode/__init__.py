"""Episode workers: they run the coroutines in which a language model acts in several turns."""

from rlinf_async.workers.episode.config import EpisodeConfig
from rlinf_async.workers.episode.turns import EpisodeReport
from rlinf_async.workers.episode.worker import EpisodeWorker

__all__ = ["EpisodeConfig", "EpisodeReport", "EpisodeWorker"]
