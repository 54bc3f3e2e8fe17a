"""Pools of worker processes: a function is called on each of a list of items, and results come back in order.

>>> from graphwright import workers
>>> with workers.Processes(2, timeout=60) as pool:
...     results = pool.map(function, items, common=data)
"""

from __future__ import annotations

from graphwright.workers.choice import Workers, pool_of
from graphwright.workers.cluster import RayPool
from graphwright.workers.messages import WorkerError
from graphwright.workers.pool import Failed, Pool
from graphwright.workers.processes import Processes

__all__ = ["Failed", "Pool", "Processes", "RayPool", "WorkerError", "Workers", "pool_of"]
