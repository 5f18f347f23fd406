"""kube-proxy's userspace mode on asyncio and uvloop. The public Python API is what `__all__` names."""

__version__ = "0.1.0"
